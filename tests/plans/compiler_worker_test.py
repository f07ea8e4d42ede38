"""The worker traces a step that is not of this package, and refuses in a sentence what is none."""

import sys

import jax
import pytest

from manualpar.plans import compiler_worker
from manualpar.plans.compiler_worker import _trace_function

STEPS = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

def planned(devices, spec=P("data")):
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    return (lambda x: (x @ x.T).sum()), (x,)

def of_others(devices):
    return planned(devices[:4])

def without(devices):
    return (lambda x: 2 * x), (jax.ShapeDtypeStruct((8,), jnp.float32),)

def number(devices):
    return 3

def fails(devices):
    raise ValueError("no such layout")
"""


@pytest.fixture
def trace(tmp_path, monkeypatch, devices8):
    (tmp_path / "steps_to_plan.py").write_text(STEPS, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Simulated devices have no place in a network.
    monkeypatch.setattr(compiler_worker, "_facts_of_mesh", lambda mesh: {"mesh": dict(mesh.shape)})
    monkeypatch.delitem(sys.modules, "steps_to_plan", raising=False)

    def traced(name):
        return _trace_function({"function": name, "folder": str(tmp_path)}, devices8)

    return traced


def test_a_step_is_traced_with_the_facts_of_its_mesh(trace):
    traced, facts = trace("steps_to_plan:planned")
    assert isinstance(traced, jax.stages.Traced)
    assert (facts["mesh"], facts["order"]) == ({"data": 8}, ("data",))
    assert facts["dtype"] == "bfloat16"
    assert facts["flops_per_example"] > 0


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("not_there:planned", ValueError, "No module named 'not_there'"),
        ("steps_to_plan:plan", ValueError, "has no attribute 'plan'"),
        ("steps_to_plan:number", TypeError, "it returned a int, expected a pair: the step, and"),
        ("steps_to_plan:without", ValueError, "are on no mesh, expected NamedShardings on a mesh"),
        ("steps_to_plan:of_others", ValueError, "of the 8 devices that the function gets"),
        ("steps_to_plan:fails", ValueError, "no such layout"),
    ],
)
def test_what_is_no_step_is_refused(trace, name, error, words):
    with pytest.raises(error, match=words):
        trace(name)
