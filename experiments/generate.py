"""Answers prompts with the newest checkpoint of a run, or a model of Hugging Face's.

python -m experiments.generate --workdir=<folder> --prompt="Once upon a time" [--temperature=0.8]
                               [--top_k=<number>] [--top_p=<probability>] [--max_tokens=<number>]
                               [--stop=<text> ...] [--seed=<number>] [--chat]
                               [--mesh=data=4,model=2] [--devices=<number>]
python -m experiments.generate --hf=<directory> --prompts=<lines, .jsonl or -> [--output=<.jsonl>]

One prompt is answered on the terminal, as it comes; several are answered in batches, as JSONL.
"""

import sys

from manualpar.commands.generate_command import generate_command

if __name__ == "__main__":
    sys.exit(generate_command(sys.argv[1:], __doc__ or ""))
