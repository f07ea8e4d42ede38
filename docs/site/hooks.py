"""Adds pages to the site that are not in `docs/`: the reference, project pages, and notebooks.

MkDocs calls these functions (https://www.mkdocs.org/user-guide/configuration/#hooks). The reference
has a page for each folder of the package. The page is made from the docstrings of all modules in
the folder, so no public name can be missing.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.notebook import make_notebook

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "manualpar"
# Markdown files outside of `docs/` that are pages of the site, with their paths in the site.
PROJECT_PAGES = {
    "benchmarks/README.md": "project/benchmarks.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",
}
# Pages that can also be downloaded as notebooks.
NOTEBOOKS = ("fsdp", "three_modes")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Adds the reference pages to the navigation."""
    for entry in config["nav"]:
        if "Reference" in entry:
            entry["Reference"] = [{name: path} for name, path in _rooms().items()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that are generated when the site is built: reference, project, notebooks."""
    for name, path in _rooms().items():
        room = ROOT.joinpath(*name.split("."))
        files.append(File.generated(config, path, content=_reference(name, room)))
    for source, path in PROJECT_PAGES.items():
        if path not in files.src_uris:
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, path, content=text))
    for name in NOTEBOOKS:
        notebook = make_notebook((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
        files.append(File.generated(config, f"notebooks/{name}.ipynb", content=notebook))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page to files of the repository.

    A link leads to the file's page in the site. If the file has no page, the link becomes plain
    text.
    """
    del config
    inside = {path: source for source, path in PROJECT_PAGES.items()}
    here = inside.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        in_site = PROJECT_PAGES.get(target, target.removeprefix("docs/"))
        if in_site not in files.src_uris:
            return f"](#{_NOWHERE})"
        path = posixpath.relpath(in_site, posixpath.dirname(page.file.src_uri) or ".")
        return f"]({path}{match[2] or ''})"

    text = _LINK.sub(lead, markdown)
    name = page.file.src_uri.removesuffix(".md")
    if name in NOTEBOOKS:
        title, rest = text.split("\n", 1)
        text = f"{title}\n\n[This page as a notebook](notebooks/{name}.ipynb)\n{rest}"
    return re.sub(rf"\[([^\]]*)\]\(#{_NOWHERE}\)", r"\1", text)


_NOWHERE = "not-in-the-site"


def _rooms() -> dict[str, str]:
    """Returns the path of the reference page of each folder of the package, by the dotted name."""
    folders = sorted(path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py"))
    names = [".".join(folder.parts) for folder in folders]
    return {name: f"reference/{name.removeprefix('manualpar.')}.md" for name in names}


def _reference(name: str, room: Path) -> str:
    """Returns the Markdown of a reference page: the folder's docstring, then all of its modules."""
    init = room / "__init__.py"
    lines = [f"# {name}", "", ast.get_docstring(ast.parse(init.read_text())) or "", ""]
    modules = sorted(path.stem for path in room.glob("*.py") if path != init)
    lines += [f"::: {name}.{module}\n    options: {{heading_level: 2}}\n" for module in modules]
    return "\n".join(lines)
