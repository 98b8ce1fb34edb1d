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

#include "control/agent.h"
#include "control/poller.h"
#include "tests/support/agent_messages.h"
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

// As fuzz_messages, of agents.
inline void fuzz_agent_messages(std::string_view data) {
  if (data.empty()) return;
  const auto types = std::size(kAllAgentMessageTypes);
  const AgentMessageType type = kAllAgentMessageTypes[static_cast<unsigned char>(data[0]) % types];
  std::string once, twice;
  if (!decode_any(type, data.substr(1), once)) return;
  insist(decode_any(type, once, twice), "what was encoded can be decoded");
  insist(once == twice, "encoding is the inverse of decoding");
}

// The root of a job of three ranks, of which it has one, and callers that do what the data says.
// Those that join by the rules are children; when all have joined, the job runs.
inline void fuzz_agent(std::string_view data) {
  using namespace unjam;
  static const JobSecret secret = secret_from(78);
  const int before = open_descriptors();
  {
    Poller poller;
    AgentConfig config;
    config.secret = secret;
    config.root = true;
    config.ranks = {{0, 0}};
    config.job_ranks = 3;
    config.host = "root";
    std::string error;
    insist(resolve_address("127.0.0.1:0", config.root_address, error), "an address");
    AgentEvents events;
    Agent* me = nullptr;
    bool over = false;
    events.asked = [&](std::uint32_t from, std::uint64_t number, const std::string& payload) {
      me->answer(from, number, payload);
    };
    events.started = [&] { me->ask({0, 1, 2}, "?", 1000); };
    events.gone = [&](const AgentNews& news) {
      for (const auto r : news.ranks) insist(me->is_gone(r), "who is said to be gone is");
    };
    events.failed = events.cut_off = [&](const std::string& why) {
      insist(!over && !why.empty(), "an end has one reason");
      over = true;
    };
    Agent agent(poller, config, events);
    me = &agent;
    if (!agent.start(error)) return;  // no port is free
    std::vector<TaggedChannel> callers;
    const auto turn = [&] {
      for (int i = 0; i < 2; ++i) {
        poller.run_once(0);
        for (TaggedChannel& c : callers) {
          if (!c.open()) continue;
          if (!c.flush(error) || !c.receive(error)) {
            c.close();
            continue;
          }
          Frame f;
          while (c.pop(f)) {
            std::string again;
            const auto type = static_cast<AgentMessageType>(f.type);
            insist(f.payload.empty() || decode_any(type, f.payload, again),
                   "an agent says what can be understood");
          }
        }
      }
    };
    const auto byte = [&] {
      if (data.empty()) return 0;
      const int b = static_cast<unsigned char>(data[0]);
      data.remove_prefix(1);
      return b;
    };
    const auto piece = [&] {
      const auto said = static_cast<std::size_t>(byte());
      const std::string_view p = data.substr(0, said);
      data.remove_prefix(p.size());
      return p;
    };
    for (int steps = 0; !data.empty() && steps < 32; ++steps) {
      const int what = byte();
      TaggedChannel* c =
          callers.empty() ? nullptr : &callers[static_cast<std::size_t>(what) / 8 % callers.size()];
      if (c != nullptr && !c->open()) c = nullptr;
      switch (what % 8) {
        case 0: {  // somebody calls
          if (callers.size() > 8) break;
          Fd s = begin_connect(agent.door(), error);
          if (!s) break;
          // Reset at the end: else its port would be kept for long.
          const linger at_once{1, 0};
          setsockopt(s.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
          callers.emplace_back(std::move(s), TaggedChannel::Role::kCaller, secret,
                               kAgentProtocolVersion, kLongestAgentFrame);
          if (what / 8 % 4 != 3) turn();  // and proves itself
          turn();
          break;
        }
        case 1: {  // attaches, and joins
          const int how = byte();
          AttachMessage attach;
          attach.agent = 1 + (how & 1);
          attach.job_ranks = how & 2 ? 4 : 3;
          attach.first_rank = 1 + (how & 1);
          attach.settings = how & 4 ? "A=1" : "";
          attach.again = (how & 8) != 0;
          if (how & 16) attach.gone_agents = {2};
          JoinsMessage joins;
          joins.joins = {{how & 32 ? 33u : attach.agent,
                          "host",
                          {{how & 64 ? 0 : attach.first_rank, static_cast<std::uint64_t>(how)}}}};
          if (c == nullptr || !c->proven()) break;
          for (std::uint64_t id = 1; id <= 2; ++id) {  // two seats
            EnterMessage enter;
            enter.id = id;
            enter.door.port = 1;
            c->post(number_of(AgentMessageType::kEnter), enter.encode());
          }
          c->post(number_of(AgentMessageType::kAttach), attach.encode());
          if (!attach.again) c->post(number_of(AgentMessageType::kJoins), joins.encode());
          turn();
          break;
        }
        case 2:
        case 3:
        case 4: {  // a frame
          const auto type =
              static_cast<std::uint16_t>(number_of(AgentMessageType::kEnter) + byte() % 16);
          const std::string_view payload = piece();
          if (c != nullptr && c->proven()) c->post(type, payload);
          turn();
          break;
        }
        case 5: {  // bytes past all rules
          const std::string_view bytes = piece();
          if (c != nullptr) send_raw(c->fd(), bytes);
          turn();
          break;
        }
        case 6:
          if (c != nullptr) c->close();
          turn();
          break;
        default:
          if (byte() % 4 == 0) {
            agent.finish();
          } else {
            agent.report_gone({static_cast<std::uint32_t>(what / 8 % 4)}, "ended");
          }
          turn();
          break;
      }
    }
    callers.clear();
    poller.run_once(0);
  }
  insist(open_descriptors() == before, "no descriptor is left");
}

struct FuzzTarget {
  const char* name;
  void (*run)(std::string_view data);
};
inline constexpr FuzzTarget kFuzzTargets[] = {
    {"messages", fuzz_messages},     {"channel", fuzz_channel},
    {"rendezvous", fuzz_rendezvous}, {"agent_messages", fuzz_agent_messages},
    {"agent", fuzz_agent},
};

}  // namespace unjam_test
