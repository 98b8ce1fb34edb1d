// Random and mutated messages against a live rendezvous and against the control connection of a
// running job: no crash, no hang, nobody joins who should not, nothing is left open, and the job of
// the honest ranks starts and computes what it should. And the inputs that the coverage-guided
// fuzzers (tools/fuzz.py) have found to matter.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "base/clock.h"
#include "base/hash.h"
#include "runtime/context.h"
#include "runtime/settings.h"
#include "tests/support/control.h"
#include "tests/support/control_targets.h"
#include "tests/support/job.h"
#include "transport/ledger.h"

// As in api/unjam.cc: two worlds of one job in one process are two processes to each other.
struct unjamContext {
  std::shared_ptr<unjam::Context> impl;
};

namespace unjam_test {
namespace {

using unjam::JoinMessage;
using unjam::RendezvousClient;

// ---- mutations ----

using Random = std::mt19937_64;

// Numbers that lie where limits are.
std::uint64_t odd_number(Random& random) {
  const std::uint64_t some[] = {0,    1,          2,          63,         64,         65,
                                0xff, 0x100,      0xffff,     0x10000,    0x7fffffff, 0x80000000,
                                ~0u,  1ull << 32, 1ull << 63, ~0ull >> 1, ~0ull,      random()};
  return some[random() % std::size(some)];
}

void mutate(std::string& bytes, Random& random) {
  for (std::uint64_t times = 1 + random() % 4; times-- > 0;) {
    const std::size_t at = bytes.empty() ? 0 : random() % bytes.size();
    switch (random() % 7) {
      case 0:  // a bit
        if (!bytes.empty()) bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8);
        break;
      case 1:  // cut
        bytes.resize(at);
        break;
      case 2: {  // a number, a length perhaps
        const std::uint64_t v = odd_number(random);
        const std::size_t width = std::size_t{1} << random() % 4;
        if (at + width <= bytes.size()) std::memcpy(bytes.data() + at, &v, width);
        break;
      }
      case 3:  // more at the end
        for (std::uint64_t n = random() % 64; n-- > 0;) bytes += static_cast<char>(random());
        break;
      case 4:  // something twice
        bytes.insert(at, bytes.substr(at, random() % 64));
        break;
      case 5:  // something missing
        bytes.erase(at, random() % 16);
        break;
      default:  // a byte
        if (!bytes.empty()) bytes[at] = static_cast<char>(random());
        break;
    }
  }
}

// ---- sending it ----

struct Sent {
  std::string bytes;
  std::vector<int> fds;
};

// One message in any state of disrepair.
Sent bad_message(const std::vector<SampleMessage>& samples, const Fd& file, Random& random) {
  const SampleMessage& sample = samples[random() % samples.size()];
  std::string payload = sample.bytes;
  auto type = number_of(sample.type);
  const std::uint64_t kind = random() % 16;
  if (kind >= 2) mutate(payload, random);  // some stay whole
  if (kind == 3) {                         // random bytes
    payload.resize(random() % 300);
    for (char& c : payload) c = static_cast<char>(random());
  }
  if (kind == 4) type = static_cast<std::uint16_t>(odd_number(random));
  if (kind == 5) type = number_of(samples[random() % samples.size()].type);
  Sent s;
  const std::uint64_t how = random() % 32;
  const std::size_t fds = how < 4 ? how : how == 4 ? 20 : 0;
  // The number of descriptors is true mostly, so is the length.
  const auto said = static_cast<std::uint8_t>(random() % 16 == 0 ? random() : fds);
  const auto size =
      static_cast<std::uint32_t>(random() % 64 == 0 ? odd_number(random) : payload.size());
  s.bytes = frame_bytes(type, payload, size, said, random() % 256 == 0 ? 1 : 0);
  s.fds.assign(fds, file.get());
  return s;
}

double resident_mb() {
  std::ifstream file("/proc/self/statm");
  long pages = 0, resident = 0;
  file >> pages >> resident;
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e6;
}

// Descriptors close in other threads, a moment later.
void expect_no_leak(int before) {
  EXPECT_TRUE(eventually([&] { return open_descriptors() <= before; }))
      << open_descriptors() << " descriptors are open, " << before << " were";
}

std::string seed_text(std::uint64_t seed) {
  return "seed " + std::to_string(seed) + " (UNJAM_TEST_SEED=" + std::to_string(base_seed()) + ")";
}

// ---- against a rendezvous ----

// Of a rank: one on the host, or one on a device as well.
std::vector<Fd> memories(std::size_t count, std::size_t bytes = 4096) {
  std::vector<Fd> all;
  while (all.size() < count) all.push_back(memory_fd(bytes));
  return all;
}

// A rank that is one of the job.
struct Honest {
  RendezvousClient client;
  std::string error;
  bool connected = false;
  void join(std::uint32_t rank, std::uint32_t ranks) {
    JoinMessage m;
    m.rank = rank;
    m.ranks = ranks;
    m.arena_bytes = 4096;
    m.settings = "lanes=2";
    client.join(m, memories(rank % 2 + 1));
    client.flush();
  }
  // Waits for the start; `lost`: one of the honest ranks has failed, nobody need wait longer.
  bool start(std::atomic<bool>& lost) {
    const std::uint64_t end =
        unjam::monotonic_ns() + static_cast<std::uint64_t>(kPatienceUs) * 1000;
    bool live = true;
    while (live && !client.started && client.failed.empty() && !lost &&
           unjam::monotonic_ns() < end) {
      client.flush();
      pollfd p{client.fd(), POLLIN, 0};
      poll(&p, 1, 100);
      live = client.receive(error);
    }
    if (!client.started) lost = true;
    return client.started;
  }
};

// Whether a frame asks for the place that an honest rank is to have, or ends the job (gives it up,
// or says that it has another number of ranks): what a process that knows the secret may do.
bool speaks_for_the_job(std::string_view frame) {
  std::uint32_t size = 0;
  std::uint16_t type = 0;
  std::memcpy(&size, frame.data(), sizeof(size));
  std::memcpy(&type, frame.data() + 4, sizeof(type));
  if (type == number_of(MessageType::kFailed)) return true;
  JoinMessage m;
  for (const std::string_view payload : {frame.substr(8), frame.substr(8).substr(0, size)}) {
    if (m.decode(payload) && (m.ranks != 2 || m.rank != 0)) return true;
  }
  return false;
}

// One job of two honest ranks; between their joins, `messages` bad ones over many connections, of
// which some have proven that they know the secret. Whoever does, and then joins by the rules, is a
// rank of the job: such messages are not sent.
std::size_t rendezvous_round(std::uint64_t seed, std::size_t messages) {
  Random random(seed);
  const JobSecret secret = secret_from(random()), wrong = secret_from(random());
  const std::vector<SampleMessage> samples = sample_messages(1, 2);
  const Fd file = memory_fd();
  Honest a, b;
  if (!a.client.connect(secret, kPatienceUs / 1000, a.error)) {
    ADD_FAILURE() << a.error;
    return 0;
  }
  a.join(0, 2);
  std::vector<Channel> connections;
  std::set<int> proven;  // by descriptor
  std::size_t sent = 0, wrong_secrets = 0;
  Frame answer;
  std::string error;
  while (sent < messages) {
    const std::uint64_t what = random() % 64;
    if (connections.size() < 4 || what < 6) {
      Channel c;
      if (what % 8 == 0) {
        c = prove_by_hand(secret, wrong, answer);
        ++wrong_secrets, ++sent;
        EXPECT_TRUE(!c.open() || answer.type == number_of(MessageType::kRefused));
      } else if (what % 2 == 0) {
        c = prove_by_hand(secret, secret, answer);
        if (c.open() && answer.type == number_of(MessageType::kProof)) proven.insert(c.fd());
      } else {
        c = Channel(knock(secret), unjam::kLongestFrame);
      }
      if (c.open()) connections.push_back(std::move(c));
      continue;
    }
    const std::size_t at = random() % connections.size();
    Channel& c = connections[at];
    const bool known = proven.count(c.fd()) != 0;
    bool gone = what < 8;
    if (!gone) {
      // Several in one piece, now and then.
      for (std::uint64_t times = random() % 8 == 0 ? 20 : 1; times-- > 0 && !gone;) {
        const Sent m = bad_message(samples, file, random);
        // A join as the rank that is taken is refused; any other would be a member, or end the job.
        if (known && speaks_for_the_job(m.bytes)) continue;
        gone = !send_raw(c.fd(), m.bytes, m.fds) && errno != EAGAIN;
        ++sent;
      }
      if (random() % 4 == 0 && !gone) {
        gone = !c.receive(error);
        while (c.pop(answer)) {
          std::string again;
          EXPECT_TRUE(decode_any(static_cast<MessageType>(answer.type), answer.payload, again));
          EXPECT_LT(answer.type, number_of(MessageType::kStart)) << "told of the job's start";
        }
      }
    }
    if (gone || connections.size() > 60) {
      proven.erase(c.fd());
      connections.erase(connections.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
  EXPECT_GT(wrong_secrets, 0u);
  if (!b.client.connect(secret, kPatienceUs / 1000, b.error)) {
    ADD_FAILURE() << b.error;
    return sent;
  }
  b.join(1, 2);
  std::atomic<bool> lost{false};
  std::thread other([&] { b.start(lost); });
  const bool started = a.start(lost);
  other.join();
  EXPECT_TRUE(started) << a.error << a.client.failed;
  EXPECT_TRUE(b.client.started) << b.error << b.client.failed;
  EXPECT_EQ(a.client.start.pids.size(), 2u) << "somebody joined who is none of ours";
  EXPECT_EQ(a.client.peers.size(), 1u);
  a.client.leave();
  b.client.leave();
  return sent;
}

void fuzz_the_rendezvous(std::size_t messages) {
  const int before = open_descriptors();
  const double memory = resident_mb();
  std::size_t sent = 0;
  const std::uint64_t start = unjam::monotonic_ns();
  for (std::uint64_t round = 0; sent < messages && !testing::Test::HasFailure(); ++round) {
    const std::uint64_t seed = mix(base_seed(), round);
    SCOPED_TRACE(seed_text(seed) + ", round " + std::to_string(round));
    sent += rendezvous_round(seed, std::min<std::size_t>(2500, messages - sent));
  }
  expect_no_leak(before);
  std::printf("rendezvous: %zu messages, %.1f s, resident %.0f -> %.0f MB, %d descriptors left\n",
              sent, static_cast<double>(unjam::monotonic_ns() - start) / 1e9, memory, resident_mb(),
              open_descriptors() - before);
  if (!kSanitized) {
    EXPECT_LT(resident_mb(), memory + 200);
  }
}

TEST(ControlFuzz, Rendezvous) { fuzz_the_rendezvous(kSanitized ? 4000 : 10000); }
TEST(ControlFuzzSoak, Rendezvous) { fuzz_the_rendezvous(100000); }

// ---- against a running job ----

// Ranks 0 and 1 in worlds of their own, as in processes of their own; rank 2 is the test itself,
// with the end of a control connection to each.
class RunningJob {
 public:
  explicit RunningJob(std::uint64_t seed) {
    std::string error;
    EXPECT_TRUE(unjam::resolve_settings(nullptr, 3, settings_, error)) << error;
    settings_.stall_ms = 20;  // so that the ranks ask each other, and this one, questions
    settings_.report_ms = 0;
    unjam::resolve_spins(settings_, 3 * settings_.lanes);
    secret_ = secret_from(seed);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([this, r] {
        auto world = std::make_shared<unjam::World>(3, settings_, secret_);
        std::string why;
        if (world->join(r, settings_, why) != UNJAM_SUCCESS ||
            world->wait_joined(r, kPatienceUs / 1000, why) != UNJAM_SUCCESS) {
          errors_[r] = why;
          return;
        }
        contexts_[r] = new unjamContext{std::make_shared<unjam::Context>(world, r, settings_)};
        contexts_[r]->impl->start();
      });
    }
    // Its arena is what theirs are.
    const unjam::ArenaShape shape = unjam::arena_shape(settings_, 3);
    if (client_.connect(secret_, kPatienceUs / 1000, error)) {
      JoinMessage m;
      m.rank = 2, m.ranks = 3;
      m.arena_bytes = shape.total_bytes();
      m.settings = unjam::agreed_settings_text(settings_);
      client_.join(m, memories(1, unjam::bytes_with_ledger(shape.total_bytes())));
      bool live = true;
      while (live && !client_.started && client_.failed.empty()) {
        client_.flush();
        pollfd p{client_.fd(), POLLIN, 0};
        poll(&p, 1, 100);
        live = client_.receive(error);
      }
    }
    for (auto& t : threads) t.join();
    ok_ = client_.started && contexts_[0] != nullptr && contexts_[1] != nullptr;
    EXPECT_TRUE(ok_) << error << client_.failed << errors_[0] << errors_[1];
    if (!ok_) return;
    for (int r = 0; r < 2; ++r) {
      const int process = static_cast<int>(client_.start.process_of[static_cast<std::size_t>(r)]);
      ends_[r] = Channel(std::move(client_.peers[process].socket), unjam::kLongestFrame);
      const int members[] = {0, 1};
      UNJAM_CHECK(unjamGroupCreate(contexts_[r], members, 2, "honest", &groups_[r]));
      UNJAM_CHECK(unjamGroupCreate(contexts_[r], nullptr, 0, "all", &all_[r]));
    }
    client_.leave();
  }
  ~RunningJob() {
    for (auto* c : contexts_) {
      if (c == nullptr) continue;
      unjamAbort(c);
      EXPECT_EQ(unjamDestroy(c), UNJAM_SUCCESS) << unjamGetLastError();
    }
  }

  bool ok() const { return ok_; }
  Channel& end(int r) { return ends_[r]; }
  unjamContext_t context(int r) { return contexts_[r]; }
  unjamGroup_t honest(int r) { return groups_[r]; }
  unjamGroup_t all(int r) { return all_[r]; }

  // An all-reduce that rank 2 is to take part in and never calls: questions are asked.
  void call_in_vain() {
    for (int r = 0; r < 2; ++r) {
      UNJAM_CHECK(unjamAllReduce(all_[r], "vain", vain_in_, vain_[r], 16, UNJAM_INT32, UNJAM_SUM,
                                 nullptr, &vain_requests_[r]));
    }
  }
  void free_vain() {
    for (int r = 0; r < 2; ++r) {
      EXPECT_NE(unjamWait(vain_requests_[r], kPatienceUs), UNJAM_SUCCESS);
      unjamRequestFree(vain_requests_[r]);
    }
  }
  // Right results, or a failure.
  void compute(int round, const char* key = "sum") {
    constexpr std::size_t kCount = 5000;
    std::vector<std::int32_t> in[2], out[2];
    unjamRequest_t requests[2];
    for (int r = 0; r < 2; ++r) {
      for (std::size_t i = 0; i < kCount; ++i) {
        in[r].push_back(static_cast<std::int32_t>(i) * (r + 1) + round);
      }
      out[r].resize(kCount);
      UNJAM_CHECK(unjamAllReduce(groups_[r], key, in[r].data(), out[r].data(), kCount, UNJAM_INT32,
                                 UNJAM_SUM, nullptr, &requests[r]));
    }
    for (int r = 0; r < 2; ++r)
      wait_ok(contexts_[r], requests[r], "round " + std::to_string(round));
    for (int r = 0; r < 2; ++r) {
      for (std::size_t i = 0; i < kCount; ++i) {
        if (out[r][i] != static_cast<std::int32_t>(3 * i) + 2 * round) fail("a wrong number");
      }
    }
  }

 private:
  unjam::Settings settings_;
  JobSecret secret_{};
  RendezvousClient client_;
  Channel ends_[2];
  unjamContext_t contexts_[2] = {};
  std::string errors_[2];
  unjamGroup_t groups_[2] = {}, all_[2] = {};
  std::int32_t vain_in_[16] = {}, vain_[2][16] = {};
  unjamRequest_t vain_requests_[2] = {};
  bool ok_ = false;
};

// Bad messages to both ranks until their connections have broken; then all must go on as if rank 2
// had died. `break_it`: descriptors and wrong headers, which end a connection, may be among them.
std::size_t job_round(std::uint64_t seed, std::size_t messages, bool break_it) {
  Random random(seed);
  RunningJob job(seed);
  if (!job.ok()) return messages;
  const std::vector<SampleMessage> samples = sample_messages(2, 3);
  const Fd file = memory_fd();
  job.compute(0);
  job.call_in_vain();
  std::size_t sent = 0;
  std::size_t heard = 0;
  bool open[2] = {true, true};
  std::string error;
  Frame frame;
  std::vector<std::string> replies;  // what the ranks say, to be said back to them
  const std::uint64_t end = unjam::monotonic_ns() + static_cast<std::uint64_t>(kPatienceUs) * 1000;
  while (sent < messages && (open[0] || open[1]) && unjam::monotonic_ns() < end) {
    const int r = static_cast<int>(random() % 2);
    Channel& c = job.end(r);
    if (!open[r]) continue;
    std::string bytes;
    std::vector<int> fds;
    if (!replies.empty() && random() % 4 == 0) {
      std::string payload = replies[random() % replies.size()];
      mutate(payload, random);
      const auto type = random() % 4 == 0 ? MessageType::kSnapshot : MessageType::kAnswer;
      bytes = frame_bytes(number_of(type), payload);
    } else {
      Sent m = bad_message(samples, file, random);
      // Mostly the frame is right, and what is in it is not.
      if (!break_it || random() % 256 != 0) {
        const std::uint16_t type = static_cast<std::uint16_t>(
            static_cast<unsigned char>(m.bytes[4]) | static_cast<unsigned char>(m.bytes[5]) << 8);
        m.bytes = frame_bytes(type, m.bytes.substr(8));
        m.fds.clear();
      }
      bytes = m.bytes;
      fds = m.fds;
    }
    if (send_raw(c.fd(), bytes, fds)) {
      ++sent;
    } else if (errno == EAGAIN) {
      usleep(200);
    } else {
      open[r] = false;
    }
    if (sent % 8 == 0 && open[r]) {
      open[r] = c.receive(error);
      while (c.pop(frame)) {
        ++heard;
        std::string again;
        EXPECT_TRUE(decode_any(static_cast<MessageType>(frame.type), frame.payload, again))
            << "type " << frame.type;
        if (replies.size() < 64) replies.push_back(frame.payload);
      }
    }
    if (sent % 500 == 0) {
      job.compute(static_cast<int>(sent));
      // (Waits for rank 2's answer, which is mostly none.)
      if (sent % 2500 == 0) explain(job.context(r));
    }
  }
  EXPECT_LT(unjam::monotonic_ns(), end) << "the ranks take no messages";
  if (!break_it) {
    EXPECT_GE(sent, messages);
    if (messages >= 1000) {
      EXPECT_GT(heard, 0u);
    }
  }
  for (int r = 0; r < 2; ++r) {
    int count = 0, absent[3];
    UNJAM_CHECK(unjamContextAbsent(job.context(r), absent, 3, &count));
    for (int i = 0; i < count; ++i) EXPECT_EQ(absent[i], 2) << "rank 2 speaks for nobody else";
  }
  job.compute(-1);
  for (int r = 0; r < 2; ++r) job.end(r).close();
  job.free_vain();
  job.compute(-2);
  return std::max<std::size_t>(sent, 1);
}

void fuzz_the_job(std::size_t messages) {
  job_round(mix(base_seed(), 999), 100, true);  // what is made once a process
  const int before = open_descriptors();
  const double memory = resident_mb();
  const std::uint64_t start = unjam::monotonic_ns();
  std::size_t sent = 0;
  for (std::uint64_t round = 0; sent < messages && !testing::Test::HasFailure(); ++round) {
    const std::uint64_t seed = mix(base_seed(), 1000 + round);
    SCOPED_TRACE(seed_text(seed) + ", round " + std::to_string(round));
    try {
      sent += job_round(seed, std::min<std::size_t>(5000, messages - sent), round % 2 == 1);
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
  }
  expect_no_leak(before);
  std::printf("running job: %zu messages, %.1f s, resident %.0f -> %.0f MB, %d descriptors left\n",
              sent, static_cast<double>(unjam::monotonic_ns() - start) / 1e9, memory, resident_mb(),
              open_descriptors() - before);
  if (!kSanitized) {
    EXPECT_LT(resident_mb(), memory + 400);
  }
}

// Rank 2 says that uses of keys have failed; of a group without it nobody believes it.
TEST(ControlFuzz, WhoIsNoMemberEndsNothing) {
  RunningJob job(base_seed());
  ASSERT_TRUE(job.ok());
  job.compute(0);
  std::string error;
  for (int r = 0; r < 2; ++r) {
    unjam::FailMessage fail;
    unjam::AnswerMessage answer;
    // Of a key in use, and of one that nobody has called yet.
    for (const char* key : {"sum", "later"}) {
      fail.tag = unjam::key_tag(*job.honest(r), key);
      fail.n = 0, fail.code = UNJAM_ERROR_MISMATCH, fail.text = "made up";
      ASSERT_TRUE(
          send_raw(job.end(r).fd(), frame_bytes(number_of(MessageType::kFail), fail.encode()), {}));
      answer.known.push_back({fail.tag, 0, "made up"});
    }
    ASSERT_TRUE(send_raw(job.end(r).fd(),
                         frame_bytes(number_of(MessageType::kAnswer), answer.encode()), {}));
    // Of the group of all, for which it may speak; heard after the others.
    fail.tag = unjam::key_tag(*job.all(r), "vain");
    ASSERT_TRUE(
        send_raw(job.end(r).fd(), frame_bytes(number_of(MessageType::kFail), fail.encode()), {}));
  }
  job.call_in_vain();
  job.free_vain();
  job.compute(1);
  job.compute(2, "later");
}

TEST(ControlFuzz, RunningJob) { fuzz_the_job(kSanitized ? 4000 : 10000); }
TEST(ControlFuzzSoak, RunningJob) { fuzz_the_job(100000); }

// ---- what the coverage-guided fuzzers have kept ----

TEST(ControlFuzz, KeptInputs) {
  namespace fs = std::filesystem;
  // The tests run from a build folder below the repository.
  fs::path corpus = fs::path(__FILE__).parent_path().parent_path() / "fuzz" / "corpus";
  if (!fs::exists(corpus)) GTEST_SKIP() << corpus << " is not there";
  for (const FuzzTarget& target : kFuzzTargets) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(corpus / target.name)) {
      files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    EXPECT_FALSE(files.empty()) << target.name;
    for (const fs::path& file : files) {
      SCOPED_TRACE(file);
      std::ifstream in(file, std::ios::binary);
      const std::string data{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
      target.run(data);
    }
  }
}

}  // namespace
}  // namespace unjam_test
