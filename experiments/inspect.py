"""Shows the communication, memory and FLOPs of configs' steps; the same as `manualpar inspect`."""

import sys

from manualpar.commands.inspect_command import main

if __name__ == "__main__":
    main(["python -m experiments.inspect", *sys.argv[1:]])
