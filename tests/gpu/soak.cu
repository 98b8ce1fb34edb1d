// Overlapping groups on all GPUs: all pairs, triples, all; each rank in an order of its own, 4 B to
// 64 MiB, random delays on host and device, every order to a stream, device synchronisation and
// allocation between; every result is checked on the device.
//
// With more keys than a lane has connectors for, at first (--keys 100), calls find that theirs have
// gone to others; with --registered, large ones are stored straight into outputs.
//
// Nothing here depends on anything in a circle: calls that a stream waits for at once (SYNC) are
// made in one order by all ranks; everything else is called in any order, and waited for after the
// last call of its batch. Slices are made from (seed, slice): one that failed can be run alone.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "tests/gpu/children.h"
#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr std::size_t kMostInBatch = 24;

struct Settings {
  std::uint64_t seed = 0;
  int batches = 0;      // of a slice
  double seconds = 0;   // begin no slice after so long
  int first_slice = 0;  // resume here
  int slices = 0;
  std::size_t least_bytes = 0, most_bytes = 0, arena_bytes = 0;
  int disturb = 0, delay = 0;  // percent
  int streams = 0;             // of each half
  int keys = 0;                // of a group and a kind of order
  bool registered = false;
};

std::vector<std::vector<int>> make_groups(int ranks, std::uint64_t seed) {
  std::vector<std::vector<int>> groups;
  for (int a = 0; a < ranks; ++a) {
    for (int b = a + 1; b < ranks; ++b) {
      groups.push_back({a, b});
      for (int c = b + 1; c < ranks; ++c) groups.push_back({c, a, b});
    }
  }
  std::mt19937_64 random(mix(seed, 99));
  std::shuffle(groups.begin(), groups.end(), random);
  if (groups.size() > 24) groups.resize(24);
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  groups.push_back(all);
  return groups;
}

// One collective of a batch, as all ranks know it.
struct Entry {
  std::size_t group = 0;
  std::string key;
  std::uint64_t number = 0;  // in it
  bool sync = false;
  Spec spec;  // but for `at`
};

std::vector<Entry> make_batch(const Settings& s, const std::vector<std::vector<int>>& groups,
                              std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Entry> batch;
  const std::size_t wanted = 1 + random() % kMostInBatch;
  std::size_t memory = 0;
  // Mostly SYNC, mostly ASYNC, or mixed.
  const std::uint64_t sync_percent = std::vector<std::uint64_t>{0, 0, 30, 100}[random() % 4];
  while (batch.size() < wanted) {
    Entry e;
    // All GPUs take part in a third of all.
    e.group = random() % 3 == 0 ? groups.size() - 1 : random() % groups.size();
    e.sync = random() % 100 < sync_percent;
    e.number = random() % static_cast<std::uint64_t>(s.keys);
    e.key = (e.sync ? "s" : "k") + std::to_string(e.number);
    Spec& spec = e.spec;
    spec.size = static_cast<int>(groups[e.group].size());
    spec.kind = static_cast<unjamKind_t>(random() % kNumKinds);
    spec.dtype = kTypes[random() % std::size(kTypes)].type;
    spec.op = std::vector<unjamOp_t>{UNJAM_SUM, UNJAM_SUM, UNJAM_MIN, UNJAM_MAX}[random() % 4];
    spec.root = static_cast<int>(random() % static_cast<std::uint64_t>(spec.size));
    spec.in_place = random() % 2 == 0;
    spec.seed = random();
    // Log-uniform, of the larger buffer.
    const double u = static_cast<double>(random() >> 11) * 0x1p-53;
    const auto least = static_cast<double>(s.least_bytes);
    const double bytes = least * std::pow(static_cast<double>(s.most_bytes) / least, u);
    const bool blocked = spec.sends_blocks() || spec.receives_blocks();
    const std::size_t share = type_info(spec.dtype).bytes *
                              (blocked ? static_cast<std::size_t>(spec.size) : std::size_t{1});
    spec.count = std::max<std::size_t>(1, static_cast<std::size_t>(bytes) / share);
    memory += memory_of(spec);
    if (memory > s.arena_bytes) break;
    batch.push_back(std::move(e));
  }
  return batch;
}

// What one rank has under way of a batch.
struct Call {
  const Entry* entry;
  std::size_t index;  // in the batch
  Spec spec;
  Place place;
  std::uint64_t turn;  // own order; a key's calls keep theirs
  unjamRequest_t request = nullptr;
};

// One of two batches that are under way at a time.
struct Half {
  Half(std::size_t bytes, int n)
      : streams(static_cast<std::size_t>(n)), memory(bytes), reports(kMostInBatch) {}
  std::vector<Stream> streams;
  DeviceMemory memory;
  Reports reports;
  std::vector<Entry> batch;
  std::vector<Call> calls;
};

struct Totals {
  std::uint64_t collectives = 0, bytes = 0, disturbances = 0, digest = 0;
};

class Worker {
 public:
  Worker(const Member& me, const Settings& s, const std::vector<std::vector<int>>& groups,
         bool alone)
      : me_(me),
        s_(s),
        members_(groups),
        alone_(alone),
        halves_{Half(s.arena_bytes, s.streams), Half(s.arena_bytes, s.streams)} {
    touch_streams();
    for (const Half& half : halves_) {
      if (s.registered) check(unjamMemRegister(me.context, half.memory.get(), s.arena_bytes));
    }
    std::vector<std::size_t> order(groups.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::mt19937_64 random(mix(s.seed, static_cast<std::uint64_t>(me.rank)));
    std::shuffle(order.begin(), order.end(), random);
    handles_.resize(groups.size());
    for (const std::size_t g : order) {
      if (place_of_me(g) < 0) continue;
      check(unjamGroupCreate(me.context, groups[g].data(), static_cast<int>(groups[g].size()),
                             ("g" + std::to_string(g)).c_str(), &handles_[g]));
    }
  }

  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  // (All calls have ended; the memory is freed behind this.)
  ~Worker() {
    for (const Half& half : halves_) {
      if (s_.registered) check(unjamMemDeregister(me_.context, half.memory.get()));
    }
  }

  Totals slice(int number) {
    totals_ = {};
    for (int b = 0; b < s_.batches; ++b) {
      const std::uint64_t seed =
          mix(mix(s_.seed, static_cast<std::uint64_t>(number)), static_cast<std::uint64_t>(b));
      where_ = "rank " + std::to_string(me_.rank) + ", seed " + std::to_string(s_.seed) +
               ", slice " + std::to_string(number) + ", batch " + std::to_string(b);
      Half& half = halves_[b % 2];
      end_batch(half);  // two batches may be under way
      random_.seed(mix(seed, 1000 + static_cast<std::uint64_t>(me_.rank)));
      half.batch = make_batch(s_, members_, seed);
      run_batch(half);
    }
    end_batch(halves_[s_.batches % 2]);
    end_batch(halves_[(s_.batches + 1) % 2]);
    return totals_;
  }

  // The largest of all ranks' values: they agree.
  int agree(int value) {
    int* cell = halves_[0].memory.as<int>();
    check(cudaMemcpy(cell, &value, sizeof(int), cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));  // such a copy may return before its data have arrived
    unjamRequest_t request = nullptr;
    check(
        unjamAllReduce(me_.all, "agree", cell, cell, 1, UNJAM_INT32, UNJAM_MAX, nullptr, &request));
    me_.wait(request, "agreeing");
    check(cudaMemcpy(&value, cell, sizeof(int), cudaMemcpyDeviceToHost));
    return value;
  }

 private:
  int place_of_me(std::size_t group) const {
    const auto& m = members_[group];
    const auto found = std::find(m.begin(), m.end(), me_.rank);
    return found == m.end() ? -1 : static_cast<int>(found - m.begin());
  }
  bool chance(int percent) { return random_() % 100 < static_cast<std::uint64_t>(percent); }
  const Stream& any_stream(const Half& half) {
    return half.streams[random_() % half.streams.size()];
  }

  // Threads that begin with fresh streams at the same moment may get one hardware queue for two
  // (docs/api.md, "Streams"), and ranks that share a GPU would stand in each other's way for good.
  void touch_streams() {
    static std::mutex one_thread_at_a_time;
    const std::lock_guard lock(one_thread_at_a_time);
    const Event event;
    for (const Half& half : halves_) {
      for (const Stream& s : half.streams) event.record(s);
    }
  }

  void run_batch(Half& half) {
    // Which calls are mine, where their data lie, and in which order I make them.
    half.calls.clear();
    std::size_t offset = 0;
    const auto keys = static_cast<std::size_t>(s_.keys);
    std::vector<std::uint64_t> turn_of_key(members_.size() * keys);
    for (std::uint64_t& t : turn_of_key) t = random_();
    std::uint64_t sync_turn = 0;
    for (std::size_t i = 0; i < half.batch.size(); ++i) {
      const Entry& e = half.batch[i];
      const int at = place_of_me(e.group);
      if (at < 0) continue;
      Call c{&e, i, e.spec, {}, 0};
      c.spec.at = at;
      c.place = place_in(half.memory.as<unsigned char>() + offset, c.spec);
      offset += memory_of(c.spec);
      if (e.sync) {
        // In the batch's order among themselves, anywhere among the others.
        sync_turn += (~std::uint64_t{0} - sync_turn) / 16 * (random_() % 4);
        c.turn = sync_turn;
      } else {
        c.turn = turn_of_key[e.group * keys + e.number];
      }
      half.calls.push_back(c);
    }
    std::stable_sort(half.calls.begin(), half.calls.end(),
                     [](const Call& a, const Call& b) { return a.turn < b.turn; });
    for (Call& c : half.calls) make_call(half, c);

    // All are called: now anything may wait for them, in any order.
    std::shuffle(half.calls.begin(), half.calls.end(), random_);
    for (Call& c : half.calls) {
      if (c.entry->sync) continue;
      const Stream& stream = any_stream(half);
      me_.doing(where_ + ": stream waits for " + text_of(c));
      if (chance(50)) {
        check(unjamStreamWait(c.request, stream.get()));
      } else {
        me_.doing(where_ + ": host waits for " + text_of(c));
        const unjamResult_t code = unjamWait(c.request, -1);
        if (code != UNJAM_SUCCESS) fail(where_ + ": " + unjamRequestError(c.request));
      }
      start_check(c.spec, c.place, half.reports.on_device(c.index), stream.get());
    }
  }

  void make_call(Half& half, Call& c) {
    const std::string text = text_of(c);
    if (chance(s_.delay)) usleep(static_cast<useconds_t>(random_() % 2000));
    if (chance(s_.disturb)) disturb();
    const Stream& stream = any_stream(half);
    me_.doing(where_ + ": fills " + text);
    if (chance(s_.delay)) {
      spin_kernel<><<<1 + static_cast<unsigned>(random_() % 64), 256, 0, stream.get()>>>(
          1000 * (random_() % 2000));
    }
    start_fill(c.spec, c.place, stream.get());
    const unjamStreamOrder_t order = c.entry->sync ? UNJAM_STREAM_SYNC
                                     : chance(70)  ? UNJAM_STREAM_ASYNC
                                                   : UNJAM_STREAM_NONE;
    if (order == UNJAM_STREAM_NONE) {
      me_.doing(where_ + ": synchronises for " + text);
      stream.synchronize();
    }
    me_.doing(where_ + ": calls " + text + ", order " + kOrderNames[order]);
    const unjamCallOptions_t options = ordered(order, stream);
    check(call(handles_[c.entry->group], c.entry->key.c_str(), c.spec, c.place, &options,
               &c.request));
    if (order == UNJAM_STREAM_SYNC) {
      start_check(c.spec, c.place, half.reports.on_device(c.index), stream.get());
    }
  }

  // What a program may do at any time, whatever is pending.
  void disturb() {
    me_.doing(where_ + ": synchronises the device, or allocates");
    ++totals_.disturbances;
    if (chance(40)) return check(cudaDeviceSynchronize());
    // cudaFreeHost may wait for all GPUs of the process: for streams of a rank that wait for this
    // one.
    if (alone_ && chance(50)) {
      PinnedMemory(std::size_t{4} << 20);
    } else {
      DeviceMemory(std::size_t{4} << 20);
    }
  }

  void end_batch(Half& half) {
    if (half.calls.empty()) return;
    me_.doing(where_ + ": ends a batch");
    for (const Stream& s : half.streams) s.synchronize();
    half.reports.start_fetch(half.streams[0].get());
    half.streams[0].synchronize();
    for (const Call& c : half.calls) {
      me_.wait(c.request, where_ + ": " + text_of(c));
      const Report& r = half.reports[c.index];
      finish_check(c.spec, r, where_ + " or the one before: " + text_of(c));
      ++totals_.collectives;
      totals_.bytes += c.spec.recv_elems() * type_info(c.spec.dtype).bytes;
      totals_.digest += mix(r.digest, c.spec.seed);
    }
    half.calls.clear();
  }

  std::string text_of(const Call& c) const {
    return "group " + std::to_string(c.entry->group) + ", key " + c.entry->key + ", " +
           c.spec.text();
  }

  const Member& me_;
  const Settings& s_;
  const std::vector<std::vector<int>>& members_;
  const bool alone_;  // in this process
  Half halves_[2];
  std::vector<unjamGroup_t> handles_;
  std::mt19937_64 random_;
  Totals totals_;
  std::string where_;
};

// All ranks of this process; all processes go through the same slices.
void run_job(const Job& job, const Settings& s) {
  const std::vector<std::vector<int>> groups = make_groups(job.ranks(), s.seed);
  const std::uint64_t begin = now_ns();
  std::vector<Totals> totals(job.members().size());
  Barrier barrier(static_cast<int>(totals.size()));
  job.run([&](const Member& me) {
    const bool first = &me == &job.members().front();
    Worker worker(me, s, groups, totals.size() == 1);
    for (int slice = s.first_slice;; ++slice) {
      const std::uint64_t slice_begin = now_ns();
      totals[static_cast<std::size_t>(&me - &job.members().front())] = worker.slice(slice);
      barrier.meet();
      if (first) {
        Totals sum;
        for (const Totals& t : totals) {
          sum.collectives += t.collectives;
          sum.bytes += t.bytes;
          sum.disturbances += t.disturbances;
          sum.digest += t.digest;
        }
        std::printf(
            "slice %4d: rank %d%s: %6llu parts, %7.2f GiB, %4llu disturbances, %6.2f s, "
            "digest %016llx\n",
            slice, me.rank, totals.size() > 1 ? " and on" : "",
            static_cast<unsigned long long>(sum.collectives),
            static_cast<double>(sum.bytes) / (1 << 30),
            static_cast<unsigned long long>(sum.disturbances), us_since(slice_begin) * 1e-6,
            static_cast<unsigned long long>(sum.digest));
      }
      barrier.meet();
      const bool over = slice + 1 >= s.first_slice + s.slices || us_since(begin) > s.seconds * 1e6;
      if (worker.agree(over) != 0) {
        if (first) std::printf("soak: resume with --slice %d\n", slice + 1);
        break;
      }
    }
    me.doing("done");
  });
}

// The streams of ranks that share a GPU and a process share its hardware queues as well. Where two
// ranks' streams are in one queue, kernels of the one may stand behind those of the other, which
// wait for the first: a true cycle. So each stream is to have a queue of its own; more than six
// ranks have too many even with one stream a batch, and can stand still.
int streams_for(int ranks) {  // of this process
  // The library's three (daemon, control, copies) and the default stream, in which agree() copies.
  constexpr int kOthers = 4;
  constexpr int kMost = 6;
  const int sharing = (ranks + device_count() - 1) / device_count();
  if (sharing <= 1) return kMost;
  return std::clamp((queues_taken() / sharing - kOthers) / 2, 1, kMost);
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  Settings s;
  s.seed = options.seed();
  s.seconds = options.number("seconds", 60, "begin no slice after so long");
  s.first_slice = options.integer("slice", 0, "the first slice to run");
  s.slices = options.integer("slices", 1000000, "how many slices at most");
  s.batches = options.integer("batches", 100, "of a slice");
  s.least_bytes = static_cast<std::size_t>(options.number("least", 4, "bytes of the smallest"));
  s.most_bytes = static_cast<std::size_t>(options.number("most", 1 << 26, "bytes of the largest"));
  s.arena_bytes = static_cast<std::size_t>(options.number("arena", 1 << 30, "bytes of a batch"));
  s.disturb = options.integer("disturb", 3, "percent of calls after a synchronisation, …");
  s.delay = options.integer("delay", 10, "percent of calls with a delay");
  s.streams = options.integer("streams", 0, "of each of two batches; 0: 6, or as queues allow");
  s.keys = options.integer("keys", 4, "of a group, for each of two kinds of orders");
  s.registered = options.flag("registered", "buffers are registered, so that peers store there");
  const int ranks = options.integer("ranks", 0, "GPUs to use; 0: all");
  const int per_process = ranks_per_process(options);
  const int rank = options.integer("rank", -1, "be one process of a job, with --ranks and --id");
  const std::string id = options.text("id", "", "of the job, in hexadecimal digits");
  options.done(s.seconds + 240, 60);
  if (s.streams < 0) fail("--streams must not be negative");
  if (s.keys < 1) fail("--keys must be positive");
  if (s.least_bytes < 4 || s.most_bytes < s.least_bytes) fail("4 <= --least <= --most");
  load_eagerly();

  if (rank >= 0) {
    setenv("UNJAM_RANK", std::to_string(rank).c_str(), 1);
    setenv("UNJAM_RANKS", std::to_string(ranks).c_str(), 1);
    setenv("UNJAM_ID", id.c_str(), 1);
  }
  const bool child = std::getenv("UNJAM_RANK") != nullptr;
  if (child && per_process > 0) die_with_parent();
  if (per_process > 0 && !child) {
    std::vector<std::string> arguments(argv + 1, argv + argc);
    Children children(ranks > 0 ? ranks : device_count(), arguments, per_process);
    const bool ok = children.all_well(s.seconds + 230);
    std::printf("soak: %s, %d processes\n", ok ? "PASS" : "FAIL", children.count());
    return ok ? 0 : 1;
  }
  std::unique_ptr<Job> job =
      child ? join_job(per_process) : start_job(ranks > 0 ? ranks : device_count());
  const int here = static_cast<int>(job->members().size());
  if (here > device_count() && s.disturb > 0) {
    // It would wait for streams of another rank, which wait for this one: a true cycle.
    std::printf("soak: ranks of one process share a GPU, so none synchronises it\n");
    s.disturb = 0;
  }
  if (s.streams == 0) s.streams = streams_for(here);
  if (!child || job->member(0).rank == 0) {
    std::printf("soak: %d ranks, %s, seed %llu, %d batches a slice, up to %zu bytes\n",
                job->ranks(), text_of_processes(child ? std::max(1, per_process) : 0).c_str(),
                static_cast<unsigned long long>(s.seed), s.batches, s.most_bytes);
  }
  run_job(*job, s);
  print_stats(*job);
  job.reset();
  std::printf("soak: PASS\n");
  return 0;
}
