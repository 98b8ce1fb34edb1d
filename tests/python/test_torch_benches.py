"""The benchmarks beside another backend: that they run, compare like with like, and count right."""

import argparse
import json
import subprocess
import sys
import time

import pytest

from processes import environment

pytest.importorskip("torch")

from unjam.torch import _beside, training  # noqa: E402

# To catch hangs: a machine that does other things takes five times as long as an idle one.
LIMIT_S = 500


def bench(module, path, *words):
    """What it wrote as JSON."""
    result = subprocess.run(
        [sys.executable, "-m", module, "--limit", str(LIMIT_S), "--json", str(path), *words],
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(path.read_text())


@pytest.mark.timeout(LIMIT_S + 150, func_only=True)
def test_training_is_the_same_on_both_backends(tmp_path, adapter):
    """To the bit with two ranks: sums of two numbers have one order."""
    found = bench(
        "unjam.torch.training", tmp_path / "f.json", "--small", "--blocks", "2", "--steps", "2"
    )
    rows = {(row["model"], row["backend"]): row for row in found["rows"]}
    assert [c["model"] for c in found["comparisons"]] == list(training.MODELS)
    for model in training.MODELS:
        ours, peers = rows[model, "unjam"], rows[model, "gloo"]
        assert ours["loss"] == peers["loss"], (ours, peers)
        assert [len(block) for block in ours["times_ms"]] == [2, 2]
        assert ours["samples_per_s"] > 0
    assert len(rows) == 2 * len(training.MODELS)


@pytest.mark.timeout(LIMIT_S + 150, func_only=True)
def test_calls(tmp_path, adapter):
    found = bench("unjam.torch.bench", tmp_path / "f.json", "--blocks", "2", "--sizes", "4,1024")
    assert [(row["bytes"], row["backend"]) for row in found["rows"]] == [
        (size, backend) for size in (4, 1024) for backend in ("gloo", "unjam")
    ]


@pytest.mark.timeout(LIMIT_S + 150)
def test_rank_that_fails_ends_the_others(tmp_path, monkeypatch, capsys):
    """They wait for it, in a collective."""
    (tmp_path / "stub.py").write_text(
        "import sys, time\nsys.exit(3) if sys.argv[-1] == '1' else time.sleep(1000)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(_beside, "AFTER_FAILURE_S", 0.2)
    options = argparse.Namespace(ranks=3, limit=LIMIT_S)
    begun = time.monotonic()
    assert _beside.start("stub", options, []) == 1
    assert time.monotonic() - begun < LIMIT_S  # so that has not ended them
    assert "ended rank 0, 2, which had not come to an end" in capsys.readouterr().err


def row(*blocks):
    return training.Row("m", "", "b", [], 0.0, training.variation(blocks), 0.0, list(blocks))


def test_comparison():
    peer = row([8.0, 12.0], [9.0, 11.0], [8.0, 12.0])
    assert training.compare(row([5.0, 5.0], [5.0, 5.0], [5.0, 5.0]), peer).speed == [2.0] * 3
    for spread, verdict in ((0.0, "below"), (2.0, "within"), (5.0, "above")):
        ours = row(*[[10 - spread, 10 + spread]] * 3)
        assert training.compare(ours, peer).variation == verdict
    low, high = training.compare(peer, peer).peer_variation
    assert (low, high) == pytest.approx((0.1, 0.2), abs=0.01)


def test_shares_of_time():
    found = training.shares(
        [
            ("gemm", (0, 10)),
            ("gemm", (5, 12)),
            ("unjam_engine_kernel", (8, 20)),
            ("ncclDevKernel_AllReduce", (25, 30)),
        ]
    )
    assert found == {"model": 12, "library": 17, "library alone": 13, "none": 5}
    assert training.shares([]) == {}
