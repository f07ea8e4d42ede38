"""Runs the layers of a `Transformer`: unrolled (*written out*), or one layer in an `nn.scan` loop.

Layers may be of two kinds (Beltagy et al., https://arxiv.org/abs/2004.05150), in groups of
`global_every` layers. The last layer of a group is *global* and sees all positions. The other
layers are *local* and see a window or a chunk. Or only the last of `experts.every` layers has
experts. A loop then runs over groups. In a model with experts, the first `dense_layers` layers have
an MLP in place of experts, and come before the loop.

Invariants: layer `i` has the same parameters whether layers are written out or scanned, see
`layer_place`. Remat recomputes single layers, not groups.

Symbols: `B` examples, `S` positions, `D` hidden features, `H` features of a head, `L` layers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
from flax.typing import In

from manualpar.layers.attention.blockwise_attention import ATTENDED
from manualpar.layers.attention.key_value_cache import CACHE, NEW_KEYS, Past, Prompts
from manualpar.layers.moe.experts import Experts
from manualpar.layers.moe.routing import BIAS, COUNTS, LOSSES
from manualpar.models.layer_config import Attention, LayerConfig
from manualpar.models.rotary import NO_SCALING
from manualpar.models.transformer_layer import Layer

if TYPE_CHECKING:
    from manualpar.models.transformer import Transformer

# Remat policy -> the values that a layer saves for its backward pass. `dots` saves the results of
# products with weights. It does not save the scores of attention, which are the largest arrays: the
# product of queries and keys has batch dimensions. `dots` and `full` also save the result of
# attention, so that it need not be recomputed from scores.
_KEPT = jax.checkpoint_policies.save_only_these_names(ATTENDED)
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _KEPT
    ),
    "full": _KEPT,
}


class Angles(NamedTuple):
    """The angles of rotary positions of the two kinds of layers, see `rotary_angles`.

    Both are `float32[S, H/2]`; `float32[B, S, H/2]` if each sequence has positions of its own; or
    `None` if the layers are not rotated.
    """

    of_global: jax.Array | None
    of_local: jax.Array | None


class LayerPlace(NamedTuple):
    """Where the parameters of a layer are.

    Attributes:
      path: The names of the modules that contain the parameters.
      entry: The layer's entry in dim 0 of each leaf; `None` if the leaves belong to this layer
        only.
    """

    path: tuple[str, ...]
    entry: int | None


def size_of_group(attention: Attention, experts: Experts) -> int:
    """Returns the length of the groups of layers that a loop runs over; 1 if layers are alike."""
    return math.lcm(max(attention.global_every, 1), experts.every)


def is_global(layer: int, global_every: int) -> bool:
    """Returns whether a layer sees all positions, in a model whose other layers see a window."""
    return bool(global_every) and (layer + 1) % global_every == 0


def layer_place(model: "Transformer", layer: int) -> LayerPlace:
    """Locates the parameters of layer `layer` of a model, counted from 0.

    The parameters are in `layer_{i}` if layers are written out, and in an entry of `layers` if
    layers are scanned. With two kinds of layers, `layers/layer_{j}` has layer `j` of every group.
    Remaining layers that do not fill a group come after the scan and are written out. Dense layers
    come before the scan and are written out too.
    """
    if layer not in scanned_layers(model):
        return LayerPlace((f"layer_{layer}",), None)
    size = size_of_group(model.attention, model.experts)
    group, index = divmod(layer - model.experts.dense_layers, size)
    inner = (f"layer_{index}",) if size > 1 else ()
    return LayerPlace(("layers", *inner), group)


def scanned_layers(model: "Transformer") -> range:
    """Returns the numbers of the layers in the `nn.scan` loop; empty if all are written out."""
    if not model.scan_layers:
        return range(0)
    size, dense = size_of_group(model.attention, model.experts), model.experts.dense_layers
    number = (model.num_layers - dense) // size * size
    return range(dense, dense + number)


class LayerGroup(nn.Module):
    """A group of layers of several kinds, such as local layers, and a global layer at the end.

    Attributes:
      config: The config of all layers, from which the config of each kind is made.
      remat: See `REMAT_POLICIES`.
    """

    config: LayerConfig
    remat: str

    @nn.compact
    def __call__(
        self,
        x_BSD: jax.Array,
        angles: Angles,
        document_BS: jax.Array | None,
        rows: Prompts | Past | None = None,
    ) -> tuple[jax.Array, None]:
        """Runs the layers of a group; see `Layer`."""
        layer = _layer_class(self.remat, in_loop=True)
        for index in range(size_of_group(self.config.attention, self.config.experts)):
            config, angles_SH = _of_kind(self.config, angles, index)
            x_BSD, _ = layer(config, name=f"layer_{index}")(x_BSD, angles_SH, document_BS, rows)
        return x_BSD, None


def run_layers(
    model: "Transformer",
    config: LayerConfig,
    x_BSD: jax.Array,
    angles: Angles,
    document_BS: jax.Array | None,
    rows: Prompts | Past | None = None,
) -> jax.Array:
    """Runs all layers, which become submodules of the calling module.

    Args:
      model: The model that has the layers.
      config: The layers' config; the local layers' config if there are two kinds.
      x_BSD: The residual stream, see `Layer`.
      angles: The angles of both kinds; all layers use `of_global` if there is only one kind.
      document_BS: See `Layer`.
      rows: See `Transformer`.

    Returns:
      The residual stream, of the shape of `x_BSD`.

    Communication:
      The communication of the layers.
    """
    in_loop = scanned_layers(model)
    written_out = _layer_class(model.remat, in_loop=False)

    def run(x_BSD: jax.Array, layers: range) -> jax.Array:
        for index in layers:
            own_config, angles_SH = _of_kind(config, angles, index)
            layer = written_out(own_config, name=f"layer_{index}")
            x_BSD, _ = layer(x_BSD, angles_SH, document_BS, rows)
        return x_BSD

    x_BSD = run(x_BSD, range(in_loop.start))
    if in_loop:
        x_BSD = _run_loop(model, config, x_BSD, angles, document_BS, rows)
    return run(x_BSD, range(in_loop.stop, model.num_layers))


def _run_loop(
    model: "Transformer",
    config: LayerConfig,
    x_BSD: jax.Array,
    angles: Angles,
    document_BS: jax.Array | None,
    rows: Prompts | Past | None,
) -> jax.Array:
    size = size_of_group(config.attention, config.experts)
    layer: Any = _layer_class(model.remat, in_loop=True)
    # The loop begins after the dense layers at the beginning.
    inside: dict[str, Any] = {"dense_layers": 0}
    if config.experts.every == 1:
        inside["dense_mlp_size"] = 0
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, **inside))
    arguments: tuple[Any, ...] = (config,)
    if size > 1:
        layer, arguments = LayerGroup, (config, model.remat)
    variable_axes: dict[Any, Any] = {"params": 0}
    if rows is not None:
        variable_axes |= {CACHE: 0, NEW_KEYS: 0}
    if config.experts.num_experts:
        variable_axes |= {LOSSES: 0, COUNTS: 0}
    if config.experts.router_bias:
        # Layers only read the bias. If the loop returned the bias, layers would seem to change it.
        variable_axes[BIAS] = 0 if model.is_initializing() else In(0)
    layers = nn.scan(
        layer,
        variable_axes=variable_axes,
        split_rngs={"params": True, "dropout": True},
        in_axes=nn.broadcast,
        length=len(scanned_layers(model)) // size,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    of_all: Any = angles if size > 1 else angles.of_global
    x_BSD, _ = layers(*arguments, name="layers")(x_BSD, of_all, document_BS, rows)
    return x_BSD


def _layer_class(remat: str, *, in_loop: bool) -> Any:
    if remat == "none":
        return Layer
    # In a loop XLA cannot merge a recomputation with the first computation, so no barrier is
    # needed.
    return nn.remat(Layer, policy=REMAT_POLICIES[remat], prevent_cse=not in_loop)


def _of_kind(
    config: LayerConfig, angles: Angles, layer: int
) -> tuple[LayerConfig, jax.Array | None]:
    """Returns the config and the angles of the layer with index `layer`."""
    if config.experts.num_experts and not config.experts.in_layer(layer):
        mlp_size = config.experts.dense_mlp_size or config.mlp_size
        config = dataclasses.replace(config, experts=Experts(), mlp_size=mlp_size)
    how = config.attention
    if not how.global_every:
        return config, angles.of_global
    if is_global(layer, how.global_every):
        of_local: dict[str, Any] = {"window": 0, "chunk": 0, "global_every": 0}
        seeing_all = dataclasses.replace(how, unrotated_global=False, **of_local)
        return dataclasses.replace(config, attention=seeing_all), angles.of_global
    if how.unrotated_global or config.rotary.scales_local:
        return config, angles.of_local
    unscaled = dataclasses.replace(config.rotary, scaling=NO_SCALING)
    return dataclasses.replace(config, rotary=unscaled), angles.of_local
