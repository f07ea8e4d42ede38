"""The difference between two ledgers as tables."""

import rich.console

from manualpar.inspect.budget import name_module
from manualpar.inspect.difference import Delta, Difference, Sent
from manualpar.training.inspection_report import describe_flops, print_table
from manualpar.watching.progress import describe_bytes, print_line

MOST_CHANGES = 40  # Of a table.


def print_difference(
    console: rich.console.Console, name: str, found: Difference, against: object
) -> None:
    """Prints what is different from a ledger written before."""
    if found.is_empty:
        print_line(console, f"{name}: no difference to {against}")
        return
    print_line(console, f"{name}: difference to {against}")
    print_table(
        console,
        ("", "purpose", "module", "kind", "axes", "before", "after", "bytes"),
        [
            (
                change.what,
                change.purpose,
                name_module(change.module),
                change.kind,
                change.axes,
                *_before_and_after(change.before, change.after),
                _signed(change.bytes_more, describe_bytes(abs(change.bytes_more))),
            )
            for change in found.collectives[:MOST_CHANGES]
        ],
    )
    if (left_out := len(found.collectives) - MOST_CHANGES) > 0:
        print_line(console, f"and {left_out} more, which are in the files")
    print_table(
        console,
        ("", "before", "after", "difference"),
        [
            (delta.name, _amount(delta, delta.before), _amount(delta, delta.after), _more(delta))
            for delta in found.deltas
        ],
    )


def _amount(delta: Delta, amount: float | None) -> str:
    """One of the numbers."""
    if amount is None:
        return "-"
    if delta.name.startswith("FLOPs"):
        return describe_flops(amount)
    return describe_bytes(amount) if delta.is_bytes else f"{amount:,.0f}"


def _more(delta: Delta) -> str:
    """What there is more, also in parts of what there was."""
    if delta.before == delta.after:
        return "="
    if delta.before is None or delta.after is None:
        return "-"
    more = delta.after - delta.before
    part = f" ({more / delta.before:+.1%})" if delta.before else ""
    return _signed(more, _amount(delta, abs(more))) + part


def _signed(more: float, text: str) -> str:
    """A number's text with the sign."""
    return f"+{text}" if more > 0 else f"-{text}" if more < 0 else "="


def _before_and_after(before: Sent | None, after: Sent | None) -> tuple[str, str]:
    """What was sent and what is: only as much of it as is needed to tell the two apart."""

    def words(sent: Sent | None, other: Sent | None) -> str:
        if sent is None:
            return "-"
        text = f"{sent.times:,} x {', '.join(sent.dtypes)}"
        if other and other.shapes != sent.shapes:
            text += " " + ", ".join("x".join(map(str, shape)) or "()" for shape in sent.shapes)
        return text

    return words(before, after), words(after, before)
