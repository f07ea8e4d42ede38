"""Handwritten digits with fully sharded data parallelism: every device stores a shard.

    python -m experiments.fsdp --config=configs/fsdp.py

This config runs on any number of devices that divides 32; on a CPU, eight devices are simulated by
default. Measured on 2026-11-20 with jax 0.10.2 and eight devices simulated on two cores of a busy
Intel Xeon: the test accuracy was 0.9778, and the command took 17 seconds.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 42
    config.profile = ""  # the steps to profile, such as "10:13"; "": none

    config.data = ConfigDict()
    config.data.source = "digits"  # or "synthetic", the shapes of MNIST
    config.data.batch_size = 128  # examples a step, on all devices together
    config.data.prefetch = 2  # the number of batches to read ahead

    config.model = ConfigDict()
    config.model.name = "classifier"
    config.model.hidden_size = 256
    config.model.num_layers = 2  # hidden layers
    config.model.num_classes = 10
    config.model.dropout_rate = 0.1
    config.model.dtype = "bfloat16"  # the dtype of computation; parameters are float32

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-3  # the peak
    config.optimizer.warmup_steps = 50
    config.optimizer.weight_decay = 0.1
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.clip_norm = 0.0  # the largest norm of the gradient; 0: no limit
    config.optimizer.num_minibatches = 4

    config.parallel = ConfigDict()
    config.parallel.strategy = "fsdp"  # "dp", "zero1", "zero2", "fsdp" or "hsdp"
    config.parallel.mode = "manual"  # or "auto", "explicit", "auto-unconstrained"
    config.parallel.mesh = ConfigDict({"data": -1})  # -1: all devices
    config.parallel.mesh_order = ()  # the axes, slowest links first; (): from "replica" to "model"
    config.parallel.min_weight_size = 2**4  # smaller parameters (in elements) are not sharded
    config.parallel.reshard_after_forward = True  # fsdp, hsdp: gathers again for the backward pass
    config.parallel.communicate_every = "minibatch"  # fsdp, hsdp: or "step", "gather-step"
    config.parallel.keep_gathered = ()  # fsdp, hsdp: not gathered again, such as ("head",)
    config.parallel.axis_by_axis = False  # True: a collective for each axis, not for all at once
    config.parallel.overlap = "auto"  # compiler options: "auto" (by chip and mesh) or "none"
    config.parallel.pad = False  # True: pads dims that do not divide, and shards them
    config.parallel.param_dtype = ""  # "bfloat16" or "float32"; "": the dtype that the model makes
    config.parallel.gather_dtype = ""  # "bfloat16" or "float32"; "": param_dtype
    config.parallel.reduce_dtype = ""  # "bfloat16" or "float32" (mode manual); "": gather_dtype
    config.parallel.rules = ()  # mesh axes of logical names, such as (("embed", None),)

    config.training = ConfigDict()
    config.training.num_steps = 1000
    config.training.eval_every_steps = 200
    config.training.eval_batches = 0  # batches of each evaluation; 0: all
    config.training.log_every_steps = 50
    config.training.norm_metrics = False  # True: reports norms of gradients, updates and parameters
    config.training.on_nonfinite = "stop"  # "stop", "skip" (the update), "rollback" or "ignore"

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 500  # 0: no checkpoints
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
