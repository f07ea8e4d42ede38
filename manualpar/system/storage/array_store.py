"""Describes a folder in a bucket to tensorstore, as the spec of a key-value store.

The spec never contains credentials. tensorstore reads them where s3fs and gcsfs read them: from
environment variables, or else from credential files or from a service of the machine or container.
"""

import os
from typing import Any

from manualpar.system.storage.bucket_path import BucketError, BucketPath

# tensorstore's own retries of a request. If these fail, `manualpar.system.storage.bucket_path`
# repeats
# the request later, and reports the repetition.
RETRIES = {"max_retries": 3, "initial_delay": "500ms", "max_delay": "4s"}
# The resources that tensorstore uses for requests. Nothing is cached.
CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},
    "gcs_request_retries": RETRIES,
    "s3_request_retries": RETRIES,
}


def key_value_store(folder: BucketPath) -> dict[str, Any]:
    """Returns tensorstore's spec of a key-value store with all objects below a folder."""
    place = {"bucket": folder.bucket, "path": f"{folder.key}/" if folder.key else ""}
    if folder.scheme == "gs":
        if _first("STORAGE_EMULATOR_HOST") and not _first("TENSORSTORE_GCS_HTTP_URL"):
            raise BucketError(
                f"{folder}: STORAGE_EMULATOR_HOST is set, so set TENSORSTORE_GCS_HTTP_URL to the "
                "same server, because arrays are read and written through TensorStore"
            )
        return {"driver": "gcs", **place}
    spec: dict[str, Any] = {"driver": "s3", **place}
    if endpoint := _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        spec["endpoint"] = endpoint
        spec["aws_region"] = _first("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        # Without this entry tensorstore first looks for files, and prints a warning if there are
        # no files.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _first(*names: str) -> str:
    return next(filter(None, map(os.environ.get, names)), "")
