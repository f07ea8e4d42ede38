"""The report is one page that needs nothing else and opens in a browser, and a picture."""

import html
import html.parser
import io
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.colors
import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest

from manualpar.system.reports.pictures import SPLIT_COLORS
from manualpar.system.storage.durable_files import WriteError
from manualpar.training.monitoring.report import draw_chart, draw_charts, write_report
from manualpar.training.monitoring.run_files import RunWriter
from manualpar.training.monitoring.run_record import Chart

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chromium-headless-shell",
    "chrome-headless-shell",
)
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(html.parser.HTMLParser):
    """Reads a page, and refuses tags that are not closed and whatever would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice"
        assert not {"src", "href", "srcset", "data", "action"} & set(names)
        assert dict(attrs).get("xlink:href", "#").startswith("#")
        assert not any(name.startswith("on") for name in names)
        assert tag not in ("script", "link", "iframe", "object", "base")
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str, name: str | None = None) -> int:
        """How many elements there are, by the class if it is given."""
        return sum(t == tag and name in (None, attrs.get("class")) for t, attrs in self.tags)


def _write_run(workdir: Path) -> None:
    """A run with everything in it: gaps, an evaluation, a test, a resume, many points."""

    def write(writer: RunWriter, steps: range) -> None:
        for step in steps:
            loss = math.nan if step == 900 else 5 * math.exp(-step / 500) + math.sin(step) / 9
            rates = {"tokens_per_second": 1e5 + step, "mfu": 0.4} if step > 1 else {}
            metrics = {"loss": loss, "bits_per_byte": loss / math.log(2)}
            writer.write(step, "train", metrics, throughput=rates)
            if step % 1000 == 0:
                writer.write(step, "eval", {"loss": loss + 0.1})

    config = {"seed": 1, "data": {"source": "<script>alert(1)</script>"}, "text": ""}
    with RunWriter(workdir, config=config) as writer:
        write(writer, range(1, 2001))
        place = writer.place()
        write(writer, range(2001, 2101))
    with RunWriter(workdir, config=config, place=place, step=2000) as writer:
        write(writer, range(2001, 4001))
        writer.write(4000, "test", {"loss": 0.25})


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)  # 4,000 waits for the disk take long.
        _write_run(workdir)
    facts = {"mesh": "data=8 & more", "bytes on a device": 1234, "layout": "a  b\n1  2"}
    return write_report(workdir, title="A run <of> $x$", facts=facts)


def test_the_page_is_well_formed_and_has_it_all(report):
    source = report.read_text(encoding="utf-8")
    page = Page(source)
    assert "://" not in re.sub(r'xmlns(:xlink)?="http://www.w3.org/[^"]*"', "", source)
    assert not re.search(r"url\((?!#)|@import", source)
    assert len(source) < 400_000, "thousands of points were not thinned out"
    text = "\n".join(page.text)
    for words in ("A run <of> $x$", "data=8 & more", "1234", "<script>alert(1)</script>"):
        assert words in text
    (label,) = [attrs["aria-label"] for tag, attrs in page.tags if tag == "figure"]
    assert label == "By step: Loss, Bits per byte, Throughput, Model FLOPs utilization"
    assert page.count("svg") == 1
    assert len(re.findall(r'id="axes_\d+"', source)) == 4
    assert page.count("pre") == 1
    assert "0.25" in text
    assert "prefers-color-scheme: dark" in source
    rows = re.findall(r"<tr>(.*?)</tr>", source)
    (resumed,) = [row for row in rows if ">2,000<" in row]
    assert ">200<" in resumed, "the lines that were cut off, of both files"


def test_the_picture_is_one(report):
    picture = matplotlib.image.imread(report.with_name("report.png"))[::4, ::4]
    assert picture.shape[1] > 300
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50


def test_a_folder_whose_name_is_no_text_has_its_picture():
    _, picture = draw_charts([], title="runs/\udcff")
    assert matplotlib.image.imread(io.BytesIO(picture)).size


def _browser() -> str:
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip(f"none of {', '.join(BROWSERS)} is on the PATH")


def _open(browser: str, page: Path, *options: str) -> subprocess.CompletedProcess:
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'browser'}",
        "--window-size=1000,1600",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_the_page_opens_in_a_browser_without_an_error(report):
    browser = _browser()
    opened = _open(browser, report, "--dump-dom")
    assert "CONSOLE" not in opened.stderr, "the browser complains about the page"
    assert opened.stdout.count("<svg") == 1
    assert "A run &lt;of&gt; $x$" in opened.stdout
    assert "<script>" not in opened.stdout
    picture = report.with_name("screenshot.png")
    _open(browser, report, f"--screenshot={picture}")
    pixels = matplotlib.image.imread(picture)[..., :3]
    colors = [matplotlib.colors.to_rgb(SPLIT_COLORS[split]) for split in ("train", "eval")]
    counts = [(np.abs(pixels - color).max(-1) < 0.02).sum() for color in colors]
    # Without the lines there are the words of the legend and the points.
    assert counts[0] > 1000
    assert counts[1] > 100


def test_a_browser_refuses_what_the_page_does_not_hold(report):
    browser = _browser()
    page = report.with_name("with_a_script.html")
    body = '<script>document.title = "changed"</script>'
    page.write_text(report.read_text(encoding="utf-8").replace("</body>", f"{body}</body>"))
    opened = _open(browser, page, "--dump-dom")
    assert "CONSOLE" in opened.stderr, "what the browser says is not seen here"
    assert "<title>A run" in opened.stdout


@pytest.mark.parametrize(
    ("records", "num_charts"),
    [
        ([], 0),
        ([(1, "train", {"loss": math.nan})], 2),
        (
            [
                (0, "eval", {"loss": 2.5, "accuracy": 1.0}),
                (10**9, "eval", {"loss": 2.5, "accuracy": 1.0 + 1e-15}),
                (1, "other", {"loss": 1e30, "z": 1.0}),
                (2, "other", {"loss": -1e-30}),
            ],
            3,
        ),
        ([(1, "train", {"z": 1.0})], 1),
    ],
    ids=["nothing", "not finite", "strange", "unknown"],
)
def test_little_and_strange_data_make_a_report_too(tmp_path, records, num_charts):
    with RunWriter(tmp_path, config={}) as writer:
        for record in records:
            writer.write(*record, throughput={"examples_per_second": 0.0})
    source = write_report(tmp_path, title="t", facts={}).read_text(encoding="utf-8")
    assert Page(source).count("svg") == 1
    assert source.count('id="axes_') == num_charts
    assert ("the run reported nothing" in source) == (not records)
    assert (tmp_path / "report.png").stat().st_size > 1000


def _lines(chart: Chart) -> list:
    axes = matplotlib.figure.Figure().subplots()
    draw_chart(axes, chart)
    return axes.get_lines()


@pytest.mark.parametrize("last", [1, 2, 7, 40_000])
def test_steps_are_whole_numbers(last):
    figure = matplotlib.figure.Figure()
    axes = figure.subplots()
    draw_chart(axes, Chart("t", "", {"train": [(0, 1.0), (last, 2.0)]}))
    figure.draw_without_rendering()
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert len(set(ticks)) == len(ticks) >= 2, "a number is there twice"
    assert all(re.fullmatch("[-−]?[0-9,]+", tick) for tick in ticks)
    assert {"0", "40,000"} <= {*ticks} or last < 40_000


def test_gaps_and_resumes_are_marked_and_a_point_alone_is_seen():
    few = [(1, 2.0), (2, None), (3, 4.0), (4, 4.5)]
    line, gaps, resumed, again = _lines(Chart("t", "", {"train": few}, resumes=[1, 3]))
    assert (line.get_marker(), line.get_markevery()) == ("o", None)
    assert line.get_color() == SPLIT_COLORS["train"]
    np.testing.assert_array_equal(line.get_ydata(), [2.0, math.nan, 4.0, 4.5])
    assert (gaps.get_marker(), gaps.get_label(), list(gaps.get_xdata())) == ("x", "not finite", [2])
    assert [list(each.get_xdata()) for each in (resumed, again)] == [[1, 1], [3, 3]]
    many = [(step, None if step in (5, 7) else 1.0) for step in range(100)]
    assert _lines(Chart("t", "", {"other": many}))[0].get_markevery() == [6]


@pytest.mark.parametrize(("smallest", "scale"), [(0.05, "log"), (1.0, "linear"), (0.0, "linear")])
def test_a_loss_of_several_magnitudes_has_a_log_axis(smallest, scale):
    axes = matplotlib.figure.Figure().subplots()
    points = {"train": [(0, 4000.0 * smallest or 2.0), (1, smallest)]}
    draw_chart(axes, Chart("t", "", points, is_log=smallest != 1.0))
    assert axes.get_yscale() == scale
    axes = matplotlib.figure.Figure().subplots()
    draw_chart(axes, Chart("t", "", {"train": [(0, 20_000.0), (1, 0.0)]}))
    axes.figure.draw_without_rendering()
    assert {"0", "20,000"} <= {label.get_text() for label in axes.get_yticklabels()}


def test_a_long_line_is_thinned_out():
    (line,) = _lines(Chart("t", "", {"eval": [(step, step % 7) for step in range(10_000)]}))
    assert 500 <= len(line.get_xdata()) <= 1200


def test_a_report_without_matplotlib_is_a_page_that_says_what_to_install(tmp_path, monkeypatch):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(1, "train", {"loss": 0.125})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = []
    page = write_report(tmp_path, title="t", facts={}, report=said.append).read_text()
    sentence = "a report with charts needs matplotlib, which is not installed: pip install "
    assert said == [f"{sentence}'manualpar[plots]'"]
    assert f"<p>{html.escape(said[0])}</p>" in page
    assert "0.125" in page
    assert not (tmp_path / "report.png").exists()


def test_a_report_that_cannot_be_written_is_a_sentence(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(1, "train", {"loss": 1.0})
    (tmp_path / "report.html").mkdir()
    with pytest.raises(WriteError, match=r"written: .*/report.html: Is a directory; name another"):
        write_report(tmp_path, title="t", facts={})


def test_a_report_says_what_it_leaves_out_and_draws_any_number(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(1, "train", {"loss": 1e300}, throughput={"examples_per_second": 5e-324})
        writer.write(2**53 - 1, "train", {"loss": -1e300})
    with (tmp_path / "throughput.jsonl").open("ab") as file:
        file.write(b"<\xff>\n")
    (tmp_path / "config.json").write_text("[" * 100_000)
    said = []
    page = write_report(tmp_path, title="t", facts={}, report=said.append).read_text()
    assert len(said) == 2
    assert "left out 1 of the 2 lines of" in said[1]
    assert "config.json, which is nested deeper than 64 levels</p>" in page
