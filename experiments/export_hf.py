"""Exports the model of a workdir; the same as `manualpar export`."""

import sys

from manualpar.commands.import_export import export_main

if __name__ == "__main__":
    sys.exit(export_main(["python -m experiments.export_hf", *sys.argv[1:]]))
