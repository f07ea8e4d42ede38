"""A model of one's own: the fields of a run, with the values that `fit` begins with.

The model, its loss and its data are Python, see docs/own_run.md. They are either given to
`manualpar.training.fit`, or a function makes them for the commands:

    config = named_config("own")
    config.model.name = "my_task:make_task"  # the function make_task of my_task.py

A config of one's own may add fields to `config.model` and `config.data`, for this function to read.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.profile = ""  # the steps to profile, such as "10:13"; "": none

    config.data = ConfigDict()
    config.data.batch_size = 32  # examples a step, on all devices together
    config.data.prefetch = 2  # the number of batches to read ahead

    config.model = ConfigDict()
    config.model.name = "own"  # or module:function

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 1e-3  # the peak
    config.optimizer.warmup_steps = 0
    config.optimizer.weight_decay = 0.0
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.clip_norm = 0.0  # the largest norm of the gradient; 0: no limit
    config.optimizer.num_minibatches = 1

    config.parallel = ConfigDict()
    config.parallel.strategy = "fsdp"
    config.parallel.mesh = ConfigDict({"data": -1})  # -1: all devices
    config.parallel.mesh_order = ()  # the axes, slowest links first; (): from "replica" to "model"
    config.parallel.overlap = "auto"  # compiler options: "auto" (by chip and mesh) or "none"

    config.training = ConfigDict()
    config.training.num_steps = 1000
    config.training.eval_every_steps = 200
    config.training.eval_batches = 0  # batches of each evaluation; 0: all
    config.training.log_every_steps = 50
    config.training.on_nonfinite = "stop"  # "stop", "skip" (the update), "rollback" or "ignore"

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 200  # 0: no checkpoints
    config.checkpoint.keep = 2  # the number of newest checkpoints to keep
    config.checkpoint.keep_every_steps = 0  # also keeps multiples of this step; 0: none
    config.checkpoint.best_metric = ""  # also keeps the best by this metric: "accuracy", ...
    config.checkpoint.on_corruption = "stop"  # if damaged: "stop", or restore the "previous"

    config.watch = ConfigDict()
    config.watch.lost_seconds = 10.0  # a process that is silent for longer counts as lost
    config.watch.stall_seconds = 300.0  # prints all stacks in a longer step; 0: never

    config.debug = ConfigDict()
    config.debug.check_replicas_every = 0  # steps between checks, which are slow; 0: no checks
    config.debug.draw_sharding = ""  # a parameter such as "input_dense/kernel", or "all"; "": none

    return config.lock()
