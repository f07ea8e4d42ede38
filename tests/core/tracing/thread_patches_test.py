"""Functions replaced by several threads at once."""

import inspect
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from manualpar.core.tracing.thread_patches import replaced_in_thread


class _Slow(type):
    """Lets other threads run before an attribute is set, which makes lost updates likely."""

    def __setattr__(cls, name, value):
        time.sleep(0)
        super().__setattr__(name, value)


def owner():
    class Owner(metaclass=_Slow):
        def name(self):
            return "old"

        def size(self):
            return 0

    return Owner


def answers(**given):
    return lambda name, old: lambda self: given[name]


@pytest.fixture
def hasty():
    """Changes between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_each_thread_has_its_own_in_contexts_that_begin_and_end_at_any_time(hasty):
    cls, targets = owner(), ("name", "size")
    before = [vars(cls)[name] for name in targets]

    def work(number):
        wrong = []
        for turn in range(300):
            given = {"name": f"{number}", "size": turn}
            with replaced_in_thread([(cls, name) for name in targets], answers(**given)):
                wrong += {(cls().name(), cls().size())} - {(given["name"], turn)}
            wrong += {(cls().name(), cls().size())} - {("old", 0)}
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[]] * 4
    assert [vars(cls)[name] for name in targets] == before


def test_a_thread_without_a_context_has_the_old_function_while_others_have_theirs():
    """The first to begin ends first, and a thread that never began calls all the while."""
    cls = owner()
    before, pool = cls.name, ThreadPoolExecutor(1)
    first = replaced_in_thread([(cls, "name")], answers(name="first"))
    second = replaced_in_thread([(cls, "name")], answers(name="second"))
    with pool:
        first.__enter__()
        pool.submit(second.__enter__).result()
        assert (cls().name(), pool.submit(cls().name).result()) == ("first", "second")
        with ThreadPoolExecutor(1) as other:
            assert other.submit(cls().name).result() == "old"
        first.__exit__(None, None, None)
        assert (cls().name(), pool.submit(cls().name).result()) == ("old", "second")
        pool.submit(second.__exit__, None, None, None).result()
    assert cls.name is before


def test_a_context_in_a_context_gets_the_function_of_the_outer_one():
    cls = owner()
    before = cls.name

    def louder(name, old):
        return lambda self: old(self) + "!"

    with replaced_in_thread([(cls, "name")], louder):
        with replaced_in_thread([(cls, "name")], louder):
            assert cls().name() == "old!!"
            assert inspect.signature(cls.name) == inspect.signature(before)
        assert cls().name() == "old!"
    assert cls.name is before


def test_an_error_in_making_a_replacement_leaves_nothing_behind():
    cls = owner()
    before = dict(vars(cls))

    def refuse_size(name, old):
        if name == "size":
            raise KeyError(name)
        return old

    with (
        pytest.raises(KeyError),
        replaced_in_thread([(cls, "name"), (cls, "size")], refuse_size),
    ):
        pass
    assert dict(vars(cls)) == before


def test_what_other_code_has_put_in_place_since_stays(monkeypatch):
    cls = owner()
    context = replaced_in_thread([(cls, "name")], answers(name="new"))
    context.__enter__()
    ours = cls.name
    monkeypatch.setattr(cls, "name", lambda self: ours(self) + ", wrapped")
    assert cls().name() == "new, wrapped"
    context.__exit__(None, None, None)
    assert cls().name() == "old, wrapped"
    monkeypatch.undo()
    assert cls().name() == "old"
