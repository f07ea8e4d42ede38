"""Mistakes in configs: wrong fields, fields that contradict, and models that do not fit."""

from pathlib import Path

import ml_collections
import optax.contrib
import pytest

from configs import fsdp, fsdp_lm, tp_lm
from manualpar.core.mesh.mesh import MOST, simulate_devices
from manualpar.training import memory_check
from manualpar.training.checkpoints.compatibility import REMOVED, RENAMED
from manualpar.training.config import check_config, complete_config
from manualpar.training.config_fields import FIELDS, MODEL_FIELDS
from manualpar.training.experiment import prepare
from tests.refused.sentences import cases, literally
from tests.refused.table import check_refused, rows

SMALL = {"model.hidden_size": 16}
# A row is a field, a value that the field cannot have, and words of the message.
WRONG = (
    ("seed", -1, "config.seed is -1, expected an integer, at least 0 and less than 4294967296."),
    ("seed", 2**32, "config.seed is 4294967296, expected an integer"),
    ("model.name", "transformr", "the nearest one is 'transformer'"),
    ("model.num_heads", 3, "num_heads is not a known field of a config with model.name='class"),
    ("training.on_nonfinite", "ignroe", "the nearest one is 'ignore'"),
    ("checkpoint.every_steps", -1, "config.checkpoint.every_steps is -1, expected an integer"),
    ("watch.lost_seconds", 0, "config.watch.lost_seconds is 0.0, expected a finite number"),
    ("seed", True, "config.seed is True, expected an integer"),
    ("seed", 1.0, "config.seed is 1.0, expected an integer"),
    ("training.log_every_steps", 0, "log_every_steps is 0, expected an integer, at least 1."),
    ("data.batch_size", 2**31, "is 2147483648, expected an integer, at least 1 and less than"),
    ("model.dropout_rate", 1.0, "expected a finite number, at least 0 and less than 1."),
    ("optimizer.learning_rate", float("nan"), "config.optimizer.learning_rate is nan, expected"),
    ("optimizer.learning_rate", float("inf"), "config.optimizer.learning_rate is inf, expected"),
    ("optimizer.weight_decay", "0.1", "config.optimizer.weight_decay is '0.1', expected a"),
    ("data.source", "digitz", "expected one of 'digits', 'synthetic'; the nearest one is 'digits'"),
    ("data.source", 3, "config.data.source is 3, expected one of 'digits', 'synthetic'."),
    (
        "parallel.strategy",
        "fdsp",
        "config.parallel.strategy is 'fdsp', expected one of 'dp', 'zero1', 'zero2', 'fsdp', "
        "'hsdp', 'diloco'; the nearest one is 'fsdp'.",
    ),
    ("parallel.strategy", "zero", "the nearest one is 'zero1'."),
    (
        "parallel.mode",
        "automatic",
        "config.parallel.mode is 'automatic', expected one of 'manual', 'auto', 'explicit', "
        "'auto-unconstrained'; the nearest one is 'auto'.",
    ),
    ("parallel.pad", 1, "config.parallel.pad is 1, expected True or False."),
    ("parallel.reshard_after_forward", "no", "is 'no', expected True or False."),
    (
        "parallel.communicate_every",
        "epoch",
        "is 'epoch', expected one of 'minibatch', 'step', 'gather-step'",
    ),
    (
        "parallel.keep_gathered",
        "head",
        "config.parallel.keep_gathered is 'head', expected a tuple of names such as ('head',).",
    ),
    ("parallel.keep_gathered", (("head", None),), "is (('head', None),), expected a tuple of n"),
    ("parallel.keep_gathered", ("",), "config.parallel.keep_gathered is ('',), expected a"),
    ("parallel.axis_by_axis", 1, "config.parallel.axis_by_axis is 1, expected True or False."),
    (
        "parallel.gather_dtype",
        "float16",
        "expected one of '', 'bfloat16', 'float32'; the nearest one is 'bfloat16'.",
    ),
    ("parallel.reduce_dtype", None, "config.parallel.reduce_dtype is None, expected one of ''"),
    (
        "parallel.rules",
        ("embed", None),
        "config.parallel.rules is ('embed', None), expected a tuple of pairs such as "
        "(('embed', None), ('mlp', 'data')).",
    ),
    ("parallel.rules", (("embed", 3),), "is (('embed', 3),), expected a tuple of pairs"),
    ("parallel.rules", (("a", "b", "c"),), "is (('a', 'b', 'c'),), expected a tuple of pairs"),
    ("parallel.rules", "embed", "config.parallel.rules is 'embed', expected a tuple of pairs"),
    ("training.norm_metrics", 0, "config.training.norm_metrics is 0, expected True or False."),
    (
        "debug.check_replicas_every",
        -1,
        "config.debug.check_replicas_every is -1, expected an integer, at least 0.",
    ),
    ("debug.draw_sharding", True, "config.debug.draw_sharding is True, expected a string."),
    ("model.dtype", "bfloat", "the nearest one is 'bfloat16'"),
    ("parallel.mesh", ml_collections.ConfigDict({"": 8}), "mesh has an axis '', expected names"),
    (
        "parallel.mesh.data",
        ml_collections.ConfigDict({"a": 1}),
        "config.parallel.mesh.data is a: 1 , expected a number of devices",
    ),
    (
        "parallel.mesh_order",
        ("model", "data"),
        "config.parallel.mesh_order is ('model', 'data') and names ['model'], which the mesh",
    ),
    ("data.prefetch", 10**9, "is 1000000000, expected an integer, at least 1 and less than"),
    ("training.num_steps", 2**31, "expected an integer, at least 1 and less than 2147483648."),
    ("optimizer.learning_rate", 1e39, "is 1e+39, expected a finite number, at least 0 and less"),
    (
        "optimizer.name",
        "lyon",
        "config.optimizer.name is 'lyon', expected an optimizer of optax or",
    ),
    ("optimizer.name", "lyon", "the nearest one is 'lion'."),
    ("optimizer.name", "lookahead", "argument learning_rate and needs no other optimizer or func"),
    ("optimizer.name", "schedule_free", "config.optimizer.name is 'schedule_free', expected an"),
    ("optimizer.name", "schedule_free_adamw", "evaluates an average of the parameters that it tr"),
    ("optimizer.name", "scale_by_rprop", "the nearest one is 'rprop'."),
    ("optimizer.name", "adam", "weight_decay is 0.1, expected 0.0, because optax.adam has no arg"),
    ("optimizer.name", "adafactor", "its own weight_decay_rate belongs in config.optimizer.argume"),
    ("optimizer.name", "prodigy", "config.optimizer.decay_mask is () and config.optimizer.weight"),
    ("optimizer.name", "prodigy", """set --config.optimizer.decay_mask="('*',)"."""),
    ("optimizer.arguments", 3, "arguments is 3, expected a dict such as {'nesterov': True}."),
    ("optimizer.arguments", {"nestrov": True}, "has 'nestrov', which optax.adamw does not have, "),
    ("optimizer.arguments", {"nestrov": True}, "expected 'b1', 'b2', 'eps', 'eps_root', 'mu_dty"),
    ("optimizer.arguments", {"nestrov": True}, "; the nearest one is 'nesterov'."),
    ("optimizer.arguments", {1: 8}, "has 1, which optax.adamw does not have, "),
    ("training.trackers", 3, "trackers is 3, expected a tuple of names among "),
    ("optimizer.arguments", {"nesterov": 1}, "nesterov=1, expected True or False, as optax.ada"),
    ("optimizer.arguments", {"eps": "1e-8"}, "has eps='1e-8', expected a finite number, as opt"),
    ("optimizer.arguments", {"eps": True}, "has eps=True, expected a finite number"),
    ("optimizer.arguments", {"eps": float("nan")}, "has eps=nan, expected a finite number"),
    ("optimizer.arguments", {"b1": None}, "has b1=None, expected a finite number, as optax.adamw"),
    ("optimizer.arguments", {"mu_dtype": "int8"}, "the name of a floating-point dtype such as 'b"),
    ("optimizer.arguments", {"mu_dtype": "half-ish"}, "dtype such as 'bfloat16' or None, as opt"),
    ("optimizer.arguments", {"weight_decay": 0.1}, "which config.optimizer.weight_decay sets; se"),
    ("optimizer.arguments", {"learning_rate": 1.0}, "which config.optimizer.learning_rate sets"),
    ("optimizer.arguments", {"mask": True}, "has 'mask', which config.optimizer.decay_mask sets;"),
    ("optimizer.qk_clip", -1.0, "config.optimizer.qk_clip is -1.0, expected"),
    ("optimizer.matrices", ("*",), "config.optimizer.matrices is ('*',) and config.optimizer.name"),
    ("optimizer.decay_mask", "*", "config.optimizer.decay_mask is '*', expected a tuple of globs"),
    ("optimizer.warmup_steps", 1001, "and config.training.num_steps is 1000, expected at most as"),
    ("optimizer.warmup_steps", 1001, "the warm-up would be longer than the run; set --config.opti"),
    ("schedule.name", "linear", "config.schedule.name is 'linear', expected a schedule of optax,"),
    ("schedule.name", "linear", "; the nearest one is 'linear_schedule'."),
    ("schedule.name", "sgdr_schedule", "config.schedule.name is 'sgdr_schedule', expected a sch"),
    ("schedule.name", "linear_schedule", "has no 'end_value', which optax.linear_schedule needs,"),
    ("schedule.name", "cosine_onecycle_schedule", "begins with a rise of its own; set --config.o"),
    ("schedule.arguments", {"init_value": 1.0}, "which config.optimizer.learning_rate sets; set"),
    ("schedule.arguments", {"decay_steps": 9.0}, "has decay_steps=9.0, expected an integer"),
    ("watch.stall_seconds", 1e300, "is 1e+300, expected a finite number, at least 0 and less"),
    ("model.num_layers", 10**6, "config.model.num_layers is 1000000, expected at most 1000: ea"),
    ("optimizer.num_minibatches", 1001, "num_minibatches is 1001, expected at most 1000: each"),
    ("parallel.mesh", 8, "config.parallel.mesh is 8, expected a dict of axis sizes"),
    ("parallel.mesh.data", 0, "config.parallel.mesh.data is 0, expected a number of devices"),
    ("parallel.mesh.data", 2.0, "config.parallel.mesh.data is 2.0, expected a number"),
    (
        "training.num_step",
        1,
        "num_step is not a known field of a config with model.name='classifier'; the nearest "
        "one is config.training.num_steps.",
    ),
)
# An optimizer without weight decay, other changes, and words of the message.
OPTIMIZERS = (
    ("sm3", {}, "because the learning rate of optax.sm3 must be a number; set --config.schedule"),
    ("rprop", {"schedule.name": "constant_schedule"}, "config.optimizer.warmup_steps is 50, exp"),
    ("dpsgd", {}, "has no 'l2_norm_clip', which optax.contrib.dpsgd needs, expected a finite num"),
    ("lbfgs", {"optimizer.arguments": {"linesearch": 1}}, "which is a function or an object in"),
    ("lbfgs", {"optimizer.arguments": {"memory_size": 1.5}}, "memory_size=1.5, expected an integ"),
    ("prodigy", {"optimizer.arguments": {"betas": 0.9}}, "expected a tuple such as (0.9, 0.999)"),
    ("prodigy", {"optimizer.arguments": {"betas": (0.9, "x")}}, "betas=(0.9, 'x'), expected a tu"),
    ("sgd", {"optimizer.arguments": {"b1": 0.9}}, "'b1', which optax.sgd does not have, expecte"),
)
if hasattr(optax.contrib, "MuonDimensionNumbers"):  # Not in optax 0.2.5.
    OPTIMIZERS += (
        (
            "muon",
            {"optimizer.arguments": {"preconditioning": "x"}},
            "expected one of 'frobenius', ",
        ),
        ("galore", {"optimizer.arguments": {"weight_dimension_numbers": 1}}, "is a function or an"),
    )


def changed(changes, module=fsdp):
    """Returns a complete config with some fields changed; their types are not checked here."""
    config = complete_config(module.get_config())
    for name, value in changes.items():
        *groups, last = name.split(".")
        group = config
        for each in groups:
            group = group[each]
        with group.unlocked(), group.ignore_type():
            group[last] = value
    return config


def check(changes, module=fsdp):
    check_config(changed(changes, module))


def check_language_model(changes):
    check(changes, fsdp_lm)


def check_without(field):
    module, name = field
    *groups, last = name.split(".")
    config = module.get_config().unlock()
    del (config[groups[0]] if groups else config)[last]
    check_config(config)


def check_removed(name):
    group, field = name.split(".")
    config = fsdp_lm.get_config().unlock()
    config[group][field] = REMOVED[name][0]
    check_config(config)


def build(changes):
    prepare(changed(SMALL | changes))


def build_split(changes):
    """Builds a config's program: a small language model with split layers, on a few texts."""
    for number in range(5):
        Path(f"{number}.txt").write_text(f"{number} and no more\n" * 30)
    sizes = {"model.mlp_size": 16, "model.num_layers": 1, "model.vocab_multiple": 4}
    data = {"data.path": str(Path.cwd()), "data.sequence_length": 8}
    mesh = {"parallel.mesh": {"data": 2, "model": 4}}
    prepare(changed(SMALL | sizes | data | mesh | changes, tp_lm))


def fit(changes):
    """Checks whether a config's program fits into a machine with 32 GiB of memory."""
    config = fsdp.get_config()
    config.update_from_flattened_dict({"optimizer.num_minibatches": 1, **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "host_memory", lambda: 2**35)
        memory_check.check_fits(prepare(config))


def required(module, fields):
    """Yields a case for each field without a default, for configs that lack this field."""
    for name, field in fields.items():
        if field.default is None:
            yield (module, name), f"config.{name} is missing, expected"


REFUSED = [
    *rows("config", check, *literally(*(({name: value}, words) for name, value, words in WRONG))),
    *rows(
        "config",
        check,
        *(
            ({name: old}, f"config.{name} is '{old}', .* called '{new}' now")
            for name, values in RENAMED.items()
            for old, new in values.items()
        ),
    ),
    *rows("config", check_config, ({}, r"config is a dict, expected an ml_collections\.Conf")),
    *rows(
        "a missing field",
        check_without,
        *required(fsdp, {**FIELDS, **MODEL_FIELDS["classifier"]}),
        *required(fsdp_lm, MODEL_FIELDS["transformer"]),
    ),
    *rows(
        "a removed field",
        check_removed,
        *((name, f"config.{name} was removed: it .*; delete the field") for name in REMOVED),
    ),
    *rows(
        "an optimizer",
        check,
        *literally(
            *(
                ({"optimizer.weight_decay": 0.0, "optimizer.name": name} | changes, words)
                for name, changes, words in OPTIMIZERS
            )
        ),
    ),
    *rows(
        "layers",
        check_language_model,
        (
            {"model.scan_layers": True, "optimizer.name": "galore", "optimizer.weight_decay": 0.0},
            "config.model.scan_layers is True, expected False, because the optimizer treats each",
        ),
        ({"model.num_layers": 10**6}, r"by itself; or set config\.model\.scan_layers=True"),
        *(
            (
                {"model.scan_layers": True, "model.num_layers": 10**6, name: value},
                rf"config\.{name} is {value}, expected .* less than",
            )
            for name, value in (
                ("model.num_layers", 2**31),
                ("model.num_experts", 1001),
                ("parallel.pipeline_chunks", 1001),
            )
        ),
    ),
    *rows(
        "options together",
        build,
        *literally(
            (
                {"parallel.strategy": "hsdp"},
                "config.parallel.strategy is 'hsdp' and config.parallel.mesh has the axes ['data'"
                "], expected 'replica' too; set "
                """--config.parallel.mesh="{'replica': 2, 'data': -1}".""",
            ),
            (
                {"parallel.mode": "auto", "parallel.reduce_dtype": "float32"},
                "config.parallel.reduce_dtype is 'float32' and config.parallel.mode is 'auto', "
                "expected '' or mode 'manual', because in other modes XLA chooses where it sums.",
            ),
            (
                {"parallel.mode": "auto", "parallel.axis_by_axis": True},
                "config.parallel.axis_by_axis is True and config.parallel.mode is 'auto', expected "
                "False or mode 'manual', because in other modes XLA chooses how it sends.",
            ),
            (
                {"parallel.keep_gathered": ("output_dens",)},
                "keep_gathered names 'output_dens', expected a parameter or a module with "
                "parameters, such as 'output_dense'",
            ),
            (
                {"parallel.rules": (("embed", "modle"),)},
                "['modle'], but the mesh has the axes ['data']",
            ),
            (
                {
                    "parallel.mesh": {"data": 4, "replica": 2},
                    "parallel.strategy": "hsdp",
                    "optimizer.num_minibatches": 32,
                },
                "config.data.batch_size is 128, expected a multiple of 256, the 8 devices along "
                "'replica' and 'data' times config.optimizer.num_minibatches=32.",
            ),
            (
                {"debug.draw_sharding": "input_dens/kernel"},
                "config.debug.draw_sharding is 'input_dens/kernel', expected the path of a "
                "parameter, 'all' or '' for none; the nearest one is 'input_dense/kernel'.",
            ),
            (
                {"optimizer.decay_mask": ("*kernel", "!*embedding*")},
                "config.optimizer.decay_mask has '!*embedding*', which matches no parameter, "
                "expected globs on the parameters' paths",
            ),
            (
                {"optimizer.name": "muon", "optimizer.matrices": ("!output_dens/*",)},
                "config.optimizer.matrices has '!output_dens/*', which matches no parameter, "
                "expected globs on the parameters' paths such as '*kernel' and '!head/*'; the "
                "nearest one is 'output_dense/",
            ),
            (
                {"optimizer.name": "muon", "optimizer.matrices": ("output_dense/bias",)},
                "config.optimizer.matrices has 'output_dense/bias', a parameter of shape (10,), "
                "expected a matrix",
            ),
            (
                {"optimizer.name": "sophia"},
                "config.optimizer.name is 'sophia': its update raises ValueError (obj_fn must be",
            ),
            (
                {
                    "schedule.name": "warmup_cosine_decay_schedule",
                    "schedule.arguments": {"init_value": 0.0, "decay_steps": 3},
                },
                "expected arguments that optax.warmup_cosine_decay_schedule accepts; it raises Val",
            ),
            (
                {"checkpoint.best_metric": "acuracy", "training.eval_every_steps": 5},
                "expected one of 'accuracy', 'loss' or '' for none; the nearest one is 'ac",
            ),
            (
                {"checkpoint.best_metric": "loss", "training.eval_every_steps": 0},
                "config.training.eval_every_steps is 0, expected at least 1",
            ),
        ),
    ),
    *rows(
        "split layers",
        build_split,
        *literally(
            (
                {"parallel.mesh": {"data": 8}},
                "config.parallel.sequence is True and config.parallel.mesh has the axes ['data'], "
                "expected the axis 'model' and no rules",
            ),
            (
                {"parallel.rules": (("embed", None),)},
                "['data', 'model'] and config.parallel.rules=(('embed', None),), expected the axis",
            ),
            (
                {"parallel.mode": "auto"},
                "config.parallel.sequence is True and config.parallel.mode is 'auto', expected "
                "False or mode 'manual', because in other modes XLA chooses how activations are "
                "sharded.",
            ),
            (
                {"model.vocab_multiple": 1},
                "config.model.vocab_multiple is 1, which makes a vocabulary of 257, expected a "
                "vocabulary that divides over the 4 devices along 'model'; set "
                "--config.model.vocab_multiple=4.",
            ),
            (
                {"parallel.sequence": False, "parallel.layer_overlap": "ring"},
                "config.parallel.layer_overlap is 'ring' and config.parallel.sequence is False, "
                "expected 'none', 'dual_batch' or sequence=True",
            ),
            (
                {
                    "parallel.mesh": {"data": 8},
                    "parallel.sequence": False,
                    "parallel.layer_overlap": "dual_batch",
                },
                "config.parallel.layer_overlap is 'dual_batch' and config.parallel.mesh has the "
                "axes ['data'], expected 'none' or layers that are split over 'model'",
            ),
            (
                {
                    "parallel.mode": "auto",
                    "parallel.sequence": False,
                    "parallel.layer_overlap": "dual_batch",
                },
                "config.parallel.layer_overlap is 'dual_batch' and config.parallel.mode is 'auto', "
                "expected 'none' or mode 'manual'",
            ),
            (
                {"parallel.layer_overlap": "dual_batch", "data.batch_size": 2},
                "config.parallel.layer_overlap is 'dual_batch', and config.data.batch_size=2 gives "
                "a device 1 sequence of a minibatch (2 devices with different sequences, 1 "
                "minibatch), expected an even number",
            ),
            (
                {"data.sequence_length": 6},
                "config.data.sequence_length is 6, expected a multiple of the 4 devices along "
                "'model'",
            ),
            (
                {"parallel.mesh": {"expert": 4, "model": 2}},
                "has the axes ['expert', 'model'] and the model has no experts to divide over "
                "'expert'",
            ),
        ),
    ),
    *rows(
        "fine-tuning",
        lambda changes: build({"model.num_layers": 1, **changes}),
        *literally(
            (
                {"model.lora": ("output_dense",)},
                "config.model.lora has 'output_dense', expected a glob",
            ),
            (
                {"model.lora": ("output_dense:0",)},
                "has 'output_dense:0', expected a glob on module paths",
            ),
            (
                {"model.lora": ("a:1", "a:2")},
                "config.model.lora has 'a:2', which is there already, expected",
            ),
            (
                {"model.lora": ("output_dense:2",), "model.lora_alpha": 0.0},
                "config.model.lora_alpha is 0, expected",
            ),
            (
                {"model.lora_dropout": 0.1},
                "config.model.lora_dropout is 0.1 and config.model.lora is (), expected adapters",
            ),
            (
                {"model.int8": ("*kernel",)},
                "config.model.int8 has '*kernel', expected a glob on param",
            ),
        ),
        ({"model.lora": ("output:2",)}, "targets has 'output': 2, but this glob matches no module"),
    ),
    *rows(
        "memory",
        fit,
        *cases(
            (
                {"model.hidden_size": 99999999999},
                r"model\.hidden_size is 99999999999.*\(state .* TiB",
            ),
            (
                {"data.batch_size": 2**31 - 8},
                r"batch_size is 2147483640.* the batches that are read",
            ),
            (
                {"data.batch_size": 8000000, "data.prefetch": 1000},
                r"prefetch is 1000, .* the batches",
            ),
            ({"model.num_classes": 2**31 - 8}, r"model\.num_classes is 2147483640: a step takes"),
            begins=r"^(?!.*\n)(?=.*config\.data\.batch_size is )(?=.*--force).*",
        ),
    ),
    *rows(
        "devices",
        simulate_devices,
        (100000, f"--devices=100000: expected at most {MOST}, because"),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(call, error, words)
