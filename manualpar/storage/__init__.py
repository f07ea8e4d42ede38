"""Paths on `s3://` and `gs://`, beside local ones."""

from manualpar.storage.bucket_path import AnyPath, BucketPath, as_path, open_for_reading
from manualpar.storage.requests import BucketError

__all__ = ["AnyPath", "BucketError", "BucketPath", "as_path", "open_for_reading"]
