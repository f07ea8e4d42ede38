"""How often to save, and which share of the time trains, on devices that fail.

Devices fail independently and at random, one of `n` every `M = device_mtbf / n` seconds. After a
failure the run starts again, restores the newest checkpoint and computes again what came after it.
With a save of `d` seconds after every `t` seconds of training, and `R` seconds from a failure until
training goes on, the expected time for `t` seconds of training is

    T(t) = M exp(R / M) (exp((t + d) / M) - 1)

in which saves, restarts and what is computed again fail like everything else (Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006,
https://doi.org/10.1016/j.future.2004.11.016). `T(t) / t` is least where
`(1 - t / M) exp((t + d) / M) = 1`, whatever `R` is. Young's estimate and Daly's are closed forms
for that interval.

A save here takes up the loop only while the state is copied, `blocked` seconds, and is complete
`background` seconds later. A failure loses what was computed since the last complete save was
begun, which is `background` seconds more than Daly's model says. They are counted in `R`.

Failures that come together, devices that are merely slow, and people who have to wake up are not
in the model.
"""

import dataclasses
import math

# What was measured of one process with two cores on 2026-11-22, by benchmarks/checkpoint_rates.py
# of commit 14127f0:
# seconds that do not depend on the bytes, and bytes a second.
BLOCKED = (0.02, 7.9e9)
BACKGROUND = (0.02, 0.51e9)
RESTORE = (0.0, 0.41e9)


@dataclasses.dataclass(frozen=True)
class CheckpointCosts:
    """What a checkpoint and a failure cost, in seconds.

    Attributes:
      blocked: The time that the training loop waits for a save.
      background: The time from there until the checkpoint is complete.
      restore: The time from the start of restoring to a state on the devices.
      restart: The time from a failure until restoring begins: until it is noticed, and the devices
        are replaced, and all processes run again and have compiled.
    """

    blocked: float
    background: float
    restore: float
    restart: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value!r}, expected seconds, at least 0.")

    @property
    def recovery(self) -> float:
        """From a failure until training goes on, and what an unfinished save loses: `R`."""
        return self.restart + self.restore + self.background


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Where the time of a run goes, in shares of it.

    Attributes:
      interval: Seconds of training between two saves.
      training: The share that trains, and is not lost.
      saving: The share in which the loop waits for saves.
      repeating: The share in which it computes again what a failure lost.
      recovering: The share in which it restarts and restores.
    """

    interval: float
    training: float
    saving: float
    repeating: float
    recovering: float


def mean_time_between_failures(device_mtbf: float, num_devices: int) -> float:
    """The mean time between two failures in a run on so many devices; units are kept."""
    if not device_mtbf > 0 or num_devices < 1:
        raise ValueError(
            f"device_mtbf is {device_mtbf!r} and num_devices {num_devices!r}, expected a positive "
            "time and a positive number."
        )
    return device_mtbf / num_devices


def young_interval(blocked: float, mtbf: float) -> float:
    """Young's first-order estimate of the best interval (https://doi.org/10.1145/361147.361115)."""
    return math.sqrt(2 * blocked * mtbf)


def daly_interval(blocked: float, mtbf: float) -> float:
    """Daly's higher-order estimate of the best interval, see the module."""
    if blocked >= 2 * mtbf:
        return mtbf
    ratio = blocked / (2 * mtbf)
    return young_interval(blocked, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked


def best_interval(blocked: float, mtbf: float) -> float:
    """The interval that loses least, to the precision of floats; 0 if saves cost nothing."""
    low, high = 0.0, 1.0  # In parts of the time between failures.
    for _ in range(100):
        middle = (low + high) / 2
        if math.log1p(-middle) + middle + blocked / mtbf > 0:
            low = middle
        else:
            high = middle
    return low * mtbf


def expected_seconds(interval: float, costs: CheckpointCosts, mtbf: float) -> float:
    """The expected time for `interval` seconds of training, `T(t)`; infinite if there is no end."""
    try:
        tries = math.expm1((interval + costs.blocked) / mtbf)
        return mtbf * math.exp(costs.recovery / mtbf) * tries
    except OverflowError:
        return math.inf


def goodput(interval: float, costs: CheckpointCosts, mtbf: float) -> Goodput:
    """Where the time of a run goes that saves after every so many seconds of training.

    Raises:
      ValueError: The interval is not positive, or shorter than a save is in the background: the
        next save would wait for it.
    """
    if not interval > 0 or interval < costs.background:
        raise ValueError(
            f"interval is {interval!r} s, expected at least the {costs.background:.3g} s that a "
            "save takes in the background, and more than 0."
        )
    whole = expected_seconds(interval, costs, mtbf)
    failures = math.expm1((interval + costs.blocked) / mtbf)
    recovering = failures * mtbf * math.expm1(costs.recovery / mtbf)
    unfinished = recovering * costs.background / costs.recovery if costs.recovery else 0.0
    repeating = mtbf * failures - interval - costs.blocked + unfinished
    shares = (interval, costs.blocked, repeating, recovering - unfinished)
    return Goodput(interval, *(part / whole for part in shares))


def scaled_costs(
    *,
    state_bytes: float,
    held_bytes: float,
    num_processes: int,
    restart_seconds: float,
    storage_bandwidth: float = math.inf,
) -> CheckpointCosts:
    """The costs of a large run, from what one process took here.

    Every process writes an equal part of the state and reads what its devices hold, all at once,
    at the rates that were measured, unless the file system is slower than all of them together.

    Args:
      state_bytes: Bytes of the whole state.
      held_bytes: Bytes of what the devices of one process hold of it.
      num_processes: How many processes write.
      restart_seconds: Seconds from a failure until restoring begins.
      storage_bandwidth: Bytes a second that the file system takes or gives, in all.
    """
    part = state_bytes / num_processes
    share = storage_bandwidth / num_processes

    def seconds(measured: tuple[float, float], size: float, *, limit: float = math.inf) -> float:
        start, rate = measured
        return start + size / min(rate, limit)

    return CheckpointCosts(
        blocked=seconds(BLOCKED, part),
        background=seconds(BACKGROUND, part, limit=share),
        restore=seconds(RESTORE, held_bytes, limit=share),
        restart=restart_seconds,
    )


def longest_recovery(training: float, *, blocked: float, mtbf: float) -> float:
    """The longest time from a failure to training with which so large a share still trains.

    Saves come as often as is best.

    Raises:
      ValueError: No recovery is short enough, or the share is not between 0 and 1.
    """
    if not 0 < training < 1:
        raise ValueError(f"training is {training!r}, expected a share between 0 and 1.")
    interval = best_interval(blocked, mtbf)
    at_once = CheckpointCosts(blocked, 0.0, 0.0, 0.0)
    recovery = mtbf * math.log(interval / training / expected_seconds(interval, at_once, mtbf))
    if recovery < 0:
        raise ValueError(
            f"training is {training!r}, expected at most "
            f"{interval / expected_seconds(interval, at_once, mtbf):.4f}: saves take the rest."
        )
    return recovery
