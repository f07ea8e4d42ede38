"""Malformed inputs of commands, first part: values of config fields, sizes, and flags.

Every case has the words that the error message must contain. The class `fields` gives each field of
the configs some values of a wrong type or size. The cases of the other classes are listed by hand.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manualpar.strategies import Field
from manualpar.training.config_fields import FIELDS, MODEL_FIELDS

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
SMALL = ("--config.model.hidden_size=16", "--config.model.num_layers=1")
# Wrong values for each type of field. `_out_of_range` adds values outside of a field's limits.
WRONG: dict[type, tuple[Any, ...]] = {
    int: (None, "7", 1.5, True, (1,), math.nan, b"7"),
    float: (None, "x", math.nan, math.inf, 1e300, [1.0]),
    bool: (None, 1, "yes", ()),
    str: (None, 3, ("x",), {"a": 1}),
    tuple: (None, 3, "x", (3,), ((1, 2, 3),), {"a": 1}),
    dict: (None, 3, "data", {}, {"data": 0}, {"data": 2.0}, {"": 8}, {1: 8}, {"data": {"a": 1}}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A malformed input.

    Attributes:
      kind: The class of the input, by which results are counted.
      name: A description of the mistake.
      module: The module that is the command.
      arguments: The arguments of the command.
      names: The words that the error message must contain.
    """

    kind: str
    name: str
    module: str
    arguments: tuple[str, ...]
    names: str


def field_cases(folder: Path) -> Iterator[Case]:
    """Yields a case for each wrong value of each config field; each case has a config file."""
    fields = {**MODEL_FIELDS["transformer"], **FIELDS, **MODEL_FIELDS["classifier"]}
    for number, (name, field) in enumerate(fields.items()):
        base = "fsdp" if name in FIELDS or name in MODEL_FIELDS["classifier"] else "fsdp_lm"
        for index, value in enumerate([*WRONG[field.kind], *_out_of_range(field)]):
            if value == {} == field.default:
                continue
            path = folder / f"field_{number}_{index}.py"
            path.write_text(_config_text(base, name, value))
            # Without a valid model name the model's fields are unknown, so any may be named.
            names = "config." if name == "model.name" else f"config.{name}"
            yield Case(
                "fields", f"{name}={value!r}", "experiments.fsdp", (f"--config={path}",), names
            )


def _out_of_range(field: Field) -> Iterator[Any]:
    """Returns values of the right type that are too small, too large or unknown."""
    if field.minimum is not None:
        yield field.minimum - 1
    if field.below is not None:
        yield type(field.below)(field.below) if field.kind is float else int(field.below)
    if field.choices:
        yield "nonsense"
        yield field.choices[-1] + "\0"


def _config_text(base: str, name: str, value: Any) -> str:
    """Returns the text of a config file that changes one field of the config `base`."""
    *groups, last = name.split(".")
    return f"""from configs import {base}
from ml_collections import ConfigDict
from math import inf, nan

def get_config():
    config = {base}.get_config()
    with config.unlocked(), config.ignore_type():
        group = config
        for name in {groups!r}:
            if name not in group:
                group[name] = ConfigDict()
            group = group[name]
        group[{last!r}] = {value!r}
    return config
"""


def fsdp_case(
    kind: str, named: str, *arguments: str, names: str = "", config: str = "fsdp"
) -> Case:
    """Makes a case for `experiments.fsdp`; by default the error must name the last flag."""
    flag = arguments[-1].split("=")[0].lstrip("-")
    own = (
        ()
        if any(a.startswith("--config=") for a in arguments)
        else (f"--config={CONFIGS / config}.py",)
    )
    return Case(kind, named, "experiments.fsdp", (*own, *arguments), names or flag)


def size_cases(folder: Path) -> Iterator[Case]:
    """Yields models and batches that fit into no memory, or whose tracing would take days."""
    del folder
    for name, value in (
        ("data.batch_size", 8 * 10**8),
        ("data.batch_size", 2**32),
        ("data.batch_size", 10**18),
        ("data.prefetch", 1023),
        ("data.prefetch", 10**9),
        ("model.hidden_size", 99999999999),
        ("model.hidden_size", 2**32 + 1),
        ("model.hidden_size", 10**30),
        ("model.num_layers", 10**6),
        ("model.num_layers", 10**9),
        ("model.num_classes", 2**31),
        ("model.num_classes", 10**18),
        ("optimizer.num_minibatches", 10**6),
        ("training.num_steps", 10**20),
    ):
        rest = (
            ("--config.data.batch_size=8000000",)
            if (name, value) == ("data.prefetch", 1023)
            else ()
        )
        yield fsdp_case("sizes", f"{name}={value}", *rest, f"--config.{name}={value}")
    for name, value in (
        ("data.sequence_length", 10**6),
        ("data.sequence_length", 10**9),
        ("data.sequence_length", 2**40),
        ("model.mlp_size", 10**11),
        ("model.hidden_size", 10**10),
        ("model.num_layers", 10**6),
        ("sample.num_tokens", 10**9),
    ):
        yield fsdp_case("sizes", f"{name}={value}", f"--config.{name}={value}", config="fsdp_lm")
    for name, value in (
        ("model.num_layers", 10**9),
        ("model.num_layers", 10**30),
        ("model.num_experts", 10**6),
    ):
        scanned = ("--config.model.scan_layers=True", f"--config.{name}={value}")
        yield fsdp_case("sizes", f"scanned {name}={value}", *scanned, config="fsdp_lm")
    for devices in (5000, 100000, int("9" * 30)):
        yield fsdp_case("sizes", f"devices={devices}", f"--devices={devices}")


def flag_cases(folder: Path) -> Iterator[Case]:
    """Yields wrong arguments of commands."""
    del folder
    for name in ("seed", "data.batch_size", "optimizer.learning_rate", "training.num_steps"):
        for text in ("", "nan!", "1e", "--", "0x", "1,5", "٣,", "1\0", "None"):
            yield fsdp_case("flags", f"{name}={text!r}", f"--config.{name}={text}")
    for text in (
        "3",
        "data",
        "{'data'}",
        "{'data': }",
        "[",
        "__import__('os').abort()",
        "{{}}",
        "{" * 200,
    ):
        yield fsdp_case("flags", f"mesh {text[:20]}", f"--config.parallel.mesh={text}")
    for text in (
        "{'data': 3}",
        "{'data': -2}",
        "{'data': -1, 'b': -1}",
        "{'data': 16}",
        "{'b': 8}",
        "{'data': 99999999999999999999}",
        "{}",
        "{'data': '2'}",
        "{'data': True}",
    ):
        names = "the 3 devices along 'data'" if "3" in text else "mesh"
        yield fsdp_case("meshes", text, f"--config.parallel.mesh={text}", names=names)
    yield fsdp_case(
        "meshes", "hsdp without replica", "--config.parallel.strategy=hsdp", names="parallel.mesh"
    )
    yield fsdp_case("meshes", "batch over 8", "--config.data.batch_size=7")
    yield fsdp_case(
        "meshes", "axis of rules", "--config.parallel.rules=(('embed','no'),)", names="rules"
    )
    for text in ("5", "(('a',))", "((1,2),)", "('a','b')", "((('a','b'),None),)"):
        yield fsdp_case(
            "flags", f"rules {text}", f"--config.parallel.rules={text}", names="parallel.rules"
        )
    for text in ("abc", "10:5", "-3:4", "1:2:3", "0:3", "1:", "١:٢٣:"):
        yield fsdp_case("flags", f"profile {text}", f"--config.profile={text}")
    for argument in (
        "--wrkdir=x",
        "--config.nope=3",
        "--config.model.nope=1",
        "--config.parallel.mesh.x=2",
        "--config.",
        "--config.=1",
        "--devices=0",
        "--devices=-1",
        "--devices=x",
        "--devices=3",
        "--devices=1e9",
        "--num_processes=2",
        "--num_processes=-2",
        "--process_id=x",
        "foo",
        "--config.seed",
        "--config=configs/zero.py",
        "--force=maybe",
        "--",
        "-x",
    ):
        special = {"--devices=3": "batch_size", "--config=configs/zero.py": "--config"}
        yield fsdp_case(
            "flags",
            argument,
            *(("y",) if argument == "--" else ()),
            argument,
            names=special.get(argument, argument.lstrip("-").split("=")[0] or "'y'"),
        )
    for address in ("foo", "127.0.0.1:99999", "127.0.0.1:²", "127.0.0.1:", ":1", "127.0.0.1:-1"):
        who = ("--num_processes=2", "--process_id=0", f"--coordinator_address={address}")
        yield fsdp_case("flags", f"address {address}", *who, names="coordinator_address")
    who = ("--num_processes=2", "--coordinator_address=127.0.0.1:1", "--process_id=2")
    yield fsdp_case("flags", "process 2 of 2", *who, names="process_id")
    for name, value, names in (
        ("parallel.keep_gathered", "('nolayer',)", "keep_gathered"),
        ("debug.draw_sharding", "nope", "debug.draw_sharding"),
        ("checkpoint.best_metric", "acuracy", "checkpoint.best_metric"),
        ("data.source", "text", "data.source"),
        ("model.name", "transformer", "config."),
        ("model.num_classes", "5", "model.num_classes"),
    ):
        yield fsdp_case("flags", f"{name}={value}", f"--config.{name}={value}", names=names)
    for name, value in (
        ("model.num_heads", "3"),
        ("model.num_heads", "160"),
        ("model.num_kv_heads", "4"),
        ("model.hidden_size", "15"),
        ("model.attention", "cudnn"),
        ("data.path", "/nope"),
        ("data.tokenizer", "/nope"),
    ):
        names = {"model.hidden_size": "size", "model.num_heads": "size"}.get(
            name, name.split(".")[1]
        )
        yield fsdp_case(
            "flags", f"lm {name}={value}", f"--config.{name}={value}", names=names, config="fsdp_lm"
        )
