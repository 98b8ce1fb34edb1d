"""Modules of the package import each other in one direction only: no circle."""

import ast
from pathlib import Path

import pytest

import unjam

PACKAGE = Path(unjam.__file__).resolve().parent

# What closes a circle, for type checkers alone. An object that a user holds names what it was made
# by, whose class has a method that makes it: `group.context` is a Context, and `context.group()` a
# Group. Without these what a user reads there would have no type.
FOR_TYPES_ALONE = {
    ("unjam.collective", "unjam.group"),
    ("unjam.group", "unjam.context"),
    ("unjam.request", "unjam.context"),
    # Of these the first takes an argument of the second's class, and the second calls it.
    ("unjam.bench.cuda_sweep", "unjam.bench.sweep"),
    ("unjam.bench.estimate", "unjam.bench.sweep"),
    ("unjam.reshard.run", "unjam.reshard.plan"),
}


def modules_of(package):
    """Name -> file, of all modules below a folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(name, path, modules, wanted):
    """Modules that one names in its import statements: by `wanted`, "run" or "types"."""
    found = set()
    base = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def look(node, inside):
        if is_type_checking(node):
            inside = True
        if isinstance(node, ast.Import) and inside == (wanted == "types"):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and inside == (wanted == "types"):
            origin = node.module or ""
            if node.level:
                above = base.split(".")[: len(base.split(".")) - node.level + 1]
                origin = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{origin}.{alias.name}"
                found.add(whole if whole in modules else origin)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return  # what a function imports when it is called is no part of an import
        for child in ast.iter_child_nodes(node):
            look(child, inside)

    look(ast.parse(path.read_text()), False)
    return {module for module in found if module in modules and module != name}


def graph_of(package, wanted):
    modules = modules_of(package)
    return {name: imports_of(name, path, modules, wanted) for name, path in modules.items()}


def circles(graph):
    """The strongly connected components of more than one module, by Tarjan."""
    number, low, stack, found = {}, {}, [], []

    def visit(node):
        number[node] = low[node] = len(number)
        stack.append(node)
        for following in sorted(graph.get(node, ())):
            if following not in number:
                visit(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], number[following])
        if low[node] == number[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def test_no_circle_of_imports():
    assert circles(graph_of(PACKAGE, "run")) == []


def test_what_type_checkers_import_closes_known_circles_only():
    run, types = graph_of(PACKAGE, "run"), graph_of(PACKAGE, "types")
    assert {(a, b) for a, b in FOR_TYPES_ALONE if b in types[a]} == FOR_TYPES_ALONE
    both = {
        name: run[name] | {other for other in types[name] if (name, other) not in FOR_TYPES_ALONE}
        for name in run
    }
    assert circles(both) == []


@pytest.mark.parametrize("guarded", [False, True])
def test_a_planted_circle_is_found(tmp_path, guarded):
    package = tmp_path / "p"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sub" / "__init__.py").write_text("from ..a import x\n")
    (package / "a.py").write_text("from . import b\n")
    back = "from .sub import y\n"
    if guarded:
        back = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {back}"
    (package / "b.py").write_text(back)
    run, types = graph_of(package, "run"), graph_of(package, "types")
    circle = [["p.a", "p.b", "p.sub"]]
    assert circles(run) == ([] if guarded else circle)
    assert circles({name: run[name] | types[name] for name in run}) == circle
