"""Loads the weights of public models from `.safetensors` files, and exports models to such files.

`safetensors` is imported only when files are read or written. The extra `pretrained` installs it.
"""

from manualpar.models.pretrained.architecture import Architecture, read_architecture
from manualpar.models.pretrained.export import export_hf
from manualpar.models.pretrained.load import Loaded, load, load_hf
from manualpar.models.pretrained.peft_files import export_peft, load_peft, lora_of_peft
from manualpar.models.pretrained.tensor_names import Rule

__all__ = [
    "Architecture",
    "Loaded",
    "Rule",
    "export_hf",
    "export_peft",
    "load",
    "load_hf",
    "load_peft",
    "lora_of_peft",
    "read_architecture",
]
