"""Evaluates a run's newest checkpoint, or a Hugging Face model, on texts.

python -m experiments.evaluate --workdir=<folder>                      the run's own test split
python -m experiments.evaluate --workdir=<folder> --text=<.txt or .jsonl with "text">
python -m experiments.evaluate --hf=<directory> --completions=<.jsonl with "context", "completion">
                               [--max_length=<tokens seen at once>] [--output=<file>]
                               [--mesh=data=4,model=2] [--devices=<number>] [--batch_size=<rows>]
"""

import sys

from manualpar.commands.evaluate_command import evaluate_command

if __name__ == "__main__":
    sys.exit(evaluate_command(sys.argv[1:], __doc__ or ""))
