// Outputs in memory of cudaMalloc() that was registered (unjamMemRegister): results are right, and
// slices went straight there; in one process, and with a process a rank. As calls go in streams and
// beside them by themselves; --slices: all by the engine, slice by slice.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/gpu/children.h"
#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr std::size_t kMiB = std::size_t{1} << 20;
// Those whose plans may store into outputs; a reduce-scatter's may not.
constexpr unjamKind_t kKinds[] = {UNJAM_ALL_REDUCE, UNJAM_ALL_GATHER, UNJAM_BROADCAST, UNJAM_REDUCE,
                                  UNJAM_REDUCE_SCATTER};

// The number behind "name": in the text, from `from` on.
std::uint64_t number(const std::string& text, const std::string& name, std::size_t from = 0) {
  const std::size_t at = text.find("\"" + name + "\":", from);
  if (at == std::string::npos) fail("unjamInfo says nothing of " + name);
  return std::strtoull(text.c_str() + at + name.size() + 3, nullptr, 10);
}
std::uint64_t straight(const Member& me) { return figure(me.context, "into_outputs"); }

void meet(const Member& me) {
  unjamRequest_t request = nullptr;
  check(unjamBarrier(me.all, "meets", nullptr, &request));
  me.wait(request, "barrier");
}

// Until each rank finds so many windows of its peers.
void await_windows(const Member& me, std::uint64_t windows) {
  me.doing("waits for windows of peers");
  const std::uint64_t begin = now_ns();
  for (;;) {
    const std::string text = info(me.context);
    const std::size_t from = text.find("\"windows\":");
    if (number(text, "peers_mapped", from) == windows) break;
    if (number(text, "peers_unreachable", from) != 0 || us_since(begin) > 20e6) {
      fail("rank " + std::to_string(me.rank) + " does not find " + std::to_string(windows) +
           " windows of its peers: " + text.substr(from, text.find('}', from) - from));
    }
    usleep(200);
  }
  meet(me);
}

// Until all peers have let go of what was deregistered.
void await_nothing_left(const Member& me) {
  me.doing("waits for peers to let go of windows");
  const std::uint64_t begin = now_ns();
  for (;;) {
    const std::string text = info(me.context);
    if (number(text, "left", text.find("\"windows\":")) == 0) return;
    if (us_since(begin) > 20e6) fail("peers do not let go of closed windows");
    usleep(200);
  }
}

double run_one(const Member& me, const Spec& s, const Place& place, unjamStreamOrder_t order,
               const Reports& reports, const Stream& stream) {
  const std::string what = s.text() + ", order " + kOrderNames[order];
  me.doing("fills: " + what);
  start_fill(s, place, stream.get());
  if (order == UNJAM_STREAM_NONE) stream.synchronize();
  me.doing("calls: " + what);
  const unjamCallOptions_t options = ordered(order, stream);
  unjamRequest_t request = nullptr;
  const std::uint64_t begin = now_ns();
  check(call(me.all, kKindNames[s.kind], s, place, order == UNJAM_STREAM_NONE ? nullptr : &options,
             &request));
  if (order == UNJAM_STREAM_ASYNC) check(unjamStreamWait(request, stream.get()));
  me.doing("waits: " + what);
  me.wait(request, what);
  const double us = us_since(begin);
  me.doing("checks: " + what);
  start_check(s, place, reports.on_device(0), stream.get());
  reports.start_fetch(stream.get());
  stream.synchronize();
  finish_check(s, reports[0], "rank " + std::to_string(me.rank));
  return us;
}

Spec spec_of(const Member& me, unjamKind_t kind, std::size_t bytes, std::uint64_t seed) {
  Spec s;
  s.kind = kind;
  s.size = me.ranks;
  s.at = me.rank;
  s.seed = seed;
  s.count =
      bytes / 4 / static_cast<std::size_t>(s.sends_blocks() || s.receives_blocks() ? me.ranks : 1);
  return s;
}

// Every kind and order at one size, without and with registration. Rank 0 says how long it took.
// `must`: some slices must have gone straight. (Not of what a sender may have sent as a whole
// before its peer calls: as many slices a lane as there are headers.)
void sweep(const Member& me, std::size_t bytes, std::uint64_t seed, bool must) {
  const Stream stream;
  const Reports reports(1);
  std::size_t most = 0;
  for (const unjamKind_t kind : kKinds)
    most = std::max(most, memory_of(spec_of(me, kind, bytes, 0)));
  const DeviceMemory memory(most);
  std::vector<double> plain[5], registered[5];
  std::uint64_t went[5] = {};
  const auto run = [&](bool in_window, int repeats) {
    for (std::size_t k = 0; k < std::size(kKinds); ++k) {
      const std::uint64_t before = straight(me);
      for (int i = 0; i < repeats; ++i) {
        for (const unjamStreamOrder_t order :
             {UNJAM_STREAM_NONE, UNJAM_STREAM_ASYNC, UNJAM_STREAM_SYNC}) {
          Spec s = spec_of(me, kKinds[k], bytes, mix(seed, k * 64 + static_cast<std::uint64_t>(i)));
          s.in_place = i % 2 == 1;
          s.root = i % me.ranks;  // each
          const double us = run_one(me, s, place_in(memory.get(), s), order, reports, stream);
          if (i != 0) (in_window ? registered : plain)[k].push_back(us);
        }
      }
      if (!in_window && straight(me) != before) fail("slices went into what is not registered");
      if (in_window) went[k] = straight(me) - before;
    }
  };
  run(false, 3);
  meet(me);
  check(unjamMemRegister(me.context, memory.get(), most));
  await_windows(me, static_cast<std::uint64_t>(me.ranks - 1));
  run(true, 4);
  meet(me);
  me.doing("deregisters");
  check(unjamMemDeregister(me.context, memory.get()));
  await_nothing_left(me);
  for (std::size_t k = 0; k < std::size(kKinds); ++k) {
    // (Reduced for a root: not by it, and of two ranks nothing.)
    const bool some = kKinds[k] == UNJAM_ALL_REDUCE || kKinds[k] == UNJAM_ALL_GATHER ||
                      kKinds[k] == UNJAM_BROADCAST;
    if (must && some && went[k] == 0 && me.ranks > 1) {
      fail("rank " + std::to_string(me.rank) + ": of " + kKindNames[kKinds[k]] + " of " +
           std::to_string(bytes) + " bytes nothing went straight");
    }
    if (me.rank == 0) {
      std::printf("%8zu MiB %-16s plain %10.1f us, registered %10.1f us, straight %8llu\n",
                  bytes / kMiB, kKindNames[kKinds[k]], spread(plain[k]).median,
                  spread(registered[k]).median, static_cast<unsigned long long>(went[k]));
    }
  }
  meet(me);
}

// Memory comes, is registered, and goes, again and again; what was deregistered and not freed is
// stored into by nobody.
void come_and_go(const Member& me, int rounds, std::uint64_t seed) {
  const Stream stream;
  const Reports reports(1);
  const Spec like = spec_of(me, UNJAM_ALL_REDUCE, 4 * kMiB, seed);
  DeviceMemory old;
  std::vector<unsigned char> seen(memory_of(like));
  for (int i = 0; i < rounds; ++i) {
    Spec s = like;
    s.seed = mix(seed, static_cast<std::uint64_t>(i));
    DeviceMemory memory(memory_of(s));
    // Two windows of one allocation.
    const std::size_t half = memory_of(s) / 2;
    check(unjamMemRegister(me.context, memory.get(), half));
    check(unjamMemRegister(me.context, memory.as<unsigned char>() + half, memory_of(s) - half));
    if (i % 2 == 0) await_windows(me, 2 * static_cast<std::uint64_t>(me.ranks - 1));
    run_one(me, s, place_in(memory.get(), s), UNJAM_STREAM_NONE, reports, stream);
    meet(me);  // all have ended the call
    check(unjamMemDeregister(me.context, memory.get()));
    check(unjamMemDeregister(me.context, memory.as<unsigned char>() + half));
    if (old.get() != nullptr) {
      me.doing("looks at what was deregistered");
      check(cudaMemcpy(seen.data(), old.get(), seen.size(), cudaMemcpyDeviceToHost));
      for (const unsigned char c : seen) {
        if (c != kPoison) fail("somebody has stored into memory that was deregistered");
      }
    }
    // Every other one is freed, the others are kept for a round.
    if (i % 2 == 0) {
      old = DeviceMemory();
    } else {
      check(cudaMemset(memory.get(), kPoison, memory_of(s)));
      check(cudaDeviceSynchronize());
      old = std::move(memory);
    }
    if (i % 2 == 0) await_nothing_left(me);
    meet(me);  // else the next round's windows would be counted among this one's
  }
}

void refuse(const Member& me, void* pointer, std::size_t bytes, const char* words) {
  const unjamResult_t code = unjamMemRegister(me.context, pointer, bytes);
  if (code != UNJAM_ERROR_INVALID_ARGUMENT) fail(std::string("was registered: ") + words);
  if (std::strstr(unjamGetLastError(), words) == nullptr) {
    fail(std::string("does not say '") + words + "': " + unjamGetLastError());
  }
}

void check_refusals(const Member& me) {
  me.doing("registers what cannot be");
  const DeviceMemory memory(4 * kMiB);
  const PinnedMemory pinned(4096);
  int here = 0;
  refuse(me, &here, 4, "memory of the host");
  refuse(me, pinned.as<void>(), 4096, "memory of the host");
  refuse(me, memory.get(), 4 * kMiB + (std::size_t{1} << 30), "ahead of what was to be registered");
  void* managed = nullptr;
  check(cudaMallocManaged(&managed, 4096));
  refuse(me, managed, 4096, "managed memory");
  check(cudaFree(managed));
  const Stream stream;
  void* pooled = nullptr;
  check(cudaMallocAsync(&pooled, 4096, stream.get()));
  stream.synchronize();
  refuse(me, pooled, 4096, "not of cudaMalloc");
  check(cudaFreeAsync(pooled, stream.get()));
  stream.synchronize();
  if (device_count() > 1) {
    const int other = (me.device + 1) % device_count();
    check(cudaSetDevice(other));
    {
      const DeviceMemory elsewhere(4096);
      refuse(me, elsewhere.get(), 4096, "this rank's device is");
    }
    check(cudaSetDevice(me.device));
  }
  check(unjamMemRegister(me.context, memory.get(), 4 * kMiB));
  if (unjamMemRegister(me.context, memory.as<char>() + 4096, 16) != UNJAM_ERROR_INVALID_USAGE) {
    fail("memory was registered twice");
  }
  check(unjamMemDeregister(me.context, memory.get()));
}

// A deregistration while a stream of every rank waits for a call that has yet to come: nobody may
// hang, although other processes cannot unmap the memory before.
void deregister_beside_waits(const Member& me, std::uint64_t seed) {
  const Stream stream;
  const Reports reports(1);
  const Spec s = spec_of(me, UNJAM_ALL_REDUCE, 4 * kMiB, seed);
  const DeviceMemory memory(memory_of(s)), other(kMiB);
  check(unjamMemRegister(me.context, other.get(), kMiB));
  await_windows(me, static_cast<std::uint64_t>(me.ranks - 1));
  const Place place = place_in(memory.get(), s);
  start_fill(s, place, stream.get());
  const unjamCallOptions_t options = ordered(UNJAM_STREAM_SYNC, stream);
  const auto calls = [&] { check(call(me.all, "late", s, place, &options, nullptr)); };
  if (me.rank != 0) calls();
  me.doing("deregisters while streams wait");
  const std::uint64_t begin = now_ns();
  if (me.rank == 0) check(unjamMemDeregister(me.context, other.get()));
  const double us = us_since(begin);
  if (us > 5e6) fail("deregistering took " + std::to_string(us) + " us");
  if (me.rank == 0) {
    std::printf("deregistered beside streams that wait, after %.0f us\n", us);
    calls();
  }
  stream.synchronize();
  if (me.rank != 0) check(unjamMemDeregister(me.context, other.get()));
  start_check(s, place, reports.on_device(0), stream.get());
  reports.start_fetch(stream.get());
  stream.synchronize();
  finish_check(s, reports[0], "rank " + std::to_string(me.rank));
  await_nothing_left(me);
  meet(me);
}

// The first registrations of all, while streams of all ranks but one wait for a call of that one's:
// mapping may have to wait for them, but nobody for the mapping.
void register_beside_waits(const Member& me, std::uint64_t seed) {
  const Stream stream;
  const Reports reports(1);
  const Spec s = spec_of(me, UNJAM_ALL_REDUCE, 4 * kMiB, seed);
  const DeviceMemory memory(memory_of(s)), other(kMiB);
  const Place place = place_in(memory.get(), s);
  start_fill(s, place, stream.get());
  meet(me);
  const unjamCallOptions_t options = ordered(UNJAM_STREAM_SYNC, stream);
  const auto calls = [&] { check(call(me.all, "early", s, place, &options, nullptr)); };
  if (me.rank != 0) calls();
  me.doing("registers while streams wait");
  const std::uint64_t begin = now_ns();
  check(unjamMemRegister(me.context, other.get(), kMiB));
  const double us = us_since(begin);
  if (me.rank == 0) {
    usleep(200000);  // the others are in the midst of mapping it
    std::printf("registered beside streams that wait, after %.0f us\n", us);
    me.doing("calls what the others' streams wait for");
    calls();
  }
  stream.synchronize();
  start_check(s, place, reports.on_device(0), stream.get());
  reports.start_fetch(stream.get());
  stream.synchronize();
  finish_check(s, reports[0], "rank " + std::to_string(me.rank));
  await_windows(me, static_cast<std::uint64_t>(me.ranks - 1));
  check(unjamMemDeregister(me.context, other.get()));
  await_nothing_left(me);
  meet(me);
}

void run_all(const Job& job, std::uint64_t seed, std::size_t most_mib, int rounds) {
  job.run([&](const Member& me) {
    register_beside_waits(me, mix(seed, 3));
    check_refusals(me);
    meet(me);
    come_and_go(me, rounds, mix(seed, 1));
    deregister_beside_waits(me, mix(seed, 2));
    for (const std::size_t mib : {1, 4, 16, 64, 256}) {
      if (mib <= most_mib) sweep(me, mib * kMiB, mix(seed, mib), mib >= 64);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const std::uint64_t seed = options.seed();
  const int wanted = options.integer("ranks", 0, "GPUs to use; 0: all");
  const int most = options.integer("most", 256, "MiB of the largest outputs");
  const int rounds = options.integer("rounds", 40, "of memory that comes and goes");
  const bool processes = options.flag("processes", "one process per rank, started by this one");
  const bool slices = options.flag("slices", "no call runs without the engine");
  const bool child = options.flag("child", "be one of the processes");
  options.done(300, 40);
  load_eagerly();
  if (slices) setenv("UNJAM_IN_STREAM", "0", 1);
  if (child) {
    die_with_parent();
    run_all(Job(cuda_config()), seed, static_cast<std::size_t>(most), rounds);
    return 0;
  }
  if (processes) {
    std::vector<std::string> arguments(argv + 1, argv + argc);
    arguments.emplace_back("--child");
    Children children(wanted > 0 ? wanted : device_count(), arguments);
    const bool ok = children.all_well(280);
    std::printf("registered: %s, %d processes\n", ok ? "PASS" : "FAIL", children.count());
    return ok ? 0 : kExitFailed;
  }
  take_many_queues();
  const int ranks = wanted > 0 ? wanted : device_count();
  std::printf("registered: %d ranks, seed %llu\n", ranks, static_cast<unsigned long long>(seed));
  run_all(Job(ranks, cuda_config()), seed, static_cast<std::size_t>(most), rounds);
  std::printf("registered: PASS\n");
  return 0;
}
