"""What the site does to pages that are written for readers of the repository."""

import importlib
import re
import sys
from pathlib import Path

import pytest

# Or this file would name pages that are not beside it.
TORCH, INDEX = "torch.md", "index.md"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    before = set(sys.modules)
    yield importlib.import_module("docs_hooks"), importlib.import_module("check_docs")
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("api.md", "torch.md#keys", "torch.md#keys"),
        ("guide/memory.md", f"../{TORCH}#keys", f"../{TORCH}#keys"),
        ("index.md", "../ARCHITECTURE.md#words", "ARCHITECTURE.md#words"),
        ("guide/memory.md", "../../README.md#use", f"../{INDEX}"),
        ("ARCHITECTURE.md", "docs/torch.md", "torch.md"),
        ("ARCHITECTURE.md", "src/engine/engine.h", "source/src/engine/engine.h.txt"),
        ("tutorials/c.md", "../../examples/torch", "../source/examples/torch.txt"),
        ("api.md", "https://host/a.md", "https://host/a.md"),
        ("api.md", "#keys", "#keys"),
    ],
)
def test_where_links_lead_in_the_site(tools, page, link, there):
    hooks, _ = tools
    assert hooks.in_site(f"See [it]({link}).", page) == f"See [it]({there})."


def test_blocks_of_code_keep_their_text(tools):
    hooks, _ = tools
    text = "```text\n[a](../README.md)\n```\n"
    assert hooks.in_site(text, "api.md") == text
    block = "```python no-run\nx\n```\n- y\n  ```text output\n  z\n  ```\n"
    page = type("Page", (), {"file": type("File", (), {"src_uri": "api.md"})})
    shown = hooks.on_page_markdown(block, page, None, None)
    assert shown == block.replace(" no-run", "").replace(" output", "")


def test_anchors_of_the_site_are_those_that_links_are_checked_against(tools):
    hooks, check = tools
    pages = check.pages(ROOT)
    titles = {
        title
        for page in pages
        for title in re.findall(r"^#+ (.+)$", check.without_code(page.read_text()), flags=re.M)
    }
    assert len(titles) > 100
    for title in titles:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        assert hooks.slug(plain, "-") == check.slug(title)
