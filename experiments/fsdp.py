"""Trains a classifier with fully sharded data parallelism: every device stores a shard.

python -m experiments.fsdp [--config=configs/fsdp.py] [--config.<field>=<value> ...]
                         [--workdir=<folder>] [--devices=<number>]
"""

from pathlib import Path

from absl import app

from manualpar.commands.command_line import flags_parser
from manualpar.commands.train_command import run_command

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "fsdp.py"


if __name__ == "__main__":
    app.run(run_command, flags_parser=flags_parser(__doc__ or "", DEFAULT_CONFIG))
