"""Runs the matrix functions of an optimizer on whole matrices, divided over the devices.

An elementwise optimizer such as Adam updates each device's shards without communication. Muon does
not: it multiplies a matrix with itself, several times. If XLA runs this on shards, it gathers and
reduces in each multiplication. This module runs it on whole matrices instead. Each device is the
*owner* of some of the matrices while they are updated:

    X [M, D/N, F]    each device has a part of all M matrices
    all-to-all  ->   [M/N, D, F]: an owner has all of some matrices
    f(X)             the matrix function runs on whole matrices
    all-to-all  ->   [M, D/N, F]: each device has its part of all results

`2 P/N (N - 1)/N` bytes are sent for `P` bytes of matrices, however often `f` multiplies. State and
placements do not change. Devices that have the same part (replicas) divide the matrices too, if
each then owns fewer; an all-gather gives all of them the results.

`f` is found in the traced update, so any optimizer is divided that is written with `jax`. An
operation *mixes* if an entry of its result depends on several entries of a parameter. The matrix
function of a parameter is what lies between its first and its last operation that mixes, if a
product or a decomposition of matrices is among these. The rest stays as it is: momentum before it,
weight decay after it, Adam for other parameters, norms (XLA adds up numbers). Equal functions of
equally sharded parameters form a `MatrixGroup` and run together. The matrices are the slices along
the dims that the function treats as a batch, see `manualpar.core.tracing.batch_dims`: layers and
experts. What is not understood is left to XLA, and `MatrixFunctions.left` gives the reason.
"""

import dataclasses
import functools
import graphlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple, names_to_spec
from manualpar.core.modes.mode import Mode
from manualpar.core.parameters.collectives import cast_to_varying, gather_invariant
from manualpar.core.parameters.placement import Placement
from manualpar.core.parameters.sharded_parameter import pad_leaf, unpad_leaf
from manualpar.core.tracing.batch_dims import (
    CALLS,
    DECOMPOSITIONS,
    NotUnderstoodError,
    SliceWalk,
    calls,
)
from manualpar.core.tracing.jaxprs import (
    ELEMENTWISE,
    all_equations,
    inner_jaxprs,
    run_equations,
    without_names,
)
from manualpar.core.tracing.scopes import MATRICES_SCOPE

JOINED = -1  # Stands for the parameter of a value that depends on several parameters.


@dataclasses.dataclass(frozen=True)
class MatrixGroup:
    """Matrices that devices exchange together, because one function updates them.

    Attributes:
      paths: The parameters.
      shape: The shape of a matrix, with padding of its sharded dims.
      matrices: The number of matrices of which a device has a part.
      padded: The same, with some repeated so that each owner gets as many.
      exchanged: The dims of a matrix that are sharded, each with its mesh axes.
      copies: The mesh axes along which devices with the same part divide the matrices.
      inputs: The dtype of each input of the function.
      outputs: The dtype of each result.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    matrices: int
    padded: int
    exchanged: tuple[tuple[int, tuple[str, ...]], ...]
    copies: tuple[str, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class MatrixParameter:
    """What the search needs to know of a parameter: its path, shape, axes of dims, and padding."""

    path: str
    shape: tuple[int, ...]
    names: Names
    padding: tuple[int, ...]

    @classmethod
    def of(cls, path: str, x: Any, place: Placement) -> "MatrixParameter":
        """Describes a parameter whose gradient and state are placed like `place`."""
        names = place.sharded_names or (None,) * x.ndim
        return cls(path, x.shape, names, place.padding)


# -------------------------------------------------------------------------------------------------
# The matrix function of one parameter.


def _has_matrix(eqn: Any) -> bool:
    """Returns whether an operation contains a product or a decomposition of matrices."""
    names = {eqn.primitive.name}
    for _, inner in inner_jaxprs(eqn):
        names |= {each.primitive.name for each in all_equations(inner)}
    return not names.isdisjoint({"dot_general", *DECOMPOSITIONS})


def without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with the bodies of `jit` in place of calls that have several arrays."""
    if not any(_is_inlined(eqn) for eqn in closed.jaxpr.eqns):
        return closed

    def run(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        for is_call, some in itertools.groupby(jaxpr.eqns, key=_is_inlined):
            for part in [[eqn] for eqn in some] if is_call else [list(some)]:
                made = [v for eqn in part for v in eqn.outvars]
                if is_call:
                    outs = run(calls(part[0]), [_read(v, values) for v in part[0].invars])
                else:
                    read = {v: values[v] for eqn in part for v in _operands(eqn) if v in values}
                    outs = run_equations(jaxpr, part, read, made, read.values())
                values.update(zip(made, outs, strict=True))
        return [_read(v, values) for v in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: run(closed, args))(*closed.in_avals)


def _is_inlined(eqn: Any) -> bool:
    several = max(sum(bool(v.aval.shape) for v in vs) for vs in (eqn.invars, eqn.outvars)) > 1
    return eqn.primitive.name in ("jit", "pjit", "closed_call") and several


def _read(v: Any, values: Mapping[Any, Any]) -> Any:
    return v.val if isinstance(v, Literal) else values[v]


def has_matrices(jaxpr: Jaxpr) -> bool:
    """Returns whether a program contains a product or a decomposition of matrices."""
    return any(map(_has_matrix, jaxpr.eqns))


def _mixes(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether an entry of a result depends on operands' entries at other places.

    Scalars may be among the operands.
    """
    if any(v.aval.shape not in (shape, ()) for v in (*eqn.invars, *eqn.outvars)):
        return True
    name = eqn.primitive.name
    if name in CALLS:
        return any(_mixes(inner, shape) for inner in calls(eqn).jaxpr.eqns)
    if name == "broadcast_in_dim":
        return eqn.invars[0].aval.shape != ()
    return name not in ELEMENTWISE


def _operands(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


class MatrixFunction:
    """The equations `indices` of a traced update, which compute the matrix function of a parameter.

    Attributes:
      parameter: The parameter.
      indices: The places of the equations in the update.
      inputs: The variables with the parameter's shape that the function reads.
      shared: The other variables that it reads, such as coefficients. They depend on no parameter.
      outputs: The variables that others read; they have the parameter's shape.
      batch: The dims along which the function treats slices apart from each other.
      order: A permutation of the dims: the batch, then the dims of a matrix, the shorter one first.
    """

    def __init__(
        self, parameter: MatrixParameter, indices: list[int], update: "_Flow", known: dict[str, Any]
    ) -> None:
        self.parameter, self.indices = parameter, indices
        eqns: list[Any] = [update.eqns[i] for i in indices]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = dict.fromkeys(v for eqn in eqns for v in _operands(eqn) if v not in made)
        owned = [v for v in read if v in update.owner]
        self.inputs = [v for v in owned if v.aval.shape == parameter.shape]
        self.shared = [v for v in read if v not in update.owner]
        used = update.used_outside({*indices})
        self.outputs = [v for eqn in eqns for v in eqn.outvars if v in used]
        if len(self.inputs) != len(owned) or not owned:
            raise NotUnderstoodError("it reads arrays of other shapes than the parameter's")
        if any(v.aval.shape != parameter.shape for v in self.outputs):
            raise NotUnderstoodError("it has results of other shapes than the parameter's")
        names = without_names(update.jaxpr)
        variables = [*self.shared, *self.inputs]
        self._program = Jaxpr((), variables, self.outputs, eqns, frozenset(), names)
        # Equal functions of equal parameters are examined once: a model may have hundreds.
        text = str((parameter.shape, len(self.shared), self._constants, self._program))
        if text not in known:
            known[text] = self._examine()
        found = known[text]
        if isinstance(found, NotUnderstoodError):
            raise found
        self.batch, self.order, self._text = found

    @property
    def _constants(self) -> tuple[int, ...]:
        """What the text of the program does not show: the arrays in its inner programs."""
        closed = (
            value
            for eqn in all_equations(self._program)
            for value in jax.tree.leaves([*eqn.params.values()])
            if isinstance(value, ClosedJaxpr)
        )
        return tuple(id(x) for each in closed for x in each.consts)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for functions that compute the same of matrices of the same shape."""
        return self._text, self._constants, tuple(map(id, self.shared))

    @property
    def core_dims(self) -> tuple[int, ...]:
        """The dims of a matrix, in the order in which devices exchange them."""
        return self.order[len(self.batch) :]

    @property
    def core_shape(self) -> tuple[int, ...]:
        """The shape of a matrix without padding."""
        return tuple(self.parameter.shape[d] for d in self.core_dims)

    def _examine(self) -> Any:
        """Returns the batch, the order of dims and the text of the function; or why not."""
        shape = self.parameter.shape
        dims = [d for d, n in enumerate(shape) if n > 1]
        sets = (s for n in range(len(dims), -1, -1) for s in itertools.combinations(dims, n))
        why = NotUnderstoodError("")
        for batch in sets:
            core = [d for d in range(len(shape)) if d not in batch]
            # Tall and wide matrices share a group if both are exchanged as wide ones.
            if len(core) == 2 and shape[core[0]] > shape[core[1]]:
                core.reverse()
            order = (*batch, *core)
            sliced = [1 if d in batch else shape[d] for d in order]
            avals = [v.aval for v in (*self.shared, *self.inputs)]
            given = [
                jax.ShapeDtypeStruct(x.shape if i < len(self.shared) else sliced, x.dtype)
                for i, x in enumerate(avals)
            ]
            run = functools.partial(self._run, batch, order)
            try:
                jaxpr = jax.make_jaxpr(run)(*given).jaxpr
            except NotUnderstoodError as error:
                why = error
                continue
            return batch, order, str(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])
        return why

    def run(self, *args: Any) -> list[Any]:
        """Runs the function on one matrix.

        Args:
          *args: The shared variables, then the inputs, each with dims in `order`, and those of the
            batch of size 1. The results have such dims too.
        """
        return self._run(self.batch, self.order, *args)

    def _run(self, batch: Sequence[int], order: Sequence[int], *args: Any) -> list[Any]:
        labels = tuple((d,) if d in batch else () for d in range(len(order)))
        walk = SliceWalk(dict(enumerate(self.parameter.shape)))
        back = [order.index(d) for d in range(len(order))]
        shared, inputs = args[: len(self.shared)], args[len(self.shared) :]
        found, outs = walk.run(
            self._program,
            (),
            [((),) * len(v.aval.shape) for v in self.shared] + [labels] * len(inputs),
            [*shared, *(walk.transpose(x, back) for x in inputs)],
        )
        if any(label != labels for label in found):
            raise NotUnderstoodError("its results have another batch than the parameter")
        return [walk.transpose(y, order) for y in outs]


# -------------------------------------------------------------------------------------------------
# Finds the matrix functions in a traced update.


class _Flow:
    """The equations of an update, and the parameter that each value belongs to.

    Attributes:
      owner: The index of the parameter on which a variable depends; `JOINED` for several
        parameters. Numbers (arrays of shape `[]`) have no owner: they are norms, and XLA may add
        them up.
      number_of: The same for numbers.
    """

    def __init__(self, jaxpr: Jaxpr, owners: Sequence[int | None]) -> None:
        self.jaxpr = jaxpr
        self.eqns: list[Any] = list(jaxpr.eqns)
        self.owner: dict[Any, int] = {}
        self.number_of: dict[Any, int] = {}
        self.users: defaultdict[Any, list[int]] = defaultdict(list)
        self.maker: dict[Any, int] = {}
        for v, owner in zip(jaxpr.invars, owners, strict=True):
            if owner is not None:
                self.note(v, owner)
        for i, eqn in enumerate(self.eqns):
            for v in _operands(eqn):
                self.users[v].append(i)
            self.maker.update(dict.fromkeys(eqn.outvars, i))
        self.results = {v for v in jaxpr.outvars if not isinstance(v, Literal)}

    def note(self, v: Any, owner: int) -> None:
        """Notes the owner of a variable."""
        (self.owner if v.aval.shape else self.number_of)[v] = owner

    def owners(self, eqn: Any) -> set[int]:
        """Returns the parameters on which an equation's arrays depend."""
        return {self.owner[v] for v in _operands(eqn) if v in self.owner}

    def owners_of_all(self, eqn: Any) -> set[int]:
        """Returns the parameters on which an equation's arrays and numbers depend."""
        numbers = {self.number_of[v] for v in _operands(eqn) if v in self.number_of}
        return numbers | self.owners(eqn)

    def used_outside(self, indices: set[int]) -> set[Any]:
        """Returns the variables of some equations that others read, or that are results."""
        made = [v for i in indices for v in self.eqns[i].outvars]
        return {v for v in made if v in self.results or not indices.issuperset(self.users[v])}

    def between(self, indices: set[int]) -> set[int]:
        """Adds the equations that need results of `indices` and that `indices` need."""
        inside = range(min(indices), max(indices) + 1)
        after, before = set[int](), set[int]()
        for i in inside:
            made = {self.maker[v] for v in _operands(self.eqns[i]) if v in self.maker}
            if i in indices or made & after:
                after.add(i)
        for i in reversed(inside):
            used = {u for v in self.eqns[i].outvars for u in self.users[v]}
            if i in indices or used & before:
                before.add(i)
        return after & before


class MatrixFunctions:
    """The matrix functions of an update, in groups that run together.

    Attributes:
      left: The reason, for each path of a parameter whose update mixes entries and is left to XLA.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        owners: Sequence[int | None],
        parameters: Sequence[MatrixParameter],
        mode: Mode,
    ) -> None:
        """Searches a traced update.

        Args:
          closed: The update, of global arrays without padding.
          owners: For each argument the index of its parameter, if it has the parameter's shape.
        """
        closed = without_calls(closed)
        self.closed, self.parameters, self.mode = closed, parameters, mode
        self.left: dict[str, str] = {}
        self._flow = _Flow(closed.jaxpr, owners)
        # The branches of a `cond` on several parameters (`optax.MultiSteps`), by equation.
        self._branches: dict[int, list[MatrixFunctions]] = {}
        mixing = self._find_mixing()
        self._groups = self._group(self._find(mixing))

    @property
    def groups(self) -> tuple[MatrixGroup, ...]:
        """The groups of a step; of a `cond`, those of the branch that has the most matrices."""
        found = [self._describe(group) for group in self._groups]
        for branches in self._branches.values():
            each = [branch.groups for branch in branches]
            found += max(each, key=lambda groups: sum(group.padded for group in groups))
        return tuple(found)

    def result_owners(self) -> list[int | None]:
        """Returns the parameter of each result; `None` for results of no parameter."""
        flow = self._flow
        vs = [None if isinstance(v, Literal) else v for v in self.closed.jaxpr.outvars]
        return [flow.owner.get(v, flow.number_of.get(v)) for v in vs]

    def _find_mixing(self) -> set[int]:
        """Follows each parameter through the update; returns the equations that mix its entries."""
        flow, mixing = self._flow, set[int]()
        for i, eqn in enumerate(flow.eqns):
            owners, of_all = flow.owners(eqn), flow.owners_of_all(eqn)
            is_array = any(v.aval.shape for v in eqn.outvars)
            several = len(of_all) > 1 or JOINED in of_all
            is_joined = len(owners) > 1 or JOINED in owners
            if is_joined and eqn.primitive.name == "cond":
                found = self._branch(i, eqn)
            else:
                if is_joined and is_array:
                    for owner in owners - {JOINED}:
                        path = self.parameters[owner].path
                        self.left.setdefault(path, f"{eqn.primitive.name} joins parameters")
                owner = next(iter(owners), JOINED) if not is_joined else JOINED
                number = JOINED if several else next(iter(of_all), None)
                found = [
                    (owner if owners else None) if v.aval.shape else number for v in eqn.outvars
                ]
                is_own = bool(owners) and not is_joined and is_array
                if is_own and _mixes(eqn, self.parameters[owner].shape):
                    mixing.add(i)
            for v, owner_of in zip(eqn.outvars, found, strict=True):
                if owner_of is not None:
                    flow.note(v, owner_of)
        return mixing

    def _branch(self, index: int, eqn: Any) -> list[int | None]:
        """Searches the branches of a `cond`; returns the owners of its results."""
        flow = self._flow
        owners = [
            None if isinstance(v, Literal) else flow.owner.get(v, flow.number_of.get(v))
            for v in eqn.invars[1:]
        ]
        given = self.parameters, self.mode
        branches = [MatrixFunctions(each, owners, *given) for each in eqn.params["branches"]]
        for branch in branches:
            self.left.update(branch.left)
        if any(branch.groups for branch in branches):
            self._branches[index] = branches
        found: list[int | None] = []
        for each in zip(*(branch.result_owners() for branch in branches), strict=True):
            known = {owner for owner in each if owner is not None}
            found.append(JOINED if len(known) > 1 else next(iter(known), None))
        return found

    def _find(self, mixing: set[int]) -> list[MatrixFunction]:
        """Returns the function of each parameter that has one; notes the reason for others."""
        flow, known = self._flow, dict[str, Any]()
        above, below = set[int](), set[int]()
        owned = [i for i, eqn in enumerate(flow.eqns) if len(flow.owners(eqn)) == 1]
        for i in owned:
            made = {flow.maker.get(v) for v in _operands(flow.eqns[i]) if v in flow.owner}
            if i in mixing or made & above:
                above.add(i)
        for i in reversed(owned):
            arrays = (v for v in flow.eqns[i].outvars if v.aval.shape)
            if i in mixing or any(u in below for v in arrays for u in flow.users[v]):
                below.add(i)
        parts: defaultdict[int, set[int]] = defaultdict(set)
        for i in above & below:
            if any(v.aval.shape for v in flow.eqns[i].outvars):
                (owner,) = flow.owners(flow.eqns[i])
                parts[owner].add(i)
        functions = []
        for owner, indices in sorted(parts.items()):
            if owner == JOINED or self.parameters[owner].path in self.left:
                continue
            parameter = self.parameters[owner]
            try:
                indices = flow.between(indices)
                if any(flow.owners_of_all(flow.eqns[i]) - {owner} for i in indices):
                    raise NotUnderstoodError("it needs values of other parameters")
                if not any(_has_matrix(flow.eqns[i]) for i in indices):
                    if any(
                        axes_size(self.mode.mesh, axis_tuple(name)) > 1 for name in parameter.names
                    ):
                        raise NotUnderstoodError("it mixes entries without a product of matrices")
                    continue  # Each device has all entries.
                functions.append(MatrixFunction(parameter, sorted(indices), flow, known))
            except NotUnderstoodError as error:
                self.left[parameter.path] = str(error)
        return functions

    def _group(self, functions: Iterable[MatrixFunction]) -> list[list[MatrixFunction]]:
        groups: defaultdict[Any, list[MatrixFunction]] = defaultdict(list)
        for function in functions:
            its, core = function.parameter, function.core_dims
            padding = its.padding or (0,) * len(its.shape)
            sharded = tuple(axis_tuple(its.names[d]) for d in core)
            batched = {axis for d in function.batch for axis in axis_tuple(its.names[d])}
            placed = sharded, tuple(padding[d] for d in core), frozenset(batched)
            groups[function.key, placed].append(function)
        found = list(groups.values())
        try:
            self._levels(found)
        except graphlib.CycleError:
            for function in itertools.chain.from_iterable(found):
                self.left[function.parameter.path] = "its groups need each other's results"
            return []
        return found

    def _describe(self, group: list[MatrixFunction]) -> MatrixGroup:
        """Decides how a group is exchanged."""
        first, mesh = group[0], self.mode.mesh
        its = first.parameter
        padding = its.padding or (0,) * len(its.shape)
        sharded = [(i, axis_tuple(its.names[d])) for i, d in enumerate(first.core_dims)]
        exchanged = tuple((i, axes) for i, axes in sharded if axes_size(mesh, axes) > 1)
        used = {axis for name in its.names for axis in axis_tuple(name)} | {*self.mode.outer_axes}
        count = sum(_matrices_on_device(function, mesh) for function in group)
        owners = math.prod(axes_size(mesh, axes) for _, axes in exchanged)
        copies: tuple[str, ...] = ()
        for axis in mesh.axis_names:
            more = owners * axes_size(mesh, (*copies, axis))
            fewer = math.ceil(count / more) < math.ceil(count / (owners * axes_size(mesh, copies)))
            if axis not in used and fewer:
                copies = (*copies, axis)
        total = owners * axes_size(mesh, copies)
        return MatrixGroup(
            paths=tuple(function.parameter.path for function in group),
            shape=tuple(its.shape[d] + padding[d] for d in first.core_dims),
            matrices=count,
            padded=math.ceil(count / total) * total,
            exchanged=exchanged,
            copies=copies,
            inputs=tuple(v.aval.dtype for v in first.inputs),
            outputs=tuple(v.aval.dtype for v in first.outputs),
        )

    # Running the update.

    def _levels(self, groups: list[list[MatrixFunction]]) -> list[tuple[list[int], list[int]]]:
        """Returns the order of an update: equations, then groups that run together, and so on.

        Each pair has the places of equations that need the groups of the pairs before, and the
        places of groups that need these equations.
        """
        flow = self._flow
        group_of = {i: g for g, group in enumerate(groups) for x in group for i in x.indices}

        def node(i: int) -> tuple[bool, int]:
            return (True, group_of[i]) if i in group_of else (False, i)

        graph: dict[tuple[bool, int], set[tuple[bool, int]]] = {}
        for i, eqn in enumerate(flow.eqns):
            made = {node(flow.maker[v]) for v in _operands(eqn) if v in flow.maker}
            graph.setdefault(node(i), set()).update(made - {node(i)})
        level: dict[tuple[bool, int], int] = {}
        for each in graphlib.TopologicalSorter(graph).static_order():
            # What needs a group comes one level after it.
            level[each] = max((level[x] + x[0] for x in graph[each]), default=0)
        pairs: list[tuple[list[int], list[int]]] = [
            ([], []) for _ in range(max(level.values(), default=0) + 1)
        ]
        for (is_group, i), at in sorted(level.items()):
            pairs[at][is_group].append(i)
        return pairs

    def run(self, *args: Any) -> list[Any]:
        """Runs the update on global arrays; returns its flat results.

        Communication:
          For each group two all-to-alls over each axis that shards the matrices, and an all-gather
          over `MatrixGroup.copies`.
        """
        jaxpr = self.closed.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        for indices, groups in self._levels(self._groups):
            for is_cond, some in itertools.groupby(indices, key=self._branches.__contains__):
                for part in [[i] for i in some] if is_cond else [list(some)]:
                    values.update(self._run_equations(part, values))
            for g in groups:
                values.update(self._run_group(self._groups[g], values))
        return [_read(v, values) for v in jaxpr.outvars]

    def _run_equations(self, indices: list[int], values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Runs some equations; returns the variables that others read."""
        flow, eqns = self._flow, [self._flow.eqns[i] for i in indices]
        if branches := self._branches.get(indices[0]):
            (eqn,) = eqns
            index, *args = [_read(v, values) for v in eqn.invars]
            outs = jax.lax.switch(index, [branch.run for branch in branches], *args)
            return dict(zip(eqn.outvars, outs, strict=True))
        made = {v for eqn in eqns for v in eqn.outvars}
        read = list(dict.fromkeys(v for eqn in eqns for v in _operands(eqn) if v not in made))
        used = list(flow.used_outside({*indices}))
        outs = run_equations(flow.jaxpr, eqns, read, used, [values[v] for v in read])
        return dict(zip(used, outs, strict=True))

    def _run_group(
        self, group: list[MatrixFunction], values: Mapping[Any, Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Runs the functions of a group together; yields their results by variable."""
        plan, first = self._describe(group), group[0]
        shared = [values[v] for v in first.shared]
        padded = [[pad_leaf(values[v], x.parameter.padding) for v in x.inputs] for x in group]
        specs = [names_to_spec(x.parameter.names) for x in group]

        def on_device(shared: list[Any], inputs: list[list[Any]]) -> list[list[Any]]:
            stacks = [
                jnp.concatenate([_stack(x, mine[u]) for x, mine in zip(group, inputs, strict=True)])
                for u in range(len(first.inputs))
            ]
            whole = [
                _to_owners(plan, x)[(slice(None), *map(slice, first.core_shape))] for x in stacks
            ]
            results = [_from_owners(plan, y) for y in _map_matrices(first, shared, whole)]
            sizes = [
                math.prod(mine[0].shape[d] for d in x.batch)
                for x, mine in zip(group, inputs, strict=True)
            ]
            starts = list(itertools.accumulate(sizes, initial=0))
            return [
                [_unstack(x, y[start : start + n], mine[0]) for y in results]
                for x, mine, start, n in zip(group, inputs, starts, sizes, strict=False)
            ]

        with jax.named_scope(MATRICES_SCOPE):
            in_specs = (
                [PartitionSpec()] * len(shared),
                [[spec] * len(first.inputs) for spec in specs],
            )
            out_specs = [[spec] * len(first.outputs) for spec in specs]
            run = self.mode.run(on_device, in_specs=in_specs, out_specs=out_specs)
            outs = run(shared, padded)
        for function, mine in zip(group, outs, strict=True):
            for v, y in zip(function.outputs, mine, strict=True):
                yield v, unpad_leaf(y, function.parameter.padding)


def _matrices_on_device(function: MatrixFunction, mesh: Any) -> int:
    its = function.parameter
    padding = its.padding or (0,) * len(its.shape)
    return math.prod(
        (its.shape[d] + padding[d]) // axes_size(mesh, axis_tuple(its.names[d]))
        for d in function.batch
    )


def _stack(function: MatrixFunction, x: jax.Array) -> jax.Array:
    """Turns a device's part of a parameter into a stack of its parts of matrices."""
    x = x.transpose(function.order)
    return x.reshape(-1, *x.shape[len(function.batch) :])


def _unstack(function: MatrixFunction, y: jax.Array, like: jax.Array) -> jax.Array:
    """Turns a stack of parts of results into a device's part of an array like the parameter."""
    order = function.order
    y = y.reshape([like.shape[d] for d in order])
    return y.transpose([order.index(d) for d in range(len(order))])


def _map_matrices(function: MatrixFunction, shared: list[Any], stacks: list[Any]) -> list[Any]:
    """Runs a function on each matrix of stacks `[k, ...]`."""
    ones = (1,) * len(function.batch)

    def run(*inputs: jax.Array) -> list[jax.Array]:
        outs = function.run(*shared, *(x.reshape(ones + x.shape) for x in inputs))
        return [y.reshape(y.shape[len(ones) :]) for y in outs]

    return jax.vmap(run)(*stacks)


def _to_owners(plan: MatrixGroup, x: jax.Array) -> jax.Array:
    """Exchanges parts of all matrices for whole matrices: `[M, D/N, F]` to `[M/N, D, F]`."""
    # Repeats matrices to fill the stack.
    x = jnp.concatenate([x] * math.ceil(plan.padded / plan.matrices))[: plan.padded]
    if plan.copies:
        x = cast_to_varying(x, plan.copies)
        mine = plan.padded // jax.lax.axis_size(plan.copies)
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(plan.copies) * mine, mine)
    # XLA:CPU refuses an all-to-all of arrays with different layouts, such as a transposed one.
    x = jax.lax.optimization_barrier(x)
    for dim, axes in plan.exchanged:
        x = jax.lax.all_to_all(x, axes, 0, dim + 1, tiled=True)
    return x


def _from_owners(plan: MatrixGroup, y: jax.Array) -> jax.Array:
    """Exchanges whole matrices for parts of all: `[M/N, D, F]` to `[M, D/N, F]`."""
    more = [n - size for n, size in zip(plan.shape, y.shape[1:], strict=True)]
    y = jnp.pad(y, [(0, 0), *((0, n) for n in more)])
    for dim, axes in reversed(plan.exchanged):
        y = jax.lax.all_to_all(y, axes, dim + 1, 0, tiled=True)
    if plan.copies:
        y = gather_invariant(y, 0, plan.copies, scope=MATRICES_SCOPE)
    return y[: plan.matrices]
