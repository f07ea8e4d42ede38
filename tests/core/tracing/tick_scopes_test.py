import numpy as np

from manualpar.core.tracing.scopes import TickRuns, ticks_run, ticks_scope


def test_how_often_stages_run_something():
    is_run = np.array([[True, False], [True, True], [False, False], [True, False]])
    scope = ticks_scope(is_run)
    assert scope == "ticks_3_1_in_3_of_4"
    assert ticks_run(scope) == ticks_run(f"jit(f)/while/body/{scope}") == TickRuns((3, 1), 3, 4)
    assert ticks_run(ticks_scope(is_run[:, :1])) == TickRuns((3,), 3, 4)
    for foreign in ("", f"{scope}/dense", f"my_{scope}", "ticks_in_3_of_4", "ticks_a_in_3_of_4"):
        assert ticks_run(foreign) is None
