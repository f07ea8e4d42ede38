"""The language model of fsdp_lm.py with three kinds of parallelism in one mesh.

    python -m experiments.nd_lm --config=configs/nd_lm.py

This config runs on any multiple of 4 devices up to 64; on a CPU, eight devices are simulated by
default. The pipeline has two stages. In each stage, layers are sharded over two devices. With eight
devices, two such pipelines compute different examples, and the parameters are sharded over both
(FSDP). The mesh may have any of the axes `data`, `replica`, `model`, `expert`, `context` and
`stage`, for example

    --config.parallel.mesh="{'expert': 2, 'context': 2, 'stage': 2}" --config.model.num_experts=8

This config was not measured.
"""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    config = named_config("fsdp_lm")
    with config.unlocked():
        config.parallel.mesh = ConfigDict({"data": -1, "model": 2, "stage": 2})
    config.parallel.sequence = True
    config.model.num_layers = 4
    config.model.scan_layers = True  # required by the pipeline, which splits the stack of layers
    config.model.num_heads = 8
    config.model.num_kv_heads = 2
    config.model.vocab_multiple = 4
    config.optimizer.num_minibatches = 4
    config.parallel.communicate_every = "step"
    return config.lock()
