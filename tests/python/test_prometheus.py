"""Counters for Prometheus: files and registries, of contexts and of torch's process groups."""

import builtins

import numpy as np
import pytest

import unjam
from processes import workers
from rank_tools import say
from unjam import prometheus

LONG_S = 200


def parsed(text):
    """{name: {(label values…): value}}, by prometheus_client's own parser."""
    parser = pytest.importorskip("prometheus_client.parser")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in values, f"{sample.name} {labels} twice"
            values[labels] = sample.value
    return found


def labelled(found, name, **labels):
    (value,) = [v for have, v in found[name].items() if labels.items() <= dict(have).items()]
    return value


@pytest.fixture
def alone():
    """``alone(worker, *arguments)``: what it says, from a process of its own: counters are of all
    contexts that a process has open, and other tests leave some."""
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

    def run(worker, *arguments):
        with workers() as harness:
            process = harness.start(worker, *arguments)
            said = process.said()
            process.ends()
            return said

    return run


def of_two_ranks(path):
    def rank_main(context):
        group = context.group()
        x = np.ones(1000, dtype=np.float32)
        for _ in range(3):
            group.all_reduce(x, key="a").wait()
        group.barrier().wait()
        if context.rank == 0:
            unjam.write_prometheus(path, keys=True)
        group.barrier().wait()

    unjam.launch(2, rank_main)
    say("written")


def test_file_has_the_counters_of_each_rank(alone, tmp_path):
    path = tmp_path / "unjam.prom"
    assert alone(of_two_ranks, str(path)) == "written"
    found = parsed(path.read_text())
    for rank in "01":
        assert labelled(found, "unjam_ranks", rank=rank) == 2
        assert labelled(found, "unjam_calls_submitted_total", rank=rank, device="host") >= 4
        assert labelled(found, "unjam_calls_completed_total", rank=rank) >= 3
        assert labelled(found, "unjam_sent_bytes_total", rank=rank) >= 3 * 1000 * 4 / 2
        assert labelled(found, "unjam_failed", rank=rank) == 0
        assert labelled(found, "unjam_key_calls_completed_total", rank=rank, key="a") == 3
        assert labelled(found, "unjam_key_seconds_total", rank=rank, key="a") > 0
    assert not list(tmp_path.glob("*.tmp*"))


def of_a_registry():
    import prometheus_client as client

    from unjam import prometheus

    registry = client.CollectorRegistry()
    registry.register(prometheus.Collector())
    texts = [client.generate_latest(registry).decode()]
    with unjam.init_all(1) as first, unjam.init_all(1):
        first[0].group().all_reduce(np.ones(4, dtype=np.float32)).wait()
        texts.append(client.generate_latest(registry).decode())
        first[0].abort()
        texts.append(client.generate_latest(registry).decode())
    texts.append(client.generate_latest(registry).decode())
    say(texts)


def test_registry_asks_when_it_is_asked(alone):
    before, called, aborted, after = alone(of_a_registry)
    assert "unjam_ranks{" not in before
    assert sorted(parsed(called)["unjam_calls_completed_total"].values()) == [0, 1]  # two jobs
    assert sorted(parsed(aborted)["unjam_failed"].values()) == [0, 1]
    assert "unjam_key_seconds" not in parsed(aborted)
    assert "unjam_ranks{" not in after


def of_torch(rank, port, path):
    import torch
    import torch.distributed as dist

    import unjam
    from rank_tools import say
    from torch_tools import join_store

    store = join_store(port, 2)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=2)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    unjam.write_prometheus(f"{path}/rank{rank}.prom")
    say("written")
    dist.destroy_process_group()


@pytest.mark.timeout(900, func_only=True)
@pytest.mark.usefixtures("adapter")
def test_file_has_torch_s_process_groups(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from torch_tools import START_S, make_store
    from unjam.torch import _adapter

    assert _adapter.NAME == prometheus._ADAPTER
    store = make_store()
    with workers() as harness:
        both = [harness.start_with_torch(of_torch, r, store.port, str(tmp_path)) for r in range(2)]
        for process in both:
            assert process.said(START_S) == "written"
            process.ends(LONG_S)
    for rank in range(2):
        found = parsed((tmp_path / f"rank{rank}.prom").read_text())
        assert labelled(found, "unjam_calls_completed_total", rank=str(rank), device="host") >= 4


def test_without_the_package_it_says_what_to_install(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *arguments, **words):
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **words)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match="pip install prometheus-client"):
        unjam.write_prometheus(tmp_path / "x.prom")
    with pytest.raises(ModuleNotFoundError, match="pip install prometheus-client"):
        prometheus.Collector()
