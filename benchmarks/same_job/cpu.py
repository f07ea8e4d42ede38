"""Lets accelerate shard on CPUs.

accelerate 1.15 takes its FSDP plugin only on accelerators: on CPUs it trains replicated, without a
word. PyTorch's `fully_shard` under it runs on CPUs as well.
"""

from typing import Any

from accelerate import state
from accelerate.utils import DistributedType


def shard_on_cpu() -> None:
    """Makes `Accelerator(cpu=True, fsdp_plugin=...)` use its plugin."""
    original = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        is_new = not self.initialized
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if is_new and fsdp_plugin is not None:
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = init
