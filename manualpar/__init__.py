"""Flax models, data-parallel or fully sharded, with every collective written by hand.

A name is imported when it is first used (PEP 562), so `import manualpar` costs next to nothing.
"""

import ast
import functools
import importlib
import importlib.machinery
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manualpar.by_hand import (
        accumulate_gradients,
        gather_examples,
        gather_params,
        shard_module_params,
        shard_params,
    )
    from manualpar.core.mesh.mesh import abstract_mesh, make_mesh, simulate_devices
    from manualpar.core.mesh.splitting import fold_rng_over_axis
    from manualpar.core.modes.gradients import sync_gradients, sync_metrics
    from manualpar.core.parameters.collectives import gather_array_with_mean_grads
    from manualpar.core.parameters.placement import MatrixDims
    from manualpar.core.parameters.sharded_parameter import ShardedParameter
    from manualpar.core.program.program import Program, muon_dims
    from manualpar.core.state.metrics import print_metrics
    from manualpar.core.state.train_state import Batch, TrainState
    from manualpar.inspect.same_as_one_device import assert_same_as_one_device
    from manualpar.layers.pipeline import Pipeline
    from manualpar.layers.tensor_parallel.plan import tensor_parallel
    from manualpar.layers.tensor_parallel.plan_styles import Column, PerDevice, Row, Vocab
    from manualpar.models.finetuning.adapter_files import load_adapters, merge_lora, save_adapters
    from manualpar.models.finetuning.lora import lora
    from manualpar.models.finetuning.quantized import quantized
    from manualpar.parameter_average import ema_params, params_ema
    from manualpar.strategies.data_parallel import data_parallel
    from manualpar.strategies.diloco.builder import diloco
    from manualpar.strategies.fsdp import fsdp
    from manualpar.strategies.hsdp import hsdp
    from manualpar.strategies.zero import zero

__version__ = "0.3.0"

__all__ = [
    "Batch",
    "Column",
    "MatrixDims",
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
    "muon_dims",
    "params_ema",
    "print_metrics",
    "quantized",
    "save_adapters",
    "shard_module_params",
    "shard_params",
    "simulate_devices",
    "sync_gradients",
    "sync_metrics",
    "tensor_parallel",
    "zero",
]

# Modules that programs for release 0.2 import -> their names since release 0.3.
MOVED = {
    "manualpar.checkpoints": "manualpar.training.checkpoints",
    "manualpar.cluster": "manualpar.system.cluster",
    "manualpar.core.collectives": "manualpar.core.parameters.collectives",
    "manualpar.core.strategy": "manualpar.core.modes.strategy",
    "manualpar.extras": "manualpar.errors",
    "manualpar.finetuning": "manualpar.models.finetuning",
    "manualpar.generation": "manualpar.models.generation",
    "manualpar.metrics": "manualpar.core.state.metrics",
    "manualpar.pipeline": "manualpar.layers.pipeline",
    "manualpar.planner.closed_form": "manualpar.plans.layouts",
    "manualpar.planner.gpu_compiler": "manualpar.plans.gpu_compiler",
    "manualpar.planner.tpu_compiler": "manualpar.plans.tpu_compiler",
    "manualpar.plans.closed_form": "manualpar.plans.layouts",
    "manualpar.pretrained": "manualpar.models.pretrained",
    "manualpar.storage": "manualpar.system.storage",
    "manualpar.training.cross_entropy": "manualpar.models.cross_entropy",
    "manualpar.training.devices": "manualpar.core.mesh.mesh",
    "manualpar.watching": "manualpar.training.monitoring",
}


class _OldNames:
    """The last finder of modules, which names the new place of a module that has moved."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        """Raises a `ModuleNotFoundError` for a module of `MOVED`; finds nothing else."""
        if fullname in MOVED:
            raise ModuleNotFoundError(f"{fullname} is {MOVED[fullname]} since release 0.3")


sys.meta_path.append(_OldNames)


@functools.cache
def _homes() -> dict[str, str]:
    """Returns the module of each public name: what the imports above say."""
    assert __spec__.loader is not None
    tree = ast.parse(__spec__.loader.get_source(__name__))  # type: ignore[attr-defined]
    imports = (x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom))
    return {alias.name: str(x.module) for x in imports for alias in x.names}


def __getattr__(name: str) -> Any:
    """Imports a public name, or a package such as `manualpar.inspect`, when it is first used."""
    if name in __all__:
        value = getattr(importlib.import_module(_homes()[name]), name)
        globals()[name] = value
        return value
    if importlib.machinery.PathFinder.find_spec(f"{__name__}.{name}", __path__):
        return importlib.import_module(f"{__name__}.{name}")
    now = MOVED.get(f"{__name__}.{name}")
    more = f"; it is {now} since release 0.3" if now else ""
    raise AttributeError(f"module 'manualpar' has no attribute {name!r}{more}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
