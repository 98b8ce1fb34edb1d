"""The command ``unjam``, in subprocesses."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import unjam
from processes import SOON_S, environment
from unjam import gloo_program, late_rank, programs
from unjam.cli import _console, demo, env, info, main, make_parser
from unjam.cuda import gpus


def test_demo(python, tmp_path):
    arguments = ["-m", "unjam", "demo", "--quick", "--seed", "4", "--tries", "2"]
    finished = python(*arguments, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    out = finished.stdout
    text = " ".join(out.split())
    assert "seed 4" in out
    assert out.count("deadlocked in 2 of 2 tries") == 2
    assert re.search(r"rank \d runs all-reduce [A-H] \(\d+ \w+\) and waits for rank \d", text)
    assert "every result right" in out
    assert "Cost of disorder" in out
    # What a table says is explained, and nothing of the progress is left.
    assert "Preempted: how often an engine set a call aside" in text
    assert not re.search(r"program \d: \d+ of \d+", out)
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    if importlib.util.find_spec("torch") is None:
        assert "PyTorch, which has gloo, is not installed here: pip install torch" in text
    else:
        assert re.search(
            r"gloo, one order on all ranks: [\d.]+ ms .* unjam, any order: [\d.]+ ms", text
        )
        assert "gloo, each rank in its own order: " in text
    assert (tmp_path / "unjam-demo-timeline.png").stat().st_size > 10_000
    assert str(tmp_path / "unjam-demo-timeline.png") in out


def gloo_shown(monkeypatch, capsys, **found):
    """What the demo prints of gloo."""

    def try_gloo(*_):
        if "error" in found:
            raise RuntimeError(found["error"])
        return gloo_program.GlooTry(**({"iterations": 20, "results": 1280, "seconds": 2.0} | found))

    monkeypatch.setattr(gloo_program, "lacking", lambda: found.pop("lack", ""))
    monkeypatch.setattr(gloo_program, "try_gloo", try_gloo)
    settings = demo._Demo(_console.make_console(), 8, 200, 4, 10, "")
    demo._show_gloo(settings, {"random": programs.Part("random", 200, 5.0)})
    return " ".join(capsys.readouterr().out.split())


def test_demo_shows_what_becomes_of_gloo(monkeypatch, capsys):
    shown = gloo_shown(monkeypatch, capsys, end="broke", words="mismatch [a]?")
    assert "gloo, one order on all ranks: 100.0 ms an iteration" in shown
    assert "unjam, any order: 25.0 ms" in shown and "That is 4.0 times gloo's speed" in shown
    assert "in its own order: it ended the process. its words: mismatch [a]?" in shown
    hung = gloo_shown(monkeypatch, capsys, end="hung", limit_s=24.0)
    assert "it hung. It was ended after 24 s." in hung and "Trying PyTorch's gloo" in hung
    failed = gloo_shown(monkeypatch, capsys, end="failed", words="status -9; silence")
    assert "its end: status -9; silence" in failed
    assert "wrong results, without" in gloo_shown(monkeypatch, capsys, end="wrong")
    assert "this time it went well" in gloo_shown(monkeypatch, capsys, end="completed")
    assert "Left out: silence" in gloo_shown(monkeypatch, capsys, error="silence")
    lack = "PyTorch is not there: pip install torch"
    assert f"Left out: {lack}; then unjam demo" in gloo_shown(monkeypatch, capsys, lack=lack)


def test_demo_without_torch_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(gloo_program.importlib.util, "find_spec", lambda name: None)
    assert gloo_program.lacking().endswith("pip install torch")


def test_gloo_in_one_order_and_in_disorder():
    pytest.importorskip("torch")
    found = gloo_program.try_gloo(3, 1, 4)
    assert (found.iterations, found.results, found.end) == (4, 4 * 3 * 8, "broke")
    assert found.seconds > 0 and found.ms_per_iteration == pytest.approx(250 * found.seconds)
    # Two ranks that end the process at once leave no sentence: "terminate called recursively".
    assert found.words == "" or "Received data size doesn't match" in found.words


def test_gloo_leaves_nothing_behind(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(gloo_program.tempfile, "tempdir", None)
    gloo_program.try_gloo(2, 1, 2)
    assert list(tmp_path.iterdir()) == []


def instead_of_gloo(monkeypatch, tmp_path, script):
    """A shell script is the child; returns the folder for temporary files."""
    program = tmp_path / "child"
    program.write_text(f'#!/bin/sh\ntouch "$7/store"\n{script}\n')
    program.chmod(0o755)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(gloo_program.tempfile, "tempdir", str(folder))
    monkeypatch.setattr(gloo_program.sys, "executable", str(program))
    return folder


SOUND = "echo a warning; echo consistent 16 0.5; "
ENFORCED = "echo '[enforce fail at pair.cc:5] a is b. Sizes differ' >&2; "


@pytest.mark.parametrize(
    ("script", "end", "words"),
    [
        ("echo random; echo random; echo random", "completed", ""),
        ("echo random; echo wrong; exec sleep 60", "wrong", ""),
        (ENFORCED + "kill -ABRT $$", "broke", "a is b. Sizes differ"),
        ("echo '[/x/gloo/pair.cc:53] Closed' >&2; exit 1", "broke", "Closed"),
        ("kill -ABRT $$", "broke", ""),
        ("exec >&-; sleep 0.3; kill -ABRT $$", "broke", ""),
        ("echo No memory >&2; kill -KILL $$", "failed", "status -9; No memory"),
        ("exit 3", "failed", "status 3; silence"),
        ("exec sleep 60", "hung", ""),
    ],
)
def test_ends_of_gloos_process_are_told_apart(script, end, words, monkeypatch, tmp_path):
    folder = instead_of_gloo(monkeypatch, tmp_path, SOUND + script)
    found = gloo_program.try_gloo(2, 1, 50, 0.3)
    assert (found.results, found.seconds, found.end, found.words) == (16, 0.5, end, words)
    assert found.limit_s == pytest.approx(0.3)
    assert list(folder.iterdir()) == []


def test_a_slow_gloo_has_longer_before_it_counts_as_hung(monkeypatch, tmp_path):
    instead_of_gloo(monkeypatch, tmp_path, SOUND + "echo random; echo random; echo random")
    assert gloo_program.try_gloo(2, 1, 1).limit_s == pytest.approx(15.0)


def test_what_gloos_process_wrote_before_it_failed_is_told(monkeypatch, tmp_path):
    instead_of_gloo(monkeypatch, tmp_path, "echo on output; echo on error >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"in one order: on output\non error"):
        gloo_program.try_gloo(2, 1, 1)


def test_a_limit_that_gloo_does_not_keep_grows_with_ranks_and_is_named(monkeypatch, tmp_path):
    instead_of_gloo(monkeypatch, tmp_path, "exec sleep 60")
    monkeypatch.setattr(gloo_program, "START_S", 0.1)
    for ranks, limit in ((16, "0.1"), (64, "0.4")):
        with pytest.raises(RuntimeError, match=f"in one order in {limit} s: silence"):
            gloo_program.try_gloo(ranks, 1, 1)


def test_ctrl_c_leaves_nothing_of_gloo(monkeypatch, tmp_path):
    folder = instead_of_gloo(monkeypatch, tmp_path, SOUND + "exec sleep 60")
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        gloo_program.try_gloo(2, 1, 1)
    assert list(folder.iterdir()) == []


def wait_until(true):
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_gloos_process_ends_with_its_parent(number, tmp_path):
    """A torch whose import takes a minute stands for one that runs."""
    pid, folder = tmp_path / "pid", tmp_path / "temporary"
    (tmp_path / "torch.py").write_text(
        "import os, time\n"
        f"with open({str(tmp_path / 'part')!r}, 'w') as file:\n"
        "    file.write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'part')!r}, {str(pid)!r})\n"
        "time.sleep(60)\n"
    )
    folder.mkdir()
    settings = environment(TMPDIR=folder)
    # In front of the torch that lies beside unjam, where both are installed.
    settings["PYTHONPATH"] = str(tmp_path) + os.pathsep + settings["PYTHONPATH"]
    program = "from unjam import gloo_program; gloo_program.try_gloo(2, 1, 1)"
    parent = subprocess.Popen([sys.executable, "-c", program], env=settings)
    try:
        wait_until(pid.exists)
        child = Path("/proc", pid.read_text())
        parent.send_signal(number)
        assert parent.wait(SOON_S) == -number
        wait_until(lambda: not child.exists() or "State:\tZ" in (child / "status").read_text())
        wait_until(lambda: list(folder.iterdir()) == [])
    finally:
        parent.kill()
        parent.wait()


def test_gloo_that_cannot_be_run_is_told(monkeypatch):
    monkeypatch.setattr(gloo_program.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="gloo could not be run in one order: silence"):
        gloo_program.try_gloo(2, 1, 1)


def test_demo_as_html_with_two_ranks(python, tmp_path):
    arguments = ["demo", "--quick", "--ranks", "2", "--iterations", "3", "--out", "a.html"]
    finished = python("-m", "unjam", *arguments, "--tries", "1", "--seed", "1", cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "<svg" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("there", [True, False], ids=["driver", "no-driver"])
def test_demo_tells_that_gpus_were_left_out(there, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_DRIVER", tmp_path if there else tmp_path / "none")
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: None)  # without torch
    for part in ("_show_hold", "_show_unjam", "_show_gloo", "_show_picture"):
        monkeypatch.setattr(demo, part, lambda *_: True)
    assert main(["demo"]) == 0
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    if not there:
        assert last.startswith("Done in")
        return
    assert last.startswith("Left out, though there is an NVIDIA driver")
    assert "pip install torch" in last and "unjam demo --device cuda" in last
    assert main(["demo", "--device", "host"]) == 0  # as was asked for
    assert "Left out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["dance"],
        ["demo", "--ranks", "1"],
        ["demo", "--ranks", "65"],
        ["demo", "--ranks", "x"],
        ["demo", "--iterations", "0"],
        ["demo", "--out", "picture.bmp"],
        ["demo", "--seed", "-1"],
        ["plan"],
        ["plan", "--check", "all_at_once"],
        ["plan", "--check", "broadcast", "--root", "9"],
        ["plan", "--check", "broadcast", "--ranks", "65001"],
        ["plan", "--check", "broadcast", "--ranks", "4", "--hosts", "5"],
        ["plan", "--check", "broadcast", "--hosts", "0"],
        ["fig11", "--ranks", "1"],
        ["fig11", "--runs", "1"],
        ["plan", "--check", "all-reduce", "--dtype", "int16"],
        ["info", "--ranks", "0"],
        ["info", "--device", "gpu"],
    ],
)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    out, err = capsys.readouterr()
    # What is wrong, then where the help is; no usage between.
    command = f"unjam {arguments[0]}" if arguments[0] != "dance" else "unjam"
    wrong, help_is = err.splitlines()
    assert wrong.startswith(f"{command}: ") and help_is == f"See: {command} --help"
    assert out == ""


@pytest.mark.parametrize(
    ("words", "command", "meant"),
    [
        ("dmeo", "unjam", "did you mean demo?"),
        (
            "bench --pear gloo",
            "unjam bench",
            "unrecognized arguments: --pear gloo; did you mean --peer",
        ),
        ("bench --peer golo", "unjam bench", "did you mean gloo?"),
        ("torch biuld", "unjam torch", "did you mean build?"),
        ("torch build --form", "unjam torch build", "unrecognized arguments: --form"),
        ("--bogus", "unjam", "unrecognized arguments: --bogus"),
        ("plan --check all_reduce extra", "unjam plan", "unrecognized arguments: extra"),
        ("env UNJAM_LANS", "unjam env", "no variable 'UNJAM_LANS'; did you mean UNJAM_LANES?"),
        ("env jobs", "unjam env", "UNJAM_JOBS is of the build or the tests"),
        ("env nonsense", "unjam env", "there is no variable 'nonsense'\n"),
        ("env xyzzy", "unjam env", "there is no variable 'xyzzy'"),
    ],
)
def test_a_mistyped_word(words, command, meant, capsys):
    with pytest.raises(SystemExit) as error:
        main(words.split())
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{command}: ") and meant in err
    assert err.endswith(f"See: {command} --help\n")


@pytest.mark.parametrize("arguments", [[], ["torch"]])
def test_help_where_no_command_is_given(arguments, capsys):
    """As pip, cargo and docker do; an error would name a word that newcomers do not know yet."""
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: unjam") and err == ""
    assert re.search(r"^\s+(demo|build)\s+\S", out, re.M)


def test_help(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--help"])
    assert error.value.code == 0
    out = capsys.readouterr().out
    for command in ("demo", "info", "env", "plan", "stress", "fig11", "version"):
        assert re.search(rf"^\s+{command}\s+\S", out, re.M), command


def test_every_argument_has_a_default_that_parses():
    parser = make_parser()
    for command in ("demo", "info", "env", "stress", "fig11", "version"):
        assert parser.parse_args([command]).command == command


def test_info(monkeypatch, capsys):
    assert main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["settings"] and info["memory"]
    assert main(["info", "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "UNJAM_LANES" in out and "per_key" in out
    # Counters are for those who ask; settings are as their variables take them.
    assert re.search(r"UNJAM_POLICY *\S *adaptive", out) and "quits" not in out
    assert len(out.splitlines()) < 110
    assert main(["info", "--all"]) == 0
    assert "quits" in capsys.readouterr().out
    monkeypatch.setenv("UNJAM_LANES", "32")  # as on GPUs
    assert main(["info", "--all"]) == 0
    lanes = capsys.readouterr().out.partition("Lanes (the first 4 of 32; --json shows all)")[2]
    assert "lane 3" in lanes and "lane 4" not in lanes and "starts" in lanes


@pytest.mark.parametrize(
    ("arguments", "variable", "words"),
    [
        (["--device", "cuda"], None, "argument --device: torch sees no GPU"),
        ([], "cuda", "UNJAM_DEVICE=cuda: torch sees no GPU"),
    ],
)
def test_info_without_a_gpu(arguments, variable, words, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(gpus, "gpu_count", lambda: 0)
    if variable is not None:
        monkeypatch.setenv("UNJAM_DEVICE", variable)
    with pytest.raises(SystemExit) as error:
        main(["info", *arguments])
    assert error.value.code == 2
    assert words in capsys.readouterr().err


def test_info_on_the_host_where_the_environment_says_cuda(monkeypatch, capsys):
    monkeypatch.setenv("UNJAM_DEVICE", "cuda")
    assert main(["info", "--device", "host", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "host"


def test_info_on_gpus_that_are_not_there(monkeypatch, capsys):
    """The host device in their place: what is called there, and how a kernel's figures look."""
    asked = []

    def on_the_host(ranks, device):
        asked.append(device)
        return unjam.init_all(ranks, device="host")

    real = unjam.Context.info
    kernel = {"blocks": 32, "calls_in_streams": {"registers_per_thread": 128}}
    monkeypatch.setattr(gpus, "lacking", lambda ranks, shared: "")
    monkeypatch.setattr(info, "init_all", on_the_host)
    monkeypatch.setattr(info, "_zeros", lambda context: np.zeros(1000, np.float32))
    monkeypatch.setattr(unjam.Context, "info", lambda self: real(self) | {"kernel": kernel})
    monkeypatch.setattr(unjam.Context, "device", "cuda:0")
    assert main(["info", "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert asked == ["cuda"]
    assert "2 ranks share cuda:0" in out and "a broadcast" not in out
    assert re.search(r"calls_in_streams registers_per_thread\s*│\s*128", out)
    assert main(["info", "--device", "cuda", "--ranks", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernel"] == kernel and [key["key"] for key in report["keys"]] == ["example"]


RESOURCES = {
    "registers_per_thread",
    "shared_bytes_per_block",
    "local_bytes_per_thread",
    "blocks_per_sm",
}


@pytest.mark.gpu
@pytest.mark.skipif(bool(gpus.lacking(2, shared=True)), reason="no GPU that unjam can use")
def test_info_on_gpus(monkeypatch, capsys):
    assert main(["info", "--device", "cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    kernel = report["kernel"]
    lanes = report["settings"]["UNJAM_LANES"]
    assert (report["device"], kernel["blocks"]) == ("cuda", lanes)
    assert kernel["threads_per_block"] == report["settings"]["UNJAM_BLOCK_THREADS"]
    assert 1 <= kernel["sms"] <= lanes
    calls = kernel["calls_in_streams"]
    assert set(calls) == RESOURCES | {"blocks_at_most", "threads_per_block_at_most"}
    for one in (kernel, calls):
        assert 0 < one["registers_per_thread"] <= 128 and one["blocks_per_sm"] >= 1
        assert one["shared_bytes_per_block"] > 0 and one["local_bytes_per_thread"] >= 0
    assert kernel["global_bytes_of_1000_keys"] == 1000 * kernel["key_bytes"]
    assert kernel["global_bytes_of_1000_keys_per_block"] == 1000 * kernel["key_bytes"] // lanes
    assert [(key["key"], key["completed"]) for key in report["keys"]] == [("example", 1)]
    monkeypatch.setenv("UNJAM_DEVICE", "cuda")
    assert main(["info", "--ranks", "1"]) == 0
    out = capsys.readouterr().out
    assert "on cuda:0" in out and "global_bytes_of_1000_keys" in out and "ranks share" not in out


def test_env(monkeypatch, capsys):
    monkeypatch.setenv("UNJAM_LANES", "3")
    monkeypatch.setenv("UNJAM_LIBRARY", unjam._lib.library_path().as_posix())
    assert main(["env", "--json"]) == 0
    variables = json.loads(capsys.readouterr().out)
    read_here = [variable for variable in variables if variable["read_by"] == "library"]
    assert len(read_here) > 30
    for variable in read_here:
        assert {"name", "type", "default", "doc", "value"} <= set(variable)
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    # A line each: name, value, a few words.
    for name in [v["name"] for v in read_here] + ["UNJAM_LIBRARY", "UNJAM_COMMIT"]:
        assert re.search(rf"^{name}( \*)? +\S+ +{re.escape(env.SHORT[name])} *$", out, re.M), name
    assert re.search(r"^UNJAM_LANES \* +3 ", out, re.M)
    assert re.search(r"^UNJAM_POLICY +adaptive ", out, re.M)
    assert "  UNJAM_LANES=3\n" in out
    assert f"  UNJAM_LIBRARY={unjam._lib.library_path()}\n" in out


def test_env_of_a_variable_whose_value_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("UNJAM_POOL_SLOTS", "nonsense")  # another one's error is not this one's
    monkeypatch.setenv("UNJAM_LANES", "999")
    assert main(["env", "lanes"]) == 0
    assert (
        "refused: UNJAM_LANES=999 is not valid: give a number from 1 to 32"
        in capsys.readouterr().out
    )
    monkeypatch.setenv("UNJAM_LANES", "3")
    assert main(["env", "lanes"]) == 0
    assert "refused" not in capsys.readouterr().out
    assert os.environ["UNJAM_POOL_SLOTS"] == "nonsense"


def test_env_of_an_empty_name(capsys):
    with pytest.raises(SystemExit) as end:
        main(["env", ""])
    assert end.value.code == 2 and "there is no variable ''\n" in capsys.readouterr().err


def test_env_of_one_variable(monkeypatch, capsys):
    monkeypatch.setenv("UNJAM_TIMEOUT_MS", "77")
    assert main(["env", "--json"]) == 0
    variables = {v["name"]: v for v in json.loads(capsys.readouterr().out)}
    for given in ("UNJAM_TIMEOUT_MS", "unjam_timeout_ms", "TIMEOUT_MS", "UNJAM_TIMEOUT_MS=5"):
        assert main(["env", given]) == 0
        out = capsys.readouterr().out
        doc = variables["UNJAM_TIMEOUT_MS"]["doc"]
        assert doc in re.sub(r"\s+", " ", out)
        assert "takes:   0 to 1073741824\n" in out and "set to:  77\n" in out
    assert main(["env", "UNJAM_LANES"]) == 0
    out = capsys.readouterr().out
    assert "Must be equal on all ranks." in re.sub(r"\s+", " ", out) and "(not set)" in out
    assert main(["env", "lanes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [variables["UNJAM_LANES"]]
    assert main(["env", "torch_replace"]) == 0
    assert "takes:   nccl, gloo, or both" in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind",
    [
        "all-reduce",
        "all_gather",
        "reduce-scatter",
        "Reduce",
        "broadcast",
        "all-to-all",
        "gather",
        "scatter",
        "barrier",
    ],
)
@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "auto"])
def test_plan(kind, algorithm, capsys):
    arguments = ["plan", "--check", kind, "--ranks", "5", "--algorithm", algorithm]
    assert main([*arguments, "--json", "--list", "--count", "1000"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert len(report["programs"]) == 5
    for program in report["programs"]:
        for primitive in program["primitives"]:
            peers = primitive["recv_peers"] + primitive["send_peers"]
            assert set(peers) <= set(range(5)) - {program["rank"]}
    assert main([*arguments, "--list"]) == 0
    assert "The result is right" in capsys.readouterr().out


def test_plan_of_a_pair(capsys):
    assert main(["plan", "--check", "send-recv", "--root", "1", "--json", "--list"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [[p["op"] for p in program["primitives"]] for program in report["programs"]] == [
        ["recv_copy"],
        ["send"],
    ]
    (receive,), (send,) = (program["primitives"] for program in report["programs"])
    assert (receive["recv_peers"], receive["send_peers"]) == ([1], [])
    assert (send["recv_peers"], send["send_peers"], send["partials"]) == ([], [0], False)
    assert main(["plan", "--check", "send-recv", "--ranks", "3", "--json"]) == 1
    assert "between 2 ranks, not 3" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("all_reduce", "hierarchical"), ("all_reduce", "pat"), ("all_gather", "pat")],
)
def test_plan_on_hosts(kind, algorithm, capsys):
    arguments = ["plan", "--check", kind, "--ranks", "6", "--hosts", "3", "--algorithm", algorithm]
    assert main([*arguments, "--json", "--list", "--count", "1000"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["algorithm"], report["hosts"]) == (True, algorithm, 3)
    for program in report["programs"]:
        rank = program["rank"]
        for primitive in program["primitives"]:
            for peer in primitive["recv_peers"] + primitive["send_peers"]:
                # Of the same host, or at the same place of another one.
                assert peer // 2 == rank // 2 or peer % 2 == rank % 2
    assert main(arguments) == 0
    assert "over 6 ranks on 3 hosts" in capsys.readouterr().out


def test_plan_on_hosts_that_differ(capsys):
    arguments = ["plan", "--check", "all_reduce", "--ranks", "5", "--hosts", "2", "--json"]
    assert main([*arguments, "--algorithm", "hierarchical"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == (
        "hierarchical plans need as many ranks on each host: rank 0's host has 3 of them, "
        "rank 3's has 2: use ring"
    )
    assert main(arguments) == 0


def test_plan_check_fails_with_status_1(capsys):
    status = main(["plan", "--check", "all-reduce", "--slots", "1", "--json", "--lanes", "2"])
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["ok"] else 1)


def test_version(capsys):
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"unjam {unjam.__version__}"
    assert lines[1].startswith("libunjam ")
    assert re.search(r"/libunjam\.so(\.0)?$", lines[2])


def test_stress(capsys):
    arguments = ["stress", "--iterations", "2", "--seeds", "2", "--ranks", "4", "--delays"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("true cycle") == 4 and "FAILED" not in out


def test_fig11(capsys):
    assert main(["fig11", "--collectives", "5", "--iterations", "1", "--runs", "3"]) == 0
    before, _, after = capsys.readouterr().out.partition("\npolicy ")
    assert re.search(r"3 runs of each kind, in turn: about \d+ s or less", before)
    spread = r"\d[\d.]* \([\d.]+–[\d.]+\)"
    for row in ("fixed", "adaptive", "adaptive / fixed"):
        assert re.search(rf"^{row} +{spread} +{spread} +{spread}", after, re.M), after
    for name in ("switches", "ms in queue", "ms a burst"):
        assert f" {name}: 3 runs of each are too few to tell (" in " ".join(after.split())


def figures(monkeypatch, fixed, adaptive):
    """fig11 with these figures of the runs; gives the policies in the order of their runs."""
    left = {"fixed": list(fixed), "adaptive": list(adaptive)}
    policies = []

    def run(setup):
        policy = setup.config["policy"]
        policies.append(policy)
        # The first of each only warm up.
        value = left[policy].pop(0) if policies.count(policy) > 1 else 1e6
        return late_rank.Outcome(value, value, 9, value, value, unjam.Stats())

    monkeypatch.setattr(late_rank, "run", run)
    assert main(["fig11", "--runs", str(len(fixed))]) == 0
    return policies


@pytest.mark.parametrize(
    ("fixed", "adaptive", "words"),
    [
        (
            [40, 50, 90, 60, 9, 9],
            [30, 20, 50, 40, 6, 6],
            "adaptive has less, 0.67 times fixed's (0",
        ),
        (
            [30, 20, 50, 40, 6, 6],
            [40, 50, 90, 60, 9, 9],
            "adaptive has more, 1.50 times fixed's (1",
        ),
        (
            [30, 20, 50, 40, 6, 6],
            [20, 10, 40, 41, 3, 3],
            "no difference beyond the spread on this ",
        ),
        (
            [0] * 6,
            [0] * 6,
            "no difference beyond the spread on this machine (1.00 to 1.00 times fix",
        ),
        ([0, 10, 10, 10, 10, 10], [9, 11, 12, 20, 11, 11], "adaptive has more, 1.15 times fixed's"),
        ([40, 50], [30, 20], "2 runs of each are too few to tell (0.40 to 0.75)"),
    ],
)
def test_fig11_says_what_the_runs_tell(monkeypatch, capsys, fixed, adaptive, words):
    policies = figures(monkeypatch, fixed, adaptive)
    out = " ".join(capsys.readouterr().out.split())
    assert f"ms a burst: {words}" in out
    # In turn, and each kind first as often as the other.
    turns = ["fixed", "adaptive", "adaptive", "fixed"] * 3
    assert policies == ["fixed", "adaptive", *turns[: 2 * len(fixed)]]


def test_fig11_says_that_others_share_the_cores(monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (77.0, 1, 1))
    figures(monkeypatch, [1, 2], [1, 2])
    out = " ".join(capsys.readouterr().out.split())
    assert "load average 77.0: what shares the cores is in these figures, too" in out


def test_no_library(python, tmp_path, monkeypatch):
    monkeypatch.setenv("UNJAM_LIBRARY", str(tmp_path / "nowhere.so"))
    finished = python("-m", "unjam", "version")
    assert finished.returncode == 1
    assert "nowhere.so" in finished.stderr and "cmake --build" in finished.stderr
    assert "Traceback" not in finished.stderr
    (tmp_path / "broken.so").write_text("not a library")
    monkeypatch.setenv("UNJAM_LIBRARY", str(tmp_path / "broken.so"))
    finished = python("-m", "unjam", "version")
    assert finished.returncode == 1 and "could not be loaded" in finished.stderr
    assert python("-c", "import unjam; print(unjam.DType.FLOAT32.label)").stdout == "float32\n"


def test_wrong_version(python, tmp_path):
    code = """
import unjam, unjam._abi as abi
abi.VERSION += 100
try:
    unjam.library_version()
except ImportError as error:
    print(error)
"""
    finished = python("-c", code)
    assert "has version" in finished.stdout, finished.stderr
