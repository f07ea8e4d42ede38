"""Exports the model of a workdir as .safetensors files, with its config and tokenizer.

python -m experiments.export_hf --workdir=<folder> --to=<directory>
                                [--like=<directory it came from> | --family=llama]
                                [--dtype=bfloat16] [--max-shard-bytes=<number>] [--devices=<number>]

If the model was imported, its config, its tokenizer and the dtypes of its tensors are kept.
"""

import sys

from manualpar.commands.import_export import export_command

if __name__ == "__main__":
    sys.exit(export_command(sys.argv))
