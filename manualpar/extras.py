"""Optional dependencies, which an extra brings: `pip install 'manualpar[train]'`.

`import manualpar` needs none of them. A module that needs some calls `require` before it imports
them, so that the error for a missing one is a sentence that says how to install it.
"""

import importlib.util

# The extra that brings a module, and the name of its distribution.
MODULES = {
    "grain": ("train", "grain"),
    "ml_collections": ("train", "ml-collections"),
    "orbax": ("train", "orbax-checkpoint"),
    "rich": ("train", "rich"),
    "tensorboardX": ("train", "tensorboardX"),
    "sklearn": ("examples", "scikit-learn"),
    "tokenizers": ("examples", "tokenizers"),
    "safetensors": ("pretrained", "safetensors"),
    "array_record": ("data", "array-record"),
    "jinja2": ("data", "jinja2"),
    "pyarrow": ("data", "pyarrow"),
    "gcsfs": ("buckets", "gcsfs"),
    "s3fs": ("buckets", "s3fs"),
    "lm_eval": ("evaluate", "lm-eval"),
    "nbformat": ("docs", "nbformat"),
    "matplotlib": ("plots", "matplotlib"),
}
TRAIN = tuple(module for module, (extra, _) in MODULES.items() if extra == "train")


class MissingExtraError(ImportError, ValueError):
    """A package is not installed; the message names the extra that brings it.

    It is a `ValueError` as well because commands show those as one sentence.
    """


def require(user: str, *modules: str) -> None:
    """Checks that optional modules are installed, without importing them.

    Args:
      user: The subject of the sentence, which needs the modules.
      *modules: Names from `MODULES`, all of one extra.

    Raises:
      MissingExtraError: One is not installed.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        packages = " and ".join(MODULES[module][1] for module in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{user} needs {packages}, which {verb} not installed: "
            f"pip install 'manualpar[{MODULES[missing[0]][0]}]'"
        )
