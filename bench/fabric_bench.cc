// Carriers beside plain TCP sockets, between two processes over the loopback device: half a round
// trip of one frame, and a stream of frames of 64 KiB of which 16 are under way, each answered. All
// take turns in every round; printed are medians of rounds, and of rounds' ratios.
//
//   fabric_bench [--rounds N] [--ucx libucp.so.0] [--plugin libnccl-net-X.so]
//
// Whoever waits polls and yields. UCX is left out where it is not found.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "transport/network/plugin_fabric.h"
#include "transport/network/ucx_fabric.h"

namespace {

using unjam::Fabric;
using unjam::FrameBytes;
using unjam::FrameChannel;
using unjam::kFrameBytes;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMostBytes = 64 << 10, kShortBytes = 8 << 10;
constexpr std::uint32_t kSizes[] = {64, 8 << 10, 64 << 10};
constexpr int kTrips[] = {300, 200, 100};
constexpr int kStreamed = 400, kUnderWay = 16;

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "fabric_bench: %s\n", why.c_str());
  std::exit(1);
}

void write_all(int fd, const void* from, std::size_t bytes) {
  if (write(fd, from, bytes) != static_cast<ssize_t>(bytes)) stop("the other process is gone");
}
void read_all(int fd, void* to, std::size_t bytes) {
  if (recv(fd, to, bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) {
    stop("the other process is gone");
  }
}
std::string exchanged(int fd, const std::string& mine) {
  std::uint64_t bytes = mine.size();
  write_all(fd, &bytes, sizeof(bytes));
  write_all(fd, mine.data(), mine.size());
  read_all(fd, &bytes, sizeof(bytes));
  std::string theirs(bytes, '\0');
  read_all(fd, theirs.data(), bytes);
  return theirs;
}

// One end of a carrier.
class End {
 public:
  virtual ~End() = default;
  virtual bool send(std::uint32_t bytes) = 0;  // false: no room now
  virtual bool poll() = 0;                     // whether anything moved

  std::uint64_t received = 0;
  bool may_end = false;  // the other process is through

 protected:
  std::vector<unsigned char> from_ = std::vector<unsigned char>(kMostBytes, 7),
                             to_ = std::vector<unsigned char>(kMostBytes);
};

// A head and its payload on a socket: what a carrier of our own would have to do at least.
class Sockets final : public End {
 public:
  Sockets(int self, int to_other) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener, generic, length) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, generic, &length) != 0) {
      stop("cannot listen");
    }
    const std::string port =
        exchanged(to_other, {reinterpret_cast<const char*>(&address.sin_port), 2});
    if (self == 0) {
      fd_ = accept(listener, nullptr, nullptr);
    } else {
      std::memcpy(&address.sin_port, port.data(), 2);
      fd_ = socket(AF_INET, SOCK_STREAM, 0);
      if (connect(fd_, generic, sizeof(address)) != 0) stop("cannot connect");
    }
    close(listener);
    const int one = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  }
  ~Sockets() override { close(fd_); }

  bool send(std::uint32_t bytes) override {
    if (left_ != 0) return false;
    std::memcpy(head_, &bytes, sizeof(bytes));
    size_ = left_ = kFrameBytes + bytes;
    push();
    return true;
  }
  bool poll() override {
    bool moved = left_ != 0 && push();
    for (;;) {
      std::uint32_t bytes = 0;
      std::memcpy(&bytes, came_, sizeof(bytes));
      const std::uint32_t whole = kFrameBytes + (have_ < kFrameBytes ? 0 : bytes);
      if (have_ == whole && have_ >= kFrameBytes) {
        have_ = 0;
        ++received;
        return true;
      }
      unsigned char* const at = have_ < kFrameBytes ? came_ + have_ : &to_[have_ - kFrameBytes];
      const ssize_t n = recv(fd_, at, whole - have_, MSG_DONTWAIT);
      if (n <= 0) return moved;
      have_ += static_cast<std::uint32_t>(n);
      moved = true;
    }
  }

 private:
  bool push() {
    const std::uint32_t done = size_ - left_;
    iovec parts[2] = {
        {head_ + std::min(done, kFrameBytes), kFrameBytes - std::min(done, kFrameBytes)},
        {nullptr, 0}};
    const std::uint32_t of_payload = done < kFrameBytes ? 0 : done - kFrameBytes;
    parts[1] = {&from_[of_payload], size_ - kFrameBytes - of_payload};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t n = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) left_ -= static_cast<std::uint32_t>(n);
    return n > 0;
  }

  int fd_ = -1;
  unsigned char head_[kFrameBytes] = {}, came_[kFrameBytes] = {};
  std::uint32_t size_ = 0, left_ = 0;  // of what is being sent
  std::uint32_t have_ = 0;
};

class Carried : public End, public unjam::FabricSink {
 public:
  bool send(std::uint32_t bytes) override {
    FrameBytes head;
    std::memcpy(head.bytes, &bytes, sizeof(bytes));
    return fabric().send(other_, bytes <= kShortBytes ? FrameChannel::kShort : FrameChannel::kBulk,
                         head, from_.data(), bytes, 0);
  }
  bool poll() override { return fabric().poll(*this); }

  unjam::Landing land(std::uint32_t, const FrameBytes& head) override {
    unjam::Landing to;
    std::memcpy(&to.bytes, head.bytes, sizeof(to.bytes));
    to.at = to_.data();
    return to;
  }
  void arrived(std::uint32_t, const FrameBytes&, std::uint64_t) override { ++received; }
  void sent(std::uint32_t, std::uint64_t) override {}
  void broken(std::uint32_t, const char* why) override {
    if (!may_end) stop(why);
  }

 protected:
  explicit Carried(int self)
      : self_(static_cast<std::uint32_t>(self)), other_(static_cast<std::uint32_t>(1 - self)) {}
  virtual Fabric& fabric() = 0;
  const std::uint32_t self_, other_;
};

class OverUcx final : public Carried {
 public:
  OverUcx(int self, int to_other, const unjam::UcxLibrary& ucx) : Carried(self) {
    unjam::UcxFabricSettings s;
    s.processes = 2;
    s.self = self_;
    s.most_payload = kMostBytes;
    s.transports = "tcp";
    s.devices = "lo";
    std::string error;
    fabric_ = unjam::UcxFabric::make(ucx, s, error);
    if (fabric_ == nullptr ||
        !fabric_->meet(other_, exchanged(to_other, fabric_->invite(other_)), error)) {
      stop(error);
    }
  }

 private:
  Fabric& fabric() override { return *fabric_; }
  std::unique_ptr<unjam::UcxFabric> fabric_;
};

class OverPlugin final : public Carried {
 public:
  OverPlugin(int self, int to_other, unjam::NetPlugin& plugin) : Carried(self) {
    unjam::PluginFabricSettings s;
    s.processes = 2;
    s.self = self_;
    s.most_payload = kMostBytes;
    s.memory = {{from_.data(), from_.size()}, {to_.data(), to_.size()}};
    std::string error;
    fabric_ = unjam::PluginFabric::make(plugin, s, error);
    unjam::PluginAddress mine, theirs;
    if (fabric_ == nullptr || !fabric_->invite(other_, &mine, error)) stop(error);
    const std::string text =
        exchanged(to_other, {reinterpret_cast<const char*>(&mine), sizeof(mine)});
    std::memcpy(&theirs, text.data(), sizeof(theirs));
    if (!fabric_->meet(other_, theirs, error)) stop(error);
    while (!fabric_->met(other_)) poll();
  }

 private:
  Fabric& fabric() override { return *fabric_; }
  std::unique_ptr<unjam::PluginFabric> fabric_;
};

void await(End& end, std::uint64_t received) {
  while (end.received < received) {
    if (!end.poll()) sched_yield();
  }
}
void send_one(End& end, std::uint32_t bytes) {
  while (!end.send(bytes)) {
    if (!end.poll()) sched_yield();
  }
}
// Until the other process, too, has all that it waits for. (Some carriers send what they were given
// only when they are asked again.)
void settle(End& end, int to_other) {
  char done = 0;
  write_all(to_other, &done, 1);
  while (recv(to_other, &done, 1, MSG_DONTWAIT) != 1) {
    if (!end.poll()) sched_yield();
  }
}
double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

// Half a round trip in us, of self 0.
double trips(End& end, int self, std::uint32_t bytes, int count) {
  std::vector<double> all;
  for (int i = 0; i < count; ++i) {
    const auto begin = Clock::now();
    if (self == 0) send_one(end, bytes);
    await(end, end.received + 1);
    if (self == 1) send_one(end, bytes);
    all.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / 2);
  }
  return median(all);
}

// GB/s, of self 0.
double stream(End& end, int self) {
  const std::uint64_t first = end.received;
  const auto begin = Clock::now();
  for (int i = 0; i < kStreamed; ++i) {
    if (self == 0) {
      if (i >= kUnderWay) await(end, first + static_cast<std::uint64_t>(i - kUnderWay + 1));
      send_one(end, kMostBytes);
    } else {
      await(end, first + static_cast<std::uint64_t>(i + 1));
      send_one(end, 0);
    }
  }
  if (self == 0) await(end, first + kStreamed);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return double{kMostBytes} * kStreamed / seconds / 1e9;
}

struct Carrier {
  std::string name;
  std::unique_ptr<End> end;
  std::vector<double> figures[4];  // a round
};

int run(int self, int to_other, int rounds, const std::string& ucx_file,
        const std::string& plugin_file) {
  std::unique_ptr<unjam::NetPlugin> plugin;  // outlives what uses it
  std::vector<Carrier> all;
  all.push_back({"sockets", std::make_unique<Sockets>(self, to_other), {}});
  std::string error;
  const unjam::UcxLibrary* const ucx = unjam::UcxLibrary::load(ucx_file, error);
  if (ucx != nullptr) {
    all.push_back({ucx->title().substr(0, ucx->title().find(" (")),
                   std::make_unique<OverUcx>(self, to_other, *ucx),
                   {}});
  } else if (self == 0) {
    std::printf("left out: %s\n", error.c_str());
  }
  if (!plugin_file.empty()) {
    plugin = unjam::NetPlugin::load(plugin_file, error);
    if (plugin == nullptr) stop(error);
    all.push_back({plugin->name() + " v" + std::to_string(plugin->version()),
                   std::make_unique<OverPlugin>(self, to_other, *plugin),
                   {}});
  }
  for (int round = -1; round < rounds; ++round) {  // the first is not counted
    for (Carrier& c : all) {
      for (std::size_t k = 0; k < 4; ++k) {
        const double figure =
            k < 3 ? trips(*c.end, self, kSizes[k], kTrips[k]) : stream(*c.end, self);
        settle(*c.end, to_other);
        if (round >= 0) c.figures[k].push_back(figure);
      }
    }
  }
  for (Carrier& c : all) {
    c.end->may_end = true;
    settle(*c.end, to_other);
  }
  if (self == 1) return 0;
  std::printf("%-16s %10s %10s %10s %12s   (%d rounds)\n", "carrier", "64 B, us", "8 KiB, us",
              "64 KiB, us", "stream, GB/s", rounds);
  for (const Carrier& c : all) {
    std::printf("%-16s", c.name.c_str());
    for (std::size_t k = 0; k < 4; ++k) {
      std::printf(k < 3 ? " %10.1f" : " %12.2f", median(c.figures[k]));
    }
    std::printf("\n");
  }
  for (const Carrier& c : all) {
    if (&c == &all[0]) continue;
    // As many times as fast as sockets.
    std::printf("%-16s", "  beside sockets");
    for (std::size_t k = 0; k < 4; ++k) {
      std::vector<double> ratios;
      for (std::size_t r = 0; r < c.figures[k].size(); ++r) {
        const double here = c.figures[k][r], there = all[0].figures[k][r];
        ratios.push_back(k < 3 ? there / here : here / there);
      }
      std::printf(k < 3 ? " %9.2fx" : " %11.2fx", median(ratios));
    }
    std::printf("   %s\n", c.name.c_str());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 11;
  std::string ucx, plugin;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (i + 1 == argc) stop("usage: fabric_bench [--rounds N] [--ucx FILE] [--plugin FILE]");
    const std::string value = argv[++i];
    if (option == "--rounds" && std::atoi(value.c_str()) > 0) {
      rounds = std::atoi(value.c_str());
    } else if (option == "--ucx") {
      ucx = value;
    } else if (option == "--plugin") {
      plugin = value;
    } else {
      stop("usage: fabric_bench [--rounds N] [--ucx FILE] [--plugin FILE]");
    }
  }
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) stop("no socket");
  std::fflush(stdout);
  const pid_t child = fork();
  if (child < 0) stop("no second process");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[0]);
    const int result = run(1, ends[1], rounds, ucx, plugin);
    std::fflush(stdout);
    _exit(result);
  }
  close(ends[1]);
  const int result = run(0, ends[0], rounds, ucx, plugin);
  int status = 0;
  waitpid(child, &status, 0);
  return result != 0 || status != 0 ? 1 : 0;
}
