"""Files and buckets, clusters of processes, and tables and pictures."""
