"""C programs are compiled and run against the installed package and against an installed prefix.

By hand, with pkg-config and with CMake. No variable tells their loader where the library lies.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import unjam
from unjam.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BUILD = ROOT / "build" / "release"
COMPILER = os.environ.get("CC") or shutil.which("cc")
TEXTS = {".cc", ".cmake", ".cu", ".h", ".md", ".py"}
PROGRAMS = [p for p in sorted(EXAMPLES.glob("*.c")) if "cuda_runtime" not in p.read_text()]


def run(*words, folder=None, **variables):
    """What the command prints. It finds nothing of unjam that the test does not name."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UNJAM_", "LD_", "PKG_CONFIG"))}
    env |= variables
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{shlex.join(map(str, words))}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass
class Layout:
    """Where unjam was installed."""

    cflags: list[str]
    libs: list[str]
    cmake: Path
    pkgconfig: Path
    library: Path
    remembered: bool  # what pkg-config says makes programs find the library


def config(*arguments):
    return run(sys.executable, "-m", "unjam", "config", *arguments).strip()


@pytest.fixture(scope="module")
def package():
    """The package that these tests use, as ``unjam config`` tells of it."""
    try:
        unjam.get_cmake_dir()
    except unjam.LibraryError as error:
        pytest.skip(f"a checkout that is not installed: {error}")
    if "UNJAM_LIBRARY" in os.environ:
        pytest.skip("UNJAM_LIBRARY names another library than the package's")
    cflags, libs = config("--cflags"), config("--libs")
    assert config("--libs", "--cflags") == f"{cflags} {libs}"
    return Layout(
        shlex.split(cflags),
        shlex.split(libs),
        Path(config("--cmakedir")),
        Path(config("--pkgconfigdir")),
        Path(config("--libdir")) / "libunjam.so.0",
        remembered=True,
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """What ``cmake --install`` makes, and moved to another place."""
    if not (BUILD / "libunjam.so").exists():
        pytest.skip(f"there is no build in {BUILD}")
    folder = tmp_path_factory.mktemp("sdk")
    run("cmake", "--install", BUILD, "--prefix", folder / "first")
    root = (folder / "first").rename(folder / "pre fix")
    (library,) = root.rglob("libunjam.so.0")
    libdir = library.parent
    return Layout(
        [f"-I{root / 'include'}"],
        [f"-L{libdir}", "-lunjam", f"-Wl,-rpath,{libdir}"],
        libdir / "cmake" / "unjam",
        libdir / "pkgconfig",
        library,
        remembered=False,
    )


@pytest.fixture(params=["package", "prefix"])
def layout(request):
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    return request.getfixturevalue(request.param)


def compiled(source, program, flags):
    run(COMPILER, "-std=c11", "-Wall", "-Werror", source, "-o", program, *flags, "-lpthread")
    return program


@pytest.mark.parametrize("source", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_compiled_by_hand_starts(layout, source, tmp_path):
    program = compiled(source, tmp_path / "program", [*layout.cflags, *layout.libs])
    assert "right" in run(program)


def test_a_program_compiled_with_pkg_config_starts(layout, tmp_path):
    tool = shutil.which("pkg-config") or Path(sys.executable).with_name("pkg-config")
    if not Path(tool).exists():
        pytest.skip("there is no pkg-config")
    place = {"PKG_CONFIG_PATH": str(layout.pkgconfig)}
    assert run(tool, "--modversion", "unjam", **place).strip() == unjam.__version__
    flags = shlex.split(run(tool, "--cflags", "--libs", "unjam", **place))
    program = compiled(EXAMPLES / "all_reduce.c", tmp_path / "program", flags)
    folder = {} if layout.remembered else {"LD_LIBRARY_PATH": str(layout.library.parent)}
    assert "right" in run(program, **folder)


def test_a_cmake_project_finds_it(layout, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    run("cmake", "-S", EXAMPLES, "-B", tmp_path, f"-Dunjam_DIR={layout.cmake}")
    run("cmake", "--build", tmp_path)
    assert "right" in run(tmp_path / "all_reduce")


def test_cmake_refuses_another_version(layout, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(user LANGUAGES C)\n"
        "find_package(unjam 99.0 CONFIG)\n"
        'if(unjam_FOUND)\n  message(FATAL_ERROR "taken for 99.0")\nendif()\n'
    )
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-Dunjam_DIR={layout.cmake}")


def test_the_cuda_part_is_looked_for_beside_the_library(layout, tmp_path):
    """Also where a program has loaded the library, not Python."""
    program = compiled(EXAMPLES / "all_reduce.c", tmp_path / "program", layout.cflags + layout.libs)
    cuda_part = layout.library.with_name("libunjam_cuda.so")
    made = not cuda_part.exists() and not layout.remembered
    if made:  # one that loads, and holds nothing
        (tmp_path / "nothing.c").write_text("int nothing;\n")
        run(COMPILER, "-shared", "-fPIC", tmp_path / "nothing.c", "-o", cuda_part)
    try:
        done = subprocess.run(
            [program],
            env={**os.environ, "UNJAM_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        if made:
            assert f"{cuda_part} belongs to another version" in done.stderr
        else:
            lacks = "needs libunjam_cuda.so beside libunjam.so" in done.stderr
            assert lacks is not cuda_part.exists(), done.stderr
    finally:
        if made:
            cuda_part.unlink()


def test_config_asks_for_a_question(capsys):
    with pytest.raises(SystemExit) as error:
        main(["config"])
    assert error.value.code == 2
    assert "--cflags" in capsys.readouterr().err


# ---- the search for the library ----


def test_the_linkers_text_leads_to_the_library(tmp_path, monkeypatch):
    """UNJAM_LIBRARY may name what lies in the package as libunjam.so."""
    text = tmp_path / "libunjam.so"
    text.write_text("INPUT(libunjam.so.0)\n")
    monkeypatch.setenv("UNJAM_LIBRARY", str(text))
    assert unjam.library_path() == text  # loading it says what is wrong with it
    itself = tmp_path / "libunjam.so.0"
    itself.write_bytes(b"\x7fELF")
    assert unjam.library_path() == itself
    text.write_bytes(b"\x7fELF")  # as a build has it: a link, or a copy without a version
    assert unjam.library_path() == text


@pytest.mark.parametrize("names", [["libunjam.so"], ["libunjam.so", "libunjam.so.0"]])
def test_the_library_is_found_under_either_name(names, tmp_path, monkeypatch):
    monkeypatch.delenv("UNJAM_LIBRARY", raising=False)
    monkeypatch.setattr(unjam._lib, "__file__", str(tmp_path / "_lib.py"))
    (tmp_path / "lib").mkdir()
    for name in names:
        (tmp_path / "lib" / name).write_bytes(b"\x7fELF")
    assert unjam.library_path() == tmp_path / "lib" / names[-1]


def test_what_was_only_built_has_no_package_for_build_systems(tmp_path, monkeypatch):
    (tmp_path / "libunjam.so").write_bytes(b"\x7fELF")
    monkeypatch.setenv("UNJAM_LIBRARY", str(tmp_path / "libunjam.so"))
    assert unjam.get_library_dir() == str(tmp_path)
    for ask in (unjam.get_cmake_dir, unjam.get_pkgconfig_dir):
        with pytest.raises(unjam.LibraryError, match="was built, and not installed"):
            ask()
    assert (Path(unjam.get_include()) / "unjam" / "unjam.h").is_file()


# ---- what is said about installing ----


def test_nothing_sends_people_to_an_index():
    """unjam is on none: what somebody might put there under that name would be installed."""
    package = r"(?<![./\w-])unjam(?![-/.\w])"
    asks = re.compile(rf"pip3? (install|download) [^\n`,;]*?{package}|\bunjam\[[a-z]")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    for folder in ("docs", "python", "examples", "bench", "tools", "src", "cmake"):
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in TEXTS]
    said = [(p.name, m[0]) for p in files for m in asks.finditer(p.read_text())]
    assert said == []
    for wrong in ("pip install unjam", "pip install 'unjam[plots]'", "(``unjam[plots]``)"):
        assert asks.search(wrong)
    for right in (
        "pip install .",
        "pip install ./unjam",
        "pip install dist/unjam-0.1.0-py3-none-any.whl",
        "[/]unjam[/]",
    ):
        assert not asks.search(right)
