"""The layers of a transformer, one after the other: written out, or one that runs in a loop.

Layers may be of two kinds (Beltagy et al., https://arxiv.org/abs/2004.05150): of every
`global_every` layers the last is *global* and sees all positions, and the others are *local* and
see those of a window. A loop then runs over groups of so many layers, each with one global layer.

Invariants: layer `i` has the same parameters whether layers are written out or scanned, see
`layer_place`. A layer that remat runs again is a layer and not a group.

Symbols: `B` examples, `S` positions, `D` hidden features, `H` features of a head, `L` layers.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax

from manualpar.layers.blockwise_attention import ATTENDED
from manualpar.layers.key_value_cache import CACHE, NEW_KEYS, Past, Prompts
from manualpar.layers.routing import COUNTS, LOSSES
from manualpar.models.transformer_layer import Layer, LayerConfig

if TYPE_CHECKING:
    from manualpar.models.transformer import Transformer

# The parts of a layer that are kept for its backward pass. `dots` are the products with weights.
# Attention's own products, whose scores are larger than anything else, have a batch dimension and
# are not among them. What attention returns is kept, so that none is computed twice.
_KEPT = jax.checkpoint_policies.save_only_these_names(ATTENDED)
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _KEPT
    ),
    "full": _KEPT,
}


class Angles(NamedTuple):
    """The angles of rotary positions, `float32[S, H/2]`, of the two kinds of layers."""

    of_global: jax.Array
    of_local: jax.Array


class LayerPlace(NamedTuple):
    """Where the parameters of a layer are.

    Attributes:
      path: The names of the modules that they are in.
      entry: Which entry of dim 0 of each leaf is the layer's; `None` if the leaves are its own.
    """

    path: tuple[str, ...]
    entry: int | None


def is_global(layer: int, global_every: int) -> bool:
    """Whether a layer sees all positions while others see a window."""
    return bool(global_every) and (layer + 1) % global_every == 0


def divide_layers(model: "Transformer") -> tuple[int, int]:
    """How many layers run in a loop, and how many are written out behind it."""
    looped = 0
    if model.scan_layers:
        looped = model.num_layers - model.num_layers % max(model.global_every, 1)
    return looped, model.num_layers - looped


def layer_place(model: "Transformer", layer: int) -> LayerPlace:
    """Where the parameters of layer `layer` of a model are, counted from 0.

    They are in `layer_{i}` if layers are written out, and in entry `i` of `layers` if they are
    scanned. Of two kinds of layers `layers/layer_{j}` are the layers `j` of all groups. Layers that
    are too few for a group stand after the scan and are written out.
    """
    if layer >= divide_layers(model)[0]:
        return LayerPlace((f"layer_{layer}",), None)
    if not model.global_every:
        return LayerPlace(("layers",), layer)
    group, index = divmod(layer, model.global_every)
    return LayerPlace(("layers", f"layer_{index}"), group)


class LayerGroup(nn.Module):
    """Layers of two kinds, the last of them global.

    Attributes:
      config: That of a local layer.
      global_every: How many they are.
      remat: See `REMAT_POLICIES`.
    """

    config: LayerConfig
    global_every: int
    remat: str

    @nn.compact
    def __call__(
        self,
        x_BSD: jax.Array,
        angles: Angles,
        document_BS: jax.Array | None,
        rows: Prompts | Past | None = None,
    ) -> tuple[jax.Array, None]:
        """See `Layer`."""
        layer = _layer_class(self.remat, in_loop=True)
        for index in range(self.global_every):
            config, angles_SH = _of_kind(self.config, angles, index, self.global_every)
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
    """The residual stream behind all layers, which become submodules of the one that calls this.

    Args:
      model: The model that has the layers.
      config: That of its layers; of two kinds that of local ones.
      x_BSD: The residual stream, see `Layer`.
      angles: Those of the two kinds; of one kind those of global layers are all layers'.
      document_BS: See `Layer`.
      rows: See `Transformer`.

    Returns:
      The residual stream, of the shape of `x_BSD`.

    Communication:
      That of the layers.
    """
    every, (looped, _) = model.global_every, divide_layers(model)
    if looped:
        in_loop: Any = _layer_class(model.remat, in_loop=True)
        arguments: tuple[Any, ...] = (config,)
        if every:
            in_loop, arguments = LayerGroup, (config, every, model.remat)
        collections: tuple[str, ...] = (CACHE, NEW_KEYS) if rows is not None else ()
        collections += (LOSSES, COUNTS) if model.num_experts else ()
        layers = nn.scan(
            in_loop,
            variable_axes=dict.fromkeys(("params", *collections), 0),
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=looped // max(every, 1),
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        of_all: Any = angles if every else angles.of_global
        x_BSD, _ = layers(*arguments, name="layers")(x_BSD, of_all, document_BS, rows)
    layer = _layer_class(model.remat, in_loop=False)
    for index in range(looped, model.num_layers):
        own_config, angles_SH = _of_kind(config, angles, index, every)
        x_BSD, _ = layer(own_config, name=f"layer_{index}")(x_BSD, angles_SH, document_BS, rows)
    return x_BSD


def _layer_class(remat: str, *, in_loop: bool) -> Any:
    if remat == "none":
        return Layer
    # In a loop XLA cannot merge the two computations.
    return nn.remat(Layer, policy=REMAT_POLICIES[remat], prevent_cse=not in_loop)


def _of_kind(
    config: LayerConfig, angles: Angles, layer: int, global_every: int
) -> tuple[LayerConfig, jax.Array]:
    """The config and the angles of a layer."""
    if not global_every:
        return config, angles.of_global
    if is_global(layer, global_every):
        return dataclasses.replace(config, window=None), angles.of_global
    return config, angles.of_local
