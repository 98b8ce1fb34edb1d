"""unjam simulate: inputs, results that are known, imports of traces, pictures."""

import gzip
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unjam.cli import main
from unjam.simulate import (
    Group,
    InputError,
    Job,
    Parallel,
    Precision,
    Simulator,
    read_job,
    simulate,
    table1,
    wilson,
)
from unjam.simulate.engine import Result
from unjam.simulate.pictures import draw_cycle
from unjam.simulate.trace import read_traces
from unjam.simulate.words import PAPER_DISORDER, ROUND, short, verdict

ROOT = Path(__file__).resolve().parents[2]
GLOO = ROOT / "tests" / "fixtures" / "traces" / "gloo"  # real: see tools/record_trace.py
NCCL = ROOT / "tests" / "fixtures" / "traces" / "nccl"  # real: two H200s
Z999 = table1.Z999


def run(capsys, *arguments):
    """The command's status, standard output and standard error."""
    status = main(["simulate", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# ---- results ----

# What the paper's configurations came to when first run: (row, semantics, percent, rounds).
KNOWN = [
    ("01", "released", 1.03, 32_000),
    ("01", "exact", 1.07, 32_000),
    ("02", "released", 9.83, 32_000),
    ("02", "exact", 9.57, 32_000),
    ("05", "exact", 1.30, 320_000),
    ("06", "released", 0.93, 32_000),
    ("06", "exact", 8.97, 32_000),
    ("07", "released", 9.31, 32_000),
    ("07", "exact", 60.6, 32_000),
    ("08", "released", 1.61, 32_000),
    ("08", "exact", 12.8, 32_000),
    ("14", "released", 0.58, 32_000),
    ("14", "exact", 0, 32_000),
    ("15", "released", 0.57, 32_000),
    ("16", "released", 3.80, 32_000),
    ("17", "released", 3.79, 32_000),
    ("18", "released", 1.53, 32_000),
]


@pytest.fixture(scope="module")
def table_rows():
    """The cheap rows of Table 1, by number."""
    rows = {}
    for path in table1.files():
        if path.name[:2] in {number for number, *_ in KNOWN}:
            rows[path.name[:2]] = simulate(read_job(path).job, 8000, semantics="both")
    return rows


@pytest.mark.parametrize(("row", "semantics", "percent", "rounds"), KNOWN)
def test_table1_is_what_independent_programs_found(table_rows, row, semantics, percent, rounds):
    result = table_rows[row]
    assert not table1.differ(
        percent / 100 * rounds, rounds, result.hits(semantics), result.rounds, Z999
    ), f"{result.hits(semantics) / result.rounds:.4%}"


def test_table1_has_every_row():
    files = table1.files()
    assert len(files) == 18
    by_name = {path.name[:2]: read_job(path) for path in files}
    assert by_name["02"].job.invocations == 102_400
    assert by_name["04"].job.invocations == 4_915_200
    assert by_name["04"].job.gpus == 3072 and len(by_name["04"].job.groups) == 896
    assert by_name["06"].job.invocations == 92_800
    assert by_name["08"].job.invocations == 144_000
    groups = by_name["06"].job.groups
    degree = [sum(gpu in group.gpus for group in groups) for gpu in range(64)]
    assert [degree.count(n) for n in (1, 2, 3, 4, 5)] == [40, 8, 8, 4, 4]


def test_table1_command(capsys):
    status, out, err = run(capsys, "--table1", "--rounds", "40")
    assert status == 0 and err == ""
    assert re.match(r"Of 18 ratios in the paper's Table 1, \d+ are not", out)
    assert len(re.findall(r"^\(.*\) +\d(?:e-\d)? ", out, re.M)) == 8  # one probability
    assert len(re.findall(r"^\(.*\)[ \d/]* +\de-\d/\de-\d ", out, re.M)) == 10
    status, out, _ = run(capsys, "--table1", "--rounds", "40", "--json")
    rows = json.loads(out)["rows"]
    assert len(rows) == 18 and all(row["rounds"] == 40 for row in rows)


def test_interleaved_is_safer_than_concatenated_in_3d():
    job = Parallel(tp=4, dp=4, pp=4, tp_collectives=400, dp_collectives=1200).job(disorder=1e-6)
    result = simulate(job, 32_000)
    assert not table1.differ(0.0499 * 32_000, 32_000, result.exact, 32_000)


def test_sync_1x8():
    job = Job(8, [Group(range(8), 161)], "synchronization", disorder=1e-2, sync=1e-2)
    result = simulate(job, 40_000, semantics="both")
    assert not table1.differ(0.0095 * 320_000, 320_000, result.released, 40_000)
    assert not table1.differ(0.0088 * 320_000, 320_000, result.exact, 40_000)


def test_results_do_not_depend_on_threads_or_engine():
    job = Parallel(tp=2, dp=2, tp_collectives=30, dp_collectives=20).job(
        model="synchronization", disorder=0.2, sync=0.2, seed=5
    )
    results = [
        simulate(job, 600, semantics="both", threads=threads, plain=plain)
        for threads, plain in [(1, False), (3, False), (2, True)]
    ]
    found = {(r.exact, r.released, r.first_exact, r.disorders, r.syncs) for r in results}
    assert len(found) == 1
    assert results[0].exact > 0 and results[0].exact_only == 0


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ("01", {"disorder": 1e-5}),
        ("06", {"disorder": 1e-5}),
        ("09", {"disorder": 0.01, "sync": 0.02}),
        ("14", {"disorder": 0.004, "sync": 0.008}),
    ],
)
def test_engines_agree_on_rows_of_table1(row, changes):
    """Verdicts and cycles, round by round; probabilities at which many rounds deadlock."""
    (path,) = [path for path in table1.files() if path.name.startswith(row)]
    found = []
    with Simulator(read_job(path).job.replace(**changes)) as simulator:
        for number in range(8):
            plain = simulator.round(number, plain=True)
            plain.pop("lost", None)
            found.append(simulator.round(number))
            assert found[-1] == plain
    assert any(round["exact"]["deadlock"] or round["released"]["deadlock"] for round in found)


def test_disorder_zero_never_deadlocks():
    for model, sync in (("single-queue", 0.0), ("synchronization", 0.05)):
        job = Parallel(tp=2, dp=4, tp_collectives=40, dp_collectives=40).job(
            model=model, disorder=0.0, sync=sync
        )
        assert simulate(job, 3000).exact == 0


def test_one_gpu_never_deadlocks():
    for model, sync in (("single-queue", 0.0), ("synchronization", 0.2)):
        job = Job(1, [Group([0], 20), Group([0], 30)], model, disorder=0.3, sync=sync)
        assert simulate(job, 2000, semantics="both").exact == 0


@pytest.mark.parametrize("model", ["single-queue", "synchronization"])
def test_more_disorder_is_never_safer(model):
    previous = 0.0
    for disorder in (0.0, 0.001, 0.005, 0.02, 0.05, 0.1):
        job = Parallel(tp=4, dp=2, tp_collectives=6, dp_collectives=9).job(
            model=model, disorder=disorder, sync=0.1 if model == "synchronization" else 0.0
        )
        result = simulate(job, 20_000)
        low, high = wilson(result.exact, result.rounds, Z999)
        assert high >= previous, disorder
        previous = low


def test_relabelling_gpus_changes_nothing():
    groups = [Group([0, 1, 2], 12), Group([2, 3], 20), Group([3, 0], 16), Group([1, 3], 9)]
    names = [2, 0, 3, 1]
    moved = [Group([names[gpu] for gpu in g.gpus], g.collectives) for g in groups]
    for model, sync in (("single-queue", 0.0), ("synchronization", 0.1)):
        a, b = (
            simulate(Job(4, each, model, disorder=0.02, sync=sync, seed=seed), 20_000)
            for each, seed in ((groups, 1), (moved, 2))
        )
        assert a.exact > 0
        assert not table1.differ(a.exact, a.rounds, b.exact, b.rounds)


def test_stages_are_independent():
    """P(all) = 1 - (1 - P(stage))^pp: all stages are simulated, so this can be seen."""
    settings = {"model": "synchronization", "disorder": 0.01, "sync": 0.02}
    sizes = {"tp": 2, "dp": 2, "tp_collectives": 30, "dp_collectives": 60}
    one = simulate(Parallel(**sizes).job(**settings), 40_000)
    four = simulate(Parallel(pp=4, **sizes).job(seed=9, **settings), 20_000)
    expected = 1 - (1 - one.exact / one.rounds) ** 4
    assert not table1.differ(expected * 20_000, 20_000, four.exact, 20_000)


def test_precision_stops_early():
    job = Parallel(tp=2, dp=2, tp_collectives=30, dp_collectives=20).job(disorder=0.01)
    result = simulate(job, 10**9, precision=Precision.parse("1%"))
    assert result.stopped == "precise enough"
    low, high = wilson(result.exact, result.rounds)
    assert (high - low) / 2 <= 0.01 * result.exact / result.rounds


def test_wilson():
    assert wilson(0, 0) == (0, 1)
    low, high = wilson(10, 100)
    assert math.isclose(low, 0.0552, abs_tol=1e-4) and math.isclose(high, 0.1744, abs_tol=1e-4)
    assert wilson(0, 100)[0] == 0 and wilson(100, 100)[1] == 1


def test_a_round_tells_its_cycle(capsys):
    status, out, _ = run(
        capsys, "--tp", 2, "--dp", 2, "--tp-collectives", 20, "--dp-collectives", 20,
        "--disorder", 0.05, "--rounds", 100, "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert status == 0
    waits = found["round"]["exact"]["waits"]
    assert [wait["on"] for wait in waits] == [wait["gpu"] for wait in waits[1:] + waits[:1]]


# ---- parallel jobs ----


def test_parallel_groups():
    job = Parallel(
        tp=2, cp=2, dp=4, ep=2, pp=2, world=32, layers=8, micro_batches=3, ddp_buckets=10
    ).job(disorder=0.1)
    kinds = {}
    for group in job.groups:
        kinds.setdefault(group.name, []).append(group)
    assert {name: len(groups) for name, groups in kinds.items()} == {
        "tp": 16, "cp": 16, "ep": 16, "dp": 4,
    }  # fmt: skip
    assert {name: groups[0].collectives for name, groups in kinds.items()} == {
        "tp": 48, "cp": 24, "ep": 48, "dp": 10,
    }  # fmt: skip
    for groups in kinds.values():  # each kind partitions the GPUs
        assert sorted(gpu for group in groups for gpu in group.gpus) == list(range(32))


# ---- bad input ----

OPTIONS = ["--tp", "4", "--dp", "4", "--tp-collectives", "4", "--dp-collectives", "4"]
BAD_OPTIONS = [
    ([], "give one of"),
    (["--tp", "4"], "--layers"),
    (["--tp", "0", "--layers", "4"], "--tp"),
    (["--dp", "4"], "--ddp-buckets"),
    (["--world", "9", *OPTIONS], "--world"),
    (["--ep", "3", "--layers", "4", *OPTIONS], "--ep"),
    ([*OPTIONS, "--disorder", "-0.1"], "disorder"),
    ([*OPTIONS, "--disorder", "1.5"], "disorder"),
    ([*OPTIONS, "--disorder", "nan"], "disorder"),
    ([*OPTIONS, "--disorder", "1e-15"], "disorder"),
    ([*OPTIONS, "--sync", "2"], "sync"),
    ([*OPTIONS, "--sync", "1"], "sync"),
    ([*OPTIONS, "--sync", "0.1", "--model", "single-queue"], "sync"),
    ([*OPTIONS, "--rounds", "0"], "rounds"),
    ([*OPTIONS, "--rounds", "-3"], "rounds"),
    ([*OPTIONS, "--threads", "0"], "threads"),
    ([*OPTIONS, "--seed", "-1"], "seed"),
    ([*OPTIONS, "--model", "double-queue"], "model"),
    ([*OPTIONS, "--order", "random"], "order"),
    ([*OPTIONS, "--semantics", "fuzzy"], "semantics"),
    ([*OPTIONS, "--precision", "0"], "precision"),
    ([*OPTIONS, "--cycle", "picture.bmp"], "cycle"),
    ([*OPTIONS, "--table1", "--rounds", "0"], "rounds"),
    ([*OPTIONS, "--table1"], "means nothing with --table1"),
    (["--table1", "--seed", "7"], "--seed"),
    (["--table1", "--precision", "10%"], "--precision"),
    ([*OPTIONS, "--disorder", "0.1", "--plot", "gpus", "--semantics", "fuzzy"], "semantics"),
    ([*OPTIONS, "--plot", "gpus", "--precision", "10%"], "--precision"),
    ([*OPTIONS, "--cycle", "/nowhere/cycle.png"], "cycle"),
    ([*OPTIONS, "--plot", "gpus"], "disorder"),
    (["--file", "/nowhere/job.toml"], "/nowhere/job.toml"),
    (["--trace", "/nowhere/trace_0"], "/nowhere/trace_0"),
    (["--tp", "1000000", "--dp", "1000000", *OPTIONS[4:]], "GiB"),
]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ([*OPTIONS, "--disorder", "2"], "--disorder: 2.0 is no probability"),
        ([*OPTIONS, "--precision", "0"], "--precision: '0': write 0.001 or 10%"),
        ([*OPTIONS, "--semantics", "fuzzy"], "--semantics: 'fuzzy' is none of"),
        ([*OPTIONS, "--plot", "gpus"], "--disorder: must be over 0"),
        ([*OPTIONS, "--rounds", "0"], "--rounds: 0 is not in"),
    ],
)
def test_options_are_named_as_they_are_typed(capsys, arguments, first):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and err.startswith(f"unjam simulate: {first}")
    assert err.endswith("\nSee: unjam simulate --help\n")


@pytest.mark.parametrize(("arguments", "named"), BAD_OPTIONS)
def test_bad_options(capsys, arguments, named):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("unjam simulate: ") and named in err, err


GOOD = """\
model = "synchronization"
disorder = 0.01
sync = 0.02
gpus = 4
rounds = 50

[[groups]]
gpus = [0, 1, 2]
collectives = 10

[[groups]]
gpus = [2, 3]
collectives = 20
"""
BAD_FILES = [  # what to replace, by what, the field and line that the message must name
    ("disorder = 0.01", "disorder = -0.01", "disorder", 2),
    ("disorder = 0.01", 'disorder = "high"', "disorder", 2),
    ("disorder = 0.01", "disorder = true", "disorder", 2),
    ("sync = 0.02", "sync = 1.02", "sync", 3),
    ("rounds = 50", "rounds = 0", "rounds", 5),
    ("rounds = 50", 'semantics = "fuzzy"', "semantics", 5),
    ("rounds = 50", "rounds = 1.5", "rounds", 5),
    ("rounds = 50", "round = 50", "round", 5),
    ("gpus = 4", "gpus = 0", "gpus", 4),
    ("gpus = 4", "gpus = 99999999999", "gpus", 4),
    ("[2, 3]", "[]", "groups[1].gpus", 12),
    ("[2, 3]", "[2, 4]", "groups[1].gpus", 12),
    ("[2, 3]", "[2, -1]", "groups[1].gpus", 12),
    ("[2, 3]", "[2, 2]", "groups[1].gpus", 12),
    ("[2, 3]", '[2, "3"]', "groups[1].gpus", 12),
    ("collectives = 20", "collectives = 0", "groups[1].collectives", 13),
    ("collectives = 20", "", "groups[1].collectives", 11),
    ("collectives = 20", "collectives = 20\nsize = 3", "groups[1].size", 14),
    ('"synchronization"', '"sync"', "model", 1),
    ("sync = 0.02", "sync = 0.02.1", "", 3),
    ("[2, 3]", "[2, 3", "", None),
]


@pytest.mark.parametrize(("old", "new", "field", "line"), BAD_FILES)
def test_bad_toml(tmp_path, capsys, old, new, field, line):
    path = tmp_path / "job.toml"
    path.write_text(GOOD.replace(old, new, 1))
    status, _, err = run(capsys, "--file", path)
    assert status == 2
    where = f"{path}:{line}: " if line else f"{path}:"
    assert where in err and field in err, err


def test_files_beyond_what_python_reads(tmp_path):
    number = "9" * 5000
    for name, text in [
        ("job.toml", f"seed = {number}"),
        ("job.json", f'{{"seed": {number}}}'),
        ("job.toml", "sequence = " + "[" * 5000 + "]" * 5000),
        ("job.json", "[" * 990 + "]" * 990),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError):
            read_job(tmp_path / name)


def test_good_file_as_toml_and_json(tmp_path):
    toml, same = tmp_path / "job.toml", tmp_path / "job.json"
    toml.write_text(GOOD)
    groups = [{"gpus": [0, 1, 2], "collectives": 10}, {"gpus": [2, 3], "collectives": 20}]
    table = {"model": "synchronization", "disorder": 0.01, "sync": 0.02, "gpus": 4, "rounds": 50}
    same.write_text(json.dumps({**table, "groups": groups}))
    assert read_job(toml) == read_job(same)


def test_bad_json_names_the_line(tmp_path):
    path = tmp_path / "job.json"
    path.write_text('{"gpus": 4,\n "groups": [\n  {"gpus": [0, 1],\n   "collectives": -1}]}')
    with pytest.raises(InputError) as error:
        read_job(path)
    assert (error.value.line, error.value.field) == (4, "groups[0].collectives")
    path.write_text('{"gpus": 4,\n "groups": [')
    with pytest.raises(InputError, match="not JSON"):
        read_job(path)


def test_absurd_sizes_are_refused_with_an_estimate():
    job = Job(4, [Group(range(4), 2**29), Group(range(4), 2**28)])
    with pytest.raises(InputError, match=r"at least [\d]+ MiB .* more than the 1024 MiB allowed"):
        Simulator(job, memory=1 << 30)


# ---- real traces ----


def test_what_rounds_hold_is_part_of_the_estimate():
    job = Parallel(tp=8, dp=8, tp_collectives=4000, dp_collectives=4000).job(disorder=0.5)
    Simulator(job.replace(disorder=1e-6), memory=1 << 20).close()
    with pytest.raises(InputError, match="disorders of a round"):
        Simulator(job, memory=1 << 20)
    many = Job(gpus=2, groups=[Group([0, 1], 1000)] * 200, disorder=1e-6)
    with pytest.raises(InputError, match="steps of the groups"):
        Simulator(many, memory=16 << 20)


def test_a_real_run_by_gloo():
    trace = read_traces([GLOO])
    assert trace.ranks == [0, 1, 2, 3]
    names = sorted(group.name.split()[0] for group in trace.groups)
    assert names == ["data_parallel"] * 2 + ["default_pg"] + ["tensor_parallel"] * 2
    assert {tuple(g.gpus) for g in trace.groups if g.name.startswith("data")} == {(0, 2), (1, 3)}
    assert trace.calls == 84 and trace.skips == 0 and trace.cycle == [] and not trace.mismatches
    assert simulate(trace.job(disorder=0.0), 100).exact == 0
    assert simulate(trace.job(disorder=0.05), 2000).exact > 0


def test_real_dumps_by_nccl():
    trace = read_traces(sorted(NCCL.glob("nccl_trace_rank_*")))
    assert trace.ranks == [0, 1] and len(trace.groups) == 4
    assert trace.calls == 42 and trace.skips == 0 and trace.cycle == [] and not trace.mismatches


def test_real_profiler_traces_of_nccl():
    trace = read_traces(sorted(NCCL.glob("rank*.json.gz")))
    assert trace.ranks == [0, 1]
    assert sorted(group.name.split()[0] for group in trace.groups) == [
        "data_parallel",
        "data_parallel",
        "tensor_parallel",
    ]
    assert trace.calls == 28 and trace.skips == 0 and trace.cycle == []
    assert trace.syncs > 0  # the job's own cudaDeviceSynchronize and the like


def test_trace_command(capsys):
    status, out, _ = run(capsys, "--trace", GLOO, "--rounds", "500")
    assert status == 0
    assert "4 ranks, 5 groups, 84 calls" in out and "hold no cycle" in out
    status, out, _ = run(capsys, "--trace", GLOO, "--rounds", "500", "--json", "--sync", "0.01")
    found = json.loads(out)
    assert found["model"] == "synchronization" and found["trace"]["cycle"] == []


def entry(group, seq, time, op="nccl:all_reduce"):
    return {
        "process_group": (group, "made by hand"),
        "collective_seq_id": seq,
        "profiling_name": op,
        "time_created_ns": time,
        "is_p2p": False,
    }


def write_dumps(folder, orders, members=None):
    """Dumps made by hand, in NCCL's form: orders[rank] is a list of (group, seq)."""
    folder.mkdir(exist_ok=True)
    for rank, order in enumerate(orders):
        config = {
            group: {"name": group, "desc": "", "ranks": str(ranks)}
            for group, ranks in (members or {}).items()
        }
        entries = [entry(group, seq, place * 1000) for place, (group, seq) in enumerate(order)]
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))


def test_a_cycle_in_a_trace_is_named(tmp_path, capsys):
    a, b, c = ("a", 7), ("b", 3), ("c", 9)
    write_dumps(tmp_path / "t", [[a, b], [b, c], [c, a]])
    trace = read_traces([tmp_path / "t"])
    assert len(trace.cycle) == 3
    assert {edge.rank for edge in trace.cycle} == {0, 1, 2}
    assert [edge.after for edge in trace.cycle] == [
        edge.before for edge in trace.cycle[1:] + trace.cycle[:1]
    ]
    assert trace.skips > 0
    status, out, _ = run(capsys, "--trace", tmp_path / "t", "--rounds", "100")
    assert status == 0
    assert "in one queue a GPU, this very run deadlocks." in " ".join(out.split())
    assert "rank 0 called all_reduce 0 of made by hand a before" in out


def test_measured_disorder(tmp_path):
    order = [("g", k) for k in range(50)]
    other = list(order)
    other[10], other[11] = other[11], other[10]
    write_dumps(tmp_path / "t", [order, order, other], {"g": [0, 1, 2]})
    trace = read_traces([tmp_path / "t"])
    assert trace.skips == 1 and trace.looks == 3 * 49 + 1
    assert len(trace.cycle) == 2
    job = trace.job()
    assert job.disorder == pytest.approx(1 / 148)


def test_buffers_that_begin_elsewhere_are_aligned(tmp_path):
    write_dumps(tmp_path / "t", [[("g", k) for k in r] for r in (range(5, 20), range(8, 24))])
    trace = read_traces([tmp_path / "t"])
    assert trace.groups[0].collectives == 12 and trace.dropped == 3 + 4


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/unjam-evil",))


def test_bad_traces(tmp_path):
    path = tmp_path / "trace_rank_0"

    def message(data):
        path.write_bytes(data)
        with pytest.raises(InputError) as error:
            read_traces([path])
        assert str(path) in str(error.value)
        return str(error.value)

    assert "asks for" in message(pickle.dumps(Evil()))
    assert "asks for" in message(pickle.dumps({"entries": [Evil()]}))
    real = (GLOO / "gloo_trace_rank_0").read_bytes()
    for size in (0, 1, 2, 10, len(real) // 2, len(real) - 1):
        assert "truncated" in message(real[:size])
    assert "truncated" in message(b'{"traceEvents": [')
    assert "entries" in message(pickle.dumps({"version": "2.10"}))
    assert "cannot be read" in message(gzip.compress(b"{}" * 1000)[:-20])
    broken = entry("g", 1, 5)
    del broken["collective_seq_id"]
    assert "entries[0].collective_seq_id: is missing" in message(
        pickle.dumps({"entries": [broken]})
    )
    assert "entries[0].time_created_ns" in message(
        pickle.dumps({"entries": [{**entry("g", 1, 5), "time_created_ns": "now"}]})
    )
    write_dumps(tmp_path / "t", [[("g", 1)]], {"g": [0, 1]})
    with pytest.raises(InputError, match="rank 1, whose trace is missing"):
        read_traces([tmp_path / "t"])


def test_malformed_traces_are_named(tmp_path):
    nested = []
    for _ in range(60):
        nested = [nested, nested]  # its whole repr has 2^60 brackets
    profile = {"ph": "X", "name": "record_param_comms"}
    arguments = {"Collective name": "allreduce", "Process Group Name": "0"}
    for content, field in [
        ({"entries": [entry("0", 1, 0) | {"is_p2p": nested}]}, "entries[0].is_p2p"),
        ({"entries": [entry("0", 1, 0) | {"process_group": (nested, "")}]}, "process_group"),
        ({"entries": [entry("0", 1, 0) | {"time_created_ns": 10**400}]}, "time_created_ns"),
        ({"entries": [entry("0", 1, 0) | {"time_created_ns": math.nan}]}, "time_created_ns"),
        ({"entries": [], "pg_config": {"0": {"ranks": "-" * 100_000 + "1"}}}, "pg_config[0].ranks"),
        ({"traceEvents": [], "distributedInfo": {"rank": 0, "pg_config": None}}, "pg_config"),
        ({"traceEvents": [profile | {"args": arguments, "ts": math.inf}]}, "traceEvents[0].ts"),
        ({"traceEvents": [{"ph": "X", "name": []}]}, "entries"),
    ]:
        path = tmp_path / "dump_0"
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(InputError) as raised:
            read_traces([path])
        assert field in str(raised.value)
        assert len(str(raised.value)) < 1000
    damaged = bytearray(gzip.compress(os.urandom(4096)))
    damaged[10:60] = b"\xff" * 50
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="cannot be read"):
        read_traces([path])


def test_a_hang_of_first_calls_and_a_rank_that_is_only_late(tmp_path):
    members = {"0": [0, 1], "1": [0, 1]}
    write_dumps(tmp_path / "hang", [[("0", 1)], [("1", 1)]], members)
    with pytest.raises(InputError, match="stand in a cycle: rank 0 has not called"):
        read_traces([tmp_path / "hang"])
    # Rank 1 is behind, and waits for nobody that waits for it.
    write_dumps(tmp_path / "late", [[("0", 1), ("0", 2), ("1", 1)], [("0", 1)]], members)
    assert read_traces([tmp_path / "late"]).hang == []


def test_what_too_few_looks_and_dropped_calls_mean(tmp_path, capsys):
    # A hang: each rank has called only what the other has not.
    members = {"0": [0, 1], "1": [0, 1]}
    write_dumps(tmp_path, [[("0", 1), ("0", 2)], [("0", 1), ("1", 1)]], members)
    status, out, _ = run(capsys, "--trace", tmp_path, "--rounds", "10")
    assert status == 0
    assert "ranks stand in a cycle" in out and "hold no cycle" not in out
    assert "rank 1 has not called all_reduce number 2" in out
    assert "rank 0 has not called all_reduce number 1" in out
    hang = json.loads(run(capsys, "--trace", tmp_path, "--rounds", "10", "--json")[1])
    assert len(hang["trace"]["hang"]) == 2
    assert out.startswith("This run hangs in one queue a GPU")
    assert "\nThe trace is too short to tell" in out and "\nIf disorder were " in out
    assert "too few looks" in out
    assert "upper limit" not in out
    assert "at most" not in out.partition("2 ranks, 1 groups")[2]
    assert run(capsys, "--trace", GLOO, "--rounds", "10")[1].startswith("At most about ")
    status, out, _ = run(capsys, "--trace", GLOO, "--rounds", "10", "--json")
    assert json.loads(out)["trace"]["upper_limit"] is True


def test_profiler_traces(tmp_path):
    """Made by hand, in the form of a Kineto trace of an NCCL run."""
    for rank in range(2):
        events = [
            {
                "ph": "X", "name": "record_param_comms", "ts": ts, "dur": 1,
                "args": {"Collective name": op, "Process Group Name": "0",
                         "Process Group Description": "default_pg",
                         "Process Group Ranks": "[0, 1]"},
            }
            for ts, op in ((1, "init"), (5, "allreduce"), (9, "broadcast"), (12, "wait"))
        ]  # fmt: skip
        events.append({"ph": "X", "name": "cudaDeviceSynchronize", "ts": 10, "dur": 1})
        content = {"distributedInfo": {"rank": rank, "pg_config": []}, "traceEvents": events}
        (tmp_path / f"r{rank}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    trace = read_traces([tmp_path])
    assert trace.calls == 4 and trace.syncs == 2 and trace.sync == pytest.approx(1 / 3)
    assert trace.job(model="synchronization").sync == pytest.approx(1 / 3)


# ---- sentences ----


def found(hits, rounds, disorder=1e-5, **more):
    job = Job(2, [Group([0, 1], 5)], disorder=disorder, **more)
    return Result(job, "exact", rounds, hits, hits, 0, 0, None, None, 0, 0, 0.1, 0.1)


@pytest.mark.parametrize(
    ("hits", "rounds", "words"),
    [
        (292, 32_000, "About one hang in 110 iterations (95 %: one in 98 to one in 120)."),
        (1, 32_000, "About one hang in 32,000 iterations (95 %: one in 5,600 to one in 180,000)."),
        (0, 32_000, "No hang in 32,000 iterations: at most about one in 8,300 (95 %)."),
        (0, 1, "No hang in 1 iteration: at most about 79 in 100 (95 %)."),
        (1, 1, "Every iteration hangs: 1 of 1."),
        (50, 50, "Every iteration hangs: 50 of 50."),
        (31_999, 32_000, "Nearly every iteration hangs: 31,999 of 32,000."),
        (96, 300, "About 32 hangs in 100 iterations (95 %: 27 to 37)."),
        (1, 8, "About 12 hangs in 100 iterations (95 %: 2.2 to 47)."),
        (0, 0, "Nothing is known: it was ended before the first iteration was simulated."),
    ],
)
def test_a_verdict_is_a_sentence(hits, rounds, words):
    assert verdict(found(hits, rounds), "exact") == words


def test_verdicts_of_limits_of_rounds_and_without_disorder():
    assert verdict(found(9, 900), "exact", ROUND, bound=True) == (
        "At most about one hang in 100 rounds (95 %: one in 53 to one in 190)."
    )
    sure = "No hang is possible: without disorder all GPUs call in one order."
    assert verdict(found(0, 9, disorder=0.0), "exact") == sure
    # The released code counts waits that are no cycles, so it is not sure.
    assert verdict(found(0, 9, disorder=0.0), "released").startswith("No hang in 9 iterations")


def test_the_papers_disorders_are_those_of_table_1():
    for model, (low, high) in PAPER_DISORDER.items():
        jobs = [
            job for job in (read_job(path).job for path in table1.files()) if job.model == model
        ]
        assert (min(job.disorder for job in jobs), max(job.disorder for job in jobs)) == (low, high)
    assert [short(v) for v in (1e-5, 0.0, 0.25, 4.5e-3, 1e-12, 1.0)] == [
        "1e-5", "0", "0.25", "4.5e-3", "1e-12", "1",
    ]  # fmt: skip


def test_the_answer_comes_first_and_says_what_it_assumes(tmp_path, capsys):
    arguments = [*OPTIONS, "--disorder", "1e-3", "--rounds", "500", "--semantics", "both"]
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    answer, rest = out.split("\n", 1)
    assert re.match(r"(About|No) .* iterations.*\.$", answer)
    assert "By the rule of the paper's released code: " in rest
    text = " ".join(rest.split())
    assert "Disorder 1e-3 is an assumption" in text and "Table 1 assumes 1e-9 to 1e-5" in text
    words = json.loads(run(capsys, *arguments, "--json")[1])["in_words"]
    assert words[0] == answer and len(words) == 3
    (tmp_path / "job.toml").write_text(GOOD)
    out = run(capsys, "--file", tmp_path / "job.toml")[1]
    assert "A round is every collective of every group once." in out and "iteration" not in out
    assert "assumes 4e-6 to 4e-3" in " ".join(out.split())
    measured = run(capsys, "--trace", GLOO, "--rounds", "10")[1]
    assert "assumption" not in measured
    assert "assumption" in run(capsys, "--trace", GLOO, "--rounds", "10", "--disorder", "0.1")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("world = 16\n", "world: is unknown here: it belongs under [parallel]"),
        ("ddp-buckets = 4\n", "ddp-buckets: is unknown here: it belongs under [parallel]"),
        ("collectives = 4\n", "collectives: is unknown here: it belongs under [[groups]]"),
        ("disordr = 4\n", "disordr: is unknown; did you mean disorder? known are"),
        ("[parallel]\ndisorder = 1\n", "parallel.disorder: is unknown here: it belongs at the top"),
        (
            "[parallel]\nmicro-batches = 1\n",
            "parallel.micro-batches: is unknown; did you mean micro_b",
        ),
        (
            "[[groups]]\ngpus = [0]\ncollectives = 1\ntp = 2\n",
            "tp: is unknown here: it belongs under",
        ),
    ],
)
def test_names_that_stand_elsewhere(tmp_path, capsys, text, words):
    path = tmp_path / "job.toml"
    path.write_text(text)
    status, _, err = run(capsys, "--file", path)
    assert status == 2 and words in err
    line = len(text.splitlines())
    assert err.startswith(f"unjam simulate: {path}:{line}: ")


# ---- pictures, interruption ----


def words_of(path):
    """What matplotlib draws in an SVG, a comment for each text."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"), re.S)


def test_plots_show_counts_and_say_what_they_show(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "p.svg"
    job = ["--tp", "4", "--dp", "4", "--layers", "24", "--ddp-buckets", "40", "--disorder", "1e-4"]
    assert run(capsys, *job, "--rounds", "200", "--plot", "gpus", "--out", out)[0] == 0
    drawn = words_of(out)
    assert [w for w in drawn if w.isdecimal()] == ["16", "32", "64", "128", "256"]
    assert "chance of a hang per iteration" in drawn
    assert any(re.fullmatch(r"[\d.]+ %", w) for w in drawn)
    joined = "copies, joined: the same, and one more group, of the first GPU of each copy"
    assert joined in drawn
    assert run(capsys, *job, "--rounds", "200", "--plot", "overlap", "--out", out)[0] == 0
    assert [w for w in words_of(out) if w.isdecimal()] == ["1", "2", "3"]


@pytest.mark.parametrize("semantics", ["exact", "released"])
def test_a_cycle_is_drawn_as_who_stands_where(tmp_path, semantics):
    pytest.importorskip("matplotlib")
    job = Parallel(tp=4, dp=4, tp_collectives=20, dp_collectives=60).job(disorder=1e-3, seed=3)
    with Simulator(job) as simulator:
        result = simulator.run(3000, "both")
        number = result.first_exact if semantics == "exact" else result.first_released
        witness = simulator.round(number)
    draw_cycle(witness, semantics, job, tmp_path / "c.svg")
    drawn = "\n".join(words_of(tmp_path / "c.svg"))
    waits = witness[semantics]["waits"]
    assert waits
    for wait in waits:
        label = f"group {wait['group']}\ncollective {wait['index']}"
        # In the row of who stands in it, and in that of who has not called it.
        assert drawn.count(label) >= 2
        assert f"GPU {wait['gpu']}\n" in drawn
    assert f"waits until GPU {waits[0]['on']} calls" in drawn
    assert ("wait for each other in a circle" in drawn) == (semantics == "exact")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures(tmp_path, capsys, ending):
    pytest.importorskip("matplotlib")
    small = [*OPTIONS, "--disorder", "0.01", "--rounds", "300"]
    for kind in ("probabilities", "gpus", "overlap"):
        out = tmp_path / f"{kind}.{ending}"
        sync = ["--sync", "0.05"] if kind == "probabilities" else []
        status, _, _ = run(capsys, *small, *sync, "--plot", kind, "--out", out)
        assert status == 0 and out.stat().st_size > 5000
    out = tmp_path / f"cycle.{ending}"
    status, _, err = run(capsys, *small, "--cycle", out)
    assert status == 0 and out.stat().st_size > 5000 and "drawn" in err


def test_ctrl_c_prints_what_is_known():
    environment = dict(os.environ)
    paths = [str(Path(sys.modules["unjam"].__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    arguments = ["--disorder", "0.001", "--sync", "0.001", "--rounds", str(10**12), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "unjam", "simulate", *OPTIONS, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        # Only when it is sure to be at work, however slow the machine: its CPU time says so.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            if (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 2:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["stopped"] == "interrupted" and found["rounds"] > 0
    assert found["exact"]["low"] <= found["exact"]["ratio"] <= found["exact"]["high"]
