// What the coverage-guided fuzzers call with each input (tests/fuzz), and the unit test that
// replays their corpora. Each aborts where something is wrong.
#pragma once

#include <poll.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/control.h"

namespace unjam_test {

inline void insist(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

// The first byte chooses the type, the rest are the message. What is taken for a message is the
// same after encoding and decoding again.
inline void fuzz_messages(std::string_view data) {
  if (data.empty()) return;
  const auto types = std::size(kAllMessageTypes);
  const MessageType type = kAllMessageTypes[static_cast<unsigned char>(data[0]) % types];
  std::string once, twice;
  if (!decode_any(type, data.substr(1), once)) return;
  insist(decode_any(type, once, twice), "what was encoded can be decoded");
  insist(once == twice, "encoding is the inverse of decoding");
}

// A channel over a stream in pieces: each is a length byte, a byte of how many descriptors come
// with it, and that many bytes.
inline void fuzz_channel(std::string_view data) {
  static const Fd file = memory_fd();
  const int before = open_descriptors();
  {
    auto [a, b] = socket_pair();
    insist(static_cast<bool>(b), "a socket pair");
    Channel channel(std::move(b), 4096);
    std::string error;
    Frame frame;
    std::size_t received = 0, popped = 0;
    bool live = true;
    const auto take = [&] {
      do {
        live = channel.receive(error);
        while (channel.pop(frame)) {
          popped += 8 + frame.payload.size();
          insist(frame.payload.size() <= 4096, "no frame is too long");
          insist(frame.fds.size() <= unjam::kMaxFrameFds, "no frame has too many descriptors");
        }
        if (live && channel.broken()) live = channel.receive(error);
      } while (live && channel.more());
    };
    while (data.size() >= 3 && live) {
      const auto size = std::min<std::size_t>(static_cast<unsigned char>(data[0]), data.size() - 2);
      const std::size_t fds = static_cast<unsigned char>(data[1]) % 8;
      const std::string_view piece = data.substr(2, size);
      data.remove_prefix(2 + size);
      if (!piece.empty() && send_raw(a.get(), piece, std::vector<int>(fds, file.get()))) {
        received += piece.size();
      }
      take();
      insist(live != channel.broken(), "broken is what ends it");
    }
    a.reset();
    take();
    insist(!live && !error.empty(), "the end is noticed");
    insist(popped <= received, "nothing is made up");
    frame = {};
  }
  insist(open_descriptors() == before, "no descriptor is left");
}

// A rendezvous of two ranks, of which one has joined, and clients that do what the data says. Those
// that join by the rules, as nobody but ranks of the job can, are members of it.
inline void fuzz_rendezvous(std::string_view data) {
  using namespace unjam;
  static const JobSecret secret = secret_from(77);
  static const Fd file = memory_fd();
  const int before = open_descriptors();
  {
    RendezvousServer server(listen_as(secret), secret);
    Frame answer;
    std::vector<std::unique_ptr<Channel>> clients;
    std::string error;
    int steps = 0;
    const auto byte = [&] {
      if (data.empty()) return 0;
      const int b = static_cast<unsigned char>(data[0]);
      data.remove_prefix(1);
      return b;
    };
    const auto length = [&] {  // of what follows it
      const auto said = static_cast<std::size_t>(byte());
      return std::min(said, data.size());
    };
    while (!data.empty() && ++steps < 32) {
      const int what = byte();
      const std::size_t who = clients.empty() ? 0 : static_cast<std::size_t>(what) / 8;
      Channel* c = clients.empty() ? nullptr : clients[who % clients.size()].get();
      switch (what % 8) {
        case 0:
          clients.push_back(std::make_unique<Channel>(knock(secret), kLongestFrame));
          break;
        case 1:  // proven
          clients.push_back(std::make_unique<Channel>(prove_by_hand(secret, secret, answer)));
          break;
        case 2: {  // a join
          JoinMessage m;
          const int how = byte();
          m.rank = static_cast<std::uint32_t>(how & 3);
          m.ranks = static_cast<std::uint32_t>(2 + (how >> 2 & 3));
          m.settings = how >> 4 & 1 ? "other" : "same";
          m.arena_bytes = 4096;
          const int fds = how >> 5 & 3;
          if (c == nullptr || !c->open()) break;
          send_raw(c->fd(),
                   frame_bytes(number_of(MessageType::kJoin), m.encode(),
                               static_cast<std::uint8_t>(how >> 7 ? 1 : fds)),
                   std::vector<int>(static_cast<std::size_t>(fds), file.get()));
          break;
        }
        case 3:
        case 4: {  // a frame
          const auto type = static_cast<std::uint16_t>(byte());
          const std::size_t size = length();
          if (c != nullptr && c->open()) send_raw(c->fd(), frame_bytes(type, data.substr(0, size)));
          data.remove_prefix(size);
          break;
        }
        case 5: {  // bytes
          const std::size_t size = length();
          if (c != nullptr && c->open()) {
            send_raw(c->fd(), data.substr(0, size),
                     std::vector<int>(static_cast<std::size_t>(what) / 128, file.get()));
          }
          data.remove_prefix(size);
          break;
        }
        case 6:
          if (c != nullptr) c->close();
          break;
        default:  // hears what it is told
          if (c != nullptr && c->open()) {
            c->receive(error);
            while (c->pop(answer)) {
              std::string again;
              insist(decode_any(static_cast<MessageType>(answer.type), answer.payload, again),
                     "a server says what can be understood");
            }
          }
          break;
      }
    }
    clients.clear();
  }
  insist(open_descriptors() <= before, "no descriptor is left");
}

struct FuzzTarget {
  const char* name;
  void (*run)(std::string_view data);
};
inline constexpr FuzzTarget kFuzzTargets[] = {
    {"messages", fuzz_messages},
    {"channel", fuzz_channel},
    {"rendezvous", fuzz_rendezvous},
};

}  // namespace unjam_test
