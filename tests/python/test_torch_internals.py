"""Only _internals.py touches what torch keeps to itself."""

import ast
import re
from pathlib import Path

import pytest

import unjam

FOLDER = Path(unjam.__file__).resolve().parent / "torch"
# Of objects of torch's that need not be named there, such as group._get_backend().
OF_TORCH = re.compile(
    r"_(get_backend|register_backend|device_types|set_default_backend|set_group_\w+|plugins|world"
    r"|get_default_\w+|new_process_group_helper|register_process_group|get_device_index"
    r"|set_comm_hook_name|timeout|getframe)"
)
# Of Python's, of no object of torch's: the user's own place in the program.
FRAMES = {"order.py"}
# Those that have not come to it yet.
ELSEWHERE = {"pipeline"}


def touched(text):
    """Private names that a file's text takes of torch."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            origin = ast.unparse(node.value)
            ours = origin == "self"
            of_torch = origin.split(".")[0] in ("torch", "dist") or OF_TORCH.fullmatch(node.attr)
            if of_torch and not ours:
                found.add(node.attr)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            found.update(name for name in names if name.startswith("_"))
    return {name for name in found if not name.startswith("__")}


def files():
    return [
        path
        for path in sorted(FOLDER.rglob("*.py"))
        if path.name != "_internals.py" and not ELSEWHERE & set(path.relative_to(FOLDER).parts)
    ]


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_nothing_of_torchs_own_is_touched(path):
    found = touched(path.read_text())
    if path.name in FRAMES:
        found -= {"_getframe"}
    if path.name == "_futures.py":
        found -= {"_C"}  # in an annotation
    assert not found, f"{path.name} touches {found}: put it into _internals.py, and say why"


def test_a_planted_use_is_found():
    assert touched("import torch\ntorch.cuda._utils.x()") == {"_utils"}
    assert touched("group._get_backend(0)") == {"_get_backend"}
    assert touched("from torch._subclasses import fake") == {"_subclasses"}
    assert touched("self._group.rank()") == set()
    assert "_getframe" in touched((FOLDER / "_internals.py").read_text())
