"""The config of a run: each field is also a flag, such as --training.num_steps=500."""

from ml_collections import ConfigDict

from manualpar.training.config import named_config


def get_config() -> ConfigDict:
    """Returns the config; `manualpar configs own` prints all fields that it begins with."""
    config = named_config("own").unlock()
    config.model.name = "task:make_task"  # the function make_task of task.py
    config.model.width = 32
    config.model.depth = 2
    config.data.num_examples = 4000
    config.data.batch_size = 128
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 20
    config.parallel.strategy = "fsdp"
    config.parallel.mesh = ConfigDict({"data": -1})
    config.parallel.min_weight_size = 256  # Smaller parameters are not sharded.
    config.training.num_steps = 400
    config.training.eval_every_steps = 200
    config.training.log_every_steps = 100
    return config.lock()
