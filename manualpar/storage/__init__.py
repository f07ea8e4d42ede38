"""Paths on `s3://` and `gs://`, beside local ones."""

from manualpar.storage.array_store import CONTEXT, key_value_store
from manualpar.storage.bucket_path import AnyPath, BucketPath, as_path, open_for_reading
from manualpar.storage.requests import BucketError, request

__all__ = [
    "CONTEXT",
    "AnyPath",
    "BucketError",
    "BucketPath",
    "as_path",
    "key_value_store",
    "open_for_reading",
    "request",
]
