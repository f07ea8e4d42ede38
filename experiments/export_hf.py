"""Writes the model in a workdir as .safetensors files, with config and tokenizer.

python -m experiments.export_hf --workdir=<folder> --to=<directory>
                                [--like=<directory it came from> | --family=llama]
                                [--dtype=bfloat16] [--max-shard-bytes=<number>] [--devices=<number>]

A model that was imported keeps its config, its tokenizer and the dtypes of its tensors.
"""

import sys

from manualpar.commands.import_export import export_command

if __name__ == "__main__":
    sys.exit(export_command(sys.argv))
