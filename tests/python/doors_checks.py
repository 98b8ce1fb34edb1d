"""What the ranks of test_torch_reshard.py run: Megatron's stand-in, and batches of copies."""

import random

import torch
import torch.distributed as dist

import stand_ins
from pipeline_checks import error_of

TYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def operations(ranks, seed, count):
    """Of all ranks: (task, source, target, size, type), in one order."""
    pick = random.Random(seed)
    return [
        (
            task,
            pick.randrange(ranks),
            pick.randrange(ranks),
            pick.choice([0, 1, 3, 64, 1000, 5000]),
            pick.choice(TYPES),
        )
        for task in range(count)
    ]


def contents(task, size, dtype):
    return ((torch.arange(size) * 7 + task) % 251).to(dtype)


def doors_copies(here):
    """Hundreds of operations between all pairs, submitted in another order on each rank."""
    from unjam.torch.doors.copies import Copies

    for seed, tasks, piece, window in (
        (1, True, 4096, 3),
        (2, False, 700, 16),
        (3, True, 8 << 20, 1),
    ):
        copies = Copies(key=f"copies{seed}", piece_bytes=piece, window=window)
        listed = operations(here.ranks, seed, 400)
        for turn in range(2):
            mine = list(listed)
            if tasks:
                random.Random(10 * turn + here.rank).shuffle(mine)
            wanted = {}
            for task, source, target, size, dtype in mine:
                if source == here.rank:
                    copies.send(contents(task + turn, size, dtype), target, task if tasks else None)
                if target == here.rank:
                    wanted[task] = torch.full((size,), 99).to(dtype)
                    copies.receive(wanted[task], source, task if tasks else None)
            copies.run()
            for task, _, _, size, dtype in (op for op in listed if op[2] == here.rank):
                expected = contents(task + turn, size, dtype)
                assert torch.equal(wanted[task], expected), ("seed", seed, turn, task)
    return [True]


def doors_multicast(here):
    """One memory to all others is sent once; views with gaps are sent and written as they are."""
    from unjam.torch.doors.copies import Copies

    copies = Copies(key="multicast")
    x = torch.arange(60.0).reshape(6, 10)
    out = torch.zeros(10, 6).t()  # not contiguous
    if here.rank == 0:
        for other in (1, 2, 3):
            copies.send(x, other)
            copies.send(x[:, :5].t(), other)
        copies.send(x, 1)  # once more
    else:
        copies.receive(out, 0)
        half = torch.zeros(5, 6)
        copies.receive(half, 0)
        again = torch.zeros(6, 10)
        if here.rank == 1:
            copies.receive(again, 0)
    copies.run()
    (pieces,) = copies._known.values()
    found = [(p.source, p.targets, p.size) for p in pieces]
    assert found == [(0, (1,), 240), (0, (1, 2, 3), 360)], found
    if here.rank:
        assert torch.equal(out, x) and torch.equal(half, x[:, :5].t())
        assert torch.equal(again, x) or here.rank != 1
    return [True]


def doors_refuse(here):
    """Ranks that do not fit together all get an error that names them, and go on."""
    from unjam.torch.doors.copies import Copies

    copies = Copies(key="refuse")

    def tried(sends, receives):
        for size, peer, task in sends.get(here.rank, ()):
            copies.send(torch.ones(size), peer, task)
        boxes = []
        for size, peer, task in receives.get(here.rank, ()):
            boxes.append(torch.zeros(size))
            copies.receive(boxes[-1], peer, task)
        kind, words = error_of(copies.run)
        assert kind is None or not any(box.any() for box in boxes)
        return kind, words

    kind, words = tried({0: [(4, 1, 7)]}, {1: [(5, 0, 7)]})
    assert kind == "InvalidArgument", (kind, words)
    assert "rank 0 sends 1 tensors to rank 1, which expects 1" in words, words
    assert "task 7, 16 bytes of float32, and expected is task 7, 20 bytes" in words, words
    kind, words = tried({0: [(4, 1, 7), (4, 1, 8)]}, {1: [(4, 0, 7)]})
    assert "expected is nothing" in words, words
    kind, words = tried({}, {2: [(4, 3, None)]})
    assert "rank 3 sends 0 tensors to rank 2" in words, words
    kind, words = tried({0: [(4, 0, 1)]}, {0: [(4, 0, 2)]})
    assert "rank 0 sends 1 tensors to rank 0" in words, words
    assert tried({0: [(4, 1, 7)], 3: [(2, 2, 1)]}, {1: [(4, 0, 7)], 2: [(2, 3, 1)]})[0] is None
    assert tried({}, {})[0] is None
    for wrong, said in (
        (lambda: copies.send(torch.ones(1), 4), "the group has ranks 0 to 3"),
        (lambda: copies.receive([1], 0), "list is no tensor"),
        (lambda: Copies(window=0), "window=0 is no limit"),
    ):
        kind, words = error_of(wrong)
        assert kind == "InvalidArgument" and said in words, words
    return [True]


def doors_megatron(here):
    """Megatron's calls: weights of a trainer on two ranks, to two replicas of another layout."""
    stand_ins.install()
    from unjam.torch.doors.megatron import UnjamCopyService

    service = UnjamCopyService(dist.distributed_c10d._get_default_group(), window=4)
    assert (service.rank, service.world_size) == (here.rank, 4)
    weights = [torch.randn(8, 6, generator=torch.Generator().manual_seed(n)) for n in range(100)]
    for turn in range(2):
        boxes = []
        for n, whole in enumerate(weights):
            whole = whole * (turn + 1)
            for source in (0, 1):  # rows 0 to 3, and 4 to 7
                if here.rank == source:
                    part = whole[4 * source : 4 * source + 4].contiguous()
                    for target in (2, 3):
                        service.submit_send(part, target, task_id=4 * n + 2 * source + target - 2)
                elif here.rank >= 2:
                    box = torch.zeros(4, 6)
                    boxes.append((box, whole[4 * source : 4 * source + 4]))
                    service.submit_recv_with_id(4 * n + 2 * source + here.rank - 2, box, source)
        service.run()
        for box, expected in boxes:
            assert torch.equal(box, expected)
    assert service.requires_process_group_barrier and service.supports_idle_ranks
    service.close()
    return [True]
