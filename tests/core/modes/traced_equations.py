"""The equations of a traced step."""

import jax


def equations(program):
    """Every equation of the step; once for all iterations of a loop."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    yield from walk(traced.jaxpr.jaxpr)
