"""MkDocs' hooks for the site (mkdocs.yml): pages from the root, and links that leave docs/.

Pages are written for readers of the repository, whose links go to any file of it. In the site,
those to pages at the root go to these pages, and those to other files to a copy, as text.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

# Pages that readers expect at the root of a repository; in the site they have the same names.
ROOT_PAGES = ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
HOME = "index.md"  # where README.md leads
LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")

_copies: dict[str, Path] = {}


def _source(uri: str) -> Path:
    """The file of the repository that a page of the site is."""
    return (ROOT if uri in ROOT_PAGES else DOCS) / uri


def _relative(target: str, uri: str) -> str:
    return "../" * uri.count("/") + target


def in_site(markdown: str, uri: str) -> str:
    """The page's text with links as the site needs them."""

    def mend(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if not target or re.match(r"[a-z]+:", target):
            return match.group()
        there = (_source(uri).parent / target).resolve()
        if not there.is_relative_to(ROOT):
            return match.group()
        name = there.relative_to(ROOT).as_posix()
        if there.is_relative_to(DOCS):
            return before + _relative(there.relative_to(DOCS).as_posix(), uri) + after
        if name in ROOT_PAGES:
            return before + _relative(name, uri) + after
        if name == "README.md":
            return before + _relative(HOME, uri) + ")"
        if there.exists():
            # As text, so that a browser shows it and does not download it.
            _copies[f"source/{name}.txt"] = there
            return before + _relative(f"source/{name}.txt", uri) + ")"
        return match.group()

    # Not in fenced blocks.
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    return "".join(part if i % 2 else LINK.sub(mend, part) for i, part in enumerate(parts))


def _text_of(path: Path) -> bytes:
    """A file's content; a folder's list of files."""
    if path.is_file():
        return path.read_bytes()
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and "__pycache__" not in f.parts]
    return "".join(f"{file.relative_to(ROOT)}\n" for file in files).encode()


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    from mkdocs.structure.files import File  # noqa: PLC0415

    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for file in list(files.documentation_pages()):
        in_site(_source(file.src_uri).read_text(), file.src_uri)
    for target, path in _copies.items():
        files.append(File.generated(config, target, content=_text_of(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    # A second word behind a fence's language is for the tests (tests/python/test_docs.py).
    markdown = re.sub(r"^( *```\w+) [\w-]+$", r"\1", markdown, flags=re.M)
    return in_site(markdown, page.file.src_uri)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    # Docstrings mark names as Sphinx does.
    return re.sub(r":(?:func|class|meth|attr|mod|exc|data):(?=<code)", "", html)


def slug(title: str, separator: str) -> str:
    """A heading's anchor, as the repository's own pages have it."""
    words = re.sub(r"<[^>]*>|[^\w\- ]", "", unescape(title).lower())
    return words.strip().replace(" ", separator)
