// circles: what unjam does not promise to end by itself. Ranks that wait in a circle, on the host
// or in streams, are told who waits for whom (unjamExplain, reports on stderr), and a time limit
// ends their calls; the ranks go on. So are ranks whose streams share one of CUDA's hardware
// queues, in which calls stand in another order on every rank. And more streams than CUDA has
// connections, which all wait for a rank that comes late: that is no circle, and completes, and
// meanwhile no daemon comes in vain, over and over, to take SMs that others could have. Each case
// has processes of its own: all ranks in one, or one each.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/children.h"
#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

// Ranks of even numbers call A first, wait for it, then call B; the others the other way round.
struct Circle {
  const char* name;
  bool streams;  // wait, not threads
  std::uint32_t timeout_ms, report_ms;
};
constexpr Circle kCircles[] = {
    {"host", false, 500, 0},
    {"streams", true, 500, 0},
    {"reported", true, 2000, 300},
};

// All ranks call A in one stream and B in another, ranks of even numbers A first, the others B,
// each with work behind it; and both streams share a hardware queue, which that work blocks.
constexpr const char* kOneQueue = "one-queue";
constexpr std::uint32_t kOneQueueTimeoutMs = 1000;
// When one call has ended, the other one's peers are free to come as soon as this work is over: not
// before it has ended as well, which may be at the runtime's next look around, every 250 ms.
constexpr std::uint64_t kOneQueueBehindNs = 800'000'000;

// Rank 0 has streams that wait for rank 1, which is absent for a while.
struct Crowd {
  const char* name;
  const char* connections;
  int streams;
  bool in_stream;  // every other one waits in a call of its own, from the last on
};
constexpr int kStreams = 40;
constexpr Crowd kCrowds[] = {
    {"crowd-1", "1", kStreams, false},
    {"crowd-8", "8", kStreams, false},
    {"crowd-32", "32", kStreams, false},
    {"crowd-in-stream", "8", kStreams, true},
    {"one-beside", "8", 1, false},
    {"one-in-stream", "8", 1, true},
    {"one-beside-one-in-stream", "8", 2, true},
};
constexpr useconds_t kAbsentUs = 2'000'000;
// Of that, until what was launched because of the calls has come and gone, and how long is counted
// then what else is. A daemon that finds nothing to do stays 5 ms, so of those that follow each
// other there would be some 200. (The launcher looks again after 1 s by itself.)
constexpr useconds_t kSettlesUs = 300'000, kWatchesUs = 1'000'000;
constexpr std::uint64_t kMostLaunches = 40;

// Five times the second for which unjamExplain, time limits and reports may wait for the answers of
// others.
constexpr double kAnswersUs = 5e6;
constexpr std::int64_t kWaitUs = 20'000'000;  // for what is to have ended long before
constexpr double kChildS = 60, kStallS = 25;  // in all, without a step
constexpr double kLastWordsS = 8;             // when another process has failed

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

// ---- who is expected to be named ----

constexpr const char* kKeys[] = {"A", "B", "afterwards"};

// That call key k second, so not before they have waited for the other.
std::vector<int> absent_from(int k, int ranks) {
  std::vector<int> absent;
  for (int r = 0; r < ranks; ++r) {
    if (r % 2 != k) absent.push_back(r);
  }
  return absent;
}
std::string list(const std::vector<int>& ranks, const char* between) {
  std::string text;
  for (const int r : ranks) text += (text.empty() ? "" : between) + std::to_string(r);
  return text;
}
// In errors and reports.
std::string key_words(int k) { return std::string("key '") + kKeys[k] + "'"; }
std::string absent_words(int k, int ranks) {
  const std::vector<int> absent = absent_from(k, ranks);
  return (absent.size() == 1 ? "rank " : "ranks ") + list(absent, ", ") +
         (absent.size() == 1 ? " has" : " have") + " not called it";
}

// Whether unjamExplain's JSON has both keys with those who have not called them.
bool names_circle(const std::string& json, int ranks) {
  std::string text;
  std::remove_copy_if(json.begin(), json.end(), std::back_inserter(text),
                      [](char c) { return c == ' ' || c == '\n'; });
  const std::string field = "\"key\":";
  for (int k = 0; k < 2; ++k) {
    const std::string key = field + '"' + kKeys[k] + '"';
    const std::string absent = "\"not_called_by\":[" + list(absent_from(k, ranks), ",") + "]";
    bool named = false;
    for (auto at = text.find(key); at != text.npos; at = text.find(key, at + 1)) {
      named = named || text.find(absent, at) < text.find(field, at + 1);
    }
    if (!named) return false;
  }
  return true;
}

// ---- the ranks ----

// How far all ranks are, threads or processes: unjam itself may be what stands. The watchdogs bound
// the waits.
class Meeting {
 public:
  enum Stage { kReady, kCalled, kWatched, kEnded, kAgain, kDone, kStages };

  // A descriptor, which children inherit. (Not one that they use for something else.)
  static int create() {
    constexpr int kLeast = 100;
    const int made = memfd_create("circles", 0);
    if (made < 0 || ftruncate(made, sizeof(int) * kStages) != 0) fail("memfd_create");
    const int descriptor = fcntl(made, F_DUPFD, kLeast);
    if (descriptor < 0) fail("F_DUPFD");
    close(made);
    return descriptor;
  }

  Meeting(int descriptor, int ranks) : ranks_(ranks) {
    void* const memory =
        mmap(nullptr, sizeof(int) * kStages, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) fail("mmap of what the ranks share");
    arrived_ = static_cast<int*>(memory);
  }

  void arrive(Stage s) const { ++std::atomic_ref(arrived_[s]); }
  int arrived(Stage s) const { return std::atomic_ref(arrived_[s]).load(); }
  void await(Stage s) const {
    while (arrived(s) < ranks_) usleep(100);
  }
  void meet(Stage s) const {
    arrive(s);
    await(s);
  }

 private:
  const int ranks_;
  int* arrived_;  // of each stage
};

struct Child {
  int ranks;
  std::uint64_t seed;
  const Meeting& meeting;
  std::string title;

  std::string where(const Member& me) const { return title + ", rank " + std::to_string(me.rank); }
  // Exchanges of so many elements, of which the k-th has the same seed on all ranks.
  std::vector<Spec> specs(const Member& me, const std::vector<std::size_t>& counts) const {
    std::vector<Spec> specs(counts.size());
    for (std::size_t i = 0; i < counts.size(); ++i) {
      specs[i].count = counts[i];
      specs[i].size = me.ranks;
      specs[i].at = me.rank;
      specs[i].seed = mix(seed, i);
    }
    return specs;
  }
};

// The request has ended by the time limit, with an error that says so.
void expect_timeout(const std::string& where, unjamRequest_t request, int k,
                    const std::vector<std::string>& said) {
  const unjamResult_t code = unjamWait(request, kWaitUs);
  int done = 0;
  unjamTest(request, &done);
  const std::string text = unjamRequestError(request);
  if (code != UNJAM_ERROR_TIMEOUT || done == 0) {
    fail(where + ": " + key_words(k) + " should end with the time limit: " +
         (done == 0 ? "it is pending" : unjamGetErrorString(code) + (": " + text)));
  }
  for (const std::string& part : said) {
    if (!contains(text, part)) fail(where + ": no \"" + part + "\" in the error: " + text);
  }
  check(unjamRequestFree(request));
}

// And who has not called it.
void expect_timeout(const Child& child, const std::string& where, unjamRequest_t request, int k) {
  expect_timeout(where, request, k,
                 {key_words(k), absent_words(k, child.ranks), "UNJAM_TIMEOUT_MS"});
}

void run_circle(const Child& child, const Circle& c, const Member& me) {
  const std::string where = child.where(me);
  const Stream stream;
  constexpr std::size_t kCount = 1 << 18;
  const Exchanges calls(child.specs(me, {kCount, kCount, kCount}), stream);
  stream.synchronize();
  const unjamCallOptions_t options =
      ordered(c.streams ? UNJAM_STREAM_ASYNC : UNJAM_STREAM_NONE, stream);
  // Calls under kKeys[k] and waits as the case says, but for the host's wait.
  const auto begin_call = [&](int k) {
    const auto i = static_cast<std::size_t>(k);
    unjamRequest_t request = nullptr;
    me.doing(where + ": calls " + key_words(k));
    check(call(me.all, kKeys[k], calls.spec(i), calls.place(i), &options, &request));
    if (!c.streams) return request;
    check(unjamStreamWait(request, stream.get()));
    spin_kernel<><<<1, 1, 0, stream.get()>>>(1000);  // work behind
    check(cudaGetLastError());
    return request;
  };
  const auto until_stream = [&](int k) {
    if (!c.streams) return;
    me.doing(where + ": synchronises the stream, which waits for " + key_words(k));
    stream.synchronize();
  };

  me.doing(where + ": waits until all are ready");
  child.meeting.meet(Meeting::kReady);
  const int first = me.rank % 2, second = 1 - first;
  const std::uint64_t begin = now_ns();
  unjamRequest_t request = begin_call(first);
  say("called");
  child.meeting.arrive(Meeting::kCalled);
  until_stream(first);
  const double stream_us = us_since(begin);
  me.doing(where + ": waits for " + key_words(first));
  expect_timeout(child, where, request, first);
  const double us = us_since(begin);
  if (us > c.timeout_ms * 1e3 + kAnswersUs) {
    fail(where + ": " + key_words(first) + " ended late: after " + std::to_string(us * 1e-3) +
         " ms, of a limit of " + std::to_string(c.timeout_ms));
  }

  // Not before the others' first calls have failed, too: with this one they might complete.
  me.doing(where + ": waits until all first calls have ended");
  child.meeting.meet(Meeting::kEnded);
  request = begin_call(second);
  until_stream(second);
  expect_timeout(child, where, request, second);

  // Other keys go on, and so do the stream and the GPU.
  me.doing(where + ": waits until all second calls have ended");
  child.meeting.meet(Meeting::kAgain);
  request = begin_call(2);
  until_stream(2);
  me.wait(request, where + ", " + key_words(2));
  calls.look_at(2, 1, where);
  std::printf("  %s: the %s waited for %.0f ms, the error came after %.0f ms\n", where.c_str(),
              c.streams ? "stream" : "thread", (c.streams ? stream_us : us) * 1e-3, us * 1e-3);
  // A rank that has left may not be missed.
  me.doing(where + ": waits until all are done");
  child.meeting.meet(Meeting::kDone);
}

void run_one_queue(const Child& child, const Member& me) {
  const std::string where = child.where(me);
  const Stream streams[2];
  constexpr std::size_t kCount = 1 << 18;
  // Of A and B the first use, which nothing stands in front of, and the one in the queue; then two
  // uses of another key, for a key whose call has failed is out of use.
  const Exchanges calls(child.specs(me, std::vector<std::size_t>(6, kCount)), streams[0]);
  streams[0].synchronize();
  const auto begin_call = [&](std::size_t i, int k, const unjamCallOptions_t* options) {
    unjamRequest_t request = nullptr;
    me.doing(where + ": call " + std::to_string(i) + ", " + key_words(k));
    check(call(me.all, kKeys[k], calls.spec(i), calls.place(i), options, &request));
    return request;
  };
  me.doing(where + ": waits until all are there");
  child.meeting.meet(Meeting::kReady);
  for (int k = 0; k < 2; ++k) {
    me.wait(begin_call(static_cast<std::size_t>(k), k, nullptr), where + ", beside streams");
  }
  me.doing(where + ": waits until all have made the first calls");
  child.meeting.meet(Meeting::kCalled);
  unjamRequest_t requests[2];
  for (const int k : {me.rank % 2, 1 - me.rank % 2}) {
    const unjamCallOptions_t options = ordered(UNJAM_STREAM_SYNC, streams[k]);
    requests[k] = begin_call(static_cast<std::size_t>(2 + k), k, &options);
    spin_kernel<><<<1, 1, 0, streams[k].get()>>>(kOneQueueBehindNs);
    check(cudaGetLastError());
  }
  const std::uint64_t begin = now_ns();
  for (int k = 0; k < 2; ++k) {
    me.doing(where + ": waits for " + key_words(k));
    expect_timeout(
        where, requests[k], k,
        {key_words(k), "nobody is missing", "CUDA_DEVICE_MAX_CONNECTIONS", "UNJAM_TIMEOUT_MS"});
    streams[k].synchronize();
  }
  const double us = us_since(begin);
  if (us > kOneQueueTimeoutMs * 1e3 + kAnswersUs) {
    fail(where + ": ended late, after " + std::to_string(us * 1e-3) + " ms");
  }
  me.doing(where + ": waits until all have ended");
  child.meeting.meet(Meeting::kEnded);
  for (int k = 0; k < 2; ++k) {
    const auto i = static_cast<std::size_t>(4 + k);
    const unjamCallOptions_t options = ordered(UNJAM_STREAM_SYNC, streams[k]);
    me.wait(begin_call(i, 2, &options), where + ", in a stream that has stood still");
    streams[k].synchronize();
  }
  calls.look_at(4, 2, where);
  std::printf("  %s: both calls had ended after %.0f ms\n", where.c_str(), us * 1e-3);
  me.doing(where + ": waits until all are done");
  child.meeting.meet(Meeting::kDone);
}

// Beside the ranks that wait.
void explain_circle(const Child& child, const Member& me) {
  const std::string where = child.where(me) + ", beside it";
  Watchdog::instance().doing(-1, where + ": waits until all have called");
  child.meeting.await(Meeting::kCalled);
  Watchdog::instance().doing(-1, where + ": unjamExplain");
  for (bool in_time = false;; in_time = true) {
    const std::uint64_t begin = now_ns();
    const std::string text = explain(me.context);
    const double us = us_since(begin);
    if (us > kAnswersUs) {
      fail(where + ": unjamExplain took " + std::to_string(us * 1e-3) + " ms");
    }
    if (names_circle(text, child.ranks)) {
      std::printf("  %s: explained in %.1f ms\n", where.c_str(), us * 1e-3);
      return;
    }
    // What is asked when calls have ended already need not name them (a slow machine): ranks have
    // noticed by then.
    usleep(50'000);
    if (child.meeting.arrived(Meeting::kEnded) == 0) continue;
    if (in_time) fail(where + ": unjamExplain does not name both keys and who is absent: " + text);
    std::printf("  %s: ended before it was explained\n", where.c_str());
    return;
  }
}

void run_crowd(const Child& child, const Crowd& c, const Member& me) {
  const std::string where = child.where(me);
  const Stream stream;
  std::vector<std::size_t> counts;  // 4 KiB to 8 MiB
  for (int i = 0; i < c.streams; ++i) counts.push_back(std::size_t{1024} << i % 12);
  const Exchanges calls(child.specs(me, counts), stream);
  const Reports reports(calls.size());
  std::vector<Stream> streams;
  if (me.rank == 0) {
    for (int i = 0; i < c.streams; ++i) streams.emplace_back();
  }
  stream.synchronize();
  std::vector<unjamRequest_t> requests(calls.size(), nullptr);
  const auto make = [&](std::size_t i, const unjamCallOptions_t* options) {
    check(call(me.all, key_of(static_cast<int>(i)).c_str(), calls.spec(i), calls.place(i), options,
               &requests[i]));
  };
  me.doing(where + ": waits until all are ready");
  child.meeting.meet(Meeting::kReady);
  if (me.rank == 0) {
    const std::uint64_t begin = now_ns();
    for (std::size_t i = 0; i < calls.size(); ++i) {
      me.doing(where + ": call " + std::to_string(i));
      const bool in_stream = c.in_stream && (calls.size() - i) % 2 == 1;
      const unjamCallOptions_t options =
          ordered(in_stream ? UNJAM_STREAM_SYNC : UNJAM_STREAM_ASYNC, streams[i]);
      make(i, &options);
      if (!in_stream) check(unjamStreamWait(requests[i], streams[i].get()));
      // Behind the wait: what the stream sees of the results.
      start_check(calls.spec(i), calls.place(i), reports.on_device(i), streams[i].get());
    }
    child.meeting.arrive(Meeting::kCalled);
    const double queued_us = us_since(begin);
    me.doing(where + ": watches what is launched");
    usleep(kSettlesUs);
    const std::uint64_t before = figure(me.context, "launches");  // of daemons
    usleep(kWatchesUs);
    const std::uint64_t launches = figure(me.context, "launches") - before;
    child.meeting.arrive(Meeting::kWatched);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      me.doing(where + ": synchronises stream " + std::to_string(i));
      streams[i].synchronize();
    }
    const double us = us_since(begin);
    reports.start_fetch(stream.get());
    stream.synchronize();
    for (std::size_t i = 0; i < calls.size(); ++i) {
      finish_check(calls.spec(i), reports[i], where + ", stream " + std::to_string(i));
    }
    std::printf(
        "  %s: queued in %.1f ms, all streams ended %.1f ms after rank 1 came; it waited, launched "
        "before that %llu daemons, and in a second %llu\n",
        where.c_str(), queued_us * 1e-3, (us - queued_us - kAbsentUs) * 1e-3,
        static_cast<unsigned long long>(before), static_cast<unsigned long long>(launches));
    if (launches > kMostLaunches) {
      fail(where + ": " + std::to_string(launches) + " daemons were launched for peers to come");
    }
  } else {
    me.doing(where + ": is absent");
    while (child.meeting.arrived(Meeting::kCalled) == 0) usleep(100);
    usleep(kAbsentUs);
    while (child.meeting.arrived(Meeting::kWatched) == 0) usleep(100);
    std::vector<std::size_t> order(calls.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::mt19937_64 random(child.seed);
    std::shuffle(order.begin(), order.end(), random);
    me.doing(where + ": comes");
    for (const std::size_t i : order) make(i, nullptr);
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    me.doing(where + ": waits for call " + std::to_string(i));
    me.wait(requests[i], where + ", call " + std::to_string(i));
  }
  if (me.rank != 0) calls.look_at(0, calls.size(), where);
  // What frees memory may wait for the other one's streams.
  me.doing(where + ": waits until all are done");
  child.meeting.meet(Meeting::kDone);
}

std::unique_ptr<Job> join(const unjamConfig_t& config, bool together, int ranks) {
  return together ? std::make_unique<Job>(ranks, config) : std::make_unique<Job>(config);
}

void run_child(const Child& child, const std::string& name, bool together) {
  for (const Circle& c : kCircles) {
    if (c.name != name) continue;
    // The parent reads what is reported.
    if (c.report_ms != 0 && dup2(3, STDERR_FILENO) < 0) fail("dup2");
    unjamConfig_t config = cuda_config();
    config.timeout_ms = c.timeout_ms;
    config.report_ms = c.report_ms;
    const std::unique_ptr<Job> job = join(config, together, child.ranks);
    std::thread explainer([&] { explain_circle(child, job->member(0)); });
    job->run([&](const Member& me) { run_circle(child, c, me); });
    explainer.join();
    return;
  }
  if (name == kOneQueue) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    unjamConfig_t config = cuda_config();
    config.timeout_ms = kOneQueueTimeoutMs;
    const std::unique_ptr<Job> job = join(config, together, child.ranks);
    job->run([&](const Member& me) { run_one_queue(child, me); });
    return;
  }
  for (const Crowd& c : kCrowds) {
    if (c.name != name) continue;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", c.connections, 1);
    const std::unique_ptr<Job> job = join(cuda_config(), together, child.ranks);
    job->run([&](const Member& me) { run_crowd(child, c, me); });
    return;
  }
  fail("no such case: " + name);
}

// ---- the parent ----

// Lines of all children that f(line) is true of.
template <class F>
int count_lines(const Children& children, const F& f) {
  int n = 0;
  for (int i = 0; i < children.count(); ++i) {
    for (const std::string& line : children.said(i)) n += f(line) ? 1 : 0;
  }
  return n;
}

bool any_ended(const Children& children) {
  for (int i = 0; i < children.count(); ++i) {
    if (children.ended(i)) return true;
  }
  return false;
}
bool all_ended(const Children& children) {
  for (int i = 0; i < children.count(); ++i) {
    if (!children.ended(i)) return false;
  }
  return true;
}

// All calls of a circle are reported on stderr in time.
bool reported(Children& children, const Circle& c, int ranks) {
  const auto called = [&] {
    return count_lines(children, [](const std::string& line) { return line == "called"; });
  };
  children.until(kChildS, [&] { return called() == ranks || any_ended(children); });
  const std::uint64_t begin = now_ns();
  const auto told = [&](int k) {
    const int lines = count_lines(children, [&](const std::string& line) {
      return line.rfind("unjam: ", 0) == 0 && contains(line, "pending for ") &&
             contains(line, ", " + key_words(k)) && contains(line, absent_words(k, ranks));
    });
    return lines != 0;
  };
  // (Where the time limit ends a call, it is reported at the latest.)
  children.until((c.report_ms * 1e3 + kAnswersUs) * 1e-6,
                 [&] { return (told(0) && told(1)) || any_ended(children); });
  const bool ok = told(0) && told(1);
  std::printf("  %s %.0f ms after the calls\n", ok ? "reported" : "NOT REPORTED",
              us_since(begin) * 1e-3);
  return ok;
}

enum class Outcome { kPassed, kFailed, kHung };

Outcome run_case(const std::string& name, const Circle* circle, bool together, int ranks,
                 std::uint64_t seed) {
  const std::string title =
      name + (together ? ", one process" : ", processes") + ", seed " + std::to_string(seed);
  std::printf("%s\n", title.c_str());
  Watchdog::instance().doing(-1, title);
  const int meeting = Meeting::create();
  std::vector<std::string> arguments = {
      "--case",  name,  "--ranks",   std::to_string(ranks),  "--seed", std::to_string(seed),
      "--title", title, "--meeting", std::to_string(meeting)};
  if (together) arguments.emplace_back("--together");
  Outcome outcome = Outcome::kPassed;
  {
    Children children(together ? 1 : ranks, arguments);
    const bool told =
        circle == nullptr || circle->report_ms == 0 || reported(children, *circle, ranks);
    const bool well = children.all_well(kChildS);
    // The others may be about to say what they know.
    if (!well) children.until(kLastWordsS, [&] { return all_ended(children); });
    bool failed = false;
    for (int i = 0; i < children.count() && (!told || !well); ++i) {
      const bool ended = children.ended(i);
      const int status = ended ? children.status(i) : 0;
      std::printf("  process %d %s %d; it has said:\n", i,
                  !ended                ? "runs still,"
                  : WIFSIGNALED(status) ? "was ended by signal"
                                        : "ended with",
                  WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
      for (const std::string& line : children.said(i)) std::printf("    %s\n", line.c_str());
      const bool hung = ended && WIFEXITED(status) && WEXITSTATUS(status) == kExitHung;
      failed = failed || (ended && status != 0 && !hung);
    }
    // (Where one has failed, those that hang are its victims.)
    if (!well && !failed) {
      outcome = Outcome::kHung;
    } else if (!told || !well) {
      outcome = Outcome::kFailed;
    }
  }
  close(meeting);
  std::printf("%s: %s\n", title.c_str(),
              outcome == Outcome::kPassed ? "ok"
              : outcome == Outcome::kHung ? "HUNG"
                                          : "FAILED");
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const std::uint64_t seed = options.seed();
  const int wanted = options.integer("ranks", 0, "of the circles; 0: as many as GPUs, 4 at most");
  const std::string only = options.text("only", "", "only cases with this in their names");
  const std::string name = options.text("case", "", "child: the case");
  const std::string title = options.text("title", "", "child: the case in words");
  const int descriptor = options.integer("meeting", -1, "child: of the memory that ranks share");
  const bool together = options.flag("together", "child: all ranks are here");
  const bool child = !name.empty();
  options.done(child ? kChildS - 5 : 540, child ? kStallS : 90);
  load_eagerly();
  if (child) {
    die_with_parent();
    const Meeting meeting(descriptor, wanted);
    run_child({wanted, seed, meeting, title}, name, together);
    return 0;
  }

  // (Ranks that share a GPU share its queues, and stand behind each other's streams.)
  const int devices = device_count();
  const int ranks = wanted > 0 ? wanted : std::min(4, devices);
  if (ranks < 2 || ranks > devices) fail("needs two ranks, and a GPU for each");
  std::printf("circles: %d ranks, seed %llu\n", ranks, static_cast<unsigned long long>(seed));
  int passed = 0, failed = 0, hung = 0;
  const auto run = [&](const char* which, const Circle* circle, bool all_here) {
    if (!contains(which, only)) return;
    const Outcome o = run_case(which, circle, all_here, circle == nullptr ? 2 : ranks, seed);
    ++(o == Outcome::kPassed ? passed : o == Outcome::kHung ? hung : failed);
  };
  for (const Circle& c : kCircles) {
    for (const bool all_here : {true, false}) run(c.name, &c, all_here);
  }
  for (const bool all_here : {true, false}) run(kOneQueue, nullptr, all_here);
  for (const Crowd& c : kCrowds) run(c.name, nullptr, true);
  if (passed + failed + hung == 0) fail("--only: no such case");
  std::printf("circles: %d passed, %d failed, %d hung\n", passed, failed, hung);
  std::printf("circles: %s\n", failed + hung == 0 ? "PASS" : "FAIL");
  return hung != 0 ? kExitHung : failed != 0 ? kExitFailed : 0;
}
