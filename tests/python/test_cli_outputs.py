"""What the command prints and writes: any name, any encoding, files that cannot be written."""

import argparse
import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import unjam.clock.pictures
import unjam.simulate.pictures
from unjam import gloo_program
from unjam._texts import printable
from unjam.cli import _console, _outputs, bench, demo, main, make_parser, pipeline, simulate
from unjam.picture import draw
from unjam.simulate import Group, Job, sweeps
from unjam.simulate import simulate as run_job
from unjam.timeline import RankRow, Span, Timeline


@pytest.fixture(autouse=True)
def without_gloo(monkeypatch):
    """It takes seconds to begin, and test_cli.py has it."""
    monkeypatch.setattr(gloo_program, "lacking", lambda: "PyTorch, which has gloo, is not there")


# ---- names are users' texts ----

NAMES = [
    "nightly [/data/run 7]",
    "dp[/0]",
    "tp[layer0]",
    "[bold]",
    "[/]",
    "[red]x[/red]",
    "\\[a]",
    ":smile: :fire:",
    "a $x_1$ b",
    "$\\frac{$",
    "cost: 5$",
    "\\$",
    "_hidden",
    "{0} {x} %s %(a)s",
    "<b>&amp;</b>",
    "a  b",
    "größer 中文",
    "long " * 40 + "name",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(tmp_path, capsys, name):
    file = tmp_path / "job.json"
    groups = [{"gpus": [0, 1], "collectives": 5, "name": name}] * 2
    file.write_text(json.dumps({"name": name, "disorder": 0.5, "rounds": 50, "groups": groups}))
    assert main(["simulate", "--file", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"\n{name}: 2 GPUs" in out and f"({name})" in out
    assert main(["simulate", "--file", str(file), "--plot", "probabilities", "--rounds", "20",
                 "--out", str(tmp_path / "p.svg")]) == 0  # fmt: skip
    assert capsys.readouterr().out.startswith(f"{name}: how often it hangs")


@pytest.mark.parametrize("name", NAMES[:-1])  # cells are broken into lines
def test_tables_and_lines_show_what_they_are_given(capsys, name):
    console = _console.make_console()
    console.print(name)
    console.print(_console.pairs_table(name, {name: name}))
    console.print(_console.rows_table("", [{name: name, "key": [name]}]))
    out = capsys.readouterr().out
    assert out.startswith(name + "\n") and out.count(name) >= 6


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_progress_bar_shows_names(name):
    from rich.console import Console
    from rich.progress import Progress

    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, record=True, width=100)
        with Progress(*_console.description_and_bar(), console=console) as bar:
            bar.add_task(name, total=2)
        assert name in console.export_text()


def test_what_a_terminal_acts_upon_is_shown(capsys):
    _console.make_console().print("a\x1b[31mb\x07\r\x9b1m\nc")
    assert capsys.readouterr().out == "a\\x1b[31mb\\x07\\x0d\\x9b1m\nc\n"
    assert printable("\x00\t\x7f") == "\\x00\t\\x7f"


def texts_of(path):
    """What matplotlib draws in an SVG: a comment for each line."""
    found = re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"), re.S)
    return " ".join(found)


def a_timeline(name):
    rows = [
        RankRow(0, spans=[Span(0, 0, 1000, name, "finish")]),
        RankRow(1, spans=[Span(0, 0, 900, name, "open")], note=name),
    ]
    return Timeline(name, [(name, name)], 0, 1000, rows)


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", NAMES)
def test_names_are_drawn_as_they_are(tmp_path, name):
    pytest.importorskip("matplotlib")
    escaped = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    draw([a_timeline(name)], tmp_path / "t.svg")
    assert texts_of(tmp_path / "t.svg").count(escaped) == 4  # title, bar, note, legend
    job = Job(2, [Group([0, 1], 5, name)] * 2, disorder=0.5, name=name)
    series = sweeps.sweep("probabilities", job, 20)
    unjam.simulate.pictures.draw_series(series, tmp_path / "s.svg")
    assert f"{escaped}: how often it hangs (exact)" in texts_of(tmp_path / "s.svg")
    with unjam.simulate.Simulator(job) as simulator:
        first = run_job(job, 50).first_exact
        found = simulator.round(first)
    unjam.simulate.pictures.draw_cycle(found, "exact", job, tmp_path / "c.svg")
    assert re.search(rf"{re.escape(escaped)} group \d", texts_of(tmp_path / "c.svg"))


def test_a_users_settings_of_matplotlib_draw_no_formulas(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"text.usetex": True}):
        draw([a_timeline("50% of a_b")], tmp_path / "t.svg")
    assert "50% of a_b" in texts_of(tmp_path / "t.svg")


@pytest.mark.parametrize("name", [*NAMES, "a\x1bb"])
def test_names_in_a_page_are_as_they_are(tmp_path, name):
    from html import unescape

    page = draw([a_timeline(name)], tmp_path / "t.html").read_text(encoding="utf-8")
    for found in (
        re.search(r"<h3>(.*)</h3>", page),
        re.search(r"<title>(.*): 0.000 to", page),
        re.search(r'paint-order="stroke">(.*)</text>', page),
        re.search(r"</i><span>(.*?)</span>", page),
    ):
        assert unescape(found[1]) == printable(name)
        assert "<" not in found[1]


# ---- files that cannot be written ----

JOB = ["simulate", "--tp", "2", "--dp", "2", "--layers", "4", "--ddp-buckets", "10"]
JOB += ["--disorder", "0.01", "--rounds", "100"]
BENCH = ["bench", "--threads", "--seconds", "0.01", "--sizes", "1K:1K"]
BENCH += ["--collective", "all_reduce"]
TIMED = ["plan", "--time", "all_reduce", "--machine", "hgx-h100", "--sizes", "8:4K"]
DEMO = ["demo", "--device", "host", "--ranks", "2", "--iterations", "2", "--tries", "1"]
WRITING = {
    "simulate --cycle": ([*JOB, "--cycle"], "--cycle", ".png"),
    "simulate --out": ([*JOB, "--plot", "overlap", "--out"], "--out", ".svg"),
    "bench --json": ([*BENCH, "--json"], "--json", ".json"),
    "demo --out": ([*DEMO, "--out"], "--out", ".png"),
    "demo --out page": ([*DEMO, "--out"], "--out", ".html"),
    "plan --picture": ([*TIMED, "--picture"], "--picture", ".svg"),
    "pipeline --picture": (["pipeline", "--picture"], "--picture", ".svg"),
    "pipeline --csv": (["pipeline", "--csv"], "--csv", ".csv"),
}


def forbidden(where, tmp_path, ending):
    """A file that cannot be written."""
    if where == "a folder":
        path = tmp_path / f"folder{ending}"
        path.mkdir()
        return path
    if where == "in a file":
        (tmp_path / "file").touch()
        return tmp_path / "file" / f"x{ending}"
    if where == "a link to nowhere":
        path = tmp_path / f"link{ending}"
        path.symlink_to(tmp_path / "none" / f"x{ending}")
        return path
    if where == "too long":
        return tmp_path / ("x" * 300 + ending)
    return Path(f"/proc/self/x{ending}")  # takes no files, of root either


def outcome(capsys, arguments):
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("where", ["no file there", "a folder", "in a file", "a link", "too long"])
@pytest.mark.parametrize("what", WRITING)
def test_an_output_that_cannot_be_written_is_told_before_the_run(
    tmp_path, capsys, monkeypatch, what, where
):
    where = "a link to nowhere" if where == "a link" else where
    arguments, option, ending = WRITING[what]
    for module, name in ((simulate, "_job"), (bench, "run_sweep"), (demo, "_show_hold")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it runs"))
    path = forbidden(where, tmp_path, ending)
    status, out, err = outcome(capsys, [*arguments, str(path)])
    assert (status, out) == (2, ""), err
    assert option in err and (str(path.name) in err or str(path.parent) in err)


def test_an_output_by_default_is_looked_at_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unjam-simulate-overlap.png").mkdir()
    (tmp_path / "unjam-demo-timeline.png").mkdir()
    for arguments in ([*JOB, "--plot", "overlap"], DEMO):
        status, out, err = outcome(capsys, arguments)
        assert (status, out) == (2, "") and "--out" in err


def test_looking_leaves_nothing_behind(tmp_path):
    (tmp_path / "old").write_text("old")
    (tmp_path / "dangling").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("new", "old", "dangling", "pipe"):
        assert _outputs.lacking(tmp_path / name) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "old", "pipe"]
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize("what", WRITING)
def test_figures_are_printed_where_the_file_fails_in_the_end(tmp_path, capsys, monkeypatch, what):
    """As where the disk is full, or the folder is gone."""
    arguments, option, ending = WRITING[what]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((bench, "write_report"), (demo, "draw"),
                         (unjam.simulate.pictures, "draw_cycle"),
                         (unjam.simulate.pictures, "draw_series"),
                         (unjam.clock.pictures, "draw_sizes"),
                         (pipeline, "draw"), (pipeline, "write_csv")):  # fmt: skip
        monkeypatch.setattr(module, name, full)
    path = tmp_path / f"x{ending}"
    status, out, err = outcome(capsys, [*arguments, str(path)])
    assert status == 1
    assert len(out.splitlines()) > 5
    assert f"argument {option}: {path} cannot be written: No space left on device" in err


def test_every_option_that_names_a_file_to_write_is_tried_here():
    tried = {what.partition(" ")[0::2] for what in WRITING}
    (commands,) = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    found = set()
    for command, parser in commands.choices.items():
        for action in parser._actions:
            writes = (
                action.type in (_outputs.file_to_write, Path) or "--out" in action.option_strings
            )
            if writes and action.dest not in ("file", "trace"):
                found.add((command, action.option_strings[0]))
    assert found == {(command, option.split()[0]) for command, option in tried}


def test_pictures_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = outcome(capsys, [*JOB, "--cycle", str(tmp_path / "x.png")])
    assert (status, out) == (2, "") and "--cycle" in err and "pip install matplotlib" in err
    assert draw([a_timeline("a")], tmp_path / "t.png") == tmp_path / "t.html"


def test_out_without_a_plot(capsys):
    status, out, err = outcome(capsys, [*JOB, "--out", "x.png"])
    assert (status, out) == (2, "") and "--plot" in err


# ---- standard output ----


def start(*arguments, encoding=None, **streams):
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if encoding is not None:
        environment["PYTHONIOENCODING"] = encoding
    streams.setdefault("stdout", subprocess.PIPE)
    return subprocess.run(
        [sys.executable, "-m", "unjam", *arguments],
        env=environment, stderr=subprocess.PIPE, timeout=100, **streams,
    )  # fmt: skip


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", [[*JOB, "--json"], JOB, ["env"], ["plan", "--help"]])
def test_standard_output_that_is_full(monkeypatch, command, buffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    if "--help" in command and not buffered:
        pytest.skip("argparse ignores it")
    with open("/dev/full", "w") as full:
        done = start(*command, stdout=full)
    assert done.returncode == 1
    assert done.stderr == b"unjam: standard output cannot be written: No space left on device\n"


def test_standard_output_that_nobody_reads():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = start("env", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_standard_output_that_is_closed():
    done = start("id", stdout=None, preexec_fn=lambda: os.close(1))
    assert done.returncode == 1
    assert done.stderr.decode().startswith("unjam: standard output is closed")


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


def test_too_much_memory_is_no_traceback():
    done = start("fig11", "--size", str(1 << 40), "--ranks", "2", preexec_fn=limited)
    assert done.returncode == 1
    assert done.stderr.decode().startswith("unjam: out of memory"), done.stderr.decode()


ENCODED = {
    "env": ["env"],
    "info": ["info"],
    "plan": ["plan", "--check", "all_reduce"],
    "pipeline": ["pipeline", "--transfer", "1", "--chart", "--picture", "x.png"],
    "reshard": ["reshard", "nine", "--case", "6", "--nodes", "100", "--tries", "5"],
    "loop": ["loop", "plan", "--model", "tiny", "--picture", "x.png"],
    "simulate": [*JOB, "--cycle", "x.png"],
    "plot": [*JOB, "--plot", "overlap", "--out", "x.png"],
    "bench": BENCH,
    "fig11": ["fig11", "--ranks", "2", "--iterations", "1", "--collectives", "2", "--runs", "2"],
    "stress": ["stress", "--ranks", "2", "--iterations", "1", "--seeds", "1", "--no-hold"],
    "demo": DEMO,
    "config": ["config", "--version"],
    "version": ["version"],
    "id": ["id"],
}
# What is printed depends on the machine: test_doctor.py. And what compiles: test_torch_adapter.py.
# (Another program's output is its own: test_nccl_library.py.)
ELSEWHERE = {"doctor", "run", "torch"}
COMMANDS = make_parser()._subparsers._group_actions[0].choices


def in_encoding(monkeypatch, encoding):
    """Standard output and error as a legacy terminal has them; what is written there."""
    import io

    streams = {}
    for name in ("stdout", "stderr"):
        streams[name] = io.BytesIO()
        wrapper = io.TextIOWrapper(streams[name], encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, name, wrapper)
    return streams


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r", "utf-8"])
@pytest.mark.parametrize("command", [*ENCODED, *(f"{name} --help" for name in COMMANDS)])
def test_any_encoding(tmp_path, monkeypatch, command, encoding):
    if encoding not in ("ascii", "latin-1") and command in ("demo", "info", "stress", "bench"):
        pytest.skip("as in ascii")
    monkeypatch.chdir(tmp_path)
    streams = in_encoding(monkeypatch, encoding)
    arguments = ENCODED.get(command, command.split())
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 0
    out = streams["stdout"].getvalue().decode(encoding)
    assert len(out) > 5 and "\ufffd" not in out and "\\u" not in out
    assert sys.stdout.errors == "strict"  # as it was


def test_every_command_is_tried_in_every_encoding():
    assert {arguments[0] for arguments in ENCODED.values()} == set(COMMANDS) - ELSEWHERE


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_and_errors_that_the_encoding_lacks(tmp_path, monkeypatch, encoding):
    file = tmp_path / "job.json"
    group = {"gpus": [0, 1], "collectives": 5}
    file.write_text(json.dumps({"name": "größer 中…", "groups": [group]}), encoding="utf-8")
    streams = in_encoding(monkeypatch, encoding)
    assert main(["simulate", "--file", str(file), "--rounds", "9"]) == 0
    lost = os.fsdecode(b"\xff\xe4.toml")  # a name that is no UTF-8
    assert main(["simulate", "--file", lost]) == 2
    with pytest.raises(SystemExit):
        main(["plan", "--check", "…中"])
    out, err = (streams[name].getvalue().decode(encoding) for name in ("stdout", "stderr"))
    expected = "größer 中…".encode(encoding, "replace").decode(encoding)
    if encoding == "utf-8":
        assert expected in out
    else:
        assert "\\u4e2d..." in out
    assert "\\udcff\\udce4.toml" in err


def test_from_the_shell_in_ascii():
    done = start("env", encoding="ascii")
    assert done.returncode == 0 and b"UNJAM_LANES" in done.stdout
    done.stdout.decode("ascii")
