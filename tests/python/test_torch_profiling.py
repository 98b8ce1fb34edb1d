"""What torch's profiler, NVTX tools and flight-recorder readers see of calls through torch."""

import ast
import json
import pickle
import subprocess
import sys

import pytest

from processes import environment, workers

pytest.importorskip("torch")

from torch_tools import START_S, make_store  # noqa: E402
from unjam.simulate.trace import read_traces  # noqa: E402
from unjam.torch import _extension  # noqa: E402

LONG_S = 200  # to catch hangs
pytestmark = [pytest.mark.timeout(900, func_only=True), pytest.mark.usefixtures("adapter")]


def run(member, ranks, *arguments, **env):
    """A job of `member(rank, ranks, port, *arguments)`: what each rank said.

    Its groups are of CPU tensors, also where there are GPUs: names say so where there are both.
    """
    env = {"UNJAM_TORCH_CUDA": 0} | env
    store = make_store()
    with workers() as harness:
        processes = [
            harness.start_with_torch(member, rank, ranks, store.port, *arguments, **env)
            for rank in range(ranks)
        ]
        said = [process.said(START_S) for process in processes]
        for process in processes:
            process.ends(LONG_S)
    return said


# ---- on GPUs ----


def seen_on_gpu(rank, ranks, port, folder):
    """A call in a stream, profiled and recorded; says what it gave and what the record has."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store

    torch.cuda.set_device(rank)
    store = join_store(port, ranks)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=ranks)
    x = torch.full((256,), rank + 1.0, device="cuda")
    with profile(activities=[ProfilerActivity.CPU]) as seen, unjam.torch.key("layer3"):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    seen.export_chrome_trace(f"{folder}/rank{rank}.json")
    record = unjam.torch.flight_record()
    say([x[0].item(), [[e["profiling_name"], e["state"]] for e in record["entries"]]])
    dist.destroy_process_group()


@pytest.mark.gpu
def test_calls_in_streams_are_seen(tmp_path):
    said = run(seen_on_gpu, 2, str(tmp_path), UNJAM_TORCH_CUDA=1)
    assert said == [[3.0, [["nccl:all_reduce", "completed"]]]] * 2
    for rank in range(2):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        names = [event.get("name") for event in events]
        assert "unjam:all_reduce" in names
        (entry,) = [e for e in events if e.get("name") == "record_param_comms"]
        assert entry["args"]["In msg nelems"] == 256


# ---- torch.profiler ----


def profiled(rank, ranks, port, folder):
    """Every operation in one profile; says how long the first call waited for the other rank."""
    import time

    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store, meet

    torch.set_num_threads(1)
    store = join_store(port, ranks)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=ranks)
    x, both = torch.ones(6), torch.ones(12)
    halves = list(both.chunk(2))
    peer = 1 - rank
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        if rank == 1:
            time.sleep(0.5)
        work = dist.all_reduce(x, async_op=True)
        work.get_future().wait()  # not the Work's wait(): the callback thread sees the end
        with unjam.torch.key("layer3"):
            dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather(halves, x)
        dist.all_gather_into_tensor(both, x)
        dist.gather(x, halves if rank == 0 else None)
        dist.scatter(x, halves if rank == 0 else None)
        dist.reduce_scatter(x, halves)
        dist.reduce_scatter_tensor(x, both)
        dist.all_to_all(list(both.chunk(2)), halves)
        dist.all_to_all_single(both, both.clone())
        dist.all_to_all_single(both, both.clone(), [6, 6], [6, 6])
        for work in (dist.isend(x, peer), dist.irecv(torch.ones(6), peer)):
            work.wait()
        dist.barrier()
        with torch.distributed._coalescing_manager(async_ops=True) as manager:
            for part in halves:
                dist.all_reduce(part)
        manager.wait()
    seen.export_chrome_trace(f"{folder}/rank{rank}.json")
    # One that a profile does not see the end of, and a later profile that does.
    with profile(activities=[ProfilerActivity.CPU]) as early:
        pending = unjam.torch.all_reduce(x, key="pending", async_op=True) if rank == 0 else None
    names = [event.name for event in early.events()]
    meet(store, "between", ranks)
    with profile(activities=[ProfilerActivity.CPU]) as late:
        if pending is None:
            pending = unjam.torch.all_reduce(x, key="pending", async_op=True)
        pending.wait()
    late_names = [event.name for event in late.events()]
    say([names.count("unjam:all_reduce"), late_names.count("unjam:all_reduce")])
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    said = run(profiled, 2, str(folder))
    events = []
    for rank in range(2):
        content = json.loads((folder / f"rank{rank}.json").read_text())
        events.append([e for e in content["traceEvents"] if e.get("ph") == "X"])
    return folder, events, said


OPERATIONS = (
    "all_reduce broadcast reduce all_gather all_gather_into_tensor gather scatter reduce_scatter "
    "reduce_scatter_tensor all_to_all all_to_all_single send recv barrier"
).split()


@pytest.mark.parametrize("what", OPERATIONS)
def test_profile_has_a_range_of_each_operation(profiles, what):
    for events in profiles[1]:
        found = [event for event in events if event["name"] == f"unjam:{what}"]
        assert found and all(event["cat"] == "user_annotation" for event in found)


def test_profile_has_the_shapes_of_tensors(profiles):
    for events in profiles[1]:
        first = next(e for e in events if e["name"] == "unjam:all_reduce")
        assert first["args"]["Input Dims"] == [[6]]


def test_range_of_an_asynchronous_call_ends_with_the_call(profiles):
    """Rank 1 came half a second later: rank 0's range takes that long, its own does not."""
    first = [next(e for e in events if e["name"] == "unjam:all_reduce") for events in profiles[1]]
    assert first[0]["dur"] > 400e3  # microseconds
    assert first[1]["dur"] < first[0]["dur"]


def comms(events):
    return [event["args"] for event in events if event["name"] == "record_param_comms"]


def test_param_comms_are_what_torch_s_readers_ask_for(profiles):
    for events in profiles[1]:
        found = {args["Collective name"]: args for args in comms(events)}
        for args in found.values():
            assert args["Process Group Name"] == "0"
            assert args["Process Group Description"] == "default_pg"
            assert ast.literal_eval(args["Process Group Ranks"]) == [0, 1]
            assert args["Group size"] == 2
        sizes = {
            name: (args["In msg nelems"], args["Out msg nelems"], args["dtype"])
            for name, args in found.items()
        }
        assert sizes["allreduce"] == (6, 6, "Float")
        assert sizes["broadcast"] == (6, 6, "Float")
        assert sizes["_allgather_base"] == (6, 12, "Float")
        assert sizes["all_gather"] == (6, 12, "Float")
        assert sizes["_reduce_scatter_base"] == (12, 6, "Float")
        assert sizes["reduce_scatter"] == (12, 6, "Float")
        assert sizes["all_to_all"] == (12, 12, "Float")
        assert sizes["all_to_allv"] == (12, 12, "Float")
        assert ast.literal_eval(str(found["all_to_allv"]["In split size"])) == [6, 6]
        assert sizes["send"] == (6, 0, "Float")
        assert sizes["recv"] == (0, 6, "Float")
        assert sizes["barrier"][:2] == (0, 0)
        assert sizes["allreduce_coalesced"] == (12, 12, "Float")


def test_simulator_reads_the_profiles(profiles):
    found = read_traces([profiles[0]])
    assert (found.ranks, found.mismatches) == ([0, 1], [])
    collectives = [args for args in comms(profiles[1][0]) if args["Collective name"] not in SENDS]
    assert found.calls == 2 * len(collectives)


SENDS = ("send", "recv")


def test_profile_that_stops_while_a_call_is_pending(profiles):
    """It has the call; a later profile, in which the call ends, does not have rank 0's."""
    assert profiles[2] == [[1, 0], [0, 1]]


# ---- flight recorder ----


def recorded(rank, ranks, port, folder, limit_s):
    """Rank 2 leaves out the last call. Dumps are written by the calls' time limit, or here."""
    import os
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store, meet

    torch.set_num_threads(1)
    store = join_store(port, ranks)
    limit = timedelta(seconds=limit_s or 300)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=ranks, timeout=limit)
    x = torch.ones(4)
    pair = dist.new_group([0, 1])
    names = ("a", "b") if rank % 2 else ("b", "a")  # in any order
    works = [unjam.torch.all_reduce(torch.ones(3), key=name, async_op=True) for name in names]
    for work in works:
        work.wait()
    if rank < 2:
        dist.all_reduce(torch.ones(2), group=pair)
    if rank == 1:
        try:
            dist.all_to_all_single(torch.zeros(3), torch.zeros(4))
        except ValueError:  # refused: not a call
            pass
    lists = [torch.zeros(4) for _ in range(ranks)]
    dist.all_gather(lists, x)
    dist.reduce_scatter(torch.zeros(4), lists)
    dist.gather(x, lists if rank == 0 else None)
    dist.scatter(x, lists if rank == 0 else None)
    dist.all_to_all([torch.zeros(4) for _ in range(ranks)], lists)
    dist.all_to_all_single(torch.zeros(8), torch.zeros(8))
    if rank in (0, 3):  # only these two, either way, with tags in any order
        other = 3 - rank
        tags = (1, 2) if rank else (2, 1)
        works = [dist.isend(torch.ones(tag), other, tag=tag) for tag in tags]
        works += [dist.irecv(torch.ones(tag), tag=tag) for tag in tags]  # from whom it comes
        for work in works:
            work.wait()
    dist.barrier()
    meet(store, "all but the last", ranks)
    caught = ""
    if rank != 2:
        with unjam.torch.key("the last"):
            work = dist.all_reduce(torch.ones(5), async_op=True)
        if limit_s:
            try:
                work.wait()
            except dist.DistBackendError as error:
                caught = str(error)
    if rank == 2 or not limit_s:
        unjam.torch.dump_flight_recorder(os.path.join(folder, "fr_rank_"))
    meet(store, "dumped", ranks)
    time.sleep(0.1)
    say(caught)
    os._exit(0)  # with what is pending


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    run(recorded, 4, str(folder), 0, UNJAM_TORCH_STACKS=1)
    return folder


def analysed(folder, *options):
    """What torch's own analyser says."""
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


def test_analyser_names_the_rank_that_is_missing(dumps):
    said = analysed(dumps)
    assert said.count("Not all ranks joining collective") == 1, said
    assert "missing ranks: {2}" in said
    assert "group info: 0 key the last:default_pg" in said
    assert "collective: nccl:all_reduce" in said
    assert "input sizes: [[5]]" in said
    assert "recorded at " in said  # the stack, with this file's function
    assert "has errors" not in said and "mismatch" not in said.lower(), said


def test_messages_meet_in_their_direction(dumps):
    """As torch's analyser reads them; it has said above that none of them lacks its other side."""
    from torch.distributed.flight_recorder.components import types

    found = []
    for rank in (0, 3):
        dump = pickle.loads((dumps / f"fr_rank_{rank}").read_bytes())
        members = {
            name: set(ast.literal_eval(group["ranks"])) for name, group in dump["pg_config"].items()
        }
        for entry in dump["entries"]:
            if entry["is_p2p"]:
                name = entry["process_group"][0]
                found.append((name, str(types.Op(entry, members, name)), entry["p2p_seq_id"]))
    directions = [(tag, *pair) for tag in (1, 2) for pair in ((0, 3), (3, 0))]
    for tag, source, to in directions:
        name = f"0 tag {tag} {source}->{to}"
        ends = f"s={source} d={to}, input_sizes="
        assert (name, f"send({ends}[[{tag}]], state=completed)", 1) in found
        assert (name, f"recv({ends}[], state=completed)", 1) in found  # from any source
    assert len(found) == 2 * len(directions)


def test_dump_has_torch_s_fields(dumps):
    import torch._C._distributed_c10d as c10d

    theirs = pickle.loads(c10d._dump_fr_trace())
    ours = pickle.loads((dumps / "fr_rank_1").read_bytes())
    assert ours.keys() >= theirs.keys()
    assert ours["version"] == theirs["version"]
    entry = ours["entries"][0]
    assert entry.keys() == {
        *("frames record_id pg_id process_group thread_name thread_id collective_seq_id").split(),
        *("p2p_seq_id op_id profiling_name time_created_ns input_sizes input_dtypes").split(),
        *("output_sizes output_dtypes state time_discovered_started_ns").split(),
        *("time_discovered_completed_ns retired timeout_ms is_p2p").split(),
    }
    assert entry["input_dtypes"] == ["Float"] and entry["state"] == "completed"
    assert any(frame["name"] == "recorded" for frame in entry["frames"])
    last = ours["entries"][-1]
    assert (last["state"], last["retired"]) == ("started", False)
    assert last["time_discovered_completed_ns"] is None


def test_simulator_reads_the_dumps(dumps):
    found = read_traces([dumps])
    assert found.ranks == [0, 1, 2, 3]
    assert found.mismatches == []
    assert found.skips > 0  # keys in any order are channels of their own


def test_simulate_command_reads_the_dumps(dumps, python):
    said = python("-m", "unjam", "simulate", "--trace", str(dumps), "--rounds", "100")
    assert said.returncode == 0, said.stderr
    assert "4 ranks" in said.stdout


def test_dumps_are_written_when_a_time_limit_is_over(tmp_path):
    said = run(recorded, 4, str(tmp_path), 20, TORCH_FR_DUMP_TEMP_FILE=tmp_path / "fr_rank_")
    assert all("was not complete within" in said[rank] for rank in (0, 1, 3)), said
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"fr_rank_{r}" for r in range(4)]
    assert "missing ranks: {2}" in analysed(tmp_path)
    entries = pickle.loads((tmp_path / "fr_rank_0").read_bytes())["entries"]
    assert all(entry["frames"] == [] for entry in entries)  # no stacks, unless asked for


def ring(rank, ranks, port):
    """More calls than are kept; says their records' numbers, and what an empty recorder says."""
    import torch
    import torch.distributed as dist

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store

    store = join_store(port, ranks)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=ranks)
    for _ in range(10):
        dist.all_reduce(torch.ones(1))
    try:
        record = unjam.torch.flight_record()
        say([[e["record_id"], e["collective_seq_id"]] for e in record["entries"]])
    except RuntimeError as error:
        say(str(error))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_ring_keeps_the_last_calls(name):
    assert run(ring, 1, **{name: 4}) == [[[6, 7], [7, 8], [8, 9], [9, 10]]]


def test_recorder_that_is_off_says_so():
    (said,) = run(ring, 1, TORCH_FR_BUFFER_SIZE=0)
    assert "the flight recorder is off: set TORCH_FR_BUFFER_SIZE" in said


def test_dump_without_a_name_is_refused(monkeypatch):
    import unjam.torch

    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="give a prefix"):
        unjam.torch.dump_flight_recorder()


# ---- NVTX ----

# A tool as NVTX's documentation of injection describes it, without NVTX's headers: it sets the
# functions that it wants to be called, and writes down how they are.
TOOL = """
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {
struct Event {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message;
};
struct Callbacks {
  size_t size;
  int (*get_module)(int module, void**** table, unsigned* entries);
};
std::atomic<uint64_t> ranges{0};
FILE* file() {
  static FILE* const opened = fopen(getenv("NVTX_TOOL_FILE"), "a");
  return opened;
}
void* create(const char* name) {
  fprintf(file(), "domain %s\\n", name);
  fflush(file());
  return &ranges;
}
uint64_t start(void* domain, const Event* event) {
  const uint64_t id = ++ranges;
  fprintf(file(), "start %d %lu %s\\n", domain == &ranges, id, event->message);
  fflush(file());
  return id;
}
void end(void* domain, uint64_t id) {
  fprintf(file(), "end %d %lu\\n", domain == &ranges, id);
  fflush(file());
}
}  // namespace

extern "C" int InitializeInjectionNvtx2(const void* (*get_table)(uint32_t)) {
  const auto* callbacks = static_cast<const Callbacks*>(get_table(1));
  void*** table = nullptr;
  unsigned entries = 0;
  if (callbacks == nullptr || !callbacks->get_module(5, &table, &entries) || entries < 13) return 0;
  *table[2] = reinterpret_cast<void*>(start);
  *table[3] = reinterpret_cast<void*>(end);
  *table[12] = reinterpret_cast<void*>(create);
  return 1;
}
"""


def ranged(rank, ranks, port):
    import torch
    import torch.distributed as dist

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store, meet

    store = join_store(port, ranks)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=ranks)
    dist.all_reduce(torch.ones(4))
    meet(store, "one", ranks)
    if rank == 0:
        with unjam.torch.key("layer3"):
            work = dist.all_reduce(torch.ones(4), async_op=True)
        say("called")
        meet(store, "called", ranks)
        work.get_future().wait()
        say("over")
    else:
        meet(store, "called", ranks)
        with unjam.torch.key("layer3"):
            dist.all_reduce(torch.ones(4))
        say("called")
        say("over")
    try:
        dist.all_to_all_single(torch.zeros(3), torch.zeros(4))
    except ValueError:  # refused, when its range has begun
        pass
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def nvtx_tool(tmp_path_factory):
    if not _extension.extension().has_nvtx:
        pytest.skip("the adapter was compiled without NVTX's headers")
    folder = tmp_path_factory.mktemp("tool")
    (folder / "tool.cc").write_text(TOOL)
    library = folder / "libtool.so"
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", str(folder / "tool.cc"), "-o", str(library)],
        check=True,
        timeout=LONG_S,
    )
    return library


def test_nvtx_ranges_go_from_the_call_to_its_end_and_name_the_key(nvtx_tool, tmp_path):
    files = [tmp_path / f"rank{rank}" for rank in range(2)]
    store = make_store()
    with workers() as harness:
        processes = [
            harness.start_with_torch(
                ranged,
                rank,
                2,
                store.port,
                NVTX_INJECTION64_PATH=nvtx_tool,
                NVTX_TOOL_FILE=files[rank],
            )
            for rank in range(2)
        ]
        for process in processes:
            assert process.said(START_S) == "called"
            assert process.said(LONG_S) == "over"
            process.ends(LONG_S)
    for file in files:
        lines = [line.split(" ", 3) for line in file.read_text().splitlines()]
        assert lines.count(["domain", "unjam"]) == 1
        calls = [line for line in lines if line[0] != "domain"]
        assert all(line[1] == "1" for line in calls)  # in that domain
        started = {line[2]: line[3] for line in calls if line[0] == "start"}
        ended = [line[2] for line in calls if line[0] == "end"]
        assert sorted(ended) == sorted(started)  # each once
        texts = list(started.values())
        assert texts[:2] == ["unjam:all_reduce", "unjam:all_reduce key=layer3"], texts


def test_without_an_nvtx_tool_calls_go_as_ever():
    assert run(ranged, 2, NVTX_INJECTION64_PATH="/nowhere/libtool.so") == ["called", "called"]


# ---- what ends early, fails, or begins anew ----


def stopped_early(rank, ranks, port, folder, what):
    """Observers of all threads that stop while calls are pending, and others behind them."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

    from rank_tools import say
    from torch_tools import join_store, meet

    def observer(name):
        if what == "trace":
            return ExecutionTraceObserver().register_callback(f"{folder}/{name}{rank}.json")
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        return profile(activities=[ProfilerActivity.CPU], experimental_config=config)

    store = join_store(port, ranks)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=ranks)
    first = observer("first")
    first.start()
    works = []
    if rank == 0:
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(100)]
    first.stop()
    second = observer("second")
    second.start()
    meet(store, "stopped", ranks)
    if rank == 1:
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(100)]
    for work in works:
        work.wait()
    second.stop()
    say("over")
    dist.destroy_process_group()


@pytest.mark.parametrize("what", ["profile", "trace"])
def test_observers_of_all_threads_may_stop_before_calls_end(what, tmp_path):
    assert run(stopped_early, 2, str(tmp_path), what) == ["over"] * 2


def disagreeing(rank, ranks, port):
    """A call that fails; says what the record has before and behind the wait for it."""
    import time

    import torch
    import torch.distributed as dist

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store

    store = join_store(port, ranks)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=ranks)
    work = dist.all_reduce(torch.ones(4 + rank), async_op=True)
    states = []
    for _ in range(200):  # until it is over, by what the record's reader sees
        (entry,) = unjam.torch.flight_record()["entries"]
        if entry["retired"]:
            break
        time.sleep(0.05)
    states.append(entry["state"])
    try:
        work.wait()
    except RuntimeError:
        (entry,) = unjam.torch.flight_record()["entries"]
        states.append(entry["state"])
    say(states)


def test_failed_calls_are_never_called_completed():
    assert run(disagreeing, 2) == [["started", "started"]] * 2


def begun_anew(rank, ranks, port):
    """Two jobs in a row, with other second groups; says what the record has of the second."""
    import torch
    import torch.distributed as dist

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store

    store = join_store(port, ranks)
    for job, members in (("a", [0, 1]), ("b", [1, 2])):
        part = dist.PrefixStore(job, store)
        dist.init_process_group("unjam", store=part, rank=rank, world_size=ranks)
        group = dist.new_group(members)
        if rank in members:
            dist.all_reduce(torch.ones(1), group=group)
        if job == "b":
            record = unjam.torch.flight_record()
            calls = [[e["process_group"][0], e["collective_seq_id"]] for e in record["entries"]]
            say([record["pg_config"].get("1", {}).get("ranks"), calls])
        dist.destroy_process_group()


def test_a_new_job_begins_a_new_record():
    said = run(begun_anew, 3)
    assert said == [[None, []], ["[1, 2]", [["1", 1]]], ["[1, 2]", [["1", 1]]]]


def many_keys(rank, ranks, port):
    """More keys than records, the first once more; says its number."""
    import torch
    import torch.distributed as dist

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store

    store = join_store(port, ranks)
    dist.init_process_group("unjam", store=store, rank=rank, world_size=ranks)
    for number in [*range(300), 0]:
        with unjam.torch.key(f"key {number}"):
            dist.all_reduce(torch.ones(1))
    say(unjam.torch.flight_record()["entries"][-1]["collective_seq_id"])
    dist.destroy_process_group()


def test_keys_without_records_keep_their_numbers():
    assert run(many_keys, 1, TORCH_FR_BUFFER_SIZE=4) == [2]
