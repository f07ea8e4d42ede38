"""What a run needs of the machines: files and buckets, processes, tables and pictures."""
