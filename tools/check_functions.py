"""Checks that functions below src/ are at most 80 lines of code, or say why they are not.

Counted are lines of the definition, from the one with its opening brace on, without blank lines and
comments. A longer one stands behind a comment that has the words "Long because".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Failure, main_wrapper

SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".c"}
MOST_LINES = 80
REASON = "Long because"
# Comments, texts and characters; and lines of the preprocessor, with those that they go on in.
# (A quote between digits separates them.)
NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"
    |(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
TYPE = re.compile(r"(?:template\s*<.*>\s*)?(?:class|struct|union|enum)\b[^()]*$", re.DOTALL)
OUTER = re.compile(r'(?:inline\s+)?namespace\b|extern\s*""')


@dataclass
class Function:
    line: int  # from 1 on
    lines: int  # of code
    head: str  # with the comment in front of it


@dataclass
class Block:
    opens: int
    begins: int  # where what stands in front of it does
    function: bool
    inside: bool  # a function


def blanked(text: str) -> str:
    """The text with blanks where nothing is code, as long, with the same lines."""

    def blank(match: re.Match[str]) -> str:
        whole = re.sub(r"[^\n]", " ", match[0])
        # A text stays one, for what is in front of it to be told.
        return '""' + whole[2:] if match[0].startswith('"') else whole

    return NO_CODE.sub(blank, text)


def functions(text: str) -> list[Function]:
    """Those of a file that are in no other function, in the order of their ends."""
    code = blanked(text)
    found: list[Function] = []
    blocks: list[Block] = []
    begins = 0
    for match in re.finditer(r"[{};]", code):
        at = match.start()
        if match[0] == "{":
            head = code[begins:at].strip()
            inside = bool(blocks) and (blocks[-1].inside or blocks[-1].function)
            named = OUTER.match(head) or TYPE.match(head)
            blocks.append(Block(at, begins, not inside and "(" in head and not named, inside))
        elif match[0] == "}" and blocks:
            block = blocks.pop()
            if block.function:
                body = code[code.rfind("\n", 0, block.opens) + 1 : at + 1]
                lines = sum(1 for line in body.splitlines() if line.strip())
                line = code.count("\n", 0, block.opens) + 1
                found.append(Function(line, lines, text[block.begins : block.opens]))
            if re.match(r"\s*[,({)]", code[at + 1 :]):
                # A value in braces, of a default or of a member that a constructor begins with.
                begins = block.begins
                continue
        begins = at + 1
    return found


def faults(name: str, text: str) -> list[str]:
    """Functions of a file, by its path relative to src/, that are too long and do not say why."""
    return [
        f"src/{name}:{f.line}: {f.lines} lines of code: cut it, or say '{REASON} …' in its head"
        for f in functions(text)
        if f.lines > MOST_LINES and REASON not in f.head
    ]


def check(root: Path) -> list[str]:
    """The same of all files below a repository's src/."""
    source = root / "src"
    found = []
    for path in sorted(source.rglob("*")):
        if path.suffix in SUFFIXES:
            found += faults(path.relative_to(source).as_posix(), path.read_text())
    return found


def main() -> None:
    found = check(ROOT)
    if found:
        raise Failure(f"functions have more than {MOST_LINES} lines:\n" + "\n".join(found))


if __name__ == "__main__":
    main_wrapper(main)
