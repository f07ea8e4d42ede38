"""Results are files that benchmarks write; pictures and the page show their figures."""

import json
import re

import pytest

from benchmarks import pictures
from benchmarks.results import Conditions, Table, read_tables, write_results
from tests.paths import ROOT

PAGE = ROOT / "benchmarks" / "README.md"
MOST_WORDS = 3000
CONDITIONS = Conditions(
    "python -m benchmarks.x", "2026-11-28 12:00", {}, "a processor", 2, (0, 0, 0)
)


def test_a_result_has_the_tables_of_its_report(tmp_path):
    path = tmp_path / "result.json"
    lines = [
        "## A",
        "",
        "text",
        "| a | b, c |\n| --- | ---: |\n| 1 | 2 (3) |",
        "",
        "### B",
        "|x|",
        "|-|",
    ]
    write_results(CONDITIONS, lines=lines, data={"more": 1}, output=None, json_output=path)
    read = json.loads(path.read_text())
    assert read["conditions"]["command"] == "python -m benchmarks.x"
    assert read["more"] == 1
    tables = [Table(**table) for table in read["tables"]]
    assert tables == [Table("A", ["a", "b, c"], [["1", "2 (3)"]]), Table("B", ["x"], [])]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_the_figures_of_its_file(name):
    pytest.importorskip("matplotlib", reason="pip install -e '.[plots]'")
    picture = pictures.make_picture(name)
    drawn = pictures.draw(picture).decode()
    committed = (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert len(picture.bars) > 5
    for text in (picture.title, *(bar.text for bar in picture.bars)):
        assert text in drawn
        assert text in committed, f"python -m benchmarks.pictures {name}"
    assert len(committed) < 30_000
    page = ROOT / "README.md" if name == "one_step" else PAGE
    assert f"docs/measured/{name}.svg" in page.read_text(encoding="utf-8")


def test_the_figures_of_the_pages_tables_are_in_the_files_that_it_names():
    checked = 0
    for section in re.split(r"(?m)^##+ ", PAGE.read_text(encoding="utf-8")):
        names = re.findall(r"\(\.\./docs/measured/(\w+)\.json\)", section)
        known = {
            figure
            for name in names
            for figure in _figures((pictures.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        }
        for table in read_tables(section.splitlines()) if names else []:
            for row in table.rows:
                if "](" not in row[-1]:  # The others say where they are from.
                    unknown = [x for cell in row[1:] for x in _figures(cell) if x not in known]
                    assert unknown == [], f"{section.splitlines()[0]}: {row[0]}"
                    checked += len(row) - 1
    assert checked > 200


def _figures(text: str) -> list[str]:
    return re.findall(r"\d[\d,]*(?:\.\d+)?", text)


def test_the_page_is_read_in_a_quarter_of_an_hour():
    assert len(PAGE.read_text(encoding="utf-8").split()) <= MOST_WORDS
