"""make wheels: the wheels of unjam, with torch's adapters inside, in dist/.

wheels.py [--torch 2.11 ...] [--python 3.11 ...] [--no-cuda] [--into DIR]

Two wheels, told apart by their versions: unjam-X.Y.Z for the host alone, unjam-X.Y.Z+cu13 with the
CUDA part. Each holds the adapter for every pair of the releases of torch and the Pythons chosen
(all that are at hand, unless said), and the tag that auditwheel finds it to deserve. Each
torch is fetched, and deleted when its headers and libraries have served.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import cuda_toolchain
import setup_env
from common import ROOT, VENV, VENV_PYTHON, Failure, environment, jobs, main_wrapper, run, say

BUILD = ROOT / "build" / "wheels"
# Releases of torch that the adapter is tried with.
TORCH = ["2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"]
PYTHONS = range(10, 15)  # minor versions
# A100; H100 and H200; and PTX that drivers translate for newer GPUs.
CUDA_ARCHITECTURES = "80-real;90a-real;90-virtual"
LOCAL_VERSION = "cu13"
# What an adapter takes of torch: the process that loads it has them already.
TORCH_LIBRARIES = ["libc10.so", "libtorch_cpu.so", "libtorch_python.so"]


def _adapter_module() -> ModuleType:
    """unjam.torch._adapter, without unjam.torch, which would import torch."""
    file = ROOT / "python" / "unjam" / "torch" / "_adapter.py"
    spec = importlib.util.spec_from_file_location("unjam_adapter", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


adapter = _adapter_module()


@dataclass(frozen=True)
class Python:
    """One that is at hand."""

    minor: int
    soabi: str
    include: str

    def __str__(self) -> str:
        return f"3.{self.minor}"


def find_pythons(wanted: list[str]) -> list[Python]:
    """One of each minor version, with its headers.

    Args:
        wanted: versions such as "3.11"; empty for all.
    """
    found: dict[int, Python] = {}
    candidates = [VENV_PYTHON]
    for minor in PYTHONS:
        in_path = shutil.which(f"python3.{minor}")
        candidates += [Path(in_path)] if in_path else []
        for folder, pattern in (
            (Path.home() / ".pyenv/versions", f"3.{minor}.*/bin/python3"),
            (Path.home() / ".local/share/uv/python", f"cpython-3.{minor}.*/bin/python3"),
        ):
            candidates += sorted(folder.glob(pattern))
    program = (
        "import json, sys, sysconfig; print(json.dumps([sys.version_info[1],"
        " sysconfig.get_config_var('SOABI'), sysconfig.get_paths()['include']]))"
    )
    for candidate in candidates:
        told = subprocess.run([candidate, "-c", program], capture_output=True, text=True)
        if told.returncode != 0:  # such as pyenv's stand-ins
            continue
        python = Python(*json.loads(told.stdout))
        if python.minor in PYTHONS and (Path(python.include) / "Python.h").exists():
            found.setdefault(python.minor, python)
    lacking = [word for word in wanted if word not in map(str, found.values())]
    if lacking:
        raise Failure(
            f"Python {', '.join(lacking)} with its headers is not at hand; there is "
            f"{', '.join(map(str, found.values())) or 'none'} (python3.X in PATH, pyenv's, uv's)"
        )
    return [p for _, p in sorted(found.items()) if not wanted or str(p) in wanted]


def choose_torch(wanted: list[str]) -> list[str]:
    """The releases that begin with one of the words ("2.12" has two); all for none."""
    chosen = [v for v in TORCH if not wanted or any(f"{v}.".startswith(f"{w}.") for w in wanted)]
    unknown = [w for w in wanted if not any(f"{v}.".startswith(f"{w}.") for v in TORCH)]
    if unknown:
        raise Failure(f"no torch {', '.join(unknown)} here; there are: {', '.join(TORCH)}")
    return chosen


# ---- adapters ----


def fetch_torch(release: str, torch: Path) -> Path:
    """A release's headers and libraries to link, at `torch`.

    Of its wheels for different Pythons those are the same, but for libtorch_python.so, of which
    the linker only takes the name.
    """
    if (torch / "include").is_dir():
        return torch
    say(f"fetching torch {release} (500 MB or more)")
    place = torch.parent
    shutil.rmtree(place, ignore_errors=True)
    command = [VENV_PYTHON, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--python-version", "3.12"]
    for tag in ("manylinux_2_28", "manylinux2014", "linux"):
        command += ["--platform", f"{tag}_{platform.machine()}"]
    run([*command, f"torch=={release}", "-d", place])
    (wheel,) = place.glob("torch-*.whl")
    wanted = {f"torch/lib/{name}" for name in TORCH_LIBRARIES}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("torch/include/") or name in wanted or name.endswith("/METADATA"):
                archive.extract(name, place)
    wheel.unlink()
    return torch


def serves(torch: Path, python: Python) -> bool:
    """Whether the release is for this Python, as its metadata says."""
    (metadata,) = torch.parent.glob("torch-*.dist-info/METADATA")
    minimum = re.search(r"^Requires-Python: *>= *3\.(\d+)", metadata.read_text(), re.M)
    return minimum is None or python.minor >= int(minimum[1])


def check_symbols(file: Path, torch: Path) -> None:
    """What the adapter lacks, torch's libraries, Python, unjam and the system have."""

    def symbols(option: str, library: Path) -> set[str]:
        lines = run(["nm", "-D", option, library], capture_output=True).stdout.splitlines()
        words = [line.split() for line in lines]
        return {word[-1] for word in words if word and word[-2] not in ("w", "v")}

    missing = symbols("--undefined-only", file)
    for name in TORCH_LIBRARIES:
        missing -= symbols("--defined-only", torch / "lib" / name)
    of_others = re.compile(r"_?Py|unjam|.*@(GLIBC|GLIBCXX|CXXABI|GCC)_")
    missing = {name for name in missing if not of_others.match(name)}
    if missing:
        raise Failure(f"{file} needs what torch does not have: {', '.join(sorted(missing)[:5])}")


def headers(torch: Path) -> str:
    """A hash of a release's headers, but for those that say which release it is.

    Patch releases often have the same, and then an adapter that was compiled against one of them is
    that of the other, too.
    """
    apart = ["torch/headeronly/version.h", "caffe2/core/macros.h"]
    root = torch / "include"
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        name = path.relative_to(root).as_posix()
        if name not in apart:
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def make_adapter(folder: Path, target: adapter.Target) -> None:
    """The adapter in its folder: compiled, or that of a release with the same headers."""
    file, known = folder / f"{adapter.NAME}.so", folder / "headers"
    known.write_text(headers(target.torch))
    digest = folder.name.rpartition("-")[2]
    for other in folder.parent.glob(f"torch-*-{target.soabi}-{digest}/headers"):
        same = other.with_name(file.name)
        if same.exists() and other.read_text() == known.read_text():
            say(f"for torch {target.version}, {target.soabi}: {other.parent.name} has its headers")
            partial = Path(shutil.copy(same, file.with_suffix(".new")))
            break
    else:
        say(f"compiling the adapter for torch {target.version}, {target.soabi}")
        # NVTX's headers are a package of .venv, in which this program need not run.
        sys.path += [str(place) for place in VENV.glob("lib/python3*/site-packages")]
        if not adapter.nvtx_include(target.torch):
            raise Failure("the package nvidia-nvtx has no NVTX headers: adapters would lack ranges")
        partial = file.with_suffix(".new")
        try:
            adapter.compile_adapter(target, partial)
        except adapter.BuildError as error:
            raise Failure(str(error)) from error
    check_symbols(partial, target.torch)
    partial.replace(file)


def make_adapters(releases: list[str], pythons: list[Python]) -> list[Path]:
    """Makes what was not made before; gives the folders, in the order of the versions."""
    made: list[Path] = []
    for release in releases:
        torch = None
        for python in pythons:
            # (Official builds have had the newer of libstdc++'s two ABIs since torch 2.7.)
            place = BUILD / f"torch-{release}" / "torch"
            target = adapter.Target(release, python.soabi, True, place, python.include)
            folder = BUILD / "adapters" / target.folder()
            file = folder / f"{adapter.NAME}.so"
            unfit = folder / "unfit"  # remembers what the fetched release said
            if not file.exists() and not unfit.exists():
                folder.mkdir(parents=True, exist_ok=True)
                torch = torch or fetch_torch(release, place)
                if serves(torch, python):
                    make_adapter(folder, target)
                else:
                    unfit.touch()
            if file.exists():
                made.append(folder)
            else:
                say(f"torch {release} is not for Python {python}")
        if torch is not None:
            shutil.rmtree(torch.parent)
    return made


def installed_adapter() -> list[Path]:
    """That of .venv, for the torch in it, which the package there finds or compiles."""
    program = (
        "from unjam.torch import _adapter, _extension as e\n"
        "target = e.target()\n"
        "print(e.found() or e.build()); print(target.folder(_adapter.release(target.version)))"
    )
    path, name = run([VENV_PYTHON, "-c", program], stdout=subprocess.PIPE).stdout.split("\n")[:2]
    target = BUILD / "adapters" / name
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)
    return [target]


# ---- wheels ----


def build_plain(build_dir: Path, **defines: str) -> Path:
    """The wheel as pip builds it: no adapters, and no tag but linux's."""
    raw = BUILD / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    command = [VENV_PYTHON, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--no-input", "-w", raw]
    command += [f"--config-settings=build-dir={build_dir}"]
    command += [f"--config-settings=cmake.define.{name}={v}" for name, v in defines.items()]
    run([*command, ROOT], env=environment(CMAKE_BUILD_PARALLEL_LEVEL=str(jobs())))
    (wheel,) = raw.glob("unjam-*.whl")
    return wheel


def assemble(plain: Path, adapters: list[Path], with_cuda: bool, into: Path) -> Path:
    """A wheel in `into`, with adapters, with or without the CUDA part, and with its tag."""
    folder = BUILD / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    wheel_program = [VENV_PYTHON, "-m", "wheel"]
    run([*wheel_program, "unpack", "-d", folder, plain], stdout=subprocess.DEVNULL)
    (root,) = folder.iterdir()
    for source in adapters:
        target = root / "unjam" / "torch" / "prebuilt" / source.name
        target.mkdir(parents=True)
        shutil.copy(source / f"{adapter.NAME}.so", target)
    if with_cuda:
        (info,) = root.glob("unjam-*.dist-info")
        metadata = (info / "METADATA").read_text()
        version = re.search(r"^Version: (.*)$", metadata, re.M)
        assert version is not None
        own = f"{version[1]}+{LOCAL_VERSION}"
        (info / "METADATA").write_text(metadata.replace(version[0], f"Version: {own}", 1))
        info.rename(root / f"unjam-{own}.dist-info")
    else:
        (root / "unjam" / "lib" / "libunjam_cuda.so").unlink(missing_ok=True)
    packed = BUILD / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir()
    run([*wheel_program, "pack", "-d", packed, root], stdout=subprocess.DEVNULL)
    (unrepaired,) = packed.glob("*.whl")
    repaired = BUILD / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    excluded = [word for name in TORCH_LIBRARIES for word in ("--exclude", name)]
    command = [VENV_PYTHON, "-m", "auditwheel", "repair", *excluded, "-w", repaired, unrepaired]
    run(command, capture_output=True)
    (wheel,) = repaired.glob("*.whl")
    into.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, into / wheel.name))


def show(wheel: Path) -> None:
    """Its size, and what is in it that other wheels of unjam may lack."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    pairs = [re.search(r"prebuilt/torch-(.*?)-(cp\w+-\d+\w*)-.*so$", name) for name in names]
    cuda = "unjam/lib/libunjam_cuda.so" in names
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")
    print(f"  CUDA part: {f'kernels for {CUDA_ARCHITECTURES}' if cuda else 'none, host only'}")
    for match in filter(None, pairs):
        print(f"  adapter for torch {match[1]}, {match[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="*", default=[], metavar="X.Y", help="releases of torch")
    parser.add_argument("--python", nargs="*", default=[], metavar="3.X", help="versions of Python")
    parser.add_argument("--no-cuda", action="store_true", help="the wheel for the host alone")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument(
        "--as-built",
        type=Path,
        metavar="DIR",
        help="only the wheel for the host, of what lies compiled in this build folder; unless "
        "--torch or --python say more, with the one adapter that .venv needs (for the tests)",
    )
    options = parser.parse_args()
    into = options.into.absolute()
    setup_env.ensure("wheels")
    if options.as_built:
        cache = (options.as_built / "CMakeCache.txt").read_text()
        defines = dict(re.findall(r"^(UNJAM_CUDA|UNJAM_UNITY):\w+=(.*)$", cache, re.M))
        plain = build_plain(options.as_built, **defines)
        if options.torch or options.python:
            adapters = make_adapters(choose_torch(options.torch), find_pythons(options.python))
        else:
            adapters = installed_adapter()
        wheels = [assemble(plain, adapters, False, into)]
    else:
        releases, pythons = choose_torch(options.torch), find_pythons(options.python)
        pairs = len(releases) * len(pythons)
        say(f"{pairs} adapters, about {1.2 * pairs:.0f} minutes of a core where they are not there")
        if options.no_cuda:
            plain = build_plain(BUILD / "host", UNJAM_CUDA="OFF")
        else:
            cuda_toolchain.ensure()
            say("kernels for three kinds of GPUs: about 15 minutes of a core the first time")
            plain = build_plain(
                BUILD / "cmake", UNJAM_CUDA="ON", CMAKE_CUDA_ARCHITECTURES=CUDA_ARCHITECTURES
            )
        adapters = make_adapters(releases, pythons)
        kinds = [False] if options.no_cuda else [False, True]
        wheels = [assemble(plain, adapters, with_cuda, into) for with_cuda in kinds]
    for wheel in wheels:
        show(wheel)
    return 0


if __name__ == "__main__":
    main_wrapper(main)
