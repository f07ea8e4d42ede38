"""Paths on `s3://` and `gs://`, in addition to local paths."""

from manualpar.system.storage.array_store import CONTEXT, key_value_store
from manualpar.system.storage.bucket_path import (
    AnyPath,
    BucketPath,
    GivenPath,
    as_path,
    open_for_reading,
)
from manualpar.system.storage.copies import (
    copied_files,
    copied_folder,
    local_path,
    path_flag,
    user_cache,
    user_path,
    writing_cache,
)
from manualpar.system.storage.drafts import (
    FolderError,
    draft_of,
    new_number,
    path_of_draft,
    publish,
    sync,
    writing,
)
from manualpar.system.storage.file_lock import hold_file
from manualpar.system.storage.lease import PREFIX as LOCK_PREFIX
from manualpar.system.storage.lease import HeldError, hold
from manualpar.system.storage.mirror import mirrored
from manualpar.system.storage.requests import BucketError, ContentError, request
from manualpar.system.storage.services import Version

__all__ = [
    "CONTEXT",
    "LOCK_PREFIX",
    "AnyPath",
    "BucketError",
    "BucketPath",
    "ContentError",
    "FolderError",
    "GivenPath",
    "HeldError",
    "Version",
    "as_path",
    "copied_files",
    "copied_folder",
    "draft_of",
    "hold",
    "hold_file",
    "key_value_store",
    "local_path",
    "mirrored",
    "new_number",
    "open_for_reading",
    "path_flag",
    "path_of_draft",
    "publish",
    "request",
    "sync",
    "user_cache",
    "user_path",
    "writing",
    "writing_cache",
]
