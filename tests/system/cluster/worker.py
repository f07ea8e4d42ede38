"""One process of a run, for the tests of `system/cluster`: trains a small model for some steps.

Its argument is a JSON object: `strategy`, `mesh`, `steps`, and optionally `devices` (of this
process), `timeout`, `fail` (process and step of an error), `ahead` (the step before which process 0
waits, so that the others get ahead), `seconds` (of a step), `early` (whether process 1 ends at
once), `out` (a file for the losses and the parameters).
"""

import json
import os
import sys
import time
import traceback

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh
from manualpar.core.mesh.mesh import describe_links
from manualpar.core.state.metrics import mean_metrics
from manualpar.inspect import draw_sharding, layout_table
from manualpar.system.cluster import LOST_PROCESS_EXIT_CODE, initialize
from manualpar.training.replicas import ReplicaSentinel

BUILDERS = {"dp": data_parallel, "fsdp": fsdp, "hsdp": hsdp}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.silu(nn.Dense(32)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(8)(x)


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch.inputs, rngs={"dropout": rng})
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return loss.mean(), {"loss": (loss.sum(), loss.size)}


def make_program(options):
    mesh = make_mesh(options["mesh"])
    print("links", describe_links(mesh), flush=True)
    batch = Batch(
        jax.ShapeDtypeStruct((48, 8), jnp.float32), jax.ShapeDtypeStruct((48,), jnp.int32)
    )
    strategy = options["strategy"]
    more = {} if strategy == "dp" else {"min_weight_size": 0}
    optimizer = optax.sgd(0.1, momentum=0.9)
    return BUILDERS[strategy](Model(), optimizer, loss_fn, mesh=mesh, batch=batch, **more)


def global_batch(program, step):
    rng = np.random.default_rng(step)
    whole = Batch(rng.normal(size=(48, 8)).astype(np.float32), np.arange(48, dtype=np.int32) % 8)

    def place(x):
        sharding = program.batch_sharding
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, whole)


def train(cluster, options):
    program = make_program(options)
    layout_table(program)
    if cluster.is_main:
        draw_sharding(program.abstract_state.params)
    sentinel = ReplicaSentinel(program.mesh, program.layout)
    state = program.init(jax.random.key(0))
    losses = []
    for step in range(1, options["steps"] + 1):
        if [cluster.process_id, step] == options.get("fail"):
            raise ValueError("a mistake\nof this process")
        if cluster.is_main and step == options.get("ahead"):
            time.sleep(1.0)
        state, metrics = program.train_step(state, global_batch(program, step))
        if "ahead" not in options:
            losses.append(mean_metrics(metrics)["loss"])
        if step == 1:
            print("training", flush=True)
        time.sleep(options.get("seconds", 0.0))
        stops = cluster.should_stop(step)
        print("step", step, flush=True)
        if stops:
            jax.block_until_ready(state)
            print("stopped", step, "of", sorted(cluster.steps()), flush=True)
            return
    sentinel.check(state)
    program.eval_step(state, global_batch(program, 0))
    if "out" in options:
        whole = state.params
        if cluster.num_processes > 1:
            whole = multihost_utils.process_allgather(whole, tiled=True)
        if cluster.is_main:
            leaves = [np.asarray(x) for x in jax.tree.leaves(whole)]
            np.savez(options["out"], *leaves, losses=losses)


def main():
    options = json.loads(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.get("devices", 2))
    jax.config.update("jax_disable_most_optimizations", True)
    cluster = initialize(timeout_seconds=options.get("timeout", 3.0))
    print("pid", os.getpid(), flush=True)
    try:
        with cluster.stop_on_sigterm():
            train(cluster, options)
            if cluster.is_main and options.get("seconds_after"):
                time.sleep(options["seconds_after"])
            cluster.close()
    except Exception as error:
        sentence = cluster.explain_failure(error)
        if sentence is not None:
            print(sentence, file=sys.stderr, flush=True)
            os._exit(LOST_PROCESS_EXIT_CODE)
        traceback.print_exc()
        cluster.failed(error)
        os._exit(1)
    print("finished", flush=True)


if __name__ == "__main__":
    main()
