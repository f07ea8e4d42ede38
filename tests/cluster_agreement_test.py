import threading

from manualpar.cluster.agreement import StopAgreement, StopGate


def test_all_stop_in_the_call_after_the_largest_number():
    gates, agreement = [StopGate() for _ in range(3)], StopAgreement(3)
    for gate, calls in zip(gates, (4, 7, 5), strict=True):
        assert not any(gate.should_stop() for _ in range(calls))
    assert agreement.request()
    assert not agreement.request()
    answers = [agreement.answer(i, gate.hold()) for i, gate in enumerate(gates)]
    assert answers == [None, None, 8]
    for gate in gates:
        gate.release(8)
    for gate, calls in zip(gates, (4, 7, 5), strict=True):
        assert [gate.should_stop() for _ in range(9 - calls)] == [False] * (7 - calls) + [True] * 2


def test_a_call_waits_while_the_processes_agree():
    gate, passed = StopGate(), threading.Event()
    gate.hold()
    thread = threading.Thread(target=lambda: (gate.should_stop(), passed.set()))
    thread.start()
    assert not passed.wait(0.2)
    gate.release(1)
    thread.join()
    assert passed.is_set()
