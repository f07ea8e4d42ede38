"""Paths on `s3://` and `gs://`, beside local ones."""

from manualpar.storage.array_store import CONTEXT, key_value_store
from manualpar.storage.bucket_path import AnyPath, BucketPath, as_path, open_for_reading
from manualpar.storage.copies import (
    copied_files,
    copied_folder,
    local_path,
    path_flag,
    user_cache,
    user_path,
)
from manualpar.storage.lease import HeldError, hold
from manualpar.storage.mirror import mirrored
from manualpar.storage.requests import BucketError, ContentError, request
from manualpar.storage.services import Version

__all__ = [
    "CONTEXT",
    "AnyPath",
    "BucketError",
    "BucketPath",
    "ContentError",
    "HeldError",
    "Version",
    "as_path",
    "copied_files",
    "copied_folder",
    "hold",
    "key_value_store",
    "local_path",
    "mirrored",
    "open_for_reading",
    "path_flag",
    "request",
    "user_cache",
    "user_path",
]
