"""Writes a file with which a scheduler or a cloud runs a command in several processes.

    manualpar launch --template=slurm --nodes=4 --workdir=/shared/runs/lm -- \
        manualpar train fsdp_lm --checkpoint.every_steps=500 > job.sbatch

Without options the file has the defaults of the template. Each file begins with what it needs, and
says which parts of it nobody has run. Read the file before you use it, and edit it.

A template is a file in the folder `templates`. In it, `{{name=default}}` stands for the value of
the option `--name`, and `{{name}}` repeats this value.
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from manualpar.errors import USAGE_EXIT_CODE, UsageError, print_error
from manualpar.system.reports.flags import Flag, parse_flags

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").iterdir())}
DEFAULT_COMMAND = ("manualpar", "train", "fsdp_lm", "--checkpoint.every_steps=500")
HELP = {
    "name": "The name of the job.",
    "nodes": "The number of hosts, with one process each.",
    "gpus-per-node": "The number of GPUs of a host.",
    "tpu": "The type of the TPU slice, such as v5litepod-16.",
    "slices": "The number of TPU slices.",
    "runtime": "The version of the TPU's system image.",
    "image": "The container image, from the repository's Dockerfile.",
    "workdir": "The folder or bucket of the run, the same on all hosts.",
    "restarts": "The most times that the job is started again.",
}
COUNTS = ("nodes", "gpus-per-node", "slices", "restarts")
_PLACE = re.compile(r"\{\{(\w+)(?:=([^{}]*))?\}\}")
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_PLAIN = re.compile(r"[\w@%+=:,./-]+")  # A shell and YAML take such a text as it is.


def main(argv: Sequence[str]) -> int:
    """Prints the file that the command line `argv` describes; returns the exit code."""
    arguments = list(argv[1:])
    at = arguments.index("--") if "--" in arguments else len(arguments)
    usage = (__doc__ or "").replace("manualpar launch", "{program}", 1)
    usage = usage.partition("\n\nA template is")[0]
    options = {name.replace("-", "_"): Flag(text) for name, text in HELP.items()}
    kind = Flag("The kind of the file.", choices=[*FILES], is_required=True)
    flags = vars(parse_flags([*argv[:1], *arguments[:at]], usage, {"template": kind, **options}))
    template = flags.pop("template")
    values = {name: value for name, value in flags.items() if value is not None}
    try:
        text = render(template, arguments[at + 1 :] or DEFAULT_COMMAND, values)
    except UsageError as error:
        print_error(error)
        return USAGE_EXIT_CODE
    print(text, end="")
    return 0


def render(template: str, command: Sequence[str], values: dict[str, str]) -> str:
    """Returns the text of a template.

    Args:
      template: The name of the template, a key of `FILES`.
      command: The command that every host runs, without `--workdir`.
      values: The values of options, by the option's name with underscores; others have the
        template's defaults.
    """
    text = FILES[template].read_text(encoding="utf-8")
    defaults = {name: default for name, default in _PLACE.findall(text) if default}
    for name, value in values.items():
        option = name.replace("_", "-")
        if name not in defaults:
            known = ", ".join(f"--{known.replace('_', '-')}" for known in defaults)
            raise UsageError(f"the template {template} has no --{option}, expected one of {known}.")
        if option in COUNTS and not (value.isascii() and value.isdigit() and int(value) > 0):
            raise UsageError(f"--{option}={value}: expected a positive integer such as 2.")
        if name == "name" and not (_NAME.fullmatch(value) and len(value) <= 40):
            raise UsageError(
                f"--name={value}: expected at most 40 small letters, digits and dashes, such as "
                "train-1."
            )
        if not _PLAIN.fullmatch(value):
            raise UsageError(
                f"--{option}={value!r}: expected no spaces and no characters that are special in a "
                "shell; edit the file instead."
            )
    if any(part == "--workdir" or part.startswith("--workdir=") for part in command):
        raise UsageError("the command has --workdir, expected it before the --.")
    if any("\n" in part for part in command):
        raise UsageError("the command has a line break, expected a command in one line.")
    filled = defaults | values
    whole = [*command, f"--workdir={filled['workdir']}"]
    filled["command"] = shlex.join(command)
    filled["command_list"] = json.dumps(["tini", "--", *whole])
    filled["exec_command"] = shlex.quote(f"exec {shlex.join(whole)}")
    filled["quoted_command"] = shlex.quote(shlex.join([*whole, "--coordinator-address=auto"]))
    return _PLACE.sub(lambda place: filled[place[1]], text)
