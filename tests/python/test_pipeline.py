"""unjam.pipeline: actions, orders, simulation, pictures, and the command.

The simulator is compared with pipeline_by_ticks.py, which states it a second time.
"""

import itertools
import json
import random
import re

import pytest

from pipeline_by_ticks import Ticks
from unjam import InvalidArgument
from unjam.cli import main
from unjam.pipeline import (
    MODES,
    SCHEDULES,
    Action,
    Costs,
    Deadlock,
    Order,
    auto,
    eager_1f1b,
    gpipe,
    live_activations,
    lower,
    make_order,
    one_f_one_b,
    read_csv,
    signal_bound,
    simulate,
    split_backward,
    write_csv,
)
from unjam.pipeline.costs import Message, Model


def order_of(*rows):
    """An order from strings."""
    return Order(tuple(tuple(Action.parse(word) for word in row.split()) for row in rows))


def words(order, rank):
    return " ".join(map(str, order.rows[rank]))


# ---- actions ----


@pytest.mark.parametrize("text", ["0F1", "12B3", "1I2", "0W3", "999999999F0"])
def test_an_action_is_its_string(text):
    assert str(Action.parse(f"  {text} ")) == text


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "'' is no action: write stage, kind and microbatch"),
        ("0F", "is no action"),
        ("F0", "is no action"),
        ("0X1", "the kinds are F, B, I and W"),
        ("0F1 1F1", "is no action"),
        ("0F1x", "is no action"),
        ("-1F0", "is no action"),
        ("0f1", "is no action"),
        ("٣F1", "is no action"),
        ("0F" + "9" * 5000, "is no action"),
        ("\x1b[0F1", r"'\\\\x1b\[0F1' is no action"),
        ("0SEND_F1", "0SEND_F1 computes nothing: give an order without it"),
        ("3RECV_B0", "computes nothing"),
        ("0UNSHARD", "computes nothing"),
        ("0REDUCE_GRAD", "computes nothing"),
        ("(0F1;1B0)OVERLAP_F_B", "runs several actions at once: give them one after the other"),
    ],
)
def test_what_is_no_action(text, cause):
    with pytest.raises(InvalidArgument, match=cause) as error:
        Action.parse(text)
    assert len(str(error.value)) < 200


ORDERS = [
    gpipe(3, 4),
    one_f_one_b(4, 6),
    eager_1f1b(4, 9, 0.5),
    split_backward(one_f_one_b(3, 5), [0, 2, 1]),
    order_of("0F0 1F0 1B0 0B0"),  # two stages of one rank
]


@pytest.mark.parametrize("order", ORDERS)
def test_a_file_gives_the_order_that_was_written(order, tmp_path):
    file = tmp_path / "order.csv"
    write_csv(order, file)
    assert read_csv(file) == order
    # Gaps, as torch writes them for ranks that have nothing to do at a time.
    file.write_text("\r\n".join(",," + line.replace(",", ", ,") for line in
                                file.read_text().splitlines()))  # fmt: skip
    assert read_csv(file) == order


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("content", "line", "cause"),
    [
        ("", None, "there is no rank"),
        (GOOD + "\n", 3, "there are no actions"),
        (GOOD.replace("1F1", "1F"), 2, "'1F' is no action"),
        (GOOD.replace("0F1", "0SEND_F0"), 1, "computes nothing"),
        (GOOD.replace("0F1", "0F0"), 1, "0F0 stands there twice"),
        (GOOD.replace("1F1", "0F1"), 2, "0F1 is of stage 0, which rank 0 has"),
        (GOOD.replace("1B0,1F1", "1B1,1F1"), 2, "1B1 does not come after 1F1"),
        (GOOD.replace(",1B1", ""), 2, "1B1 is missing"),
        (GOOD.replace("1B1", "1I1"), 2, "1W1 is missing"),
        (GOOD.replace("1B1", "1W1"), 2, "1W1 does not come after 1I1"),
        (GOOD.replace("1B1", "1B1,1I1"), 2, "a full backward of microbatch 1 and a part of one"),
        (GOOD.replace("0F1,", "").replace(",0B1", ""), 1, "0F1 is missing"),
        (GOOD.replace("1F", "2F").replace("1B", "2B"), None, "stage 1 has no actions"),
        (GOOD.replace("0F0", '"0F0'), 2, "this is no CSV"),
        (GOOD.replace("0F0", "0F0\x00"), 1, "is no"),
        ("0F999999999,0B999999999\n", 1, "0F0 is missing"),
    ],
)
def test_a_malformed_file_is_refused_with_line_and_cause(content, line, cause, tmp_path):
    file = tmp_path / "order.csv"
    file.write_text(content)
    with pytest.raises(InvalidArgument) as error:
        read_csv(file)
    where = str(file) if line is None else f"{file}:{line}"
    assert str(error.value).startswith(f"{where}: ") and cause in str(error.value)


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "order.csv"
    file.write_bytes(GOOD.encode() + b"\xff\xfe,")
    with pytest.raises(InvalidArgument, match=r"order.csv:\d: this is no text in UTF-8"):
        read_csv(file)
    with pytest.raises(FileNotFoundError):
        read_csv(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("rows", [[(Action(0, "F", -1),)], [((0, "Q", 0),)], [((0.5, "F", 0),)]])
def test_numbers_that_are_none(rows):
    with pytest.raises(InvalidArgument, match="rank 0: .* is no action"):
        Order(tuple(Action(*a) for a in row) for row in rows)


@pytest.mark.parametrize("rows", [5, [5], [["0F1"]], [[(0, "F")]], [[Action]]])
def test_rows_that_are_no_actions(rows):
    with pytest.raises(InvalidArgument, match="no action|no rows of actions"):
        Order(rows)


@pytest.mark.parametrize("order", ORDERS[:4])
def test_torch_reads_the_file(order, tmp_path):
    """Through the class that runs it; it lowers the order to sends and receives, too."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    class Runtime(schedules._PipelineScheduleRuntime):
        def __init__(self):  # without process groups
            self.pp_group_size = self._num_stages = order.stages
            self._n_microbatches = order.microbatches
            self._stages, self.pipeline_order = [], {}

    file = tmp_path / "order.csv"
    write_csv(order, file)
    runtime = Runtime()
    runtime._load_csv(str(file), format="compute_only")
    assert {
        rank: [str(action) for action in row] for rank, row in runtime.pipeline_order.items()
    } == {rank: [str(action) for action in row] for rank, row in enumerate(order.rows)}
    for rank, row in enumerate(order.rows):
        lowered = [str(a) for a in runtime.pipeline_order_with_comms[rank] if a.is_compute_op]
        assert lowered == [str(action) for action in row]
    # And what torch writes is read here.
    runtime._dump_csv(str(file), format="compute_only")
    assert read_csv(file) == order


# ---- what torch's Schedule1F1B does ----


def grouped(steps):
    """Steps with waits beside each other as one set: torch waits for a batch."""
    found = []
    for do, what in steps:
        if do != lower.WAIT:
            found.append((do, what))
        elif found and found[-1][0] == lower.WAIT:
            found[-1][1].add(what)
        else:
            found.append((do, {what}))
    return found


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 3), (2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (5, 9)]
)
def test_fused_is_what_torch_does(stages, microbatches, monkeypatch):
    """Its code runs with a stage that writes down what is asked of it."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    steps = []

    class Stage:
        def __init__(self, index):
            self.stage_index = index
            self.backward_one_chunk = lambda mb, **_: self.compute("B", mb)
            self.get_fwd_recv_ops = lambda mb: self.ops(lower.RECEIVE, index - 1, index, mb)
            self.get_fwd_send_ops = lambda mb: self.ops(lower.SEND, index, index + 1, mb)
            self.get_bwd_recv_ops = lambda mb: self.ops(lower.RECEIVE, index + 1, index, mb)
            self.get_bwd_send_ops = lambda mb: self.ops(lower.SEND, index, index - 1, mb)
            self.perform_reduce_grad = lambda scale: None

        def forward_one_chunk(self, mb, *_, **__):
            self.compute("F", mb)

        def compute(self, kind, mb):
            steps.append((lower.COMPUTE, Action(self.stage_index, kind, mb)))

        def ops(self, do, source, target, mb):
            there = 0 <= source < stages and 0 <= target < stages
            return [(do, Message(source, target, mb))] if there else []

    def post(ops, desc=None):
        steps.extend(ops)
        return ops

    def wait(ops):
        steps.extend((lower.WAIT, message) for _, message in ops)

    monkeypatch.setattr(schedules, "_batch_p2p", post)
    monkeypatch.setattr(schedules, "_wait_batch_p2p", wait)
    order = one_f_one_b(stages, microbatches)
    programs = lower.fused(order, Model(order, Costs()))
    for index in range(stages):
        steps.clear()
        schedule = schedules.Schedule1F1B.__new__(schedules.Schedule1F1B)
        schedule._stage, schedule._num_stages = Stage(index), stages
        schedule._n_microbatches, schedule.scale_grads = microbatches, True
        for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss"):
            monkeypatch.setattr(schedule, name, lambda *_: None)
        monkeypatch.setattr(schedule, "_update_losses", lambda *_: None)
        schedule._step_microbatches()
        assert grouped(programs[index]) == grouped(steps), f"stage {index}"


# ---- orders ----


def begins_with(row):
    return next(place for place, action in enumerate(row) if action.kind != "F")


@pytest.mark.parametrize(
    ("stages", "microbatches"), [*itertools.product([1, 2, 3, 5, 8], [1, 2, 7])]
)
def test_orders_are_what_they_are_called(stages, microbatches):
    for row in gpipe(stages, microbatches).rows:
        assert [a.kind for a in row] == ["F"] * microbatches + ["B"] * microbatches
    for order, first in (
        (one_f_one_b(stages, microbatches), lambda stage: stages - stage),
        (eager_1f1b(stages, microbatches), lambda stage: 2 * (stages - stage) - 1),
        (eager_1f1b(stages, microbatches, ahead=0), lambda stage: stages - stage),
    ):
        for stage, row in enumerate(order.rows):
            assert begins_with(row) == min(microbatches, first(stage))
            kinds = "".join(a.kind for a in row)
            assert re.fullmatch("F*B(FB)*B*", kinds)
            for kind in "FB":
                numbers = [a.microbatch for a in row if a.kind == kind]
                assert numbers == list(range(microbatches))
        live = [min(microbatches, first(stage)) for stage in range(stages)]
        assert live_activations(order) == tuple(live)


def test_part_of_the_additional_forwards():
    firsts = [
        [begins_with(row) for row in eager_1f1b(5, 20, ahead).rows] for ahead in (0, 0.3, 0.5, 1)
    ]
    assert firsts == [[5, 4, 3, 2, 1], [6, 5, 4, 2, 1], [7, 6, 4, 3, 1], [9, 7, 5, 3, 1]]


def test_backwards_in_two_parts():
    order = one_f_one_b(2, 3)
    assert words(split_backward(order), 0) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert words(split_backward(order, 1), 0) == "0F0 0F1 0I0 0F2 0W0 0I1 0I2 0W1 0W2"
    assert words(split_backward(order, 2), 0) == "0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2"
    assert words(split_backward(order, 99), 0) == "0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"
    late = split_backward(order, [0, 1])
    assert late.rows[0] == split_backward(order).rows[0]
    assert words(late, 1) == "1F0 1I0 1F1 1W0 1I1 1F2 1W1 1I2 1W2"
    assert live_activations(split_backward(order, [0, 99])) == (2, 3)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: gpipe(4, 0), "microbatches=0 is out of range: give 1 to"),
        (lambda: gpipe(0, 4), "stages=0 is out of range"),
        (lambda: one_f_one_b(4, -1), "microbatches=-1 is out of range"),
        (lambda: one_f_one_b(True, 1), "stages=True is out of range"),
        (lambda: one_f_one_b(2.0, 1), "stages=2.0 is out of range"),
        (lambda: one_f_one_b(4096, 65536), "are more than .* actions: give fewer"),
        (lambda: eager_1f1b(4, 4, 1.5), "ahead=1.5 is no part of the forwards: give 0 to 1"),
        (lambda: eager_1f1b(4, 4, float("nan")), "ahead=nan"),
        (lambda: eager_1f1b(4, 4, "1"), "ahead='1'"),
        (lambda: make_order("1f2b", 4, 4), "there is no schedule '1f2b': .*; did you mean 1f1b"),
        (lambda: split_backward(gpipe(2, 2), -1), "delay=-1 is no number of actions"),
        (lambda: split_backward(gpipe(2, 2), 0.5), "delay=0.5 is no number of actions"),
        (lambda: split_backward(gpipe(2, 2), "12"), "delay='12' is no number of actions"),
        (lambda: split_backward(gpipe(2, 2), [1]), "there are 1 delays for 2 stages"),
        (lambda: split_backward(gpipe(2, 2), [1, None]), "delay=None is no number of actions"),
        (lambda: split_backward(split_backward(gpipe(2, 2))), "in two parts already"),
    ],
)
def test_wrong_arguments_are_named(make, cause):
    with pytest.raises(InvalidArgument, match=cause):
        make()


def test_schedules_by_name():
    for name, make in SCHEDULES.items():
        assert make_order(name, 3, 5) == make(3, 5)


# ---- costs ----


@pytest.mark.parametrize(
    ("costs", "cause"),
    [
        (Costs(edges={(2, 1): 1}), r"edge \(2, 1\) does not lead forward: give \(1, 2\)"),
        (Costs(edges={(1, 1): 1}), r"edge \(1, 1\) does not lead forward: leave it out"),
        (Costs(edges={(0, 3): 1}), r"edge \(0, 3\) leads beyond the stages: there are 0 to 2"),
        (Costs(edges={(-1, 2): 1}), "leads beyond the stages"),
        (Costs(edges={"01": 1}), "'01' is no edge: give the numbers of two stages"),
        (Costs(edges={(0, 2): -1}), r"the transfer \(0, 2\): -1 is no time"),
        (Costs(transfer=float("inf")), "transfer: inf is no time: give a number from 0 on"),
        (Costs(transfer=(1, 2, 3)), r"transfer: \(1, 2, 3\) is no time: give a number, or two"),
        (Costs(forward=[1, 2]), "forward has 2 times for 3 stages"),
        (Costs(forward="1"), "forward='1' is no time"),
        (Costs(backward=float("nan")), "backward: nan is no time"),
        (Costs(inputs=1), "inputs and weights belong together"),
    ],
)
def test_wrong_costs_are_named(costs, cause):
    with pytest.raises(InvalidArgument, match=cause):
        simulate(gpipe(3, 2), costs)


def test_there_are_no_other_modes():
    with pytest.raises(InvalidArgument, match="there is no mode 'fast': give serial, fused"):
        simulate(gpipe(3, 2), mode="fast")


# ---- simulation ----


def test_a_run_by_hand():
    """Two stages, two microbatches: F 1, B 2, transfers 3."""
    run = simulate(one_f_one_b(2, 2), Costs(transfer=3))
    first, second = ({str(s.action): (s.start, s.end) for s in row} for row in run.spans)
    assert first == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (10, 12), "0B1": (13, 15)}
    assert second == {"1F0": (4, 5), "1B0": (5, 7), "1F1": (7, 8), "1B1": (8, 10)}
    assert [(*hop.message, hop.start, hop.end) for hop in run.hops] == [
        (0, 1, 0, 1, 4), (0, 1, 1, 4, 7), (1, 0, 0, 7, 10), (1, 0, 1, 10, 13),
    ]  # fmt: skip
    assert (run.time, run.bubbles, run.live) == (15, (1 - 6 / 15, 1 - 6 / 15), (2, 1))
    assert run.as_dict()["bubble"] == run.bubble == 1 - 6 / 15


# Figures of a simulation made apart from this one: throughput over the signal bound with F = 1,
# B = 2, I = W = 1, by stages, microbatches and the time of a transfer.
TABLE = {
    (2, 32, 0.25): (0.861, 0.923, 0.925, 0.995, 1.005, 1.005),
    (2, 32, 0.5): (0.756, 0.857, 0.861, 0.990, 1.000, 1.000),
    (2, 32, 1): (0.607, 0.750, 0.756, 0.980, 0.861, 0.990),
    (4, 32, 0.5): (0.618, 0.758, 0.802, 0.972, 1.000, 1.000),
    (4, 32, 1): (0.447, 0.610, 0.669, 0.946, 0.802, 0.972),
    (8, 64, 1): (0.437, 0.605, 0.632, 0.938, 0.775, 0.968),
    (2, 4, 1): (0.652, 0.750, 0.789, 0.882, 0.882, 0.938),
}


@pytest.mark.parametrize(("stages", "microbatches", "transfer"), TABLE)
def test_the_table(stages, microbatches, transfer):
    costs = Costs(transfer=transfer)
    bound = signal_bound(stages, microbatches, costs)
    assert bound == 3 * (microbatches + stages - 1)
    plain, eager = one_f_one_b(stages, microbatches), eager_1f1b(stages, microbatches)
    found = [
        bound / simulate(order, costs, mode).time
        for order, mode in (
            (plain, "serial"), (plain, "fused"), (plain, "overlap"), (eager, "overlap"),
            (split_backward(plain), "overlap"), (split_backward(eager), "overlap"),
        )
    ]  # fmt: skip
    assert found == pytest.approx(TABLE[stages, microbatches, transfer], abs=0.0005001)


def test_the_pages_table_is_this_one(request):
    page = (request.config.rootpath / "docs" / "pipeline.md").read_text()
    rows = re.findall(r"^\| (\d+), (\d+), ([\d.]+) \| (.+) \|$", page, re.M)
    assert len(rows) >= 5
    for stages, microbatches, transfer, figures in rows:
        assert (
            tuple(map(float, figures.split(" | ")))
            == TABLE[int(stages), int(microbatches), float(transfer)]
        )


def test_the_tables_delays():
    def of_bound(order, costs):
        return signal_bound(order.stages, order.microbatches, costs) / simulate(order, costs).time

    costs = Costs(transfer=1)
    assert of_bound(split_backward(one_f_one_b(2, 32), [1, 0]), costs) == pytest.approx(
        0.980, abs=5e-4
    )
    late = split_backward(eager_1f1b(4, 32), [0, 0, 0, 2])
    assert of_bound(late, costs) == pytest.approx(0.981, abs=5e-4)


@pytest.mark.parametrize("transfer", [0.5, 1])
def test_a_first_stage_that_computes_all_in_w(transfer):
    """As torch's runtime does: without a delay there, times stay the same."""
    for make in (one_f_one_b, eager_1f1b):
        order = split_backward(make(4, 32))
        alike = simulate(order, Costs(transfer=transfer))
        torchs = Costs(transfer=transfer, inputs=[0, 1, 1, 1], weights=[2, 1, 1, 1])
        assert simulate(order, torchs).time == alike.time


def test_more_forwards_ahead_help_monotonically():
    costs = Costs(transfer=1)
    times = [simulate(eager_1f1b(4, 32, k / 8), costs).time for k in range(9)]
    assert times == sorted(times, reverse=True)
    assert (105 / times[0], 105 / times[-1]) == pytest.approx((0.669, 0.946), abs=5e-4)


def random_order(rng, fair):
    """Rows, edges and stages' times. If `fair`, the order can run with transfers beside it."""
    stages, microbatches = rng.randint(1, 4), rng.randint(1, 4)
    ranks = rng.randint(1, stages)
    rank_of = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(rank_of)
    pairs = [(i, j) for i in range(stages) for j in range(i + 1, stages)]
    edges = {e: (rng.randint(0, 4), rng.randint(0, 4)) for e in pairs
             if e[1] == e[0] + 1 or rng.random() < 0.3}  # fmt: skip
    todo = {}  # action -> what has to be before it
    for stage, microbatch in itertools.product(range(stages), range(microbatches)):
        f = (stage, "F", microbatch)
        todo[f] = [(i, "F", microbatch) for i, j in edges if j == stage and fair]
        later = [(j, "back", microbatch) for i, j in edges if i == stage and fair]
        if rng.random() < 0.5:
            todo[stage, "B", microbatch] = [f, *later]
        else:
            todo[stage, "I", microbatch] = [f, *later]
            todo[stage, "W", microbatch] = [(stage, "I", microbatch)]
    rows = [[] for _ in range(ranks)]
    done = set()
    while todo:
        # Mostly the first microbatches first, or each order would be one of its own.
        ready = [a for a, needs in todo.items() if done.issuperset(needs)]
        if rng.random() < 0.5:
            ready = [a for a in ready if a[2] == min(b[2] for b in ready)]
        action = rng.choice(ready)
        del todo[action]
        rows[rank_of[action[0]]].append(action)
        done.add(action)
        if action[1] in "BI":
            done.add((action[0], "back", action[2]))
    times = {kind: [rng.randint(1, 4) for _ in range(stages)] for kind in "FBIW"}
    return rows, edges, times


def both(seed, mode, fair):
    """The same random order by the simulator and tick by tick."""
    rows, edges, times = random_order(random.Random(seed), fair)
    ticks = Ticks(rows, lambda a: times[a[1]][a[0]], edges, mode)
    order = Order(tuple(tuple(Action(*a) for a in row) for row in rows))
    costs = Costs(times["F"], times["B"], times["I"], times["W"], edges=edges)
    try:
        return order, simulate(order, costs, mode), ticks
    except Deadlock as error:
        return order, error, ticks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fair", [True, False])
def test_another_statement_of_it_agrees(mode, fair):
    ran = stuck = 0
    for seed in range(250):
        order, found, ticks = both(seed, mode, fair)
        where = f"seed {seed}, {mode}, fair {fair}: {[' '.join(map(str, r)) for r in order.rows]}"
        if isinstance(found, Deadlock):
            assert ticks.stuck == [wait.rank for wait in found.waits] != [], where
            stuck += 1
            continue
        assert ticks.stuck == [], where
        ends = {span.action: span.end for row in found.spans for span in row}
        assert ends == ticks.ends and found.time == ticks.time, where
        ran += 1
    assert ran > 40
    assert (stuck > 20) == (not fair or mode == "fused")


def test_actions_that_take_no_time():
    """Then much happens at once; an order that runs by itself runs in every mode but fused."""
    for seed in range(150):
        rng = random.Random(seed)
        rows, edges, times = random_order(rng, fair=True)
        zero = {kind: [t * rng.randint(0, 1) for t in times[kind]] for kind in times}
        order = Order(tuple(tuple(Action(*a) for a in row) for row in rows))
        costs = Costs(zero["F"], zero["B"], zero["I"], zero["W"], edges=edges)
        for mode in ("serial", "overlap", "signal"):
            run = simulate(order, costs, mode)
            busy = max(sum(s.end - s.start for s in row) for row in run.spans)
            assert run.time >= busy, f"seed {seed}, {mode}"


def test_live_activations_are_those_between_forward_and_backward():
    for seed in range(60):
        order, run, _ = both(seed, "overlap", True)
        for rank, row in enumerate(run.spans):
            begins = {(s.action.stage, s.action.microbatch): s.start for s in row
                      if s.action.kind == "F"}  # fmt: skip
            ends = {(s.action.stage, s.action.microbatch): s.end for s in row
                    if s.action.kind in "BW"}  # fmt: skip
            most = max(sum(begins[one] <= t < ends[one] for one in begins) for t in begins.values())
            assert run.live[rank] == most, f"seed {seed}"


def test_transfers_of_an_edge_do_not_overtake():
    run = simulate(gpipe(2, 4), Costs(transfer=5))
    hops = [hop for hop in run.hops if not hop.message.is_gradient]
    assert [(hop.start, hop.end) for hop in hops] == [(1, 6), (6, 11), (11, 16), (16, 21)]


def test_a_skip_edge_is_waited_for():
    without = simulate(one_f_one_b(4, 4), Costs(transfer=1))
    with_it = simulate(one_f_one_b(4, 4), Costs(transfer=1, edges={(0, 3): (20, 1)}))
    start = {s.action: s.start for s in with_it.spans[3]}
    assert start[Action(3, "F", 0)] == 21 and with_it.time > without.time
    # One that is shorter than the way through the stages changes nothing.
    assert simulate(one_f_one_b(4, 4), Costs(transfer=1, edges={(0, 3): 1})).time == without.time


# ---- deadlocks ----


def test_a_deadlock_names_who_stands_where():
    order = order_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    for mode in MODES:
        with pytest.raises(Deadlock) as error:
            simulate(order, mode=mode)
        first, second = error.value.waits
        assert (str(first.action), str(first.on), first.other) == ("0B0", "1B0", 1)
        assert (str(second.action), str(second.on), second.other) == ("1F1", "0F1", 0)
        assert f"mode {mode} deadlocks" in str(error.value)
    with pytest.raises(Deadlock, match="rank 0 stands before 0B0, which waits for 1B0 of rank 1"):
        simulate(order)


def test_a_deadlock_within_a_rank():
    with pytest.raises(Deadlock, match="rank 0 stands before 1F0, which waits for 0F0 of rank 0"):
        simulate(order_of("1F0 0F0 1B0 0B0"))


def test_a_deadlock_of_blocking_batches():
    """Stage 1 takes the forwards in another order than stage 0 sends them."""
    order = order_of("0F0 0F1 0F2 0B0 0B1 0B2", "1F2 1F1 1F0 1B0 1B1 1B2")
    assert simulate(order, Costs(transfer=1)).time > 0
    with pytest.raises(Deadlock) as error:
        simulate(order, Costs(transfer=1), "fused")
    text = str(error.value)
    assert "mode fused deadlocks" in text and "does not take what 0F0 gave" in text
    assert "Cure: let transfers run beside the actions (mode overlap)" in text


def test_the_message_names_the_circle_alone():
    """Ranks 2 to 5 wait for 1, and are in no circle."""
    rows = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]
    rows += [f"{stage}F0 {stage}F1 {stage}B0 {stage}B1" for stage in range(2, 6)]
    with pytest.raises(Deadlock) as error:
        simulate(order_of(*rows))
    assert [wait.rank for wait in error.value.waits] == [0, 1, 2, 3, 4, 5]
    assert [wait.rank for wait in error.value.circle] == [0, 1]
    assert "rank 2" not in str(error.value)


def test_each_deadlock_has_a_circle():
    """Of ranks that stand, each waiting for the next."""
    found = 0
    for seed, mode in itertools.product(range(200), ["fused", "overlap"]):
        _, error, _ = both(seed, mode, fair=mode == "fused")
        if isinstance(error, Deadlock):
            ranks = [wait.rank for wait in error.circle]
            assert [wait.other for wait in error.circle] == ranks[1:] + ranks[:1], f"seed {seed}"
            found += 1
    assert found > 20


# ---- auto ----


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (3, 16), (4, 32), (8, 64)])
@pytest.mark.parametrize("weights", [0.5, 1.0, 2.0])
def test_auto_follows_the_rule(stages, microbatches, weights):
    """There and back within the gradients of weights: 1F1B; above, eager 1F1B."""

    def choice(transfer):
        costs = Costs(backward=1 + weights, inputs=1, weights=weights, transfer=transfer)
        found = auto(stages, microbatches, costs)
        return found, simulate(found.order, costs), signal_bound(stages, microbatches, costs)

    for transfer in (0, weights / 4, weights / 2, (weights / 4, 3 * weights / 4)):
        found, run, bound = choice(transfer)
        assert found.name == "1f1b" and set(found.delays) == {0} and run.time <= bound
        assert run.live == tuple(range(stages, 0, -1)) and "no activation is added" in found.why
    for transfer in (1.02 * weights / 2, weights):
        found, run, bound = choice(transfer)
        assert found.name == "eager_1f1b" and run.live[0] == 2 * stages - 1
        plain = split_backward(one_f_one_b(stages, microbatches))
        costs = Costs(backward=1 + weights, inputs=1, weights=weights, transfer=transfer)
        assert run.time < simulate(plain, costs).time
        assert max(run.live) == run.live[0]


def test_auto_where_nothing_helps():
    assert auto(1, 4).name == "1f1b"
    found = auto(4, 1, Costs(transfer=5))
    assert found.name == "1f1b" and "no order hides these transfers better" in found.why
    with pytest.raises(InvalidArgument, match="microbatches=0 is out of range"):
        auto(4, 0)


# ---- pictures ----


def drawn(run, path, title=""):
    pytest.importorskip("matplotlib")
    from unjam.pipeline.picture import draw

    draw(run, path, title)
    return path


BIG = simulate(eager_1f1b(8, 64), Costs(transfer=1))


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf"])
def test_a_picture_of_each_kind(tmp_path, ending):
    file = drawn(
        simulate(split_backward(one_f_one_b(2, 3)), Costs(transfer=1)), tmp_path / f"a{ending}"
    )
    begins = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[ending]
    assert file.read_bytes().startswith(begins)


def test_a_large_picture_names_every_microbatch(tmp_path):
    """On each stage, those of bars that a panel's end cuts perhaps excepted."""
    svg = drawn(BIG, tmp_path / "a.svg", "8 stages $ 64").read_text()
    labels = re.findall(r">(\d+)</text>", svg)
    counts = [labels.count(str(number)) for number in range(10, 64)]
    assert min(counts) >= 16 - 2 and sum(counts) >= 16 * len(counts) - 24
    assert "8 stages $ 64" in svg and "activation on its way" in svg
    width, height = map(float, re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg).groups())
    assert width <= 14 * 72 + 1 and height < 20 * 72
    assert float(re.search(r'style="font[^"]*?([\d.]+)px[^<]*>63</text>', svg)[1]) >= 6


def test_the_same_picture_each_time(tmp_path):
    run = simulate(one_f_one_b(2, 2))
    assert (
        drawn(run, tmp_path / "a.svg").read_bytes() == drawn(run, tmp_path / "b.svg").read_bytes()
    )


def test_no_other_kind_of_picture(tmp_path):
    with pytest.raises(InvalidArgument, match=r"a.gif: the ending must be one of .png, .svg, .pdf"):
        drawn(BIG, tmp_path / "a.gif")


def chart(run, width=80):
    from unjam.pipeline.picture import text

    return [line.plain for line in text(run, width)]


def test_a_chart_with_numbers():
    assert chart(simulate(split_backward(one_f_one_b(2, 2)), Costs(transfer=1))) == [
        "        0                   5",
        "stage 0 F0  F1  ............I0  W0  ....I1  W1  ",
        "stage 1 ........F0  I0  W0  F1  I1  W1  ........",
    ]


def test_a_large_chart_shows_every_action():
    lines = chart(BIG)
    assert all(len(line) <= 80 for line in lines)
    for stage in range(8):
        row = "".join(line[8:] for line in lines if line.startswith(f"stage {stage}"))
        kinds = "".join(one for one in row if one != ".")
        assert kinds.count("F") == 64 and kinds.count("B") == 128
        assert len(row) >= BIG.time > len(row) - 8


def test_a_chart_of_any_size():
    for run in (
        simulate(gpipe(2, 700), Costs(transfer=1)),
        simulate(one_f_one_b(1, 1)),
        simulate(one_f_one_b(2, 2), Costs(0, 0)),
        simulate(one_f_one_b(2, 2), Costs(0.001, 1000.0)),
    ):
        lines = chart(run, 60)
        assert lines and all(len(line) <= 60 for line in lines) and len(lines) < 40


# ---- the command ----


def run_command(capsys, *arguments):
    status = main(["pipeline", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command(capsys):
    status, out, _ = run_command(
        capsys, "--stages", "4", "--microbatches", "32", "--transfer", "0.5", "--schedule", "auto"
    )
    assert status == 0 and out.startswith("1f1b, I/W: 4 stages, 32 microbatches\n")
    assert re.search(r"^1f1b, I/W +overlap +1\.000 +4 +8\.6 %$", out, re.M)
    assert re.search(r"^1f1b +fused +0\.758 +4 +30\.7 %$", out, re.M)
    assert re.search(r"^eager_1f1b +overlap +0\.972 +7 +11\.1 %$", out, re.M)


def test_the_page_shows_what_is_printed(capsys, request):
    page = (request.config.rootpath / "docs" / "pipeline.md").read_text()
    shown = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    commands = [line.split()[2:] for line in page.splitlines() if line.startswith("unjam pipeline")]
    printed = [run_command(capsys, *commands[place])[1] for place in (0, 2)]
    assert "--chart" in commands[2]
    for block, out in zip(shown, printed, strict=True):
        lines = [line.rstrip() for line in out.splitlines()]
        assert "\n".join(line.rstrip() for line in block.splitlines()) in "\n".join(lines)


def test_the_command_as_json(capsys):
    status, out, _ = run_command(
        capsys, "--stages=2", "--microbatches=4", "--transfer=1", "--schedule=eager_1f1b",
        "--ahead=0", "--split", "--delay=1,0", "--json",
    )  # fmt: skip
    found = json.loads(out)
    order = split_backward(one_f_one_b(2, 4), [1, 0])
    run = simulate(order, Costs(transfer=1))
    assert status == 0 and found["signal_bound"] == 15 and found["stages"] == 2
    first = found["rows"][0]
    assert first["time"] == run.time and first["throughput"] == 15 / run.time
    assert first["live"] == list(run.live) and first["bubble"] == run.bubble
    assert {row["mode"] for row in found["rows"]} == {"serial", "fused", "overlap"}


def test_the_command_where_nothing_takes_time(capsys):
    nothing = ("--forward=0", "--backward=0")
    assert run_command(capsys, *nothing)[0] == 0
    found = json.loads(run_command(capsys, *nothing, "--json")[1])
    assert {row["throughput"] for row in found["rows"]} == {None}


def test_the_command_shows_what_deadlocks(capsys):
    """Of the others; as JSON with the reason."""
    words = ("--stages=6", "--microbatches=11", "--transfer=1", "--edge=0:3=1", "--edge=0:5=5")
    status, out, _ = run_command(capsys, *words)
    assert status == 0 and re.search(r"^1f1b +fused +deadlocks *$", out, re.M)
    rows = json.loads(run_command(capsys, *words, "--json")[1])["rows"]
    (error,) = [row["error"] for row in rows if "error" in row]
    assert error.startswith("mode fused deadlocks: rank ")


def test_the_command_writes_files(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    csv, svg = tmp_path / "a.csv", tmp_path / "a.svg"
    arguments = [
        "--stages=3",
        "--microbatches=5",
        "--transfer=2",
        f"--csv={csv}",
        f"--picture={svg}",
    ]
    status, _, err = run_command(capsys, *arguments)
    assert status == 0 and "drawn: " in err and svg.read_text().startswith("<?xml")
    assert read_csv(csv) == auto(3, 5, Costs(transfer=2)).order
    # And reads them.
    status, out, _ = run_command(
        capsys, f"--file={csv}", "--transfer=2", "--chart", "--mode=serial"
    )
    assert status == 0 and out.startswith("a.csv: 3 stages, 5 microbatches") and "stage 2 " in out


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ("--edge 2:1=1", "edge (2, 1) does not lead forward: give (1, 2)"),
        ("--edge 0:9=1", "edge (0, 9) leads beyond the stages"),
        ("--transfer -1", "is no time"),
        ("--transfer 1,2,3", "give a number, or two"),
        ("--forward 1,2", "forward has 2 times for 4 stages"),
        ("--inputs 1", "inputs and weights belong together"),
        ("--delay 1", "--delay is of backwards in two parts: give --split, too"),
        ("--split", "auto chooses the parts and their delay"),
        ("--schedule 1f1b --split --delay 1,2", "there are 2 delays for 4 stages"),
        ("--schedule 1f1b --split --delay -1", "delay=-1 is no number of actions"),
        ("--ahead 1", "--ahead is of eager_1f1b"),
        ("--json --chart", "--chart means nothing with --json"),
        ("--schedule eager_1f1b --ahead 2", "ahead=2.0 is no part of the forwards"),
        ("--file a.csv --stages 3", "--stages means nothing with --file"),
        ("--file FILE", "FILE:1: '0Q0' is no action"),
        ("--picture a.gif", "the ending must be one of .png, .svg, .pdf"),
        ("--stages 4096 --microbatches 65536", "are more than"),
    ],
)
def test_wrong_options_are_named(arguments, cause, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("0Q0\n")
    status, out, err = run_command(capsys, *arguments.replace(" -1", "=-1").split())
    assert (status, out) == (2, "") and cause in err and "See: unjam pipeline --help" in err


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ("--edge 0:1", "0:1 is no edge: give it as 0:3=0.5"),
        ("--edge 0:1=1,2,3", "give one time, or two"),
        ("--edge x:1=1", "argument --edge: invalid edge value: 'x:1=1'"),
        ("--transfer x", "argument --transfer: invalid number value: 'x'"),
        ("--schedule 1f2b", "did you mean 1f1b?"),
        ("--microbatches 0", "0 is not a number of microbatches from 1 to"),
        ("--csv nowhere/a.csv", "there is no folder nowhere"),
    ],
)
def test_usage_errors(arguments, cause, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(["pipeline", *arguments.split()])
    assert error.value.code == 2 and cause in capsys.readouterr().err


def test_the_command_names_a_deadlock(capsys, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    status, out, err = run_command(capsys, f"--file={file}")
    assert (status, out) == (1, "")
    assert "rank 0 stands before 0B0, which waits for 1B0 of rank 1" in err
