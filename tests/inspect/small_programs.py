"""Small models to be traced, and programs of XLA as text."""

import flax.linen as nn
import optax


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5, name="head")(nn.silu(nn.Dense(32, name="hidden")(x)))


class Deep(nn.Module):
    """Six layers in a scan, each recomputed in the backward pass."""

    @nn.compact
    def __call__(self, x):
        def layer(dense, x):
            return x + nn.silu(dense(x)), None

        layers = nn.scan(
            nn.remat(layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=6
        )
        return layers(nn.Dense(16, name="dense"), x)[0]


def loss_fn(params, apply_fn, batch, rng):
    del rng
    loss = optax.squared_error(apply_fn({"params": params}, batch.inputs)).sum(-1)
    return loss.mean(), {"loss": (loss.sum(), loss.size)}


def module(body, computations="", header="num_partitions=8"):
    return "\n".join(
        [
            f"HloModule jit_f, is_scheduled=true, {header}",
            "",
            "FileLocations",
            "1 {file_name_id=1 function_name_id=1 line=5 end_line=5 column=7 end_column=9}",
            "",
            *computations.strip("\n").splitlines(),
            "",
            "ENTRY %main (x: f32[6,4]) -> f32[6,4] {",
            '  %x = f32[6,4]{1,0} parameter(0), metadata={op_name="x"}',
            *(f"  {line.strip()}" for line in body.strip().splitlines()),
            "}",
        ]
    )
