"""``make lint`` checks pages: links, hashes of commits, lengths."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SUFFIX = ".m" + "d"
LONG = " ".join(["word"] * 26) + "."
CELL = "| " + " ".join(["word"] * 13) + " |\n"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """``check({file: text})``: the faults of such a repository. ~ stands for the suffix of pages,
    or this file would name pages that are not there."""
    monkeypatch.syspath_prepend(TOOLS)
    before = set(sys.modules)
    module = importlib.import_module("check_docs")

    def run(files):
        for name, text in files.items():
            path = tmp_path / name.replace("~", SUFFIX)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("~", SUFFIX))
        return [fault.replace(SUFFIX, "~") for fault in module.check(tmp_path)]

    yield run
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    "text",
    [
        "[a](docs/other~)",
        "[a](docs/there~#here-and-there)",
        "[a](#here) and `[b](gone~)`\n\n# Here\n",
        "[a](docs/there~#by-hand)",
        "```text\n[a](gone~)\n```\n",
        "[a](https://host/gone~#x), mailto: [b](mailto:a@b)",
    ],
)
def test_links_that_lead_somewhere(check, text):
    there = '# Here, and `there`\n\n<a id="by-hand"></a>\n'
    assert check({"README~": text, "docs/there~": there, "docs/other~": ""}) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("\n[a](gone~)", "README~:2: links to gone~, which is not there"),
        ("[a](there~#x)", "README~:1: links to there~#x, which has no such heading"),
        ("[a](#x)", "README~:1: links to #x, which has no such heading"),
        ("![a](gone.png)", "README~:1: links to gone.png, which is not there"),
    ],
)
def test_links_that_do_not(check, text, fault):
    # A heading in a block of code is none.
    assert check({"README~": text, "there~": "```sh\n# x\n```\n"}) == [fault]


def test_hashes_stand_in_the_lab_only(check):
    text = "Since `1a2b3c4` it is so.\n"
    (fault,) = check({"docs/page~": text, "lab/page~": text})
    assert fault.startswith("docs/page~:1: 1a2b3c4 is a commit's hash")
    assert check({"docs/page~": "2303.06324, 1234567 and decade, H200"}) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LONG, "a sentence of 26 words"),
        ("- " + LONG + "\n", "a sentence of 26 words"),
        (("Four words stand here. " * 21), "a paragraph of 84 words"),
        (CELL, "a table cell of 13 words"),
    ],
)
def test_what_is_too_long(check, text, words):
    (fault,) = check({"docs/page~": text})
    assert words in fault
    assert check({"tools/long_pages.txt": "docs/page~\n"}) == []


@pytest.mark.parametrize(
    "text",
    [
        "Short. " + LONG[10:] + "\n\n" + LONG[10:],
        "- one\n- two\n" * 50,
        "```text\n" + LONG + "\n```\n",
        "`" + LONG + "`\n",
        "`` a `b` " + LONG[:-1] + " ``\n",
        "<!-- generated: x -->\n" + LONG + "<!-- end of what is generated -->\n",
    ],
)
def test_what_is_not(check, text):
    assert check({"docs/page~": text}) == []


def test_a_page_of_internals_is_one_topic(check):
    text = "Four words stand here.\n\n" * 226
    (fault,) = check({"docs/internals/page~": text, "docs/page~": text})
    assert fault.startswith("docs/internals/page~:1: a page of 904 words")


def test_the_list_of_long_pages_shrinks(check):
    (fault,) = check({"docs/page~": "Short.", "tools/long_pages.txt": "docs/page~\n"})
    assert "take it out of tools/long_pages.txt" in fault
    (fault,) = check({"docs/page~": LONG, "tools/long_pages.txt": "docs/page~ docs/gone~"})
    assert "docs/gone~, which is not there" in fault
