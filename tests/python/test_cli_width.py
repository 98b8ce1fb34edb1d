"""What the commands print fits a terminal of 80 columns, and nothing is cut off."""

import io
import re

import pytest
from rich.console import Console

from test_simulate import write_dumps
from unjam.cli import _console, main, make_parser

JOB = ["simulate", "--tp", "2", "--dp", "2", "--layers", "4", "--ddp-buckets", "10"]
TIMED = ["plan", "--time", "all_reduce", "--machine", "hgx-h100", "--sizes", "1M"]
GLOO = "tests/fixtures/traces/gloo"
COMMANDS = {
    "env": ["env"],
    "env NAME": ["env", "UNJAM_WHOLE_LINES"],
    "info": ["info", "--ranks", "3"],
    "info --all": ["info", "--ranks", "8", "--all"],
    "plan": ["plan", "--check", "all_reduce", "--list"],
    "plan pairwise": ["plan", "--check", "all_to_all", "--ranks", "16", "--lanes", "32"],
    "plan time": [
        *TIMED,
        "--nodes",
        "4",
        "--algorithms",
        "auto,ring,double_binary_tree,node_trees",
    ],
    "plan path": [*TIMED, "--nodes", "4", "--path"],
    "pipeline": ["pipeline", "--stages", "8", "--microbatches", "64", "--transfer", "1", "--chart"],
    "reshard nine": ["reshard", "nine", "--nodes", "100", "--tries", "5"],
    "reshard case": ["reshard", "nine", "--case", "6", "--nodes", "100"],
    "loop plan": ["loop", "plan", "--model", "tiny-moe", "--ranks", "2"],
    "simulate": [*JOB, "--disorder", "1e-3", "--semantics", "both", "--rounds", "3000"],
    "simulate sync": [*JOB, "--disorder", "1e-3", "--sync", "1e-3", "--rounds", "300"],
    "simulate plot": [*JOB, "--disorder", "0.01", "--rounds", "50", "--plot", "gpus"],
    "simulate table1": ["simulate", "--table1", "--rounds", "40"],
    "simulate trace": ["simulate", "--trace", "GLOO", "--rounds", "50"],
    "simulate cycle": ["simulate", "--trace", "CYCLE", "--rounds", "50"],
    "bench": ["bench", "--threads", "--sizes", "1K,1000,1M", "--seconds", "0.01"],
    "fig11": ["fig11", "--ranks", "2", "--iterations", "1", "--collectives", "2", "--runs", "2"],
    "stress": ["stress", "--ranks", "2", "--iterations", "1", "--seeds", "1"],
    "demo": ["demo", "--ranks", "3", "--iterations", "2", "--tries", "1", "--seed", "1"],
    "id": ["id"],
}
# Lines of these are paths and compilers' options, to be copied whole; or run's program's.
PATHS = {"config", "doctor", "run", "torch", "version"}


def too_wide(text):
    """Lines that do not fit, but for a path on a line of its own."""
    found = []
    for line in text.splitlines():
        is_path = re.fullmatch(r" *(/\S+|UNJAM_\w+=\S+)", line)
        if (len(line) > 80 and not is_path) or re.search(r"\w…", line):
            found.append(line)
    return found


def arguments(name, request, monkeypatch, tmp_path):
    """A command's words; it runs in an empty folder, and without gloo, which takes long."""
    from unjam import gloo_program

    monkeypatch.setattr(gloo_program, "lacking", lambda: "PyTorch, which has gloo, is not there")
    monkeypatch.chdir(tmp_path)
    a, b, c = ("a", 7), ("b", 3), ("c", 9)
    write_dumps(tmp_path / "cycle", [[a, b], [b, c], [c, a]])
    places = {"GLOO": str(request.config.rootpath / GLOO), "CYCLE": str(tmp_path / "cycle")}
    return [places.get(word, word) for word in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_80_columns(name, request, monkeypatch, tmp_path, capsys):
    if "plot" in name or name == "demo":
        pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments(name, request, monkeypatch, tmp_path)) == 0
    out = capsys.readouterr().out
    assert len(out) > 20 and too_wide(out) == []


@pytest.mark.parametrize("name", ["simulate table1", "bench", "env", "info --all"])
def test_a_terminal_of_80_columns(name, request, monkeypatch, tmp_path):
    """There rich asks the terminal; what is printed is the same."""
    printed = io.StringIO()

    def terminal(stderr=False, **_):
        settings = {"highlight": False, "markup": False, "emoji": False}
        return Console(file=printed, force_terminal=not stderr, width=80, **settings)

    for module in ("bench", "demo", "env", "info", "simulate"):
        monkeypatch.setattr(f"unjam.cli.{module}.make_console", terminal)
    assert main(arguments(name, request, monkeypatch, tmp_path)) == 0
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", printed.getvalue())
    assert len(plain) > 200 and too_wide(plain) == []


@pytest.mark.parametrize("command", [None, *make_parser()._subparsers._group_actions[0].choices])
def test_help_fits(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*([command] if command else []), "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_every_command_is_tried():
    known = set(make_parser()._subparsers._group_actions[0].choices)
    assert {words[0] for words in COMMANDS.values()} == known - PATHS


@pytest.mark.parametrize("width", [30, 80, 120])
def test_a_block_is_indented_in_all_its_lines(width):
    printed = io.StringIO()
    console = Console(file=printed, width=width, color_system=None)
    _console.print_block(console, "[bold]word[/] " * 30, indent=3, markup=True)
    _console.print_block(console, "[bold] a\x1b", indent=0)
    *lines, last = printed.getvalue().splitlines()
    assert all(len(line) <= width and line[:3] == "   " and line[3] != " " for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(["word"] * 30)
    assert last == "[bold] a\\x1b"


def test_the_demo_on_gpus_fits(monkeypatch, capsys):
    """With figures of GPUs that are not there."""
    pytest.importorskip("torch")
    from unjam.cuda import gpus, nccl_program, program

    outcome = program.Outcome({"random": 0.75, "consistent": 0.5}, 1600)
    monkeypatch.setattr(gpus, "gpu_count", lambda: 4)
    monkeypatch.setattr(gpus, "lacking", lambda *_, **__: "")
    monkeypatch.setattr(gpus, "describe", lambda: {"gpu": "NVIDIA H100 80GB HBM3, 700 W"})
    for name in ("run_threads", "run_processes"):
        monkeypatch.setattr(program, name, lambda program: outcome)
    hung = nccl_program.NcclTry(True, 3, 10.0)
    monkeypatch.setattr(nccl_program, "try_nccl", lambda *_, **__: hung)
    assert main(["demo", "--device", "cuda", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert too_wide(out) == []
    assert "program 2: hung in 2 of 2 tries, the first after 3 iterations" in out
    assert re.search(r"1 +one for all GPUs +200 +1,600 +3\.75 +1\.50", out)


def test_a_matrix_product_beside_calls_fits(monkeypatch, capsys):
    from unjam.cli import bench

    def run_gemm(sweep, on_row):
        rows = [
            {"lanes": lanes, "beside": name, "blocks": lanes, "ms": 1.5, "low_ms": 1.25,
             "high_ms": 1.75, "slowdown": 1.125, "busbw": 312.0, "covered": name == "alone"}
            for lanes in (4, 16) for name in ("alone", "unjam, waiting", "nccl")
        ]  # fmt: skip
        for row in rows:
            on_row(row)
        return rows

    monkeypatch.setattr(bench, "run_gemm", run_gemm)
    sweep = bench.GemmSweep((4, 16), 2, registered=True)
    assert len(bench._measure_gemm(sweep, _console.make_console())) == 6
    out = capsys.readouterr().out
    assert too_wide(out) == []
    assert "This takes about 1 s in all." in out and out.startswith("14 rows; ")
    assert re.search(r"16 unjam, waiting \* +16 1\.500 1\.250 1\.750 +1\.125 +312", out)
    assert "*: the all-reduces ended before the products." in out
