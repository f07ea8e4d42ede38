"""Devices that are not there."""


class Device:
    """Stands for a device of some process."""

    core_on_chip = 0

    def __init__(
        self, number, *, process=0, slice_index=0, coords=(0, 0, 0), kind="cpu", is_described=False
    ):
        self.id, self.process_index, self.slice_index = number, process, slice_index
        self.device_kind, self.coords = kind, coords
        self.platform = "tpu" if "TPU" in kind else "gpu" if "NVIDIA" in kind else kind
        self.local_hardware_id = None if is_described else number

    def __repr__(self):
        return f"{self.process_index}.{self.id}"
