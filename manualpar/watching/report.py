"""The report at the end of a run, finished or not: `report.html` and `report.png` in its folder.

It is made of the files that the run has written, so it can be made again, of any run.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from manualpar.watching.durable_files import replace_file
from manualpar.watching.report_page import page_html
from manualpar.watching.report_picture import draw_run
from manualpar.watching.run_record import make_charts, read_run

PAGE_FILE = "report.html"
PICTURE_FILE = "report.png"


def write_report(
    workdir: Path,
    *,
    title: str,
    facts: Mapping[str, object],
    report: Callable[[str], None] = print,
) -> Path:
    """Writes the report of a run.

    Args:
      workdir: The folder of the run.
      title: Its heading.
      facts: What else to say, in a table of names and values, such as the mesh, the bytes on a
        device or how the run ended; one of several lines keeps them.
      report: Is told what of the files is left out because no run writes it.

    Returns:
      The page, which needs no other file. The picture lies beside it.

    Raises:
      WriteError: The report cannot be written.
    """
    run = read_run(workdir)
    for sentence in run.left_out:
        report(sentence)
    charts = make_charts(run)
    replace_file(workdir / PAGE_FILE, page_html(run, charts, title=title, facts=facts))
    draw_run(charts, workdir / PICTURE_FILE, title=title)
    return workdir / PAGE_FILE
