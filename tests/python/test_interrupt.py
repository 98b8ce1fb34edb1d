"""Ctrl-C gets through every wait, and leaves what it waited for pending."""

import signal
import subprocess
import sys
import time

import pytest

HEAD = """
import json, numpy as np, unjam
def interruptible(call):
    try:
        print("waiting", flush=True)
        call()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""

FREED_S = 15.0  # long before the shortest of the waits ends by itself

WAITS = {
    "wait": """
contexts = unjam.init_all(2)
groups = [context.group() for context in contexts]
request = groups[0].all_reduce(np.ones(3))
interruptible(request.wait)
assert not request.test()
groups[1].all_reduce(np.ones(3)).wait(30)
request.wait(30)
contexts.close()
""",
    "wait with a limit": """
with unjam.init_all(2) as contexts:
    request = contexts[0].group().all_reduce(np.ones(3))
    interruptible(lambda: request.wait(60))
    contexts.abort()
""",
    "device_synchronize": """
with unjam.init_all(2, policy="hold") as contexts:
    request = contexts[0].group().all_reduce(np.ones(3))
    while '"data"' not in json.dumps(contexts[0].explain()):
        pass  # until its engine has begun, the device has nothing to wait for
    interruptible(contexts[0].device_synchronize)
    contexts.abort()
""",
    "init": """
unique = unjam.unique_id()
interruptible(lambda: unjam.init(2, 0, unique))
""",
    "run_ranks": """
with unjam.init_all(2) as contexts:
    def rank(context):
        if context.rank == 0:
            context.group().all_reduce(np.ones(3)).wait()
    interruptible(lambda: unjam.run_ranks(contexts, rank))
""",
    "at the end of a block": """
def block():
    with unjam.init_all(2) as contexts:
        contexts[0].group().all_reduce(np.ones(3)).wait()
interruptible(block)
""",
}


@pytest.mark.parametrize("name", list(WAITS))
def test_interrupt(name, python, tmp_path):
    import os

    import unjam

    path = os.path.dirname(os.path.dirname(unjam.__file__))
    environment = dict(os.environ, PYTHONPATH=path, UNJAM_INIT_TIMEOUT_MS="60000")
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + WAITS[name]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)  # most likely it waits by then; earlier is a case, too
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - sent < FREED_S
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
