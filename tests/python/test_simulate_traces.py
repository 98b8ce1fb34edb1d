"""unjam simulate --trace: how files begin, rings that have wrapped, long traces."""

import bz2
import gzip
import json
import lzma
import pickle
import sys

import pytest

from unjam.simulate import InputError, trace
from unjam.simulate.trace import read_traces

MEMBERS = {"0": [0, 1], "1": [0, 1]}
NAMES = {"0": "default_pg", "1": "tensor_parallel"}


# ---- how files begin ----

# Up to where torch.profiler's export_chrome_trace writes events: it begins with a newline.
KINETO = '\n{\n  "schemaVersion": 1,\n  "deviceProperties": [\n  ],\n  %s"traceEvents": [\n'
DISTRIBUTED = '"distributedInfo": {"rank": %d, "world_size": 2, "pg_config": []},\n  '


def profile_text(rank, calls=3):
    names = {
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
    }
    events = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "record_param_comms",
            "ts": 10.5 * number,
            "dur": 1,
            "args": {"Collective name": "allreduce", **names},
        }
        for number in range(calls)
    ]
    return KINETO % (DISTRIBUTED % rank) + ",\n".join(map(json.dumps, events)) + "\n]}\n"


BEGINNINGS = {
    "as torch writes it": str.encode,
    "no space": lambda text: text.strip().encode(),
    "spaces, tabs, lines": lambda text: b" \t\r\n\n" + text.encode(),
    "a mark": lambda text: text.strip().encode("utf-8-sig"),
    "a mark, then space": lambda text: text.encode("utf-8-sig"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16, the other": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "the events alone": lambda text: text[
        text.index("[\n", text.index("traceEvents")) : -2
    ].encode(),
    "a name that is no UTF-8": lambda text: text.encode().replace(b"default_pg", b"\xff\xfe"),
    "a name with a line": lambda text: text.encode().replace(b"default_pg", b"a\x01\tb"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_profiles_however_they_begin(tmp_path, beginning, packed):
    for rank in range(2):
        data = BEGINNINGS[beginning](profile_text(rank))
        file = tmp_path / f"rank{rank}.json{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(data) if packed else data)
    found = read_traces([tmp_path])
    assert (found.ranks, found.calls, found.mismatches) == ([0, 1], 6, [])


def test_a_profile_that_this_torch_writes(tmp_path):
    profiler = pytest.importorskip("torch.profiler")
    file = tmp_path / "rank0.json"
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as recorded:
        sys.modules["torch"].ones(3).sum()
    recorded.export_chrome_trace(str(file))
    with pytest.raises(InputError, match="no collective is in these traces"):
        read_traces([file])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_dumps_of_every_pickle_protocol_and_as_json(tmp_path, protocol):
    for rank in range(2):
        content = dump([("0", 1), ("0", 2)])
        (tmp_path / f"pickled_{rank}").write_bytes(pickle.dumps(content, protocol))
        (tmp_path / f"text_{rank}").write_text("\n" + json.dumps(content))
    for kind in ("pickled", "text"):
        assert read_traces(sorted(tmp_path.glob(f"{kind}_*"))).calls == 4


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"\n{", "truncated or no JSON"),
        (b"\n[", "truncated or no JSON"),
        (profile_text(0)[:-30].encode(), "truncated or no JSON"),
        (gzip.compress(profile_text(0).encode(), mtime=0)[:-12], "truncated"),
        (gzip.compress(profile_text(0).encode(), mtime=0)[:8], "truncated"),
        (b"\x1f\x8b", "truncated"),
        (b"\x80", "truncated"),
        (b"\x80\x02", "truncated"),
        (b"rank 0: all_reduce\n", "neither JSON nor a pickle"),
        (bytes(1000), "neither JSON nor a pickle"),
        (bz2.compress(b"{}"), "packed by bzip2: unpack it"),
        (lzma.compress(b"{}"), "packed by xz: unpack it"),
        (b"PK\x03\x04" + bytes(30), "packed by zip: unpack it"),
        (b"\x28\xb5\x2f\xfd" + bytes(30), "packed by zstd: unpack it"),
        (b"7", "neither JSON nor a pickle"),
    ],
)
def test_files_that_are_no_traces_are_told_by_their_beginning(tmp_path, data, words):
    file = tmp_path / "trace_0"
    file.write_bytes(data)
    with pytest.raises(InputError) as raised:
        read_traces([file])
    assert words in str(raised.value) and str(file) in str(raised.value)


# ---- rings that have wrapped ----


def dump(calls, first=0, status=None, records=True):
    """A dump in NCCL's form.

    calls: (group, number), number None for a transfer; first: records that the ring has lost.
    """
    entries = []
    for place, (group, seq) in enumerate(calls):
        entries.append(
            {
                "record_id": first + place,
                "pg_id": int(group),
                "process_group": (group, NAMES[group]),
                "collective_seq_id": seq or 0,
                "profiling_name": "nccl:send" if seq is None else "nccl:all_reduce",
                "time_created_ns": 1000 * (first + place),
                "is_p2p": seq is None,
            }
        )
        if not records:
            del entries[-1]["record_id"]
    config = {
        group: {"name": group, "desc": NAMES[group], "ranks": str(ranks)}
        for group, ranks in MEMBERS.items()
    }
    content = {"version": "2.10", "pg_config": config, "entries": entries}
    if status is not None:
        content["pg_status"] = {
            group: {"last_enqueued_collective": number} for group, number in status.items()
        }
    return content


def read(folder, *contents):
    for rank, content in enumerate(contents):
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(content))
    return read_traces([folder])


FIRST = ("0", 1)  # the default group's only call, at the start
REST = [("1", number) for number in range(1, 31)]
SENDS = [("1", None)] * 30


@pytest.mark.parametrize(
    ("what", "first", "status", "records"),
    [
        (REST[10:], 11, None, True),
        (REST[10:], 11, {"0": 1, "1": 30}, True),
        (SENDS[:5] + REST[25:], 31, None, True),  # transfers take the ring's room, too
        (REST[10:], 11, None, False),
        (SENDS[:5] + REST[20:], 0, None, False),
        ([REST[12], *REST[14:]], 0, None, False),
    ],
    ids=["wrapped", "status", "transfers", "no numbers", "transfers, no numbers", "gaps"],
)
def test_what_a_ring_has_lost_is_no_hang(tmp_path, what, first, status, records):
    for lost, whole in ((1, 0), (0, 1)):
        contents = [None, None]
        contents[whole] = dump([FIRST, *REST], records=records)
        contents[lost] = dump(what, first, status, records)
        found = read(tmp_path, *contents)
        assert found.hang == []
        if status is None:
            assert found.unknown == [
                f"whether rank {lost} has called all_reduce number 1 of default_pg 0: its ring "
                "buffer has lost its oldest calls"
            ]
        else:
            assert found.unknown == []


def test_a_dump_of_pending_calls_alone_has_lost_the_others(tmp_path):
    pending = dump(REST[10:], 11)
    pending["entries"] = pending["entries"][::2]
    pending["entries"][0]["record_id"] = 0
    assert read(tmp_path, dump([FIRST, *REST]), pending).hang == []


@pytest.mark.parametrize(
    ("first", "status"),
    [(0, None), (0, {"0": -1, "1": 30}), (11, {"0": -1, "1": 30}), (11, {"0": 0, "1": 30})],
    ids=["whole", "whole, status", "wrapped, status", "wrapped, status 0"],
)
def test_a_group_that_was_never_called_is_a_hang_where_that_is_certain(tmp_path, first, status):
    own = REST if first == 0 else REST[10:]
    found = read(tmp_path, dump([FIRST, *REST[:30]]), dump(own, first, status))
    assert found.hang == [
        "rank 0 called all_reduce number 1 of default_pg 0 before all_reduce number 30 of "
        "tensor_parallel 1",
        "rank 1 has not called all_reduce number 1 of default_pg 0: it stands at all_reduce "
        "number 30 of tensor_parallel 1",
    ]
    assert found.unknown == []


def test_the_number_of_a_transfer_is_none_of_a_collective(tmp_path):
    """pg_status counts both; so it does not tell of a group that has transfers."""
    sends = [("0", None), *REST[10:]]
    status = {"0": 1, "1": 30}
    found = read(tmp_path, dump([FIRST, ("0", 2), *REST]), dump(sends, 11, status))
    assert found.hang == [] and len(found.unknown) == 1


def test_a_status_is_believed_where_its_numbers_are_those_of_the_groups(tmp_path):
    own = dump(REST[10:], 11, {"0": -1, "1": 30})
    for entry in own["entries"]:
        entry["pg_id"] = 0
    found = read(tmp_path, dump([FIRST, *REST]), own)
    assert found.hang == [] and len(found.unknown) == 1


def test_profiles_are_windows(tmp_path):
    """Where windows begin or end differently, nothing follows for calls outside."""
    for rank, calls in enumerate((3, 2)):
        (tmp_path / f"r{rank}.json").write_text(profile_text(rank, calls))
    found = read_traces([tmp_path])
    assert found.hang == [] and found.dropped == 1
    assert "a profile is a window" in found.unknown[0]


def test_what_is_not_known_is_said_and_bounded(tmp_path, capsys):
    names = {str(number): "g" for number in range(40)}
    contents = []
    for rank in range(2):
        content = dump(REST, 100 * rank)
        if rank == 0:
            content["entries"] = [
                {**content["entries"][0], "process_group": (name, "g"), "record_id": place}
                for place, name in enumerate([*names, "1"])
                if name != "1" or place == len(names)
            ]
        content["pg_config"] = {
            name: {"name": name, "desc": "g", "ranks": "[0, 1]"} for name in [*names]
        }
        contents.append(content)
    found = read(tmp_path, *contents)
    assert len(found.unknown) == trace._MOST_LINES and found.more_unknown == 39 - trace._MOST_LINES
    lines = list(found.summary(found.job()))
    assert sum(line.startswith("not known: ") for line in lines) == trace._MOST_LINES + 1
    assert lines[-1] == "not known: 19 more of that kind"
    assert found.as_dict()["unknown"] == found.unknown


# ---- long traces ----


class Steps:
    """How many lines of Python a piece of work executes: time, on any machine."""

    def __enter__(self):
        self.lines = 0
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def _call(self, frame, event, argument):
        return self._line if "unjam" in frame.f_code.co_filename else None

    def _line(self, frame, event, argument):
        self.lines += event == "line"
        return self._line

    def __exit__(self, *_):
        sys.settrace(self._before)


def one_order(calls):
    return [[("0", number) for number in range(calls)]] * 2


def many_groups(calls):
    groups = calls // 10
    return [[(str(number % groups), number // groups) for number in range(calls)]] * 2


def many_ranks(calls):
    """Pairs of ranks."""
    return [[(str(rank // 2), number) for number in range(20)] for rank in range(calls // 10)]


def neighbours_swapped(calls):
    other = [("0" if number % 2 else "1", number // 2) for number in range(calls)]
    return [[("1" if number % 2 else "0", number // 2) for number in range(calls)], other]


def group_after_group(calls):
    halves = [[(group, number) for number in range(calls // 2)] for group in "01"]
    return [halves[0] + halves[1], halves[1] + halves[0]]


def one_that_stopped(calls):
    (order, _) = one_order(calls)
    return [order, order[: calls // 4]]


@pytest.mark.parametrize(
    "shape",
    [one_order, many_groups, many_ranks, neighbours_swapped, group_after_group, one_that_stopped],
)
@pytest.mark.parametrize("kind", ["dumps", "profiles"])
def test_cost_grows_with_the_calls(tmp_path, shape, kind):
    """Four times as many calls: about four times as many steps."""
    if kind == "profiles" and shape is one_that_stopped:
        pytest.skip("profiles tell of no end")
    cost = []
    for calls in (160, 640):
        folder = tmp_path / str(calls)
        folder.mkdir()
        for rank, order in enumerate(shape(calls)):
            members = {}
            for other, its in enumerate(shape(calls)):
                for group, _ in its[-1:] if shape is many_ranks else its:
                    members.setdefault(group, set()).add(other)
            if kind == "dumps":
                content = {
                    "pg_config": {
                        group: {"name": group, "ranks": sorted(those)}
                        for group, those in members.items()
                        if rank in those
                    },
                    "entries": [
                        {
                            "record_id": place,
                            "process_group": (group, "g"),
                            "collective_seq_id": number,
                            "profiling_name": "nccl:all_reduce",
                            "time_created_ns": place,
                            "is_p2p": False,
                        }
                        for place, (group, number) in enumerate(order)
                    ],
                }
            else:
                content = {
                    "distributedInfo": {"rank": rank},
                    "traceEvents": [
                        {
                            "ph": "X",
                            "name": "record_param_comms",
                            "ts": place,
                            "args": {
                                "Collective name": "allreduce",
                                "Process Group Name": group,
                                "Process Group Ranks": str(sorted(members[group])),
                            },
                        }
                        for place, (group, _) in enumerate(order)
                    ],
                }
            (folder / f"rank_{rank}").write_bytes(pickle.dumps(content))
        with Steps() as steps:
            read_traces([folder]).job(disorder=0.0)
        cost.append(steps.lines)
    assert cost[1] < 6 * cost[0], cost
