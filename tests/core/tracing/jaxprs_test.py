import jax
import jax.numpy as jnp
import pytest

from manualpar.core.tracing.jaxprs import all_equations

X = jnp.arange(8.0)


@pytest.mark.parametrize(
    ("function", "inside"),
    [
        (lambda x: jnp.searchsorted(x, x), "scan"),
        (lambda x: jnp.nonzero(x, size=3), "cumsum"),
        (lambda x: jnp.ldexp(x, 2), "select_n"),
    ],
    ids=["search", "nonzero", "ldexp"],
)
def test_what_functions_of_jax_are_written_in_is_seen(function, inside):
    """Since jax 0.12 some are one primitive until they are compiled."""
    jaxpr = jax.make_jaxpr(function)(X).jaxpr
    assert inside in {eqn.primitive.name for eqn in all_equations(jaxpr)}
