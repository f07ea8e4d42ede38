"""Objects that a user prints or shows in a notebook take a few lines, whatever they hold."""

import dataclasses
import functools
import html.parser

import jax
import numpy as np
import optax
import pytest

from configs import fsdp_lm
from manualpar import Batch, abstract_mesh, diloco, fsdp, hsdp
from manualpar.core.summary import Summarized, describe_function
from manualpar.data import load_dataset
from manualpar.inspect import ledger
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work
from manualpar.planner.topology import parse_topology
from manualpar.plans.sweep import throughput_of
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.experiment import prepare
from tests.tiny import BATCHES, Classifier, loss_fn

ARGS = (Classifier(), optax.adam(0.1), loss_fn)


@functools.cache
def experiment():
    config = fsdp_lm.get_config()
    config.data.update({"source": "text", "path": __file__, "sequence_length": 32})
    config.model.num_layers = 2
    return prepare(config, devices=8)


@functools.cache
def work():
    return read_work(experiment().program, throughput_of(experiment().config, experiment().task))


def build_hsdp():
    mesh = abstract_mesh({"replica": 2, "data": 4}, 8)
    return hsdp(*ARGS, mesh=mesh, batch=BATCHES[0], min_weight_size=16)


def build_diloco():
    mesh = abstract_mesh({"replica": 2, "data": 4}, 8)
    return diloco(*ARGS, every=2, outer_tx=optax.sgd(0.7), mesh=mesh, batch=BATCHES[0])


def full_estimate():
    """Makes an estimate in which no field is unknown."""
    return dataclasses.replace(
        estimate(work(), parse_topology("v5e:2x4")),
        step_seconds_by_links=1.0,
        bubble_seconds=1.0,
        collectives=tuple(
            dataclasses.replace(x, slow_bytes=1.0, seconds=1.0)
            for x in estimate(work(), parse_topology("v5e:2x4")).collectives
        ),
    )


# The object, and words of its `repr`.
OBJECTS = {
    "program": (lambda: experiment().program, "Program(fsdp, mode manual, mesh data=8)"),
    "strategy": (lambda: build_hsdp().strategy, "replicated over: replica"),
    "state": (lambda: experiment().program.abstract_state, "arrays, "),
    "layout": (lambda: experiment().program.layout, "leaves"),
    "step": (lambda: experiment().program.step, "strategy: Strategy(fsdp)"),
    "model": (lambda: experiment().program.model, "apply_fn: Module.apply"),
    "update": (lambda: experiment().program.step.update, "norm_metrics: "),
    "comm": (lambda: experiment().program.comm, "MixedPrecisionPolicy("),
    "outer steps": (lambda: build_diloco().outer, "every: 2"),
    "ledger": (lambda: ledger(experiment().program), " all_gather, "),
    "memory": (lambda: ledger(experiment().program).memory, "parameters="),
    "experiment": (experiment, "task: Task"),
    "task": (lambda: experiment().task, "model: Transformer"),
    "text": (lambda: experiment().task.dataset, " examples"),
    "split": (lambda: experiment().task.dataset.train, "sequence_length: 32"),
    "arrays": (lambda: load_dataset("synthetic", seed=0), "train: 4,096 examples"),
    "split of arrays": (lambda: load_dataset("synthetic", seed=0).train, "float32[4096, 784]"),
    "batch": (lambda: BATCHES[0], "Batch(inputs=float32[64, 12], labels=int32[64], mask=none)"),
    "large batch": (lambda: Batch({str(i): np.ones(2) for i in range(99)}, 1), "and 93 more"),
    "checkpoints": (lambda: Checkpoints("checkpoints"), "keep=3"),
    "work": (work, "name: 'fsdp manual'"),
    "estimate": (full_estimate, "StepEstimate(fsdp manual on v5e:2x4, data=8), by roofline"),
    "topology": (lambda: parse_topology("v5e:2x4"), "Topology("),
}


@pytest.mark.parametrize(("make", "words"), OBJECTS.values(), ids=OBJECTS)
def test_a_repr_says_what_one_wants_to_know_in_fifteen_lines(make, words):
    text = repr(make())
    assert words in text
    assert len(text.splitlines()) <= 15
    assert len(text) <= 1500


class Cells(html.parser.HTMLParser):
    """Collects the texts of a table by the kind of their cell."""

    def __init__(self, source):
        super().__init__()
        self.texts, self.tags, self.open = {}, [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1], []).append(data)


@pytest.mark.parametrize("name", ["program", "state", "ledger", "estimate", "strategy", "text"])
def test_a_notebook_shows_the_lines_of_the_repr_as_a_table(name):
    value = OBJECTS[name][0]()
    cells = Cells(value._repr_html_())
    title, *lines = repr(value).splitlines()
    assert cells.open == []
    assert cells.texts["caption"] == [title]
    shown = zip(cells.texts["th"], cells.texts["td"], strict=True)
    assert [f"  {head}: {text}" for head, text in shown] == lines


def test_a_table_escapes_names_and_values():
    @dataclasses.dataclass(repr=False)
    class Page(Summarized):
        text: str

        def _summary(self):
            return "<b>title</b>", {"<i>": self.text}

    shown = Page("<script>alert('&')</script>")._repr_html_()
    cells = Cells(shown)
    assert set(cells.tags) == {"table", "caption", "tr", "th", "td"}
    assert cells.texts["td"] == ["<script>alert('&')</script>"]
    assert cells.texts["caption"] == ["<b>title</b>"]


def test_values_of_fields_are_short():
    @dataclasses.dataclass(repr=False)
    class Fields(Summarized):
        array: object = dataclasses.field(default_factory=lambda: jax.numpy.ones((3, 4)))
        many: object = tuple(range(100))
        text: str = "x" * 10**6
        function: object = functools.partial(full_estimate, 1, two=3)
        plain: object = dataclasses.field(default_factory=lambda: html.parser.HTMLParser())
        _hidden: int = 1

    assert repr(Fields()).splitlines() == [
        "Fields",
        "  array: float32[3, 4]",
        "  many: 100 entries",
        f"  text: '{'x' * 100}'...",
        "  function: full_estimate(1, two=3)",
        "  plain: HTMLParser",
    ]


def test_a_function_is_described_by_its_name_and_its_bound_arguments():
    assert describe_function(fsdp) == "fsdp"
    assert describe_function(functools.partial(fsdp, pad=True)) == "fsdp(pad=True)"
