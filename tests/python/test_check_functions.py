"""``make lint`` refuses functions of more than 80 lines of code that do not say why."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
BODY = "  x += f('{', \"}\", 1'000);  // {\n"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    before = set(sys.modules)
    yield importlib.import_module("check_functions")
    for name in ("check_functions", "common"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "head",
    [
        "int f() {",
        "Class::Class(int a) : a_{a}, b_(a) {",
        "template <class T>\nvoid Class<T>::f(Options o = {}) const {",
        "namespace unjam {\nstruct X {\nvoid f() {\n}\nvoid g() {",
        "const auto f = [](int) {",
        "#define OPENS {\nenum class Kind { kOne };\nvoid f() {",
        'extern "C" {\nint unjamF(void) {',
        "const std::vector<X>& all() {\n  static const std::vector<X> kAll = {",
    ],
)
def test_a_long_function_is_refused(module, head):
    text = f"// Why not.\n{head}\n{BODY * 80}" + "}\n" * 4
    (fault,) = module.faults("base/x.h", text)
    assert fault.startswith("src/base/x.h:")
    assert " 80 lines" not in fault


def test_it_may_say_why(module):
    text = f"void g() {{}}\n\n// Adds.\n// Long because it is a table.\nint f() {{\n{BODY * 90}}}\n"
    assert module.faults("base/x.h", text) == []
    assert len(module.faults("base/x.h", text.replace("Long because", "Long, for"))) == 1
    other = text.replace("void g() {}\n\n", f"// Long because.\nvoid g() {{\n{BODY}}}\n")
    assert (
        len(module.faults("base/x.h", other.replace("// Long because it is a table.\n", ""))) == 1
    )


def test_comments_and_blank_lines_are_not_counted(module):
    inside = BODY * 78 + "\n// more\n/* and\n more */\n" * 30
    assert module.faults("base/x.h", f"int f() {{\n{inside}}}\n") == []


def test_classes_may_be_long(module):
    methods = "\n".join(f"  void f{i}() {{\n    return;\n  }}" for i in range(60))
    assert module.faults("base/x.h", f"class X : public Y {{\n{methods}\n}};\n") == []


def test_this_repository_has_none(module):
    assert module.check(TOOLS.parent) == []
