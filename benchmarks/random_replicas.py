"""Compares each DiLoCo replica of `random_programs` with a single device.

Each replica has its own parameters, gradients and optimizer state. In every step its gradients and
its update are compared with those of one device that gets the replica's part of the batch. After an
outer step, the new common parameters are compared with an outer step from the mean of the
parameters that single devices computed for the replicas.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.random_builders import outer_optimizer
from benchmarks.random_comparison import WrongError, check_same_bits
from benchmarks.random_reference import flatten, unflatten


def check_replicas(check: Any, program: Any) -> None:
    """Trains a DiLoCo program, and compares each replica and each outer step with one device."""
    of_replicas = check.row["diloco"]
    number = program.mesh.shape["replica"]
    state = check.begin(program)
    allowance = check.allowance(program.outer.inner, adds_residuals=False)
    outer_tx = outer_optimizer(check.row)
    optimizers = [check.one_device() for _ in range(number)]
    common = check.whole(program, state)[0]
    shapes = {path: x.shape for path, x in common.items()}
    trained = check.trained(common)
    outer_state = outer_tx.init(unflatten({p: common[p] for p in trained}))
    seen = np.zeros(number)
    divided = of_replicas.get("outer_fragments", 1) > 1 or of_replicas.get("outer_overlap")
    has_codes = "outer_code" in of_replicas
    for step in range(1, 2 * of_replicas["every"] + 1):
        batch = check.batches[step % len(check.batches)]
        own = _of_replicas(state.local["params"], shapes)
        collections = check.whole(program, state)[1]
        state, metrics = program.step_at(step)(state, batch)
        what = f"step {step}"
        after = _of_replicas(state.local["params"], shapes)
        grads = _of_replicas(state.local["opt_state"].gradient, shapes)
        parts = np.split(np.arange(check.row["batch"]), number)
        moved, counts, totals, by_roundings = [], [], [], 0.0
        meets = not divided and step % of_replicas["every"] == 0
        for replica, part in enumerate(parts):
            mine = common | {path: x[replica] for path, x in own.items()}
            its = {path: x[replica] for path, x in grads.items()}
            piece = jax.tree.map(lambda x, part=part: x[part], batch)
            units = check.units(program.outer.inner, len(part))
            expected = check.answer(mine, collections, piece, units=units)
            named = f"{what} of replica {replica}"
            got = {path: x[replica] for path, x in after.items()}
            kept = ({}, {}) if meets or divided else ({p: mine[p] for p in got}, got)
            if check.diverges(named, its, expected, kept):
                return
            if not check.has_dropout and not check.has_statistics:
                near = allowance.moved(mine)
                noisy = [check.answer(x, collections, piece, units=units) for x in near]
                if check.overflows(named, noisy):
                    return
                allowance.check_gradients(named, its, expected, noisy)
                by_roundings += allowance.by_roundings("loss", expected.metrics["loss"], noisy)[0]
            new = optimizers[replica].updated(mine, its)
            moved.append(new)
            counts.append(expected.metrics["loss"][1])
            totals.append(expected.metrics["loss"][0])
            if not meets and not divided:
                optimizers[replica].compare(named, mine, got, new)
        seen += counts
        total, count = map(float, metrics["loss"])
        if not check.has_dropout and not check.has_statistics and not allowance.is_rough:
            off = abs(total - sum(totals))
            rtol = 5e-3 if allowance.has_coded_products else 1e-4
            is_off = off > rtol * max(abs(total), 1) + by_roundings
            if is_off or abs(count - sum(counts)) > 1e-3:
                raise WrongError(f"{what}: loss is {total, count}, {sum(totals), sum(counts)}")
        if not meets:
            continue
        weights = seen / seen.sum() if seen.sum() else np.full(number, 1 / number)
        seen[:] = 0
        anchor = {path: np.asarray(common[path], np.float64) for path in trained}
        # A sum of differences, because it is exactly 0 for elements that no replica has changed.
        delta = {
            path: sum(w * (x - m[path]) for w, m in zip(weights, moved, strict=True))
            for path, x in anchor.items()
        }
        tree = unflatten({p: d.astype(np.float32) for p, d in delta.items()})
        updates, outer_state = outer_tx.update(tree, outer_state)
        found = check.whole(program, state)[0]
        for path, update in flatten(jax.device_get(updates)).items():
            e = anchor[path] + update
            off, far = np.abs(found[path] - e).max(initial=0), np.abs(update).max(initial=0)
            if has_codes:
                far = max(far, sum(np.abs(anchor[path] - m[path]).max(initial=0) for m in moved))
                allowed = far / 3
            else:
                allowed = 5e-3 * far
            allowed += 4e-7 * np.abs(e).max(initial=0)  # New parameters are rounded to float32.
            if allowance.is_low:
                allowed += 0.05 * far + 2.0**-7 * np.abs(e).max(initial=0)
            has_diverged = np.isnan(e).any() and np.isnan(found[path]).any()
            if not off <= allowed and not has_diverged:
                raise WrongError(f"{what} outer: {path} is off {off:.3g} of {far:.3g}")
        frozen = {p: x for p, x in common.items() if p not in trained}
        check_same_bits(f"{what}, frozen", frozen, {p: found[p] for p in frozen})
        common = found
    check.evaluate(program, state)


def _of_replicas(tree: Any, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns a tree's arrays by path without padding; dim 0 counts the replicas."""
    return {
        path: np.asarray(x)[(slice(None), *map(slice, shapes[path]))]
        for path, x in flatten(jax.device_get(tree)).items()
    }
