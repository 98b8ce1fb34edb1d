"""The compiler of CUDA as a library: a program becomes a cubin, without nvcc and without a GPU.

The library comes with torch's wheels, or alone as nvidia-cuda-nvrtc.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .._errors import Internal, InvalidUsage
from .codegen import ENTRY, KERNELS, Code

CURE = "pip install nvidia-cuda-nvrtc"
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_OPTIONS = ("--std=c++20", "--ptxas-options=-v")


@dataclass
class Cubin:
    """A compiled program.

    Attributes:
        image: to load into a GPU.
        log: what compiler and assembler say.
        registers: of a thread.
        spill_bytes: stored and loaded, of a thread.
        stack_bytes: of a thread.
    """

    image: bytes
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def find_library() -> Path | str | None:
    """Where NVRTC is; None: nowhere."""
    for folder in _folders():
        for name in _NAMES:
            if (folder / name).is_file():
                return folder / name
    for name in _NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def _folders() -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for place in spec.submodule_search_locations or () if spec is not None else ():
        yield Path(place) / "cu13" / "lib"
        yield Path(place) / "cuda_nvrtc" / "lib"


class Nvrtc:
    """The library.

    Raises:
        InvalidUsage: it is not installed.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        path = path or find_library()
        if path is None:
            raise InvalidUsage(f"libnvrtc was not found: {CURE}")
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise InvalidUsage(f"{path} cannot be loaded: {error}; {CURE}") from None
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Such as (13, 0)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, code: Code) -> Cubin:
        """Compiles a program for its kind of GPU.

        Raises:
            Internal: the compiler refuses it; the message has its first errors.
        """
        return self.compile_source(code.source, code.arch)

    def compile_source(self, source: str, arch: str) -> Cubin:
        """The same of any source that includes the kernels' headers."""
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            b"unjam_loop.cu",
            0,
            None,
            None,
        )
        try:
            options = [f"--gpu-architecture={arch}", f"--include-path={KERNELS}", *_OPTIONS]
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._lib.nvrtcCompileProgram(program, len(options), array)
            log = self._text(program, "nvrtcGetProgramLog")
            if status != 0:
                lines = [line for line in log.splitlines() if "error" in line] or log.splitlines()
                raise Internal(f"NVRTC refuses the program for {arch}: " + "\n".join(lines[:5]))
            image = self._bytes(program, "nvrtcGetCUBIN")
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))
        return Cubin(image, log, *_figures(log))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status != 0:
            raise Internal(f"{name}: {self._lib.nvrtcGetErrorString(status).decode()}")

    def _bytes(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(name, program, buffer)
        return buffer.raw

    def _text(self, program: ctypes.c_void_p, name: str) -> str:
        return self._bytes(program, name).rstrip(b"\0").decode(errors="replace")


def _figures(log: str) -> tuple[int, int, int]:
    """Registers, spills and stack of the kernel, as the assembler tells them."""
    at = log.find(ENTRY)
    used = re.search(r"Used (\d+) registers", log[at:])
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", log)
    if used is None or frame is None:
        raise Internal(f"NVRTC does not say what {ENTRY} takes: {log[-300:]}")
    return int(used[1]), int(frame[2]) + int(frame[3]), int(frame[1])
