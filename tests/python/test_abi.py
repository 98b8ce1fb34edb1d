"""The ctypes declarations are those of the C header, of which tools/abi.py makes them."""

import ctypes
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unjam import _abi
from unjam._types import DType, Kind, Op
from unjam.stats import Stats

STRUCTS = {
    "unjamKindInfo_t": _abi.KindInfo,
    "unjamConfig_t": _abi.Config,
    "unjamCallOptions_t": _abi.CallOptions,
    "unjamStats_t": _abi.Stats,
    "unjamTraceEvent_t": _abi.TraceEvent,
    "unjamUniqueId_t": _abi.UniqueId,
    "unjamMachine_t": _abi.Machine,
    "unjamPlanTiming_t": _abi.PlanTiming,
    "unjamSimulation_t": _abi.Simulation,
    "unjamSimulationCounts_t": _abi.SimulationCounts,
}
SCALARS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
}


@pytest.fixture(scope="module")
def code(header):
    """The header without comments and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.S).replace("\\\n", " ")
    text = re.sub(r"^\s*#.*$", " ", text, flags=re.M)
    return re.sub(r"UNJAM_RENAMED\((.*?), (\w+), \w+\)", r"\1 \2", text)


def enums(code):
    return {
        name: int(value)
        for body in re.findall(r"typedef enum \{(.*?)\}", code, flags=re.S)
        for name, value in re.findall(r"UNJAM_(\w+) = (-?\d+)", body)
    }


def ctype(text):
    """The ctypes type of a C parameter, up to what ctypes can tell apart."""
    text = re.sub(r"\bconst\b", "", text).strip()
    if text == "char*":
        return ctypes.c_char_p
    if text == "void*" or text == "unjamCallback_t":
        return ctypes.c_void_p
    if text.endswith("*"):
        return ctypes.POINTER(ctype(text[:-1]))
    if text in SCALARS:
        return SCALARS[text]
    if text in STRUCTS:
        return STRUCTS[text]
    if re.fullmatch(r"unjam(Context|Group|Collective|Request|Simulator)_t", text):
        return ctypes.c_void_p
    if re.fullmatch(r"unjam(Result|DataType|Op|Kind)_t", text):
        return ctypes.c_int
    raise AssertionError(f"unknown type {text}")


def test_enums(code):
    values = enums(code)
    for dtype in DType:
        assert values.pop(dtype.name) == dtype
    for op in Op:
        assert values.pop(op.name) == op
    for kind in Kind:
        assert values.pop(kind.name) == kind
    for name in [name for name in values if not name.startswith(("POLICY_", "ORDER_", "DEVICE_"))]:
        assert values.pop(name) == getattr(_abi, name)
    names = _abi_names()
    assert values == names


def _abi_names():
    from unjam._config import _NAMED

    return {
        f"{field.upper()}_{name.upper()}": value
        for field in ("policy", "order", "device")
        for name, value in _NAMED[field].items()
    }


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "tools")
    before = set(sys.modules)
    yield importlib.import_module("abi")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_file_is_what_the_header_makes_of_it(header, tool):
    assert Path(_abi.__file__).read_text() == tool.generated(header), (
        "python/unjam/_abi.py is not current: run tools/abi.py --generate"
    )


@pytest.mark.parametrize(
    ("there", "changed"),
    [
        ("  int32_t has_root;", "  int32_t has_root; int32_t more;"),
        ("  UNJAM_ERROR_PEER = 6,", "  UNJAM_ERROR_PEER = 60,"),
        ("unjamTest(unjamRequest_t request,", "unjamTest(unjamRequest_t request, int more,"),
        ("#define UNJAM_VERSION_MINOR ", "#define UNJAM_VERSION_MINOR 9"),
    ],
)
def test_a_change_of_the_header_is_noticed(header, tool, there, changed):
    assert there in header
    assert tool.generated(header.replace(there, changed)) != tool.generated(header)


def test_what_the_tool_does_not_know_is_an_error(header, tool):
    unknown = header.replace("unjamWait(unjamRequest_t request", "unjamWait(long double request")
    assert unknown != header
    with pytest.raises(tool.Failure, match="long double"):
        tool.generated(unknown)


def test_version(header):
    for part in ("MAJOR", "MINOR", "PATCH"):
        value = int(re.search(rf"define UNJAM_VERSION_{part} (\d+)", header).group(1))
        assert value == getattr(_abi, f"VERSION_{part}")


def test_functions(code):
    found = {
        name: (result.strip(), parameters)
        for result, name, parameters in re.findall(
            r"UNJAM_API\s+([\w* ]+?)\s*\b(unjam\w+)\(([^)]*)\)", code, flags=re.S
        )
    }
    assert set(found) == set(_abi.PROTOTYPES)
    for name, (result, parameters) in found.items():
        restype, argtypes = _abi.PROTOTYPES[name]
        assert ctype(result) is restype, name
        types = [
            ctype(re.sub(r"\bconst\b|\b\w+\s*$", "", parameter).replace(" ", "").strip())
            for parameter in parameters.split(",")
            if parameter.strip() != "void"
        ]
        assert types == argtypes, name


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_layout_of_structs(header, tmp_path):
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        lines += [f'printf("%zu\\n", offsetof({name}, {f[0]}));' for f in struct._fields_]
    (tmp_path / "unjam.h").write_text(header)
    (tmp_path / "layout.c").write_text(
        '#include <stdio.h>\n#include "unjam.h"\nint main(void) {' + "\n".join(lines) + "}\n"
    )
    subprocess.run(["cc", "-std=c11", "layout.c", "-o", "layout"], cwd=tmp_path, check=True)
    output = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True)
    numbers = [int(line) for line in output.stdout.split()]
    expected = []
    for struct in STRUCTS.values():
        expected.append(ctypes.sizeof(struct))
        expected += [getattr(struct, field[0]).offset for field in struct._fields_]
    assert numbers == expected


def test_stats_dataclass_has_the_structs_fields():
    assert ["size", *Stats.__dataclass_fields__] == [field[0] for field in _abi.Stats._fields_]
