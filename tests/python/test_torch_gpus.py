"""Programs on torch.distributed that need GPUs, and on the CPU what can be run of them there.

On a machine with GPUs: ``python3 -m pytest -m gpu tests/python/test_torch_gpus.py``.
"""

import signal
import time

import pytest

from processes import SOON_S, workers

torch = pytest.importorskip("torch")

import gpu_recipes  # noqa: E402
from torch_tools import START_S, make_store  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ranks_of(device):
    """Three on the CPU, or on one GPU; else a GPU each."""
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    if gpus < 1:
        pytest.skip("needs a GPU")
    return min(gpus, 4) if gpus > 1 else 3


@pytest.mark.gpu
@pytest.mark.timeout(1500, func_only=True)
def test_recipes_on_gpus(capsys, adapter):
    """All are right with unjam; the table tells what NCCL does, which wants a GPU for each rank."""
    ranks_of("cuda")
    words = [] if torch.cuda.device_count() > 1 else ["--peer", "none"]
    with capsys.disabled():
        assert gpu_recipes.main(words) == 0


def trainer(rank, ranks, port, device):
    """Trains until it is told to stop or a peer is gone; then goes on with those who are left."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import unjam.torch  # noqa: F401 - registers the backend
    from rank_tools import hear, say
    from torch_tools import join_store

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = join_store(port, ranks)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank)).to(device)

    def train(name, rank, ranks, steps):
        dist.init_process_group(
            "unjam", store=dist.PrefixStore(name, store), rank=rank, world_size=ranks
        )
        trained = DistributedDataParallel(model, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            optimizer.zero_grad()
            loss = trained(x).square().mean()
            loss.backward()
            optimizer.step()
            loss = loss.item()
            if step == 3:
                say("trains")
        return loss

    try:
        train("first", rank, ranks, 1 << 40)
    except dist.DistBackendError as error:
        say([time.monotonic(), str(error)])
    dist.destroy_process_group()
    say("destroyed")
    hear()
    torch.manual_seed(1)  # a step that failed may have left anything
    for layer in model:
        getattr(layer, "reset_parameters", lambda: None)()
    say(train("second", rank, ranks - 1, 10))
    dist.destroy_process_group()


@pytest.mark.timeout(900, func_only=True)
@pytest.mark.parametrize("device", DEVICES)
def test_killed_rank_in_training(device, adapter):
    """The others get an error within seconds that names it, and train on without it."""
    ranks = ranks_of(device)
    with workers() as harness:
        # The contract is a second; a shared machine gets five, and three attempts, as it may keep
        # any of these processes from running for longer.
        for _ in range(3):
            store = make_store()
            job = [
                harness.start_with_torch(
                    trainer, rank, ranks, store.port, device, name=f"rank {rank}"
                )
                for rank in range(ranks)
            ]
            for process in job:
                assert process.said(START_S) == "trains"
            time.sleep(0.3)
            killed = time.monotonic()
            job[-1].signal(signal.SIGKILL)
            left = job[:-1]
            took = []
            for process in left:
                when, message = process.said(START_S)
                took.append(when - killed)  # one clock for all processes
                assert f"rank {ranks - 1}" in message, (took, message)
                print(f"{process.name}: error after {took[-1]:.3f} s")
                assert process.said(START_S) == "destroyed"
            if max(took) < 5:
                break
        assert max(took) < 5, took
        for process in left:
            process.tell()
        for process in left:
            assert process.said(START_S) == "trains"
            assert 0 < process.said(START_S) < 100
            process.ends(START_S)


# ---- what the script makes of a log ----

EXPLANATION = """unjam: process 7, a job of 2 ranks
unjam: rank 0: 2 pending
unjam:   send_recv(count=1), key '' of group '1', use 1, since 2 s; called by: 0, 1; nothing
unjam:   all_reduce(count=1), key '' of group '2', use 1, since 2 s; called by: 0, 1; nothing
unjam: rank 1: 1 pending
unjam:   all_reduce(count=1), key '' of group '2', use 1, since 2 s; called by: 0, 1; nothing
"""


def said(outcome):
    return f'{{"example": "x", "backend": "unjam", "outcome": "{outcome}", "seconds": 1.5}}\n'


@pytest.mark.parametrize(
    ("text", "circle", "words"),
    [
        (said("right"), False, "right"),
        (said("right"), True, "right"),
        (said("right") + said("error: Killed"), False, "error"),
        (said("error: ArithmeticError: wrong: 1, expected 2"), False, "wrong"),
        (said("hung: no end"), False, "hangs"),
        (said("hung: no end"), True, "hangs"),
        (EXPLANATION + said("hung: no end"), True, "explained"),
        (EXPLANATION + said("hung: no end"), False, "hangs"),
        (EXPLANATION.replace("send_recv", "barrier") + said("hung: no end"), True, "hangs"),
        (EXPLANATION, True, "hangs"),
        ("", False, "hangs"),
    ],
)
def test_judge(text, circle, words):
    assert gpu_recipes.judge(text, 3.0, circle).words == words


@pytest.mark.parametrize(
    ("words", "titles"),
    [
        (["pipeline,d"], ["recipes/local_wait", "recipes/local_wait --groups 1", "pipeline"]),
        (["d1"], ["recipes/local_wait --groups 1"]),
        (["expert", "a"], ["recipes/random_grad_order", "recipes/expert_order"]),
        (["groups 1"], ["recipes/local_wait --groups 1"]),
        (["ddp,fsdp"], ["ddp_cnn", "fsdp_tp_gpt"]),
    ],
)
def test_programs_by_letter_and_name(words, titles):
    assert [run.title() for run in gpu_recipes.chosen(words)] == titles


def test_programs_that_are_not_there():
    with pytest.raises(ValueError, match="'x'"):
        gpu_recipes.chosen(["d,x"])


@pytest.mark.timeout(120, func_only=True)
def test_script_begins_nothing_that_may_take_too_long(tmp_path, monkeypatch, capsys, adapter):
    monkeypatch.setenv("OUT", str(tmp_path))
    words = ["--device", "cpu", "--only", "pipeline,d1", "--seconds", "1"]
    assert gpu_recipes.main(words) == 1
    assert capsys.readouterr().out.count("not run: --seconds") == 2


def test_script_kills_and_keeps_what_was_said(tmp_path):
    """A run that does not come to an end in time."""
    (run,) = gpu_recipes.chosen(["ddp"])
    found = gpu_recipes.attempt(run, "unjam", "cpu", 2, 0.2, tmp_path, start_limit=0)
    assert found.words == "hangs" and found.seconds < SOON_S
    (log,) = tmp_path.iterdir()
    assert log.name == "ddp_cnn-2-unjam.log" and "ddp_cnn.py --json" in log.read_text()
