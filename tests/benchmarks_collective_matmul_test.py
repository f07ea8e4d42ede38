"""The forms that are compared send the same bytes, and only rings permute."""

import jax
import jax.numpy as jnp

from benchmarks.collective_matmul import FORMS, make_program
from manualpar.core.mesh.mesh import make_mesh
from manualpar.inspect import count_by_kind, total_bytes, trace_collectives


def test_the_forms_send_the_same_bytes(devices8: list[jax.Device]) -> None:
    mesh = make_mesh({"data": 2, "model": 4}, devices=devices8)
    weights = [(jnp.ones((8, 32)), jnp.ones((32, 8)))]
    sent = {
        name: trace_collectives(
            make_program(form, mesh, 1, is_forward=False).trace(weights, jnp.ones((2, 8, 8)))
        )
        for name, form in FORMS.items()
    }
    assert len({total_bytes(collectives) for collectives in sent.values()}) == 1
    assert count_by_kind(sent["ring"]) == {"permute": 16}
    assert count_by_kind(sent["ring, joined"]) == {"permute": 16}
    assert count_by_kind(sent["all-reduces"]) == {"all_reduce": 2}
    assert sum(count_by_kind(sent["plain"]).values()) == 4
