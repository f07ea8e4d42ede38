"""The rules of the house: imports, the package, its configs, continuous integration."""
