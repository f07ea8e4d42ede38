import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest

from manualpar import Batch, TrainState


def make_state():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    return TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.5), rng=jax.random.key(1)
    )


def test_a_step_updates_counts_and_takes_the_new_key():
    state = make_state()
    grads = jax.tree.map(jnp.ones_like, state.params)
    new = state.apply_gradients(grads=grads, rng=jax.random.key(2))
    assert new.step == 1
    assert new.step.dtype == jnp.int32
    assert jnp.allclose(new.params["bias"], -0.5)
    assert new.rng == jax.random.key(2)
    assert new.collections == {}


def test_a_state_keeps_its_type_through_jit():
    state = make_state()
    once = jax.jit(lambda state: state)(state)
    assert [jax.typeof(x) for x in jax.tree.leaves(once)] == [
        jax.typeof(x) for x in jax.tree.leaves(state)
    ]


def test_a_batch_without_a_mask_has_no_leaf_for_it():
    assert len(jax.tree.leaves(Batch(jnp.ones(2), jnp.ones(2)))) == 2
    assert len(jax.tree.leaves(Batch(jnp.ones(2), jnp.ones(2), jnp.ones(2)))) == 3


def test_flax_writes_and_reads_typed_keys():
    tx = optax.add_noise(0.1, 0.5, key=jax.random.key(3))
    state = make_state().replace(opt_state=tx.init({}), collections={"batch_stats": {"a": 1.0}})
    data = flax.serialization.to_bytes(state)
    for target in (state, jax.eval_shape(lambda: state)):
        read = flax.serialization.from_bytes(target, data)
        assert jax.tree.structure(read) == jax.tree.structure(state)
        for x, y in zip(jax.tree.leaves(read), jax.tree.leaves(state), strict=True):
            assert jnp.asarray(x).dtype == jnp.asarray(y).dtype
            assert jnp.array_equal(x, y)
    with jax.default_prng_impl("rbg"):
        other = state.replace(rng=jax.random.key(0))
    with pytest.raises(ValueError, match=r"a key is key<fry>, expected key<rbg>.*jax_default_prng"):
        flax.serialization.from_bytes(other, data)
