"""Mistakes in command lines, config files and input lines; each gives an error of one sentence."""

import functools
import json
from pathlib import Path

import pytest

from manualpar.commands import evaluate_command, generate_command
from manualpar.commands.command_line import TRAINING, parse_command_line
from manualpar.commands.compare_command import COMPARING
from manualpar.commands.inspect_command import INSPECTING
from manualpar.commands.plan_command import PLANNING
from manualpar.errors import UsageError
from tests.commands.fake_model import ask
from tests.paths import ROOT
from tests.refused.sentences import literally
from tests.refused.table import check_refused, rows

CONFIGS = ROOT / "configs"
DEFAULT = CONFIGS / "fsdp.py"
DP, LM = (f"--config={CONFIGS / name}.py" for name in ("dp", "fsdp_lm"))


def parse(arguments, default_config=DEFAULT, syntax=TRAINING):
    line = ["program", *arguments]
    return parse_command_line(line, default_config=default_config, syntax=syntax)


def parse_file(text, name="a.py"):
    Path(name).write_text(text)
    return parse([f"--config={Path.cwd() / name}"])


def usage_rows(name, call, *cases):
    """Yields rows for `UsageError`s whose message is one line."""
    return rows(name, call, *((a, UsageError, words) for a, words in literally(*cases)))


def lines(command, flag, *cases):
    """Yields rows for wrong lines of a command's input; a line is a JSON object or a text."""

    def call(line):
        ask(command, flag, [line if isinstance(line, str) else json.dumps(line)])

    named = ((line, f"lines.jsonl, line 1: {words}") for line, words in cases)
    return usage_rows(flag, call, *named)


REFUSED = [
    *usage_rows(
        "train",
        parse,
        (["--config.parallel.pad=maybe"], "--config.parallel.pad=maybe: expected true or false."),
        (["--config.parallel.rules=(('a',None)"], "rules=(('a',None): expected a tuple of pairs"),
        (
            ["--config.parallel.mesh.replica=2"],
            "no field 'parallel.mesh.replica'; to change the entries",
        ),
        (
            ["--config.parallel.mesh.replica=2"],
            """complete dict, as in --config.parallel.mesh="{'replica': 2, 'data': -1}".""",
        ),
        (["--config.nonsense=1"], "has no field 'nonsense'; the nearest one is --config.seed."),
        (["--config.optimizer.learning_rat=1"], "nearest one is --config.optimizer.learning_rate."),
        (["--config.model.prefetch=True"], "=True: model.prefetch was removed: it made"),
        (["--config.seed.x=1"], "no field 'seed.x'"),
        (["--config.parallel.mesh.date=1"], "to change the entries, set the complete dict"),
        (["--config.=1"], "no field ''"),
        (["--config.seed=abc"], "--config.seed=abc: expected an integer"),
        (["--config.training.num_steps=1.5"], "1.5: expected an integer without point or"),
        (["--config.training.num_steps=1e5"], "exponent such as 1000."),
        (["--config.optimizer.learning_rate=x"], "learning_rate=x: expected a number such as 0.00"),
        (["--config.optimizer.arguments=3"], "expected a dict such as {'nesterov': True}."),
        (["--config.optimizer=3"], "--config.optimizer=3: expected a dict such as {'data': -1}."),
        (["--config.seed"], "Missing value for flag --config.seed."),
        ([f"--config={DEFAULT}", f"--config={DEFAULT}"], "--config is given twice"),
        (["--config=configs/none.py"], "--config=configs/none.py: there is no such file"),
        ([f"--config={CONFIGS}"], "there is no config of this name. `manualpar configs`"),
        (["a" * 5000], "there is no config of this name"),
        (["fsdp_ml"], "no config of this name; the nearest one is 'fsdp_lm'. `manualpar con"),
        (["--mesh=data"], "--mesh=data: expected axes such as data=4,model=2."),
        (["--num_layers=2"], "not a known flag; the nearest one is --model.num_layers."),
        ([f"--config={'a' * 5000}.py"], "aa.py: File name too long"),
        (["--config="], "--config has no value"),
        (["--config"], "--config has no value"),
        (["--workdri=x"], "--workdri is not a known flag; the nearest one is --workdir."),
        (["--device=4"], "the nearest one is --devices."),
        (["--devices=0"], "--devices=0: expected at least 1 device to simulate."),
        (["--devices=-8"], "--devices=-8: expected at least 1 device to simulate."),
        (["--devices=two"], "--devices=two: expected an integer"),
        (["fsdp.py"], "--config=fsdp.py: there is no such file"),
        (["--seed=1", "fsdp.py"], "'fsdp.py' is not understood"),
    ),
    *usage_rows(
        "config file",
        parse_file,
        ("x = 1", "the file has no function get_config(), expected one."),
        ("get_config = 3", "the file has no function get_config()"),
        ("def get_config(): return {}", "get_config() returns a dict, expected an ml_coll"),
        ("def get_config(): pass", "get_config() returns a NoneType, expected"),
        ("x = 1\ndef f(:", "a.py: line 2: invalid syntax."),
        ("\n1 / 0", "a.py: line 2: ZeroDivisionError: division by zero"),
        (
            "import nothing_such",
            "a.py: line 1: ModuleNotFoundError: No module named 'nothing_such'",
        ),
        (
            "def get_config():\n    raise RuntimeError('one\\n two')",
            "a.py: line 2: RuntimeError: one two",
        ),
        (
            "def get_config(x): return x",
            "a.py: TypeError: get_config() missing 1 required positional",
        ),
        (
            "def get_config(): return get_config()",
            "a.py: line 1: RecursionError: maximum recursion depth",
        ),
        ("raise SystemExit(0)", "a.py: line 1: SystemExit: 0"),
        (
            "from configs import fsdp\ndef get_config():\n    config = fsdp.get_config()\n"
            "    config.parallel.mesh = 3\n    return config",
            "a.py: line 4: TypeError: Could not override field 'mesh'",
        ),
    ),
    *usage_rows(
        "config file",
        functools.partial(parse_file, name="a.txt"),
        ("x = 1", "expected a Python file whose name ends in .py."),
    ),
    *usage_rows(
        "compare",
        functools.partial(parse, default_config="compare", syntax=COMPARING),
        (["--config.parallel.strategy=dp"], "the config has no field 'parallel.strategy'"),
    ),
    *usage_rows(
        "inspect",
        functools.partial(parse, default_config="fsdp", syntax=INSPECTING),
        (["--config=none.py"], "--config=none.py: there is no such file"),
        ([DP, "--config=none.py"], "--config=none.py: there is no such file"),
        ([DP, DP], "is given twice, expected each file once."),
        (
            [DP, LM, "--config.model.mlp_size=8"],
            "configs/dp.py: --config.model.mlp_size=8: the conf",
        ),
        (["--config.nonsense=1"], "the config has no field 'nonsense'"),
        (["--devises=8"], "--devises is not a known flag; the nearest one is --devices."),
        (["--devices=0"], "--devices=0: expected at least 1 device to simulate."),
        (["--devices=many"], "--devices=many: expected an integer without point or exponent."),
        (["--write_budget"], "--write-budget needs the name of the file, as in --budget="),
        (["--memory=v99"], "--memory=v99: expected a size such as 16GiB, or a chip: chip 'v99' is"),
    ),
    *usage_rows(
        "plan",
        functools.partial(parse, default_config="fsdp_lm", syntax=PLANNING),
        (["--topology=v5x:8x8"], "the nearest one is 'v5e'"),
        (["--topolgy=v5e:2x2"], "--topolgy is not a known flag; the nearest one is --topology"),
        (["--compiler=cpu"], "--compiler=cpu: expected one of auto, tpu, gpu, none"),
        (["--compiler=tpu", "--topology=h100:8"], "expected a TPU topology such as v5e:16x16"),
        (["--compiler=gpu", "--topology=v5e:2x2"], "expected a GPU topology such as h100:8, or"),
        (["--devices=4"], "--devices is not a flag of this command: --topology gives"),
        (["--vocab_size=many"], "--vocab_size=many"),
        (["--layouts", "--search"], "--layouts with --search: expected only one of these"),
        (["--config.data.batchsize=3"], "the nearest one is --config.data.batch_size"),
        (["extra"], "--config=extra: there is no config of this name"),
    ),
    *rows(
        "plan",
        functools.partial(parse, default_config="fsdp_lm", syntax=PLANNING),
        (["--topology=v5p"], UsageError, r"^--topology: topology 'v5p' is not understood.*\Z"),
    ),
    *lines(
        generate_command.main,
        "prompts",
        ({"prompt": "a", "text": "mine"}, "the line has a field 'text', wh"),
        ({"prompt": "a", "tokens": []}, "the line has a field 'tokens'"),
        ({"messages": [], "ending": 1}, "the line has a field 'ending'"),
        ({"prompt": 5}, "'prompt' is of type int, expected a"),
        ({"prompt": ["a"]}, "'prompt' is of type list, expected a"),
        ({"prompt": None}, "'prompt' is of type NoneType"),
        (5, "it is not a JSON object"),
    ),
    *lines(
        evaluate_command.main,
        "completions",
        (5, "it is not a JSON object"),
        ([1], "it is not a JSON object"),
        ({"context": "a"}, "expected 'context' and 'completion'"),
        ({"context": 5, "completion": "b"}, "'context' is of"),
        ({"context": "a", "completion": None}, "'completion' is"),
        ({"context": "a", "completion": "b", "is_greedy": 1}, "the line has a field 'is_greedy'"),
        ("[" * 99999, "it is nested deeper than 64 levels"),
        ('{"a":' * 99999, "it is nested deeper than 64 levels"),
    ),
    *lines(
        evaluate_command.main,
        "text",
        ({"text": 5}, "'text' is of type int, expected a text"),
        ("1" * 5000, "it is not JSON"),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(call, error, words)
