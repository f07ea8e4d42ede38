"""The language model of fsdp_lm.py with three kinds of parallelism in one mesh.

    python -m experiments.nd_lm --config=configs/nd_lm.py

On any number of devices of which 4 is a divisor, up to 64; by default eight simulated ones where
the CPU is all there is: two stages of a pipeline, over each of which layers are split in two, and
two such groups that share the examples and store the parameters sharded (FSDP). Any axes may take
part: `data`, `replica`, `model`, `expert`, `context` and `stage`, for example

    --config.parallel.mesh="{'expert': 2, 'context': 2, 'stage': 2}" --config.model.num_experts=8

Not measured.
"""

from ml_collections import ConfigDict

from configs import fsdp_lm


def get_config() -> ConfigDict:
    config = fsdp_lm.get_config()
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "model": 2, "stage": 2})
    config.parallel.sequence = True
    config.model.num_layers = 4
    config.model.scan_layers = True  # where the pipeline cuts
    config.model.num_heads = 8
    config.model.num_kv_heads = 2
    config.model.vocab_multiple = 4
    config.optimizer.num_minibatches = 4
    config.parallel.communicate_every = "step"
    return config.lock()
