"""The report is one page that needs nothing else and opens in a browser, and a picture."""

import html.parser
import math
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from manualpar.watching.durable_files import WriteError
from manualpar.watching.report import write_report
from manualpar.watching.report_chart import chart_svg, format_tick, ticks
from manualpar.watching.report_picture import draw_run
from manualpar.watching.run_record import Chart
from manualpar.watching.writers import RunWriter

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
        assert not {"src", "href", "xlink:href", "srcset", "data", "action"} & set(names)
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
    _write_run(workdir)
    facts = {"mesh": "data=8 & more", "bytes on a device": 1234, "layout": "a  b\n1  2"}
    return write_report(workdir, title="A run <of> $x$", facts=facts)


def test_the_page_is_well_formed_and_has_it_all(report):
    source = report.read_text(encoding="utf-8")
    page = Page(source)
    assert "://" not in source
    assert not re.search(r"url\(|@import", source)
    assert len(source) < 200_000, "thousands of points were not thinned out"
    text = "\n".join(page.text)
    for words in ("A run <of> $x$", "data=8 & more", "1234", "<script>alert(1)</script>"):
        assert words in text
    for words in ("Loss", "Bits per byte", "Throughput", "Model FLOPs utilization"):
        assert words in text
    assert page.count("svg") == 4
    assert page.count("path", "gap") == 2, "the loss that is not finite, in both charts of it"
    assert page.count("line", "resume") == 4
    assert page.count("pre") == 1
    assert page.count("title") > 1
    assert {"train", "eval", "test"} <= {a.get("class") for t, a in page.tags if t == "g"}
    assert "0.25" in text
    assert "prefers-color-scheme: dark" in source
    rows = re.findall(r"<tr>(.*?)</tr>", source)
    (resumed,) = [row for row in rows if ">2,000<" in row]
    assert ">200<" in resumed, "the lines that were cut off, of both files"


def test_points_are_inside_of_their_charts(report):
    page = Page(report.read_text(encoding="utf-8"))
    for tag, attrs in page.tags:
        if tag == "polyline":
            places = [tuple(map(float, pair.split(","))) for pair in attrs["points"].split()]
            assert all(0 <= x <= 720 and 0 <= y <= 300 for x, y in places)
            assert len(places) <= 1200


def test_the_picture_is_one(report):
    picture = matplotlib.image.imread(report.with_name("report.png"))[::4, ::4]
    assert picture.shape[1] > 500
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50


def test_a_folder_whose_name_is_no_text_has_its_picture(tmp_path):
    draw_run([], tmp_path / "report.png", title="runs/\udcff")
    assert matplotlib.image.imread(tmp_path / "report.png").size


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
    assert opened.stdout.count("<svg") == 4
    assert "A run &lt;of&gt; $x$" in opened.stdout
    assert "<script>" not in opened.stdout
    picture = report.with_name("screenshot.png")
    _open(browser, report, f"--screenshot={picture}")
    pixels = matplotlib.image.imread(picture)[..., :3]
    blue, orange = np.array([0, 0x72, 0xB2]) / 255, np.array([0xC0, 0x4A, 0]) / 255
    counts = [(np.abs(pixels - color).max(-1) < 0.02).sum() for color in (blue, orange)]
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
        ([(1, "train", {"loss": 2.5})], 2),
        ([(1, "train", {"loss": math.nan})], 2),
        ([(0, "eval", {"loss": 2.5}), (10**9, "eval", {"loss": 2.5})], 2),
        ([(1, "other", {"loss": 1e30}), (2, "other", {"loss": -1e-30})], 2),
        ([(1, "train", {"loss": 1.0}), (2, "train", {"loss": 1.0 + 1e-15})], 2),
        ([(1, "train", {"accuracy": 0.0, "z": 1.0})], 2),
        ([(1, "train", {"z": 1.0})], 1),
    ],
    ids=str,
)
def test_little_and_strange_data_make_a_report_too(tmp_path, records, num_charts):
    with RunWriter(tmp_path, config={}) as writer:
        for record in records:
            writer.write(*record, throughput={"examples_per_second": 0.0})
    page = Page(write_report(tmp_path, title="t", facts={}).read_text(encoding="utf-8"))
    assert page.count("svg") == num_charts
    assert page.count("p") == (not records)
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_a_point_alone_is_seen():
    chart = Chart("t", "", {"train": [(1, 2.0), (2, None), (3, 4.0), (4, 4.5)]})
    svg = chart_svg(chart)
    assert svg.count("<circle") == 3
    (line,) = re.findall(r'<polyline points="(.*?)"', svg)
    assert len(line.split()) == 2
    assert "step 2: not finite" in svg


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 4000, [0, 1000, 2000, 3000, 4000]),
        (1.31, 6.3, [1, 2, 3, 4, 5, 6, 7]),
        (-3, 3, [-4, -2, 0, 2, 4]),
    ],
)
def test_ticks_are_round_and_around_the_data(low, high, expected):
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_ticks_are_written_short():
    assert [format_tick(x) for x in (0.0, 0.30000000000000004, 12500.0, 1e9, 2e-5, -0.5)] == [
        "0",
        "0.3",
        "12,500",
        "1e+09",
        "2e-05",
        "-0.5",
    ]


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
