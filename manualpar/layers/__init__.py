"""Layers that compute with a part of their parameters, and send what makes the result whole."""

from manualpar.layers.boundaries import enter, leave
from manualpar.layers.context import Context
from manualpar.layers.dense import SplitDense
from manualpar.layers.experts import MoE
from manualpar.layers.head_loss import head_cross_entropy, head_logits
from manualpar.layers.plan import TensorParallel, tensor_parallel
from manualpar.layers.plan_rules import DerivedPlan, plan_from_rules
from manualpar.layers.plan_styles import Column, PerDevice, Row, Vocab
from manualpar.layers.ring import enter_ring, gather_matmul, matmul_scatter, whole_sequence
from manualpar.layers.routing import auxiliary_loss
from manualpar.layers.vocabulary import split_argmax, split_cross_entropy, split_lookup
from manualpar.sharding.split_parameter import split

__all__ = [
    "Column",
    "Context",
    "DerivedPlan",
    "MoE",
    "PerDevice",
    "Row",
    "SplitDense",
    "TensorParallel",
    "Vocab",
    "auxiliary_loss",
    "enter",
    "enter_ring",
    "gather_matmul",
    "head_cross_entropy",
    "head_logits",
    "leave",
    "matmul_scatter",
    "plan_from_rules",
    "split",
    "split_argmax",
    "split_cross_entropy",
    "split_lookup",
    "tensor_parallel",
    "whole_sequence",
]
