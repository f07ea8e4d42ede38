"""Handwritten digits under every strategy in every mode, side by side.

    python -m experiments.compare --config=configs/compare.py

On any even number of devices that divides 64; by default eight simulated ones where the CPU is all
there is. Narrow it with --config.pairs="(('fsdp', 'manual'), ('fsdp', 'auto'))".

Measured on 2026-11-21 with jax 0.10.2, eight devices simulated on two cores that several other
programs shared: all 16 losses within 2.4e-7 of those of one device over 30 steps, the command took
81 seconds of processor time and 222 seconds in all.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 42

    # What is compared, a row each: (strategy, mode).
    config.pairs = (
        ("dp", "manual"),
        ("dp", "auto"),
        ("dp", "explicit"),
        ("zero1", "manual"),
        ("zero1", "auto"),
        ("zero1", "explicit"),
        ("zero2", "manual"),
        ("zero2", "auto"),
        ("zero2", "explicit"),
        ("fsdp", "manual"),
        ("fsdp", "auto"),
        ("fsdp", "explicit"),
        ("fsdp", "auto-unconstrained"),
        ("hsdp", "manual"),
        ("hsdp", "auto"),
        ("hsdp", "explicit"),
    )
    config.compare = ConfigDict()
    config.compare.repetitions = 15  # timed steps of each row, in turn

    config.data = ConfigDict()
    config.data.source = "digits"  # or "synthetic", the shapes of MNIST
    config.data.batch_size = 128  # examples a step, on all devices together

    config.model = ConfigDict()
    config.model.name = "classifier"
    config.model.hidden_size = 256
    config.model.num_layers = 3  # hidden ones
    config.model.num_classes = 10
    config.model.dropout_rate = 0.0  # devices draw masks of their own, so losses would differ
    config.model.dtype = "float32"  # in bfloat16 the order of sums shows in the losses

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-3  # the peak
    config.optimizer.warmup_steps = 5
    config.optimizer.weight_decay = 0.1
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.clip_norm = 0.0  # of the gradient, the largest allowed; 0: any
    config.optimizer.num_minibatches = 2

    config.parallel = ConfigDict()
    # hsdp runs on this mesh; the others on the same devices along data alone.
    config.parallel.mesh = ConfigDict({"replica": 2, "data": -1})  # -1: the rest of the devices
    config.parallel.mesh_order = ()  # axes, that on the slowest links first; (): by their names
    config.parallel.min_weight_size = 2**4  # elements; smaller parameters are not sharded
    config.parallel.reshard_after_forward = True  # fsdp, hsdp: gathered again for the backward pass
    config.parallel.communicate_every = "minibatch"  # fsdp, hsdp: or "step", "gather-step"
    config.parallel.keep_gathered = ()  # fsdp, hsdp: what is kept all the same, such as ("head",)
    config.parallel.axis_by_axis = False  # over a mesh of data and data_minor: as a torus wants it
    config.parallel.overlap = "auto"  # compiler options by chip and mesh; "none": the compiler's
    config.parallel.pad = False  # whether to shard, padded, what does not divide
    config.parallel.param_dtype = ""  # "bfloat16", "float32"; "": what the model makes
    config.parallel.gather_dtype = ""  # likewise; "": param_dtype
    config.parallel.reduce_dtype = ""  # likewise, in mode manual alone; "": gather_dtype
    config.parallel.rules = ()  # what logical names mean, such as (("embed", None),)

    config.training = ConfigDict()
    config.training.num_steps = 30
    config.training.norm_metrics = False  # of gradients, updates and parameters

    return config.lock()
