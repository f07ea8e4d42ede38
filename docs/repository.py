"""Rewrites links for the site and for notebooks, and finds the web address of the repository."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The address, where `git` does not know it.
VARIABLE = "MANUALPAR_REPOSITORY"
# Code, in which brackets are no links; or else a link or a picture.
_LINK = re.compile(
    r"(?ms)^ *```.*?^ *```$|`[^`]+`"
    r"|(!?)\[((?:[^\[\]`]|`[^`]+`)*)\]\((?!https?:)([^)#\s]*)(#[^)]*)?\)"
)


def replace_links(markdown: str, find_target: Callable[[str, str], str]) -> str:
    """Replaces the targets of the links and pictures of a page, except web addresses.

    Args:
      markdown: The text of the page.
      find_target: Called with the file of a link ("" for this page) and its anchor (`#part` or "").
        Returns the new target; if it returns "", the link becomes plain text.
    """

    def replace(found: re.Match[str]) -> str:
        if found[2] is None:
            return found[0]
        target = find_target(found[3], found[4] or "")
        return f"{found[1]}[{found[2]}]({target})" if target else found[2]

    return _LINK.sub(replace, markdown)


def find_repository() -> str:
    """Returns the web address of the repository; "" if neither `VARIABLE` nor `git` has it."""
    if VARIABLE in os.environ:
        return web_address(os.environ[VARIABLE])
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # git is not installed.
        return ""
    return web_address(found.stdout.strip()) if found.returncode == 0 else ""


def web_address(remote: str) -> str:
    """Converts the URL of a remote to a web address without credentials; "" for a local path."""
    found = re.fullmatch(
        r"https?://(?:[^@/]*@)?(.+)|ssh://(?:[^@/]*@)?([^:/]+)(?::\d+)?/(.+)", remote
    )
    if found and found[1]:
        place = found[1]
    elif found:
        place = f"{found[2]}/{found[3]}"
    elif short := re.fullmatch(r"[\w.-]+@([\w.-]+):(.+)", remote):
        place = f"{short[1]}/{short[2]}"
    else:
        return ""
    return f"https://{place.removesuffix('/').removesuffix('.git')}"


def file_address(repository: str, path: str) -> str:
    """Returns the web address of a file of the repository, on GitHub and on GitLab."""
    return f"{repository}/blob/HEAD/{path}"
