"""How exact gradients are on every factorisation of eight devices over the kinds of axes.

python -m benchmarks.split_exactness [--quick] [--only "data, model"] [--output split_exactness.md]

Each program takes one step of SGD with a rate of 1 in float32. The gradient of every parameter is
compared with that of plain flax on one device, which has the whole batch. A figure is the largest
difference of an element, in parts of the largest element of its parameter, over all parameters.
Parameters, biases and scales among them, begin at random values, because a bias of zero or a scale
of one hides mistakes. The devices have different numbers of valid tokens.

Two models are split: the language model of `manualpar.models`, where there is an axis `expert` with
experts for MLPs, and one with experts and with biases but without attention. With `data, expert`
the axis `expert` splits the batch too, so that tokens travel to the experts; in `data beside
expert` it does not. HSDP takes its replicas, two, from `data`. With an axis `stage` the layers are
in a pipeline of four microbatches, or of as many as a device has examples. With an axis `context`
each sequence is split over devices.

The programs compile with few of XLA's optimizations, which takes a third of the time. What is
measured is the order in which devices add things up, and not how XLA fuses.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from benchmarks.expert_model import LAYERS, VOCABULARY, WIDTH, ExpertModel, expert_loss
from benchmarks.results import note_conditions, write_results
from manualpar import Pipeline, Program, fsdp, hsdp, make_mesh, zero
from manualpar.core.model.loss_function import LossFn
from manualpar.core.parameters.placement import path_name
from manualpar.core.state.train_state import Batch
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss

DEVICES, BATCH, LENGTH = 8, 16, 16
Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Variant:
    """What differs from FSDP that drops gathered parameters, of a model that scans its layers.

    Attributes:
      fields: Fields of the model.
      builder: The strategy.
      options: Options of the builder.
      pipeline: Fields of the pipeline.
    """

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    builder: Callable[..., Program] = fsdp
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pipeline: Mapping[str, Any] = dataclasses.field(default_factory=dict)


REMAT = {"remat": "full"}
VARIANTS = {
    "plain": Variant(),
    "kept after forward": Variant(options={"reshard_after_forward": False}),
    "two minibatches": Variant(options={"num_minibatches": 2}),
    "remat": Variant(REMAT),
    "no loop over layers": Variant({"scan_layers": False}),
    "ZeRO-1": Variant(builder=zero, options={"stage": 1}),
    "ZeRO-2, two minibatches": Variant(builder=zero, options={"stage": 2, "num_minibatches": 2}),
    "HSDP": Variant(builder=hsdp),
    "2 key heads": Variant({"num_kv_heads": 2}),
    "1 key head": Variant({"num_kv_heads": 1}),
    "tied": Variant({"tied_head": True}),
    "sequence": Variant({"sequence_parallel": True}),
    "sequence, 2 key heads, tied, remat, two minibatches": Variant(
        {**REMAT, "sequence_parallel": True, "num_kv_heads": 2, "tied_head": True},
        options={"num_minibatches": 2},
    ),
}
# Those of a model without attention.
OF_EXPERTS = {name: VARIANTS[name] for name in list(VARIANTS)[:8]}
OF_SPLIT_EXPERTS = {
    **OF_EXPERTS,
    "sequence": VARIANTS["sequence"],
    "sequence, remat, two minibatches": Variant(
        {**REMAT, "sequence_parallel": True}, options={"num_minibatches": 2}
    ),
}
OF_STAGES = {
    "1f1b": Variant(),
    "gpipe, inputs kept": Variant(pipeline={"schedule": "gpipe", "keep": "inputs"}),
    "two chunks": Variant({"num_layers": 16}, pipeline={"chunks": 2}),
    "gathered once a step": Variant(options={"communicate_every": "step"}),
    "ZeRO-1": VARIANTS["ZeRO-1"],
    "HSDP": VARIANTS["HSDP"],
    "tied, remat": Variant({**REMAT, "tied_head": True}),
}
OF_CONTEXTS = {
    "ring": Variant(),
    "ulysses": Variant({"context_attention": "ulysses"}),
    "gather": Variant({"context_attention": "gather"}),
    "1 key head": VARIANTS["1 key head"],
    "HSDP": VARIANTS["HSDP"],
    "ring, documents, remat, two minibatches": Variant(
        {**REMAT, "bos_token": 0}, options={"num_minibatches": 2}
    ),
}
OF_THREE_AXES = {
    "plain": Variant(),
    "2 key heads, tied, remat": Variant({**REMAT, "num_kv_heads": 2, "tied_head": True}),
}


@dataclasses.dataclass(frozen=True)
class Group:
    """Factorisations of eight devices, and what is tried on them.

    Attributes:
      model: The model's class with the fields that all variants have.
      loss_fn: Its loss.
      axis_name: The axes that split the batch.
      meshes: The sizes of the axes.
      variants: What is tried.
    """

    model: Callable[..., nn.Module]
    loss_fn: LossFn
    axis_name: tuple[str, ...]
    meshes: Sequence[Sizes]
    variants: Mapping[str, Variant]


LANGUAGE_MODEL = functools.partial(
    Transformer,
    vocab_size=VOCABULARY,
    num_layers=LAYERS,
    hidden_size=WIDTH,
    num_heads=8,
    mlp_size=2 * WIDTH,
    split_axis="model",
)
TWO_AXES = ((8, 1), (4, 2), (2, 4), (1, 8))
OVER_DATA_AND_EXPERTS = [{"data": d, "expert": e} for d, e in TWO_AXES]
OVER_ALL = [{"data": d, "model": m, "expert": e} for d, m, e in ((2, 2, 2), (1, 2, 4), (1, 4, 2))]
THREES = tuple(itertools.combinations(("data", "model", "expert", "context", "stage"), 3))
GROUPS = {
    "data, model": Group(
        LANGUAGE_MODEL,
        language_model_loss,
        ("data",),
        [{"data": d, "model": m} for d, m in TWO_AXES],
        VARIANTS,
    ),
    "data, model, expert": Group(
        functools.partial(LANGUAGE_MODEL, num_experts=8, expert_axis="expert"),
        mixture_of_experts_loss,
        ("data", "expert"),
        OVER_ALL,
        VARIANTS,
    ),
    "data, expert": Group(
        ExpertModel, expert_loss, ("data", "expert"), OVER_DATA_AND_EXPERTS, OF_EXPERTS
    ),
    "data beside expert": Group(
        ExpertModel, expert_loss, ("data",), OVER_DATA_AND_EXPERTS[1:], OF_EXPERTS
    ),
    "data, model, expert; biases": Group(
        ExpertModel, expert_loss, ("data", "expert"), OVER_ALL, OF_SPLIT_EXPERTS
    ),
    "data, stage": Group(
        functools.partial(LANGUAGE_MODEL, num_layers=8),
        language_model_loss,
        ("data",),
        [{"data": d, "stage": s} for d, s in TWO_AXES],
        OF_STAGES,
    ),
    "data, context": Group(
        functools.partial(LANGUAGE_MODEL, context_axis="context"),
        language_model_loss,
        ("data",),
        [{"data": d, "context": c} for d, c in TWO_AXES],
        OF_CONTEXTS,
    ),
    "three axes of two devices": Group(
        functools.partial(LANGUAGE_MODEL, context_axis="context"),
        language_model_loss,
        ("data",),
        [dict.fromkeys(axes, 2) for axes in THREES if "expert" not in axes],
        OF_THREE_AXES,
    ),
    "three axes of two devices, experts": Group(
        functools.partial(
            LANGUAGE_MODEL, context_axis="context", num_experts=8, expert_axis="expert"
        ),
        mixture_of_experts_loss,
        ("data", "expert"),
        [dict.fromkeys(axes, 2) for axes in THREES if "expert" in axes],
        OF_THREE_AXES,
    ),
}


def mesh_sizes(variant: Variant, sizes: Sizes) -> Sizes | None:
    """The mesh that a variant runs on: HSDP takes replicas from `data`, if there are two."""
    if variant.builder is not hsdp:
        return sizes
    return {"replica": 2, **sizes, "data": sizes["data"] // 2} if sizes["data"] > 1 else None


def make_batch() -> Batch:
    """Random tokens; sequences have from no valid token to all."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (BATCH, LENGTH + 1), dtype=np.int32)
    valid = rng.permutation(BATCH) * LENGTH // (BATCH - 1)
    mask = (np.arange(LENGTH)[None] < valid[:, None]).astype(np.float32)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask)


@functools.cache
def on_one_device(model: nn.Module, loss_fn: LossFn) -> tuple[Any, Any]:
    """Random parameters of a model, and their gradient by plain flax."""
    batch = make_batch()
    init = jax.jit(lambda key: nn.unbox(model.init({"params": key}, batch.inputs)["params"]))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: np.asarray(x) + 0.2 * rng.standard_normal(x.shape, np.float32),
        init(jax.random.key(0)),
    )
    gradient = jax.jit(jax.grad(lambda p: loss_fn(p, model.apply, batch, jax.random.key(0))[0]))
    return params, jax.device_get(gradient(params))


def difference(group: Group, variant: Variant, sizes: Sizes) -> tuple[float, str]:
    """The worst difference of a variant on a mesh, and the parameter that it is of."""
    model = group.model(**variant.fields)
    params, expected = on_one_device(model, group.loss_fn)
    axes = tuple(axis for axis in group.axis_name if axis in sizes) or ("data",)
    sizes = {"data": 1, **sizes} if axes == ("data",) else sizes
    options = dict(variant.options)
    if "context" in sizes:
        options["context_axis"] = "context"
    if "stage" in sizes:
        options["pipeline"] = Pipeline(**variant.pipeline)
        parts = math.prod(sizes[axis] for axis in (*axes, "replica") if axis in sizes)
        options["num_minibatches"] = min(4, BATCH // parts)
    program = variant.builder(
        model,
        optax.sgd(1.0, momentum=0.0),  # Its state is the gradient, not rounded by a subtraction.
        group.loss_fn,
        mesh=make_mesh(sizes),
        batch=make_batch(),
        axis_name=axes if len(axes) > 1 else axes[0],
        min_weight_size=1,
        **options,
    )
    state, _ = program.train_step(program.init_from(params), make_batch())
    (found,) = (x.trace for x in state.opt_state if isinstance(x, optax.TraceState))
    found, after = jax.device_get((found, state.params))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), after,
                 jax.tree.map(np.subtract, params, found))  # fmt: skip
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return max(
        (float(np.abs(g - e).max() / np.abs(e).max()), path_name(path))
        for (path, g), e in zip(leaves, jax.tree.leaves(expected), strict=True)
    )


def measure(name: str, *, quick: bool) -> Iterator[tuple[str, dict[str, tuple[float, str]]]]:
    """A group's variants with the worst difference on each of its meshes."""
    group = GROUPS[name]
    for title in list(group.variants)[-1:] if quick else group.variants:
        found = {}
        for sizes in group.meshes:
            run_on = mesh_sizes(group.variants[title], sizes)
            if run_on is None or (quick and 1 in sizes.values()):
                continue
            began = time.perf_counter()
            found[heading(sizes)] = difference(group, group.variants[title], run_on)
            worst, path = found[heading(sizes)]
            seconds = time.perf_counter() - began
            print(f"{name} {heading(sizes)}, {title}: {worst:.1e} of {path} ({seconds:.0f} s)",
                  flush=True)  # fmt: skip
        yield title, found


def heading(sizes: Sizes) -> str:
    """`4 x 2`, or the names of the axes if all are of one size."""
    same = len(sizes) > 2 and len(set(sizes.values())) == 1
    return ", ".join(sizes) if same else " x ".join(map(str, sizes.values()))


def report(results: Mapping[str, Mapping[str, Any]], conditions: str) -> list[str]:
    """The results as Markdown."""
    every = [
        (value, path, name, title, mesh)
        for name, rows in results.items()
        for title, row in rows.items()
        for mesh, (value, path) in row.items()
    ]
    value, path, name, title, mesh = max(every)
    lines = [
        "## Gradients against one device",
        "",
        f"{conditions} The largest difference of an element in parts of the largest of its "
        f"parameter, over all parameters. The worst of {len(every)} programs is {value:.1e}, of "
        f"`{path}` on {mesh} ({name}; {title}).",
    ]
    for name, rows in results.items():
        columns = [heading(sizes) for sizes in GROUPS[name].meshes]
        lines += ["", f"| {name} | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
        for title, row in rows.items():
            cells = [f"{row[mesh][0]:.1e}" if mesh in row else "" for mesh in columns]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the last variant of each group")
    parser.add_argument("--only", choices=GROUPS, help="one group of factorisations")
    parser.add_argument("--output", type=Path, help="a Markdown file to write to")
    parser.add_argument("--json", type=Path, help="a JSON file to write to")
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.split_exactness", argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)
    names = [args.only] if args.only else list(GROUPS)
    results = {name: dict(measure(name, quick=args.quick)) for name in names}
    lines = report(results, conditions.sentence())
    print("\n".join(lines))
    write_results(conditions, lines=lines, data=results, output=args.output, json_output=args.json)


if __name__ == "__main__":
    main()
