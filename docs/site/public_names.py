"""Lists the public names in groups, for the first page of the reference."""

import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Group(NamedTuple):
    """Public names for one purpose.

    Attributes:
      title: The heading.
      sentence: Markdown below the heading.
      names: Names as a program imports them. The name of a package or a module stands for its
        `__all__`; the page shows all classes and functions in it that no other entry lists.
    """

    title: str
    sentence: str
    names: tuple[str, ...]


GROUPS = (
    Group(
        "Build a program",
        "A builder returns a program. [Which strategy?](../which_strategy.md) chooses a builder, "
        "and [your own model](../your_own_model.md) passes a model to it.",
        (
            "manualpar.data_parallel",
            "manualpar.zero",
            "manualpar.fsdp",
            "manualpar.hsdp",
            "manualpar.diloco",
            "manualpar.Program",
            "manualpar.TrainState",
            "manualpar.Batch",
            "manualpar.print_metrics",
            "manualpar.core.state.metrics",
            "manualpar.muon_dims",
            "manualpar.MatrixDims",
            "manualpar.params_ema",
            "manualpar.ema_params",
        ),
    ),
    Group(
        "Mesh and processes",
        "A program runs on a mesh of devices, in [one process or several](../clusters.md).",
        (
            "manualpar.make_mesh",
            "manualpar.abstract_mesh",
            "manualpar.simulate_devices",
            "manualpar.core.mesh.mesh",
            "manualpar.core.mesh.axes",
            "manualpar.core.mesh.mesh_context",
            "manualpar.core.mesh.splitting.typed_key",
            "manualpar.system.cluster",
        ),
    ),
    Group(
        "Split layers",
        "Plans and layers for [tensor parallelism](../split_a_layer.md), "
        "[experts](../experts.md), [long contexts](../long_context.md) and "
        "[pipelines](../pipelines.md).",
        (
            "manualpar.tensor_parallel",
            "manualpar.Column",
            "manualpar.Row",
            "manualpar.Vocab",
            "manualpar.PerDevice",
            "manualpar.Pipeline",
            "manualpar.layers",
            "manualpar.layers.attention",
            "manualpar.layers.attention.key_value_cache",
            "manualpar.layers.model_fields",
            "manualpar.layers.moe.routing",
            "manualpar.layers.pipeline",
            "manualpar.layers.pipeline.schedules",
        ),
    ),
    Group(
        "Write collectives yourself",
        "Call these functions inside of `jax.shard_map`, as [FSDP, step by step](../fsdp.md) does.",
        (
            "manualpar.shard_params",
            "manualpar.gather_params",
            "manualpar.shard_module_params",
            "manualpar.ShardedParameter",
            "manualpar.gather_array_with_mean_grads",
            "manualpar.gather_examples",
            "manualpar.accumulate_gradients",
            "manualpar.sync_gradients",
            "manualpar.sync_metrics",
            "manualpar.fold_rng_over_axis",
            "manualpar.core.parameters.collectives",
            "manualpar.core.parameters.sharded_parameter",
            "manualpar.quantization",
        ),
    ),
    Group(
        "Inspect a step",
        "These functions read what a step sends, computes and holds, and compare it with one "
        "device. [Find a problem](../find_a_problem.md) uses them.",
        (
            "manualpar.assert_same_as_one_device",
            "manualpar.inspect",
            "manualpar.inspect.budgets",
            "manualpar.inspect.ledger_difference",
            "manualpar.inspect.layer_formulas",
            "manualpar.inspect.throughput",
            "manualpar.inspect.scope_parsing",
            "manualpar.core.modes.layer_loops",
            "manualpar.core.mesh.compiler_options",
            "manualpar.core.tracing.scopes",
        ),
    ),
    Group(
        "Models and losses",
        "One transformer covers [many families](../families.md).",
        (
            "manualpar.models",
            "manualpar.models.cross_entropy.classification_loss",
            "manualpar.models.cross_entropy.language_model_loss",
            "manualpar.models.cross_entropy.mixture_of_experts_loss",
        ),
    ),
    Group(
        "Published weights and fine-tuning",
        "[Weights in and out](../start_from_what_you_have.md) and "
        "[fine-tuning](../fine_tuning.md) show how to use them.",
        (
            "manualpar.lora",
            "manualpar.merge_lora",
            "manualpar.save_adapters",
            "manualpar.load_adapters",
            "manualpar.quantized",
            "manualpar.models.pretrained",
            "manualpar.models.finetuning.preferences.WithReference",
            "manualpar.models.finetuning.preferences.first_call",
            "manualpar.models.finetuning.preferences.preference_loss",
        ),
    ),
    Group(
        "Generate and evaluate",
        "[Generate and evaluate](../generation.md) shows how to use them.",
        (
            "manualpar.models.generation",
            "manualpar.models.generation.lm_eval_model.lm_eval_model",
        ),
    ),
    Group(
        "Data",
        "A dataset has splits, and a split has examples by number, of which batches are made. "
        "[Data in files](../data.md) lists the sources.",
        ("manualpar.data",),
    ),
    Group(
        "Train",
        "`manualpar train` and the other commands of [running experiments](../running.md) call "
        "these functions, and your own program can call them too.",
        (
            "manualpar.training",
            "manualpar.training.config.named_config",
            "manualpar.training.experiment.prepare",
            "manualpar.training.run.run",
            "manualpar.training.load_run.load_run",
            "manualpar.training.load_run.load_directory",
        ),
    ),
    Group(
        "Checkpoints",
        "They are saved in the background, and restored on any mesh, as in "
        "[resume elsewhere](../resume_elsewhere.md).",
        ("manualpar.training.checkpoints",),
    ),
    Group(
        "Plan",
        "[Plan a pod](../plan_a_pod.md) estimates steps on devices that you do not have.",
        (
            "manualpar.planner",
            "manualpar.plans.tpu_compiler.compile_for_tpu",
            "manualpar.plans.gpu_compiler.compile_for_gpu",
            "manualpar.plans.layouts.layout_search.rank_layouts",
        ),
    ),
    Group(
        "Add a strategy",
        "[Write a strategy](../strategies.md#write-a-strategy) puts these together.",
        (
            "manualpar.strategies",
            "manualpar.core.modes.strategy",
            "manualpar.core.parameters.placement",
        ),
    ),
    Group(
        "Extend the package",
        "Applications of this package use these names too: to read and write states in files, to "
        "wrap the models of a library, and to report in the same style.",
        (
            "manualpar.core.program.state_arrays",
            "manualpar.core.model.interface",
            "manualpar.core.trees",
            "manualpar.core.summary",
            "manualpar.checks.guarded_step.check_state",
            "manualpar.checks.guarded_step.check_integers",
            "manualpar.inspect.tables",
            "manualpar.errors",
        ),
    ),
)
# Packages with an `__all__` that only other packages use.
INTERNAL = frozenset({"manualpar.system.storage"})


def public_page() -> str:
    """Returns the Markdown of the page; the site turns the names into links."""
    lines = ["# Public names", "", _BEGINNING, ""]
    for group, names in listed_names():
        lines += [f"## {group.title}", "", group.sentence, ""]
        lines += [*names_table(names), ""]
    return "\n".join(lines)


def names_table(names: Iterable[str]) -> list[str]:
    """Returns the lines of a Markdown table with each name and its summary."""
    rows = [f"| `{name}` | {_summary(name)} |" for name in names]
    return ["| name | what it does |", "| --- | --- |", *rows]


_BEGINNING = (
    "A program imports each name as this page writes it: `from manualpar import fsdp`. The pages "
    "under *Modules* describe all modules, also those that only this package uses."
)


def listed_names() -> Iterator[tuple[Group, list[str]]]:
    """Yields each group with its names, packages replaced by the names in their `__all__`."""
    listed = {id(find_object(name)) for group in GROUPS for name in group.names}
    for group in GROUPS:
        names = []
        for name in group.names:
            thing = find_object(name)
            if not inspect.ismodule(thing):
                names.append(name)
                continue
            for member in public_members(thing):
                if id(getattr(thing, member)) not in listed:
                    listed.add(id(getattr(thing, member)))
                    names.append(f"{name}.{member}")
        yield group, names


def public_members(package: object) -> list[str]:
    """Returns the names of the classes and functions in a package's `__all__`."""
    names = getattr(package, "__all__", ())
    return [
        name
        for name in names
        if inspect.isclass(getattr(package, name)) or inspect.isfunction(getattr(package, name))
    ]


def find_object(name: str) -> object:
    """Returns the object, or the module, that a program imports under a full name."""
    module, _, member = name.rpartition(".")
    parent = importlib.import_module(module)
    return getattr(parent, member) if hasattr(parent, member) else importlib.import_module(name)


def _summary(name: str) -> str:
    summary = (inspect.getdoc(find_object(name)) or "").partition("\n\n")[0]
    return " ".join(summary.split()).replace("|", r"\|")
