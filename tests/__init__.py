"""A tree that mirrors the package; `laws`, `refused` and `runs` go across its rooms."""
