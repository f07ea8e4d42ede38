"""Trains a classifier with data parallelism: every device stores the full model.

python -m experiments.dp [--config=configs/dp.py] [--config.<field>=<value> ...]
                         [--workdir=<folder>] [--devices=<number>]
"""

from pathlib import Path

from absl import app

from manualpar.commands.command_line import flags_parser
from manualpar.commands.train_command import run_command

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "dp.py"


if __name__ == "__main__":
    app.run(run_command, flags_parser=flags_parser(__doc__ or "", DEFAULT_CONFIG))
