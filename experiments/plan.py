"""Estimates a config's communication, memory and time on devices that are not available here.

python -m experiments.plan [--config=configs/fsdp_lm.py] [--config.<field>=<value> ...]
                           [--topology=v5p:8x8x4] [--compiler=auto|tpu|none] [--search]
                           [--device_mtbf_hours=50000] [--workdir=<folder>]
"""

from pathlib import Path

from absl import app

from manualpar.commands.command_line import flags_parser
from manualpar.commands.plan_command import PLANNING, plan_command

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "fsdp_lm.py"


if __name__ == "__main__":
    app.run(plan_command, flags_parser=flags_parser(__doc__ or "", DEFAULT_CONFIG, PLANNING))
