import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

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
