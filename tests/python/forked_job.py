"""Jobs of many processes: forked from one that has imported unjam, which is soon done.

As a script, ``forked_job.py JSON``: runs ``main(ranks, what, arguments)`` and says what each rank
said, as a list by rank.
"""

import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress

import numpy as np

import kinds_of_all
import unjam

PATIENCE_S = 60
GONE = 5  # the rank that is killed


def kinds(context):
    kinds_of_all.check(context, roots=(0, context.size - 1))


def killed(context):
    world = context.group()
    world.barrier().wait(PATIENCE_S)
    if context.rank == GONE:
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.ones(4, dtype=np.float32)
    began = time.monotonic()
    try:
        world.all_reduce(x).wait(PATIENCE_S)
    except unjam.UnjamError as error:
        return [str(error), time.monotonic() - began]
    return ["no error", 0]


def start(context):
    """Whether the first call is made."""
    try:
        context.group().all_reduce(np.ones(1, dtype=np.int32)).wait(PATIENCE_S)
    except unjam.UnjamError as error:
        return f"call: {error}"
    return "done"


def rank_main(rank, ranks, name, what, limit):
    if limit is not None and limit["rank"] in (None, rank):
        most = limit["most"]
        resource.setrlimit(getattr(resource, limit["name"]), (most, most))
    try:
        with unjam.init(ranks, rank, name, lanes=1) as context:
            return globals()[what](context)
    except unjam.UnjamError as error:
        return f"init: {error}"


def main(ranks, what, limit=None):
    name = unjam.unique_id()
    go, started = os.pipe()
    take, said = os.pipe()
    children = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.close(started)
                os.close(take)
                os.read(go, 1)
                value = rank_main(rank, ranks, name, what, limit)
                os.write(said, (json.dumps([rank, value]) + "\n").encode())
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    os.close(said)
    os.close(started)
    outcomes = [None] * ranks
    try:
        with os.fdopen(take) as lines:
            for line in lines:
                rank, value = json.loads(line)
                outcomes[rank] = value
    finally:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return outcomes


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
