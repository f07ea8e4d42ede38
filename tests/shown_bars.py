"""Records the bars of bytes that code shows, in place of a terminal."""

import contextlib


def record_bars(monkeypatch, module):
    """Replaces `bytes_bar` in a module; returns the list of (work, total, bytes shown) it fills."""
    bars = []

    @contextlib.contextmanager
    def bytes_bar(work, total, *, is_shown=True):
        shown = []
        if is_shown:
            bars.append((work, total, shown))
        yield lambda done, text="": shown.append(done)

    monkeypatch.setattr(module, "bytes_bar", bytes_bar)
    return bars
