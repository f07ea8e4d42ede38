"""Generates answers to prompts with a run's newest checkpoint, or with a Hugging Face model.

python -m experiments.generate --workdir=<folder> --prompt="Once upon a time" [--temperature=0.8]
                               [--top_k=<number>] [--top_p=<probability>] [--max_tokens=<number>]
                               [--stop=<text> ...] [--seed=<number>] [--chat]
                               [--mesh=data=4,model=2] [--devices=<number>]
python -m experiments.generate --hf=<directory> --prompts=<lines, .jsonl or -> [--output=<.jsonl>]

The answer to one prompt is streamed to the terminal. Several prompts are answered in batches, as
JSONL.
"""

import sys

from manualpar.commands.generate_command import generate_command

if __name__ == "__main__":
    sys.exit(generate_command(sys.argv[1:], __doc__ or ""))
