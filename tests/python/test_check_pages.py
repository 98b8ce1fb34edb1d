"""``make lint`` refuses mentions of pages that are not in the repository."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MISSING = "missing" + ".md"  # or this file would be refused itself


@pytest.fixture
def check(tmp_path, monkeypatch):
    """``check({file: text})``: the faults of such a repository."""
    monkeypatch.syspath_prepend(TOOLS)
    before = set(sys.modules)
    module = importlib.import_module("check_pages")

    def run(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return module.check(tmp_path)

    yield run
    for name in ("check_pages", "common"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("README.md", f"[rules]({MISSING})"),
        ("README.md", f"[rules](docs/{MISSING}#part)"),
        ("docs/api.md", f"see `../{MISSING}`"),
        ("src/base/word.h", f"// The reasons are in {MISSING} 1.2."),
        ("src/device/x.cu", f"// ({MISSING} Sec. 5)"),
        ("python/unjam/x.py", f'"""Of elsewhere/{MISSING}."""'),
        ("cmake/X.cmake", f"# {MISSING}"),
        ("tests/unit/x_test.cc", f"// {MISSING}: no."),
        ("Makefile", f"# {MISSING}"),
        ("docs/images/note.txt", f"api/{MISSING}"),
    ],
)
def test_a_page_that_is_not_there_is_refused(check, file, text):
    (fault,) = check({"docs/api.md": "", file: f"first line\n{text}\n"})
    assert fault.startswith(f"{file}:2: names ") and fault.count(MISSING) == 1


def test_a_page_of_that_name_in_another_folder_does_not_count(check):
    assert len(check({"docs/api.md": "", "src/x.h": "// See shared/api" + ".md.\n"})) == 1


def test_pages_that_are_there_are_not_refused(check):
    files = {
        "README.md": "[a](docs/api.md) docs/api.md#streams, api.md; docs/api.md.",
        "docs/api.md": "[back](../README.md) and README.md, see environment.md",
        "docs/environment.md": "https://example.org/some/" + MISSING + " is another's",
        "src/x.h": "// docs/environment.md, environment.md\n",
        "tests/fixtures/recorded.txt": "nothing",
    }
    assert check(files) == []


@pytest.mark.parametrize("apart", [", ", ", '\n    '", ", \n  // "])
def test_a_heading_that_is_named_is_there(check, apart):
    text = "// x\n(docs/api.md" + apart + '"Streams")\n'
    assert check({"docs/api.md": "## Streams\n", "src/x.h": text}) == []
    (fault,) = check({"docs/api.md": "## Keys\n", "src/x.h": text})
    assert fault == 'src/x.h:2: docs/api.md has no heading "Streams"'


def test_this_repository_names_no_page_that_it_lacks(check):
    assert sys.modules["check_pages"].check(TOOLS.parent) == []
