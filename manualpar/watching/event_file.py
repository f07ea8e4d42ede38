"""An event file as TensorBoard reads it, of scalars and restarts.

`tensorboardX.SummaryWriter` hands events to a queue and a thread, which a killed process takes with
it, and its `RecordWriter` waits for the disk whenever it flushes, which takes longer than many a
step. Here they are with the operating system when a method returns.

A record is its length, the length's checksum, the event, the event's checksum
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2, summary_pb2

from manualpar.watching.durable_files import explained

NAME = "events.out.tfevents"  # TensorBoard looks for it.
FORMAT = "brain.Event:2"


class EventFile:
    """A new event file in a folder, whose name comes after those that are there."""

    def __init__(self, folder: Path) -> None:
        """Creates it.

        Raises:
          WriteError: It cannot be written.
        """
        # TensorBoard reads files in the order of their names. Two can be of the same second.
        earlier = len(list(folder.glob(f"{NAME}.*")))
        self._path = folder / f"{NAME}.{int(time.time()):010d}.{earlier:04d}.{socket.gethostname()}"
        with explained(self._path):
            self._file = self._path.open("wb", buffering=0)
        self._write(event_pb2.Event(file_version=FORMAT))

    def add_scalars(self, step: int, prefix: str, values: Mapping[str, float]) -> None:
        """Writes numbers of a step under the tags `<prefix>/<name>`.

        Raises:
          WriteError: The disk does not take them.
        """
        for name, value in values.items():
            scalar = summary_pb2.Summary.Value(tag=f"{prefix}/{name}", simple_value=value)
            summary = summary_pb2.Summary(value=[scalar])
            self._write(event_pb2.Event(step=step, summary=summary))

    def add_restart(self, step: int) -> None:
        """Has TensorBoard drop, of what earlier files hold, `step` and the steps after it.

        Raises:
          WriteError: The disk does not take it.
        """
        session_log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(step=step, session_log=session_log))

    def close(self) -> None:
        """Closes it; there is nothing left to write."""
        self._file.close()

    def _write(self, event: event_pb2.Event) -> None:
        """Writes an event."""
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = length + _checksum(length) + data + _checksum(data)
        with explained(self._path):
            while record:
                record = record[self._file.write(record) :]


def _checksum(data: bytes) -> bytes:
    """The checksum of a record: CRC-32C, turned and shifted."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
