"""What the commands print fits a terminal of 80 columns, and nothing is cut off."""

import io
import re

import pytest
from rich.console import Console

from unjam.cli import _console, main, make_parser

JOB = ["simulate", "--tp", "2", "--dp", "2", "--layers", "4", "--ddp-buckets", "10"]
GLOO = "tests/fixtures/traces/gloo"
COMMANDS = {
    "env": ["env"],
    "env NAME": ["env", "UNJAM_WHOLE_LINES"],
    "info": ["info", "--ranks", "3"],
    "info --all": ["info", "--ranks", "8", "--all"],
    "plan": ["plan", "--check", "all_reduce", "--list"],
    "plan pairwise": ["plan", "--check", "all_to_all", "--ranks", "16", "--lanes", "32"],
    "simulate": [*JOB, "--disorder", "1e-3", "--semantics", "both", "--rounds", "3000"],
    "simulate sync": [*JOB, "--disorder", "1e-3", "--sync", "1e-3", "--rounds", "300"],
    "simulate plot": [*JOB, "--disorder", "0.01", "--rounds", "50", "--plot", "gpus"],
    "simulate table1": ["simulate", "--table1", "--rounds", "40"],
    "simulate trace": ["simulate", "--trace", "GLOO", "--rounds", "50"],
    "bench": ["bench", "--threads", "--sizes", "1K,1000,1M", "--seconds", "0.01"],
    "fig11": ["fig11", "--ranks", "2", "--iterations", "1", "--collectives", "2", "--runs", "2"],
    "stress": ["stress", "--ranks", "2", "--iterations", "1", "--seeds", "1"],
    "demo": ["demo", "--ranks", "3", "--iterations", "2", "--tries", "1", "--seed", "1"],
    "id": ["id"],
}
# Lines of these are paths and compilers' options, to be copied whole.
PATHS = {"config", "doctor", "torch", "version"}


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
    gloo = str(request.config.rootpath / GLOO)
    return [gloo if word == "GLOO" else word for word in COMMANDS[name]]


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
