"""Lists the configs that the package brings with it, or prints one of them.

manualpar configs                      # the names, each with its first sentence
manualpar configs fsdp_lm > mine.py    # the file of a config, to change it
"""

import sys
from collections.abc import Sequence

from manualpar.errors import USAGE_EXIT_CODE, UsageError, print_error
from manualpar.system.reports.help_text import OneSentenceParser
from manualpar.training.config import find_config, first_sentence, named_configs


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`; returns the exit code."""
    parser = OneSentenceParser(
        prog=argv[0], description=(__doc__ or "").replace("manualpar configs", "{program}")
    )
    parser.add_argument("name", nargs="?", help="The config to print.")
    flags = parser.parse_args(list(argv[1:]))
    try:
        if flags.name:
            sys.stdout.write(find_config(flags.name).read_text(encoding="utf-8"))
            return 0
    except (UsageError, OSError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    print("\n".join(f"{name:20s} {first_sentence(path)}" for name, path in named_configs()))
    return 0
