"""DiLoCo: replicas train separately for some steps, then take an outer step together."""
