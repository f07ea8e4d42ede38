"""Finds the dims along which a program treats slices apart from each other, and runs one slice.

Such dims are a *batch*: the layers of a stack of matrices, or the experts. A walk through the
program labels each dim of each value. A label is the tuple of the batch dims that the dim joins:
`()` for none, two for a dim that a reshape has made of layers and experts. The label of a dim along
which a value does not change is `UNIFORM`. At the same time the walk runs the program, with batch
dims of size 1. It raises a `NotUnderstoodError` at an operation that it does not know.

Transposes that undo each other are left out, also with reshapes between them that only add or
remove dims of size 1. So a function that transposes tall matrices is the same program for a tall
matrix that is given transposed as for a wide one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from manualpar.core.tracing.jaxprs import ELEMENTWISE, scan_sizes

# The batch dims that a dim joins; None (`UNIFORM`) for a dim along which all entries are equal.
Label: TypeAlias = tuple[int, ...] | None
Labels: TypeAlias = tuple[Label, ...]
UNIFORM: Label = None

CALLS = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"})
_REDUCTIONS = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
"""
REDUCTIONS = frozenset(_REDUCTIONS.split())
# Operations on the last two dims of an array, for each entry of the dims before them.
_DECOMPOSITIONS = """
cholesky eigh geqrf householder_product lu qr schur svd triangular_solve tridiagonal
"""
DECOMPOSITIONS = frozenset(_DECOMPOSITIONS.split())


class NotUnderstoodError(Exception):
    """It is not known what an operation does to the slices of a batch; the message says which."""


def calls(eqn: Any) -> ClosedJaxpr:
    """Returns the program that a call of `CALLS` runs."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if (found := eqn.params.get(name)) is not None:
            return found if isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, ())
    raise NotUnderstoodError(f"{eqn.primitive.name} is not understood")


def bind(eqn: Any, args: Sequence[Any], **params: Any) -> list[Any]:
    """Runs an operation on other operands, with some other parameters."""
    given = eqn.primitive.get_bind_params(eqn.params)
    functions, given = given if isinstance(given, tuple) else ((), given)  # A tuple before 0.12.
    out = eqn.primitive.bind(*functions, *_alike(args), **{**given, **params})
    return list(out) if eqn.primitive.multiple_results else [out]


def _alike(args: Sequence[Any]) -> list[Any]:
    """Casts operands to vary over the same axes: the program was traced outside `shard_map`."""
    axes = _varying(args)
    return [_cast(x, axes) for x in args]


def _varying(args: Any) -> frozenset[str]:
    axes = (jax.typeof(x).mat.varying for x in jax.tree.leaves(args))
    return frozenset[str]().union(*axes)


def _cast(x: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _has_batch(label: Labels) -> bool:
    return any(label)


def _not_uniform(labels: Labels) -> Labels:
    return tuple(of or () for of in labels)


def _wide(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the dims that are not 1."""
    return tuple(n for n in shape if n != 1)


def _pairs(found: tuple[list[Labels], list[Any]]) -> list[tuple[Labels, Any]]:
    return list(zip(*found, strict=True))


class SliceWalk:
    """Runs a program on one slice of a batch.

    `sizes` are the sizes of the batch dims, by their numbers in labels.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes = sizes
        # The arrays that are permuted others, by `id`: the array, its source, and the permutation
        # of those dims that are not 1.
        self._permuted: dict[int, tuple[Any, Any, tuple[int, ...]]] = {}

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], labels: Sequence[Labels], args: Sequence[Any]
    ) -> tuple[list[Labels], list[Any]]:
        """Runs a program with every batch dim of size 1; returns the results' labels and values.

        Raises:
          NotUnderstoodError: An operation may mix the slices of the batch.
        """
        values: dict[Any, tuple[Labels, Any]] = {}

        def read(v: Any) -> tuple[Labels, Any]:
            return (((),) * jnp.ndim(v.val), v.val) if isinstance(v, Literal) else values[v]

        for v, x in zip(jaxpr.constvars, consts, strict=True):
            values[v] = ((),) * jnp.ndim(x), x
        for v, label, x in zip(jaxpr.invars, labels, args, strict=True):
            values[v] = label, x
        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            results = self._apply(eqn, [a for a, _ in operands], [x for _, x in operands])
            values.update(zip(eqn.outvars, results, strict=True))
        outs = [read(v) for v in jaxpr.outvars]
        return [label for label, _ in outs], [x for _, x in outs]

    def transpose(self, x: Any, permutation: Sequence[int]) -> Any:
        """Transposes an array; if it is a transposed array, returns the source where possible."""
        if tuple(permutation) == tuple(range(x.ndim)):
            return x
        _, source, order = self._permuted.get(id(x), (x, x, tuple(range(len(_wide(x.shape))))))
        place = {dim: i for i, dim in enumerate(d for d in range(x.ndim) if x.shape[d] != 1)}
        order = tuple(order[place[d]] for d in permutation if d in place)
        shape = tuple(x.shape[d] for d in permutation)
        if order == tuple(range(len(order))):
            return jnp.reshape(source, shape)
        out = jax.lax.transpose(x, tuple(permutation))
        self._permuted[id(out)] = out, source, order
        return out

    def _resize(self, x: Any, shape: tuple[int, ...]) -> Any:
        out = jnp.reshape(x, shape)
        if id(x) in self._permuted and _wide(x.shape) == _wide(shape):
            _, source, order = self._permuted[id(x)]
            self._permuted[id(out)] = out, source, order
        return out

    def _apply(self, eqn: Any, labels: list[Labels], args: list[Any]) -> list[tuple[Labels, Any]]:
        name = eqn.primitive.name
        if name in CALLS:
            inner = calls(eqn)
            return _pairs(self.run(inner.jaxpr, inner.consts, labels, args))
        if name == "scan":
            return self._scan(eqn, labels, args)
        if name == "cond" and not any(labels[0]):
            return self._cond(eqn, labels, args)
        if name in ELEMENTWISE:
            return self._elementwise(eqn, labels, args)
        if name == "broadcast_in_dim":
            return [self._broadcast(eqn, labels[0], args)]
        rules: dict[str, Callable[..., Any]] = {
            "reshape": self._reshape,
            "squeeze": self._squeeze,
            "transpose": self._transpose,
        }
        if any(map(_has_batch, labels)):
            rules |= {
                **dict.fromkeys(REDUCTIONS, self._reduce),
                **dict.fromkeys(DECOMPOSITIONS, self._decompose),
                "concatenate": self._concatenate,
                "dot_general": self._multiply,
            }
        elif name not in rules:  # The same for all slices.
            outs = zip(eqn.outvars, bind(eqn, args), strict=True)
            return [(((),) * len(v.aval.shape), x) for v, x in outs]
        if name not in rules:
            raise NotUnderstoodError(f"{name} is not understood")
        found: list[tuple[Labels, Any]] = rules[name](eqn, labels, args)
        return found

    def _one(self, label: Labels, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns a shape with every batch dim of size 1."""
        return tuple(1 if of else n for of, n in zip(label, shape, strict=True))

    def _elementwise(
        self, eqn: Any, labels: list[Labels], args: list[Any]
    ) -> list[tuple[Labels, Any]]:
        rank = max(map(len, labels), default=0)
        full = [label for label in labels if len(label) == rank]
        joined: list[Label] = []
        for of_dim in zip(*full, strict=True):
            known = {label for label in of_dim if label is not UNIFORM}
            if len(known) > 1:
                raise NotUnderstoodError(f"{eqn.primitive.name} joins a batch with other values")
            joined.append(known.pop() if known else UNIFORM)
        for i, label in enumerate(labels):  # Of a uniform operand, any slice will do.
            for dim, mine in enumerate(label):
                if mine is UNIFORM and joined[dim]:
                    args[i] = jax.lax.slice_in_dim(args[i], 0, 1, axis=dim)
        label = tuple(joined)
        return [(label, x) for x in bind(eqn, args)]

    def _broadcast(self, eqn: Any, label: Labels, args: list[Any]) -> tuple[Labels, Any]:
        old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        out: list[Label] = [UNIFORM] * len(new)
        for dim, target in enumerate(eqn.params["broadcast_dimensions"]):
            if old[dim] == new[target]:
                out[target] = label[dim]
            elif label[dim]:
                raise NotUnderstoodError("a batch is repeated")
        found = tuple(out)
        shape = self._one(found, new)
        if args and _wide(shape) == _wide(jnp.shape(args[0])):  # Only dims of size 1 are new.
            return found, self._resize(args[0], shape)
        return found, bind(eqn, args, shape=shape)[0]

    def _transpose(self, eqn: Any, labels: list[Labels], args: list[Any]) -> Any:
        permutation = eqn.params["permutation"]
        label = tuple(labels[0][d] for d in permutation)
        return [(label, self.transpose(args[0], permutation))]

    def _reshape(self, eqn: Any, labels: list[Labels], args: list[Any]) -> Any:
        old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        label = self._reshaped(old, labels[0], new)
        return [(label, self._resize(args[0], self._one(label, new)))]

    def _squeeze(self, eqn: Any, labels: list[Labels], args: list[Any]) -> Any:
        dims = eqn.params["dimensions"]
        if any(labels[0][d] for d in dims):
            raise NotUnderstoodError("a batch of one is removed")
        kept = [d for d in range(len(labels[0])) if d not in dims]
        shape = tuple(args[0].shape[d] for d in kept)
        return [(tuple(labels[0][d] for d in kept), self._resize(args[0], shape))]

    def _reduce(self, eqn: Any, labels: list[Labels], args: list[Any]) -> Any:
        axes = {int(axis) for axis in eqn.params["axes"]}
        if any(labels[0][axis] for axis in axes):
            raise NotUnderstoodError(f"{eqn.primitive.name} runs over a batch")
        kept = tuple(of for d, of in enumerate(labels[0]) if d not in axes)
        return [(kept, x) for x in bind(eqn, args)]

    def _decompose(self, eqn: Any, labels: list[Labels], args: list[Any]) -> Any:
        before = len(labels[0]) - 2
        lead = labels[0][:before]
        if any(label[:before] != lead or any(label[before:]) for label in labels):
            raise NotUnderstoodError(f"{eqn.primitive.name} runs over a batch")
        outs = zip(eqn.outvars, bind(eqn, args), strict=True)
        return [(lead + ((),) * (len(v.aval.shape) - before), x) for v, x in outs]

    def _multiply(self, eqn: Any, labels: list[Labels], args: list[Any]) -> Any:
        contracted, batched = eqn.params["dimension_numbers"]
        left, right = labels
        if any(label[d] for label, dims in zip(labels, contracted, strict=True) for d in dims):
            raise NotUnderstoodError("a product sums over a batch")
        free = [
            [label[d] for d in range(len(label)) if d not in (*sums, *lead)]
            for label, sums, lead in zip(labels, contracted, batched, strict=True)
        ]
        lead = tuple(left[d] for d in batched[0])
        same = tuple(right[d] for d in batched[1])
        is_outer = (any(free[0]) and _has_batch(right)) or (any(free[1]) and _has_batch(left))
        if lead != same or is_outer:
            raise NotUnderstoodError("a product joins slices of a batch")
        return [((*lead, *free[0], *free[1]), bind(eqn, args)[0])]

    def _concatenate(self, eqn: Any, labels: list[Labels], args: list[Any]) -> Any:
        dim = eqn.params["dimension"]
        if any(label != labels[0] for label in labels) or labels[0][dim]:
            raise NotUnderstoodError("a batch is concatenated")
        return [(labels[0], bind(eqn, args)[0])]

    def _scan(self, eqn: Any, labels: list[Labels], args: list[Any]) -> list[tuple[Labels, Any]]:
        params, closed = eqn.params, eqn.params["jaxpr"]
        num_consts, num_carry = scan_sizes(params)
        first = num_consts + num_carry
        if any(label and label[0] for label in labels[first:]):
            raise NotUnderstoodError("a loop runs over a batch")
        args = _alike(args)
        axes, rows = _varying(args), [label[1:] for label in labels[first:]]
        start = [_not_uniform(label) for label in labels[num_consts:first]]
        found: list[Labels] = []

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            values = [*args[:num_consts], *carry, *x]
            given = [*labels[:num_consts], *start, *rows]
            out, outs = self.run(closed.jaxpr, closed.consts, given, values)
            found[:] = map(_not_uniform, out)
            if found[:num_carry] != start:
                raise NotUnderstoodError("a loop moves a batch")
            outs = [_cast(y, axes) for y in outs]
            return outs[:num_carry], outs[num_carry:]

        options = {"length": params["length"], "reverse": params["reverse"]}
        carry, ys = jax.lax.scan(
            body, args[num_consts:first], args[first:], unroll=params["unroll"], **options
        )
        stacked = [((), *label) for label in found[num_carry:]]
        return [*zip(start, carry, strict=True), *zip(stacked, ys, strict=True)]

    def _cond(self, eqn: Any, labels: list[Labels], args: list[Any]) -> list[tuple[Labels, Any]]:
        found: list[list[Labels]] = []
        args = _alike(args)
        axes = _varying(args)

        def branch(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
            def run(*values: Any) -> list[Any]:
                out, outs = self.run(closed.jaxpr, closed.consts, labels[1:], values)
                found.append([_not_uniform(label) for label in out])
                return [_cast(x, axes) for x in outs]

            return run

        outs = jax.lax.switch(args[0], [branch(c) for c in eqn.params["branches"]], *args[1:])
        if any(label != found[0] for label in found):
            raise NotUnderstoodError("branches treat a batch differently")
        return list(zip(found[0], outs, strict=True))

    def _reshaped(self, old: Sequence[int], labels: Labels, new: Sequence[int]) -> Labels:
        """Returns the labels after a reshape; batch dims may only be joined with each other."""
        left: list[tuple[int, int | None]] = []  # Sizes from left to right, with their batch dims.
        for n, label in zip(old, labels, strict=True):
            left += [(self.sizes[i], i) for i in label] if label else [(n, None)]
        left = [(n, of) for n, of in left if n != 1 or of is not None]
        out: list[Label] = []
        for n in new:
            size, joined = 1, list[int | None]()
            while left and (size < n or (left[0][0] == 1 and n == 1 and not joined)):
                part, of = left.pop(0)
                rest, uneven = divmod(n, size)
                if of is None and not uneven and rest < part and part % rest == 0:
                    left.insert(0, (part // rest, None))  # The rest of a dim that is split.
                    part = rest
                size, joined = size * part, [*joined, of]
            if size != n or (None in joined and any(of is not None for of in joined)):
                raise NotUnderstoodError("a reshape joins a batch with another dim")
            out.append(() if None in joined else tuple(of for of in joined if of is not None))
        if any(of is not None for _, of in left):
            raise NotUnderstoodError("a reshape removes a batch")
        return tuple(out)
