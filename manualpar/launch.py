"""`python -m manualpar.launch`, see `manualpar.system.cluster.launch`."""

import sys

from manualpar.system.cluster.launch import main

if __name__ == "__main__":
    sys.exit(main(["python -m manualpar.launch", *sys.argv[1:]]))
