"""The checker of loop kernels' plans: mistakes of each kind are planted, and found."""

import copy
import random

import pytest

from loop_models import CONFIGS, make_model, make_plan
from unjam import InvalidArgument
from unjam.loop import SHAPES, Machine, check, compile_graph, llama
from unjam.loop.interpret import ORDERS, Fault, Interpreter
from unjam.loop.ops import Rect
from unjam.loop.schedule import Schedule
from unjam.loop.tasks import Wait


class Planted:
    """A right plan of two ranks, to be made wrong."""

    def __init__(self, kind="dense", ranks=2, sync="counters"):
        _, self.plan = make_plan(CONFIGS[kind], ranks=ranks, sync=sync, state=False)
        self.program = copy.copy(self.plan.program)
        self.program.tasks = [copy.copy(task) for task in self.plan.program.tasks]
        self.program.counters = [copy.copy(c) for c in self.plan.program.counters]
        self.program.mail_from = dict(self.plan.program.mail_from)
        self.places = copy.deepcopy(self.plan.places)
        self.schedule = copy.deepcopy(self.plan.schedule)
        self.others = []

    def task(self, name):
        return next(t for t in self.program.tasks if self.program.name(t) == name)

    def kinds(self):
        verdict = check(self.program, self.places, self.schedule, self.others)
        return {fault.kind for fault in verdict.faults}, " ".join(f.text for f in verdict.faults)


def without_wait(p):
    task = p.task("o.0[1]")
    task.waits = ()


def swapped_waits(p):
    a, b = p.task("attn.0[0]"), p.task("attn.0[2]")
    a.waits, b.waits = b.waits, a.waits


def lower_threshold(p):
    task = p.task("up.0[0]")
    task.waits = tuple(Wait(c, n - 1) for c, n in task.waits)


def higher_threshold(p):
    task = p.task("up.0[0]")
    task.waits = tuple(Wait(c, n + 1) for c, n in task.waits)


def other_sum(p):
    p.program.counters[p.task("up.0[0]").signal].arrivals += 1


def other_counter(p):
    p.task("up.0[0]").signal = p.task("embedding[0]").signal


def no_counter(p):
    p.task("up.0[0]").signal = len(p.program.counters)


def wait_for_no_counter(p):
    p.task("up.0[0]").waits = (Wait(10**6, 1),)


def unwaited(p):
    finish = p.program.tasks[-1]
    finish.waits = ()


def twice_in_streams(p):
    p.schedule.streams[0].append(p.schedule.streams[1][0])


def not_in_streams(p):
    p.schedule.streams[2].pop(3)


def unknown_in_streams(p):
    p.schedule.streams[2].append(10**6)


def crossed_stream(p):
    """A task behind another one of its SM that waits for it."""
    stream = next(s for s in p.schedule.streams if p.program.tasks[s[0]].op == 0)
    stream.append(stream.pop(0))


def circle_of_ranks(p):
    """Rank 0 receives before it sends, on one SM; so does rank 1, which nobody sees alone."""
    numbers = [t.number for t in p.program.tasks]
    send, receive = (p.task(f"o.0.sum{part}[0]").number for part in (".send", ""))
    order = [n for n in numbers if n != send]
    order.insert(order.index(receive) + 1, send)
    p.others = [Schedule([order])]
    p.schedule = Schedule([numbers])


def page_in_use(p):
    values = {v.name: v.number for v in p.plan.graph.values}
    p.places.pages[values["up.0"]] = p.places.pages[values["o.0.sum"]]


def page_beyond(p):
    p.places.page_count -= 1


def states_overlap(p):
    values = {v.name: v.number for v in p.plan.graph.values}
    p.places.state[values["keys.1"]] = p.places.state[values["keys.0"]]


def mails_overlap(p):
    values = {v.name: v.number for v in p.plan.graph.values}
    p.places.mail[values["down.0.sum.mail"]] = p.places.mail[values["o.0.sum.mail"]]


def written_twice(p):
    a, b = p.task("up.0[0]"), p.task("up.0[1]")
    b.writes = (*b.writes, *a.writes)


def written_twice_in_part(p):
    a, b = p.task("up.0[0]"), p.task("up.0[1]")
    b.writes = (a.writes[0]._replace(col1=b.writes[0].col1),)


def not_written(p):
    task = p.task("up.0[1]")
    task.writes = ()


def not_written_at_the_end(p):
    """Of what nobody reads."""
    task = p.task("head.pick[1]")
    task.writes = ()


def cache_before_its_key(p):
    p.task("attn.0[0]").waits = p.task("rope.0[0]").waits


def tokens_too_early(p):
    """The next step's tokens, while this step's may not have been read."""
    p.task("head.pick[0]").waits = ()


def mail_not_waited_for(p):
    task = p.task("o.0.sum[0]")
    p.program.mail_from[task.number] = ()


def mail_not_sent(p):
    task = p.task("o.0.sum.send[0]")
    task.writes = ()


MISTAKES = {
    without_wait: ("read", "may read attn.0.merge before it is written"),
    swapped_waits: ("read", "may read"),
    lower_threshold: ("counter", "waits for 0 arrivals of counter"),
    higher_threshold: ("counter", "waits for 2 arrivals of counter"),
    other_sum: ("counter", "and its sum is"),
    other_counter: ("counter", "and its sum is"),
    no_counter: ("counter", "which is not there"),
    wait_for_no_counter: ("counter", "waits for counter 1000000, which is not there"),
    unwaited: ("counter", "nobody waits for counter"),
    twice_in_streams: ("schedule", "stands 2 times in the streams"),
    not_in_streams: ("schedule", "stands 0 times in the streams"),
    unknown_in_streams: ("schedule", "task 1000000 is not there"),
    crossed_stream: ("deadlock", "stands before task"),
    circle_of_ranks: ("deadlock", "packets of task"),
    page_in_use: ("reuse", "may be in use"),
    page_beyond: ("reuse", "goes beyond the pages"),
    states_overlap: ("reuse", "keys.1 and keys.0 overlap in state"),
    mails_overlap: ("reuse", "overlap in mail"),
    written_twice: ("write", "writes up.0 a second time"),
    written_twice_in_part: ("write", "writes up.0 a second time"),
    not_written: ("read", "reads up.0, where"),
    not_written_at_the_end: ("missing", "of tokens only 4 bytes of 8 are written"),
    cache_before_its_key: ("read", "before it is written"),
    tokens_too_early: ("reuse", "writes tokens, where tokens may be in use"),
    mail_not_waited_for: ("mail", "does not wait for it"),
    mail_not_sent: ("missing", "of o.0.sum.mail only"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_a_planted_mistake_is_found(mistake):
    planted = Planted()
    assert planted.kinds() == (set(), "")
    mistake(planted)
    kinds, text = planted.kinds()
    kind, words = MISTAKES[mistake]
    assert kind in kinds and words in text, (kinds, text)


@pytest.mark.parametrize("sync", ["counters", "grid"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_lost_wait_is_found(kind, sync):
    """No wait is there in vain, but for those of the finish."""
    planted = Planted(kind, sync=sync)
    seed = random.randrange(2**32)
    for task in random.Random(seed).sample(planted.program.tasks[:-1], 30):
        for place in range(len(task.waits)):
            waits = task.waits
            task.waits = waits[:place] + waits[place + 1 :]
            kinds, _ = planted.kinds()
            task.waits = waits
            assert kinds & {"read", "reuse", "counter"}, (seed, planted.program.name(task))
    assert planted.kinds() == (set(), "")


def test_values_in_places_of_others_are_found():
    """A value is put where each other one is: the counters allow it, or it is a fault."""
    planted = Planted("moe", ranks=1)
    pages = planted.places.pages
    found = 0
    for number in sorted(pages):
        home = pages[number]
        for at in sorted(set(pages.values())):
            pages[number] = at
            found += "reuse" in planted.kinds()[0] or "read" in planted.kinds()[0]
        pages[number] = home
    assert found > len(pages) * 2


def test_the_error_names_the_first_faults():
    planted = Planted()
    without_wait(planted)
    verdict = check(planted.program, planted.places, planted.schedule)
    with pytest.raises(InvalidArgument, match=r"the plan is wrong: task \d+ \(o.0\[1\]\) may read"):
        verdict.require()


@pytest.mark.parametrize("mistake", [without_wait, page_in_use, cache_before_its_key])
def test_the_interpreter_finds_it_too(mistake):
    """In some interleaving: the checker's faults are real."""
    planted = Planted(ranks=2)
    mistake(planted)
    plan = copy.copy(planted.plan)
    plan.program, plan.places = planted.program, planted.places
    plan.schedule = Schedule([[task.number] for task in plan.program.tasks])
    weights = make_model(CONFIGS["dense"], ranks=2).weights
    right = Interpreter(planted.plan, weights).run([1, 2], [0, 0]).tolist()
    wrong = 0
    for seed in range(30):
        try:
            got = Interpreter(plan, weights, seed, ORDERS[seed % len(ORDERS)]).run([1, 2], [0, 0])
            wrong += got.tolist() != right
        except Fault:
            wrong += 1
    assert wrong > 0


def test_rectangles():
    value = make_model(CONFIGS["dense"], state=False).graph.values[0]
    a = Rect(value, 0, 2, 0, 2)
    assert a.overlaps(a._replace(row0=1, row1=3)) and not a.overlaps(a._replace(row0=2, row1=3))
    assert not a.overlaps(a._replace(col0=2, col1=3))


def test_whole_models_are_checked():
    """All layers of 1B: 12,000 tasks."""
    plan = compile_graph(llama(SHAPES["llama-3.2-1b"], context=4096).graph, Machine())
    assert plan.verdict.is_right and plan.verdict.tasks > 10000
