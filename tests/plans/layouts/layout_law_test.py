"""The formula of a step, against traced programs: every collective, and every product.

Kinds, axes, purposes, numbers and bytes of collectives are equal, and so are the operations of
products with weights in each phase. `layout_estimate_test` compares times and memory.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from manualpar.inspect.communication import summed
from manualpar.models import Transformer
from manualpar.models.flat_fields import with_fields
from manualpar.planner.step_work import StepWork, read_work
from manualpar.planner.topology import parse_topology
from manualpar.plans.layouts.layout import Layout
from manualpar.plans.layouts.layout_estimate import LayoutEstimator
from manualpar.plans.layouts.layout_search import config_of_layout
from manualpar.plans.sweep import throughput_of
from manualpar.training.config import load_config
from manualpar.training.experiment import prepare
from manualpar.training.task import make_task
from tests.models.transformer_families import GEMMA, QWEN
from tests.paths import ROOT

P = Layout
LANGUAGE_MODELS = ("fsdp_lm", "long_lm", "moe_lm", "nd_lm", "pp_lm", "tp_lm")
PLANNED = ("llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x22b", "deepseek_v3")
SIZES = {"num_layers": 4, "hidden_size": 64, "mlp_size": 96, "num_heads": 4, "num_kv_heads": 4}
EXPERTS = {"num_experts": 8, "experts_per_token": 2}
GROUPS = GEMMA | {"num_layers": 4}


def works(
    layout: Layout, *, name: str = "fsdp_lm", fields: Mapping[str, Any] | None = None
) -> tuple[StepWork, StepWork]:
    """The work of a small model's step, traced and by formula."""
    config = config_of_layout(load_config(ROOT / "configs" / f"{name}.py"), layout)
    config.data.batch_size, config.data.sequence_length = 32, 64
    config.model.update(SIZES | {"vocab_multiple": 8, "attention": "xla"})
    fields = dict(fields or {})
    if layout.context > 1 or "attention_soft_cap" in fields:
        config.model.attention = ""
    if experts := min(fields.get("num_experts", 0) or config.model.num_experts, 8):
        config.model.num_experts = fields["num_experts"] = experts
    task = make_task(config)
    task = dataclasses.replace(task, model=with_fields(task.model, **fields))
    topology = parse_topology(f"h100:{layout.num_devices}")
    experiment = prepare(config, devices=topology.abstract_devices, task=task)
    throughput = throughput_of(config, experiment.task)
    traced = read_work(experiment.program, throughput, fused_attention=True)
    assert isinstance(task.model, Transformer)
    estimator = LayoutEstimator(
        task.model,
        topology,
        examples=config.data.batch_size,
        positions=config.data.sequence_length,
        min_weight_size=config.parallel.min_weight_size,
    )
    return traced, estimator.work(layout)


def collectives(work: StepWork) -> Mapping[Any, Any]:
    keys = [(x.kind, tuple(sorted(x.axes)), x.purpose) for x in work.collectives]
    numbers = summed(zip(keys, (x.times for x in work.collectives), strict=True))
    sent = summed(zip(keys, (x.bytes_sent for x in work.collectives), strict=True))
    return {key: (number, sent[key]) for key, number in numbers.items() if number}


def operations(work: StepWork) -> Mapping[Any, float]:
    """The operations of products with weights: of a phase, or of one run of a tick's part."""
    products = [("", 1, work.products)]
    if work.pipeline:
        products = [(part, each.runs, each.products) for part, each in work.pipeline.works.items()]
    found = summed(
        ((part, product.phase), product.flops / runs)
        for part, runs, of_part in products
        for product in of_part
        if not product.is_fused
    )
    return {key: flops for key, flops in found.items() if flops}


CASES: list[tuple[Layout, dict[str, Any]]] = [
    (P(stage=2, data=2, model=2, num_minibatches=4, chunks=2), {}),
]
SLOW: list[tuple[Layout, dict[str, Any]]] = [
    (P(data=4, model=2), {"post_norms": True}),
    *(
        (P(data=2, model=2, layer_overlap="dual_batch", remat=remat, num_minibatches=2), fields)
        for remat, fields in (("full", QWEN), ("none", GEMMA))
    ),
    (P(data=2, expert=2, model=2, layer_overlap="dual_batch"), EXPERTS),
    *(
        (P(data=4, model=2, remat=remat), fields)
        for remat in Layout.remats
        for fields in (GEMMA | QWEN, QWEN, {"post_norms": True, "tied_head": True})
    ),
    *(
        (P(data=4, remat=remat), fields)
        for remat in Layout.remats
        for fields in (QWEN, GEMMA | {"num_layers": 5})
    ),
    *(
        (P(data=4, model=2, num_minibatches=2, communicate=communicate), {})
        for communicate in ("minibatch", "gather-step", "step")
    ),
    *(
        (P(data=2, context=2, model=2, num_minibatches=2, remat=remat), GEMMA | {"bos_token": bos})
        for remat, bos in (("full", 1), ("none", 1), ("dots", -1))
    ),
    (P(replica=2, data=2, context=2, num_minibatches=2, communicate="step"), {}),
    (P(replica=2, data=1, context=2, remat="none"), {}),
    (P(replica=2, data=2, gather_code="int8", reduce_code="int4"), {}),
    (P(replica=2, data=2, num_minibatches=2, replica_mean="backward"), {"tied_head": True}),
    (P(replica=2, data=1, context=2, model=2, replica_mean="backward", remat="none"), {}),
    (P(replica=2, data=2, reduce_code="int8", replica_mean="backward"), QWEN),
    (P(data=4, num_minibatches=2, gather_code="int8", reduce_code="int4"), {}),
    (P(data=2, model=4), {"num_kv_heads": 2}),
    (P(data=2, model=4, num_minibatches=2, communicate="step"), {"num_kv_heads": 2}),
    (P(data=2, model=2), {"label_smoothing": 0.1, "z_loss": 0.1, "dropout_rate": 0.1}),
    (P(data=2, model=2), {"scale_embedding": True, "logit_soft_cap": 3.0, "head_size": 8}),
    (P(data=2, expert=2, remat="full"), EXPERTS),
    (P(data=2, expert=2, model=2, remat="none"), EXPERTS | {"post_norms": True}),
    (P(data=2, expert=2, context=2, remat="dots"), EXPERTS),
    (P(data=2, expert=2, context=2, model=2, remat="none"), EXPERTS),
    (P(stage=2, data=2, num_minibatches=4, keep="inputs", remat="none"), {}),
    (P(stage=2, data=2, num_minibatches=4, remat="none"), QWEN),
    (P(stage=2, data=2, model=2, num_minibatches=4), GROUPS | QWEN),
    (P(stage=2, data=2, model=2, num_minibatches=2), {"tied_head": True}),
    (P(stage=2, data=2, context=2, num_minibatches=4, remat="none", communicate="step"), {}),
    (P(stage=2, data=2, context=2, num_minibatches=4), {"num_layers": 8}),
    (P(stage=2, data=2, context=2, num_minibatches=4), GROUPS),
    (P(stage=2, data=2, context=2, num_minibatches=4, chunks=2, keep="inputs"), {}),
    (P(stage=2, data=2, context=2, num_minibatches=4), {"bos_token": -1}),
    (P(stage=2, data=2, expert=2, model=2, num_minibatches=2), EXPERTS),
    (P(stage=2, data=2, expert=2, num_minibatches=4, chunks=2, remat="none"), EXPERTS),
    (P(stage=2, data=2, expert=2, context=2, num_minibatches=4), EXPERTS),
]


def _name(value: Any) -> str:
    return f"{value.name} {value.details}" if isinstance(value, Layout) else "-".join(value)[:60]


@pytest.mark.parametrize(
    ("layout", "fields"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=_name,
)
def test_every_collective_and_product_is_that_of_the_traced_step(layout, fields):
    traced, closed = works(layout, fields=fields)
    assert collectives(closed) == collectives(traced)
    assert operations(closed) == pytest.approx(operations(traced), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *(f"plan/{name}" for name in PLANNED)])
def test_every_family_of_configs_has_its_formula(name):
    traced, closed = works(P(data=2, model=2, num_minibatches=2), name=name)
    assert collectives(closed) == collectives(traced)
    assert operations(closed) == pytest.approx(operations(traced), rel=1e-9)
