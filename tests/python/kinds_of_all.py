"""Every kind among all ranks of a job, with results that tell each rank's part apart."""

import numpy as np

COUNT = 5
PATIENCE_S = 120


def check(context, roots, skip=()):
    """On each rank; raises where a result is wrong. `skip`: kinds that are not called."""
    world, rank, ranks = context.group(), context.rank, context.size
    every = np.arange(ranks, dtype=np.int64)
    total = int(every.sum())
    blocks = np.repeat(every, COUNT)

    def own(value=rank):
        return np.full(COUNT, value, dtype=np.int64)

    def call(kind, want, *buffers, out=-1, **more):
        name = f"{kind} {sorted(more.items())}"
        if kind in skip:
            return
        getattr(world, kind)(*buffers, key=name, **more).wait(PATIENCE_S)
        if want is not None:
            got = buffers[out]
            assert np.array_equal(got, want), (name, rank, got[:8], want[:8])

    call("barrier", None)
    call("all_reduce", own(total), own())
    call("all_gather", blocks, own(), np.zeros(ranks * COUNT, dtype=np.int64))
    call("reduce_scatter", own(ranks * rank + total), blocks + rank, own(0))
    call("all_to_all", blocks + 1000 * rank, 1000 * blocks + rank, np.zeros_like(blocks))
    for root in roots:
        here = rank == root
        call("broadcast", own(root), own(), root=root)
        call("reduce", own(total) if here else None, own(), own(0), root=root)
        everything = np.zeros_like(blocks) if here else None
        call("gather", blocks if here else None, own(), everything, root=root)
        call("scatter", own(), blocks.copy() if here else None, own(0), root=root)
    if "send" not in skip:
        got = own(-1)
        sent = world.send(own(), (rank + 1) % ranks)
        world.recv(got, (rank - 1) % ranks).wait(PATIENCE_S)
        sent.wait(PATIENCE_S)
        assert np.array_equal(got, own((rank - 1) % ranks)), (rank, got)
