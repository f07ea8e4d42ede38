"""The language model of fsdp_lm.py as a pipeline: each device computes some of the layers.

    python -m experiments.pp_lm --config=configs/pp_lm.py

This config runs on any multiple of 4 devices up to 32; on a CPU, eight devices are simulated by
default. Each of four devices computes a quarter of the layers, and eight microbatches pass through
the four devices one after another. With eight devices, two such pipelines compute different
examples, and the parameters are sharded over both (FSDP). This config was not measured.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp_lm")
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "stage": 4})
    config.model.num_layers = 4
    config.model.scan_layers = True  # required by the pipeline, which splits the stack of layers
    config.optimizer.num_minibatches = 8
    # Gathers parameters and reduces gradients once per step, not in each microbatch.
    config.parallel.communicate_every = "step"
    return config.lock()
