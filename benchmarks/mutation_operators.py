"""Mutates each collective in several wrong ways.

A mutant is the package's source in which the text of one communicating call is replaced. The
replacement keeps shapes and dtypes if possible, so that only tests of values can notice it. The
kinds of mutants are as follows; `x` is the value that the call sends:

- `delete`: the same shape without communication. A reduction or a permutation becomes `x`. A gather
  becomes one copy of `x` for each device. A scatter becomes the device's part of `x`. An exchange
  becomes the result that it would have if all devices had this `x`. A running sum over devices
  becomes a running sum on the device. A function that is an argument becomes a function that
  returns `x`.
- `duplicate`: communicate twice. After a second gather, scatter or mean the value may still be
  right; then only a test that counts collectives can notice the mutant.
- `times-2`, `over-size`: the result times 2, or divided by the number of devices.
- `drop-last-axis`, `reverse-axes`: drop the last axis of a tuple of axes, or reverse the tuple; a
  single axis does not change.
- `other-axes`: communicate over the other axes of the mesh, if there are any.
- `next-dim`: gather or scatter along the next dim; after the last dim comes the first.
"""

import dataclasses
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from benchmarks.mutation_sites import Site

KINDS = (
    "delete",
    "duplicate",
    "times-2",
    "over-size",
    "drop-last-axis",
    "reverse-axes",
    "other-axes",
    "next-dim",
)

_TRACED = "traced for what the model does with its variables; it never runs"
_PROCESSES = "several processes only: slow tests in agreement_test"

# Sites that are not mutated, with reasons: `module:function:callee`; names may have wildcards.
LEFT_ALONE: Mapping[str, str] = {
    "core.parameters.collectives:is_vma_checked:axis_index": "only its type is read",
    "core.modes.global_arrays:GlobalParameter.to_array:gather_data_axes": "a constraint",
    "core.model.loops:_Probe.*": _TRACED,
    "core.program.step:Step.loss_only.*": "traced for what the loss differentiates; it never runs",
    "core.model.trace_model:trace.*": _TRACED,
    "training.replicas:ReplicaSentinel.fingerprints:process_allgather": "several processes only",
    "system.cluster.agreement:*": _PROCESSES,
    "layers.moe.moe:_exchange_ragged:*": "not on CPUs: slow tests",
    "core.program.state_arrays:to_host:*": _PROCESSES,
}

_ONE_AXIS = "the argument's type allows only one axis"
_SAME_SET = "the order of the axes of a reduction changes nothing but rounding"
_OTHER_KEY = "another key, which also differs between devices; no particular key is promised"
_ONLY_SIGN = "a bias moves by the sign of the difference of two loads, which no scale changes"
_SAME_ORDER = "document numbers are only compared with each other, and scaling keeps their order"
_CAST_LATER = "conditions do not count in types, so the sum over stages makes the cast itself"
_ONLY_ZERO = "only whether the sum is zero matters"
_NOTHING_LEFT = "the second call finds nothing left to do and sends nothing"

# Mutants that are equivalent to the original, with reasons; names may have wildcards.
EQUIVALENT: Mapping[str, str] = {
    **{
        f"{module}:*:{kind}": _ONE_AXIS
        for module in (
            "layers.attention.context",
            "layers.attention.chunked_attention",
            "layers.pipeline.*",
        )
        for kind in ("drop-last-axis", "reverse-axes")
    },
    **{
        f"core.mesh.splitting:to_zigzag*:{kind}": _ONE_AXIS
        for kind in ("drop-last-axis", "reverse-axes")
    },
    "*:pmean:reverse-axes": _SAME_SET,
    "*:psum:reverse-axes": _SAME_SET,
    "*:pmax:reverse-axes": _SAME_SET,
    "*:sync_*:reverse-axes": _SAME_SET,
    "*:reduce_gradient:reverse-axes": _SAME_SET,
    "*:ppermute:reverse-axes": "jax takes the axes of a permute in the order of the mesh",
    "core.program.step:find_nonfinite:psum:times-2": _ONLY_ZERO,
    "layers.moe.routing:auxiliary_loss:psum:times-2": _ONLY_ZERO,
    "layers.moe.routing:auxiliary_loss:psum:over-size": _ONLY_ZERO,
    "layers.moe.routing:load_balance_loss:total:times-2": "the choices are divided by their sum",
    "core.parameters.collectives:gather_invariant:cast_to_varying:delete": (
        "jax.lax.all_gather makes the same cast itself; the jaxpr is the same"
    ),
    "layers.moe.routing:moved_bias:psum:times-2": _ONLY_SIGN,
    "layers.moe.routing:moved_bias:psum:over-size": _ONLY_SIGN,
    "models.transformer:*:cumsum:times-2": _SAME_ORDER,
    "layers.pipeline.executor:_summed.cast:cast_to_varying:delete": _CAST_LATER,
    "core.mesh.splitting:fold_rng_over_axis:axis_index:times-2": _OTHER_KEY,
    "core.mesh.splitting:fold_rng_over_axis:axis_index:reverse-axes": _OTHER_KEY,
    "core.model.interface:*:fold_rng_over_axis:duplicate": _OTHER_KEY,
    "core.model.interface:*:fold_rng_over_axis:reverse-axes": _OTHER_KEY,
    "core.modes.manual:*:fold_rng_over_axis:duplicate": _OTHER_KEY,
    "core.modes.manual:*:fold_rng_over_axis:reverse-axes": _OTHER_KEY,
    "quantization.gradient_rounding:*:fold_rng_over_axis:duplicate": _OTHER_KEY,
    "quantization.gradient_rounding:*:fold_rng_over_axis:reverse-axes": _OTHER_KEY,
    "core.modes.manual:*:sync_collections:duplicate": _NOTHING_LEFT,
    "*:gather_data_axes:duplicate": _NOTHING_LEFT,
    "core.modes.manual:*:replicate_shards:duplicate": _NOTHING_LEFT,
    "by_hand:*:gather_params:duplicate": _NOTHING_LEFT,
    "by_hand:*:gather_params:drop-last-axis": "all axes of a tuple count",
    "by_hand:*:gather_params:reverse-axes": "a tuple counts in order",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A communicating call and the text that replaces it."""

    site: Site
    kind: str
    replacement: str

    @property
    def name(self) -> str:
        """The mutant's name: `module:function:callee:kind`."""
        return f"{self.site.name}:{self.kind}"

    @property
    def equivalent(self) -> str:
        """Why the mutant is equivalent to the original; `""` if it is not."""
        return next((why for name, why in EQUIVALENT.items() if fnmatchcase(self.name, name)), "")

    def apply(self, source: bytes) -> bytes:
        """Returns the content of the call's file with this mutation."""
        return source[: self.site.start] + self.replacement.encode() + source[self.site.end :]


# Each function of this section returns the text that replaces the call of a site.


def _own_part(x: str, axes: str, dim: str, size: str) -> str:
    return (
        f"jax.lax.dynamic_slice_in_dim({x}, jax.lax.axis_index({axes}) * ({size}), {size}, {dim})"
    )


def _varying(x: str, axes: str) -> str:
    return f"jax.lax.pcast({x}, {axes}, to='varying')"


def _delete_gather(site: Site) -> str:
    join = "stack" if site.is_stacked else "concatenate"
    return f"jax.numpy.{join}([{site.x}] * jax.lax.axis_size({site.axes}), {site.dim})"


def _delete_scatter(site: Site) -> str:
    size = f"({site.x}).shape[{site.dim}] // jax.lax.axis_size({site.axes})"
    return _own_part(site.x, site.axes, site.dim, size)


def _delete_exchange(site: Site) -> str:
    parts = f"jax.numpy.split({site.x}, jax.lax.axis_size({site.axes}), {site.dim})"
    return f"jax.numpy.concatenate({parts}, {site.arguments['concat_axis']})"


def _gather_again(site: Site) -> str:
    if site.is_stacked:
        return site.call(f"{site.call()}[jax.lax.axis_index({site.axes})]")
    size = f"({site.x}).shape[{site.dim}]"
    return site.call(_own_part(site.call(), site.axes, site.dim, size))


def _scatter_the_mean(site: Site) -> str:
    return site.call(_varying(f"jax.lax.pmean({site.x}, {site.axes})", site.axes))


def _times_2(site: Site) -> str:
    if site.signature.is_tree:
        return f"jax.tree.map(lambda leaf: leaf * 2, {site.call()})"
    return f"{site.call()} * 2"


def _over_size(site: Site) -> str:
    size = f"jax.lax.axis_size({site.axes})"
    if site.signature.is_tree:
        return f"jax.tree.map(lambda leaf: (leaf / {size}).astype(leaf.dtype), {site.call()})"
    return f"{site.call()} / {size}"


def _next_dim(site: Site) -> str:
    return site.call(dim=f"({site.dim} + 1) % ({site.x}).ndim")


def _other_axes(site: Site) -> str:
    manual = "jax.sharding.get_abstract_mesh().manual_axes"
    others = f"tuple(_other for _other in {manual} if _other not in {site.axes})"
    return site.call(axes=f"({others} or {site.axes})")


Operator = Callable[[Site], str]
_IDENTITY: dict[str, Operator] = {"delete": lambda site: site.x}
_SCALE: dict[str, Operator] = {"times-2": _times_2, "over-size": _over_size}
_AXES: dict[str, Operator] = {
    "drop-last-axis": lambda site: site.call(axes=f"({site.axes}[:-1] or {site.axes})"),
    "reverse-axes": lambda site: site.call(axes=f"{site.axes}[::-1]"),
    "other-axes": _other_axes,
}
_TWICE: dict[str, Operator] = {"duplicate": lambda site: site.call(site.call())}

FAMILIES: Mapping[str, Mapping[str, Operator]] = {
    "reduction": {
        **_IDENTITY,
        "duplicate": lambda site: site.call(_varying(site.call(), site.axes)),
        **_SCALE,
        **_AXES,
    },
    "gather": {
        "delete": _delete_gather,
        "duplicate": _gather_again,
        **_SCALE,
        **_AXES,
        "next-dim": _next_dim,
    },
    "scatter": {
        "delete": _delete_scatter,
        "duplicate": _scatter_the_mean,
        **_SCALE,
        **_AXES,
        "next-dim": _next_dim,
    },
    "permute": {**_IDENTITY, **_TWICE, **_SCALE, **_AXES},
    "exchange": {"delete": _delete_exchange, **_SCALE, **_AXES},
    # Functions of this package that communicate trees.
    "sync": {**_IDENTITY, **_TWICE, **_SCALE, **_AXES},
    # A scattered value is incomplete, so it cannot be scattered again.
    "whole": {**_IDENTITY, **_SCALE},
    # The device's index: it sends nothing, so nothing can be sent twice.
    "place": {
        "delete": lambda site: f"0 * {site.call()}",
        "times-2": lambda site: f"2 * {site.call()}",
        **_AXES,
    },
    "key": {**_IDENTITY, **_TWICE, **_AXES},
    # A function, or the type of a value: there is no number to scale.
    "passing": _IDENTITY,
    "handed": {"delete": lambda site: "lambda x, *_: x"},
    "running": {"delete": lambda site: f"jax.numpy.cumsum({site.x}, axis=1)", "times-2": _times_2},
}
_NEED_AXES = frozenset({"over-size", *_AXES})


def left_alone(site: Site) -> str:
    """Returns the reason in `LEFT_ALONE` why a site has no mutants; `""` if it has mutants."""
    return next((why for name, why in LEFT_ALONE.items() if fnmatchcase(site.name, name)), "")


def mutate(site: Site) -> tuple[Mutant, ...]:
    """Returns a site's mutants in the order of `KINDS`; none if `LEFT_ALONE` lists the site."""
    if left_alone(site):
        return ()
    operators = FAMILIES[site.signature.family]
    kinds = [k for k in KINDS if k in operators and (site.axes or k not in _NEED_AXES)]
    return tuple(Mutant(site, kind, f"({operators[kind](site)})") for kind in kinds)
