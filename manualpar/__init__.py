"""Flax models, data-parallel or fully sharded, with every collective written by hand."""

# These register themselves: the modes in which XLA writes collectives, the adapters of Linen's and
# of NNX's models, what refuses models and traced steps, and how flax writes a state.
import manualpar.coded_collectives
import manualpar.guards.divergence
import manualpar.linen.linen_model
import manualpar.modes.global_arrays
import manualpar.nnx.nnx_model
import manualpar.state_serialization
import manualpar.user_model.context_check
import manualpar.user_model.trainable_check  # noqa: F401
from manualpar.by_hand import (
    accumulate_gradients,
    gather_params,
    shard_module_params,
    shard_params,
)
from manualpar.core.collectives import gather_array_with_mean_grads
from manualpar.core.gradients import sync_gradients, sync_metrics
from manualpar.core.partitioning import ShardedParameter
from manualpar.core.program import Program
from manualpar.finetuning.adapter_files import load_adapters, save_adapters
from manualpar.finetuning.lora import lora
from manualpar.finetuning.merging import merge_lora
from manualpar.finetuning.quantized import quantized
from manualpar.layers.plan import tensor_parallel
from manualpar.layers.plan_styles import Column, PerDevice, Row, Vocab
from manualpar.metrics import print_metrics
from manualpar.parameter_average import ema_params, params_ema
from manualpar.pipeline import Pipeline
from manualpar.rng import fold_rng_over_axis
from manualpar.same_as_one_device import assert_same_as_one_device
from manualpar.sharding.mesh import abstract_mesh, make_mesh
from manualpar.strategies.data_parallel import data_parallel
from manualpar.strategies.diloco import diloco
from manualpar.strategies.fsdp import fsdp
from manualpar.strategies.hsdp import hsdp
from manualpar.strategies.zero import zero
from manualpar.train_state import Batch, TrainState
from manualpar.whole_batch import gather_examples

__all__ = [
    "Batch",
    "Column",
    "PerDevice",
    "Pipeline",
    "Program",
    "Row",
    "ShardedParameter",
    "TrainState",
    "Vocab",
    "abstract_mesh",
    "accumulate_gradients",
    "assert_same_as_one_device",
    "data_parallel",
    "diloco",
    "ema_params",
    "fold_rng_over_axis",
    "fsdp",
    "gather_array_with_mean_grads",
    "gather_examples",
    "gather_params",
    "hsdp",
    "load_adapters",
    "lora",
    "make_mesh",
    "merge_lora",
    "params_ema",
    "print_metrics",
    "quantized",
    "save_adapters",
    "shard_module_params",
    "shard_params",
    "sync_gradients",
    "sync_metrics",
    "tensor_parallel",
    "zero",
]
