"""Adds pages to the site that are not in `docs/`: the reference, project pages, and notebooks.

MkDocs calls these functions (https://www.mkdocs.org/user-guide/configuration/#hooks). The reference
begins with a page of the public names. It also has a page for each folder of the package. This page
is made from the docstrings of all modules in the folder, so no public name can be missing.
"""

import functools
import importlib
import json
import posixpath
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import manualpar
from docs.notebook import make_notebook, notebook_pages
from docs.repository import file_address, find_repository, replace_links
from docs.site.links import find_entry, link_names, names_defined
from docs.site.public_names import (
    listed_names,
    names_table,
    public_members,
    public_page,
)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "manualpar"
PUBLIC_NAMES = "reference/index.md"
# Markdown files outside of `docs/` that are pages of the site, with their paths in the site.
PROJECT_PAGES = {
    "benchmarks/README.md": "project/benchmarks.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",
}


def on_config(config: Any) -> Any:
    """Adds the reference to the navigation, and version and repository to the pages' header."""
    for entry in config["nav"]:
        if "Reference" in entry:
            modules = [{name: path} for name, path in _rooms().items()]
            entry["Reference"] = [PUBLIC_NAMES, {"Modules": modules}]
    config["site_name"] = f"manualpar {manualpar.__version__}"
    if repository := find_repository():
        config["repo_url"] = repository
        config["repo_name"] = repository.split("/", 3)[-1]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that are generated when the site is built: reference, project, notebooks."""
    files.append(File.generated(config, PUBLIC_NAMES, content=public_page()))
    for name, path in _rooms().items():
        room = ROOT.joinpath(*name.split("."))
        files.append(File.generated(config, path, content=_reference(name, room)))
    for source, path in PROJECT_PAGES.items():
        if path not in files.src_uris:
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, path, content=text))
    for name in notebook_pages():
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        notebook = make_notebook(text, name, config["repo_url"] or "")
        files.append(File.generated(config, f"notebooks/{name}.ipynb", content=notebook))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page to files of the repository.

    A link leads to the file's page in the site. If the file has no page, the link leads to the
    repository; if the repository's address is not known, it becomes plain text.
    """
    inside = {path: source for source, path in PROJECT_PAGES.items()}
    here = inside.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def find_target(file: str, anchor: str) -> str:
        if not file:
            return anchor
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), file))
        in_site = PROJECT_PAGES.get(target, target.removeprefix("docs/"))
        if in_site in files.src_uris:
            path = posixpath.relpath(in_site, posixpath.dirname(page.file.src_uri) or ".")
            return f"{path}{anchor}"
        return f"{file_address(config['repo_url'], target)}{anchor}" if config["repo_url"] else ""

    page.meta.update(_search_settings(page.file.src_uri))
    text = replace_links(markdown, find_target)
    notebook = f"notebooks/{page.file.src_uri.removesuffix('.md')}.ipynb"
    if notebook in files.src_uris:
        title, rest = text.split("\n", 1)
        text = f"{title}\n\n[This page as a notebook]({notebook})\n{rest}"
    return text


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Makes the names of this package in running text links to the reference."""
    del config, files
    return link_names(html, names_defined(page.markdown))


def on_post_build(config: Any) -> None:
    """Adds the keywords of `mkdocs.yml` to the sections in the index of the search.

    Raises:
      ValueError: The site has no section of a keyword's address.
    """
    path = Path(config["site_dir"], "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    sections = {section["location"]: section for section in index["docs"]}
    for address, words in config["extra"]["keywords"].items():
        if address not in sections:
            raise ValueError(f"mkdocs.yml: keywords has {address}, expected a section of the site.")
        sections[address]["tags"] = words
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def _search_settings(path: str) -> dict[str, Any]:
    """Returns metadata for Material's search: how high a page stands in the results.

    Pages come first, then the reference of public names. Folders without one are left out.
    """
    if path.startswith("reference/") and path not in (PUBLIC_NAMES, "reference/manualpar.md"):
        is_public = path in {_rooms()[room] for room in _public_rooms()}
        return {"search": {"boost": 0.1} if is_public else {"exclude": True}}
    boosts = {PROJECT_PAGES["CHANGELOG.md"]: 0.1, "questions.md": 2}  # Short answers come first.
    return {"search": {"boost": boosts[path]}} if path in boosts else {}


@functools.cache
def _public_rooms() -> set[str]:
    """Returns the folders of the package in which a public name is defined."""
    rooms, found = _rooms(), set()
    for name in (name for _, names in listed_names() for name in names):
        entry = find_entry(name) or ""
        while entry and entry not in rooms:
            entry = entry.rpartition(".")[0]
        found.add(entry)
    return found


def _rooms() -> dict[str, str]:
    """Returns the path of the reference page of each folder of the package, by the dotted name."""
    folders = sorted(path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py"))
    names = [".".join(folder.parts) for folder in folders]
    return {name: f"reference/{name.removeprefix('manualpar.')}.md" for name in names}


def _reference(name: str, room: Path) -> str:
    """Returns the Markdown of a reference page: the folder's docstring, then all of its modules."""
    modules = sorted(path.stem for path in room.glob("*.py") if not path.stem.startswith("_"))
    lines = [f"::: {name}\n    options: {{heading_level: 1, members: false}}\n"]
    if members := [f"{name}.{member}" for member in public_members(importlib.import_module(name))]:
        # Where a program looks for it first, although it is imported from `manualpar.training`.
        members += ["manualpar.training.fit"] if name == "manualpar" else []
        lines += ["## Public names\n", *names_table(members), ""]
    lines += [f"::: {name}.{module}\n    options: {{heading_level: 2}}\n" for module in modules]
    return "\n".join(lines)
