"""Hook of mkdocs: what stands outside of docs/ and is linked to becomes part of the site.

Pages link to ``results/``, ``examples/`` or ``CONTRIBUTING.md`` by the paths that a reader of the repository follows.
In the site ``docs/`` is the root, and the others keep their places in the repository: `site_path` says which.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = ("results", "examples", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "constraints.txt")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def site_path(path: str) -> str:
    """The place in the site of a file of the repository.

    Args:
        path: relative to the repository, as ``docs/faq.md``.
    """
    if path == "README.md":
        return path  # the site begins with docs/README.md
    # A page README.md becomes index.html, so that another index.html beside it needs another name.
    return re.sub(r"(^|/)index\.html$", r"\1all.html", path.removeprefix("docs/"))


def site_links(markdown: str, page: str) -> str:
    """A page with its links as the site has them.

    Args:
        markdown: of the page.
        page: its path in the repository.
    """
    here = os.path.dirname(site_path(page))

    def moved(match: re.Match[str]) -> str:
        begin, target, heading, end = match.groups()
        if ":" in target:
            return match[0]
        there = site_path(os.path.normpath(os.path.join(os.path.dirname(page), target)))
        return f"{begin}{os.path.relpath(there, here or '.')}{heading or ''}{end}"

    return LINK.sub(moved, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files beside docs/."""
    from mkdocs.structure.files import File

    for name in BESIDE:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                place = site_path(str(file.relative_to(ROOT)))
                files.append(File.generated(config, place, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links of a page those of the site."""
    place = Path(page.file.abs_src_path or "").resolve().relative_to(ROOT)
    return site_links(markdown, place.as_posix())
