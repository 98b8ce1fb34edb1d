// The first thing to run on new code: every collective, a few types and counts, every order to a
// stream, one process, all GPUs. --trace prints each step.
#include <string>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr std::size_t kCounts[] = {1, 7, 1000, 262144, (std::size_t{4} << 20) + 3};
constexpr unjamDataType_t kDTypes[] = {UNJAM_FLOAT32, UNJAM_INT32, UNJAM_BFLOAT16};

struct Case {
  Spec spec;
  unjamStreamOrder_t order;
  int repeat = 0;
};

// A plan on a GPU names up to 63 others, and these kinds' plans name all.
bool is_refused(unjamKind_t kind, int ranks) {
  return ranks > 64 && (kind == UNJAM_ALL_TO_ALL || kind == UNJAM_GATHER || kind == UNJAM_SCATTER);
}

std::vector<Case> make_cases(int ranks, std::uint64_t seed, std::size_t most, int only_kind,
                             int only_order, int repeats) {
  std::vector<Case> cases;
  for (const std::size_t count : kCounts) {  // the small ones first: they are easier to debug
    for (const unjamStreamOrder_t order :
         {UNJAM_STREAM_NONE, UNJAM_STREAM_ASYNC, UNJAM_STREAM_SYNC}) {
      for (int kind = 0; kind < kNumKinds; ++kind) {
        for (const unjamDataType_t dtype : kDTypes) {
          for (int i = 0; i < repeats; ++i) {
            if (is_refused(static_cast<unjamKind_t>(kind), ranks)) continue;
            if (count > most || (only_kind >= 0 && kind != only_kind) ||
                (only_order >= 0 && order != only_order)) {
              continue;
            }
            Case c{{}, order, i};
            c.spec.kind = static_cast<unjamKind_t>(kind);
            c.spec.dtype = dtype;
            c.spec.count = count;
            c.spec.seed = mix(seed, cases.size());
            c.spec.root = static_cast<int>(cases.size()) % ranks;
            c.spec.in_place = i % 2 == 1;
            c.spec.size = ranks;
            cases.push_back(c);
          }
        }
      }
    }
  }
  return cases;
}

// Returns microseconds from the call until the result was there (not only the collective's: with
// waking up, or the launches in the stream).
double run_case(const Member& me, const Case& c, void* memory, const Reports& reports,
                const Stream& stream) {
  Spec s = c.spec;
  s.at = me.rank;
  const Place place = place_in(memory, s);
  const std::string what = s.text() + ", order " + kOrderNames[c.order];
  me.doing("fills: " + what);
  start_fill(s, place, stream.get());
  if (c.order == UNJAM_STREAM_NONE) stream.synchronize();
  me.doing("calls: " + what);
  const unjamCallOptions_t options = ordered(c.order, stream);
  unjamRequest_t request = nullptr;
  const std::uint64_t begin = now_ns();
  check(call(me.all, kKindNames[s.kind], s, place,
             c.order == UNJAM_STREAM_NONE ? nullptr : &options, &request));
  if (c.order == UNJAM_STREAM_ASYNC) {
    me.doing("lets the stream wait: " + what);
    check(unjamStreamWait(request, stream.get()));
  }
  if (c.order == UNJAM_STREAM_NONE) {
    me.doing("waits: " + what);
    check(unjamWait(request, -1));
  } else {
    me.doing("synchronises the stream: " + what);
    stream.synchronize();
  }
  const double us = us_since(begin);
  me.doing("asks for the result: " + what);
  me.wait(request, what);
  me.doing("checks: " + what);
  start_check(s, place, reports.on_device(0), stream.get());
  reports.start_fetch(stream.get());
  stream.synchronize();
  finish_check(s, reports[0], "rank " + std::to_string(me.rank));
  return us;
}

__global__ void gate_kernel(const volatile unsigned* open) {
  while (*open == 0) __nanosleep(1000);
}

// The calls of a group of one stand in their streams, and streams that wait for them go on behind
// them, not before. Nothing here may synchronise the device while the gate is shut.
void check_alone(const Member& me, const Stream& stream, std::uint64_t seed) {
  me.doing("calls alone");
  Spec s;
  s.kind = UNJAM_ALL_GATHER;
  s.count = 100000;
  s.size = 1;
  s.seed = mix(seed, 77);
  const Stream other;
  const DeviceMemory memory(memory_of(s)), again_memory(memory_of(s));
  const Place place = place_in(memory.get(), s), again = place_in(again_memory.get(), s);
  const Reports reports(3);
  const PinnedMemory gate(sizeof(unsigned));
  auto* const open = gate.as<unsigned>();
  *open = 1;
  unjamGroup_t alone = nullptr;
  check(unjamGroupCreate(me.context, &me.rank, 1, "alone", &alone));
  const unjamCallOptions_t beside = ordered(UNJAM_STREAM_ASYNC, stream);
  const unjamCallOptions_t within = ordered(UNJAM_STREAM_SYNC, other);
  const std::size_t bytes = s.count * type_info(s.dtype).bytes;
  // (Both streams and all kernels are in use before the gate: first uses may wait for the device.)
  for (const Stream* first : {&stream, &other}) {
    start_fill(s, again, first->get());
    start_check(s, again, reports.on_device(0), first->get());
    gate_kernel<<<1, 1, 0, first->get()>>>(open);
    check(cudaMemcpyAsync(again.recv, again.send, bytes, cudaMemcpyDefault, first->get()));
    first->synchronize();
  }
  *open = 0;
  gate_kernel<<<1, 1, 0, stream.get()>>>(open);
  start_fill(s, place, stream.get());
  unjamRequest_t behind = nullptr, free = nullptr, follows = nullptr;
  check(call(alone, "a", s, place, &beside, &behind));
  check(unjamStreamWait(behind, stream.get()));  // it is behind it anyhow
  check(call(alone, "a", s, again, nullptr, &free));
  me.wait(free, "alone, in no stream");
  int done = 0;
  check(unjamTest(behind, &done));
  if (done != 0) fail("a call of a group of one is complete before its stream comes to it");
  check(cudaMemsetAsync(again.recv, kPoison, bytes, other.get()));
  check(unjamStreamWait(behind, other.get()));
  check(cudaMemcpyAsync(again.recv, place.recv, bytes, cudaMemcpyDefault, other.get()));
  start_check(s, again, reports.on_device(1), other.get());
  check(call(alone, "b", s, again, &within, &follows));
  start_check(s, again, reports.on_device(2), other.get());
  check(unjamTest(follows, &done));
  if (done != 0) fail("a stream does not wait for a call of a group of one in another");
  *static_cast<volatile unsigned*>(open) = 1;
  me.wait(behind, "alone, behind a stream");
  me.wait(follows, "alone, in a stream");
  reports.start_fetch(other.get());
  other.synchronize();
  stream.synchronize();
  for (const int i : {1, 2}) finish_check(s, reports[i], "rank " + std::to_string(me.rank));
  check(unjamGroupDestroy(alone));
}

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const int wanted = options.integer("ranks", 0, "GPUs to use; 0: all");
  const std::uint64_t seed = options.seed();
  const double most = options.number("most", 1e9, "largest count");
  const int kind = options.integer("kind", -1, "only this kind (unjamKind_t)");
  const int order = options.integer("order", -1, "only this order (0 none, 1 async, 2 sync)");
  const int repeats = options.integer("repeats", 2, "of each case; every other one is in place");
  options.done(180, 20);
  load_eagerly();
  const int ranks = wanted > 0 ? wanted : device_count();
  std::printf("smoke: %d ranks, seed %llu\n", ranks, static_cast<unsigned long long>(seed));

  const std::vector<Case> cases =
      make_cases(ranks, seed, static_cast<std::size_t>(most), kind, order, repeats);
  std::size_t memory = 0;
  for (const Case& c : cases) memory = std::max(memory, memory_of(c.spec));

  Job job(ranks, cuda_config());
  std::vector<double> us(cases.size());
  job.run([&](const Member& me) {
    me.doing("allocates");
    const Stream stream;
    const DeviceMemory device(memory);
    const Reports reports(1);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const double t = run_case(me, cases[i], device.get(), reports, stream);
      if (me.rank == 0) us[i] = t;
    }
    for (int k = 0; k < kNumKinds; ++k) {
      const auto refused = static_cast<unjamKind_t>(k);
      if (!is_refused(refused, ranks)) continue;
      Spec s;
      s.kind = refused;
      s.count = 1;
      s.size = ranks;
      s.at = me.rank;
      unjamRequest_t request = nullptr;
      const unjamResult_t code =
          call(me.all, kKindNames[k], s, place_in(device.get(), s), nullptr, &request);
      if (code != UNJAM_ERROR_INVALID_ARGUMENT ||
          std::string(unjamGetLastError()).find("groups of up to 64 ranks") == std::string::npos) {
        fail(std::string(kKindNames[k]) + " of more ranks than there can be is not refused");
      }
    }
    // A ring of messages beside the stream (in it, a send would be in front of the receive that its
    // peer's send waits for), and a barrier in the stream.
    const int to = (me.rank + 1) % ranks, from = (me.rank + ranks - 1) % ranks;
    const auto spec_of = [&](int sender, std::size_t count) {  // as a broadcast of the sender's
      Spec s;
      s.kind = UNJAM_BROADCAST;
      s.count = count;
      s.at = s.root = sender;
      s.seed = mix(seed, static_cast<std::uint64_t>(sender));
      return s;
    };
    constexpr std::size_t kMessages[] = {3, 40000, std::size_t{3} << 20};
    // (Not freed before all have met for the last time: ranks may share a GPU, and to free memory
    // waits for all of its streams, of which one may wait for this rank.)
    const DeviceMemory send_memory(memory_of(spec_of(me.rank, kMessages[2]))),
        recv_memory(memory_of(spec_of(from, kMessages[2])));
    for (const std::size_t count : kMessages) {
      if (ranks < 2 || static_cast<double>(count) > most) continue;
      const Spec mine = spec_of(me.rank, count), theirs = spec_of(from, count);
      const Place out = place_in(send_memory.get(), mine), in = place_in(recv_memory.get(), theirs);
      start_fill(mine, out, stream.get());
      check(cudaMemsetAsync(in.recv, kPoison, count * 4 + kGuardBytes, stream.get()));
      const unjamCallOptions_t beside = ordered(UNJAM_STREAM_ASYNC, stream);
      const unjamCallOptions_t within = ordered(UNJAM_STREAM_SYNC, stream);
      unjamRequest_t sent = nullptr, received = nullptr, met = nullptr;
      const std::string what = "a ring of messages of " + std::to_string(count);
      me.doing(what);
      check(unjamSend(me.all, "ring", out.send, count, mine.dtype, to, &beside, &sent));
      check(unjamRecv(me.all, "ring", in.recv, count, mine.dtype, from, &beside, &received));
      check(unjamStreamWait(received, stream.get()));
      check(unjamBarrier(me.all, "ring", &within, &met));
      me.wait(sent, what);
      me.wait(received, what);
      me.wait(met, "a barrier");
      start_check(theirs, in, reports.on_device(0), stream.get());
      reports.start_fetch(stream.get());
      stream.synchronize();
      finish_check(theirs, reports[0], what + ", rank " + std::to_string(me.rank));
    }
    // (What others do to a GPU that they share would wait for the gate; and so would all streams
    // where they have one hardware queue.)
    if (ranks <= device_count() && queues_taken() != 1) check_alone(me, stream, seed);
    me.doing("done");
  });

  std::printf("%-15s %9s %-6s %12s   (rank 0's last repetition, first-use costs included)\n",
              "kind", "count", "order", "us float32");
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    if (c.spec.dtype != UNJAM_FLOAT32 || c.repeat != repeats - 1) continue;
    std::printf("%-15s %9zu %-6s %12.1f\n", kKindNames[c.spec.kind], c.spec.count,
                kOrderNames[c.order], us[i]);
  }
  print_stats(job);
  std::printf("smoke: PASS, %zu cases on %d ranks\n", cases.size(), ranks);
  return 0;
}
