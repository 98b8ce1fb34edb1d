"""What workers, see processes.py, find in their interpreters."""

import json
import os
import sys
import threading
import time

import numpy as np

import unjam


def say(value):
    """To the test."""
    # One write, so that what several processes say to one pipe stays apart.
    os.write(1, (json.dumps(value) + "\n").encode())


def hear():
    """From the test."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit("the test is gone")
    return json.loads(line)


def error_of(work, *arguments):
    """[type, message] of what it raises, or None."""
    try:
        work(*arguments)
    except unjam.UnjamError as error:
        return [type(error).__name__, str(error)]
    return None


def run_all(works):
    """In a thread each; raises what one of them raised."""
    errors = []

    def body(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def puppet_main(config):
    """A rank that does what it is told: Python text, whose value or error it says."""
    context = unjam.init_from_environment(**config)
    group = context.group()
    requests = {}
    outcomes = {}

    def call(kind, key="", count=4, dtype="float32", value=None, on=None, **more):
        # Starts a collective on `value`s; the request is kept under the key.
        on = group if on is None else on
        x = np.full(count, context.rank + 1 if value is None else value, dtype=dtype)
        out = {"all_gather": count * on.size, "reduce_scatter": count // on.size}
        if kind in out:
            buffers = (x, np.zeros(out[kind], dtype=dtype))
        else:
            buffers = (x,)
        requests[key] = getattr(on, kind)(*buffers, key=key, **more)

    def end(key="", seconds=40):
        # Waits for it; the sum of what it gave.
        return float(requests[key].result(seconds).astype("float64").sum())

    def until(condition):
        # Waits for it to hold.
        deadline = time.monotonic() + 40
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def later(text):
        # Does it in a thread.
        def body():
            outcomes[text] = answer(text)

        outcomes[text] = None
        thread = threading.Thread(target=body, daemon=True)
        thread.start()

    def outcome(text):
        until(lambda: outcomes[text] is not None)
        return outcomes[text]

    names = dict(globals())
    names.update(context=context, group=group, call=call, end=end)
    names.update(until=until, later=later, outcome=outcome)

    def answer(text):
        try:
            try:
                value = eval(text, names)
            except SyntaxError:
                value = exec(text, names)
            json.dumps(value)
        except TypeError:
            value = repr(value)
        except BaseException as error:
            return [type(error).__name__, str(error)]
        return [None, value]

    say("ready")
    while True:
        text = hear()
        if text is None:
            break
        say(answer(text))
    context.abort()
    context.close()
