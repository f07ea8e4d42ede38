"""Devices are simulated where that was asked for or the CPU is all there is."""

import os
import subprocess
import sys
import textwrap

import jax
import pytest

from manualpar.core.mesh.mesh import describe_mesh, simulate_devices
from tests.paths import ROOT


@pytest.mark.slow
def test_the_number_of_devices_is_the_one_asked_for():
    # A process of its own: the number is fixed once there are devices.
    script = """
        import os
        import jax
        from manualpar.core.mesh.mesh import simulate_devices

        def chosen():
            return jax.config.values["jax_num_cpu_devices"], jax.config.values["jax_platforms"]

        platforms = jax.config.values["jax_platforms"]
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
        simulate_devices(None)
        assert chosen() == (-1, platforms), "XLA_FLAGS already says how many"
        del os.environ["XLA_FLAGS"]
        simulate_devices(None)
        assert chosen() == (8, platforms), chosen()
        jax.config.update("jax_num_cpu_devices", 5)
        simulate_devices(None)
        assert chosen() == (5, platforms), "the program already says how many"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
        simulate_devices(2)
        assert chosen() == (2, "cpu"), chosen()
        assert len(jax.devices()) == 2
    """
    run_alone(script)


STARTED = """
    import os
    import jax
    from manualpar import make_mesh
    from manualpar.core.mesh.mesh import simulate_devices

    def message(function, *args):
        try:
            function(*args)
        except (RuntimeError, ValueError) as error:
            assert "restart the process (in a notebook, the kernel)" in str(error), error
            assert "jax.config.update('jax_num_cpu_devices', 8)" in str(error), error
            return f"{type(error).__name__}: {error}"
        return ""
"""


@pytest.mark.slow
def test_a_process_that_has_started_with_one_device_says_what_to_restart():
    run_alone(
        STARTED
        + """
    assert jax.numpy.zeros(1) == 0  # JAX has its devices now.
    assert "RuntimeError: simulate_devices: it is too late for 8" in message(simulate_devices, 8)
    assert "it is too late for 8 devices" in message(simulate_devices, None)
    simulate_devices(1)  # As it is.
    assert "needs 8 devices, got 1. JAX has started with 1 cpu" in message(make_mesh, {"data": 8})
    assert make_mesh({"data": -1}).size == 1  # Nobody has asked for more.
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        os.environ[name] = "8" if "NUM" in name else "--xla_force_host_platform_device_count=8"
        assert "asks for 8 devices, got 1" in message(make_mesh, {"data": -1})
        assert make_mesh({"data": -1}, jax.devices()).size == 1
        del os.environ[name]
    """
    )


@pytest.mark.slow
def test_a_process_that_has_started_with_enough_devices_has_nothing_to_say():
    run_alone(
        STARTED
        + """
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    assert jax.device_count() == 8
    simulate_devices(8)
    simulate_devices(None)
    assert make_mesh({"data": -1}).size == 8
    """
    )


def run_alone(script):
    """Runs a program in a process of its own, where nobody has said how many devices there are."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def test_a_mesh_is_described_in_a_line(devices8):
    mesh = jax.make_mesh((2, 4), ("replica", "data"), devices=devices8)
    assert describe_mesh(mesh) == "replica=2, data=4 on 8 simulated cpu devices"
    alone = jax.make_mesh((1,), ("data",), devices=devices8[:1])
    assert describe_mesh(alone) == "data=1 on 1 cpu device"


def test_the_former_place_has_the_same_functions():
    with pytest.warns(DeprecationWarning, match="manualpar.core.mesh.mesh"):
        from manualpar.training import devices

    assert devices.simulate_devices is simulate_devices
    assert devices.describe_mesh is describe_mesh
