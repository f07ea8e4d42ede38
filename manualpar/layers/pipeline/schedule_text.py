"""A schedule as text: a line of F and a line of B for each stage, and a column for each tick."""

import string

from manualpar.layers.pipeline.schedule_table import Table


def describe_schedule(table: Table, *, width: int = 100) -> str:
    """Draws a table, below a summary of the table's bubble and slots.

    A number is a microbatch. If a stage has several chunks, a letter after the number is the chunk.
    `a` is the chunk nearest to the input of the model.

    Args:
      table: The table.
      width: The maximum number of characters in a line. Ticks that do not fit follow below.
    """
    rows = {}
    for stage in range(table.num_stages):
        for kind in ("forward", "backward") if table.has_backward else ("forward",):
            places = zip(
                table.rows[f"{kind}_microbatch"][:, stage].tolist(),
                table.rows[f"{kind}_chunk"][:, stage].tolist(),
                strict=True,
            )
            name = f"stage {stage} F" if kind == "forward" else " B"
            rows[stage, name] = ["." if m < 0 else describe_place(table, m, c) for m, c in places]
    ticks = list(map(str, range(table.num_ticks)))
    size = 1 + max(len(text) for row in (ticks, *rows.values()) for text in row)
    start = max(len(name) for _, name in rows)
    lines = [*_summary(table)]
    step = max((width - start) // size, 1)
    for first in range(0, table.num_ticks, step):
        lines.append("")
        for name, row in (("tick", ticks), *((name, row) for (_, name), row in rows.items())):
            shown = "".join(text.rjust(size) for text in row[first : first + step])
            lines.append((name.rjust if name == " B" else name.ljust)(start) + shown)
    return "\n".join(lines)


def describe_place(table: Table, microbatch: int, chunk: int) -> str:
    """Writes a microbatch in a chunk as `3`, or `3b` if a stage has several chunks."""
    if table.chunks == 1:
        return str(microbatch)
    letters = string.ascii_lowercase
    return f"{microbatch}{letters[chunk] if table.chunks <= len(letters) else f'.{chunk}'}"


def _summary(table: Table) -> tuple[str, ...]:
    chunks = "" if table.chunks == 1 else f" of {table.chunks} chunks"
    in_flight = " ".join(map(str, table.in_flight))
    return (
        f"{table.name}: {table.num_stages} stages{chunks}, {table.num_microbatches} microbatches, "
        f"{table.num_ticks} ticks, bubble {table.bubble:.1%}",
        f"slots: {table.activation_slots} for inputs, {table.gradient_slots} for gradients; "
        f"inputs in flight by stage: {in_flight}",
    )
