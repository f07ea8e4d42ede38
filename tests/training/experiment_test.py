"""What a config says reaches the builder of the strategy that it names, and nothing else does."""

import dataclasses
import re

import pytest
from jax.sharding import PartitionSpec as P

import manualpar
from configs import dp, fsdp, hsdp, tp_lm, zero
from manualpar.core.mesh.compiler_options import ChosenOptions
from manualpar.models.cross_entropy import mixture_of_experts_loss
from manualpar.models.flat_fields import flatten_fields
from manualpar.strategies import strategy_kinds
from manualpar.training import experiment
from manualpar.training.config import check_config, complete_config
from manualpar.training.experiment import build_experiment, prepare
from manualpar.training.task import make_task
from tests.models.transformer_families import GEMMA, QWEN

ONE_AXIS, TWO_AXES = {"data": -1}, {"replica": 2, "data": -1}
SHARED = {
    "mode": "auto",
    "rules": (("embed", None),),
    "param_dtype": "float32",
    "trainable": None,
    "frozen_dtype": None,
    "gather_dtype": "bfloat16",
    "reduce_dtype": None,
    "gather_code": None,
    "reduce_code": None,
    "stochastic_rounding": False,
    "error_feedback": False,
    "axis_by_axis": False,
    "compiler_options": {},
    "norm_metrics": True,
    "nonfinite": "skip",
    "num_minibatches": 2,
}
SHARDED = {"min_weight_size": 7, "pad": True}
GATHERED = {
    "reshard_after_forward": False,
    "communicate_every": "step",
    "keep_gathered": ("output_dense",),
    "regather_axes": (),
}
OVER_BOTH = {"axis_name": ("replica", "data")}


def _small(config, **parallel):
    config = complete_config(config)
    with config.unlocked():
        config.model.hidden_size = 16
        config.parallel.update(parallel)
    return config


def _schedule(step):
    return 0.1


def _replace_builder(monkeypatch, strategy, builder):
    kind = dataclasses.replace(strategy_kinds()[strategy], builder=builder)
    monkeypatch.setattr(experiment, "strategy_kinds", lambda: {strategy: kind})


@pytest.mark.parametrize(
    ("strategy", "mesh", "builder", "expected"),
    [
        ("dp", ONE_AXIS, "data_parallel", {}),
        ("dp", TWO_AXES, "data_parallel", OVER_BOTH),
        ("zero1", ONE_AXIS, "zero", {"stage": 1, **SHARDED}),
        ("zero2", TWO_AXES, "zero", {"stage": 2, **SHARDED, **OVER_BOTH}),
        ("fsdp", ONE_AXIS, "fsdp", {**SHARDED, **GATHERED}),
        ("fsdp", TWO_AXES, "fsdp", {**SHARDED, **GATHERED, **OVER_BOTH}),
        ("hsdp", TWO_AXES, "hsdp", {**SHARDED, **GATHERED, "replica_mean": "step"}),
    ],
)
def test_every_option_reaches_the_builder_that_has_it(
    strategy, mesh, builder, expected, monkeypatch, devices8
):
    assert strategy_kinds()[strategy].builder is getattr(manualpar, builder)
    _replace_builder(monkeypatch, strategy, lambda *args, **options: options)
    config = _small(
        fsdp.get_config(),
        strategy=strategy,
        mode="auto",
        min_weight_size=7,
        pad=True,
        reshard_after_forward=False,
        communicate_every="step",
        keep_gathered=("output_dense",),
        param_dtype="float32",
        gather_dtype="bfloat16",
        rules=(("embed", None),),
    )
    with config.unlocked():
        config.parallel.mesh = mesh
        config.optimizer.num_minibatches = 2
        config.training.norm_metrics = True
        config.training.on_nonfinite = "skip"
    options = build_experiment(config, make_task(config), _schedule)
    assert options.pop("batch").inputs.shape == (128, 64)
    # A config sorts its keys; a group of neighbours is what shares a replica all the same.
    assert list(options.pop("mesh").shape.items()) == (
        [("replica", 2), ("data", 4)] if "replica" in mesh else [("data", 8)]
    )
    assert options == SHARED | expected


@pytest.mark.parametrize(
    ("strategy", "replica", "expected"),
    [
        ("dp", 1, ("data", "data_minor")),
        ("fsdp", 2, ("replica", "data", "data_minor")),
        ("hsdp", 2, ("data", "data_minor")),
    ],
)
def test_how_it_is_sent_reaches_the_builder(strategy, replica, expected, monkeypatch, devices8):
    _replace_builder(monkeypatch, strategy, lambda *args, **options: options)
    parallel = {"strategy": strategy, "axis_by_axis": True}
    config = _small(fsdp.get_config(), **parallel)
    with config.unlocked():
        config.parallel.mesh = {"data_minor": 2, "data": -1}
        if replica > 1:
            config.parallel.mesh.replica = replica
    options = build_experiment(config, make_task(config), _schedule)
    assert options["axis_name"] == expected
    assert [*options["mesh"].shape] == (["replica"] if replica > 1 else []) + ["data", "data_minor"]
    assert options["axis_by_axis"] is True


def test_the_order_of_the_mesh_reaches_it(monkeypatch, devices8):
    _replace_builder(monkeypatch, "dp", lambda *args, **options: options["mesh"])
    config = _small(fsdp.get_config(), strategy="dp", mesh_order=("data_minor", "data"))
    with config.unlocked():
        config.parallel.mesh = {"data_minor": 2, "data": 4}
    mesh = build_experiment(config, make_task(config), _schedule)
    assert dict(mesh.shape) == {"data": 4, "data_minor": 2}
    assert list(mesh.devices.T.flat) == devices8


@pytest.mark.parametrize(
    ("config", "name"), [(dp, "data_parallel"), (zero, "zero1"), (fsdp, "fsdp"), (hsdp, "hsdp")]
)
def test_a_config_builds_its_strategy(config, name, devices8):
    program = prepare(_small(config.get_config())).program
    assert program.strategy.name == name
    assert program.data_axes == (("replica", "data") if name == "hsdp" else ("data",))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a few texts, which is read sooner than Python's standard library."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"{number} and no more\n" * 30)
    return folder


def _language(text, mesh, **fields):
    config = complete_config(tp_lm.get_config())
    with config.unlocked():
        config.parallel.mesh = mesh
        config.data.update(path=str(text), sequence_length=fields.pop("sequence_length", 8))
        config.model.update(hidden_size=16, mlp_size=16, num_layers=1)
        config.model.vocab_multiple = fields.pop("vocab_multiple", 4)
        config.model.num_experts = fields.pop("num_experts", 0)
        config.parallel.update(fields)
    return config


def test_an_axis_of_the_mesh_splits_the_layers_unless_rules_name_it(text):
    mesh = {"data": 2, "model": 4}
    rules = tuple((name, None) for name in ("vocab", "embed", "heads", "kv_heads", "mlp"))
    for config, expected in (
        (_language(text, mesh), ("model", True, False)),
        (_language(text, mesh, sequence=False), ("model", False, False)),
        (_language(text, mesh, sequence=False, rules=rules), (None, False, True)),
        (_language(text, {"data": 8}, sequence=False), (None, False, False)),
    ):
        model = make_task(config).model
        assert (model.split.axis, model.split.sequence_parallel, model.annotate) == expected


def test_experts_bring_their_axis_and_their_loss(text):
    mesh = {"data": 2, "expert": 2, "model": 2}
    task = make_task(_language(text, mesh, num_experts=4))
    assert (task.model.experts.num_experts, task.model.experts.axis) == (4, "expert")
    assert task.loss_fn is mixture_of_experts_loss
    shares = {f"expert_{index}": share for index, share in enumerate((0.5, 0.1, 0.2, 0.2))}
    assert task.derive("eval", {"loss": 1.0, **shares})["busiest_expert"] == 2.0


def test_what_a_loss_adds_is_told_by_the_config(text):
    config = _language(text, {"data": 8})
    with config.unlocked():
        config.model.logit_soft_cap, config.training.z_loss = 30.0, 1e-4
        config.training.label_smoothing = 0.1
        config.model.attention_window, config.model.attention_soft_cap = 4, 50.0
    model = make_task(config).model
    assert (model.logit_soft_cap, model.z_loss, model.label_smoothing) == (30.0, 1e-4, 0.1)
    assert (model.attention.window, model.attention.soft_cap) == (4, 50.0)


def test_a_config_says_what_a_family_does_differently(text, devices8):
    del devices8
    config, fields = _language(text, {"data": 2, "stage": 4}, sequence=False), GEMMA | QWEN
    with config.unlocked():
        config.model.update({**fields, "num_layers": 6, "scan_layers": True})
        config.optimizer.num_minibatches = 4
    check_config(config)
    model = make_task(config).model
    flat = flatten_fields(model)
    assert {field: flat[field] for field in fields} == {**fields, "num_layers": 6}
    message = (
        "config.model.num_layers is 6, expected a multiple of 4 groups of "
        "config.model.global_every=2, or up to 1 more: 4 devices along 'stage'"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(config)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [({"expert": 4, "data": 2}, ("data", "expert")), ({"expert": 8}, "expert")],
)
def test_devices_with_other_experts_have_other_examples(
    mesh, expected, text, monkeypatch, devices8
):
    _replace_builder(monkeypatch, "fsdp", lambda *args, **options: options)
    config = _language(text, mesh, num_experts=8, sequence=False)
    assert build_experiment(config, make_task(config), _schedule)["axis_name"] == expected


def test_a_best_metric_is_one_that_evaluations_report(devices8):
    config = _small(fsdp.get_config())
    with config.unlocked():
        config.checkpoint.best_metric, config.training.eval_every_steps = "accuracy", 5
    prepare(config)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_rules_shard_the_models_kernels(strategy, devices8):
    rules = (("embed", None), ("mlp", "model"), ("batch", "data"))
    mesh = {"data": 4, "model": 2}
    config = _small(fsdp.get_config(), strategy=strategy, mesh=mesh, rules=rules)
    program = build_experiment(config, make_task(config), _schedule)
    specs = {info.path: placement.spec for info, placement in program.parameters}
    data = "data" if strategy == "fsdp" else None
    assert specs["input_dense/kernel"] == P(data, "model")
    assert specs["hidden_dense_1/kernel"] == P(data, "model")
    assert specs["output_dense/kernel"] == P("model", None)
    config = _small(config, rules=rules[:1])
    with pytest.raises(ValueError, match=r"\['mlp'\] are not in rules \['embed'\]"):
        build_experiment(config, make_task(config), _schedule)


@pytest.mark.parametrize(
    ("strategy", "mesh", "parallel", "rings", "others"),
    [
        ("dp", TWO_AXES, {}, [8], []),
        ("fsdp", ONE_AXIS, {}, [8], []),
        ("fsdp", {"data": 4, "data_minor": 2}, {"axis_by_axis": True}, [4, 2], []),
        ("fsdp", {"data": 4, "data_minor": 2}, {}, [8], []),
        ("fsdp", {"data": 2, "model": 4}, {}, [2], ["model"]),
        ("hsdp", TWO_AXES, {}, [4], ["replica"]),
    ],
)
def test_compiler_options_are_those_for_the_devices_and_the_axes(
    devices8, monkeypatch, strategy, mesh, parallel, rings, others
):
    given = []
    chosen = ChosenOptions({"xla_some": "true"}, "why")
    monkeypatch.setattr(
        experiment, "choose_options", lambda *of, **by: given.append((of, by)) or chosen
    )
    monkeypatch.setattr(experiment, "keep_if_known", lambda options, device: options)
    monkeypatch.setattr(experiment, "count_hosts", lambda mesh: 2)
    _replace_builder(monkeypatch, strategy, lambda *_, **options: options["compiler_options"])
    config = _small(fsdp.get_config(), strategy=strategy, overlap="none", mesh=mesh, **parallel)
    task = make_task(config)
    assert build_experiment(config, task, _schedule) == chosen.options
    facts = {"overlap": "none", "averages": strategy == "dp", "half_bytes": 0}
    assert given == [(("cpu", rings, others), facts)]
    assert (
        build_experiment(config, task, _schedule, devices=8) == {}
    )  # There is no compiler to ask.


@pytest.mark.parametrize("halved", [False, True])
def test_options_are_chosen_for_split_positions_and_halves(devices8, monkeypatch, halved):
    given = []
    chosen = ChosenOptions({}, "")
    monkeypatch.setattr(
        experiment, "choose_options", lambda *of, **by: given.append((of, by)) or chosen
    )
    config = _small(tp_lm.get_config(), mesh={"data": 4, "model": 2}, sequence=True)
    config.model.update(num_heads=4, num_kv_heads=2)
    config.parallel.layer_overlap = "dual_batch" if halved else "none"
    prepare(config)
    tokens = config.data.batch_size // 4 // 2 * config.data.sequence_length // 2
    half = tokens * config.model.hidden_size
    facts = {"overlap": "auto", "averages": False, "half_bytes": 2 * half if halved else 0}
    assert given == [(("cpu", [4], ["model", "sequence"]), facts)]


def test_an_experiment_says_what_was_chosen(devices8, monkeypatch):
    chosen = ChosenOptions({"xla_cpu_enable_fast_math": False}, "why")
    monkeypatch.setattr(experiment, "choose_options", lambda *_, **by: chosen)
    assert prepare(_small(fsdp.get_config())).chosen == chosen
