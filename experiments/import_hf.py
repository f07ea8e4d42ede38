"""Imports a Hugging Face model into a workdir; the same as `manualpar import`."""

import sys

from manualpar.commands.import_export import import_main

if __name__ == "__main__":
    import_main(["python -m experiments.import_hf", *sys.argv[1:]])
