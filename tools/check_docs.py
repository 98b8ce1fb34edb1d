"""Checks of the pages: links, hashes of commits, long sentences and table cells.

Every link inside the repository must lead to a file, and its anchor to a heading. Hashes of commits
stand in lab/ only. Cells have at most 12 words, sentences 25, paragraphs 80, pages of internals
900; tools/long_pages.txt names the pages that do not keep to that yet, and must not name one that
does. Pages, and parts of pages, that are made from sources (tools/docs_pages.py) have their words
from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, Failure, main_wrapper

CELL, SENTENCE, PARAGRAPH = 12, 25, 80
INTERNALS, TOPIC = "docs/internals/", 900  # a page there is one topic
KNOWN = Path("tools") / "long_pages.txt"
FOLDERS = ["docs", "lab", "examples", "bench", "tests"]
LAB = "lab"
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")  # behind as many backticks as before it
GENERATED = ["docs/reference/c.md", "docs/reference/cli.md"]
# Of an abbreviation's full stop no sentence ends.
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|Sec|Fig|No)\.")
HASH = re.compile(r"(?<![\w/.#-])(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?![\w/-])")


def pages(root: Path) -> list[Path]:
    found = list(root.glob("*.md"))
    for folder in FOLDERS:
        found += (root / folder).rglob("*.md")
    return sorted(found)


def without_code(text: str) -> str:
    """The page without its fenced blocks, comments and front matter; lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match.group().count("\n")

    text = re.sub(r"\A---\n.*?\n---\n", blank, text, flags=re.S)
    text = re.sub(r"^ *```.*?^ *```", blank, text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", blank, text, flags=re.S)


def without_generated(text: str) -> str:
    """The page without what tools/docs_pages.py has put there; lines keep their numbers."""
    return re.sub(
        r"<!-- generated: .*?<!-- end of what is generated -->",
        lambda match: "\n" * match.group().count("\n"),
        text,
        flags=re.S,
    )


def slug(title: str) -> str:
    """A heading's anchor, on GitHub and in the site (tools/docs_hooks.py)."""
    title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
    return re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    named = {slug(title) for title in re.findall(r"^#+ (.+)$", without_code(text), flags=re.M)}
    return named | set(re.findall(r'\bid="([^"]+)"', text))


def link_faults(page: Path, texts: dict[Path, str]) -> Iterator[str]:
    prose = re.sub(r"`[^`\n]*`", "", without_code(texts[page]))
    for match in re.finditer(r"\]\(<?([^)\s>]*)>?(?: \"[^\"]*\")?\)", prose):
        target, _, anchor = match[1].partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        line = prose.count("\n", 0, match.start()) + 1
        there = (page.parent / target).resolve() if target else page
        if not there.exists():
            yield f"{line}: links to {target}, which is not there"
        elif anchor and there in texts and anchor not in anchors(texts[there]):
            yield f"{line}: links to {match[1]}, which has no such heading"


def hash_faults(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for found in HASH.findall(line):
            yield f"{number}: {found} is a commit's hash: those stand in {LAB}/"


def _words(text: str) -> int:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = CODE.sub("code", text)
    return len([word for word in text.split() if re.search(r"\w", word)])


def length_faults(text: str) -> Iterator[str]:
    paragraph: list[str] = []
    begin = 0

    def check() -> Iterator[str]:
        whole = CODE.sub("code", ABBREVIATIONS.sub("x", " ".join(paragraph)))
        if _words(whole) > PARAGRAPH:
            yield f"{begin}: a paragraph of {_words(whole)} words; {PARAGRAPH} at most"
        for sentence in re.split(r"(?<=[.?!:])[*_)\"]*\s+", whole):
            if _words(sentence) > SENTENCE:
                yield f"{begin}: a sentence of {_words(sentence)} words; {SENTENCE} at most"
        paragraph.clear()

    for number, line in enumerate([*without_code(without_generated(text)).splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith("|"):
            yield from check()
            for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                if _words(cell) > CELL:
                    yield f"{number}: a table cell of {_words(cell)} words; {CELL} at most"
            continue
        item = re.match(r"(?:[-*]|\d+\.) (.*)", stripped)
        if not stripped or stripped.startswith(("#", "!", ":::", "options:")) or item:
            yield from check()
        if stripped and not stripped.startswith(("#", "!", ":::", "options:")):
            if not paragraph:
                begin = number
            paragraph.append(item[1] if item else stripped)


def check(root: Path) -> list[str]:
    """One line for each fault below `root`."""
    texts = {path: path.read_text(encoding="utf-8") for path in pages(root)}
    listed = root / KNOWN
    known = set(listed.read_text().split()) if listed.is_file() else set()
    faults = []
    for page, text in texts.items():
        name = page.relative_to(root).as_posix()
        found = list(link_faults(page, texts))
        if not name.startswith(f"{LAB}/"):
            found += hash_faults(text)
            long = [] if name in GENERATED else list(length_faults(text))
            words = _words(without_code(text))
            if name.startswith(INTERNALS) and words > TOPIC:
                long.append(f"1: a page of {words} words; {TOPIC} at most for one topic")
            if name not in known:
                found += long
            elif not long:
                found.append(f"1: keeps to the lengths now: take it out of {KNOWN}")
        faults += [f"{name}:{fault}" for fault in found]
    missing = known - {page.relative_to(root).as_posix() for page in texts}
    return faults + [f"{KNOWN}:1: names {name}, which is not there" for name in sorted(missing)]


def main() -> int:
    faults = check(ROOT)
    if faults:
        raise Failure("pages have faults:\n" + "\n".join(faults))
    return 0


if __name__ == "__main__":
    main_wrapper(main)
