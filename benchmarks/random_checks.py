"""Builds a program of `random_programs`, runs it, and compares it with one device.

`run` says how a description ended. What is compared: the initial parameters bit for bit; in each
step the loss, the metrics, the gradient of every leaf as the optimizer was given it, the optimizer's
update as optax makes it on one device of these gradients, variables, and frozen parameters bit for
bit; evaluation; and what arrives when the state goes to another program.

A gradient may be off by what rounding makes of it: several times the difference that parameters make
that are off by a few roundings, and a few roundings of what each device contributes. With codes it
may be off by what a code leaves out, in units of the largest number that a device contributes.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import math
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

import manualpar
from benchmarks.random_models import Plain, make_batches, make_model
from benchmarks.random_reference import (
    Answer,
    Reference,
    flatten,
    make_loss,
    perturb,
    unflatten,
)
from benchmarks.random_optimizers import LOOSE, make_optimizer
from manualpar import Batch, Pipeline, make_mesh
from manualpar.checkpoints import Checkpoints

STEPS = 2
BUILDERS: Mapping[str, Any] = {
    "data_parallel": manualpar.data_parallel,
    "zero1": functools.partial(manualpar.zero, stage=1),
    "zero2": functools.partial(manualpar.zero, stage=2),
    "fsdp": manualpar.fsdp,
    "hsdp": manualpar.hsdp,
}


class Recorded(NamedTuple):
    """The state of an optimizer that keeps the last gradient."""

    gradient: Any
    inner: Any


def recording(tx: Any) -> Any:
    """Returns an optimizer that keeps the gradients that it is given."""

    def init(params: Any) -> Recorded:
        return Recorded(jax.tree.map(jnp.zeros_like, params), tx.init(params))

    def update(grads: Any, state: Recorded, params: Any = None, **extra: Any) -> Any:
        updates, inner = tx.update(grads, state.inner, params, **extra)
        return updates, Recorded(grads, inner)

    if isinstance(tx, optax.GradientTransformationExtraArgs):
        return optax.GradientTransformationExtraArgs(init, update)
    return optax.GradientTransformation(lambda p: init(p), lambda g, s, p=None: update(g, s, p))


class Wrong(Exception):
    """A difference from one device, in words."""


@dataclasses.dataclass
class Shared:
    """What programs of one model and loss have in common."""

    key: str = ""
    made: dict[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, row: Mapping[str, Any], name: str, parts: Any, make: Any) -> Any:
        """Returns what was made for these parts of a description, or makes it."""
        names = ("model", "data_seed", "fields", "loss", "loss_extras", "batch", "tx")
        key = json.dumps([row.get(n) for n in names])
        if key != self.key:
            self.key, self.made = key, {}
        own = name + json.dumps(parts, default=str)
        if own not in self.made:
            self.made[own] = make()
        return self.made[own]


def run(row: Mapping[str, Any], shared: Shared) -> tuple[str, str]:
    """Returns how a program ended, and the words for it."""
    try:
        with without_rank_promotion():
            check = _Check(row, shared)
            check()
    except Wrong as wrong:
        return "wrong", str(wrong)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind, file = type(error).__name__, last.filename.rpartition("/")[2]
        words = f"{kind} at {file}:{last.lineno}: {error}"[:1500]
        # What JAX's types of shardings refuse is documented to be refused in its words.
        is_sharding = row["mode"] == "explicit" and kind == "ShardingTypeError"
        is_ours = "/manualpar/" in last.filename and kind in ("ValueError", "TypeError")
        return "refused" if is_ours or is_sharding else "crash", words
    return "exact", "; ".join(check.notes)


@contextlib.contextmanager
def without_rank_promotion() -> Iterator[None]:
    """Refuses implicit promotions of ranks, as the tests do."""
    with jax.numpy_rank_promotion("allow"):
        yield


class _Check:
    def __init__(self, row: Mapping[str, Any], shared: Shared) -> None:
        self.row, self.shared = row, shared
        self.notes: list[str] = []
        self.options: dict[str, Any] = dict(row["options"])
        self.batches = [Batch(**b) for b in make_batches(row, STEPS + 1)]
        self.model, self.plain = make_model(row)
        self.ema = 0.9 if row["ema"] else None
        self.tx = shared.of(row, "tx", (), lambda: self._optimizer())
        self.is_random = any(row["fields"].get(n) for n in ("dropout", "dropout_rate"))
        dtypes = [self.options.get(f"{n}_dtype") for n in ("gather", "param", "reduce")]
        self.is_low = "bfloat16" in dtypes or self.options.get("frozen_dtype") == "bfloat16"

    def _optimizer(self) -> Any:
        tx = make_optimizer(self.row["tx"])
        return optax.chain(tx, manualpar.params_ema(self.ema)) if self.ema else tx

    def __call__(self) -> None:
        program = self._build(self.row, self.row["strategy"], self.options, self.row["mesh"])
        if self.row["strategy"] == "diloco":
            from benchmarks.random_replicas import check_replicas

            check_replicas(self, program)
            return
        state = self.begin(program)
        if self.is_random:
            self._repeats(program)
        optimizer = _OneDevice(self.tx, self)
        for number in range(STEPS):
            is_nan = self.row["nan_at"] and number == 1
            state = self.step(program, state, number, optimizer, is_nan=is_nan)
        if self.row["evaluates"]:
            self.evaluate(program, state)
        if self.row.get("trip"):
            self._trip(program, state, optimizer)

    def _build(self, row: Any, strategy: str, options: Any, mesh: Any, **more: Any) -> Any:
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        options = {k: v for k, v in options.items() if v is not None}
        if "rules" in options:
            options["rules"] = tuple(tuple(pair) for pair in options["rules"])
        if row.get("trainable"):
            options["trainable"] = tuple(row["trainable"])
        if row.get("pipeline") and "stage" in mesh:
            options["pipeline"] = Pipeline(**row["pipeline"])
        if row["mode"] != "manual":
            options["mode"] = row["mode"]
        aliases = options.get("axis_aliases")
        if aliases:
            options["axis_aliases"] = {k: tuple(v) for k, v in aliases.items()}
        options |= {"mesh": make_mesh(mesh), "batch": self.batches[0]}
        loss = make_loss(row, is_plain=False)
        if strategy == "diloco":
            of_replicas = dict(row["diloco"])
            inner, _ = of_replicas.pop("inner"), of_replicas.pop("outer")
            of_replicas |= {"inner": BUILDERS[inner], "outer_tx": self.outer_tx()}
            return manualpar.diloco(
                self.model, recording(self.tx), loss, **of_replicas, **options
            )
        return BUILDERS[strategy](self.model, recording(self.tx), loss, **options)

    # What replicas need.

    wrong = Wrong

    @property
    def has_statistics(self) -> bool:
        """Whether the model has statistics of a batch, which replicas have of their own."""
        return self.row["fields"].get("norm") in ("batch", "synced")

    @property
    def is_rough(self) -> bool:
        """Whether codes or narrow dtypes change the loss."""
        return self.is_low or bool(self.options.get("gather_code"))

    def outer_tx(self) -> Any:
        """The optimizer of outer steps."""
        if self.row["diloco"]["outer"] == "nesterov":
            return optax.sgd(0.7, momentum=0.9, nesterov=True)
        return optax.sgd(1.0)

    def one_device(self) -> "_OneDevice":
        """An optimizer on one device."""
        return _OneDevice(self.tx, self)

    def replica_answer(
        self, program: Any, params: Any, collections: Any, batch: Any, part: np.ndarray
    ) -> Answer:
        """What one device says of the part of a replica."""
        own = np.arange(len(part))[:, None], 1
        return self.answer(program, params, collections, batch, units=own)

    # What one device says.

    def whole(self, program: Any, state: Any) -> tuple[dict[str, Any], Any]:
        """The parameters by path, and the other collections."""
        variables = program.whole(state)
        return flatten(variables.pop("params")), variables

    def trained(self, params: Mapping[str, Any]) -> set[str]:
        """The paths of the parameters that are trained."""
        globs = self.row.get("trainable")
        if globs is None and "lora" in self.row:
            globs = ["*lora_a", "*lora_b"]
        names = globs or ["*"]
        return {path for path in params if any(fnmatch.fnmatchcase(path, g) for g in names)}

    def units(self, program: Any) -> tuple[np.ndarray, int]:
        """The numbers of the examples of each unit, those of a device in a row; and devices."""
        norm, size = self.row["fields"].get("norm"), self.row["batch"]
        devices = math.prod(program.mesh.shape[a] for a in program.data_axes if a != "context")
        minibatches = program.num_minibatches
        numbers = np.arange(size).reshape(devices, minibatches, -1)
        if norm == "batch" and self.row["mode"] == "manual":
            return numbers.reshape(devices * minibatches, -1), devices
        if norm in ("batch", "synced"):
            return numbers.transpose(1, 0, 2).reshape(minibatches, -1), 1
        return np.arange(size)[:, None], devices

    def answer(
        self,
        program: Any,
        params: Any,
        collections: Any,
        batch: Any,
        *,
        train: bool = True,
        units: Any = None,
    ) -> Answer:
        """What one device says."""
        dtype = self.options.get("gather_dtype")
        parts = [self.row.get(n) for n in ("lora", "quantized", "trainable", "with_labels")]
        reference = self.shared.of(
            self.row,
            "reference",
            [*parts, dtype],
            lambda: Reference(self.row, self.plain, dtype),
        )
        size = len(batch.labels)
        if units is None and (not train or size != self.row["batch"]):
            units = np.arange(size)[:, None], 1
        units, devices = units or self.units(program)
        args = self.trained(params), collections, batch, units, devices
        found: Answer = reference(params, *args, train=train)
        return found

    # What is compared.

    def begin(self, program: Any) -> Any:
        """The state that a program begins with, compared with plain flax."""
        wrapped = "lora" in self.row or "quantized" in self.row
        if self.row["given"] and not wrapped and not self.is_low:
            state = program.init_from(self._plain_variables())
        else:
            state = program.init(jax.random.key(7))
        self._compare_init(program, state)
        return state

    def _plain_variables(self) -> Any:
        init_rng, _ = jax.random.split(jax.random.key(7))
        init = jax.jit(self.plain.init)
        made: Any = self.shared.of(
            self.row, "init", (), lambda: jax.device_get(init(init_rng, self.batches[0].inputs))
        )
        return made

    def _compare_init(self, program: Any, state: Any) -> None:
        params, collections = self.whole(program, state)
        made = dict(self._plain_variables())
        expected = flatten(made.pop("params"))
        trained = self.trained(params)
        for path, x in params.items():
            if path.endswith(("_codes", "_scales", "lora_a", "lora_b")) and path not in expected:
                continue
            dtype = self.options.get("param_dtype")
            dtype = dtype if path in trained else self.options.get("frozen_dtype") or dtype
            e = expected.pop(path)
            e = e.astype(dtype) if dtype and jnp.issubdtype(e.dtype, jnp.floating) else e
            if e.dtype != x.dtype or not np.array_equal(np.asarray(e), np.asarray(x)):
                ulps = _ulps(e, x)
                if not ulps <= 4:
                    raise Wrong(f"init: {path} is not the same bits, but {ulps:.3g} ulps off")
                # With few optimizations XLA fuses otherwise beside what replicas add.
                self.notes.append(f"init: {path} is {ulps:.2g} ulps off")
        plain = flatten(self.plain.to_plain(unflatten(params)))
        for path, e in expected.items():  # They are in codes.
            step = np.abs(e).max() / 127
            off = np.abs(np.asarray(plain[path], np.float32) - e).max()
            allowed = 0.8 if self.is_low else 0.52  # Half a step, and the rounding of products.
            if not off <= allowed * step + 1e-30:
                raise Wrong(f"init: {path} in codes is off by {off / step:.3g} steps")
        wanted, found = flatten(made), flatten(collections)
        for path, e in wanted.items():
            if path.partition("/")[0] in ("intermediates", "losses"):
                continue
            if path not in found or not np.array_equal(e, found[path]):
                raise Wrong(f"init: the variable {path} is not the same bits")

    def _repeats(self, program: Any) -> None:
        ends = []
        for _ in range(2):
            state, metrics = program.train_step(program.init(jax.random.key(7)), self.batches[0])
            ends.append((flatten(program.whole(state)), jax.device_get(metrics)))
        if not all(jax.tree.leaves(jax.tree.map(np.array_equal, ends[0], ends[1]))):
            raise Wrong("dropout: the same step from the same state gave other bits")

    def step(
        self, program: Any, state: Any, number: int, optimizer: "_OneDevice", *, is_nan: bool = False
    ) -> Any:
        """Takes a step and compares everything in it; returns the new state."""
        batch, what = self.batches[number], f"step {number}"
        params, collections = self.whole(program, state)
        given = batch
        if is_nan:
            given = _with_nan(batch)
            if given is None:
                is_nan, given = False, batch
        state, metrics = program.train_step(state, given)
        after, variables = self.whole(program, state)
        metrics = {name: tuple(map(float, pair)) for name, pair in metrics.items()}
        trained = self.trained(params)
        if is_nan:
            if metrics["nonfinite"][0] != 1:
                raise Wrong(f"{what}: nonfinite is {metrics['nonfinite']} with a NaN")
            if self.options["nonfinite"] == "skip":
                self.same(f"{what} with a NaN", params, after)
                return state
            return state  # NaN from here on.
        if self.options.get("nonfinite", "ignore") != "ignore" and metrics["nonfinite"] != (0, 1):
            raise Wrong(f"{what}: nonfinite is {metrics['nonfinite']}, and all is finite")
        if any(not np.isfinite(x).all() for x in after.values() if x.dtype.kind == "f"):
            raise Wrong(f"{what}: parameters are not finite")
        frozen = {path: x for path, x in params.items() if path not in trained}
        self.same(f"{what}, frozen", frozen, {path: after[path] for path in frozen})
        grads = {
            path: np.asarray(g)[tuple(map(slice, params[path].shape))]
            for path, g in flatten(jax.device_get(_recorded(state.opt_state))).items()
        }
        if set(grads) != trained:
            raise Wrong(f"{what}: gradients of {sorted(set(grads) ^ trained)}")
        expected = self.answer(program, params, collections, batch)
        if not self.is_random:
            self.compare_gradients(what, program, state, params, collections, batch, grads, expected)
        self._metrics(what, metrics, expected, grads, params, after)
        if not self.is_random:
            self._variables(what, program, collections, variables, expected)
        optimizer.check(what, params, grads, after)
        return state

    def compare_gradients(
        self,
        what: str,
        program: Any,
        state: Any,
        params: Any,
        collections: Any,
        batch: Any,
        grads: Any,
        expected: Answer,
    ) -> None:
        size = 2.0**-8 if self.is_low else 2.0**-20
        moved = perturb(params, size, 0)
        if self.options.get("gather_code"):
            moved = _as_coded(params)
        noisy = self.answer(program, moved, collections, batch)
        total = math.sqrt(sum(float(np.square(g).sum()) for g in expected.grads.values()))
        total += math.sqrt(
            sum(float(np.square(g - expected.grads[p]).sum()) for p, g in noisy.grads.items())
        )
        code, feedback = self.options.get("reduce_code"), self.options.get("error_feedback")
        if code and feedback and "local" in dir(state) and what == "step 0":
            grads = _with_residuals(program, state, grads)
            code = None
        worst: tuple[float, str] = (0.0, "")
        is_split = any(program.mesh.shape.get(a, 1) > 1 for a in ("context", "expert", "model"))
        for path, e in expected.grads.items():
            g = np.asarray(grads[path], np.float64)
            noise = float(np.linalg.norm(noisy.grads[path] - e))
            off, norm = float(np.linalg.norm(g - e)), float(np.linalg.norm(e))
            if self.is_low:
                allowed = 4 * noise + 2**-6 * expected.spread[path] + 2**-9 * total
            else:
                allowed = 6 * noise + 5e-6 * expected.spread[path] + 2e-7 * total
            if self.options.get("gather_code"):
                allowed = 3 * noise + 0.02 * total
            if code and (what == "step 0" or not feedback):
                left_out = 1.05 * expected.contributions[path] / {"int8": 127, "int4": 7}[code]
                left_out *= 2 if self.options.get("stochastic_rounding") else 1
                left_out *= 2 * max(1, len(program.data_axes))
                left_out *= program.num_minibatches * (4 if is_split else 1)
                allowed += left_out * math.sqrt(e.size) + (0.02 * total if is_split else 0)
            elif code:
                allowed = math.inf
            if not off <= allowed:
                ratio = float(np.vdot(e, g) / norm**2) if norm else math.inf
                words = f"{path} ratio {ratio:.5g}, off {off / (norm or 1):.3g} of its norm"
                worst = max(worst, (off / (allowed or 1e-300), words))
        if worst[1]:
            raise Wrong(f"{what} gradient: {worst[1]} ({worst[0]:.3g} x allowed)")

    def _metrics(
        self, what: str, metrics: Any, expected: Answer, grads: Any, params: Any, after: Any
    ) -> None:
        rtol = 0.05 if self.is_low or self.options.get("gather_code") else 2e-5
        for name, (total, count) in expected.metrics.items():
            is_count = name == "accuracy"
            if is_count and (rtol > 0.01 or self.is_random):
                continue
            got = metrics[name]
            if got[1] == 0 == count:
                continue
            allowed = rtol * max(abs(total), abs(count)) + 1e-6
            allowed = 0.7 * abs(total) if self.is_random and what != "evaluation" else allowed
            if abs(got[1] - count) > 1e-5 * abs(count) or not abs(got[0] - total) <= allowed:
                raise Wrong(f"{what}: metric {name} is {got}, one device's {(total, count)}")
        if what != "evaluation" and self.options.get("norm_metrics"):
            for name, tree in (("gradient_norm", grads), ("parameter_norm", after)):
                trained = [tree[p] for p in grads]
                norm = math.sqrt(sum(float(np.square(np.float64(x)).sum()) for x in trained))
                if not abs(metrics[name][0] - norm) <= 1e-2 * rtol**0.5 * norm + 1e-9:
                    raise Wrong(f"{what}: {name} is {metrics[name]}, expected {norm}")

    def _variables(
        self, what: str, program: Any, before: Any, after: Any, expected: Answer
    ) -> None:
        rtol = 0.05 if self.is_low or self.options.get("gather_code") else 1e-5
        old, found = flatten(before), flatten(after)
        if set(old) != set(found):
            raise Wrong(f"{what}: variables are {sorted(found)}, expected {sorted(old)}")
        for path, each in expected.variables.items():
            x = np.asarray(each, np.float64)
            if path.endswith("seen"):
                value = old[path] + (x - old[path]).sum(0)
            elif path.endswith("largest"):
                value = x.max(0)
            elif program.num_minibatches > 1 and path.startswith("batch_stats"):
                continue
            else:
                value = x.mean(0)
            if not np.allclose(found[path], value, rtol=rtol, atol=rtol * np.abs(value).max()):
                raise Wrong(f"{what}: the variable {path} is {found[path]}, expected {value}"[:300])

    def same(self, what: str, expected: Any, found: Any) -> None:
        for path, e in expected.items():
            if e.dtype != found[path].dtype or np.asarray(e).tobytes() != found[path].tobytes():
                raise Wrong(f"{what}: {path} is not the same bits")

    def evaluate(self, program: Any, state: Any) -> None:
        params, collections = self.whole(program, state)
        if self.options.get("eval_dropout") or (
            self.row["nan_at"] and self.options["nonfinite"] == "report"
        ):
            return
        batch = self.batches[STEPS]
        metrics = jax.device_get(program.eval_step(state, batch))
        metrics = {name: tuple(map(float, pair)) for name, pair in metrics.items()}
        expected = self.answer(program, params, collections, batch, train=False)
        self._metrics("evaluation", metrics, expected, {}, {}, {})

    def _trip(self, program: Any, state: Any, optimizer: "_OneDevice") -> None:
        trip = self.row["trip"]
        names = "param_dtype frozen_dtype gather_dtype rules sync_collections axis_aliases nonfinite"
        shared = {k: self.options[k] for k in names.split() if k in self.options}
        if "axis_aliases" in shared:
            shared["axis_aliases"] = {"batch": ["data"]}
        if "model" not in trip["mesh"] and "rules" in shared:
            shared["rules"] = [["features", None], ["hidden", None]]
        options = {**shared, **trip["options"]}
        other = self._build(self.row, trip["strategy"], options, trip["mesh"])
        before = self.whole(program, state)
        opt_state = _unpadded_leaves(program, state)
        if trip["kind"] == "adopt":
            moved = other.adopt(state)
        elif trip["kind"] == "checkpoint":
            with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
                checkpoints.save(program, state, step=STEPS, extra={})
                checkpoints.wait()
                moved = checkpoints.restore(other, report=print).state
        elif trip["kind"] == "bytes":
            data = flax.serialization.to_bytes(state)
            other = program
            moved = flax.serialization.from_bytes(program.init(jax.random.key(0)), data)
        else:
            moved = other.init_from(program.whole(state))
        after = self.whole(other, moved)
        self.same(f"trip by {trip['kind']}", before[0], after[0])
        self.same(f"trip by {trip['kind']}", flatten(before[1]), flatten(after[1]))
        if trip["kind"] != "init_from":
            arrived = _unpadded_leaves(other, moved)
            for path, x in opt_state.items():
                if not np.array_equal(x, arrived[path], equal_nan=x.dtype.kind == "f"):
                    raise Wrong(f"trip by {trip['kind']}: optimizer's {path} is not the same bits")
        if trip["step"] and not self.row["nan_at"]:
            if trip["kind"] == "init_from":
                optimizer.restart()
            own = self.options
            self.options = options if trip["kind"] != "bytes" else own
            self.step(other, moved, STEPS, optimizer)
            self.options = own


class _OneDevice:
    """The optimizer on one device, given the gradients that a program's optimizer was given."""

    def __init__(self, tx: Any, check: _Check) -> None:
        self._tx, self._check = tx, check
        self.restart()

    def restart(self) -> None:
        """Begins with a new state."""
        self._state: Any = None

    def check(self, what: str, params: Any, grads: Any, after: Any) -> None:
        """Compares an update."""
        self.compare(what, params, after, self.updated(params, grads))

    def updated(self, params: Any, grads: Any) -> dict[str, Any]:
        """The parameters after an update."""
        own = {path: jnp.asarray(params[path]) for path in grads}
        tree, grad_tree = unflatten(own), unflatten({p: jnp.asarray(g) for p, g in grads.items()})
        if self._state is None:
            init = self._check.shared.of(
                self._check.row, "tx init", sorted(own), lambda: jax.jit(self._tx.init)
            )
            self._state = init(tree)
        row, tx = self._check.row, self._tx

        def run(grads: Any, state: Any, params: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        update = self._check.shared.of(row, "update", sorted(own), lambda: jax.jit(run))
        new, self._state = update(grad_tree, self._state, tree)
        return flatten(jax.device_get(new))

    def compare(self, what: str, params: Any, after: Any, expected: Any) -> None:
        """Compares parameters after an update."""
        loose = LOOSE.get(self._check.row["tx"], 1e-5)
        for path, e in expected.items():
            got, old, e = (np.asarray(x, np.float64) for x in (after[path], params[path], e))
            ulp = float(jnp.finfo(after[path].dtype).eps)
            scale = np.abs(e - old).max(initial=0) if loose > 1e-4 else np.abs(e - old)
            if not (np.abs(got - e) <= 2 * ulp * np.abs(e) + loose * scale + 1e-12).all():
                worst = np.abs(got - e).max()
                moved = np.abs(e - old).max()
                raise Wrong(f"{what} update: {path} is off {worst:.3g}, optax moves it {moved:.3g}")


def _ulps(x: Any, y: Any) -> float:
    """How far arrays are apart, in units of the last place of the largest."""
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return float(np.abs(x - y).max(initial=0) / (2.0**-23 * np.abs(x).max(initial=0) or 1))


def _recorded(opt_state: Any) -> Any:
    return opt_state.gradient


def _with_nan(batch: Batch) -> Batch | None:
    """The batch with a NaN in one example, if something in it can be NaN."""
    inputs = batch.inputs
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind == "f":
        inputs = inputs.copy()
        inputs.reshape(-1)[3] = np.nan
        return batch.replace(inputs=inputs)
    if batch.mask is not None:
        mask = batch.mask.copy()
        mask.reshape(-1)[3] = np.nan
        return batch.replace(mask=mask)
    return None


def _as_coded(params: Any) -> Any:
    """Parameters as far from the given ones as their codes may be."""
    random = np.random.default_rng(0)
    moved = {}
    for path, x in params.items():
        if x.dtype.kind == "f" and x.ndim and "_scales" not in path:
            step = np.abs(x).max(initial=0) / 127
            x = (x + random.uniform(-0.5, 0.5, x.shape) * step).astype(x.dtype)
        moved[path] = x
    return moved


def _with_residuals(program: Any, state: Any, grads: Any) -> Any:
    residuals = flatten(jax.device_get(state.local.get("residuals", {})))
    out = dict(grads)
    for path, g in grads.items():
        if path in residuals:
            r = np.asarray(residuals[path], np.float64)
            r = r[(slice(None), *map(slice, g.shape))]
            out[path] = g + r.mean(0)
    return out


def _unpadded_leaves(program: Any, state: Any) -> dict[str, Any]:
    """The optimizer's state by path, without padding."""
    whole = flatten_any(program.whole_state.opt_state)
    return {
        path: np.asarray(jax.device_get(x))[tuple(map(slice, whole[path].shape))]
        for path, x in flatten_any(state.opt_state).items()
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }


def flatten_any(tree: Any) -> dict[str, Any]:
    """The leaves of any tree by path."""
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


__all__ = ["Plain", "Shared", "run"]
