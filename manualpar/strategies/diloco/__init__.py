"""DiLoCo: replicas train by themselves for some steps, then take an outer step together."""
