"""Paths on `s3://` and `gs://`, in addition to local paths."""

from manualpar.system.storage.array_store import CONTEXT, key_value_store
from manualpar.system.storage.bucket_path import (
    AnyPath,
    BucketError,
    BucketPath,
    ContentError,
    GivenPath,
    Version,
    as_path,
    open_for_reading,
    request,
)
from manualpar.system.storage.copies import (
    copied_files,
    copied_folder,
    local_path,
    user_cache,
    user_path,
    writing_cache,
)
from manualpar.system.storage.drafts import PREFIX as LOCK_PREFIX
from manualpar.system.storage.drafts import (
    FolderError,
    HeldError,
    draft_of,
    hold,
    hold_file,
    new_number,
    path_of_draft,
    publish,
    sync,
    waiting_for,
    writing,
)
from manualpar.system.storage.mirror import mirrored

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
    "path_of_draft",
    "publish",
    "request",
    "sync",
    "user_cache",
    "user_path",
    "waiting_for",
    "writing",
    "writing_cache",
]
