"""Flax Linen models; a strategy shards their parameters without changes in their code."""

from manualpar.layers.attention.context import Context
from manualpar.layers.moe.experts import Experts
from manualpar.models.classifier import Classifier
from manualpar.models.layer_config import Attention, Latent, Mlp, Norm, Scales, Split
from manualpar.models.rotary import Rotary, RotaryScaling
from manualpar.models.transformer import Transformer, flops_per_token
from manualpar.models.transformer_layer import qk_clip

__all__ = [
    "Attention",
    "Classifier",
    "Context",
    "Experts",
    "Latent",
    "Mlp",
    "Norm",
    "Rotary",
    "RotaryScaling",
    "Scales",
    "Split",
    "Transformer",
    "flops_per_token",
    "qk_clip",
]
