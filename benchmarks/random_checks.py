"""Builds a program of `random_programs`, runs it, and compares it with one device.

The check compares the initial parameters bit for bit. In each step it compares the loss, the
metrics, the gradient of every parameter, the optimizer's update and the other variables; frozen
parameters must not change in any bit. It also compares an evaluation, the average of parameters,
and the state after a move to another program. With dropout it runs the same step twice, which must
give the same bits. `random_dropout` decides whether one device can draw the same masks; if it
cannot, gradients are not compared.
"""

import concurrent.futures
import dataclasses
import fnmatch
import functools
import importlib.util
import json
import math
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import manualpar
from benchmarks.random_builders import build_program
from benchmarks.random_comparison import Allowance, WrongError, check_same_bits, ulps
from benchmarks.random_dropout import (
    has_masks_of_one_device,
    keys_of_step,
    spread_of_metrics,
)
from benchmarks.random_optimizers import OneDevice, recording
from benchmarks.random_reference import Answer, Reference, flatten, unflatten
from benchmarks.random_tasks import LEARNED, make_batches, make_model
from benchmarks.random_trips import SHARED, come_back, travel
from manualpar import Batch

STEPS = 2


@dataclasses.dataclass
class Shared:
    """A cache of values that consecutive programs share: model, loss and optimizer."""

    key: str = ""
    made: dict[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, row: Mapping[str, Any], name: str, parts: Any, make: Callable[[], Any]) -> Any:
        """Returns the cached value for `name` and `parts`, or makes it with `make`."""
        names = ("model", "data_seed", "fields", "loss", "loss_extras", "batch", "tx")
        own_names = ("form", "rules", "has_metrics")
        key = json.dumps([row.get(name) for name in (*names, *own_names)])
        if key != self.key:
            self.key, self.made = key, {}
        own = name + json.dumps(parts)
        if own not in self.made:
            self.made[own] = make()
        return self.made[own]


def run(row: Mapping[str, Any], shared: Shared) -> tuple[str, str]:
    """Runs and checks a program; returns its outcome, such as "wrong", and an explanation."""
    if "rules" in row and importlib.util.find_spec("qwix") is None:
        return "skipped", "qwix is not installed"
    try:
        check = Check(row, shared)
        check()
    except WrongError as wrong:
        return "wrong", str(wrong)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind, file = type(error).__name__, last.filename.rpartition("/")[2]
        words = f"{kind} at {file}:{last.lineno}: {error}"[:1500]
        # As the pages say, JAX's sharding types refuse some programs, with JAX's error messages.
        is_sharding = row["mode"] == "explicit" and kind == "ShardingTypeError"
        is_ours = "/manualpar/" in last.filename and isinstance(error, ValueError | TypeError)
        return "refused" if is_ours or is_sharding else "crash", words
    return "exact", "; ".join(check.notes)


class Check:
    """The comparison of one program with one device; `row` is the program's description."""

    def __init__(self, row: Mapping[str, Any], shared: Shared) -> None:
        self.row = row
        self.notes: list[str] = []
        self.has_diverged = False
        self.options: dict[str, Any] = dict(row["options"])
        self.batches = [Batch(**batch) for batch in make_batches(row, STEPS + 1)]
        self.model, self.plain = make_model(row)
        self.share = functools.partial(shared.of, row)
        self.is_manual = row["mode"] == "manual"
        fields = row["fields"]
        self.has_dropout = any(fields.get(n) for n in ("dropout", "dropout_rate"))
        self.has_dropout |= fields.get("drop") == "random"
        self.has_statistics = fields.get("norm") in ("batch", "synced")
        # Whether results depend on which examples a device computes together.
        self.is_grouped = fields.get("drop") in ("data", "lax", "nnx")
        self.has_coded_products = row.get("rules", {}).get("kind") in ("w8a8", "w8a8g8", "float8")
        self.is_grouped |= self.has_coded_products

    def __call__(self) -> None:
        """Raises WrongError at the first difference; does not catch errors of the program."""
        if "elastic" in self.row:
            come_back(self)
            return
        program = self.build(self.row["strategy"], self.options, self.row["mesh"])
        if "threads" in self.row:
            self._check_threads(program)
        if self.row["strategy"] == "diloco":
            from benchmarks.random_replicas import check_replicas

            check_replicas(self, program)
            return
        state = self.begin(program)
        if self.has_dropout:
            self._check_repeats(program)
        optimizer = self.one_device()
        for number in range(STEPS):
            state = self.step(program, state, number, optimizer)
            if self.has_diverged:
                return
        if self.row["evaluates"] and not self._has_met_nan():
            self.evaluate(program, state)
            if self.row["ema"] and optimizer.average:
                self._check_average(program, state, optimizer.average)
        if self.row.get("trip"):
            travel(self, program, state, optimizer, STEPS)

    # Building.

    def one_device(self) -> OneDevice:
        """Makes the program's optimizer for one device."""
        return OneDevice(self.row["tx"], self.share, has_average=self.row["ema"])

    def build(self, strategy: str, drawn: Mapping[str, Any], axes: Mapping[str, int]) -> Any:
        """Builds the program under a strategy, with the options `drawn` and the mesh `axes`."""
        tx, batch = recording(self.one_device().tx), self.batches[0]
        return build_program(self.row, strategy, drawn, axes, model=self.model, tx=tx, batch=batch)

    # The reference on one device.

    def whole(self, program: Any, state: Any) -> tuple[dict[str, Any], Any]:
        """Returns a state's unsharded parameters by path, and its other collections."""
        variables = program.whole(state)
        return flatten(variables.pop("params")), variables

    def trained(self, params: Mapping[str, Any]) -> set[str]:
        """Returns the paths of the trained parameters."""
        globs = self.row.get("trainable")
        if globs is None:
            globs = ["*lora_a", "*lora_b"] if "lora" in self.row else ["*"]
        return {path for path in params if any(fnmatch.fnmatchcase(path, g) for g in globs)}

    def answer(
        self,
        params: Any,
        collections: Any,
        batch: Any,
        *,
        units: tuple[np.ndarray, int],
        train: bool = True,
        keys: jax.Array | None = None,
    ) -> Answer:
        """Computes one device's results; `units` groups the examples, see `random_reference`."""
        dtype = self.options.get("gather_dtype")
        parts = [self.row.get(n) for n in ("lora", "quantized", "trainable", "with_labels")]
        reference: Reference = self.share(
            "reference", [*parts, dtype], lambda: Reference(self.row, self.plain, dtype)
        )
        args = self.trained(params), collections, batch, *units
        return reference(params, *args, train=train, keys=keys)

    def units(self, program: Any, size: int) -> tuple[np.ndarray, int]:
        """Returns the example numbers of each unit, and the number of devices, of `size` examples.

        The program, or each replica of DiLoCo, takes the examples in a step.
        """
        minibatches, devices = program.num_minibatches, _devices_of(program)
        numbers = np.arange(size).reshape(devices, minibatches, -1)
        has_masks = self._has_masks(program)
        of_device = has_masks or self.row["fields"].get("norm") == "batch" or self.is_grouped
        meets = self.row["fields"].get("norm") == "synced" or self.row["loss"] == "coupled"
        if self.is_manual and of_device and not meets:
            return numbers.reshape(devices * minibatches, -1), devices
        if has_masks or meets or self.has_statistics or self.is_grouped:
            return numbers.transpose(1, 0, 2).reshape(minibatches, -1), 1
        return np.arange(size)[:, None], devices

    def _has_masks(self, program: Any) -> bool:
        """Returns whether the program has dropout whose masks one device can draw too."""
        meets = self.row["fields"].get("norm") == "synced" or self.row["loss"] == "coupled"
        can_draw = has_masks_of_one_device(program, is_manual=self.is_manual, meets_others=meets)
        return self.has_dropout and can_draw

    def allowance(self, program: Any, *, adds_residuals: bool) -> Allowance:
        """Returns the allowed differences; `adds_residuals` if the check corrects quantization."""
        options = self.options
        dtypes = [options.get(f"{n}_dtype") for n in ("gather", "param", "reduce", "frozen")]
        axes = [a for a in program.mesh.axis_names if program.mesh.shape[a] > 1]
        is_coupled = self.has_statistics or self.row["loss"] == "coupled"
        # In each minibatch a gradient is quantized twice for each axis: to scatter, and to gather
        # the sum.
        reductions = 2 * program.num_minibatches * max(1, len(program.data_axes))
        return Allowance(
            is_low="bfloat16" in dtypes,
            has_coded_weights=bool(options.get("gather_code")),
            code=None if adds_residuals else options.get("reduce_code"),
            reductions=reductions,
            is_random=bool(options.get("stochastic_rounding")),
            is_split=bool({"context", "expert", "model", "stage"} & {*axes}) or is_coupled,
            has_statistics=self.has_statistics,
            has_learned_counts=self.row.get("form") in LEARNED,
            has_coded_products=self.has_coded_products,
            parts=program.mesh.shape.get("context", 1) if self.row.get("form") == "scalar" else 1,
        )

    # The comparisons.

    def begin(self, program: Any) -> Any:
        """Makes a program's initial state, and compares it with plain flax."""
        plain = self._plain_variables()
        is_wrapped = "lora" in self.row or "quantized" in self.row
        is_low = self.allowance(program, adds_residuals=False).is_low
        if self.row["given"] and not is_wrapped and not is_low:
            state = program.init_from(plain)
        else:
            state = program.init(jax.random.key(7))
        params, collections = self.whole(program, state)
        self._check_initial(params, collections, is_low=is_low)
        return state

    def _plain_variables(self) -> Any:
        init_rng, _ = jax.random.split(jax.random.key(7))
        init = jax.jit(self.plain.init)
        return self.share(
            "init", (), lambda: jax.device_get(init(init_rng, self.batches[0].inputs))
        )

    def _check_initial(self, params: Any, collections: Any, *, is_low: bool) -> None:
        made = dict(self._plain_variables())
        expected, trained = flatten(made.pop("params")), self.trained(params)
        plain = flatten(self.plain.to_plain(unflatten(params)))
        for path, e in expected.items():
            if path not in params:  # Quantized: off by half a step, and by rounding.
                step = np.abs(e).max() / 127
                off = np.abs(np.asarray(plain[path], np.float32) - e).max()
                if not off <= (1.0 if is_low else 0.52) * step + 1e-30:
                    raise WrongError(f"init: {path} in codes is off by {off / step:.3g} steps")
                continue
            stored = self.options.get("param_dtype")
            stored = stored if path in trained else self.options.get("frozen_dtype") or stored
            if stored and jnp.issubdtype(e.dtype, jnp.floating):
                e = e.astype(stored)
            self._check_initial_array(path, e, params[path])
        wanted, found = flatten(made), flatten(collections)
        sown = ("intermediates", "losses", "aux", "Seen")
        wanted = {p: x for p, x in wanted.items() if p.partition("/")[0] not in sown or p in found}
        for path, e in wanted.items():
            self._check_initial_array(path, e, found[path])

    def _check_initial_array(self, path: str, expected: Any, found: Any) -> None:
        if expected.dtype == found.dtype and np.array_equal(expected, found):
            return
        off = ulps(expected, found)
        if expected.dtype != found.dtype or not off <= 4:
            raise WrongError(f"init: {path} is not the same bits, but {off:.3g} ulps off")
        # Without optimizations, XLA's rounding may depend on the program's other outputs.
        self.notes.append(f"init: {path} is {off:.2g} ulps off")

    def _check_repeats(self, program: Any) -> None:
        ends = []
        for _ in range(2):
            state, metrics = program.train_step(program.init(jax.random.key(7)), self.batches[0])
            ends.append((flatten(program.whole(state)), jax.device_get(metrics)))
        if not all(jax.tree.leaves(jax.tree.map(np.array_equal, *ends))):
            raise WrongError("dropout: the same step from the same state gave other bits")

    def _check_threads(self, program: Any) -> None:
        """Builds and steps two programs in two threads at once; each must be as it is alone."""
        other = self.row["threads"]
        options = {k: v for k, v in self.options.items() if k in SHARED.split()} | other["options"]
        if "axis_aliases" in options:
            options["axis_aliases"] = {"batch": ["data"]}
        if "rules" in options and "model" not in other["mesh"]:
            options["rules"] = [["features", None], ["hidden", None]]
        chosen = (
            (self.row["strategy"], self.options, self.row["mesh"]),
            (other["strategy"], options, other["mesh"]),
        )

        def train(index: int, program: Any = None) -> Any:
            program = program or self.build(*chosen[index])
            state = program.init(jax.random.key(7))
            state, metrics = program.train_step(state, self.batches[0])
            return jax.device_get((flatten(program.whole(state)), metrics))

        alone = [train(0, program), train(1)]
        both = threading.Barrier(2)

        def run(index: int) -> Any:
            both.wait()
            return train(index)

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            together = list(pool.map(run, (0, 1)))
        for index, (expected, found) in enumerate(zip(alone, together, strict=True)):
            same = jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=True), expected, found)
            if not all(jax.tree.leaves(same)):
                raise WrongError(f"threads: program {index} of 2 has other bits than alone: {same}")

    def _has_met_nan(self) -> bool:
        met = self.row["nan_at"] and self.options["nonfinite"] == "report"
        return met or bool(self.options.get("eval_dropout"))

    def step(self, program: Any, state: Any, number: int, optimizer: OneDevice) -> Any:
        """Runs a step and compares all its results; returns the new state."""
        batch, what = self.batches[number], f"step {number}"
        broken = _with_nan(batch) if self.row["nan_at"] and number == 1 else None
        params, collections = self.whole(program, state)
        residuals, keys = _residuals(state, params), None
        units = self.units(program, self.row["batch"])
        if has_masks := self._has_masks(program):
            keys = keys_of_step(program, state.rng, is_manual=self.is_manual)
        state, metrics = program.train_step(state, broken or batch)
        metrics = {name: tuple(map(float, pair)) for name, pair in metrics.items()}
        after, variables = self.whole(program, state)
        if broken is not None:
            if metrics["nonfinite"][0] != 1:
                raise WrongError(f"{what}: nonfinite is {metrics['nonfinite']} with a NaN")
            if self.options["nonfinite"] == "skip":
                check_same_bits(f"{what} with a NaN", params, after)
            return state
        trained = self.trained(params)
        frozen = {path: x for path, x in params.items() if path not in trained}
        check_same_bits(f"{what}, frozen", frozen, after)
        grads = {
            path: np.asarray(g)[tuple(map(slice, params[path].shape))]
            for path, g in flatten(jax.device_get(state.opt_state.gradient)).items()
        }
        if set(grads) != trained:
            raise WrongError(f"{what}: gradients of {sorted(set(grads) ^ trained)}")
        allowance = self.allowance(program, adds_residuals=bool(residuals))
        answer = functools.partial(self.answer, batch=batch, units=units)
        expected = answer(params, collections, keys=keys)
        if self.diverges(what, grads, expected, (params, after)):
            return state
        if self.options.get("nonfinite", "ignore") != "ignore" and metrics["nonfinite"] != (0, 1):
            raise WrongError(f"{what}: nonfinite is {metrics['nonfinite']}, and all is finite")
        by_chance, noisy = None, []
        if self.has_dropout and not has_masks:
            draw = functools.partial(answer, params, collections)
            by_chance = spread_of_metrics(lambda keys: draw(keys=keys), len(units[0]))
        else:
            kept = _residuals(state, params)
            sums = {p: g + kept[p] - residuals[p] if p in kept else g for p, g in grads.items()}
            noisy = [answer(x, collections, keys=keys) for x in allowance.moved(params)]
            if self.overflows(what, noisy):
                return state
            allowance.check_gradients(what, sums, expected, noisy)
            self._check_variables(what, program, collections, variables, expected, allowance)
        allowance.check_metrics(what, metrics, expected.metrics, noisy=noisy, by_chance=by_chance)
        if self.options.get("norm_metrics"):
            allowance.check_norms(what, metrics, grads, after)
        optimizer.check(what, params, grads, after)
        return state

    def diverges(
        self, what: str, grads: Mapping[str, Any], expected: Answer, moved: tuple[Any, Any]
    ) -> bool:
        """Returns whether gradients are not finite; they must be so on one device too.

        A step that is skipped leaves the gradients of the step before it; `moved` are the
        parameters before and after the step, which must then have the same bits.
        """
        found, wanted = (
            {path for path, g in each.items() if not np.isfinite(np.float32(g)).all()}
            for each in (grads, expected.grads)
        )
        if wanted and self.options.get("nonfinite") == "skip":
            check_same_bits(f"{what}, skipped", *moved)
        elif found != wanted:
            raise WrongError(
                f"{what}: the gradients of {sorted(found)} are not finite, on one device those of "
                f"{sorted(wanted)}"
            )
        if wanted:
            self.has_diverged = True
            self.notes.append(f"{what}: gradients are not finite, as on one device")
        return self.has_diverged

    def overflows(self, what: str, noisy: Sequence[Answer]) -> bool:
        """Returns whether rounding errors decide if gradients are finite: nothing bounds them then.

        `noisy` are one device's answers for parameters that are changed by rounding errors.
        """
        if not all(np.isfinite(np.float32(g)).all() for x in noisy for g in x.grads.values()):
            self.has_diverged = True
            self.notes.append(f"{what}: roundings decide whether gradients are finite")
        return self.has_diverged

    def _check_variables(
        self,
        what: str,
        program: Any,
        before: Any,
        after: Any,
        expected: Answer,
        allowance: Allowance,
    ) -> None:
        rtol = 0.05 if allowance.is_rough else 1e-5
        old, found = flatten(before), flatten(after)
        if set(old) != set(found):
            raise WrongError(f"{what}: variables are {sorted(found)}, expected {sorted(old)}")
        for path, each in expected.variables.items():
            x = np.asarray(each, np.float64)
            if path.endswith("seen"):
                value = old[path] + (x - old[path]).sum(0)
            elif path.endswith("largest"):
                value = x.max(0)
            elif program.num_minibatches > 1 and path.startswith("batch_stats"):
                continue
            elif path.endswith("calls"):  # Each minibatch is a call of the model.
                value = old[path] + program.num_minibatches * (x - old[path])[0]
            else:
                value = x.mean(0)
            if not np.allclose(found[path], value, rtol=rtol, atol=rtol * np.abs(value).max()):
                raise WrongError(
                    f"{what}: the variable {path} is {found[path]}, expected {value}"[:300]
                )

    def evaluate(self, program: Any, state: Any) -> None:
        """Compares the metrics of an evaluation with those of one device."""
        params, collections = self.whole(program, state)
        batch = self.batches[STEPS]
        metrics = jax.device_get(program.eval_step(state, batch))
        metrics = {name: tuple(map(float, pair)) for name, pair in metrics.items()}
        units = np.arange(self.row["batch"])[:, None], 1
        if self.row["loss"] == "coupled":
            units = np.arange(self.row["batch"])[None], 1
        elif self.is_grouped:
            devices = _devices_of(program) if self.is_manual else 1
            numbers = np.arange(self.row["batch"]).reshape(devices, -1)
            if "stage" in program.mesh.shape:  # A pipeline evaluates as many microbatches as fit.
                each, most = numbers.shape[1], program.num_minibatches
                fitting = max(n for n in range(1, most + 1) if each % n == 0)
                numbers = numbers.reshape(devices * fitting, -1)
            units = numbers, devices
        answer = functools.partial(
            self.answer, collections=collections, batch=batch, units=units, train=False
        )
        allowance, noisy = self.allowance(program, adds_residuals=False), []
        if allowance.has_coded_products:
            noisy = [answer(x) for x in allowance.moved(params)]
        allowance.check_metrics("evaluation", metrics, answer(params).metrics, noisy=noisy)

    def _check_average(self, program: Any, state: Any, average: Mapping[str, Any]) -> None:
        found, _ = self.whole(program, manualpar.ema_params(state))
        for path, e in average.items():
            x = np.float64(found[path])
            ulp = float(jnp.finfo(found[path].dtype).eps)
            if not np.allclose(x, e, rtol=4 * ulp, atol=4 * ulp * np.abs(e).max(initial=0)):
                raise WrongError(f"average: {path} is off {np.abs(x - e).max():.3g}")


def _devices_of(program: Any) -> int:
    """Returns the number of parts in which devices take a batch."""
    return math.prod(program.mesh.shape[a] for a in program.data_axes if a != "context")


def _with_nan(batch: Any) -> Any:
    """Returns the batch with a NaN in one example; `None` if no array of it is of floats."""
    for name in ("inputs", "mask"):
        x = getattr(batch, name)
        if isinstance(x, np.ndarray) and x.dtype.kind == "f":
            x = x.copy()
            x.reshape(-1)[3] = np.nan
            return batch.replace(**{name: x})
    return None


def _residuals(state: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the devices' mean residual, which error feedback adds to gradients, by path."""
    residuals = flatten(jax.device_get(state.local.get("residuals", {})))
    return {
        path: np.asarray(r, np.float64)[(slice(None), *map(slice, params[path].shape))].mean(0)
        for path, r in residuals.items()
    }
