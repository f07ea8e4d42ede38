"""Locks a folder in a bucket, by an object that the server lets only one process create.

Locks are numbered objects, `.lock-1`, `.lock-2`, and the highest number counts. A process that
wants the folder creates the object with the next number. If two processes try at once, the server
lets only one of them create the object (`If-None-Match` of S3, `ifGenerationMatch` of Google). The
owner of a lock writes its object again every `BEAT_SECONDS`, and marks it as free at the end. If
the object was not written for `LEASE_SECONDS`, by the clock of the waiting process, the owner is
considered dead, and the next number may be created. So no process deletes an object on which
another process relies, and the clocks of processes need not agree.

If an owner was only cut off for this time, it finds the higher number after it is back: `check`
raises an error before the owner writes anything else.
"""

import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from manualpar.system.storage.bucket_path import BucketPath
from manualpar.system.storage.requests import BucketError
from manualpar.system.storage.untrusted import parse_object

PREFIX = ".lock-"
BEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0
POLL_SECONDS = 0.5


class HeldError(Exception):
    """Another process has the lock; the message describes the process, and may be empty."""


@contextlib.contextmanager
def hold(
    folder: BucketPath, *, report: Callable[[str], None], remains: bool = True
) -> Iterator[Callable[[], None]]:
    """Locks a folder while the context lasts; yields a function `check`.

    `check` raises a `BucketError` if the lock was lost.

    Args:
      folder: The folder.
      report: Called with a sentence if a lock is taken over, or if the server does not support
        this lock.
      remains: Whether the lock's object stays after the context, marked as free. If not, the object
        is deleted. Two other processes may then get locks at that moment; `check` raises an error
        in the process with the lower number. So inside the context, check once more that no other
        process has written the folder.

    Raises:
      HeldError: Another process has the lock.
      BucketError: The folder cannot be read or written.
    """
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "nonce": secrets.token_hex(8),
    }
    number = _acquire(folder, owner, report)
    lock, ended = folder / f"{PREFIX}{number}", threading.Event()
    renewed = [time.monotonic()]

    def check() -> None:
        if time.monotonic() - renewed[0] > LEASE_SECONDS or max(_numbers(folder)) > number:
            raise BucketError(
                f"{folder}: this run could not renew its lock for so long that another run may "
                "have taken the folder; nothing more is written there"
            )

    def renew() -> None:
        beat = 0
        while not ended.wait(BEAT_SECONDS):
            began, beat = time.monotonic(), beat + 1
            with contextlib.suppress(BucketError):  # If errors last long, `check` raises an error.
                lock.write_bytes(_text(owner, beat=beat))
                renewed[0] = began

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(BucketError):  # Then the lock expires after `LEASE_SECONDS`.
            if remains:
                lock.write_bytes(_text(owner, is_free=True))
            else:
                for each in _numbers(folder):
                    if 0 < each <= number:
                        (folder / f"{PREFIX}{each}").delete()


def _acquire(folder: BucketPath, owner: dict[str, Any], report: Callable[[str], None]) -> int:
    """Creates the next lock once the last lock is free or abandoned; returns the new number."""
    numbers = _numbers(folder)
    last = max(numbers)
    if last:
        lock = folder / f"{PREFIX}{last}"
        found = _read(lock)
        if not found.get("is_free") and not _is_dead(found):
            _wait_for_end(lock)
            report(f"{folder} is taken over from a run that has ended{_show(found)}")
    mine = folder / f"{PREFIX}{last + 1}"
    if not mine.create(_text(owner)):
        raise HeldError(_show(_read(mine)))
    # A server that supports this lock refuses to create the object a second time.
    if mine.create(_text(owner, is_second=True)):
        mine.write_bytes(_text(owner))
        report(
            f"{folder} is not locked, because its server lets a second request create an object "
            "that exists: make sure that no other run writes there"
        )
    for number in numbers:
        if 0 < number < last:
            (folder / f"{PREFIX}{number}").delete()
    return last + 1


def _wait_for_end(lock: BucketPath) -> None:
    """Waits `LEASE_SECONDS`; raises a `HeldError` if the owner writes the lock in this time."""
    found, until = _read(lock), time.monotonic() + LEASE_SECONDS
    while time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        before, found = found, _read(lock)
        if found != before:
            if found.get("is_free"):
                return
            raise HeldError(_show(found))


def _numbers(folder: BucketPath) -> list[int]:
    """Returns the numbers of the existing locks, and 0 in addition."""
    names = (name.removeprefix(PREFIX) for name in folder.names() if name.startswith(PREFIX))
    return [0, *(int(name) for name in names if name.isdecimal())]


def _text(owner: dict[str, Any], **more: object) -> bytes:
    return json.dumps({**owner, **more}).encode()


def _read(lock: BucketPath) -> dict[str, Any]:
    try:
        return parse_object(lock.read_bytes())
    except FileNotFoundError:
        return {"is_free": True}  # The owner has deleted the lock.
    except BucketError:
        raise
    except ValueError:
        return {}  # An object with any other content counts as a lock too.


def _show(owner: dict[str, Any]) -> str:
    if not {"pid", "host", "since"} <= owner.keys():
        return ""
    return f": process {owner['pid']} on {owner['host']}, since {owner['since']}"


def _is_dead(owner: dict[str, Any]) -> bool:
    """Returns whether the owner was a process on this machine that has ended."""
    pid, machine = owner.get("pid"), owner.get("machine")
    if not machine or machine != _machine() or not isinstance(pid, int):
        return False
    return not Path(f"/proc/{pid}").exists()


def _machine() -> str:
    """Identifies this boot of the machine and its process id namespace; '' if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
