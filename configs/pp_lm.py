"""The language model of fsdp_lm.py as a pipeline: each device has some of the layers.

    python -m experiments.pp_lm --config=configs/pp_lm.py

On any number of devices of which 4 is a divisor, up to 32; by default eight simulated ones where
the CPU is all there is. Four devices have a quarter of the layers each, and eight microbatches go
through them one behind another. Two such pipelines share the examples, and store the parameters
sharded (FSDP). Not measured.
"""

from ml_collections import ConfigDict

from configs import fsdp_lm


def get_config() -> ConfigDict:
    config = fsdp_lm.get_config()
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "stage": 4})
    config.model.num_layers = 4
    config.model.scan_layers = True  # where the model is cut
    config.optimizer.num_minibatches = 8
    # Once a step, and not in each microbatch.
    config.parallel.communicate_every = "step"
    return config.lock()
