"""Layouts of a transformer on many devices, and the sizes of the arrays on one device.

A `Layout` gives every axis a size. `replica` and `data` divide the examples, and `context` divides
the positions of an example. `model` splits each layer (tensor and sequence parallelism). `expert`
divides the experts, and the examples too. `stage` divides the layers into pipeline stages. FSDP
shards parameters over `data`, `context` and `expert`, and parameters of experts over `data` and
`context`.

Symbols, each for one device: `B` examples in a minibatch, `S` positions of an example, `T = B S`
tokens, `D` hidden features, `N` heads, `K` key and value heads, `H` features of a head, `F`
features inside an MLP, `V` tokens of the vocabulary, `L` layers, `R` rows that the device's experts
compute.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from manualpar.core.mesh.mesh import abstract_mesh
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.model.options import with_defaults
from manualpar.core.modes.strategy import Strategy, place_parameter
from manualpar.core.parameters.collectives import Format, MixedPrecisionPolicy, ReduceCode
from manualpar.core.parameters.placement import (
    describe_parameters,
    parameter_sharding,
    split_over_stages,
)
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.trees import path_name
from manualpar.inspect.expected_bytes import ParameterForm
from manualpar.layers import Context
from manualpar.models import Split, Transformer
from manualpar.models.flat_fields import flatten_fields
from manualpar.models.transformer import (
    context_on,
    layers_by_window,
    size_of_head,
    size_of_vocabulary,
)
from manualpar.models.transformer_collectives import slots_of_expert
from manualpar.quantization.quantized_collectives import make_quantizer
from manualpar.strategies import BUILT_IN
from manualpar.strategies.fsdp import fully_sharded
from manualpar.strategies.shared_options import REPLICATED_SHARDING, ReplicaMean
from manualpar.training.experiment import DATA_AXES
from manualpar.training.task import CONTEXT_AXIS, EXPERT_AXIS, SPLIT_AXIS, STAGE_AXIS

HalvesOrNone = Literal["none", "dual_batch"]
Communicate = Literal["minibatch", "gather-step", "step"]
PipelineSaves = Literal["residuals", "inputs"]
AnyCode = ReduceCode | Literal[""]  # "" for no quantization.
AXES = ("replica", "stage", "data", "context", "expert", "model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of mesh axes, and how a step runs on them.

    For each choice of `remat`, `remats` gives the parts of a layer that the backward pass computes
    again, and the share of each part. `keeps_logits` says whether the logits of a wide vocabulary
    are kept for the backward pass. A subclass for another library's programs changes both.

    Attributes:
      num_minibatches: The number of minibatches in a step; with stages, of microbatches.
      chunks: Chunks of layers on each stage; more chunks make the bubble smaller.
      remat: A key of `remats`: how much of the layers the backward pass computes again.
      communicate: How often FSDP gathers parameters and scatters gradients.
      keep: The values of a chunk that a stage keeps for the backward pass: the values that remat
        keeps of the layers (`"residuals"`), or the chunk's input, from which the chunk is computed
        again (`"inputs"`).
      layer_overlap: Whether layers run two halves of a device's batch, see `Split`.
      replica_mean: When gradients are averaged over replicas, see `hsdp`. `"backward"` needs
        several replicas, `communicate="minibatch"` and no stages.
      gather_code: Quantization of gathered parameters; `""` for bfloat16.
      reduce_code: Format of reduced gradients; `""` for float32. If there are several
        replicas, only the reduction between them is quantized.
    """

    replica: int = 1
    stage: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    model: int = 1
    num_minibatches: int = 1
    chunks: int = 1
    remat: str = "full"
    communicate: Communicate = "minibatch"
    keep: PipelineSaves = "residuals"
    layer_overlap: HalvesOrNone = "none"
    replica_mean: ReplicaMean = "step"
    gather_code: AnyCode = ""
    reduce_code: AnyCode = ""
    # The output of attention is always kept, so no scores are computed again.
    remats: ClassVar[Mapping[str, Mapping[str, float]]] = {
        "none": {},
        "dots": {"norms": 1.0, "experts": 1.0},
        "full": dict.fromkeys(("norms", "in", "out", "mlp", "experts"), 1.0),
    }
    keeps_logits: ClassVar[bool] = False

    @property
    def recomputed(self) -> Mapping[str, float]:
        """Part of a layer -> the share of this part that the backward pass computes again."""
        return self.remats[self.remat]

    @property
    def runs_chunks_again(self) -> bool:
        """Whether the backward pass of a chunk first runs the chunk's forward pass again."""
        return self.stage > 1 and self.keep == "inputs"

    @functools.cached_property
    def mesh(self) -> dict[str, int]:
        """The sizes of `data` and of axes of more than one device, the slowest links first."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}

    @property
    def num_devices(self) -> int:
        """The number of devices: the product of the sizes of all axes."""
        return math.prod(self.mesh.values())

    @property
    def name(self) -> str:
        """The mesh, for a table."""
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())

    @property
    def details(self) -> str:
        """How a step runs on the mesh, for a table."""
        parts = [f"{self.num_minibatches} minibatch{'es' * (self.num_minibatches > 1)}"]
        parts += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        parts += ["keep inputs"] if self.runs_chunks_again else []
        parts += [f"remat {self.remat}"]
        parts += ["dual batch"] if self.layer_overlap == "dual_batch" else []
        parts += [f"by {self.communicate}"] if self.communicate != "minibatch" else []
        parts += ["mean in the backward pass"] if self.replica_mean == "backward" else []
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class DeviceSizes:
    """Sizes of a device's arrays in a minibatch; see the module for the symbols.

    Attributes:
      positions: Positions of a complete sequence.
      router: The number of experts that a token chooses among; 0 without experts.
      experts_per_device: The number of experts that this device stores.
      tied: Whether the embedding is also the head.
      seen: Two times the number of positions that a query sees, as a mean over queries and layers.
      norms: The number of a layer's norms over `D` features.
      vectors: The sizes of all norms and biases of a layer.
    """

    B: int
    S: int
    positions: int
    D: int
    N: int
    K: int
    H: int
    F: int
    V: int
    L: int
    R: int
    router: int
    experts_per_device: int
    tied: bool
    seen: float
    norms: int
    vectors: tuple[int, ...]

    @property
    def post_norms(self) -> bool:
        """Whether the outputs of attention and MLP are normalized too."""
        return self.norms > 2

    @property
    def tokens(self) -> int:
        """The number of tokens in a minibatch, `T`."""
        return self.B * self.S

    @functools.cached_property
    def attention_weights(self) -> int:
        """The number of weights in a layer's attention, its norms and its biases."""
        return self.D * self.H * 2 * (self.N + self.K) + sum(self.vectors)

    @functools.cached_property
    def mlp_weights(self) -> int:
        """The number of weights in a layer's MLP, or in a layer's experts without the router."""
        return 3 * self.D * self.F * max(self.experts_per_device, 1)

    @property
    def router_weights(self) -> int:
        """The number of weights in a layer's router."""
        return self.D * self.router

    @property
    def dense_weights(self) -> int:
        """The number of a layer's weights that are sharded over all data axes."""
        return self.attention_weights + (
            self.router_weights if self.experts_per_device else self.mlp_weights
        )

    @property
    def expert_weights(self) -> int:
        """The number of a layer's weights that are sharded over all data axes except `expert`."""
        return self.mlp_weights if self.experts_per_device else 0

    @property
    def outer_weights(self) -> int:
        """The number of weights outside of the layers: embedding, head and last norm."""
        return self.D * self.V * (1 if self.tied else 2) + self.D


def check_formulas(model: Transformer) -> None:
    """Raises a `ValueError` for a model whose layers these formulas do not describe."""
    expected: dict[str, float] = {
        "shared_experts_size": 0,
        "dense_layers": 0,
        "experts_every": 1,
        "expert_biases": False,
        "latent_rank": 0,
    }
    if model.experts.num_experts and not model.experts.capacity_factor:
        expected |= {"capacity_factor": 1.25}
    # These layers have other products and vectors than the forms count.
    expected |= {"gated_mlp": True, "mlp_bias": False, "learned_positions": 0}
    expected |= {"attention_out_bias": False, "wide_query_key_norm": False, "norm_bias": False}
    expected |= {"pre_norms": True, "parallel_mlp": False}
    fields = flatten_fields(model)
    for field, value in expected.items():
        if (got := fields[field]) != value:
            raise ValueError(
                f"plan: config.model.{field} is {got}, expected {value} in an estimate "
                "by formula, which covers neither latent attention, nor dense layers before layers "
                "with experts, nor shared experts, nor biases of experts, nor experts without a "
                "capacity, nor layers with other products and norms"
            )


def find_obstacle(
    model: Transformer, layout: Layout, *, examples: int, positions: int, even: bool = True
) -> str:
    """Says which size of a model or its batch a layout does not divide; "" if it divides all.

    Args:
      model: The model, on one device.
      positions: Positions of each example.
      even: Whether all stages must have equally many layers.
    """
    rows = layout.replica * layout.data * layout.expert * layout.num_minibatches
    vocabulary, parts = size_of_vocabulary(model), layout.stage * layout.chunks
    heads, zigzag = model.num_heads, 2 * layout.context if layout.context > 1 else 1
    kv_heads = model.num_kv_heads or heads
    experts = model.experts.num_experts or 1
    every = model.attention.global_every
    groups = parts * max(every, 1) if parts > 1 else 1
    of_groups = " x global_every" * bool(every)
    needed = (
        (examples, rows, "examples", "replica x data x expert x minibatches"),
        (heads, layout.model, "heads", "model"),
        (max(kv_heads, layout.model), min(kv_heads, layout.model), "kv heads", "model"),
        (model.mlp_size, layout.model, "mlp_size", "model"),
        (vocabulary, layout.model, "tokens of the vocabulary", "model"),
        (positions, zigzag * layout.model, "positions", "2 x context x model"),
        (experts, layout.expert, "experts", "expert"),
        (model.num_layers if even else groups, groups, "layers", "stage x chunks" + of_groups),
    )
    for size, divisor, units, by in needed:
        if size % divisor:
            return f"{size:,} {units} do not divide by {by} = {divisor:,}"
    if layout.chunks > 1 and layout.stage == 1:
        return "chunks without stages"
    if layout.layer_overlap == "dual_batch" and (layout.model == 1 or examples // rows % 2):
        return f"{examples // rows:,} examples of a minibatch do not divide into two halves"
    return ""


def _seen(size: int, positions: int, *, in_chunks: bool) -> float:
    """Returns twice the mean number of positions that a query sees, in a window or in chunks."""
    if in_chunks:
        chunks, rest = divmod(positions, size)
        return (chunks * size**2 + rest**2) / positions
    return size * (2 - size / positions)  # The first queries see fewer positions.


def sizes_on_device(
    model: Transformer, layout: Layout, *, examples: int, positions: int
) -> DeviceSizes:
    """Computes the sizes of a device's arrays; with stages, on the stage with the most layers."""
    rows = layout.replica * layout.data * layout.expert * layout.num_minibatches
    num_experts = model.experts.num_experts
    positions_per_device = positions // layout.context
    expert_rows = 0
    if num_experts:
        slots = slots_of_expert(
            model, {model.context.axis or "": layout.context}, positions_per_device
        )
        # A device receives as many rows from other devices as it sends to them.
        expert_rows = examples // rows * num_experts * slots
    kv_heads = model.num_kv_heads or model.num_heads
    chunk = -(-model.num_layers // (layout.stage * layout.chunks))
    queries, keys = model.num_heads // layout.model, max(kv_heads // layout.model, 1)
    size, norms = size_of_head(model), 4 if model.norm.post else 2
    vectors = (model.hidden_size,) * norms + (size, size) * model.attention.query_key_norm
    vectors += (queries * size, keys * size, keys * size) * model.attention.qkv_bias
    vectors += (model.hidden_size,) * model.attention.out_bias + (queries,) * model.attention.sinks
    kinds = [(min(w or positions, positions), layers) for w, layers in layers_by_window(model)]
    seen = sum(
        layers * _seen(w, positions, in_chunks=bool(model.attention.chunk)) for w, layers in kinds
    )
    return DeviceSizes(
        B=examples // rows,
        S=positions_per_device,
        positions=positions,
        D=model.hidden_size,
        N=queries,
        K=keys,
        H=size,
        F=model.mlp_size // layout.model,
        V=size_of_vocabulary(model) // layout.model,
        L=chunk * layout.chunks,
        R=expert_rows,
        router=num_experts,
        experts_per_device=num_experts // layout.expert,
        tied=model.tied_head,
        seen=seen / model.num_layers,
        norms=norms,
        vectors=vectors,
    )


# -------------------------------------------------------------------------------------------------
# The parameters of a model on a layout: how each parameter is sharded, and its collectives.
#
# Only the shapes of the parameters are traced. The strategy of the layout decides how a parameter
# is sharded, as it does for a program.


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
    split = Split(SPLIT_AXIS, sequence_parallel=True, overlap=layout.layer_overlap)
    model = model.clone(
        split=split if SPLIT_AXIS in axes else Split(),
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
    comm: MixedPrecisionPolicy


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
    comm = MixedPrecisionPolicy(
        gather, reduce, quantized_axes=quantized_axes, averaged_axes=averaged_axes
    )
    mesh: Any = abstract_mesh(axes, layout.num_devices, device)
    program = LayoutProgram(strategy, mesh, roles.data_axes, layout.num_minibatches, comm)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    paths = [path_name(path) for path, _ in leaves]
    stacked = frozenset(path for path in paths if path.startswith(f"{LAYERS}/"))
    infos = describe_parameters(params, dict.fromkeys(stacked, frozenset({0})), mesh, ())
    if STAGE_AXIS in axes:
        infos = split_over_stages(infos, stacked, STAGE_AXIS)
    forms = []
    for info in jax.tree.leaves(infos):
        place = place_parameter(strategy, info, (*shard_axes, *context), mesh)
        forms.append(ParameterForm(program, info, parameter_sharding(place, info, roles, mesh)))
    return tuple(forms)
