"""Mode `manual`: the key of each device."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.core.modes.manual import Manual


@pytest.mark.parametrize("data_axes", [("data",), ("data", "context")], ids=str)
def test_keys_differ_between_all_devices_with_different_examples_and_only_there(
    devices8, data_axes
):
    sizes = {"data": 2, "context": 2, "model": 2}
    mode = Manual(make_mesh(sizes, devices8), data_axes)

    def on_device(key):
        return jax.random.bits(mode.fold(key), (1,))

    run = mode.run(on_device, in_specs=P(), out_specs=P(tuple(sizes)))
    bits = np.asarray(jax.jit(run)(jax.random.key(0))).reshape(2 ** len(data_axes), -1)
    np.testing.assert_array_equal(bits, np.broadcast_to(bits[:, :1], bits.shape))
    assert len(np.unique(bits)) == len(bits)
