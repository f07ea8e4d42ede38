import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.loss import call_loss

LOSSES = jnp.arange(8.0)


def test_what_it_returns_becomes_arrays():
    loss, metrics = call_loss(lambda: (LOSSES.mean(), {"loss": (LOSSES.sum(), 8), "n": (1.0, 2)}))
    assert loss == 3.5
    assert metrics["loss"][0] == 28
    assert metrics["loss"][1].dtype == jnp.int32
    assert metrics["n"][1] == 2


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (LOSSES.mean(), TypeError, "loss_fn returned a .*, expected the pair"),
        ((LOSSES, {}), ValueError, r"the loss is float32\[8\], expected a floating-point scalar"),
        ((jnp.int32(8), {}), ValueError, r"the loss is int32\[\], expected a floating-point"),
        ((jnp.complex64(8), {}), ValueError, r"the loss is complex64\[\]"),
        ((None, {}), ValueError, "the loss is a NoneType"),
        ((LOSSES.mean(), LOSSES.mean()), TypeError, "metrics is a .*, expected a dict"),
        ((LOSSES.mean(), {}), ValueError, r"metrics has \[\], expected a 'loss'"),
        (
            (LOSSES.mean(), {"lose": (LOSSES.sum(), 8)}),
            ValueError,
            r"metrics has \['lose'\].*Did you mean it by 'lose'",
        ),
        (
            (LOSSES.mean(), {"loss": LOSSES.sum()}),
            ValueError,
            r"metrics\['loss'\] is \(float32\[\]\), expected a pair of scalars",
        ),
        (
            (LOSSES.mean(), {"loss": (LOSSES.sum(), None)}),
            ValueError,
            r"metrics\['loss'\] is \(float32\[\], a NoneType\)",
        ),
        (
            (LOSSES.mean(), {"loss": (LOSSES.sum(), 8), "acc": (LOSSES, 8)}),
            ValueError,
            r"metrics\['acc'\] is \(float32\[8\], a int\), expected a pair of scalars",
        ),
        (
            (LOSSES.mean(), {"loss": (LOSSES.sum(), jnp.bfloat16(300))}),
            ValueError,
            "count of dtype bfloat16, which cannot count far",
        ),
        (
            (LOSSES.mean(), {"loss": (LOSSES.sum(), np.bool_(True))}),
            ValueError,
            "count of dtype bool",
        ),
    ],
)
def test_what_it_returns_is_checked(result, error, message):
    with pytest.raises(error, match=message):
        call_loss(lambda: result)


def test_an_error_about_constants_gets_a_note():
    def loss_fn():
        raise TypeError("... so the manual axis types do not match.")

    with pytest.raises(TypeError) as caught:
        call_loss(loss_fn)
    assert "jnp.zeros_like(x)" in caught.value.__notes__[0]

    def other():
        raise TypeError("something else")

    with pytest.raises(TypeError) as caught:
        call_loss(other)
    assert not hasattr(caught.value, "__notes__")
