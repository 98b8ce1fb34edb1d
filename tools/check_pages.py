"""Checks that every page which a file of the repository mentions is there.

A page is what ends in ``.md``. Named with folders, it lies there as seen from the file, from the
root, or from docs/; a name alone may be of a page in any folder. Addresses of sites do not count.
Where a heading follows a page's name, a comma and a quote, the page has that heading.
"""

from __future__ import annotations

import re
from pathlib import Path

from common import ROOT, Failure, main_wrapper

FOLDERS = ["bench", "cmake", "docs", "examples", "include", "python", "src", "tests", "tools"]
NOT_TEXT = {".png", ".gif", ".jpg", ".so", ".pyc", ".pickle"}
# Also where a string of Python goes on in the next line.
HEADING = re.compile(
    r"(docs/[\w./-]*\w\.md), *(?:['\"]\s*['\"])? *(?:\n\s*//)? *\"([A-Z][^\"\n]+)\""
)
MENTION = re.compile(r"(?P<address>\w+://\S*?)?(?P<page>[\w./-]*\w\.md)\b")


def _files(root: Path) -> list[Path]:
    """What people read and write: the files at the root, and all below the folders."""
    found = [path for path in root.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [p for p in (root / folder).rglob("*") if p.is_file() and not p.is_symlink()]
    found = [p for p in found if "__pycache__" not in p.parts and p.suffix not in NOT_TEXT]
    return sorted(found)


def check(root: Path) -> list[str]:
    """One line for each mention of a page that is missing below `root`."""
    files = _files(root)
    names = {path.name for path in files if path.suffix == ".md"}
    faults = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a recorded input of some test
            continue
        for mention in HEADING.finditer(text):
            page, heading = root / mention[1], mention[2]
            titles = (
                re.findall(r"^#+ (.+)$", page.read_text(), re.M) if page.is_file() else [heading]
            )
            if heading not in titles:
                number = text.count("\n", 0, mention.start()) + 1
                where = path.relative_to(root)
                faults.append(f'{where}:{number}: {mention[1]} has no heading "{heading}"')
        for number, line in enumerate(text.splitlines(), 1):
            for mention in MENTION.finditer(line):
                page = mention["page"]
                if mention["address"] or ("/" not in page and page in names):
                    continue
                places = (path.parent, root, root / "docs")
                if "/" in page and any((place / page).is_file() for place in places):
                    continue
                where = path.relative_to(root)
                faults.append(f"{where}:{number}: names {page}, which is not in the repository")
    return faults


def main() -> int:
    faults = check(ROOT)
    if faults:
        raise Failure("pages are named that are not there:\n" + "\n".join(faults))
    return 0


if __name__ == "__main__":
    main_wrapper(main)
