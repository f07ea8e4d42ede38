"""Imports a Hugging Face model into a workdir, as a checkpoint from which a training can begin.

python -m experiments.import_hf DIR --workdir=<folder>
                                [--config=configs/fsdp_lm.py] [--config.<field>=<value> ...]
                                [--devices=<number>]

DIR contains config.json, tokenizer.json and .safetensors files. The config defines how the model
will be trained, and on which data. Each process reads only the slices for its devices.
"""

import sys
from pathlib import Path

from absl import app

from manualpar.commands.command_line import flags_parser
from manualpar.commands.import_export import import_command

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "fsdp_lm.py"


def main() -> None:
    """Parses the command line and runs the import."""
    argv = sys.argv
    if len(argv) > 1 and not argv[1].startswith("-"):
        argv = [argv[0], f"--config.model.from_hf={argv[1]}", *argv[2:]]
    app.run(import_command, argv=argv, flags_parser=flags_parser(__doc__ or "", DEFAULT_CONFIG))


if __name__ == "__main__":
    main()
