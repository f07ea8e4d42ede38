"""The experts of a model: their number, how tokens choose them, and how devices divide them."""

import dataclasses
from typing import Any, get_args

from manualpar.layers.field_groups import (
    MOST_WRITTEN_OUT,
    FieldGroup,
    config_field,
    flat_field,
    refuse,
    refuse_unknown,
)
from manualpar.layers.moe.routing import Gates, GroupScore

OF_EXPERTS = ("router_bias", "biases", "swiglu_limit", "swiglu_alpha")  # Need `num_experts`.


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
    """Refuses the numbers that say how tokens choose experts, in an `Experts` or a `MoE`.

    Raises:
      ValueError: A number is out of range, or does not fit another one.
    """
    number, top_k, groups = experts.num_experts, experts.top_k, experts.groups
    if not 1 <= top_k <= number:
        refuse(experts, "top_k", f"from 1 to num_experts={number}")
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
