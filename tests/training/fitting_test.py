"""`fit` trains a user's model with their data, and a resumed call does what one call does."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from manualpar.errors import UsageError
from manualpar.system.cluster import Cluster
from manualpar.training import Fit, Hook, fit
from manualpar.training.checkpoints.saved_state import read_extra
from tests.paths import ROOT

ROWS = 16
FEW = {
    "training.num_steps": 8,
    "training.eval_every_steps": 4,
    "training.log_every_steps": 2,
    "checkpoint.every_steps": 2,
    "data.batch_size": ROWS,
    "parallel.min_weight_size": 16,
}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


OPTIONS = {"init_args": lambda batch: ((batch["x"],), {})}


class Examples:
    def __init__(self, start, stop):
        self.start, self.stop = start, stop

    def __len__(self):
        return self.stop - self.start

    def __getitem__(self, index):
        x = np.random.default_rng(self.start + index).normal(size=4).astype(np.float32)
        return {"x": x, "y": int(x.argmax())}


class Batches:
    """The same examples as batches, in order."""

    def __iter__(self):
        examples = Examples(0, 5 * ROWS)
        for start in range(0, len(examples), ROWS):
            some = [examples[i] for i in range(start, start + ROWS)]
            yield jax.tree.map(lambda *x: np.stack(x), *some)


class Patience(Hook):
    """Ends a training whose loss has not fallen for some evaluations."""

    def __init__(self, patience=2):
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def on_metrics(self, step, split, values):
        if split == "eval":
            self.waited = 0 if values["loss"] < self.best else self.waited + 1
            self.best = min(self.best, values["loss"])

    def should_stop(self):
        return self.waited >= self.patience

    def state(self):
        return [self.best, self.waited]

    def restore(self, state):
        self.best, self.waited = state


class Diary:
    """Writes down what is called; it has only some of a hook's methods."""

    state = "an attribute, no method"

    def __init__(self):
        self.lines = []

    def on_step(self, step, state):
        self.lines.append(("step", step, int(state.step)))

    def on_metrics(self, step, split, values):
        self.lines.append((split, step, sorted(values)))

    def on_checkpoint(self, step, folder):
        assert (folder / "manifest.json").exists() or any(folder.iterdir())
        self.lines.append(("checkpoint", step, folder.name))

    def on_end(self, error):
        self.lines.append(("end", error, 0))


def _fit(data, workdir, optimizer=None, hooks=(), **config) -> Fit:
    values = {**FEW, **{name.replace("__", "."): value for name, value in config.items()}}
    return fit(Net(), loss_fn, data, optimizer, values, hooks, workdir=workdir, options=OPTIONS)


def _metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def _same(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def test_a_call_that_resumes_does_what_one_call_does(tmp_path: Path):
    splits = {"train": Examples(0, 40), "eval": Examples(40, 60), "test": Examples(60, 80)}
    once = _fit(splits, tmp_path / "once", optax.adam(0.01))
    assert int(once.state.step) == 8
    assert set(once.metrics) == {"train", "eval", "test"}
    assert "learning_rate" not in once.metrics["train"], "the user's optimizer has an unknown rate"
    diary = Diary()
    first = _fit(splits, tmp_path / "twice", optax.adam(0.01), training__num_steps=4)
    second = _fit(splits, tmp_path / "twice", optax.adam(0.01), [diary])
    assert first.workdir == second.workdir
    assert _same(once.state.params, second.state.params)
    assert _metrics(tmp_path / "once")[-2:] == _metrics(tmp_path / "twice")[-2:]
    assert [line[:2] for line in diary.lines if line[0] == "step"] == [
        ("step", 5),
        ("step", 6),
        ("step", 7),
        ("step", 8),
    ]
    assert [line[1] for line in diary.lines if line[0] == "checkpoint"] == [6, 8]
    assert ("test", 8, ["loss"]) in diary.lines
    assert diary.lines[-1] == ("end", None, 0)
    assert (tmp_path / "twice" / "report.html").exists()


@pytest.mark.slow
def test_a_hook_ends_a_training_and_ends_it_again_when_it_is_resumed(tmp_path: Path):
    never_better = {"optimizer__learning_rate": 0.0, "training__num_steps": 40}
    splits = {"train": Batches(), "eval": list(Batches())}
    ended = _fit(splits, tmp_path, None, [Patience()], **never_better)
    # Evaluations after steps 0, 4 and 8; the last is fetched two steps later.
    assert int(ended.state.step) < 16
    again = _fit(splits, tmp_path, None, [Patience()], **never_better)
    assert int(again.state.step) == int(ended.state.step)
    assert again.metrics["eval"] == ended.metrics["eval"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "zero2", "fsdp"])
def test_a_stream_of_batches_is_resumed_under_any_strategy(strategy: str, tmp_path: Path):
    config = {"parallel__strategy": strategy, "schedule__name": "constant_schedule"}
    once = _fit(Batches(), tmp_path / "once", **config)
    _fit(Batches(), tmp_path / "twice", training__num_steps=4, **config)
    second = _fit(Batches(), tmp_path / "twice", **config)
    assert _same(once.state.params, second.state.params)
    assert _metrics(tmp_path / "once")[-1] == _metrics(tmp_path / "twice")[-1]


@pytest.mark.slow
def test_a_step_of_fit_is_a_step_of_plain_flax(tmp_path: Path):
    batch = next(iter(Batches()))
    trained = _fit([batch], tmp_path, optax.sgd(0.1), training__num_steps=2)
    init_key, _ = jax.random.split(jax.random.key(0))
    params = Net().init(init_key, batch["x"])["params"]
    for _ in range(2):
        grads = jax.grad(lambda p: loss_fn(p, Net().apply, batch, None)[0])(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(trained.state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_config_names_a_function_that_makes_the_task(tmp_path: Path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            '''
            """A config and the task that it names, in one folder."""
            from manualpar.training.config import named_config

            def get_config():
                config = named_config("own").unlock()
                config.model.name = "my_task:make_task"
                config.model.width = 8
                config.training.num_steps = 4
                config.data.batch_size = 16
                return config.lock()
            '''
        )
    )
    (tmp_path / "my_task.py").write_text(
        textwrap.dedent(
            """
            import flax.linen as nn, optax
            from manualpar.data import as_dataset
            from manualpar.training import Task
            from tests.training.fitting_test import Examples, OPTIONS, loss_fn

            def make_task(config):
                print("width", config.model.width)
                model = nn.Sequential([nn.Dense(config.model.width), nn.relu, nn.Dense(4)])
                options = {"init_args": OPTIONS["init_args"]}
                return Task(as_dataset(Examples(0, 64)), model, loss_fn, options=options)
            """
        )
    )
    for command in (
        ("train", "mine.py", "--workdir=run", "--model.width=12", "--mesh=data=2,replica=4"),
        ("inspect", "mine.py", "--nocompile", "--output=ledger"),
    ):
        shown = subprocess.run(
            [sys.executable, "-m", "manualpar", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_smaller_last_batch_and_every_example_of_an_evaluation_count_as_in_plain_flax(tmp_path):
    examples = [Examples(0, 64)[i] for i in range(64)]
    rows = [slice(0, 16), slice(16, 32), slice(32, 35)]  # Eight devices do not divide the last.
    batches = [jax.tree.map(lambda *x: np.stack(x), *examples[some]) for some in rows]
    data = {"train": batches, "test": batches}
    params = Net().init(jax.random.key(7), batches[0]["x"])["params"]
    config = {**FEW, "training.num_steps": 4, "training.eval_every_steps": 0}
    given = {"init_from": params, "options": OPTIONS, "workdir": tmp_path}
    done = fit(
        Net(), loss_fn, data, optax.sgd(0.5), {**config, "training.log_every_steps": 4}, **given
    )

    loss = jax.jit(jax.value_and_grad(lambda p, b: loss_fn(p, Net().apply, b, None)[0]))
    losses = []
    for batch in [*batches, batches[0]]:
        value, grads = loss(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        losses.append((float(value) * len(batch["y"]), len(batch["y"])))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(done.state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    sums, counts = zip(*losses, strict=True)
    np.testing.assert_allclose(done.metrics["train"]["loss"], sum(sums) / sum(counts), rtol=1e-5)
    every = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    np.testing.assert_allclose(done.metrics["test"]["loss"], loss(params, every)[0], rtol=1e-5)


@pytest.mark.parametrize("where", ["on_step", "on_metrics", "train", "eval"])
def test_an_error_of_the_users_code_ends_a_run_that_has_saved_its_state(where, tmp_path: Path):
    class Failing(Diary):
        def on_step(self, step, state):
            if where == "on_step" and step == 3:
                raise RuntimeError("mine")

        def on_metrics(self, step, split, values):
            if where == "on_metrics" and split == "train":
                raise RuntimeError("mine")

    class Reading:
        reads = 0

        def __iter__(self):
            self.reads += 1
            batches = list(Batches())
            yield from batches[:3]
            if where == "train" or (where == "eval" and self.reads > 1):
                raise RuntimeError("mine")

    data = {"train": list(Batches()), **({where: Reading()} if where in ("train", "eval") else {})}
    diary, rare = Diary(), {"checkpoint__every_steps": 100, "training__eval_every_steps": 3}
    with pytest.raises(RuntimeError, match="mine") as raised:
        _fit(data, tmp_path, None, [Failing(), diary], **rare)
    # The metrics of step 2 are fetched after step 4.
    step = 4 if where == "on_metrics" else 3
    assert diary.lines[-2:] == [("checkpoint", step, str(step)), ("end", raised.value, 0)]
    saved = read_extra(tmp_path / "checkpoints" / str(step))
    assert saved["position"] == step * ROWS
    assert "eval" not in saved["recorder"]["totals"], "an evaluation goes on in a resumed run"


def test_a_second_run_with_the_same_processes_is_refused_before_it_starts(tmp_path: Path):
    cluster = Cluster()
    with cluster.one_run(), pytest.raises(ValueError, match="one run at a time"):
        fit(Net(), loss_fn, Examples(0, 64), workdir=tmp_path / "second", cluster=cluster)
    assert not list(tmp_path.iterdir())
    with cluster.one_run():  # It may follow the first one.
        pass


def test_an_axis_over_which_nothing_is_divided_is_named(tmp_path: Path, capsys):
    mesh = {"data": 2, "replica": 2, "model": 2}
    few = {"parallel.min_weight_size": 16}
    short = {"steps": 1, "batch_size": ROWS, "mesh": mesh, "strategy": "hsdp"}
    done = fit(
        Net(), loss_fn, Examples(0, 40), config=few, options=OPTIONS, workdir=tmp_path, **short
    )
    assert (int(done.state.step), done.program.strategy.name) == (1, "hsdp")
    shown = [line for line in capsys.readouterr().out.splitlines() if "divided" in line]
    [line] = shown
    assert line.startswith("nothing is divided over the mesh axis 'model'")


def test_a_training_begins_with_given_parameters(tmp_path: Path):
    batch = next(iter(Batches()))
    params = Net().init(jax.random.key(7), batch["x"])["params"]
    given = {"optimizer": None, "options": OPTIONS, "init_from": params, "workdir": tmp_path}
    config = {**FEW, "training.num_steps": 1, "optimizer.learning_rate": 0.0}
    some = {"Dense_0": params["Dense_0"]}
    done = fit(
        Net(), loss_fn, [batch], config=config, **{**given, "init_from": some}, missing="init"
    )
    whole = jax.device_get(done.program.whole(done.state)["params"])
    assert _same(some["Dense_0"], whole["Dense_0"])
    wrong = {**given, "init_from": some, "workdir": tmp_path / "wrong"}
    with pytest.raises(UsageError, match=r"init_from: .*Dense_1"):
        fit(Net(), loss_fn, [batch], config=config, **wrong)


REFUSED = [
    (dict(optimizer__learning_rate=0.1), "config has 'optimizer.learning_rate' and an optimizer"),
    (dict(training__steps=1), "config has 'training.steps', which is not a known field"),
    (dict(data__batchsize=4), "config.data.batchsize is not a known field; the nearest one is"),
    (dict(data__path=[1]), r"config.data.path is \[1\], expected a finite number, a string"),
    (dict(training__trackers=("wand",)), "expected a tuple of names among 'wandb', 'mlflow'"),
    (dict(parallel__mesh={"data": 4, "stage": 2}), "expected the option 'pipeline' too"),
    (dict(data__batch_size=10), "config.data.batch_size is 10, expected a multiple of 8"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_a_field_that_does_not_fit_is_refused(config, words, tmp_path: Path):
    with pytest.raises(ValueError, match=words):
        _fit(Examples(0, 40), tmp_path, optax.sgd(0.1), **config)
    assert not list(tmp_path.iterdir())


MISTAKES = [
    (dict(num_steps=3), TypeError, "no argument 'num_steps'; the nearest one is steps="),
    (dict(batchsize=3), TypeError, "no argument 'batchsize'; the nearest one is batch_size="),
    (dict(ema_decay=0.9), TypeError, "nearest one is config={'optimizer.ema_decay': ...}"),
    (dict(steps=3), ValueError, r"steps is 3 and config\['training.num_steps'\] is 8"),
    (dict(learning_rate=0.2), ValueError, "'optimizer.learning_rate' and an optimizer is given"),
    (dict(missing="init"), ValueError, "missing is 'init' and init_from is None"),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), MISTAKES)
def test_a_misspelt_or_contradictory_argument_is_refused(arguments, kind, words):
    with pytest.raises(kind, match=words):
        fit(Net(), loss_fn, Examples(0, 40), optax.sgd(0.1), FEW, **arguments)


def test_what_cannot_be_evaluated_or_called_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="hooks has the class Diary, expected an instance"):
        _fit(Examples(0, 40), tmp_path, None, [Diary])
    with pytest.raises(TypeError, match="which has none of the methods on_step"):
        _fit(Examples(0, 40), tmp_path, None, [object()])
    with pytest.raises(ValueError, match=r"Task.options has 'mesh', which the config decides"):
        fit(Net(), loss_fn, Examples(0, 40), options={"mesh": None, **OPTIONS})
    with pytest.raises(ValueError, match=r"set config.parallel.min_weight_size"):
        fit(Net(), loss_fn, Examples(0, 40), options={"min_weight_size": 1, **OPTIONS})


class OwnRows:
    """The rows of `Batches` that this process trains on; an iterator of them has a state."""

    def __iter__(self):
        return OwnRowsIterator()


class OwnRowsIterator:
    def __init__(self):
        self.number, self.batches = 0, list(Batches())

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.batches[self.number % len(self.batches)]
        self.number += 1
        own = jax.process_index()
        return jax.tree.map(lambda x: np.split(x, jax.process_count())[own], batch)

    def get_state(self):
        # From step 5 on process 1's state is too long for a message of the hub.
        is_long = jax.process_index() == 1 and self.number > 4
        return [jax.process_index(), self.number, "\\" * (2**20 if is_long else 10)]

    def set_state(self, state):
        process, self.number, _ = state
        assert process == jax.process_index()
        print(f"process {process} goes on at batch {self.number}", flush=True)


SCRIPT = """
import sys

from manualpar import simulate_devices

simulate_devices(4)

from tests.training import fitting_test as here

data = {"train": here.OwnRows(), "eval": here.Batches()}
config = {"schedule__name": "constant_schedule", "training__num_steps": int(sys.argv[2])}
done = here._fit(data, sys.argv[1], hooks=[here.Patience(9)], **config)
"""


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_with_streams_report_what_one_process_reports(tmp_path: Path, devices8):
    config = {"schedule__name": "constant_schedule", "training__num_steps": 12}
    data = {"train": Batches(), "eval": Batches()}
    _fit(data, tmp_path / "one", hooks=[Patience(9)], **config)
    (tmp_path / "script.py").write_text(SCRIPT)

    def go_on(steps):
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "two"), str(steps)]
        done = subprocess.run(
            [sys.executable, "-m", "manualpar", "launch", "--processes=2", "--", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = sorted(line for line in done.stdout.splitlines() if "goes on at batch" in line)
        streams = read_extra(tmp_path / "two" / "checkpoints" / str(steps))["stream"]
        assert [one["number"] for one in streams] == [steps, steps]
        states = [one["iterator"]["json"] for one in streams]
        assert [state[:2] for state in states] == [[0, steps], [1, steps]]
        return lines, [len(state[2]) for state in states]

    assert go_on(4) == ([], [10, 10])
    went_on = [f"[{process}] process {process} goes on at batch 4" for process in range(2)]
    assert go_on(8) == (went_on, [10, 2**20])
    # One process reads past the batches of the two.
    _fit(data, tmp_path / "two", hooks=[Patience(9)], **config)
    one, two = _metrics(tmp_path / "one"), _metrics(tmp_path / "two")
    assert [(x["step"], x["split"]) for x in one] == [(x["step"], x["split"]) for x in two]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


SMALLER_LAST = """
import flax.linen as nn
import numpy as np
import optax

from manualpar import simulate_devices
from manualpar.training import fit

simulate_devices(1)
rows = np.random.default_rng(0).normal(size=(21, 4)).astype(np.float32)
batches = [
    {"inputs": x, "labels": x @ np.ones((4, 1), np.float32)} for x in np.split(rows, [8, 16])
]


class Loader:
    def __iter__(self):
        return iter(batches)


def loss_fn(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch["inputs"])
    return ((out - batch["labels"]) ** 2).mean()


done = fit(nn.Dense(1), loss_fn, Loader(), optax.sgd(0.1), steps=3, batch_size=8)
print("loss", done.metrics["train"]["loss"])
"""


@pytest.mark.slow
def test_two_processes_that_read_whole_batches_take_a_smaller_last_one(tmp_path: Path):
    (tmp_path / "script.py").write_text(SMALLER_LAST)
    command, losses = [sys.executable, str(tmp_path / "script.py")], []
    for launcher in ([], [sys.executable, "-m", "manualpar", "launch", "--processes=2", "--"]):
        done = subprocess.run(
            [*launcher, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append([float(x) for x in re.findall(r"loss (\d\.\d{9,})", done.stdout)])
    assert losses[1] == pytest.approx([*losses[0], *losses[0]], rel=1e-5)
