import threading

from manualpar.system.cluster.stopping import StopGate


def test_a_call_waits_while_the_processes_agree():
    gate, passed = StopGate(), threading.Event()
    gate.hold()
    thread = threading.Thread(target=lambda: (gate.should_stop(), passed.set()))
    thread.start()
    assert not passed.wait(0.2)
    gate.release(1)
    thread.join()
    assert passed.is_set()
