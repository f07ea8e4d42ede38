"""The host counts along, so that no step waits for the counter of the one before."""

from manualpar.core.state.train_state import TrainState
from manualpar.strategies.diloco.builder import CountedStep, OuterStep


class Counter:
    """The counter of a state, on a device."""

    def __init__(self, number):
        self.number, self.reads = number, 0

    def __int__(self):
        self.reads += 1
        return self.number


def new_state(number):
    return TrainState(Counter(number), {}, None, (), None, {}, {})


def build(every):
    done = []

    def alone(state, batch):
        done.append(state.step.number + 1)
        return new_state(state.step.number + 1), {}

    def meet(state):
        done.append("meet")
        return new_state(state.step.number)

    outer = OuterStep(meet, lambda state: None)
    step = CountedStep(alone, (outer,), (), lambda n: None if n % every else 0, every)
    return step, outer, done


def test_the_counter_is_read_of_states_from_elsewhere_alone():
    step, _, done = build(3)
    state, reads = new_state(4), []
    for _ in range(4):
        before = state
        state, _ = step(state, None)
        reads.append(before.step.reads)
    assert reads == [1, 0, 0, 0]
    assert done == [5, 6, "meet", 7, 8]
    step(other := new_state(2), None)
    assert other.step.reads == 1
    assert done[-2:] == [3, "meet"]
    step(state, None)
    assert state.step.reads == 1  # Another state was trained meanwhile.
    assert done[-2:] == [9, "meet"]


def test_replicas_that_have_just_met_have_nothing_to_exchange():
    step, outer, done = build(3)
    met, _ = step(new_state(2), None)
    assert outer(met) is met
    assert done == [3, "meet"]
    outer(step(met, None)[0])
    assert done == [3, "meet", 4, "meet"]
