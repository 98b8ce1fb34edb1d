"""Numbers on their way to C: none is cut to another valid one; limits here are the library's."""

import argparse
import ctypes
import math
import threading

import numpy as np
import pytest

import unjam
from unjam import InvalidArgument, UnjamError, _abi, _lib, _limits
from unjam._arguments import check_timeout
from unjam._buffers import buffer_of
from unjam._config import _FIELDS, _NAMED, make_config
from unjam.cli import main, make_parser
from unjam.simulate import Group, InputError, Job, Simulator

# ---- the limits of the library ----


def plan_check(ranks=2, count=1, lanes=1, slots=5):
    """What the library itself says: the report, or the error's text."""
    try:
        return _lib.read_json(
            lambda *text: _lib.library().unjamPlanCheck(
                unjam.Kind.BROADCAST, unjam.DType.FLOAT32, unjam.Op.SUM,
                count, ranks, 0, -1, lanes, slots, 0, *text
            )
        )  # fmt: skip
    except UnjamError as error:
        return str(error)


@pytest.mark.parametrize(
    ("argument", "name", "most"),
    [
        ("ranks", "nranks", _limits.PLANNED_RANKS),
        ("lanes", "lanes", _limits.LANES),
        ("slots", "slots", _limits.CHECKED_SLOTS),
    ],
)
def test_limits_of_plans(argument, name, most):
    assert plan_check(**{argument: most})["ok"]
    assert f"{name} {most + 1} is out of range: give 1 to {most}" in plan_check(
        **{argument: most + 1}
    )
    assert f"{name} 0 is out of range" in plan_check(**{argument: 0})


def test_limits_of_jobs():
    lib = _lib.library()
    handles = (ctypes.c_void_p * (_limits.RANKS + 1))()
    code = lib.unjamInitAll(handles, _limits.RANKS + 1, None)
    assert code == _abi.ERROR_INVALID_ARGUMENT
    assert f"give 1 to {_limits.RANKS}" in _lib.last_error(code)
    ranges = {one["name"]: one.get("max") for one in _lib.environment()}
    assert ranges["UNJAM_LANES"] == _limits.LANES
    assert ranges["UNJAM_DELAY_SEED"] == _limits.DELAY_SEED


def test_limits_of_the_simulator():
    job = Job(2, [Group([0, 1], 3)], disorder=0.1)
    with Simulator(job) as simulator:
        counts = _abi.SimulationCounts()
        for threads, code in (
            (_limits.SIMULATOR_THREADS, _abi.SUCCESS),
            (_limits.SIMULATOR_THREADS + 1, _abi.ERROR_INVALID_ARGUMENT),
        ):
            assert code == _lib.library().unjamSimulatorRun(
                simulator._handle, 0, 1, threads, 1, 0, ctypes.byref(counts)
            )


def test_a_count_that_no_plan_can_have():
    assert "count 18446744073709551615 is beyond" in plan_check(count=_limits.COUNT)["error"]


# ---- the command line ----

(COMMANDS,) = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
NUMBERS = [
    (command, action.option_strings[0])
    for command, parser in COMMANDS.choices.items()
    for action in parser._actions
    if getattr(action.type, "__name__", "") in ("integer", "int", "list")
]
NEEDED = {
    "plan": ["--check", "all_reduce"],
    "simulate": ["--tp", "2", "--dp", "2", "--layers", "2", "--ddp-buckets", "2"],
}


@pytest.mark.parametrize("number", [2**64 + 5, 2**65, -(2**64) + 5])
@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_every_numeric_option_has_a_range(capsys, command, option, number):
    try:
        status = main([command, *NEEDED.get(command, ()), f"{option}={number}"])
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert option.lstrip("-") in captured.err and str(number) in captured.err


@pytest.mark.parametrize(
    ("option", "number"), [("--lanes", 2**32 + 1), ("--slots", 2**32 + 5), ("--ranks", 2**32 + 2),
                           ("--ranks", 65_001), ("--lanes", 33), ("--slots", 1025),
                           ("--root", 2**32)]
)  # fmt: skip
def test_plan_takes_what_the_library_takes(capsys, option, number):
    with pytest.raises(SystemExit):
        main(["plan", "--check", "broadcast", option, str(number)])
    assert f"argument {option}: {number} is not a" in capsys.readouterr().err


def test_plan_takes_as_many_ranks_as_the_library(capsys):
    arguments = ["plan", "--check", "broadcast", "--ranks", str(_limits.PLANNED_RANKS)]
    assert main([*arguments, "--root", str(_limits.PLANNED_RANKS - 1)]) == 0
    assert "over 65,000 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("sizes", ["9000000G", "1K:99999999999999999999G", "1K,1025G"])
def test_sizes_have_a_limit(capsys, sizes):
    with pytest.raises(SystemExit) as error:
        main(["bench", "--threads", "--sizes", sizes])
    assert error.value.code == 2
    assert f"argument --sizes: {sizes} is more than 1 TiB" in capsys.readouterr().err


def test_numbers_are_there():
    commands = {command for command, _ in NUMBERS}
    assert commands == {"bench", "demo", "fig11", "info", "pipeline", "plan", "simulate", "stress"}


# ---- Python ----


@pytest.mark.parametrize("name", [n for n in _FIELDS if n not in (*_NAMED, "algorithm")])
def test_every_setting_has_its_range(name):
    for number in (2**32 + 2, 2**64 + 2, 2**128, -(2**32) + 2):
        if number == 2**32 + 2 and ctypes.sizeof(_FIELDS[name]) == 8:
            continue
        with pytest.raises(InvalidArgument, match=rf"{name}={number} is out of range: give -?\d"):
            make_config({name: number})


def test_a_setting_says_the_range_of_the_library():
    with pytest.raises(InvalidArgument, match="lanes=4294967297 is out of range: give 1 to 32,"):
        make_config({"lanes": 2**32 + 1})
    with pytest.raises(InvalidArgument, match=f"give 0 to {2**63 - 1}"):
        make_config({"delay_seed": 2**63})
    with pytest.raises(InvalidArgument, match="pool_slots"):
        make_config({"pool_slots": 2**32 - 1})  # what stands for none in C


def test_named_settings_take_no_other_numbers():
    for name in _NAMED:
        with pytest.raises(InvalidArgument, match=name):
            make_config({name: 2**32})


BIG = [2**32, 2**32 + 1, 2**64, 2**64 + 1, -(2**32) + 1]


@pytest.mark.parametrize("number", BIG)
def test_calls_take_no_number_that_c_would_cut(pair, number):
    contexts, groups = pair
    x = np.ones(4, np.float32)
    group = groups[0]
    for call, what in (
        (lambda: unjam.init_all(number), "nranks"),
        (lambda: unjam.init(number, 0, bytes(128)), "nranks"),
        (lambda: unjam.init(2, number, bytes(128)), "rank"),
        (lambda: contexts[0].group([0, number]), "rank"),
        (lambda: group.reduce(x, root=number), "root"),
        (lambda: group.broadcast(x, root=number), "root"),
        (lambda: group.gather(x, root=number), "root"),
        (lambda: group.scatter(x, x, root=number), "root"),
        (lambda: group.send(x, number), "peer"),
        (lambda: group.recv(x, number), "peer"),
        (lambda: group.probe(number), "peer"),
        (lambda: group.all_reduce(x, priority=number), "priority"),
        (lambda: group.register_all_reduce("k", "float32", priority=number), "priority"),
        (lambda: group.register_reduce("k", "float32", root=number), "root"),
    ):
        with pytest.raises(InvalidArgument, match=rf"{what}\b.*{number}"):
            call()


@pytest.mark.parametrize("number", [2**63, 2**64 + 512, -(2**64) + 512])
def test_sizes_and_addresses_are_not_cut(pair, number):
    contexts, _ = pair
    with pytest.raises(InvalidArgument, match="nbytes"):
        contexts[0].alloc(number)
    with pytest.raises(InvalidArgument, match="address"):
        contexts[0].register_memory((number, 512))
    with pytest.raises(InvalidArgument, match="bytes"):
        contexts[0].register_memory((4096, number))


@pytest.mark.parametrize(
    ("shape", "address"), [((4,), 2**64), ((4,), -4), ((2**62,), 4096), ((4,), 2**64 - 8)]
)
def test_memory_that_cannot_be(shape, address):
    class Elsewhere:
        __cuda_array_interface__ = {
            "shape": shape, "typestr": "<f4", "data": (address, False), "version": 3,
        }  # fmt: skip

    with pytest.raises(InvalidArgument, match="no memory is there"):
        buffer_of(Elsewhere(), "x")


def test_timeouts_of_any_length(pair):
    contexts, groups = pair
    for timeout in (10**400, -(10**400)):
        with pytest.raises(InvalidArgument, match="timeout"):
            check_timeout(timeout)
    done = []

    def wait():
        for timeout in (1e300, math.inf, 10**17):
            contexts[0].device_synchronize(timeout)
            done.append(timeout)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    assert len(done) == 3
    requests = [group.barrier() for group in groups]
    for request, timeout in zip(requests, (1e300, math.inf), strict=True):
        request.synchronize(timeout)


GROUPS = [Group([0, 1], 3), Group([1, 2], 3)]


@pytest.mark.parametrize("number", [2**64, 2**64 + 1, 2**70])
def test_simulations_take_no_number_that_c_would_cut(number):
    job = Job(3, GROUPS, disorder=0.1)
    for make, what in (
        (lambda: Job(number, GROUPS), "gpus"),
        (lambda: Job(3, GROUPS, seed=number), "seed"),
        (lambda: Job(3, GROUPS, order="explicit", sequence=[0, number]), "sequence[1]"),
        (lambda: Job(3, GROUPS, order="explicit", sequence=[0, 2**32]), "sequence[1]"),
        (lambda: Job(3, GROUPS, order="explicit", sequence=np.array([0, 2])), "sequence[1]"),
        (lambda: Job(3, [Group([0, 1], number)]), "groups[0].collectives"),
        (lambda: Job(3, [Group([0, number], 1)]), "groups[0].gpus"),
        (lambda: Job(3, [Group(range(number, number + 2), 1)]), "groups[0].gpus"),
        (lambda: Job(3, [Group(range(-2, 2), 1)]), "groups[0].gpus"),
        (lambda: Simulator(job, memory=number), "memory"),
    ):
        with pytest.raises(InputError) as raised:
            make()
        assert raised.value.field == what
    with Simulator(job) as simulator:
        for run, what in (
            (lambda: simulator.run(number), "rounds"),
            (lambda: simulator.run(5, threads=number), "threads"),
            (lambda: simulator.run(5, threads=2**32 + 1), "threads"),
            (lambda: simulator.run(5, threads=0), "threads"),
            (lambda: simulator.round(number), "round"),
            (lambda: simulator.round(-1), "round"),
        ):
            with pytest.raises(InputError) as raised:
                run()
            assert raised.value.field == what


def test_numpys_integers_are_numbers():
    job = Job(np.int64(3), GROUPS, order="explicit", sequence=np.array([0, 1, 1, 0, 0, 1]))
    with Simulator(job) as simulator:
        assert simulator.run(np.int64(5), threads=np.int32(1)).rounds == 5
    with unjam.init_all(np.int64(1)) as (context,):
        assert context.size == 1
