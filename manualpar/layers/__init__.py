"""Layers whose parameters are split over devices, and the collectives that combine the parts."""

from manualpar.core.parameters.annotations import split
from manualpar.layers.attention.context import CONTEXT_ATTENTIONS, Context
from manualpar.layers.boundaries import bound_axes, enter, leave, mean_square_of_heads
from manualpar.layers.dense import SplitDense
from manualpar.layers.head_loss import head_cross_entropy, head_logits
from manualpar.layers.low_precision import MATMULS, Matmul, float8_dot_general, int8_dot_general
from manualpar.layers.moe.moe import MoE
from manualpar.layers.moe.routing import auxiliary_loss
from manualpar.layers.ring import (
    LAYER_OVERLAPS,
    LayerOverlap,
    enter_ring,
    gather_matmul,
    matmul_scatter,
    whole_sequence,
)
from manualpar.layers.tensor_parallel.plan import TensorParallel, tensor_parallel
from manualpar.layers.tensor_parallel.plan_styles import (
    Column,
    DerivedPlan,
    PerDevice,
    Row,
    Vocab,
    plan_from_rules,
)
from manualpar.layers.vocabulary import (
    split_argmax,
    split_cross_entropy,
    split_lookup,
    vocabulary_axes,
)

__all__ = [
    "CONTEXT_ATTENTIONS",
    "LAYER_OVERLAPS",
    "MATMULS",
    "Column",
    "Context",
    "DerivedPlan",
    "LayerOverlap",
    "Matmul",
    "MoE",
    "PerDevice",
    "Row",
    "SplitDense",
    "TensorParallel",
    "Vocab",
    "auxiliary_loss",
    "bound_axes",
    "enter",
    "enter_ring",
    "float8_dot_general",
    "gather_matmul",
    "head_cross_entropy",
    "head_logits",
    "int8_dot_general",
    "leave",
    "matmul_scatter",
    "mean_square_of_heads",
    "plan_from_rules",
    "split",
    "split_argmax",
    "split_cross_entropy",
    "split_lookup",
    "tensor_parallel",
    "vocabulary_axes",
    "whole_sequence",
]
