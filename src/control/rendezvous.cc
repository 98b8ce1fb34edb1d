#include "control/rendezvous.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/limits.h"
#include "base/random_bytes.h"
#include "control/hand_out.h"
#include "control/join_text.h"
#include "control/proof.h"
#include "transport/arena.h"

namespace unjam {
namespace {

// As the C API's results of these names; this layer does not see its header.
constexpr std::int32_t kInvalidUsage = 2, kMismatch = 3;

constexpr std::uint64_t kProofNs = 5'000'000'000;       // for a client to prove itself
constexpr std::uint64_t kOwnServerNs = 20'000'000'000;  // for who keeps the rendezvous to find it
constexpr std::size_t kMostStrangers = 128;             // connections that have not (yet)
// Connections that have proven themselves and have no rank (yet).
constexpr std::size_t kMostIdle = 4096;
constexpr std::int64_t kFarewellMs = 200;  // for the others to take why the job failed
constexpr std::size_t kLongestReason = 4096;
constexpr std::int64_t kHandOutMs = 10000;  // for a client to take what it is sent at the start
// More than all that an honest client is sent before the start: whoever asks for more answers than
// it takes is dropped.
constexpr std::size_t kMostUnsentToClient = 1 << 20;

// Processes that are connected with as many others at a time; descriptors that stay free; for how
// long after the last newcomer, and how long at most, newcomers are told that the job has failed
// for want of them.
constexpr std::size_t kBlock = 8, kSmallBlock = 2, kSpareFiles = 16;
constexpr std::size_t kFewProcesses = 16;  // their blocks are small
constexpr std::uint64_t kDoomedNs = 1'000'000'000, kLongestDoomNs = 10'000'000'000;

// With what each of so many processes has enough: the one that keeps the rendezvous needs most.
std::string files_cure(std::size_t processes) {
  return "`ulimit -n " + std::to_string((6 * processes + 2 * kBlock * kBlock + 255) / 256 * 256) +
         "`";
}

Fd unix_socket() { return Fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

// Whether the process at the other end belongs to our user; its pid.
bool same_user(int fd, std::int64_t& pid, std::string& error) {
  ucred c{};
  socklen_t n = sizeof(c);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &n) != 0) {
    error = std::string("cannot tell who is at the other end: ") + std::strerror(errno);
    return false;
  }
  pid = c.pid;
  if (c.uid == geteuid()) return true;
  error = "the process at the other end belongs to user " + std::to_string(c.uid) +
          ", this one to " + std::to_string(geteuid());
  return false;
}

Fd open_pidfd(std::int64_t pid) {
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
}

constexpr std::uint16_t type_of(MessageType t) { return static_cast<std::uint16_t>(t); }

std::string ranks_text(const std::vector<std::uint32_t>& ranks) {
  std::string t = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    t += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
  }
  return t;
}

}  // namespace

socklen_t rendezvous_address(const JobSecret& secret, sockaddr_un& address) {
  std::uint64_t tag[2];
  const std::uint64_t none[2] = {};
  proof_tag(secret, 'n', none, none, tag);
  address = {};
  address.sun_family = AF_UNIX;
  // A leading NUL: the abstract namespace.
  const int n = std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1,
                              "unjam-%016llx%016llx", static_cast<unsigned long long>(tag[0]),
                              static_cast<unsigned long long>(tag[1]));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(n));
}

// ---- server ----

namespace {

std::string too_few_files_text(std::size_t ranks) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return "the process that keeps the rendezvous (pid " + std::to_string(getpid()) + ") may have " +
         std::to_string(limit.rlim_cur) + " files open (RLIMIT_NOFILE), too few for a job of " +
         (ranks == 0 ? std::string("so many") : std::to_string(ranks)) +
         " ranks: raise it on all ranks" +
         (ranks == 0 ? std::string(" (`ulimit -n`)")
                     : ", for as many processes with " + files_cure(ranks));
}

}  // namespace

RendezvousServer::RendezvousServer(Fd listener, const JobSecret& secret)
    : listener_(std::move(listener)), secret_(secret), stop_(eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) {
    throw std::runtime_error(std::string("eventfd: ") + std::strerror(errno) + limit_text(errno));
  }
  thread_ = std::thread([this] { serve(); });
}

RendezvousServer::~RendezvousServer() {
  const std::uint64_t one = 1;
  if (write(stop_.get(), &one, sizeof(one)) < 0) std::perror("unjam: eventfd");
  thread_.join();
}

void RendezvousServer::serve() {
  pthread_setname_np(pthread_self(), "unjam meet");
  while (!over_) {
    const bool doomed = !doom_.empty();
    std::vector<pollfd> polled = {{doomed ? -1 : stop_.get(), POLLIN, 0},
                                  {listener_.get(), POLLIN, 0}};
    std::uint64_t next = doomed ? std::min(doomed_until_ns_, doomed_at_last_ns_) : UINT64_MAX;
    for (const auto& c : connections_) {
      // Of one that was refused nothing is read any more.
      const short in = c->closing ? 0 : POLLIN;
      const short out = c->channel.pending() ? POLLOUT : 0;
      polled.push_back({c->channel.fd(), static_cast<short>(in | out), 0});
      if (!c->proven || c->closing) next = std::min(next, c->deadline_ns);
    }
    const std::uint64_t now = monotonic_ns();
    const int wait_ms = next == UINT64_MAX ? -1
                        : next <= now      ? 0
                                           : static_cast<int>((next - now) / 1000000 + 1);
    poll(polled.data(), polled.size(), wait_ms);
    // Backwards: drop() moves those behind.
    for (std::size_t i = connections_.size(); i-- > 0 && !over_;) {
      Connection& c = *connections_[i];
      std::string error;
      bool live = true;
      const short events = polled[i + 2].revents;
      if (c.closing) {
        live = (events & (POLLHUP | POLLERR)) == 0;
      } else if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) {
        live = c.channel.receive(error);
        Frame frame;
        while (!over_ && !c.closing && c.channel.pop(frame)) take(c, frame);
        if (over_) break;
        live = live && !c.channel.broken();
      }
      live = live && c.channel.flush(error) && c.channel.pending_bytes() <= kMostUnsentToClient;
      const bool late = (!c.proven || c.closing) && monotonic_ns() >= c.deadline_ns;
      if (!live || late || (c.closing && !c.channel.pending())) drop(i);
    }
    // After the connections: our own process's client may have said why it leaves.
    if (!over_ && polled[0].revents != 0) {
      fail_all("the process that kept the rendezvous (pid " + std::to_string(getpid()) +
                   ") left before all ranks had joined",
               nullptr);
    }
    if (!over_ && polled[1].revents != 0) accept_one();
    if (!over_ && !doomed && ranks_ != 0 && joined_.size() == here_) start();
    over_ = over_ || (doomed && monotonic_ns() >= next);
  }
  // What was said last must arrive.
  for (auto& c : connections_) {
    std::string error;
    if (c->proven) c->channel.flush_all(kFarewellMs, error);
  }
  connections_.clear();
  listener_.reset();
}

void RendezvousServer::accept_one() {
  Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    if (errno != EMFILE && errno != ENFILE) return;
    // The newcomer waits, and must not keep this thread busy meanwhile.
    if (doom_.empty()) doom(too_few_files_text(ranks_));
    usleep(10000);
    return;
  }
  if (doom_.empty() && !has_files_for_newcomer(socket.get())) doom(too_few_files_text(ranks_));
  std::string error;
  std::int64_t pid = 0;
  if (!same_user(socket.get(), pid, error)) return;
  // Those that say nothing must not keep the others out, nor take all descriptors: the oldest goes.
  make_room(false, kMostStrangers);
  make_room(true, kMostIdle);
  auto c = std::make_unique<Connection>();
  c->channel = Channel(std::move(socket), kLongestStrangerFrame);
  c->deadline_ns = monotonic_ns() + kProofNs;
  c->pid = pid;
  fill_random(c->nonce, sizeof(c->nonce));
  HelloMessage hello;
  std::memcpy(hello.nonce, c->nonce, sizeof(hello.nonce));
  c->channel.post(type_of(MessageType::kHello), hello.encode());
  c->channel.flush(error);
  connections_.push_back(std::move(c));
}

// Of connections without a rank, proven or not, one at most goes.
void RendezvousServer::make_room(bool proven, std::size_t most) {
  std::size_t count = 0, oldest = 0;
  for (std::size_t i = connections_.size(); i-- > 0;) {
    if (connections_[i]->proven != proven || !connections_[i]->ranks.empty()) continue;
    ++count;
    oldest = i;
  }
  if (count >= most) drop(oldest);
}

void RendezvousServer::take(Connection& c, Frame& frame) {
  if (!c.proven) {
    prove(c, frame);
  } else if (frame.type == type_of(MessageType::kJoin)) {
    join(c, frame);
  } else if (frame.type == type_of(MessageType::kWho) && frame.payload.empty()) {
    tell_who(c);
  } else if (FailedMessage m;
             frame.type == type_of(MessageType::kFailed) && m.decode(frame.payload)) {
    fail_all(m.text, &c);
  } else {
    refuse(c, -1, kInvalidUsage, "a message that has no place in a rendezvous");
  }
}

void RendezvousServer::prove(Connection& c, const Frame& frame) {
  ProofMessage proof;
  if (frame.type != type_of(MessageType::kProof) || !proof.decode(frame.payload)) {
    refuse(c, -1, kInvalidUsage, "a stranger: the first message was no proof of the secret");
    return;
  }
  if (proof.version != kProtocolVersion) {
    refuse(c, -1, kMismatch,
           "version " + std::to_string(proof.version) + " of the protocol, the others speak " +
               std::to_string(kProtocolVersion) + ": use one version of unjam on all ranks");
    return;
  }
  std::uint64_t expected[2];
  proof_tag(secret_, 'c', c.nonce, proof.nonce, expected);
  if (!same_tag(expected, proof.tag)) {
    refuse(c, -1, kInvalidUsage, "the wrong secret: use the unique id of this job on all ranks");
    return;
  }
  c.proven = true;
  c.channel.set_longest(kLongestJoinFrame);
  ProofMessage mine;
  proof_tag(secret_, 's', c.nonce, proof.nonce, mine.tag);
  c.channel.post(type_of(MessageType::kProof), mine.encode());
  if (doom_.empty()) return;
  FailedMessage m;
  m.text = doom_;
  c.channel.post(type_of(MessageType::kFailed), m.encode());
  c.closing = true;
  c.deadline_ns = monotonic_ns() + kProofNs;
  doomed_until_ns_ = monotonic_ns() + kDoomedNs;
}

void RendezvousServer::join(Connection& c, Frame& frame) {
  JoinMessage m;
  if (!m.decode(frame.payload) || frame.fds.empty()) {
    refuse(c, -1, kInvalidUsage, "a join that makes no sense");
    return;
  }
  const auto rank = static_cast<std::int32_t>(m.rank);
  if (ranks_ != 0 && m.ranks != ranks_) {
    refuse(c, rank, kMismatch, ranks_differ_text(m.ranks, ranks_));
    fail_all("rank " + std::to_string(rank) + " (process " + std::to_string(c.pid) +
                 ") says that the job has " + std::to_string(m.ranks) + " ranks, rank " +
                 std::to_string(first_rank_) + " says " + std::to_string(ranks_) +
                 ": give the same number everywhere",
             &c);
    return;
  }
  if (joined_.count(m.rank) != 0) {
    refuse(c, rank, kInvalidUsage,
           "rank " + std::to_string(rank) + " has joined this job already (in process " +
               std::to_string(joined_[m.rank].connection->pid) +
               "): give every rank a number of its own");
    return;
  }
  if (ranks_ == 0) {
    ranks_ = m.ranks;
    here_ = m.here == 0 ? m.ranks : m.here;
    first_rank_ = m.rank;
    settings_ = m.settings;
    first_host_ = m.host;
    arena_bytes_ = m.arena_bytes;
  } else if (m.host.empty() != first_host_.empty()) {
    const std::string text =
        m.host.empty() ? host_missing_text(static_cast<int>(first_rank_), first_host_, rank)
                       : host_missing_text(rank, m.host, static_cast<int>(first_rank_));
    refuse(c, rank, kMismatch, text);
    fail_all(text, &c);
    return;
  } else if (m.settings != settings_ || m.arena_bytes != arena_bytes_) {
    const std::string text =
        m.settings != settings_
            ? settings_differ_text(static_cast<int>(first_rank_), settings_, rank, m.settings)
            : "ranks " + std::to_string(first_rank_) + " and " + std::to_string(rank) +
                  " would make shared memory of different sizes: use one version of unjam";
    refuse(c, rank, kMismatch, text);
    fail_all(text, &c);
    return;
  }
  c.ranks.push_back(m.rank);
  c.files = m.files;
  add_cpus(m.cpus, &cpus_);
  joined_[m.rank] = {&c, std::move(frame.fds), m.host};
}

// Only who asks is told: n joins told to n processes would be n² messages.
void RendezvousServer::tell_who(Connection& c) {
  PresentMessage m;
  m.joined.resize((ranks_ + 63) / 64);
  for (const auto& [r, entry] : joined_) m.joined[r / 64] |= std::uint64_t{1} << r % 64;
  c.channel.post(type_of(MessageType::kPresent), m.encode());
}

void RendezvousServer::refuse(Connection& c, std::int32_t rank, std::int32_t code,
                              const std::string& text) {
  RefusedMessage m;
  m.rank = rank;
  m.code = code;
  m.text = text;
  c.channel.post(type_of(MessageType::kRefused), m.encode());
  if (rank >= 0) return;  // the connection may have other ranks
  c.closing = true;
  c.deadline_ns = monotonic_ns() + kProofNs;
}

// The job will not come to be.
void RendezvousServer::fail_all(const std::string& text, const Connection* but) {
  FailedMessage m;
  m.text = text;
  const std::string bytes = m.encode();
  for (auto& c : connections_) {
    if (c->proven && c.get() != but) c->channel.post(type_of(MessageType::kFailed), bytes);
  }
  over_ = true;
}

// Whether there will be descriptors for what it sends, and what the others who are there have yet
// to send. (They are numbered from the lowest on.)
bool RendezvousServer::has_files_for_newcomer(int newest) const {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return true;
  std::size_t silent = 1;
  for (const auto& c : connections_) silent += c->ranks.empty() ? 1 : 0;
  return static_cast<std::size_t>(newest) + kMaxFrameFds * silent + kSpareFiles < limit.rlim_cur;
}

// As fail_all(), and tells those that come later: they would wait for each other in vain.
void RendezvousServer::doom(const std::string& text) {
  fail_all(text, nullptr);
  over_ = false;
  doom_ = text;
  doomed_until_ns_ = monotonic_ns() + kDoomedNs;
  doomed_at_last_ns_ = monotonic_ns() + kLongestDoomNs;
  joined_.clear();
  for (auto& c : connections_) {
    c->ranks.clear();
    if (!c->proven) continue;
    c->closing = true;
    c->deadline_ns = monotonic_ns() + kProofNs;
  }
}

void RendezvousServer::drop(std::size_t index) {
  std::unique_ptr<Connection> gone = std::move(connections_[index]);
  connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(index));
  if (gone->ranks.empty()) return;
  fail_all(ranks_text(gone->ranks) + " (process " + std::to_string(gone->pid) +
               ") left before all ranks had joined",
           nullptr);
}

void RendezvousServer::start() {
  over_ = true;
  listener_.reset();
  std::vector<Connection*> processes;
  StartMessage m;
  m.process_of.resize(ranks_, StartMessage::kElsewhere);
  m.cpus = cpus_;
  for (auto& c : connections_) {
    if (!c->ranks.empty()) processes.push_back(c.get());
  }
  for (const auto& [rank, entry] : joined_) {
    if (entry.host.empty()) break;  // as of all
    const auto at = std::find(m.hosts.begin(), m.hosts.end(), entry.host);
    m.host_of.push_back(static_cast<std::uint32_t>(at - m.hosts.begin()));
    if (at == m.hosts.end()) m.hosts.push_back(entry.host);
  }
  // This process comes last: with what it gets last it begins, and may end at once, and what others
  // were not sent by then would be lost with it.
  std::stable_partition(processes.begin(), processes.end(),
                        [](const Connection* c) { return c->pid != getpid(); });
  for (std::size_t p = 0; p < processes.size(); ++p) {
    for (const auto r : processes[p]->ranks) m.process_of[r] = static_cast<std::uint32_t>(p);
    m.pids.push_back(processes[p]->pid);
  }
  if (!enough_files(processes)) return;
  const bool alone = processes.size() == 1;
  for (std::size_t p = 0; p < processes.size(); ++p) {
    Connection& c = *processes[p];
    std::vector<Fd> theirs(alone ? 0 : 1);
    if (!alone && !hand_out_pair(c.handed, theirs[0])) {
      fail_all(std::string("cannot hand out what ranks share: ") + std::strerror(errno) +
                   limit_text(errno),
               nullptr);
      return;
    }
    m.me = static_cast<std::uint32_t>(p);
    c.channel.post(type_of(MessageType::kStart), m.encode(), std::move(theirs));
    std::string error;
    if (!c.channel.flush_all(kHandOutMs, error)) c.handed.reset();
    hand_memory(processes, p);
  }
  joined_.clear();
  std::vector<Fd> pidfds;
  for (const Connection* c : processes) pidfds.push_back(alone ? Fd() : open_pidfd(c->pid));
  // In blocks: of the sockets between two blocks all are made, then each process gets its part of
  // them at once, and few are open at a time.
  std::vector<std::vector<std::size_t>> blocks;
  const std::size_t block = processes.size() <= kFewProcesses ? kSmallBlock : kBlock;
  for (std::size_t p = 0; p < processes.size(); ++p) {
    if (p % block == 0) blocks.emplace_back();
    blocks.back().push_back(p);
  }
  for (std::size_t j = 0; j < blocks.size(); ++j) {
    for (std::size_t i = 0; i <= j; ++i) {
      if (!hand_peers(processes, blocks[i], blocks[j], pidfds)) return;
    }
  }
}

// Whether every process may open what it gets; if not, the job fails.
bool RendezvousServer::enough_files(const std::vector<Connection*>& processes) {
  const std::size_t others = processes.size() - 1;
  std::size_t memory = 0;
  for (const auto& [rank, entry] : joined_) memory += entry.memory.size();
  for (const Connection* c : processes) {
    std::size_t need = kSpareFiles + memory + 2 * others;
    std::uint64_t has = c->files;
    if (c->pid == getpid()) {  // it keeps the rendezvous besides
      need += 2 * processes.size() + 2 * kBlock * kBlock;
      has = files_left();
    }
    if (others == 0 || has >= need) continue;
    fail_all(ranks_text(c->ranks) + " (process " + std::to_string(c->pid) + ") may have " +
                 std::to_string(has) + " more files open (RLIMIT_NOFILE), and needs " +
                 std::to_string(need) + " in a job of " + std::to_string(processes.size()) +
                 " processes: raise it on all ranks with " + files_cure(processes.size()),
             nullptr);
    return false;
  }
  return true;
}

// Who does not take it is left alone: the others find the other end of their socket closed.
bool RendezvousServer::hand(Connection& c, MessageType type, const std::vector<std::uint32_t>& of,
                            const std::vector<std::vector<int>>& fds) {
  for (std::size_t begin = 0; begin < of.size() && c.handed; begin += kMostHanded) {
    HandedMessage m;
    std::vector<int> all;
    for (std::size_t i = begin; i < of.size() && i < begin + kMostHanded; ++i) {
      m.items.push_back({of[i], static_cast<std::uint8_t>(fds[i].size())});
      all.insert(all.end(), fds[i].begin(), fds[i].end());
    }
    std::string error;
    if (!hand_out(c.handed, type, m.encode(), all, kHandOutMs, error)) c.handed.reset();
  }
  return static_cast<bool>(c.handed);
}

void RendezvousServer::hand_memory(const std::vector<Connection*>& processes, std::size_t to) {
  std::vector<std::uint32_t> of;
  std::vector<std::vector<int>> fds;
  for (const auto& [rank, entry] : joined_) {
    if (entry.connection == processes[to]) continue;
    of.push_back(rank);
    fds.emplace_back();
    for (const Fd& memory : entry.memory) fds.back().push_back(memory.get());
  }
  hand(*processes[to], MessageType::kMemory, of, fds);
}

// Connects the processes of two blocks, or, if they are the same, of one.
bool RendezvousServer::hand_peers(const std::vector<Connection*>& processes,
                                  const std::vector<std::size_t>& some,
                                  const std::vector<std::size_t>& others,
                                  const std::vector<Fd>& pidfds) {
  std::vector<Fd> sockets;
  struct Part {
    std::vector<std::uint32_t> of;
    std::vector<std::vector<int>> fds;
  };
  std::map<std::size_t, Part> parts;  // by process: the last one is this
  const auto add = [&](std::size_t to, std::size_t of, int socket) {
    Part& part = parts[to];
    part.of.push_back(static_cast<std::uint32_t>(of));
    part.fds.push_back({socket});
    // Without a pidfd (an old kernel) the socket alone tells of a death.
    if (pidfds[of]) part.fds.back().push_back(pidfds[of].get());
  };
  for (const std::size_t p : some) {
    for (const std::size_t q : others) {
      if (p >= q) continue;
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
        fail_all(std::string("cannot connect two processes: ") + std::strerror(errno) +
                     limit_text(errno),
                 nullptr);
        return false;
      }
      sockets.emplace_back(pair[0]);
      sockets.emplace_back(pair[1]);
      add(p, q, pair[0]);
      add(q, p, pair[1]);
    }
  }
  for (const auto& [to, part] : parts) hand(*processes[to], MessageType::kPeers, part.of, part.fds);
  return true;
}

// ---- client ----

// The socket of who keeps the rendezvous; where nobody does, this process keeps it from now on.
RendezvousClient::Attempt RendezvousClient::find(const JobSecret& secret, Fd& socket,
                                                 std::string& error) {
  sockaddr_un address;
  const socklen_t size = rendezvous_address(secret, address);
  const auto* target = reinterpret_cast<const sockaddr*>(&address);
  socket = unix_socket();
  if (!socket) {
    error = std::string("cannot open a socket: ") + std::strerror(errno) + limit_text(errno);
    return Attempt::kFailed;
  }
  if (::connect(socket.get(), target, size) != 0) {
    const int why = errno;
    if (why == EAGAIN) {  // its queue of new connections is full
      usleep(2000);
      return Attempt::kAgain;
    }
    if (why != ECONNREFUSED) {
      error = std::string("cannot connect to the rendezvous: ") + std::strerror(why);
      return Attempt::kFailed;
    }
    // Nobody is there: we are.
    Fd listener = unix_socket();
    if (listener && bind(listener.get(), target, size) == 0 && listen(listener.get(), 256) == 0) {
      try {
        server_ = std::make_unique<RendezvousServer>(std::move(listener), secret);
      } catch (const std::system_error& e) {
        error =
            std::string("cannot keep the rendezvous: ") + e.what() + limit_text(e.code().value());
        return Attempt::kFailed;
      } catch (const std::exception& e) {
        error = std::string("cannot keep the rendezvous: ") + e.what();
        return Attempt::kFailed;
      }
    } else if (errno != EADDRINUSE) {
      error = std::string("cannot make the rendezvous: ") + std::strerror(errno);
      return Attempt::kFailed;
    } else {
      usleep(1000);  // bound by another process, which is about to listen
    }
    return Attempt::kAgain;
  }
  return Attempt::kDone;
}

// Each end proves to the other that it knows the secret.
RendezvousClient::Attempt RendezvousClient::greet(const JobSecret& secret, Fd socket,
                                                  std::string& error) {
  std::int64_t pid = 0;
  if (!same_user(socket.get(), pid, error)) {
    error.insert(0, "the rendezvous of this job is held by somebody else: ");
    return Attempt::kFailed;
  }
  Channel channel(std::move(socket), kLongestStrangerFrame);
  Frame frame;
  HelloMessage hello;
  // A server that ends just now (its job is complete, or failed) leaves us without an answer: the
  // next attempt finds no server, or the next one.
  if (!channel.await(frame, 1000, error)) {
    usleep(1000);
    return Attempt::kAgain;
  }
  if (frame.type != type_of(MessageType::kHello) || !hello.decode(frame.payload)) {
    error = "what answered at the rendezvous is not unjam";
    return Attempt::kFailed;
  }
  if (hello.version != kProtocolVersion) {
    error = "another rank speaks version " + std::to_string(hello.version) +
            " of the protocol, this one " + std::to_string(kProtocolVersion) +
            ": use one version of unjam on all ranks";
    return Attempt::kFailed;
  }
  ProofMessage proof;
  fill_random(proof.nonce, sizeof(proof.nonce));
  proof_tag(secret, 'c', hello.nonce, proof.nonce, proof.tag);
  channel.post(type_of(MessageType::kProof), proof.encode());
  if (!channel.flush_all(1000, error) || !channel.await(frame, 5000, error)) {
    usleep(1000);
    return Attempt::kAgain;
  }
  ProofMessage theirs;
  RefusedMessage refusal;
  if (frame.type == type_of(MessageType::kRefused) && refusal.decode(frame.payload)) {
    error = "refused at the rendezvous: " + refusal.text;
    return Attempt::kFailed;
  }
  std::uint64_t expected[2];
  proof_tag(secret, 's', hello.nonce, proof.nonce, expected);
  if (frame.type != type_of(MessageType::kProof) || !theirs.decode(frame.payload) ||
      !same_tag(expected, theirs.tag)) {
    error = "the process at the rendezvous (pid " + std::to_string(pid) +
            ") does not know this job's secret";
    return Attempt::kFailed;
  }
  channel.set_longest(kLongestFrame);
  channel_ = std::move(channel);
  return Attempt::kDone;
}

bool RendezvousClient::connect(const JobSecret& secret, std::int64_t timeout_ms,
                               std::string& error) {
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1000000;
  for (Attempt attempt = Attempt::kAgain; attempt == Attempt::kAgain;) {
    // (Who keeps it finds it, sooner or later: how long to wait for others is up to the caller.)
    if (monotonic_ns() >= deadline + (server_ != nullptr ? kOwnServerNs : 0)) {
      error = server_ != nullptr ? "the rendezvous that this process keeps does not answer"
                                 : "no rendezvous within " + std::to_string(timeout_ms) + " ms";
      return false;
    }
    Fd socket;
    attempt = find(secret, socket, error);
    if (attempt == Attempt::kDone) attempt = greet(secret, std::move(socket), error);
    if (attempt == Attempt::kDone) return true;
  }
  return false;
}

void RendezvousClient::join(const JoinMessage& message, std::vector<Fd> memory) {
  channel_.post(type_of(MessageType::kJoin), message.encode(), std::move(memory));
}

void RendezvousClient::flush() {
  std::string unused;
  channel_.flush(unused);
}

bool RendezvousClient::receive(std::string& error) {
  bool live = true;
  Frame frame;
  const auto hear = [&](std::string& why) {
    live = channel_.receive(why);
    while (channel_.pop(frame)) {
      if (!take(frame, why)) return false;
    }
    if (live && channel_.broken()) live = channel_.receive(why);
    return true;
  };
  if (!hear(error)) return false;
  while (handed_ && !started) {
    const Handed how = take_handed(handed_, frame, error);
    if (how == Handed::kNothing) break;
    if (how == Handed::kOver) {
      std::string unused;
      hear(unused);  // the server's last words, which were said before
      return false;
    }
    if (!take_handed_over(frame)) {
      error = "a message that has no place in a rendezvous";
      return false;
    }
    if (!complete()) continue;
    // What the server said on the channel before it handed the last of them counts as well: a
    // failure, or a second start, which a start without this look would never hear of.
    if (live && !hear(error)) {
      started = false;
      return false;
    }
    started = failed.empty();
  }
  return live || started || handed_;
}

bool RendezvousClient::take(Frame& frame, std::string& error) {
  bool good = false;
  switch (static_cast<MessageType>(frame.type)) {
    case MessageType::kPresent: {
      PresentMessage m;
      good = m.decode(frame.payload);
      if (good) present = std::move(m);
      break;
    }
    case MessageType::kRefused: {
      RefusedMessage m;
      // No other code is sent; as a result it would mean something else, success for one.
      good = m.decode(frame.payload) && (m.code == kInvalidUsage || m.code == kMismatch);
      if (!good) break;
      if (m.rank < 0) {
        failed = m.text.empty() ? "refused" : m.text;
      } else {
        refused[m.rank] = m;
      }
      break;
    }
    case MessageType::kFailed: {
      FailedMessage m;
      good = m.decode(frame.payload);
      failed = m.text.empty() ? "no reason given" : m.text;
      break;
    }
    case MessageType::kStart:
      good = !start_known_ && start.decode(frame.payload) &&
             frame.fds.size() == (start.pids.size() == 1 ? 0 : 1);
      start_known_ = good;
      if (good && !frame.fds.empty()) handed_ = std::move(frame.fds[0]);
      break;
    default:
      break;
  }
  if (!good) {
    error = "a message that has no place in a rendezvous";
    return false;
  }
  started = start_known_ && failed.empty() && complete();
  return true;
}

// Each item's descriptors, in order; empty: they are not what the message says.
static std::vector<std::pair<int, std::vector<Fd>>> deal(Frame& frame) {
  HandedMessage m;
  std::vector<std::pair<int, std::vector<Fd>>> dealt;
  if (!m.decode(frame.payload)) return dealt;
  std::size_t at = 0;
  for (const HandedMessage::Item& item : m.items) {
    if (frame.fds.size() - at < item.fds) return {};
    auto& [of, fds] = dealt.emplace_back(static_cast<int>(item.of), std::vector<Fd>{});
    for (std::size_t i = 0; i < item.fds; ++i) fds.push_back(std::move(frame.fds[at++]));
  }
  if (at != frame.fds.size()) dealt.clear();
  return dealt;
}

bool RendezvousClient::take_handed_over(Frame& frame) {
  auto dealt = deal(frame);
  for (auto& [of, fds] : dealt) {
    if (frame.type == type_of(MessageType::kMemory)) {
      if (!memory.try_emplace(of, std::move(fds)).second) return false;
    } else if (frame.type == type_of(MessageType::kPeers)) {
      const auto [place, fresh] = peers.try_emplace(of);
      if (!fresh) return false;
      place->second.socket = std::move(fds[0]);
      if (fds.size() == 2) place->second.pidfd = std::move(fds[1]);
    } else {
      return false;
    }
  }
  return !dealt.empty();
}

// Exactly what the start speaks of, so that nobody has to doubt ranks and processes later.
bool RendezvousClient::complete() const {
  std::size_t foreign = 0;
  for (std::size_t r = 0; r < start.process_of.size(); ++r) {
    if (start.process_of[r] == start.me || start.process_of[r] == StartMessage::kElsewhere)
      continue;
    if (memory.count(static_cast<int>(r)) == 0) return false;
    ++foreign;
  }
  for (std::size_t p = 0; p < start.pids.size(); ++p) {
    if (p != start.me && peers.count(static_cast<int>(p)) == 0) return false;
  }
  return memory.size() == foreign && peers.size() + 1 == start.pids.size();
}

void RendezvousClient::ask_who() {
  present.reset();
  channel_.post(type_of(MessageType::kWho), "");
}

void RendezvousClient::fail(const std::string& why) {
  FailedMessage m;
  m.text = why.substr(0, kLongestReason);
  channel_.post(type_of(MessageType::kFailed), m.encode());
  std::string unused;
  channel_.flush_all(kFarewellMs, unused);
}

void RendezvousClient::leave() {
  channel_.close();
  handed_.reset();
  server_.reset();
  memory.clear();
  peers.clear();
}

}  // namespace unjam
