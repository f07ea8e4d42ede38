"""What a step holds: exact where the layout says it, in the right order, and near the compiled."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from manualpar import Batch, Pipeline, abstract_mesh, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import state_bytes
from manualpar.inspect.memory import Memory, step_memory
from manualpar.models import Classifier, Transformer
from manualpar.models.cross_entropy import classification_loss, language_model_loss


def mlp(builder, *, devices=8, axes=None, examples=256, size=128, layers=2, **options):
    """A classifier on an abstract mesh, of which all is sharded that the strategy shards."""
    options |= {} if builder is data_parallel else {"min_weight_size": 0}
    return builder(
        Classifier(hidden_size=size, num_layers=layers, num_classes=10, dtype="float32"),
        optax.adamw(1e-3),
        classification_loss,
        mesh=abstract_mesh(axes or {"data": -1}, devices),
        batch=Batch(
            inputs=jax.ShapeDtypeStruct((examples, 64), jnp.float32),
            labels=jax.ShapeDtypeStruct((examples,), jnp.int32),
        ),
        **options,
    )


def language_model(builder=fsdp, *, mesh=None, examples=16, length=64, model=None, **options):
    """A transformer whose layers are scanned, by default on an abstract mesh of eight devices."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_heads": 2, "mlp_size": 128} | (model or {})
    options |= {} if builder is data_parallel else {"min_weight_size": 0}
    tokens = jax.ShapeDtypeStruct((examples, length), jnp.int32)
    return builder(
        Transformer(**sizes),
        optax.adamw(1e-3),
        language_model_loss,
        mesh=mesh or abstract_mesh({"data": -1}, 8),
        batch=Batch(inputs=tokens, labels=tokens),
        **options,
    )


@functools.cache
def scanned(remat, num_layers=2):
    return language_model(model={"remat": remat, "num_layers": num_layers})


BUILDERS = {
    "dp": (data_parallel, {}),
    "zero1": (zero, {"stage": 1}),
    "zero2": (zero, {"stage": 2}),
    "fsdp": (fsdp, {}),
    "fsdp keep": (fsdp, {"reshard_after_forward": False}),
    "fsdp once": (fsdp, {"communicate_every": "step"}),
    "hsdp": (hsdp, {"axes": {"replica": 2, "data": -1}}),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_what_lies_there_between_steps_is_exact(name):
    builder, options = BUILDERS[name]
    program = mlp(builder, **options)
    memory = step_memory(program)
    assert memory.parameters == state_bytes(program.abstract_state.params)[0]
    assert memory.optimizer == state_bytes(program.abstract_state.opt_state)[0]
    assert memory.batch == 256 // 8 * (64 + 1) * 4
    assert memory.other < 100
    assert memory.peak == sum(memory.to_json().values()) - memory.to_json()["peak"]
    assert memory.temporaries == memory.gradients + memory.gathered + memory.activations


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("name", ["dp", "zero1", "zero2"])
def test_whole_gradients_are_held_at_the_end_of_the_backward_pass(name, platform):
    builder, options = BUILDERS[name]
    # So few examples that parameters are all there is.
    memory = step_memory(mlp(builder, examples=8, size=256, **options), platform=platform)
    scatters_at_once = platform == "cpu" and builder is zero  # XLA allocates 311 KB there.
    least = 4 * 256 * 256 if scatters_at_once else memory.parameters
    assert least <= memory.gradients <= 2.5 * memory.parameters
    assert memory.activations < memory.gradients / 4


def test_parameters_that_are_gathered_at_once_are_gathered_bytes():
    # With many examples the fullest moment is where the backward pass begins. Then all is held but
    # the kernel of the first layer, which nobody needs again, and the biases.
    program = mlp(fsdp, examples=4096, size=256, communicate_every="step")
    infos = [info for info, _ in program.parameters]
    inner = sum(4 * info.shape[0] * info.shape[1] for info in infos if len(info.shape) == 2)
    inner -= 4 * 64 * 256
    once = step_memory(program)
    assert inner <= once.gathered <= inner * 1.01
    kept, dropped = (
        step_memory(mlp(fsdp, examples=4096, size=256, layers=6, reshard_after_forward=reshard))
        for reshard in (False, True)
    )
    assert dropped.gathered < kept.gathered / 2


@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_codes_are_parameters_and_gradients_and_no_activations(name):
    builder, options = BUILDERS[name]
    codes = {"gather_code": "int8"} if name == "fsdp" else {}
    exact = step_memory(mlp(builder, size=256, **options))
    coded = step_memory(mlp(builder, size=256, **options, **codes, reduce_code="int4"))
    assert 0 < coded.activations <= exact.activations
    assert coded.gradients > 0


def test_fsdp_holds_less_than_zero_and_zero_less_than_data_parallelism():
    programs = [mlp(BUILDERS[name][0], **BUILDERS[name][1]) for name in ("fsdp", "zero1", "dp")]
    for platform in ("cpu", "tpu"):
        peaks = [step_memory(program, platform=platform).peak for program in programs]
        assert peaks == sorted(peaks)


def test_gpus_hold_the_gradients_of_one_more_iteration():
    # A layer's complete gradients have the bytes of its gathered parameters.
    tpu, gpu = (step_memory(scanned("full"), platform=platform) for platform in ("tpu", "gpu"))
    assert gpu.gradients - tpu.gradients == tpu.gathered > 0


@pytest.mark.slow
def test_what_is_recomputed_is_not_held():
    programs = [scanned(remat) for remat in ("full", "dots", "none")]
    for platform in ("cpu", "tpu"):
        peaks = [step_memory(program, platform=platform).peak for program in programs]
        assert peaks == sorted(peaks)


@pytest.mark.slow
@pytest.mark.parametrize("use_scan", [False, True])
def test_more_minibatches_hold_fewer_activations(use_scan):
    held = [
        step_memory(
            language_model(
                examples=64,
                num_minibatches=m,
                use_scan=use_scan,
                model={"remat": "none", "dtype": "bfloat16", "num_layers": 2},
            )
        ).activations
        for m in (4, 1)
    ]
    assert held == sorted(held)
    assert held[0] < 0.4 * held[-1]


def test_more_devices_hold_less_state_and_the_same_activations():
    few, many = (step_memory(mlp(fsdp, devices=n, examples=32 * n)) for n in (4, 16))
    assert few.parameters > 3.5 * many.parameters
    assert few.optimizer > 3.5 * many.optimizer
    assert few.batch == many.batch
    assert many.activations <= few.activations * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_a_scanned_model_grows_with_depth_by_what_a_layer_keeps(remat):
    few, many = (step_memory(scanned(remat, layers)).activations for layers in (2, 4))
    stream = 16 // 8 * 64 * 64 * 4  # Bytes of the residual stream, which a layer keeps.
    sums = 16 // 8 * 64 * 2 * 4  # And what attention returns, and the sums of its two heads.
    if remat == "full":
        assert many - few == 2 * (2 * stream + sums)
    else:
        assert many - few > 2 * 4 * stream


@pytest.mark.slow
def test_eighty_layers_on_a_pod():
    model = {
        "num_layers": 80,
        "hidden_size": 8192,
        "num_heads": 64,
        "num_kv_heads": 8,
        "mlp_size": 28672,
        "vocab_size": 32000,
        "dtype": "bfloat16",
        "remat": "full",
    }
    mesh = abstract_mesh({"data": -1}, 4096)
    program = language_model(mesh=mesh, examples=4096, length=4096, model=model)
    memory = step_memory(program)
    assert memory.parameters == state_bytes(program.abstract_state.params)[0]
    # The residual stream into each of the layers is kept.
    assert memory.activations > 80 * 4096 * 8192 * 2


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_other_modes_are_taken_as_what_they_ask_for(mode):
    assert step_memory(mlp(fsdp, mode=mode)) == step_memory(mlp(fsdp))


def test_another_axis_is_none_of_memorys_concern_in_mode_manual():
    assert isinstance(step_memory(mlp(fsdp, axes={"data": 4, "model": 2})), Memory)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_near_what_xla_allocates(name, remat):
    builder, options = BUILDERS[name]
    program = language_model(
        builder, mesh=make_mesh({"data": -1}), model={"remat": remat}, **options
    )
    memory = step_memory(program, platform="cpu")
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    compiled = lowered.compile().memory_analysis()
    between = memory.peak - memory.temporaries
    assert compiled.argument_size_in_bytes == pytest.approx(between, rel=0.01)
    assert 0.7 < memory.temporaries / compiled.temp_size_in_bytes < 1.2


def pipelined(mesh, microbatches, **fields):
    """A transformer on two rows of four stages, with two examples in a microbatch."""
    return language_model(
        mesh=mesh,
        examples=4 * microbatches,
        length=32,
        model={"num_layers": 4},
        num_minibatches=microbatches,
        pipeline=Pipeline(**fields),
    )


@pytest.mark.slow
def test_a_pipeline_holds_what_is_in_its_slots():
    mesh = abstract_mesh({"data": 2, "stage": 4}, 8)
    few = pipelined(mesh, 8, schedule="1f1b", keep="inputs")
    many = pipelined(mesh, 16, schedule="gpipe", keep="inputs")
    tables, memories = [], []
    for program in (few, many):
        tables.append(program.pipeline.table)
        memories.append(step_memory(program))
    slots = [table.activation_slots + table.gradient_slots for table in tables]
    assert slots == [7 + 1, 16 + 16]
    slot = 2 * 32 * 64 * 4  # Two examples of 32 positions and 64 features.
    assert memories[1].activations - memories[0].activations == (slots[1] - slots[0]) * slot
    assert memories[0].gradients > 0


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("keep", ["residuals", "inputs"])
def test_a_pipeline_is_near_what_xla_allocates(keep):
    program = pipelined(make_mesh({"data": 2, "stage": 4}), 8, schedule="gpipe", keep=keep)
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    compiled = lowered.compile().memory_analysis()
    estimate = step_memory(program, platform="cpu").temporaries
    assert 0.6 < estimate / compiled.temp_size_in_bytes < 1.6
