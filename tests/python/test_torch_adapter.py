"""Where torch's adapter is kept and found: containers without a home, wheels that hold it, images.

Nothing is compiled here: a compiler that only pretends writes down that it was run.
"""

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("torch")

from unjam.cli import main  # noqa: E402
from unjam.torch import _adapter, _extension  # noqa: E402

COMPILER = """#!/bin/sh
echo compiled >>{log}
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo made >"$2"; shift; done
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """One that pretends; gives how often it was asked."""
    program, log = tmp_path / "cxx", tmp_path / "cxx.log"
    program.write_text(COMPILER.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def no_places(monkeypatch, tmp_path):
    """A user without a home or a line in /etc/passwd; the temporary folder is the test's own."""

    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "UNJAM_TORCH_BUILD"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "tmp" / f"unjam-{os.geteuid()}"


HOMES = {
    "none": {},
    "not there": {"HOME": "/nonexistent/home"},
    "empty": {"HOME": ""},
    "the root": {"HOME": "/"},
    "cannot be written": {"HOME": "BLOCKED"},
    "cache cannot be written": {"HOME": "BLOCKED", "XDG_CACHE_HOME": "BLOCKED/.cache"},
    "relative cache": {"XDG_CACHE_HOME": "cache"},
}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_without_a_home_the_temporary_folder_serves(
    home, compiler, no_places, tmp_path, monkeypatch
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    blocked = tmp_path / "home"
    blocked.mkdir()
    (blocked / ".cache").touch()  # even root makes no folder below a file
    for name, value in home.items():
        monkeypatch.setenv(name, value.replace("BLOCKED", str(blocked)))
    assert _extension.found() is None
    path = _extension.build()
    assert path.parents[1] == no_places and no_places.stat().st_mode & 0o777 == 0o700
    assert _extension.found() == path
    assert list((tmp_path / "work").iterdir()) == []
    assert compiler() == 3  # two parts, and the linker


def test_a_home_that_may_not_be_read_is_no_hindrance(
    prebuilt, compiler, no_places, tmp_path, monkeypatch
):
    """Another user's, as HOME is after su or in some containers."""
    real = os.stat

    def stat(path, *args, **kwargs):
        if str(path).startswith(str(tmp_path / "home" / ".cache")):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "stat", stat)
    assert _extension.found() is None
    assert _extension.build().parents[1] == no_places


def test_a_folder_that_others_could_write_to_is_not_trusted(compiler, no_places):
    no_places.mkdir(mode=0o700)
    planted = no_places / _extension.target().folder() / f"{_adapter.NAME}.so"
    planted.parent.mkdir()
    planted.touch()
    assert _extension.found() == planted  # as long as it is ours
    no_places.chmod(0o770)
    assert _extension.found() != planted
    with pytest.raises(_extension.BuildError, match="others can write to .*UNJAM_TORCH_BUILD"):
        _extension.build()
    assert compiler() == 0


def test_a_link_in_the_temporary_folder_is_not_followed(compiler, no_places, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    no_places.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(_extension.BuildError, match="UNJAM_TORCH_BUILD"):
        _extension.build()
    assert list((tmp_path / "elsewhere").iterdir()) == [] and compiler() == 0


def test_another_users_folder_is_not_trusted(compiler, no_places, monkeypatch):
    no_places.mkdir(mode=0o700)
    user = os.geteuid()
    monkeypatch.setattr(_extension, "_temporary", lambda: no_places)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(_extension.BuildError, match="is not yours"):
        _extension.build()
    assert compiler() == 0


def test_the_folder_that_was_asked_for_is_the_only_one(compiler, no_places, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNJAM_TORCH_BUILD", str(tmp_path / "file" / "adapter"))
    with pytest.raises(_extension.BuildError, match="file/adapter.*UNJAM_TORCH_BUILD"):
        _extension.build()
    assert compiler() == 0 and not no_places.exists()


def test_without_any_folder_one_in_the_package_still_serves(prebuilt, compiler, monkeypatch):
    monkeypatch.setattr(_extension, "_temporary", lambda: None)
    with pytest.raises(_extension.BuildError, match="there is none. Set UNJAM_TORCH_BUILD"):
        _extension.build()
    version = _adapter.release(_extension.target().version)
    assert version is not None and compiler() == 0
    path = prebuilt(version)
    assert _extension.found() == path


def test_what_a_killed_build_has_left_is_removed(compiler, no_places, tmp_path, monkeypatch):
    monkeypatch.setenv("UNJAM_TORCH_BUILD", str(tmp_path / "cache"))
    other = tmp_path / "cache" / "torch-1.0-of-another-version"
    own = tmp_path / "cache" / _extension.target().folder()
    for folder in (own, other):
        (folder / f"{_adapter.BUILDING}x").mkdir(parents=True)
        (folder / f"{_adapter.BUILDING}x" / "first.o").touch()
    path = _extension.build()
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, "lock"]
    assert list(other.glob(f"{_adapter.BUILDING}*")) == []


def test_what_others_are_compiling_is_left_alone(compiler, no_places, tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setenv("UNJAM_TORCH_BUILD", str(tmp_path / "cache"))
    other = tmp_path / "cache" / "torch-1.0-of-another-version"
    (other / f"{_adapter.BUILDING}x").mkdir(parents=True)
    with (other / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _extension.build()
    assert (other / f"{_adapter.BUILDING}x").is_dir()


# ---- prebuilt ones, and images ----


@pytest.fixture
def prebuilt(no_places, tmp_path, monkeypatch):
    """``prebuilt(version)``: the package holds an adapter for such a torch, and its place."""
    monkeypatch.setattr(_adapter, "PREBUILT", tmp_path / "prebuilt")

    def make(version):
        path = tmp_path / "prebuilt" / _extension.target().folder(version) / f"{_adapter.NAME}.so"
        path.parent.mkdir(parents=True)
        path.write_text("no library")
        return path

    return make


def test_one_in_the_package_is_found(prebuilt, compiler, monkeypatch):
    import torch

    path = prebuilt("2.99.1")
    for version, fits in {
        "2.99.1": True,
        "2.99.1+cpu": True,
        "2.99.1+cu130": True,
        "2.99.0": False,
        "2.99.1a0+git1234567": False,  # a checkout, or a vendor's own build
        "2.99.1+local": False,
        "2.99.1.dev20260101+cu130": False,
    }.items():
        monkeypatch.setattr(torch, "__version__", version)
        assert (_extension.found() == path) is fits, version


def test_one_of_other_sources_or_for_another_python_is_not_taken(prebuilt, monkeypatch, tmp_path):
    version = _adapter.release(_extension.target().version)
    assert version is not None
    path = prebuilt(version)
    assert _extension.found() == path
    monkeypatch.setattr(_extension.sysconfig, "get_config_var", lambda name: "cpython-399t-linux")
    assert _extension.found() is None
    monkeypatch.undo()
    monkeypatch.setattr(_adapter, "PREBUILT", tmp_path / "prebuilt")
    changed = tmp_path / "csrc"
    changed.mkdir()
    (changed / "module.cc").write_text("// changed\n")
    monkeypatch.setattr(_adapter, "SOURCES", changed)
    assert _extension.found() != path


def test_one_that_does_not_load_is_compiled_anew(prebuilt, compiler, monkeypatch, caplog):
    version = _adapter.release(_extension.target().version)
    prebuilt(version)
    monkeypatch.setattr(_extension._futures, "install", lambda module: None)
    monkeypatch.delitem(sys.modules, _adapter.NAME, raising=False)
    with pytest.raises(_extension.BuildError, match="does not load"):  # for this one pretends, too
        _extension._load.__wrapped__()
    said = caplog.text
    assert re.search(r"prebuilt.* does not load here", said) and "compiling the adapter" in said
    assert compiler() == 3
    assert _adapter.NAME not in sys.modules


def test_the_command_builds_once(compiler, no_places, capsys):
    assert main(["torch", "build"]) == 0
    first = capsys.readouterr().out
    assert str(no_places) in first and "made in" in first and compiler() == 3
    assert main(["torch", "build"]) == 0
    assert "was there already" in capsys.readouterr().out and compiler() == 3
    assert main(["torch", "build", "--force"]) == 0
    assert compiler() == 6


def test_the_command_builds_into_an_image(compiler, no_places, capsys, monkeypatch, tmp_path):
    image = tmp_path / "image"
    assert main(["torch", "build", "--into", str(image)]) == 0
    out = capsys.readouterr().out
    assert f"UNJAM_TORCH_BUILD={image}" in out and not no_places.exists()
    monkeypatch.setenv("UNJAM_TORCH_BUILD", str(image))
    path = _extension.found()
    assert path is not None and path.is_relative_to(image)
    # One that is there is copied, not compiled again.
    assert main(["torch", "build", "--into", str(tmp_path / "second")]) == 0
    assert "copied from" in capsys.readouterr().out and compiler() == 3
    assert len(list((tmp_path / "second").rglob("*.so"))) == 1


def test_the_command_says_what_lacks(no_places, monkeypatch, capsys):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["torch", "build"]) == 1
    error = capsys.readouterr().err
    assert "there is no C++ compiler" in error and "unjam torch build --into" in error


def test_a_compiler_with_a_cxx_library_of_its_own_links_the_processs(tmp_path):
    """As some compilers beside the machine's are set up, by their specs or a wrapper."""
    real = shutil.which("g++")
    if real is None or shutil.which("readelf") is None:
        pytest.skip("needs g++ and readelf")
    own = tmp_path / "g++"
    own.write_text(f'#!/bin/sh\nexec {real} -static-libstdc++ "$@"\n')
    own.chmod(0o755)
    source, made = tmp_path / "text.cc", tmp_path / "text.o"
    source.write_text(
        "#include <sstream>\n"
        "std::string text(long x) { std::ostringstream s; s << x; return s.str(); }\n"
    )
    subprocess.run([real, "-fPIC", "-c", source, "-o", made], check=True)

    def needed(library):
        told = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
        return "libstdc++.so.6" in told

    subprocess.run([own, "-shared", made, "-o", tmp_path / "own.so"], check=True)
    assert not needed(tmp_path / "own.so")  # so the next can fail
    linked = _adapter.link(str(own), [str(made)], tmp_path / "linked.so")
    assert linked.returncode == 0 and needed(tmp_path / "linked.so"), linked.stderr
    # Where there is none to be found, the compiler's serves.
    other = tmp_path / "c++"
    other.write_text(f'#!/bin/sh\ncase "$*" in *-l:*) exit 1;; esac\nexec {own} "$@"\n')
    other.chmod(0o755)
    linked = _adapter.link(str(other), [str(made)], tmp_path / "other.so")
    assert linked.returncode == 0 and not needed(tmp_path / "other.so")
