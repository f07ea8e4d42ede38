"""Lists the configs that the package brings with it, or prints one of them.

manualpar configs                      # the names, each with its first sentence
manualpar configs fsdp_lm > mine.py    # the file of a config, to change it
"""

import sys
from collections.abc import Sequence

from manualpar.errors import USAGE_EXIT_CODE, UsageError, print_error
from manualpar.system.reports.flags import Flag, parse_flags
from manualpar.training.config import find_config, first_sentence, named_configs


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`; returns the exit code."""
    usage = (__doc__ or "").replace("manualpar configs", "{program}")
    name = Flag("The config to print.", is_argument=True)
    flags = parse_flags(argv, usage, {"name": name})
    try:
        if flags.name:
            sys.stdout.write(find_config(flags.name).read_text(encoding="utf-8"))
            return 0
    except (UsageError, OSError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    print("\n".join(f"{name:20s} {first_sentence(path)}" for name, path in named_configs()))
    return 0
