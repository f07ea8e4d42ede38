"""Trains one config under several strategies and modes, and shows side by side what that takes.

python -m experiments.compare [--config=configs/compare.py] [--config.<field>=<value> ...]
                              [--config.pairs="(('fsdp', 'manual'), ('fsdp', 'auto'))"]
                              [--workdir=<folder>] [--devices=<number>]
"""

from pathlib import Path

from absl import app

from manualpar.training.compare import compare_command
from manualpar.training.main import flags_parser

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "compare.py"


def main() -> None:
    """Runs the command line and exits."""
    app.run(compare_command, flags_parser=flags_parser(__doc__ or "", DEFAULT_CONFIG))


if __name__ == "__main__":
    main()
