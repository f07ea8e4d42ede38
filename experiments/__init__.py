"""Who runs it: thin mains from flags to the library."""
