"""Files and buckets, clusters of processes, and the tables and pictures of reports."""
