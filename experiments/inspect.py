"""Shows the communication, memory and FLOPs of each config's step, before any step runs.

python -m experiments.inspect [--config=configs/fsdp.py] [--config=configs/dp.py ...]
                              [--config.<field>=<value> ...]
                              [--devices=<number>] [--compile | --nocompile]
                              [--output=<folder>] [--against=<ledger.json or folder>]
                              [--budget=configs/budgets.toml [--write_budget]]
                              [--memory=<16GiB or v5p>] [--schedule]

Nothing is trained. With --nocompile nothing is compiled either, so that --devices=4096 needs no
devices. Exit codes: 0; 1 if a budget is broken; 2 for a mistake on the command line, in a config or
in a budget.
"""

from pathlib import Path

from absl import app

from manualpar.commands.command_line import flags_parser
from manualpar.commands.inspect_command import inspect_command, inspect_syntax
from manualpar.planner.hardware import chip_named

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "fsdp.py"


def chip_memory(name: str) -> int:
    """Returns the bytes of memory that a program can use on a chip with a name such as `v5p`."""
    return chip_named(name).hbm_bytes


if __name__ == "__main__":
    parser = flags_parser(__doc__ or "", DEFAULT_CONFIG, inspect_syntax(chip_memory))
    app.run(inspect_command, flags_parser=parser)
