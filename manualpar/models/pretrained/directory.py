"""Finds the directory of a model: a path on a disk, or a local copy of a directory in a bucket.

Libraries that read weights and tokenizers need local files. So each machine copies the files from
the bucket to the user's cache folder, a few megabytes at a time. If a file has changed in the
bucket, it is copied again. The copy needs as much disk space as the files, and may be deleted at
any time.
"""

from pathlib import Path

from manualpar.system.storage import BucketPath, GivenPath, copied_folder, user_cache, user_path

CONFIG_FILE = "config.json"
WEIGHTS = (".safetensors",)
# Suffixes of configs, indices, tokenizers and templates.
SMALL_FILES = (".json", ".jinja", ".model", ".txt")


def model_directory(directory: GivenPath, *, weights: bool = True) -> Path:
    """Returns the directory itself, or a copy of a directory in a bucket.

    Args:
      directory: The path of the model.
      weights: Whether to copy the weights too.

    Raises:
      ValueError: There is no model in the bucket, or the bucket cannot be read.
      FolderError: The copy cannot be written.
    """
    path = user_path(directory)
    if not isinstance(path, BucketPath):
        return path
    if not (path / CONFIG_FILE).is_file():
        raise ValueError(
            f"{path} has no {CONFIG_FILE}; expected the directory of a model, as save_pretrained "
            "of transformers writes it."
        )
    suffixes = SMALL_FILES + WEIGHTS if weights else SMALL_FILES

    def keep(name: str) -> bool:
        return "/" not in name and name.endswith(suffixes)

    return copied_folder(path, user_cache(), keep=keep)
