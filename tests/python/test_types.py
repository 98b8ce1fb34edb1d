"""What type checkers make of the package: typed_use.py is read by mypy, and never run."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unjam

HERE = Path(__file__).resolve().parent
USE = HERE / "typed_use.py"
SOURCES = Path(unjam.__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Line of typed_use.py -> codes of the errors that mypy finds there."""
    mypy = shutil.which("mypy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    mypy = mypy or shutil.which("mypy")
    if mypy is None:
        pytest.skip("mypy is not installed: it is in the group lint of pyproject.toml")
    pytest.importorskip("torch")
    cache = tmp_path_factory.mktemp("mypy")
    command = [mypy, "--strict", "--follow-imports=silent", "--python-executable", sys.executable]
    command += ["--cache-dir", cache, USE]
    # What is installed mypy finds by the interpreter, and refuses in the path.
    installed = SOURCES.name == "site-packages"
    variables = os.environ | ({} if installed else {"MYPYPATH": str(SOURCES)})
    result = subprocess.run(command, cwd=cache, env=variables, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    found = {}
    for line in result.stdout.splitlines():
        error = re.fullmatch(r"(.*\.pyi?):(\d+): error: .*\[([\w-]+)\]", line)
        if error:
            assert Path(cache, error[1]).resolve() == USE, line  # none in the package itself
            found.setdefault(int(error[2]), set()).add(error[3])
    return found


def test_calls_have_types_and_mistakes_are_found(said):
    planted = {
        number: set(line.partition("# mistake ")[2].split(","))
        for number, line in enumerate(USE.read_text().splitlines(), 1)
        if "# mistake " in line
    }
    assert len(planted) > 10
    assert said == planted


def test_names_of_torch_are_those_that_type_checkers_see():
    text = Path(unjam.__file__).read_text()
    assert set(unjam._OF_TORCH) == set(re.findall(r"^        (\w+) as \1,$", text, flags=re.M))


def is_torchs(function):
    return hasattr(function, "__wrapped__") and function.__module__.startswith("torch.")


def test_the_stub_of_torchs_collectives_has_their_parameters():
    pytest.importorskip("torch")
    collectives = importlib.import_module("unjam.torch.collectives")
    stub = Path(collectives.__file__).with_suffix(".pyi").read_text()
    declared = {
        name: re.findall(r"(\w+):", parameters)
        for name, parameters in re.findall(r"def (\w+)\((.*?)\) -> ", stub, flags=re.S)
    }
    made = {name: made for name, made in vars(collectives).items() if is_torchs(made)}
    assert set(declared) == set(made)
    for name, function in made.items():
        assert declared[name] == list(inspect.signature(function).parameters), name


def test_help_shows_the_keywords():
    shown = inspect.signature(unjam.Group.all_reduce)
    assert list(shown.parameters) == (
        "self x out op key dtype priority callback stream in_stream algorithm".split()
    )
    assert shown.parameters["priority"].default == 0
    barrier = inspect.signature(unjam.Group.barrier)
    assert list(barrier.parameters) == "self key priority callback stream in_stream".split()


def test_unknown_keywords_are_refused(pair):
    _, groups = pair
    with pytest.raises(TypeError, match=r"all_reduce\(\) got an unexpected .* 'priorty'"):
        groups[0].all_reduce(bytearray(4), dtype="int32", priorty=1)
    with pytest.raises(TypeError, match=r"barrier\(\) got an unexpected .* 'algorithm'"):
        groups[0].barrier(algorithm="ring")
    with pytest.raises(TypeError, match=r"send\(\) got an unexpected .* 'algorithm'"):
        groups[0].send(bytearray(4), 1, dtype="int32", algorithm="ring")
    with (
        groups[0].register_all_reduce("k", "int32") as collective,
        pytest.raises(TypeError, match=r"run\(\) got an unexpected .* 'key'"),
    ):
        collective.run(bytearray(4), key="k")
