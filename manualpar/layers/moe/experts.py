"""The experts of a model: their number, how tokens choose them, and how devices divide them."""

import dataclasses
from typing import Any, get_args

import jax

from manualpar.core.mesh.axes import axis_tuple
from manualpar.layers.boundaries import bound_axes
from manualpar.layers.low_precision import MATMULS
from manualpar.layers.model_fields import (
    MOST_WRITTEN_OUT,
    FieldGroup,
    config_field,
    flat_field,
    refuse,
    refuse_unknown,
)
from manualpar.layers.moe.routing import Gates, GroupScore

# Fields that need `num_experts`.
OF_EXPERTS = ("router_bias", "biases", "swiglu_limit", "swiglu_alpha", "gates_on_inputs")


@dataclasses.dataclass(frozen=True, repr=False)
class Experts(FieldGroup):
    """The experts of a model, each with the model's `mlp_size` features.

    Train experts with `mixture_of_experts_loss`.

    Attributes:
      num_experts: The number of experts in each layer; 0 for an MLP.
      top_k: How many experts compute a token.
      capacity_factor: How many tokens of a sequence an expert takes, in multiples of an equal
        share; 0 for all tokens. For details of this field and the following ones, see `MoE`.
      axis: The mesh axis over which the experts are divided; `None` for none.
      gates: How the router's logits become scores.
      normalize_gates: Whether the gates of a token are divided by their sum.
      gate_scale: The factor that multiplies the gates after their normalization.
      gates_on_inputs: Whether the gate of an expert multiplies the expert's input, and not its
        output; only with `top_k=1`.
      router_bias: Whether each router has a bias for the choice of experts, in the collection
        `router`. Training does not change it.
      groups: The number of groups of experts; 1 for no groups. A token chooses groups first, and
        then experts in these groups.
      groups_per_token: The number of groups that a token chooses.
      group_score: The score by which a token chooses groups, `"best_two"` or `"best"`.
      shared_size: The total features of the shared experts, which compute every token; 0 for none.
      shared_is_gated: Whether the output of the shared experts is multiplied by a gate.
      biases: Whether the router and the products of the experts have biases.
      swiglu_limit: The bound of gates and features in the clamped SwiGLU of gpt-oss; 0 for SwiGLU.
      swiglu_alpha: The factor inside of the sigmoid, only with `swiglu_limit`.
      every: The length of a group of layers, of which the last has experts and the others have an
        MLP; 1 if all layers have experts.
      dense_layers: How many layers at the beginning of the model have an MLP in place of experts.
      dense_mlp_size: The features inside the MLPs of the layers without experts; 0 for `mlp_size`.
    """

    num_experts: int = config_field(0, "", 0, below=MOST_WRITTEN_OUT + 1, required=True)
    top_k: int = config_field(2, "experts_per_token", 1, below=2**20, required=True)
    capacity_factor: float = config_field(1.25, "", 0, required=True)
    axis: str | None = flat_field(None, "expert_axis")
    gates: Gates = config_field("softmax", "expert_gates", choices=get_args(Gates))
    normalize_gates: bool = config_field(True)
    gate_scale: float = config_field(1.0, "", 0)
    gates_on_inputs: bool = config_field(False)
    router_bias: bool = config_field(False)
    groups: int = config_field(1, "expert_groups", 1, below=2**20)
    groups_per_token: int = config_field(1, "expert_groups_per_token", 1, below=2**20)
    group_score: GroupScore = config_field(
        "best_two", "expert_group_score", choices=get_args(GroupScore)
    )
    shared_size: int = config_field(0, "shared_experts_size", 0)
    shared_is_gated: bool = config_field(False, "shared_gate")
    biases: bool = config_field(False, "expert_biases")
    swiglu_limit: float = config_field(0.0, "", 0)
    swiglu_alpha: float = config_field(1.0, "", 0)
    every: int = config_field(1, "experts_every", 1, below=MOST_WRITTEN_OUT)
    dense_layers: int = config_field(0, "", 0, below=MOST_WRITTEN_OUT)
    dense_mlp_size: int = config_field(0, "", 0)

    def __post_init__(self) -> None:
        check_known(self)
        if self.num_experts < 0:
            refuse(self, "num_experts", "the number of experts, or 0 for an MLP")
        if not self.capacity_factor >= 0:
            refuse(self, "capacity_factor", "more than 0, such as 1.25, or 0 to drop nothing")
        if not self.num_experts:
            for field in (*OF_EXPERTS, "axis", "groups", "shared_size", "dense_layers", "every"):
                if getattr(self, field) != (default := getattr(Experts, field)):
                    refuse(self, field, f"{default!r} without num_experts")
            return
        check_routing(self)
        if not self.swiglu_limit >= 0:
            refuse(self, "swiglu_limit", "more than 0, such as 7, or 0 for SwiGLU")
        if self.swiglu_alpha != 1 and not self.swiglu_limit:
            refuse(self, "swiglu_alpha", "1 without swiglu_limit")
        if self.shared_size < 0:
            refuse(self, "shared_size", "at least 1, or 0 for no shared experts")
        if self.shared_is_gated and not self.shared_size:
            refuse(self, "shared_is_gated", "False without shared_size")
        if self.every < 1:
            refuse(self, "every", "at least 1")
        are_dense = self.dense_layers or self.every > 1
        if self.dense_mlp_size < 0 or (self.dense_mlp_size and not are_dense):
            refuse(self, "dense_mlp_size", "0 without dense_layers, or the features of their MLPs")

    def in_layer(self, layer: int) -> bool:
        """Returns whether layer `layer` of a model has experts."""
        if not self.num_experts or layer < self.dense_layers:
            return False
        return (layer + 1) % self.every == 0

    @property
    def of_layer(self) -> dict[str, Any]:
        """The values of the fields that `MoE` has too, with `None` for no capacity."""
        names = {field.name for field in dataclasses.fields(self)}
        names -= {"dense_layers", "dense_mlp_size", "every"}
        fields = {name: getattr(self, name) for name in names}
        return fields | {"capacity_factor": self.capacity_factor or None}


def check_known(experts: Any) -> None:
    """Refuses unknown names in the fields of an `Experts` or a `MoE`."""
    refuse_unknown(experts, "gates", get_args(Gates))
    refuse_unknown(experts, "group_score", get_args(GroupScore))


def check_routing(experts: Any) -> None:
    """Refuses the numbers that say how tokens choose experts, in an `Experts` or a `MoE`."""
    number, top_k, groups = experts.num_experts, experts.top_k, experts.groups
    if not 1 <= top_k <= number:
        refuse(experts, "top_k", f"from 1 to num_experts={number}")
    if experts.gates_on_inputs and top_k > 1:
        refuse(experts, "gates_on_inputs", f"False with top_k={top_k}, or top_k=1")
    if not experts.gate_scale > 0:
        refuse(experts, "gate_scale", "more than 0, such as 2.5, or 1 for the gates as they are")
    if groups < 1 or number % groups:
        refuse(experts, "groups", f"a divisor of num_experts={number}, or 1 for none")
    size = number // groups
    fewest = -(-top_k // size)
    if not fewest <= experts.groups_per_token <= groups:
        refuse(
            experts,
            "groups_per_token",
            f"from {fewest} to groups={groups}, because a token chooses {top_k} experts and {size} "
            "are in a group",
        )
    if groups > 1 and size < 2 and experts.group_score == "best_two":
        refuse(experts, "group_score", "'best' with groups of one expert")


def check_moe(moe: Any, x: jax.Array, mask: jax.Array | None) -> None:
    """Refuses fields of a `MoE` that are out of range, or do not fit its arguments."""
    for field in ("num_experts", "mlp_size"):
        if getattr(moe, field) < 1:
            refuse(moe, field, "at least 1")
    if moe.capacity_factor is not None and not moe.capacity_factor > 0:
        refuse(moe, "capacity_factor", "more than 0, such as 1.25, or None to drop nothing")
    for field in ("num_shared", "shared_size", "bias_rate"):
        if not getattr(moe, field) >= 0:
            refuse(moe, field, "0 for none, or more")
    refuse_unknown(moe, "matmul", MATMULS)
    if moe.matmul and moe.capacity_factor is None:
        refuse(
            moe,
            "matmul",
            "'' without a capacity, because XLA has no grouped product of codes; give the experts "
            "a capacity_factor, or leave them out of matmul_layers",
        )
    if moe.num_shared and moe.shared_size:
        refuse(
            moe, "shared_size", f"0 with num_shared={moe.num_shared}, because both give one size"
        )
    if moe.shared_is_gated and not (moe.num_shared or moe.shared_size):
        refuse(moe, "shared_is_gated", "False without num_shared or shared_size")
    check_known(moe)
    check_routing(moe)
    both = set(axis_tuple(moe.axis or None)) & set(axis_tuple(moe.model_axis or None))
    if both:
        refuse(moe, "model_axis", f"other axes than axis={moe.axis!r}: {sorted(both)} are in both")
    if moe.context_axis and moe.context_axis in axis_tuple(moe.model_axis or None):
        refuse(moe, "context_axis", f"another axis than model_axis={moe.model_axis!r}")
    if moe.sequence and not moe.model_axis:
        refuse(moe, "sequence", "a model_axis that positions are split over, or sequence=False")
    split_fields = (
        ("num_experts", moe.axis),
        ("mlp_size", moe.model_axis),
        ("shared_size", moe.model_axis),
    )
    for field, by in split_fields:
        axes = bound_axes("MoE", by)
        devices = jax.lax.axis_size(axes) if axes else 1
        if getattr(moe, field) % devices:
            refuse(moe, field, f"a multiple of the {devices} devices along {axes}")
    if x.ndim != 3:
        raise ValueError(
            f"MoE: x has the shape {x.shape}, expected [batch, sequence, features]. Capacity and "
            "balance refer to a sequence; add a leading dimension of 1 to a single sequence."
        )
    if moe.capacity_factor is None and any(jax.typeof(x).sharding.spec):
        raise ValueError(
            "MoE: capacity_factor=None with an x that is sharded by its type, as in "
            "mode='explicit'; expected an x that is not sharded by its type, because JAX does not "
            "sort a sharded dimension there. Give the experts a capacity, or use mode='manual' or "
            "'auto'."
        )
    positions = x.shape[1]
    if moe.sequence and (axes := bound_axes("MoE", moe.model_axis)):
        positions *= jax.lax.axis_size(axes)
    if mask is not None and mask.shape != (x.shape[0], positions):
        raise ValueError(
            f"MoE: mask has the shape {mask.shape}, expected {(x.shape[0], positions)}: a value "
            f"for each token of x, {x.shape}."
        )
