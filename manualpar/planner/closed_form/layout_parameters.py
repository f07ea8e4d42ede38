"""The parameters of a model on a layout: how each parameter is sharded, and its collectives.

Only the shapes of the parameters are traced. The strategy of the layout decides how a parameter is
sharded, as it does for a program.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from manualpar.core.mesh.mesh import abstract_mesh
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.model.option_table import with_defaults
from manualpar.core.modes.strategy import Strategy
from manualpar.core.parameters.comm_policy import CommPolicy, Format
from manualpar.core.parameters.parameter_info import describe_parameters, on_stages
from manualpar.core.parameters.placement import route_parameter
from manualpar.core.parameters.quantized_collectives import make_quantizer
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.program.placement_check import place_parameter
from manualpar.core.trees import path_name
from manualpar.inspect.parameter_formulas import ParameterForm
from manualpar.layers import Context
from manualpar.models import Split, Transformer
from manualpar.models.transformer_fields import context_on
from manualpar.planner.closed_form.layout import Layout
from manualpar.strategies import BUILT_IN
from manualpar.strategies.fsdp import fully_sharded
from manualpar.strategies.shared_options import REPLICATED_SHARDING
from manualpar.training.experiment import DATA_AXES
from manualpar.training.task import CONTEXT_AXIS, EXPERT_AXIS, SPLIT_AXIS, STAGE_AXIS

LAYERS = "layers"  # The module of scanned layers.
# Whether a layout has replicas -> the name of its strategy.
STRATEGIES: Mapping[bool, str] = {
    kind.replicates: kind.name
    for kind in BUILT_IN
    if kind.is_exact and "communicate_every" in kind.fields
}


def model_on(model: Transformer, layout: Layout, device: AbstractDevice | None) -> Transformer:
    """Returns a copy of the model whose split, experts and context use the layout's axes."""
    axes = layout.mesh
    expert, context = (axis if axis in axes else None for axis in (EXPERT_AXIS, CONTEXT_AXIS))
    model = model.clone(
        split=Split(SPLIT_AXIS, sequence_parallel=True) if SPLIT_AXIS in axes else Split(),
        experts=dataclasses.replace(model.experts, axis=expert),
        context=dataclasses.replace(model.context, axis=context),
        scan_layers=True,
    )
    return model.clone(context=context_on(model, axes, device.platform if device else ""))


@functools.lru_cache(maxsize=32)
def abstract_parameters(model: Transformer) -> Any:
    """Returns a model's abstract parameters; their boxes name every axis that may split them."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    experts = model.experts
    model = model.clone(
        split=Split(SPLIT_AXIS),
        experts=dataclasses.replace(experts, axis=EXPERT_AXIS if experts.num_experts else None),
        context=Context(),
        scan_layers=True,
        annotate=False,
    )
    # The key is made inside the trace, so that nothing is compiled.
    return jax.eval_shape(lambda x: model.init(jax.random.key(0), x), tokens)["params"]


@dataclasses.dataclass(frozen=True)
class LayoutProgram:
    """The attributes of a layout's program that `ParameterForm` reads."""

    strategy: Strategy
    mesh: Any
    data_axes: tuple[str, ...]
    num_minibatches: int
    comm: CommPolicy


def parameter_forms(
    params: Any, layout: Layout, device: AbstractDevice | None, *, min_weight_size: int
) -> tuple[ParameterForm, ...]:
    """Returns the collectives of each parameter, sharded as the layout's strategy decides.

    `params` comes from `abstract_parameters`, and `device` is as in `abstract_mesh`. The chunks,
    `keep` and `remat` of the layout do not matter.
    """
    axes = layout.mesh
    replicas = ("replica",) if "replica" in axes else ()
    shard_axes = tuple(axis for axis in DATA_AXES if axis in axes and axis not in replicas)
    context = (CONTEXT_AXIS,) if CONTEXT_AXIS in axes else ()
    batch_dims = {0: (*replicas, *shard_axes)} | ({1: context} if context else {})
    others: Any = dict.fromkeys(axes, "model")
    others |= {STAGE_AXIS: "stage"} if STAGE_AXIS in axes else {}
    roles = AxisRoles(batch_dims, others)
    strategy = fully_sharded(
        STRATEGIES[bool(replicas)],
        replicas,
        **with_defaults(
            {
                "min_weight_size": min_weight_size,
                "communicate_every": layout.communicate,
                "replica_mean": layout.replica_mean,
            },
            REPLICATED_SHARDING,
        ),
    )
    gather, reduce = (
        Format(dtype, make_quantizer(code))
        for dtype, code in (("bfloat16", layout.gather_code), ("float32", layout.reduce_code))
    )
    quantized_axes = replicas if reduce.quantizer and replicas else None
    averaged_axes = replicas if strategy.averages_in_backward else ()
    comm = CommPolicy(gather, reduce, quantized_axes=quantized_axes, averaged_axes=averaged_axes)
    mesh: Any = abstract_mesh(axes, layout.num_devices, device)
    program = LayoutProgram(strategy, mesh, roles.data_axes, layout.num_minibatches, comm)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    paths = [path_name(path) for path, _ in leaves]
    stacked = frozenset(path for path in paths if path.startswith(f"{LAYERS}/"))
    infos = describe_parameters(params, dict.fromkeys(stacked, frozenset({0})), mesh, ())
    if STAGE_AXIS in axes:
        infos = on_stages(infos, stacked, STAGE_AXIS)
    forms = []
    for info in jax.tree.leaves(infos):
        place = place_parameter(strategy, info, (*shard_axes, *context), mesh)
        forms.append(ParameterForm(program, info, route_parameter(place, info, roles, mesh)))
    return tuple(forms)
