"""The former place of `manualpar.simulate_devices` and `manualpar.core.mesh.devices`."""

from manualpar.core.mesh.devices import DEFAULT_COUNT, MOST, describe_mesh, simulate_devices

__all__ = ["DEFAULT_COUNT", "MOST", "describe_mesh", "simulate_devices"]
