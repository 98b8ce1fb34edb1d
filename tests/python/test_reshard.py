"""Plans of resharding from Python: what is planned, what is refused, and the command line."""

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from unjam._errors import InvalidArgument
from unjam.cli import main
from unjam.reshard import (
    Layout,
    Plan,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    Topology,
    _abi,
    nine,
    parse_request,
    placement_of,
)

ROOT = Path(__file__).resolve().parents[2]

REQUEST = """
[source]
mesh = [2, 2]
placements = ["S(0)", "R"]

[destination]
mesh = [4]
placements = ["S(1)"]

[topology]
ranks_per_host = 2

[tensors.w]
shape = [8, 12]
dtype = "bfloat16"

[tensors.layers]
shape = [6, 4]
dtype = "float32"
dst_dtype = "bfloat16"
source = ["R", "S(0)"]
copies = 3
"""


def halves(shape=(8, 8), dtype="float32", **options):
    return Plan(
        Layout([0, 1], [Shard(0)]), Layout([2, 3], [Shard(1)]), {"w": (shape, dtype)}, **options
    )


# ---- the C API ----

STRUCTS = {
    "unjamMesh_t": _abi.Mesh,
    "unjamPlacement_t": _abi.Placement,
    "unjamReshardTensor_t": _abi.ReshardTensor,
    "unjamTopology_t": _abi.Topology,
    "unjamReshardOptions_t": _abi.ReshardOptions,
    "unjamReshardPart_t": _abi.ReshardPart,
    "unjamCallOptions_t": _abi.CallOptions,
}


@pytest.fixture(scope="module")
def code():
    path = ROOT / "include" / "unjam" / "reshard.h"
    if not path.is_file():
        pytest.skip("the header is not beside the tests")
    text = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.S)
    return re.sub(r"^\s*#.*$", " ", text, flags=re.M)


def ctype(text):
    text = text.replace("const", "").strip()
    if text in ("unjamReshardPlan_t", "unjamGroup_t", "unjamRequest_t", "void*"):
        return ctypes.c_void_p
    if text == "char*":
        return ctypes.c_char_p
    if text.endswith("*"):
        return ctypes.POINTER(ctype(text[:-1]))
    scalars = {
        "int": ctypes.c_int,
        "int32_t": ctypes.c_int32,
        "int64_t": ctypes.c_int64,
        "uint64_t": ctypes.c_uint64,
        "size_t": ctypes.c_size_t,
        "unjamResult_t": ctypes.c_int,
    }
    return scalars.get(text) or STRUCTS[text]


def test_functions_are_those_of_the_header(code):
    found = re.findall(r"UNJAM_API\s+(\w+)\s+(unjam\w+)\(([^)]*)\)", code, flags=re.S)
    assert {name for _, name, _ in found} == set(_abi.PROTOTYPES)
    for result, name, parameters in found:
        restype, argtypes = _abi.PROTOTYPES[name]
        assert ctype(result) is restype
        types = [ctype(re.sub(r"\b\w+\s*$", "", p).replace(" ", "")) for p in parameters.split(",")]
        assert types == argtypes, name


def test_enums_are_those_of_the_header(code):
    values = dict(re.findall(r"UNJAM_(\w+) = (\d+)", code))
    assert values == {
        name: str(getattr(_abi, name)) for name in ("REPLICATE", "SHARD", "STRIDED_SHARD")
    }


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_structs_are_those_of_the_header(code, tmp_path):
    lines = []
    expected = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(getattr(struct, field).offset)
    (tmp_path / "layout.c").write_text(
        '#include <stdio.h>\n#include "unjam/reshard.h"\nint main(void) {'
        + "\n".join(lines)
        + "}\n"
    )
    include = ROOT / "include"
    subprocess.run(
        ["cc", "-std=c11", f"-I{include}", "layout.c", "-o", "layout"], cwd=tmp_path, check=True
    )
    output = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True)
    assert [int(line) for line in output.stdout.split()] == expected


def test_structs_of_another_size_are_refused():
    lib = _abi.reshard_library()
    mesh = _abi.Mesh()
    handle = _abi.Handle()
    code = lib.unjamReshardPlan(
        ctypes.byref(mesh), ctypes.byref(mesh), None, 0, None, None, ctypes.byref(handle)
    )
    assert code == 1
    assert b"set .size = sizeof(unjamMesh_t)" in lib.unjamGetLastError()


def test_null_is_refused():
    lib = _abi.reshard_library()
    needed = ctypes.c_size_t()
    assert lib.unjamReshardDestroy(None) == 1
    assert lib.unjamReshardInfo(None, 0, None, 0, ctypes.byref(needed)) == 1
    assert lib.unjamReshardRank(None, 0, None, 0, ctypes.byref(needed)) == 1
    assert lib.unjamReshardCheck(None, None, 0, ctypes.byref(needed)) == 1
    assert lib.unjamReshardCompare(None, 0, 1, 0, None, 0, ctypes.byref(needed)) == 1
    assert lib.unjamReshardNine(1, None) == 1
    assert lib.unjamReshardRun(None, None, None, None, 0, None, 0, None, None) == 1
    assert lib.unjamReshardIncomplete(None, None, 0, ctypes.byref(needed)) == 1
    plan = halves()
    assert lib.unjamReshardRun(plan._handle, None, None, None, 0, None, 0, None, None) == 1
    assert b"group is NULL" in lib.unjamGetLastError()
    assert lib.unjamReshardPlan(None, None, None, 0, None, None, None) == 1


# ---- plans ----


def test_a_plan_says_its_loads():
    plan = halves()
    assert plan.bound() == plan.busiest() == 128
    assert [(port.host, port.out, port.into) for port in plan.loads()] == [
        (0, 128, 0),
        (1, 128, 0),
        (2, 0, 128),
        (3, 0, 128),
    ]
    assert plan.check() == 64
    assert "bound 128 bytes" in str(plan) and "####" in str(plan)
    assert plan.digest in repr(plan)


def test_the_order_of_tensors_is_no_matter():
    tensors = {f"t{i}": ((4, 4 + i), "float32") for i in range(5)}
    src, dst = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Replicate()])
    backwards = dict(reversed(tensors.items()))
    assert Plan(src, dst, tensors).digest == Plan(src, dst, backwards).digest
    assert Plan(src, dst, tensors).digest != Plan(dst, src, tensors).digest


def test_tensors_have_placements_and_types_of_their_own():
    plan = Plan(
        Layout([0, 1], [Shard(0)]),
        Layout([2, 3], [Shard(0)]),
        {
            "a": ((4, 4), "float32"),
            "b": TensorSpec((4, 4), "float32", "bfloat16", src=["R"], dst=["S(-1)"]),
        },
    )
    assert plan.busiest() == 32 + 16
    (of_a, of_b) = plan.rank(2)["tensors"]
    assert of_a == {"name": "a", "src": None, "dst": [2, 4]}
    assert of_b == {"name": "b", "src": None, "dst": [4, 2]}
    assert plan.check() == 32


def test_bundles_are_listed_if_asked_for():
    plan = halves()
    assert "bundle_list" not in plan.info()
    bundles = plan.info(bundles=True)["bundle_list"]
    assert len(bundles) == 4
    assert bundles[0]["hops"][0]["parent"] == -1


def test_nics_share_the_work_of_a_host():
    src = Layout([0, 1, 2, 3], [Replicate()])
    dst = Layout([4, 5, 6, 7], [Replicate()])
    tensors = {"w": ((1 << 10, 1 << 10), "float32")}
    one = Plan(src, dst, tensors, Topology.equal(8, 4, 1))
    four = Plan(src, dst, tensors, Topology.equal(8, 4, 4))
    assert one.busiest() == 4 << 20
    assert four.busiest() == 1 << 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout([[0, 1], [2]], [Shard(0)]), "no grid"),
        (lambda: Layout([0.5], [Shard(0)]), "no grid of ranks"),
        (lambda: Layout([], [Shard(0)]), "no grid of ranks"),
        (lambda: Layout([-1, 0], [Shard(0)]), "ranks from -1"),
        (lambda: Layout([0, 1], []), "0 placements on a mesh of 1"),
        (lambda: Layout([0], ["S0"]), "placement 'S0': write"),
        (lambda: Layout([0], ["_S(0)"]), "write"),
        (lambda: Layout([0], [3]), "3 is no placement"),
        (lambda: halves((-1,)), "a dimension of -1"),
        (lambda: halves((2.5,)), "a dimension of 2.5"),
        (lambda: halves((4,)), "there is no dimension 1"),
        (lambda: halves(dtype="float31"), "float31"),
        (lambda: halves(window=0), "window is 0"),
        (lambda: halves(max_bytes=4096), "give at least 4096 bytes for each"),
        (lambda: halves(stripes=2000), "stripes 2000: give 1 to 1024"),
        (lambda: halves(topology=Topology([0], [0, 1])), "1 hosts and 2 NICs"),
        (lambda: halves(topology=Topology([0], [0])), "knows 1 ranks, not rank 3"),
        (lambda: halves((1 << 14, 1 << 14)).check(), "too many to check"),
        (lambda: halves().rank(9), "the topology does not know it"),
        (lambda: halves().compare(tries=0), "tries is 0"),
        (
            lambda: Plan(
                Layout(range(40), ["S(0)"]),
                Layout(range(40, 80), ["S(1)"]),
                {"w": ((80, 80), "int8")},
            ).compare(),
            "1600 pairs of tiles that meet",
        ),
        (lambda: nine(10), "case 10: give 1 to 9"),
        (
            lambda: Plan(Layout([0, 0], ["R"]), Layout([1], ["R"]), {}),
            "source: rank 0 stands in the mesh twice",
        ),
        (
            lambda: Plan(Layout([0], ["R"]), Layout([1], ["R"]), {"w": (4,)}),
            "tensor w: give (shape, dtype)",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        make()


def test_placements_by_their_texts():
    assert placement_of("R") == Replicate()
    assert placement_of(" S( 1 ) ") == Shard(1)
    assert placement_of("_S(0, 2)") == StridedShard(0, 2)
    assert [str(placement_of(text)) for text in ("R", "S(1)", "_S(0, 2)")] == [
        "R",
        "S(1)",
        "_S(0, 2)",
    ]


@pytest.mark.parametrize("number", range(1, 10))
def test_the_nine_cases_are_at_the_bound(number):
    plan = nine(number)
    assert plan.busiest() / plan.bound() == pytest.approx(1, abs=1e-6)
    compared = plan.compare()
    assert compared.plan / compared.bound == pytest.approx(1, abs=1e-6)
    assert compared.paper <= compared.naive + 1
    assert compared == nine(number).compare()


# ---- files and the command line ----


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "request.toml"
    path.write_text(REQUEST)
    return path


def test_a_file_is_planned(file, capsys):
    assert main(["reshard", "plan", str(file), "--check", "--compare"]) == 0
    out = capsys.readouterr().out
    assert "4 tensors" in out and "█" in out and "come to where they are wanted" in out
    assert "of the bound" in out


def test_a_file_is_planned_as_json(file, capsys):
    words = ["reshard", "plan", str(file), "--json", "--list", "--check", "--compare"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tensors"] == 4
    assert len(report["bundle_list"]) == report["bundles"]
    assert report["checked_elements"] == 8 * 12 + 3 * 24
    assert report["comparison"]["bound"] == report["bound"]


def test_the_pages_file_is_planned(tmp_path, capsys):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "reshard.md").read_text(), re.S)
    (tmp_path / "weights.toml").write_text(text)
    words = ["reshard", "plan", str(tmp_path / "weights.toml"), "--check", "--compare"]
    assert main(words) == 0
    assert "9 tensors" in capsys.readouterr().out


def test_the_pages_file_is_carried_out(tmp_path, capsys):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "reshard.md").read_text(), re.S)
    (tmp_path / "weights.toml").write_text(text)
    words = ["reshard", "bench", str(tmp_path / "weights.toml"), "--runs", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "16 ranks" in shown and "Median of 2 runs" in shown and "no NIC takes part" in shown
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["seconds"]) == 2 and min(report["seconds"]) > 0
    whole = 1024 * 64 * 2 + 8 * 64 * 64 * 2
    assert report["ranks"] == 16 and report["bytes"] == 8 * whole


def test_what_is_too_large_is_not_carried_out(tmp_path, capsys):
    file = tmp_path / "large.toml"
    file.write_text(REQUEST.replace("[8, 12]", "[8, 1_200_000_000]"))
    assert main(["reshard", "bench", str(file)]) == 2
    assert "this takes at most" in capsys.readouterr().err
    file.write_text(REQUEST.replace("mesh = [4]", "mesh = [4]\nfirst = 1000"))
    assert main(["reshard", "bench", str(file)]) == 2
    assert "ranks up to 1003: this takes at most 256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[source]", "[sauce]", "sauce is no field; did you mean source?"),
        ("[source]", "[source", "is not TOML"),
        ("mesh = [4]", "mesh = [0]", "destination.mesh: 0 is no whole number"),
        ("mesh = [4]", "mesh = 4", "destination.mesh is missing: give a list"),
        ("mesh = [4]", "mesh = [4]\nfirst = -1", "destination.first: -1"),
        ("mesh = [4]", "mesh = [4]\nranks = [1]", "destination.ranks: give a list of 4 ranks"),
        ("mesh = [4]", "mesh = [4]\nranks = [1]\nfirst = 2", "give one of them"),
        ('["S(1)"]', '["S(1)", "R"]', "destination: 2 placements on a mesh of 1"),
        ('["S(1)"]', '["Q"]', "destination: placement 'Q'"),
        ("shape = [8, 12]", "shape = 8", "tensors.w.shape: give a list"),
        ("shape = [8, 12]", "shape = [8.5]", "tensors.w.shape: 8.5"),
        ("shape = [8, 12]", "", "tensors.w.shape is missing"),
        ('dtype = "bfloat16"\n\n', 'dtype = "float3"\n\n', "float3"),
        ("copies = 3", "copies = 0", "tensors.layers.copies: 0"),
        ('source = ["R", "S(0)"]', 'source = "R"', "tensors.layers.source: give a list"),
        ("ranks_per_host = 2", "ranks_per_host = 0", "topology.ranks_per_host: 0"),
        ("ranks_per_host = 2", "nics_per_host = 1", "topology.ranks_per_host is missing"),
        ("[topology]", "[options]\nwindow = 0\n[topology]", "options.window: 0"),
        ("[topology]", "[options]\nspeed = 1\n[topology]", "options.speed is no field"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(old, new, message, file, capsys):
    assert old in REQUEST
    file.write_text(REQUEST.replace(old, new, 1))
    assert main(["reshard", "plan", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error and "request.toml" in error


def test_ranks_may_be_listed():
    text = REQUEST.replace("mesh = [4]", "mesh = [4]\nranks = [7, 6, 5, 4]")
    assert parse_request(text).digest != parse_request(REQUEST).digest
    text = REQUEST.replace("mesh = [4]", "mesh = [4]\nranks = [4, 5, 6, 7]")
    assert parse_request(text).digest == parse_request(REQUEST).digest


def test_nine_on_the_command_line(capsys):
    assert main(["reshard", "nine", "--nodes", "1000", "--tries", "20"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^│ \d ", out, flags=re.M)) == 9
    assert main(["reshard", "nine", "--json", "--case", "4", "--nodes", "1000"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["case"] == 4 and row["tasks"] == 64


def test_pictures_are_drawn(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loads.svg"
    assert main(["reshard", "plan", str(file), "--picture", str(picture)]) == 0
    assert "host 0, NIC 0" in picture.read_text()
    assert main(["reshard", "nine", "--case", "1", "--nodes", "1", "--picture", str(picture)]) == 0
    assert "Case 1 of the paper" in picture.read_text()
    assert main(["reshard", "nine", "--nodes", "1", "--tries", "1", "--picture", str(picture)]) == 0
    assert "case of the paper" in picture.read_text() and "copies" in picture.read_text()
    words = ["bench", str(file), "--runs", "1", "--picture", str(picture), "--json"]
    assert main(["reshard", *words]) == 0
    assert " threads" in picture.read_text() and "host 0, NIC 0" in picture.read_text()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "none.toml"], "none.toml: cannot be read"),
        (["plan"], "FILE"),
        (["nine", "--case", "10"], "10 is not a case from 1 to 9"),
        (["nine", "--case", "1", "--picture", "x.gif"], "the ending must be"),
        (["bench", "x.toml", "--picture", "x.gif"], "the ending must be"),
        (["nine", "--tries", "0"], "0 is not a number of tries"),
        (["plan", "x.toml", "--list"], "--list means nothing without --json"),
        (["plans"], "invalid choice: 'plans'"),
    ],
)
def test_bad_arguments_end_with_status_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["reshard", *words])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_help_without_an_action(capsys):
    assert main(["reshard"]) == 0
    assert "nine" in capsys.readouterr().out
