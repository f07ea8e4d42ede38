"""The random programs: drawn from a number alone, and a wrong one is noticed."""

import json
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.random_checks import Shared, run
from benchmarks.random_comparison import Allowance, WrongError
from benchmarks.random_optimizers import OneDevice, make_optimizer
from benchmarks.random_options import FOUND, FOUND_SHARE, SHARE, draw, features_of
from benchmarks.random_programs import BAD, run_all, sentence_class
from benchmarks.random_tasks import RULES
from manualpar.core.modes.global_arrays import GlobalArrays
from manualpar.core.modes.manual import Manual
from manualpar.core.program.program import Program
from manualpar.core.program.step import Step
from manualpar.training import experiment
from tests.paths import ROOT

TINY = {
    "number": -1,
    "model": "mlp",
    "data_seed": 3,
    "batch": 8,
    "length": 8,
    "loss": "masked",
    "loss_extras": {"decay": 0.01},
    "tx": "momentum",
    "ema": False,
    "fields": {"width": 8, "depth": 2, "norm": "none"},
    "strategy": "fsdp",
    "mode": "manual",
    "mesh": {"data": 4},
    "options": {"num_minibatches": 2, "min_weight_size": 1},
    "nan_at": False,
    "evaluates": True,
    "given": False,
}


@pytest.fixture(scope="module")
def shared():
    """What one device says, which these programs have in common."""
    return Shared()


def test_a_program_is_drawn_from_its_number_alone():
    rows = [draw(number) for number in range(400)]
    assert rows == [draw(number) for number in range(400)]
    assert rows == json.loads(json.dumps(rows))
    features = {feature for row in rows for feature in features_of(row)}
    assert features >= {
        *("LoRA", "int8 base", "packed", "plan", "split layers", "experts", "dropout", "int4"),
        *("diloco", "pipeline", "context", "NNX", "trip by checkpoint", "trip by adopt"),
    }
    assert [row["tx"] for row in rows[:4]] == [rows[0]["tx"]] * 4


FAILED = ROOT / "tests" / "benchmarks" / "failed_programs.txt"


def failed_programs():
    """Returns the numbers in the table of programs that once failed."""
    lines = FAILED.read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix reads old names of flax.
@pytest.mark.parametrize("number", failed_programs())
def test_a_program_that_once_failed_is_right(devices8, number):
    outcome, words = run(draw(number), Shared())
    assert outcome not in BAD, words


@pytest.mark.slow
@pytest.mark.long
def test_programs_that_nobody_has_drawn_are_right(request):
    """Draws `--fresh` programs anew; appends the numbers of failed ones to the table."""
    numbers = []
    while len(numbers) < request.config.getoption("fresh"):
        first, share = random.SystemRandom().choice([(0, SHARE), (FOUND, FOUND_SHARE)])
        begin = first + share * random.SystemRandom().randrange(10_000, 16_000)
        numbers += range(begin, begin + share)  # These share what was compiled for one device.
    bad = [
        x for x in run_all(list(map(draw, numbers)), seconds=300, each=48) if x["outcome"] in BAD
    ]
    with FAILED.open("a", encoding="utf-8") as file:
        file.writelines(f"{x['number']} {x['outcome']}: {x['words'][:80]!r}\n" for x in bad)
    assert bad == []


OWN = ("loss: ", "sown: ", "skipped by: ", "qwix: ", "threads", "elastic")


def test_later_programs_have_what_was_found_by_hand(devices8):
    rows = [draw(number) for number in range(FOUND, FOUND + 1200)]
    assert rows == json.loads(json.dumps(rows))
    has = [{x for x in features_of(row) if x.startswith(OWN)} for row in rows]
    about_batch = {
        f"loss: {name}" for name in ("mean", "masked", "weights", "fractions", "coupled")
    }
    assert all(each - about_batch for each in has)
    assert set().union(*has) >= about_batch | {
        *(
            f"loss: {name}"
            for name in ("terms", "scalar", "learned", "learned pair", "of a module")
        ),
        *(f"sown: {name}" for name in ("tuple", "reduced", "beside")),
        *(f"skipped by: {name}" for name in ("random", "data", "index", "lax", "nnx")),
        *(f"qwix: {name}" for name in RULES),
        *("threads", "elastic"),
    }


def test_a_program_that_is_right_is_exact(devices8, shared):
    assert run(TINY, shared) == ("exact", "")


NEW = {
    "sown terms": {
        "form": "terms",
        "has_metrics": True,
        "loss": "fractions",
        "loss_extras": {"decay": 0.01, "z": True, "rare": True},
        "fields": TINY["fields"] | {"scan": True, "sown": "beside", "drop": "data"},
    },
    "learned": {
        "form": "learned",
        "has_metrics": False,
        "fields": TINY["fields"] | {"drop": "index", "branch": "nested"},
    },
    "scalar": {
        "model": "nnx_mlp",
        "form": "scalar",
        "by_model": True,
        "loss": "mean",
        "fields": TINY["fields"] | {"sown": "", "drop": "nnx"},
    },
    "random": {"fields": TINY["fields"] | {"scan": True, "drop": "random", "dropout": 0.25}},
    "chance": {  # Each device decides apart, and a norm mixes what they have.
        "form": "terms",
        "has_metrics": True,
        "loss": "fractions",
        "loss_extras": {"decay": 0.01, "z": True},
        "options": TINY["options"] | {"axis_aliases": {"batch": ["data"]}},
        "fields": TINY["fields"] | {"norm": "synced", "drop": "random"},
    },
    "threads": {
        "threads": {"strategy": "data_parallel", "mesh": {"data": 2}, "options": {}},
    },
    "elastic": {"elastic": 2, "loss": "coupled"},
    "weights": {"rules": {"kind": "weights int8", "modules": ".*(up|down)"}},
    # In these three, devices, replicas and microbatches decide apart or are called beforehand.
    "replicas": {
        "strategy": "diloco",
        "diloco": {"every": 2, "outer": "mean", "inner": "fsdp"},
        "batch": 24,
        "mesh": {"replica": 2, "data": 2},
        "options": {"num_minibatches": 1, "min_weight_size": 1},
        "fields": TINY["fields"] | {"drop": "data", "sown": "reduced"},
    },
    "stages": {
        "model": "nnx_mlp",
        "batch": 24,
        "mesh": {"stage": 2, "data": 2},
        "options": {"num_minibatches": 4, "min_weight_size": 1},
        "pipeline": {"schedule": "1f1b", "chunks": 1, "keep": "inputs"},
        "loss_extras": {"decay": 0},
        "fields": TINY["fields"] | {"drop": "lax", "scan": True},
    },
    "instance": {
        "model": "nnx_mlp",
        "rules": {"kind": "w8a8", "modules": ".*up"},
        "options": TINY["options"] | {"axis_aliases": {"batch": ["data"]}},
        "fields": TINY["fields"] | {"sown": "tuple", "norm": "synced"},
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix reads old names of flax.
@pytest.mark.parametrize("name", NEW)
def test_a_later_program_that_is_right_is_exact(devices8, name):
    if "rules" in NEW[name]:
        pytest.importorskip("qwix", reason="pip install -e '.[interop]'")
    assert run(TINY | NEW[name], Shared())[0] == "exact"  # A note may say that bits differ.


@pytest.mark.slow
def test_faults_of_later_programs_are_noticed(devices8, monkeypatch):
    """Minibatches that grow where they must not, a gradient of terms, and a fault of threads."""
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "combines_examples", lambda program: False)
        outcome, words = run(TINY | NEW["elastic"], Shared())
        assert (outcome, words[:9]) == ("wrong", "elastic: ")
    with monkeypatch.context() as patch:
        altered(patch, lambda grads: jax.tree.map(lambda g: 1.001 * g, grads))
        outcome, words = run(TINY | NEW["learned"], Shared())
        assert (outcome, words[:15]) == ("wrong", "step 0 gradient")

    def in_threads(grads):
        is_main = threading.current_thread() is threading.main_thread()
        return grads if is_main else jax.tree.map(lambda g: 2 * g, grads)

    with monkeypatch.context() as patch:
        altered(patch, in_threads)
        outcome, words = run(TINY | NEW["threads"], Shared())
        assert (outcome, words[:9]) == ("wrong", "threads: ")


def altered(monkeypatch, alter):
    """Lets each training step give its optimizer other gradients."""
    gradients = Step.gradients

    def wrong(self, batch):
        def of_params(*args):
            grads, sums, aux = gradients(self, batch)(*args)
            return alter(grads), sums, aux

        return of_params

    monkeypatch.setattr(Step, "gradients", wrong)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.001, "off 0.001 of its norm"),
        pytest.param(2, "ratio 2, off 1 of its norm", marks=pytest.mark.slow),
        (np.nan, "are not finite, on one device those of []"),
    ],
)
def test_a_gradient_of_another_size_is_noticed(devices8, monkeypatch, shared, factor, words):
    altered(monkeypatch, lambda grads: jax.tree.map(lambda g: factor * g, grads))
    outcome, said = run(TINY, shared)
    assert outcome == "wrong"
    assert words in said


@pytest.mark.slow
@pytest.mark.parametrize("path", [("head", "bias"), ("layer_1", "up", "kernel")])
def test_a_leaf_whose_gradient_is_dropped_is_noticed(devices8, monkeypatch, shared, path):
    def drop(grads):
        return jax.tree_util.tree_map_with_path(
            lambda p, g: 0 * g if tuple(k.key for k in p) == path else g, grads
        )

    altered(monkeypatch, drop)
    outcome, words = run(TINY, shared)
    assert outcome == "wrong"
    assert f"{'/'.join(path)} ratio 0, off 1 of its norm" in words


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), [("manual", Manual), ("explicit", GlobalArrays)])
def test_other_masks_of_dropout_are_noticed(devices8, monkeypatch, mode, kind):
    row = TINY | {"mode": mode, "fields": TINY["fields"] | {"dropout": 0.25}}
    assert run(row, Shared()) == ("exact", "")
    fold = kind.fold
    monkeypatch.setattr(kind, "fold", lambda self, rng: fold(self, jax.random.fold_in(rng, 1)))
    outcome, words = run(row, Shared())
    assert outcome == "wrong"
    assert "step 0 gradient: " in words


@pytest.mark.slow
def test_what_is_not_finite_on_one_device_either_is_right(devices8):
    # Statistics of one example: each LayerNorm multiplies the gradient by a thousand.
    fields = {"width": 8, "depth": 4, "norm": "batch", "scan": True}
    there = {"strategy": "zero2", "mesh": {"data": 4}, "options": {"min_weight_size": 1}}
    row = TINY | {"model": "nnx_mlp", "fields": fields, "tx": "sgd", "loss_extras": {"decay": 0}}
    row["trip"] = {"kind": "adopt", "step": True} | there
    words = "step 2: gradients are not finite, as on one device"
    assert run(row, Shared()) == ("exact", words)


@pytest.mark.slow
def test_what_roundings_make_infinite_is_not_compared(devices8, monkeypatch, shared):
    monkeypatch.setattr(Allowance, "moved", lambda self, params: [far(params), params])

    def far(params):
        return {path: 1e30 * x for path, x in params.items()}

    words = "step 0: roundings decide whether gradients are finite"
    assert run(TINY, shared) == ("exact", words)


@pytest.mark.slow
def test_replicas_that_have_not_moved_are_where_they_were(devices8):
    # Adapters begin as zero, so that the first gradient of the factors beside them is zero.
    row = TINY | {"strategy": "diloco", "loss": "weights", "tx": "lamb", "trip": None}
    row |= {"mesh": {"replica": 4, "data": 2}, "options": {"num_minibatches": 1}}
    row |= {"lora": {"targets": {"*/up": 2}, "alpha": 4.0}, "loss_extras": {"decay": 0}}
    of_replicas = {"every": 1, "outer": "nesterov", "inner": "fsdp", "outer_code": "int4"}
    assert run(row | {"diloco": of_replicas}, Shared()) == ("exact", "")


@pytest.mark.slow
def test_other_initial_bits_are_noticed(devices8, monkeypatch, shared):
    whole = Program.whole

    def other(self, state):
        variables = whole(self, state)
        variables["params"]["head"]["kernel"] = variables["params"]["head"]["kernel"] * (1 + 1e-5)
        return variables

    monkeypatch.setattr(Program, "whole", other)
    outcome, words = run(TINY, shared)
    assert (outcome, words[:35]) == ("wrong", "init: head/kernel is not the same b")


@pytest.mark.slow
def test_an_update_that_is_off_is_noticed(devices8):
    shared = Shared()
    row = TINY | {"tx": "adamw"}
    assert run(row, shared) == ("exact", "")
    # On one device the same optimizer climbs.
    for name, made in shared.made.items():
        if name.startswith("update"):
            shared.made[name] = lambda g, *args, made=made: made(optax.tree.scale(-1, g), *args)
    outcome, words = run(row, shared)
    assert outcome == "wrong"
    assert "update: " in words


def test_codes_move_parameters_in_bfloat16_too():
    params = {"w": np.ones((4, 4), jnp.bfloat16)}
    (near,) = Allowance(is_low=True, has_coded_weights=True).moved(params)
    moved = near["w"]
    assert moved.dtype == jnp.bfloat16
    assert (moved != params["w"]).any()


def test_an_update_of_terms_that_cancel_may_be_off_by_their_roundings():
    # The first step brings parameters near zero. In the second one Nesterov's momentum and the
    # gradient leave a thousandth of each other.
    random = np.random.default_rng(0)
    first = 1e-3 * random.normal(size=20_000)
    second = -0.34819 * first * (1 + 1e-3 * random.normal(size=20_000))
    near = 0.02947 * np.sign(first) + 1e-4 * random.normal(size=20_000)
    params = {"w": near.astype(np.float32)}
    grads = [{"w": g.astype(np.float32)} for g in (first, second)]
    tx, before = make_optimizer("nadamw"), params
    expected = OneDevice("nadamw", lambda *args: args[-1](), has_average=False)
    state = tx.init(params)
    for g in grads:  # Operation by operation, which XLA does not fuse.
        before = params
        updates, state = tx.update(g, state, params)
        params = jax.device_get(optax.apply_updates(params, updates))
        expected.check("here", before, g, params)
    moved = np.abs(params["w"] - before["w"]).max()
    off = {"w": params["w"] + np.float32(1e-3) * moved}
    with pytest.raises(WrongError, match="here update: w is off"):
        expected.compare("here", before, off, params)


def test_what_the_package_refuses_is_no_crash(devices8):
    refused = run(TINY | {"options": {"num_minibatches": 3}}, Shared())
    assert refused[0] == "refused"
    assert sentence_class(refused[1]).startswith("num_minibatches=… does not divide")
    crash = run(TINY | {"fields": {"width": 0.5}}, Shared())
    assert crash[0] == "crash"


@pytest.mark.slow
def test_rows_come_from_other_processes_and_a_hang_is_one():
    rows = list(run_all([TINY], seconds=120, each=10))
    assert [row["outcome"] for row in rows] == ["exact"]
    rows = list(run_all([TINY | {"number": 5}, TINY], seconds=0.01, each=10))
    assert [row["outcome"] for row in rows] == ["hang", "hang"]
