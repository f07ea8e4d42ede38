"""Trains the model: python train.py --training.num_steps=500 --mesh=data=4,model=2."""

import sys
from pathlib import Path

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(
        sys.argv,
        about="Trains the model of this project.",
        default_config=str(Path(__file__).with_name("config.py")),
    )
