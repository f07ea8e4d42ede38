"""Files on disks and objects in buckets."""
