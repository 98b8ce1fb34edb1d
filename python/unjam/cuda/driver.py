"""What NVIDIA's driver says of this machine, asked directly: without torch and without the runtime.

libcuda.so.1 comes with the driver. No context is made on any GPU, so asking costs no GPU memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

LIBRARY = "libcuda.so.1"
LEAST = 13000  # the CUDA version that libunjam_cuda.so is compiled with
TESTED = (8, 9)  # major compute capabilities of GPUs that unjam has run on: A100; H100, H200

_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CUdevice_attribute
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """One that this process sees.

    Attributes:
        name: as the driver has it, such as "NVIDIA H100 80GB HBM3".
        capability: its compute capability, such as (9, 0).
    """

    name: str
    capability: tuple[int, int]

    @property
    def too_old(self) -> bool:
        """Whether no kernel can be compiled for it."""
        return self.capability[0] < min(TESTED)

    @property
    def too_new(self) -> bool:
        """Whether its driver has to translate kernels that were made for older ones."""
        return self.capability[0] > max(TESTED)


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes:
        lacks: why there is nothing more to say; empty if the driver answered.
        cuda: the newest CUDA version that the driver knows, as 1000 * major + 10 * minor.
        gpus: those that this process sees.
        unreachable: pairs of them without peer access.
    """

    lacks: str = ""
    cuda: int = 0
    gpus: tuple[Gpu, ...] = ()
    unreachable: tuple[tuple[int, int], ...] = field(default=())

    @property
    def cuda_text(self) -> str:
        """Such as "13.0"."""
        return f"{self.cuda // 1000}.{self.cuda % 1000 // 10}"


def look(name: str = LIBRARY) -> Machine:
    """Asks the driver.

    Args:
        name: of its library.
    """
    try:
        cuda = ctypes.CDLL(name)
    except OSError:
        return Machine(lacks=f"no NVIDIA driver ({name} is not installed)")
    return ask(cuda)


def ask(cuda: Any) -> Machine:
    """Asks a loaded libcuda, or what answers in its place.

    Args:
        cuda: the library, by ctypes.
    """
    version = ctypes.c_int(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if code := cuda.cuInit(0):
        why = "this process sees no GPU" if code == 100 else f"cuInit gave error {code}"
        return Machine(lacks=why, cuda=version.value)
    count = ctypes.c_int(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    devices = []
    for index in range(count.value):
        device = ctypes.c_int(0)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        devices.append(device.value)
    unreachable = [
        (a, b)
        for a, first in enumerate(devices)
        for b, second in enumerate(devices)
        if a != b and not _reaches(cuda, first, second)
    ]
    gpus = tuple(_gpu(cuda, device) for device in devices)
    if not gpus:
        return Machine(lacks="this process sees no GPU", cuda=version.value)
    return Machine("", version.value, gpus, tuple(unreachable))


def _reaches(cuda: Any, device: int, other: int) -> bool:
    can = ctypes.c_int(0)
    return cuda.cuDeviceCanAccessPeer(ctypes.byref(can), device, other) == 0 and can.value != 0


def _gpu(cuda: Any, device: int) -> Gpu:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    parts = []
    for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR):
        value = ctypes.c_int(0)
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(value.value)
    return Gpu(name.value.decode(errors="replace"), (parts[0], parts[1]))
