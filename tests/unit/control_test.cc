// The control layer: what is on the wire, channels, the rendezvous, the mesh.
#include "tests/support/control.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

#include "base/clock.h"
#include "control/hand_out.h"
#include "control/join_text.h"
#include "control/mesh.h"
#include "control/wire.h"
#include "tests/support/job.h"
#include "transport/arena.h"

namespace unjam_test {
namespace {

using unjam::HandedMessage;
using unjam::JoinMessage;
using unjam::Mesh;
using unjam::RendezvousClient;
using unjam::RendezvousServer;
using unjam::WireReader;
using unjam::WireWriter;

constexpr std::int64_t kLongMs = kPatienceUs / 1000;

// Descriptors that are open afterwards and were not before.
class NoLeak {
 public:
  NoLeak() : before_(open_descriptors()) {}
  ~NoLeak() { EXPECT_EQ(open_descriptors(), before_); }

 private:
  int before_;
};

double seconds_since(std::uint64_t ns) {
  return static_cast<double>(unjam::monotonic_ns() - ns) / 1e9;
}

// Runs `body` in a child process; what it returns is the exit status.
pid_t run_child(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  _exit(body());
}
int end_of(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}
Fd pidfd_of(pid_t pid) { return Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))); }

// ---- wire and messages ----

TEST(Wire, ReadsWhatWasWritten) {
  WireWriter w;
  w.number<std::uint8_t>(7);
  w.number<std::int64_t>(-5);
  w.text("some text");
  w.text("");
  w.list(2);
  w.number<std::uint16_t>(1);
  w.number<std::uint16_t>(2);
  const std::string bytes = w.take();
  WireReader r(bytes);
  EXPECT_EQ(r.number<std::uint8_t>(), 7);
  EXPECT_EQ(r.number<std::int64_t>(), -5);
  EXPECT_EQ(r.text(9), "some text");
  EXPECT_EQ(r.text(9), "");
  EXPECT_EQ(r.list(2, 2), 2u);
  EXPECT_FALSE(r.complete());
  EXPECT_EQ(r.up_to<std::uint16_t>(1), 1);
  EXPECT_EQ(r.up_to<std::uint16_t>(2), 2);
  EXPECT_TRUE(r.complete());
  EXPECT_EQ(r.number<std::uint8_t>(), 0);
  EXPECT_FALSE(r.ok());
}

TEST(Wire, RefusesWhatIsTooLong) {
  WireWriter w;
  w.text("12345");
  const std::string text = w.take();
  EXPECT_EQ(WireReader(text).text(4), "");
  w.list(3);
  w.number<std::uint32_t>(0);
  w.number<std::uint32_t>(0);
  const std::string list = w.take();
  EXPECT_EQ(WireReader(list).list(2, 1), 0u);   // more than allowed
  EXPECT_EQ(WireReader(list).list(10, 4), 0u);  // more than there are bytes for
  EXPECT_EQ(WireReader(list).list(10, 2), 3u);
  w.number<std::uint8_t>(3);
  w.number<std::uint8_t>(0);
  const std::string above = w.take();
  WireReader r(above);
  EXPECT_EQ(r.up_to<std::uint8_t>(2), 0);
  EXPECT_FALSE(r.ok());
  EXPECT_EQ(r.number<std::uint8_t>(), 0);
  EXPECT_FALSE(r.complete()) << "nothing is read after a fault";
}

TEST(Messages, RoundTripAndNothingElse) {
  for (const SampleMessage& m : sample_messages()) {
    SCOPED_TRACE("type " + std::to_string(number_of(m.type)));
    std::string again;
    ASSERT_TRUE(decode_any(m.type, m.bytes, again));
    EXPECT_EQ(again, m.bytes);
    for (std::size_t n = 0; n < m.bytes.size(); ++n) {
      EXPECT_FALSE(decode_any(m.type, m.bytes.substr(0, n), again)) << "cut to " << n;
    }
    EXPECT_FALSE(decode_any(m.type, m.bytes + '\0', again));
    EXPECT_FALSE(decode_any(m.type, m.bytes + m.bytes, again));
  }
}

TEST(Messages, RefuseRanksThatCannotBe) {
  std::string again;
  EXPECT_FALSE(
      decode_any(MessageType::kMemory, HandedMessage{{{unjam::kMaxRanks, 1}}}.encode(), again));
  JoinMessage join;
  join.rank = join.ranks = 4;
  EXPECT_FALSE(decode_any(MessageType::kJoin, join.encode(), again));
  join.rank = 0, join.ranks = unjam::kMaxRanks + 1;
  EXPECT_FALSE(decode_any(MessageType::kJoin, join.encode(), again));
  unjam::StartMessage start;
  start.process_of = {0, 1};
  start.pids = {1};
  EXPECT_FALSE(decode_any(MessageType::kStart, start.encode(), again)) << "process 1 of 1";
  start.process_of = {0, 0};
  start.me = 1;
  EXPECT_FALSE(decode_any(MessageType::kStart, start.encode(), again));
  start.me = 0;
  start.hosts = {"a"};
  start.host_of = {0, 0};
  EXPECT_TRUE(decode_any(MessageType::kStart, start.encode(), again));
  start.host_of = {0, 1};
  EXPECT_FALSE(decode_any(MessageType::kStart, start.encode(), again)) << "host 1 of 1";
  start.host_of = {0};
  EXPECT_FALSE(decode_any(MessageType::kStart, start.encode(), again)) << "a rank without a host";
  start.hosts.clear();
  start.host_of = {0, 0};
  EXPECT_FALSE(decode_any(MessageType::kStart, start.encode(), again)) << "hosts that are not said";
  unjam::SnapshotMessage snapshot;
  snapshot.ranks.resize(1);
  snapshot.ranks[0].running = {0};
  EXPECT_FALSE(decode_any(MessageType::kSnapshot, snapshot.encode(), again)) << "runs nothing";
}

TEST(Messages, LongTextsAreCut) {
  unjam::FailMessage m, back;
  m.text.assign(1 << 20, 'x');
  ASSERT_TRUE(back.decode(m.encode()));
  EXPECT_EQ(back.text.size(), unjam::kLongestText);
  EXPECT_EQ(back.text.substr(back.text.size() - 4), " ...");
}

// ---- channel ----

struct Ends {
  Channel a, b;
  Ends(std::size_t longest = 1 << 22) {
    auto [x, y] = socket_pair();
    a = Channel(std::move(x), longest);
    b = Channel(std::move(y), longest);
  }
};

TEST(ControlChannel, FramesWithDescriptorsArriveInOrder) {
  NoLeak leak;
  Ends e;
  std::string error;
  for (int i = 0; i < 200; ++i) {
    std::vector<Fd> fds;
    for (int f = 0; f < i % 3; ++f) {
      fds.push_back(memory_fd(static_cast<std::size_t>(4096 * (i + 1 + f))));
    }
    e.a.post(static_cast<std::uint16_t>(i), std::string(static_cast<std::size_t>(i), 'p'),
             std::move(fds));
    ASSERT_TRUE(e.a.flush(error)) << error;
  }
  // More descriptors are under way than any one frame may have: they are taken one frame at a time.
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(e.a.flush(error)) << error;
    Frame f;
    ASSERT_TRUE(e.b.await(f, kLongMs, error)) << i << ": " << error;
    EXPECT_EQ(f.type, i);
    EXPECT_EQ(f.payload, std::string(static_cast<std::size_t>(i), 'p'));
    ASSERT_EQ(f.fds.size(), static_cast<std::size_t>(i % 3));
    for (std::size_t k = 0; k < f.fds.size(); ++k) {
      EXPECT_EQ(lseek(f.fds[k].get(), 0, SEEK_END), 4096 * (i + 1 + static_cast<int>(k)));
    }
  }
}

TEST(ControlChannel, ReceivesByEventsWithoutPopping) {
  // As the users do: receive, then pop all, until nothing is left, with 60 descriptors under way.
  Ends e;
  std::string error;
  for (int i = 0; i < 60; ++i) {
    std::vector<Fd> fds;
    fds.push_back(memory_fd());
    e.a.post(1, "", std::move(fds));
  }
  ASSERT_TRUE(e.a.flush_all(kLongMs, error)) << error;
  int frames = 0;
  for (int rounds = 0; frames < 60 && rounds < 1000; ++rounds) {
    ASSERT_TRUE(e.b.receive(error)) << error;
    Frame f;
    for (; e.b.pop(f); ++frames) EXPECT_EQ(f.fds.size(), 1u);
  }
  EXPECT_EQ(frames, 60);
}

TEST(ControlChannel, LargeFramesGoInParts) {
  Ends e(8 << 20);
  std::string big(8 << 20, '\0'), error;
  for (std::size_t i = 0; i < big.size(); ++i) big[i] = static_cast<char>(mix(i));
  e.a.post(9, big);
  e.a.post(10, "after");
  ASSERT_TRUE(e.a.flush(error));
  EXPECT_TRUE(e.a.pending()) << "no socket takes so much at once";
  EXPECT_GT(e.a.pending_bytes(), 0u);
  Frame f;
  while (!e.b.pop(f)) {
    ASSERT_TRUE(e.b.receive(error)) << error;
    ASSERT_TRUE(e.a.flush(error)) << error;
  }
  EXPECT_EQ(f.type, 9);
  EXPECT_TRUE(f.payload == big);
  ASSERT_TRUE(e.a.flush_all(kLongMs, error));
  ASSERT_TRUE(e.b.await(f, kLongMs, error));
  EXPECT_EQ(f.payload, "after");
  EXPECT_EQ(e.a.pending_bytes(), 0u);
}

TEST(ControlChannel, ByteByByte) {
  auto [a, b] = socket_pair();
  Channel channel(std::move(b), 100);
  const std::string bytes = frame_bytes(3, "hello") + frame_bytes(4, "");
  std::string error;
  Frame f;
  std::vector<std::uint16_t> types;
  for (const char c : bytes) {
    ASSERT_TRUE(send_raw(a.get(), std::string(1, c)));
    ASSERT_TRUE(channel.receive(error)) << error;
    while (channel.pop(f)) types.push_back(f.type);
  }
  EXPECT_EQ(types, (std::vector<std::uint16_t>{3, 4}));
}

TEST(ControlChannel, ManySmallFramesAtOnce) {
  // Popping moves nothing along: 65536 frames out of one read of 1 MiB.
  Ends e(64 << 20);
  std::string all, error;
  constexpr int kFrames = 400000;
  for (int i = 0; i < kFrames; ++i) all += frame_bytes(1, "");
  std::size_t sent = 0;
  int frames = 0;
  Frame f;
  while (frames < kFrames) {
    const ssize_t n = ::send(e.a.fd(), all.data() + sent, all.size() - sent, MSG_DONTWAIT);
    if (n > 0) sent += static_cast<std::size_t>(n);
    ASSERT_TRUE(e.b.receive(error)) << error;
    while (e.b.pop(f)) ++frames;
  }
  EXPECT_EQ(frames, kFrames);
}

// What the other end does, and the fault that it is.
TEST(ControlChannel, BreaksOnWhatIsNotOurs) {
  NoLeak leak;
  const Fd fd = memory_fd();
  const std::vector<int> one(1, fd.get()), three(3, fd.get()), many(60, fd.get());
  struct Case {
    const char* what;
    std::string bytes;
    std::vector<int> fds;
  };
  const Case cases[] = {
      {"too long", frame_bytes(1, "", 101, 0), {}},
      {"enormous", frame_bytes(1, "", ~0u, 0), {}},
      {"a byte that must be zero", frame_bytes(1, "", 0, 0, 1), {}},
      {"claims descriptors", frame_bytes(1, "x", 1, 1), {}},
      {"claims more than it brings", frame_bytes(1, "x", 1, 2), one},
      {"claims more than can be", frame_bytes(1, "x", 1, 3), three},
      {"brings more than it claims", frame_bytes(1, "x", 1, 0), one},
      {"brings more than can be", frame_bytes(1, "x", 1, 2), three},
      {"brings far more", frame_bytes(1, "x", 1, 1), many},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    auto [a, b] = socket_pair();
    Channel channel(std::move(b), 100);
    ASSERT_TRUE(send_raw(a.get(), c.bytes, c.fds));
    std::string error;
    Frame f;
    bool live = channel.receive(error);
    while (channel.pop(f)) continue;
    if (live) {
      EXPECT_TRUE(channel.broken());
      live = channel.receive(error);
    }
    EXPECT_FALSE(live);
    EXPECT_FALSE(error.empty());
    EXPECT_FALSE(channel.pop(f));
    // And at once, not after the patience of whoever waits.
    const std::uint64_t before = unjam::monotonic_ns();
    EXPECT_FALSE(channel.await(f, kLongMs, error));
    EXPECT_LT(unjam::monotonic_ns() - before, 10'000'000'000u);
  }
}

TEST(ControlChannel, EndOfTheOtherEnd) {
  NoLeak leak;
  Ends e;
  std::string error;
  e.a.post(5, "last words");
  ASSERT_TRUE(e.a.flush(error));
  e.a.close();
  Frame f;
  EXPECT_FALSE(e.b.receive(error));
  EXPECT_EQ(error, "closed by the other end");
  ASSERT_TRUE(e.b.pop(f)) << "what was said before can still be read";
  EXPECT_EQ(f.payload, "last words");
  e.b.post(6, "too late");
  EXPECT_FALSE(e.b.flush(error));
  EXPECT_FALSE(e.b.await(f, kLongMs, error));
  Channel none;
  none.post(1, "");
  EXPECT_FALSE(none.flush(error));
  std::vector<Fd> fds(unjam::kMaxFrameFds + 1);
  EXPECT_THROW(none.post(1, "", std::move(fds)), std::logic_error);
}

TEST(ControlChannel, TimeLimits) {
  Ends e;
  std::string error;
  Frame f;
  EXPECT_FALSE(e.b.await(f, 30, error));
  EXPECT_NE(error.find("30 ms"), std::string::npos) << error;
  e.a.post(1, std::string(4 << 20, 'x'));
  EXPECT_FALSE(e.a.flush_all(30, error));
  EXPECT_NE(error.find("not taken within"), std::string::npos) << error;
}

// ---- rendezvous ----

// One process of a job, as World drives it.
struct Member {
  RendezvousClient client;
  std::string error;
  bool connected = false, live = true, asked = false;
  std::vector<std::uint64_t> cpus;
  std::vector<std::size_t> memory_bytes = {4096};  // of each rank: one of them, or a device's too

  bool connect(const JobSecret& secret) {
    connected = client.connect(secret, kLongMs, error);
    return connected;
  }
  void join(std::uint32_t rank, std::uint32_t ranks, const std::string& settings = "same") {
    JoinMessage m;
    m.rank = rank;
    m.ranks = ranks;
    m.arena_bytes = 4096;
    m.settings = settings;
    m.cpus = cpus;
    std::vector<Fd> memory;
    for (const std::size_t bytes : memory_bytes) memory.push_back(memory_fd(bytes));
    client.join(m, std::move(memory));
    client.flush();
  }
  // Until `done`, or the connection ends, or for that long.
  bool run(const std::function<bool()>& done, std::int64_t ms = kLongMs) {
    const std::uint64_t end = unjam::monotonic_ns() + static_cast<std::uint64_t>(ms) * 1000000;
    while (live && !done() && unjam::monotonic_ns() < end) {
      client.flush();
      pollfd p{client.fd(), static_cast<short>(POLLIN | (client.pending() ? POLLOUT : 0)), 0};
      poll(&p, 1, 10);
      live = client.receive(error);
    }
    return done();
  }
  bool start() {
    return run([&] { return client.started || !client.failed.empty(); }) && client.started;
  }
  bool fail(std::int64_t ms = kLongMs) {
    return run([&] { return !client.failed.empty() || client.started; }, ms) && !client.started;
  }
  bool refused(int rank) {
    return run([&] { return client.refused.count(rank) != 0; });
  }
  bool sees(std::uint64_t mask) {
    // (A join that is on its way is there by the answer to a later question.)
    return run([&] {
      if (client.present && client.present->joined == std::vector<std::uint64_t>{mask}) return true;
      if (client.present || !asked) client.ask_who();
      asked = true;
      return false;
    });
  }
};

void expect_whole(Member& m, const std::vector<std::uint32_t>& own, std::size_t ranks,
                  std::size_t processes) {
  ASSERT_TRUE(m.client.started) << m.error << m.client.failed;
  EXPECT_EQ(m.client.start.process_of.size(), ranks);
  EXPECT_EQ(m.client.start.pids.size(), processes);
  EXPECT_EQ(m.client.memory.size(), ranks - own.size());
  EXPECT_EQ(m.client.peers.size(), processes - 1);
  for (const auto r : own) {
    EXPECT_EQ(m.client.start.process_of[r], m.client.start.me);
    EXPECT_EQ(m.client.memory.count(static_cast<int>(r)), 0u);
  }
  for (const auto& [process, peer] : m.client.peers) {
    EXPECT_TRUE(peer.socket);
    EXPECT_TRUE(peer.pidfd);
  }
}

TEST(Rendezvous, OneToManyProcessesMeet) {
  NoLeak leak;
  for (const std::uint32_t processes : {1u, 2u, 3u, 5u, 8u, 40u}) {
    const JobSecret secret = secret_from(100 + processes);
    // Some have several ranks.
    std::vector<std::vector<std::uint32_t>> own(processes);
    std::uint32_t ranks = 0;
    for (std::uint32_t p = 0; p < processes; ++p) {
      for (std::uint32_t i = 0; i < (processes > 8 ? 1 : 1 + p % 3); ++i) own[p].push_back(ranks++);
    }
    std::vector<std::unique_ptr<Member>> members(processes);
    std::vector<std::thread> threads;
    for (std::uint32_t p = 0; p < processes; ++p) {
      members[p] = std::make_unique<Member>();
      // Of all all hear: some share CPUs, some have more than 64, and one says nothing.
      if (p != 1) members[p]->cpus = {std::uint64_t{3} << p, p % 2};
      threads.emplace_back([&, p] {
        Member& m = *members[p];
        if (!m.connect(secret)) return;
        for (const auto r : own[p]) m.join(r, ranks);
        // Some are slow to take what they are sent.
        if (p % 4 == 1) m.run([] { return false; }, 0), sleep_ms(50);
        m.start();
      });
    }
    for (auto& t : threads) t.join();
    for (std::uint32_t p = 0; p < processes; ++p) {
      SCOPED_TRACE(std::to_string(processes) + " processes, the " + std::to_string(p));
      expect_whole(*members[p], own[p], ranks, processes);
      std::uint64_t low = 0;
      for (std::uint32_t q = 0; q < processes; ++q) low |= q == 1 ? 0 : std::uint64_t{3} << q;
      EXPECT_EQ(members[p]->client.start.cpus, (std::vector<std::uint64_t>{low, processes > 3}));
    }
    // Each socket leads to whom it says.
    for (auto& m : members) {
      for (auto& [process, peer] : m->client.peers) {
        const auto me = static_cast<char>(m->client.start.me);
        ASSERT_EQ(::send(peer.socket.get(), &me, 1, 0), 1);
      }
    }
    for (auto& m : members) {
      for (auto& [process, peer] : m->client.peers) {
        char from = -1;
        ASSERT_EQ(::recv(peer.socket.get(), &from, 1, 0), 1);
        EXPECT_EQ(from, process);
      }
    }
    for (auto& m : members) m->client.leave();
    EXPECT_FALSE(knock(secret)) << "no door is left open";
  }
}

// A rank on a GPU has two memories, its arena on the host and that on its device. Each of the other
// processes gets both, in that order, and under the right rank.
TEST(Rendezvous, TwoMemoriesOfARank) {
  NoLeak leak;
  const auto size_of = [](const Fd& fd) {
    struct stat info{};
    return fstat(fd.get(), &info) == 0 ? static_cast<std::size_t>(info.st_size) : 0;
  };
  for (const std::uint32_t processes : {2u, 5u}) {
    const JobSecret secret = secret_from(200 + processes);
    const std::uint32_t ranks = 2 * processes;
    std::vector<std::unique_ptr<Member>> members(processes);
    std::vector<std::thread> threads;
    for (std::uint32_t p = 0; p < processes; ++p) {
      members[p] = std::make_unique<Member>();
      threads.emplace_back([&, p] {
        Member& m = *members[p];
        if (!m.connect(secret)) return;
        for (const std::uint32_t r : {2 * p, 2 * p + 1}) {
          m.memory_bytes = {4096 * (r + 1), 4096 * (r + 101)};
          m.join(r, ranks);
        }
        m.start();
      });
    }
    for (auto& t : threads) t.join();
    for (std::uint32_t p = 0; p < processes; ++p) {
      SCOPED_TRACE(std::to_string(processes) + " processes, the " + std::to_string(p));
      Member& m = *members[p];
      expect_whole(m, {2 * p, 2 * p + 1}, ranks, processes);
      for (const auto& [rank, memory] : m.client.memory) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        ASSERT_EQ(memory.size(), 2u);
        EXPECT_EQ(size_of(memory[0]), 4096u * (static_cast<unsigned>(rank) + 1));
        EXPECT_EQ(size_of(memory[1]), 4096u * (static_cast<unsigned>(rank) + 101));
      }
    }
    for (auto& m : members) m->client.leave();
  }
}

TEST(Rendezvous, AWrongSecretIsRefusedAndOthersAreNot) {
  NoLeak leak;
  const JobSecret secret = secret_from(1), wrong = secret_from(2);
  Member a, b;
  ASSERT_TRUE(a.connect(secret));
  a.join(0, 2);
  Frame answer;
  {
    // Secrets that differ have names that differ; this one knows the name, and not the secret.
    Channel stranger = prove_by_hand(secret, wrong, answer);
    ASSERT_TRUE(stranger.open());
    unjam::RefusedMessage refused;
    ASSERT_EQ(answer.type, number_of(MessageType::kRefused));
    ASSERT_TRUE(refused.decode(answer.payload));
    EXPECT_NE(refused.text.find("wrong secret"), std::string::npos) << refused.text;
    // What it says now is not heard.
    JoinMessage join;
    join.rank = 1, join.ranks = 2, join.settings = "same", join.arena_bytes = 4096;
    std::vector<Fd> fds;
    fds.push_back(memory_fd());
    stranger.post(number_of(MessageType::kJoin), join.encode(), std::move(fds));
    std::string error;
    stranger.flush(error);
    EXPECT_FALSE(stranger.await(answer, kLongMs, error));
  }
  {
    // The server's own kind of proof is none for a client.
    std::string error;
    Channel mirror(knock(secret), unjam::kLongestFrame);
    unjam::HelloMessage hello;
    ASSERT_TRUE(mirror.await(answer, kLongMs, error) && hello.decode(answer.payload));
    unjam::ProofMessage proof;
    unjam::proof_tag(secret, 's', hello.nonce, proof.nonce, proof.tag);
    mirror.post(number_of(MessageType::kProof), proof.encode());
    ASSERT_TRUE(mirror.flush_all(kLongMs, error));
    ASSERT_TRUE(mirror.await(answer, kLongMs, error));
    EXPECT_EQ(answer.type, number_of(MessageType::kRefused));
  }
  EXPECT_TRUE(a.sees(1));
  ASSERT_TRUE(b.connect(secret));
  b.join(1, 2);
  std::thread other([&] { b.start(); });
  EXPECT_TRUE(a.start()) << a.error << a.client.failed;
  other.join();
  expect_whole(b, {1}, 2, 2);
  a.client.leave();
}

TEST(Rendezvous, AnotherVersionIsTold) {
  const JobSecret secret = secret_from(3);
  RendezvousServer server(listen_as(secret), secret);
  std::string error;
  Frame answer;
  Channel c(knock(secret), unjam::kLongestFrame);
  ASSERT_TRUE(c.await(answer, kLongMs, error));
  unjam::ProofMessage proof;
  proof.version = unjam::kProtocolVersion + 1;
  c.post(number_of(MessageType::kProof), proof.encode());
  ASSERT_TRUE(c.flush_all(kLongMs, error) && c.await(answer, kLongMs, error)) << error;
  unjam::RefusedMessage refused;
  ASSERT_TRUE(refused.decode(answer.payload));
  EXPECT_NE(refused.text.find("version"), std::string::npos) << refused.text;
}

TEST(Rendezvous, TheSilentAreDropped) {
  NoLeak leak;
  const JobSecret secret = secret_from(4);
  std::vector<Fd> silent;
  Member a, b;
  ASSERT_TRUE(a.connect(secret));
  // More than the server keeps: the oldest go at once, and honest ranks still get in.
  for (int i = 0; i < 200; ++i) {
    silent.push_back(knock(secret));
    if (!silent.back()) silent.pop_back(), sleep_ms(1);
  }
  EXPECT_TRUE(eventually([&] {
    char hello[64];
    while (::recv(silent[0].get(), hello, sizeof(hello), MSG_DONTWAIT) > 0) continue;
    return ::recv(silent[0].get(), hello, sizeof(hello), MSG_DONTWAIT) == 0;
  })) << "one too many";
  a.join(0, 2);
  ASSERT_TRUE(a.sees(1));
  // The others after the time for a proof (5 s).
  const std::uint64_t before = unjam::monotonic_ns();
  Fd& last = silent.back();
  EXPECT_TRUE(eventually([&] {
    char hello[64];
    while (::recv(last.get(), hello, sizeof(hello), MSG_DONTWAIT) > 0) continue;
    return ::recv(last.get(), hello, sizeof(hello), MSG_DONTWAIT) == 0;
  }));
  EXPECT_LT(unjam::monotonic_ns() - before, 30'000'000'000u);
  ASSERT_TRUE(b.connect(secret));
  b.join(1, 2);
  std::thread other([&] { b.start(); });
  EXPECT_TRUE(a.start());
  other.join();
  expect_whole(b, {1}, 2, 2);
  a.client.leave();
}

TEST(Rendezvous, TheServersProcessLeavesEarly) {
  const JobSecret secret = secret_from(5);
  Member b;
  {
    Member a;  // serves
    ASSERT_TRUE(a.connect(secret));
    ASSERT_TRUE(b.connect(secret));
    a.join(0, 3);
    b.join(1, 3);
    ASSERT_TRUE(b.sees(3) && a.sees(3));
  }
  EXPECT_TRUE(b.fail()) << b.error;
  EXPECT_NE(b.client.failed.find("left before all ranks had joined"), std::string::npos)
      << b.client.failed;
  // It is killed: nobody says a word, the connection ends.
  int up[2];
  ASSERT_EQ(pipe2(up, O_CLOEXEC), 0);
  const Fd reading(up[0]);
  const pid_t server = run_child([&] {
    Member a;
    if (!a.connect(secret)) return 1;
    a.join(0, 2);
    a.sees(1);
    if (write(up[1], "x", 1) != 1) return 1;
    sleep_ms(1000000);
    return 0;
  });
  close(up[1]);
  char x;
  ASSERT_EQ(read(reading.get(), &x, 1), 1);
  Member c;
  ASSERT_TRUE(c.connect(secret)) << c.error;
  kill(server, SIGKILL);
  EXPECT_EQ(end_of(server), -SIGKILL);
  EXPECT_FALSE(c.start());
  EXPECT_FALSE(c.live);
}

TEST(Rendezvous, DifferentNumbersOfRanksAreToldToAll) {
  NoLeak leak;
  const JobSecret secret = secret_from(16);
  Member a, b;
  ASSERT_TRUE(a.connect(secret) && b.connect(secret));
  a.join(0, 3);
  ASSERT_TRUE(a.sees(1));
  b.join(1, 4);
  ASSERT_TRUE(b.refused(1));
  EXPECT_EQ(b.client.refused[1].code, 3);
  EXPECT_NE(b.client.refused[1].text.find("4 ranks"), std::string::npos);
  ASSERT_TRUE(a.fail());
  EXPECT_NE(a.client.failed.find("rank 1"), std::string::npos) << a.client.failed;
  EXPECT_NE(a.client.failed.find("4 ranks, rank 0 says 3"), std::string::npos) << a.client.failed;
  a.client.leave();
}

TEST(Rendezvous, WhatRanksMustAgreeOn) {
  NoLeak leak;
  const JobSecret secret = secret_from(6);
  Member a, b, c;
  ASSERT_TRUE(a.connect(secret) && b.connect(secret));
  a.join(0, 3);
  ASSERT_TRUE(a.sees(1));
  b.join(0, 3);  // twice the same: this rank alone is refused
  ASSERT_TRUE(b.refused(0));
  EXPECT_EQ(b.client.refused[0].code, 2);
  EXPECT_NE(b.client.refused[0].text.find("joined this job already"), std::string::npos);
  b.join(1, 3);
  ASSERT_TRUE(b.sees(3)) << "a refused rank may try again";
  ASSERT_TRUE(c.connect(secret));
  c.join(2, 3, "other");  // ends it for all, who are told why
  EXPECT_TRUE(c.refused(2));
  EXPECT_TRUE(a.fail());
  EXPECT_TRUE(b.fail());
  for (const std::string& text : {c.client.refused[2].text, a.client.failed, b.client.failed}) {
    EXPECT_NE(text.find("settings differ"), std::string::npos) << text;
  }
  a.client.leave();
}

// The one that nobody need have set says where it comes from.
TEST(Rendezvous, SettingsThatDifferAreNamed) {
  EXPECT_EQ(unjam::settings_differ_text(0, "A=1, UNJAM_LANES=2, B=3", 1, "A=1, UNJAM_LANES=3, B=3"),
            "settings differ: rank 0 has UNJAM_LANES=2; rank 1 has UNJAM_LANES=3; give the same on "
            "all ranks");
  EXPECT_EQ(unjam::settings_differ_text(2, "UNJAM_LINES=1, B=3", 0, "UNJAM_LINES=0, B=3"),
            "settings differ: rank 2 has UNJAM_LINES=1; rank 0 has UNJAM_LINES=0; unless it is "
            "set, UNJAM_LINES is what NVML tells a rank of the GPUs' links; give the same on all "
            "ranks");
}

TEST(Rendezvous, AClientThatDiesBeforeAllHaveJoined) {
  const JobSecret secret = secret_from(7);
  Member a;
  ASSERT_TRUE(a.connect(secret));
  a.join(0, 3);
  ASSERT_TRUE(a.sees(1));
  // One that has no rank yet costs nothing.
  EXPECT_EQ(end_of(run_child([&] {
              Member idle;
              return idle.connect(secret) ? 0 : 1;
            })),
            0);
  const pid_t child = run_child([&] {
    Member b;
    if (!b.connect(secret)) return 1;
    b.join(1, 3);
    b.sees(3);
    return 0;
  });
  EXPECT_EQ(end_of(child), 0);
  EXPECT_TRUE(a.fail());
  EXPECT_EQ(a.client.failed,
            "rank 1 (process " + std::to_string(child) + ") left before all ranks had joined");
}

TEST(Rendezvous, AProvenClientThatMisbehavesIsDropped) {
  NoLeak leak;
  const JobSecret secret = secret_from(8);
  RendezvousServer server(listen_as(secret), secret);
  const Fd fd = memory_fd();
  const std::string join = sample_messages()[4].bytes;
  const auto type = number_of(MessageType::kJoin);
  const std::vector<std::string> cases = {
      frame_bytes(type, "garbage"),
      frame_bytes(type, join),                                 // without a descriptor
      frame_bytes(number_of(MessageType::kStart), ""),         // the server's to say
      frame_bytes(999, ""),                                    // nobody's
      frame_bytes(type, "", unjam::kLongestJoinFrame + 1, 0),  // too long
  };
  double slowest = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    Frame answer;
    Channel c = prove_by_hand(secret, secret, answer);
    ASSERT_EQ(answer.type, number_of(MessageType::kProof));
    ASSERT_TRUE(send_raw(c.fd(), cases[i]));
    std::string error;
    const std::uint64_t before = unjam::monotonic_ns();
    while (c.await(answer, kLongMs, error)) {
      EXPECT_EQ(answer.type, number_of(MessageType::kRefused));
    }
    EXPECT_EQ(error.find("no answer"), std::string::npos) << error;
    slowest = std::max(slowest, seconds_since(before));
  }
  std::printf("  dropped after %.1f ms at most\n", slowest * 1e3);
}

TEST(Rendezvous, WhoTakesNoAnswersIsDropped) {
  const JobSecret secret = secret_from(9);
  Member a;
  ASSERT_TRUE(a.connect(secret));
  a.join(0, 2);
  ASSERT_TRUE(a.sees(1));
  Frame answer;
  Channel c = prove_by_hand(secret, secret, answer);
  ASSERT_TRUE(c.open());
  JoinMessage again;
  again.rank = 0, again.ranks = 2;
  bool dropped = false;
  const Fd fd = memory_fd();
  for (int i = 0; i < 1000000 && !dropped; ++i) {
    const std::string frame = frame_bytes(number_of(MessageType::kJoin), again.encode(), 1);
    if (send_raw(c.fd(), frame, {fd.get()})) continue;
    dropped = errno == EPIPE || errno == ECONNRESET;
    if (!dropped) usleep(100);
  }
  EXPECT_TRUE(dropped) << "its refusals pile up without a bound";
}

TEST(Rendezvous, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  const JobSecret secret = secret_from(10);
  Member a, b;
  ASSERT_TRUE(a.connect(secret));
  a.join(0, 2);
  // It knows the secret, and still is somebody else: as a client …
  EXPECT_EQ(end_of(run_child([&] {
              if (seteuid(65534) != 0) return 9;
              Fd s = knock(secret);
              if (!s) return 8;
              pollfd p{s.get(), POLLIN, 0};
              poll(&p, 1, 10000);
              char hello[64];
              return ::recv(s.get(), hello, sizeof(hello), 0) > 0 ? 1 : 0;
            })),
            0);
  EXPECT_EQ(end_of(run_child([&] {
              if (seteuid(65534) != 0) return 9;
              RendezvousClient client;
              std::string error;
              if (client.connect(secret, kLongMs, error)) return 1;
              return error.find("belongs to user 0") != std::string::npos ? 0 : 2;
            })),
            0);
  ASSERT_TRUE(b.connect(secret));
  b.join(1, 2);
  std::thread other([&] { b.start(); });
  EXPECT_TRUE(a.start());
  other.join();
  a.client.leave();
  // … and as a server that lures the others.
  int up[2];
  ASSERT_EQ(pipe2(up, O_CLOEXEC), 0);
  const Fd reading(up[0]);
  const pid_t child = run_child([&] {
    if (seteuid(65534) != 0) return 9;
    const Fd listener = listen_as(secret);
    if (!listener || write(up[1], "x", 1) != 1) return 8;
    sleep_ms(1000000);
    return 0;
  });
  close(up[1]);
  char x;
  ASSERT_EQ(read(reading.get(), &x, 1), 1);
  RendezvousClient lured;
  std::string error;
  EXPECT_FALSE(lured.connect(secret, kLongMs, error));
  EXPECT_NE(error.find("held by somebody else"), std::string::npos) << error;
  kill(child, SIGKILL);
  end_of(child);
}

// Serves one connection after the other: a client that is not served for long makes another.
class FakeServer {
 public:
  FakeServer(const Fd& listener, const std::function<void(Channel&)>& serve)
      : thread_([this, &listener, serve] {
          while (!stop_) {
            pollfd p{listener.get(), POLLIN, 0};
            if (poll(&p, 1, 10) <= 0) continue;
            Channel c(Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)),
                      unjam::kLongestFrame);
            serve(c);
          }
        }) {}
  ~FakeServer() {
    stop_ = true;
    thread_.join();
  }
  FakeServer(const FakeServer&) = delete;
  FakeServer& operator=(const FakeServer&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST(Rendezvous, AServerWithoutTheSecretIsRefused) {
  NoLeak leak;
  const JobSecret secret = secret_from(11), wrong = secret_from(12);
  std::string error;
  {
    // It serves by the rules, with a secret of its own: whatever it answers to a client's proof.
    RendezvousServer server(listen_as(secret), wrong);
    RendezvousClient client;
    EXPECT_FALSE(client.connect(secret, kLongMs, error));
    EXPECT_NE(error.find("refused"), std::string::npos) << error;
  }
  // It accepts any proof, and gives: random bytes for its own; the client's; a mere header.
  for (int how = 0; how < 4; ++how) {
    SCOPED_TRACE(how);
    const Fd listener = listen_as(secret);
    const FakeServer server(listener, [&](Channel& c) {
      std::string ignored;
      unjam::HelloMessage hello;
      Frame f;
      if (how == 3) {
        c.post(77, "who are you?");
      } else {
        c.post(number_of(MessageType::kHello), hello.encode());
      }
      c.flush_all(1000, ignored);
      if (!c.await(f, kLongMs, ignored)) return;
      unjam::ProofMessage proof;
      if (how == 1) proof.decode(f.payload);
      c.post(number_of(how == 2 ? MessageType::kPresent : MessageType::kProof), proof.encode());
      c.flush_all(1000, ignored);
      c.await(f, kLongMs, ignored);  // until the client has gone
    });
    RendezvousClient client;
    EXPECT_FALSE(client.connect(secret, kLongMs, error));
    EXPECT_NE(error.find(how == 3 ? "is not unjam" : "does not know this job's secret"),
              std::string::npos)
        << error;
  }
  // It says nothing at all: the client's time limit counts.
  const Fd listener = listen_as(secret);
  RendezvousClient client;
  EXPECT_FALSE(client.connect(secret, 1200, error));
  EXPECT_NE(error.find("1200 ms"), std::string::npos) << error;
}

// A server that knows the secret and tells nonsense about the job is not believed.
TEST(Rendezvous, AStartThatMakesNoSenseIsRefused) {
  NoLeak leak;
  for (int how = 0; how < 9; ++how) {
    SCOPED_TRACE(how);
    const JobSecret secret = secret_from(static_cast<std::uint64_t>(20 + how));
    const Fd listener = listen_as(secret);
    const FakeServer server(listener, [&](Channel& c) {
      std::string ignored;
      Frame f;
      unjam::HelloMessage hello;
      c.post(number_of(MessageType::kHello), hello.encode());
      c.flush_all(1000, ignored);
      if (!c.await(f, kLongMs, ignored)) return;
      unjam::ProofMessage theirs, mine;
      theirs.decode(f.payload);
      unjam::proof_tag(secret, 's', hello.nonce, theirs.nonce, mine.tag);
      c.post(number_of(MessageType::kProof), mine.encode());
      Fd by, their_end;
      if (!unjam::hand_out_pair(by, their_end)) return;
      const auto hand = [&](MessageType type, std::uint32_t of, std::uint8_t fds = 1) {
        const Fd memory = memory_fd();
        const std::string bytes = HandedMessage{{{of, fds}}}.encode();
        unjam::hand_out(by, type, bytes, {memory.get()}, 1000, ignored);
      };
      unjam::RefusedMessage refused;
      unjam::StartMessage start;
      start.process_of = {0, 1};
      start.pids = {1, 2};
      std::vector<Fd> with;
      if (how != 3) with.push_back(std::move(their_end));
      c.post(number_of(MessageType::kStart), start.encode(), std::move(with));
      // All that belongs to the start is there, and something besides, first.
      if (how == 0) hand(MessageType::kMemory, 63);
      if (how == 1) hand(MessageType::kPeers, 63);
      if (how == 2) hand(MessageType::kPeers, 0);     // itself
      if (how == 6) hand(MessageType::kPeers, 1, 2);  // with one descriptor only
      if (how == 7) hand(MessageType::kMemory, 1);    // twice
      if (how == 8) hand(MessageType::kGone, 1);
      if (how == 4) c.post(number_of(MessageType::kStart), start.encode());
      if (how == 5) c.post(number_of(MessageType::kRefused), refused.encode());  // with success
      c.flush_all(1000, ignored);
      hand(MessageType::kMemory, 1);
      hand(MessageType::kPeers, 1);
    });
    Member m;
    EXPECT_TRUE(m.connect(secret)) << m.error;
    EXPECT_FALSE(m.start());
    EXPECT_FALSE(m.client.started);
  }
}

// ---- descriptors in bulk ----

TEST(HandOut, ManyDescriptorsInOneMessage) {
  NoLeak leak;
  Fd mine, theirs;
  ASSERT_TRUE(unjam::hand_out_pair(mine, theirs));
  std::string error;
  Frame f;
  EXPECT_EQ(unjam::take_handed(theirs, f, error), unjam::Handed::kNothing);
  const Fd first = memory_fd(4096), second = memory_fd(8192);
  std::vector<int> fds;
  for (std::size_t i = 0; i < unjam::kMostHandedFds / 2; ++i) {
    fds.push_back(first.get());
    fds.push_back(second.get());
  }
  ASSERT_TRUE(unjam::hand_out(mine, MessageType::kMemory, "text", fds, 1000, error)) << error;
  fds.push_back(first.get());
  EXPECT_THROW(unjam::hand_out(mine, MessageType::kMemory, "", fds, 1000, error), std::logic_error);
  ASSERT_EQ(unjam::take_handed(theirs, f, error), unjam::Handed::kFrame) << error;
  EXPECT_EQ(f.type, number_of(MessageType::kMemory));
  EXPECT_EQ(f.payload, "text");
  ASSERT_EQ(f.fds.size(), unjam::kMostHandedFds);
  struct stat st{};
  ASSERT_EQ(fstat(f.fds.back().get(), &st), 0);
  EXPECT_EQ(st.st_size, 8192);
  f.fds.clear();
  mine.reset();
  EXPECT_EQ(unjam::take_handed(theirs, f, error), unjam::Handed::kOver);
  EXPECT_EQ(error, "closed by the other end");
}

TEST(HandOut, WhoTakesNothingDoesNotKeepTheSender) {
  Fd mine, theirs;
  ASSERT_TRUE(unjam::hand_out_pair(mine, theirs));
  std::string error;
  const std::string bytes(4096, 'x');
  int sent = 0;
  while (sent < 10000 && unjam::hand_out(mine, MessageType::kPeers, bytes, {}, 20, error)) ++sent;
  EXPECT_LT(sent, 10000);
  EXPECT_EQ(error, "not taken within 20 ms");
  // Nobody is there any more.
  theirs.reset();
  EXPECT_FALSE(unjam::hand_out(mine, MessageType::kPeers, bytes, {}, 20, error));
}

// What a receiver has no descriptors for is lost: it says so, and which limit it is.
TEST(HandOut, TooFewDescriptorsAreSaid) {
  Fd mine, theirs;
  ASSERT_TRUE(unjam::hand_out_pair(mine, theirs));
  std::string error;
  const Fd memory = memory_fd(4096);
  ASSERT_TRUE(
      unjam::hand_out(mine, MessageType::kMemory, "", {memory.get(), memory.get()}, 1000, error));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(memory.get()) + 2;  // descriptors below that
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  Frame f;
  const unjam::Handed how = unjam::take_handed(theirs, f, error);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(how, unjam::Handed::kOver);
  EXPECT_NE(error.find("RLIMIT_NOFILE: raise it with `ulimit -n`"), std::string::npos) << error;
}

// ---- mesh ----

// A mesh, what it was told, and a thread's worth of polling.
struct Listening {
  Mesh mesh;
  std::vector<std::pair<int, Frame>> got;
  std::vector<std::pair<int, bool>> lost;
  std::string why;

  bool poll_until(const std::function<bool()>& done, std::int64_t ms = kLongMs) {
    const Mesh::Events events{[&](int process, const Frame& f) {
                                Frame copy;
                                copy.type = f.type;
                                copy.payload = f.payload;
                                got.emplace_back(process, std::move(copy));
                              },
                              [&](int process, bool died, const std::string& text) {
                                lost.emplace_back(process, died);
                                why = text;
                              }};
    const std::uint64_t end = unjam::monotonic_ns() + static_cast<std::uint64_t>(ms) * 1000000;
    while (!done() && unjam::monotonic_ns() < end) mesh.poll(10, events);
    return done();
  }
};

TEST(ControlMesh, MessagesBothWays) {
  NoLeak leak;
  Listening a, b;
  auto [x, y] = socket_pair();
  a.mesh.add(1, std::move(x), {});
  b.mesh.add(0, std::move(y), {});
  const std::string big(3 << 20, 'b');
  a.mesh.send(1, MessageType::kGone, "one");
  a.mesh.send(1, MessageType::kFail, big);
  a.mesh.send(7, MessageType::kFail, "nobody is there");
  b.mesh.send_all(MessageType::kQuery, "two");
  EXPECT_TRUE(a.poll_until([&] {
    const Mesh::Events ignore{
        [&](int p, const Frame& f) { b.got.emplace_back(p, Frame{f.type, f.payload, {}}); },
        [](int, bool, const std::string&) { FAIL(); }};
    b.mesh.poll(0, ignore);
    return a.got.size() == 1 && b.got.size() == 2;
  }));
  EXPECT_EQ(a.got[0].first, 1);
  EXPECT_EQ(a.got[0].second.payload, "two");
  EXPECT_EQ(b.got[0].second.payload, "one");
  EXPECT_EQ(b.got[1].second.type, number_of(MessageType::kFail));
  EXPECT_TRUE(b.got[1].second.payload == big);
  EXPECT_EQ(a.mesh.live(), std::vector<int>{1});
  // wake() ends a wait that has no limit.
  std::thread waker([&] { sleep_ms(20), a.mesh.wake(); });
  a.mesh.poll(-1, {});
  waker.join();
}

TEST(ControlMesh, AClosedEndIsLostOnceAfterItsLastWords) {
  NoLeak leak;
  Listening a, b;
  auto [x, y] = socket_pair();
  a.mesh.add(1, std::move(x), {});
  Channel other(std::move(y), 1000);
  std::string error;
  other.post(5, "bye");
  ASSERT_TRUE(other.flush(error));
  other.close();
  EXPECT_TRUE(a.poll_until([&] { return !a.lost.empty(); }));
  ASSERT_EQ(a.got.size(), 1u);
  EXPECT_EQ(a.got[0].second.payload, "bye");
  EXPECT_EQ(a.lost[0], std::make_pair(1, false));
  a.mesh.send(1, MessageType::kFail, "nobody is there any more");
  a.poll_until([] { return false; }, 50);
  EXPECT_EQ(a.lost.size(), 1u);
  EXPECT_TRUE(a.mesh.live().empty());
}

TEST(ControlMesh, LastWordsAreHeardWhereSendingFailsFirst) {
  // Something is to be sent when the other end closes: sending fails, perhaps before the last words
  // were seen. Many times, since it is a race.
  for (int i = 0; i < 200; ++i) {
    Listening a;
    auto [x, y] = socket_pair();
    a.mesh.add(1, std::move(x), {});
    std::thread other([&, s = std::move(y)]() mutable {
      Channel c(std::move(s), 1000);
      std::string error;
      c.post(5, "bye");
      c.flush(error);
      c.close();
    });
    while (a.lost.empty()) {
      a.mesh.send(1, MessageType::kFail, "x");
      const Mesh::Events events{
          [&](int p, const Frame& f) { a.got.emplace_back(p, Frame{f.type, f.payload, {}}); },
          [&](int p, bool died, const std::string&) { a.lost.emplace_back(p, died); }};
      a.mesh.poll(0, events);
    }
    other.join();
    ASSERT_EQ(a.got.size(), 1u) << "in round " << i;
  }
}

// took: until a process's death was noticed, in seconds.
void see_a_death(bool with_grandchild, double& took) {
  Listening a;
  int fds[2];
  // Not of class Fd: those are closed in children.
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
  int up[2];
  ASSERT_EQ(pipe2(up, O_CLOEXEC), 0);
  const pid_t child = run_child([&] {
    close(fds[0]);
    pid_t grandchild = 0;
    if (with_grandchild && (grandchild = fork()) == 0) {
      for (;;) sleep_ms(1000);  // holds the socket, and the pipe
    }
    send_raw(fds[1], frame_bytes(5, "bye"));
    if (write(up[1], &grandchild, sizeof(grandchild)) < 0) return 1;
    for (;;) sleep_ms(1000);
    return 0;
  });
  close(fds[1]);
  pid_t grandchild = 0;
  ASSERT_EQ(read(up[0], &grandchild, sizeof(grandchild)), static_cast<ssize_t>(sizeof(grandchild)));
  a.mesh.add(3, Fd(fds[0]), pidfd_of(child));
  EXPECT_TRUE(a.poll_until([&] { return !a.got.empty(); }));
  EXPECT_TRUE(a.lost.empty());
  kill(child, SIGKILL);
  const std::uint64_t before = unjam::monotonic_ns();
  EXPECT_TRUE(a.poll_until([&] { return !a.lost.empty(); }));
  took = seconds_since(before);
  std::printf("  a death%s was noticed after %.1f ms\n",
              with_grandchild ? ", a child of the dead with its socket," : "", took * 1e3);
  // Killed, it may be that its socket closes a moment before its end shows.
  if (with_grandchild) {
    EXPECT_EQ(a.lost.at(0), std::make_pair(3, true)) << a.why;
  }
  EXPECT_EQ(a.got.size(), 1u);
  end_of(child);
  if (grandchild != 0) kill(grandchild, SIGKILL);
  close(up[0]);
  close(up[1]);
}

TEST(ControlMesh, DeathsAreNoticed) {
  NoLeak leak;
  for (const bool with_grandchild : {false, true}) {
    SCOPED_TRACE(with_grandchild);
    // One of three: this process, too, may be kept from running for so long.
    double took = kNoticedSeconds;
    for (int i = 0; i < 3 && took >= kNoticedSeconds && !HasFailure(); ++i) {
      see_a_death(with_grandchild, took);
    }
    EXPECT_LT(took, kNoticedSeconds);
  }
}

TEST(ControlMesh, WhoTakesNoMessagesIsLost) {
  NoLeak leak;
  Listening a;
  auto [x, y] = socket_pair();
  auto [u, v] = socket_pair();
  a.mesh.add(1, std::move(x), {});
  a.mesh.add(2, std::move(u), {});
  const std::string payload(1 << 20, 'x');
  for (int i = 0; i < 200; ++i) a.mesh.send(1, MessageType::kFail, payload);
  a.mesh.send(2, MessageType::kFail, std::string(unjam::kLongestFrame + 1, 'x'));
  EXPECT_TRUE(a.poll_until([&] { return !a.lost.empty(); }));
  EXPECT_EQ(a.lost[0], std::make_pair(1, false));
  EXPECT_NE(a.why.find("takes no messages"), std::string::npos) << a.why;
  EXPECT_EQ(a.mesh.live(), std::vector<int>{2}) << "one too long a message costs nobody his place";
}

TEST(ControlMesh, WhoTalksWithoutEndDoesNotKeepTheOthersWaiting) {
  NoLeak leak;
  Listening a;
  auto [x, y] = socket_pair();
  auto [u, v] = socket_pair();
  a.mesh.add(1, std::move(x), {});
  a.mesh.add(2, std::move(u), {});
  std::atomic<bool> stop{false};
  std::thread talker([&, s = std::move(y)] {
    const std::string frame = frame_bytes(1, std::string(50000, 't'));
    // Framed whatever was taken.
    std::string rest;
    while (!stop) {
      if (rest.empty()) rest = frame;
      const ssize_t n = ::send(s.get(), rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) rest.erase(0, static_cast<std::size_t>(n));
    }
  });
  const bool sent = send_raw(v.get(), frame_bytes(2, "me too"));
  EXPECT_TRUE(sent);
  EXPECT_TRUE(a.poll_until([&] {
    return std::any_of(a.got.begin(), a.got.end(), [](const auto& g) { return g.first == 2; });
  }));
  stop = true;
  talker.join();
}

TEST(ControlMesh, DrainServesAll) {
  NoLeak leak;
  Mesh mesh;
  auto [deaf_a, deaf_b] = socket_pair();
  auto [a, b] = socket_pair();
  mesh.add(0, std::move(deaf_a), {});
  mesh.add(1, std::move(a), {});
  const std::string payload(2 << 20, 'x');
  mesh.send_all(MessageType::kDeparted, payload);
  std::atomic<bool> drained{false};
  std::thread drain([&] {
    mesh.drain(2 * kLongMs);
    drained = true;
  });
  Channel other(std::move(b), unjam::kLongestFrame);
  std::string error;
  Frame f;
  EXPECT_TRUE(other.await(f, kLongMs, error)) << error;
  EXPECT_TRUE(f.payload == payload);
  EXPECT_FALSE(drained) << "not all is sent";
  deaf_b.reset();  // with that nothing is left to be sent
  drain.join();
}

TEST(ControlMesh, DrainHasALimit) {
  NoLeak leak;
  Mesh mesh;
  auto [a, b] = socket_pair();
  mesh.add(0, std::move(a), {});
  mesh.send_all(MessageType::kDeparted, std::string(2 << 20, 'x'));
  const std::uint64_t before = unjam::monotonic_ns();
  mesh.drain(100);
  EXPECT_GE(seconds_since(before), 0.1);
}

}  // namespace
}  // namespace unjam_test
