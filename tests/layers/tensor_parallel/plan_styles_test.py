"""Plans from logical names, against those that one would write."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from manualpar import (
    Batch,
    Column,
    Row,
    Vocab,
    assert_same_as_one_device,
    fsdp,
    make_mesh,
    tensor_parallel,
)
from manualpar.layers import plan_from_rules, split_cross_entropy
from manualpar.models.transformer import Transformer

RULES = (("vocab", "model"), ("embed", None), ("heads", "model"), ("kv_heads", "model"))
RULES = (*RULES, ("mlp", "model"), ("layers", None))


def named(*names: str | None) -> Any:
    return nn.with_logical_partitioning(nn.initializers.normal(0.3), names)


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(16, 8, embedding_init=named("vocab", "embed"), name="embed")
        x = embed(tokens) * self.param("scale", named(None, None, "mlp"), (1, 1, 8))
        up = nn.Dense(32, kernel_init=named("embed", "mlp"), bias_init=named("mlp"), name="up")
        x = x + nn.Dense(8, kernel_init=named("mlp", "embed"), name="down")(nn.relu(up(x)))
        return embed.attend(x)


BATCH = Batch(*(jax.ShapeDtypeStruct((8, 8), "int32") for _ in range(2)))


def test_a_plan_says_what_the_rules_say() -> None:
    plan = plan_from_rules(Net(), BATCH, RULES)
    assert plan == {"embed": Vocab(), "up": Column(), "down": Row()}
    assert plan.whole == {"scale": "Net does not say which dims of it are summed over"}
    assert plan_from_rules(Net(), jnp.zeros((2, 8), int), RULES) == plan
    assert plan_from_rules(Net(), BATCH, (("mlp", "model"),)).keys() == {"up", "down"}
    both = (("vocab", ("model", "data")), ("mlp", "model"))
    assert (
        "split over ('model', 'data')"
        in plan_from_rules(Net(), BATCH, both).whole["embed/embedding"]
    )
    with pytest.raises(
        ValueError, match=r"split no module of Net over 'model'.*expected rules that split"
    ):
        plan_from_rules(Net(), BATCH, (("mlp", "data"),))


def test_our_transformer_gives_its_plan() -> None:
    model = Transformer(vocab_size=16, hidden_size=16, num_heads=4, num_kv_heads=2, annotate=True)
    plan = plan_from_rules(model, BATCH, RULES)
    heads = Column(-2, shared=True)
    assert plan == {
        "layers/attention/query": heads,
        "layers/attention/key": heads,
        "layers/attention/value": heads,
        "layers/attention/out": Row(-3),
        "layers/mlp/gate": Column(),
        "layers/mlp/up": Column(),
        "layers/mlp/down": Row(),
    }
    assert plan.whole.keys() == {"embedding", "head"}


@pytest.mark.slow
def test_a_derived_plan_computes_what_one_device_does(devices8: list[jax.Device]) -> None:
    """What the plan leaves whole is stored in shards, by the same rules."""
    del devices8
    model = Transformer(
        vocab_size=16,
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        mlp_size=32,
        annotate=True,
    )

    def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        del rng
        losses = split_cross_entropy(apply_fn({"params": params}, batch.inputs), batch.labels)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    keys = jax.random.split(jax.random.key(1))
    batch = Batch(*(jax.random.randint(key, (8, 8), 0, 16) for key in keys))
    planned = tensor_parallel(model, plan_from_rules(model, batch, RULES))
    mesh = make_mesh({"data": 2, "model": 4})
    options: Any = {"mesh": mesh, "batch": batch, "rules": RULES, "min_weight_size": 16}
    program = fsdp(planned, optax.sgd(1.0), loss_fn, **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))
