#include "transport/network/plugin_fabric.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/hash.h"
#include "base/random_bytes.h"

namespace unjam {
namespace {

// In front of a head: how long the payload is, and whether it is behind the head. Little-endian,
// as frames are.
constexpr std::uint32_t kPreambleBytes = 8;
constexpr std::uint32_t kHeadBytes = kPreambleBytes + kFrameBytes;
constexpr std::uint32_t kInlineBytes = PluginFabric::kMessageBytes - kHeadBytes;

// The first message of a connection: a word of ours, the key, and the connection's number.
constexpr std::uint32_t kGreetingBytes = 24;
constexpr std::uint64_t kGreeting = 0x31'6d61'6a6e'75ull;  // "unjam1"

void store_le(unsigned char* to, std::uint64_t value, std::uint32_t bytes) {
  for (std::uint32_t i = 0; i < bytes; ++i) to[i] = static_cast<unsigned char>(value >> 8 * i);
}
std::uint64_t load_le(const unsigned char* from, std::uint32_t bytes) {
  std::uint64_t value = 0;
  for (std::uint32_t i = 0; i < bytes; ++i) value |= std::uint64_t{from[i]} << 8 * i;
  return value;
}

// (Without padding, whose bytes nobody knows.)
static_assert(std::has_unique_object_representations_v<PluginAddress>);
std::uint64_t checksum_of(const PluginAddress& address) {
  constexpr std::size_t kFirst = offsetof(PluginAddress, key);
  return hash_bytes({reinterpret_cast<const char*>(&address) + kFirst, sizeof(address) - kFirst});
}
std::string plugin_of(const PluginAddress& address) {
  return {address.plugin, strnlen(address.plugin, sizeof(address.plugin))};
}

// A network may still write there, and nobody else may ever have it.
void leak(std::vector<unsigned char>& memory) {
  static_cast<void>(new std::vector<unsigned char>(std::move(memory)));
}

constexpr std::uint32_t kHeads = 0, kPayloads = 1;  // of a channel's connections
std::uint32_t number_of(std::uint32_t channel, std::uint32_t what) { return 2 * channel + what; }

}  // namespace

// A connection of the plugin's, of either direction.
struct PluginFabric::Line {
  enum class State : std::uint8_t { kNone, kMeeting, kGreeting, kOpen };
  State state = State::kNone;
  void* listener = nullptr;
  void* comm = nullptr;
  void* request = nullptr;      // of the greeting
  std::vector<void*> enrolled;  // the peer's messages; when it is open, memory_, too
  std::chrono::steady_clock::time_point patience_ends;  // for the greeting that is to come

  void* messages() const { return enrolled.front(); }
};

struct PluginFabric::Outgoing {
  std::uint32_t head_bytes = 0;            // of the message
  const unsigned char* payload = nullptr;  // nullptr: there is none to send by itself
  std::uint32_t bytes = 0;                 // of the payload, wherever it is
  std::uint64_t cookie = 0;
  void* head_request = nullptr;
  void* payload_request = nullptr;
};

// Of a channel. Frames are numbered as they are sent; those up to the counters were
//   begun, posted, and done (heads), posted, and done (payloads).
struct PluginFabric::Sender {
  Line* heads = nullptr;
  Line* payloads = nullptr;
  unsigned char* messages = nullptr;
  std::vector<Outgoing> frames;
  std::uint64_t begun = 0, heads_posted = 0, heads_done = 0, payloads_posted = 0, payloads_done = 0;

  Outgoing& at(std::uint64_t n) { return frames[n % frames.size()]; }
  unsigned char* message(std::uint64_t n) { return messages + n % frames.size() * kMessageBytes; }
};

struct PluginFabric::Incoming {
  FrameBytes head;
  std::uint64_t cookie = 0;
  unsigned char* at = nullptr;
  std::uint32_t bytes = 0;
  void* request = nullptr;
};

// Of a channel. Receives for heads are numbered, those up to the counters were posted and taken;
// payloads likewise: they have landed, were posted, have come.
struct PluginFabric::Receiver {
  Line* heads = nullptr;
  Line* payloads = nullptr;
  unsigned char* messages = nullptr;
  std::vector<void*> head_requests;
  std::vector<Incoming> frames;
  std::uint64_t heads_posted = 0, heads_taken = 0, landed = 0, posted = 0, come = 0;

  Incoming& at(std::uint64_t n) { return frames[n % frames.size()]; }
  unsigned char* message(std::uint64_t n) { return messages + n % frames.size() * kMessageBytes; }
};

struct PluginFabric::Peer {
  enum class State : std::uint8_t { kUnknown, kInvited, kMeeting, kOpen, kFailed, kOver, kClosed };
  State state = State::kUnknown;
  std::uint32_t number = 0;
  std::uint64_t own_key = 0;
  PluginAddress address;  // the peer's; the plugin keeps things in its handles
  Line out[PluginAddress::kConnections], in[PluginAddress::kConnections];
  Sender senders[kChannels];
  Receiver receivers[kChannels];
  std::vector<unsigned char> messages;
  unsigned char* greetings = nullptr;  // a message for each line
  std::string why;
  std::uint32_t strangers = 0;
  bool undead = false;  // of a connection, nobody knows whether it has ended

  FabricMemory own() { return {messages.data(), messages.size()}; }
  bool is_open() const { return state == State::kOpen; }
};

PluginFabric::PluginFabric(NetPlugin& plugin, const PluginFabricSettings& settings)
    : plugin_(plugin),
      settings_(settings),
      depth_(plugin.requests()),
      waste_(std::max(settings.most_payload, 1u)),
      memory_(settings.memory) {
  memory_.push_back({waste_.data(), waste_.size()});
  std::sort(memory_.begin(), memory_.end(),
            [](const FabricMemory& a, const FabricMemory& b) { return a.begin < b.begin; });
  for (std::uint32_t p = 0; p < settings.processes; ++p) {
    peers_.push_back(std::make_unique<Peer>());
    peers_[p]->number = p;
  }
}

std::unique_ptr<PluginFabric> PluginFabric::make(NetPlugin& plugin,
                                                 const PluginFabricSettings& settings,
                                                 std::string& error) {
  const auto devices = static_cast<int>(plugin.devices().size());
  if (settings.device < 0 || settings.device >= devices) {
    error = plugin.title() + " has no device " + std::to_string(settings.device) + ": it has " +
            std::to_string(devices) + ", from 0 on";
    return nullptr;
  }
  const NetPlugin::Device& device = plugin.devices()[static_cast<std::size_t>(settings.device)];
  if (device.most_bytes < std::max(settings.most_payload, kMessageBytes)) {
    error = plugin.title() + " sends at most " + std::to_string(device.most_bytes) +
            " bytes at once by its device " + device.name + ", and a slice may have " +
            std::to_string(std::max(settings.most_payload, kMessageBytes)) +
            ": make slots smaller, or use another carrier";
    return nullptr;
  }
  return std::unique_ptr<PluginFabric>(new PluginFabric(plugin, settings));
}

PluginFabric::~PluginFabric() {
  for (std::uint32_t p = 0; p < settings_.processes; ++p) close(p);
  if (std::any_of(peers_.begin(), peers_.end(), [](const auto& p) { return p->undead; })) {
    leak(waste_);
  }
}

// ---- meeting ----

bool PluginFabric::invite(std::uint32_t p, PluginAddress* address, std::string& error) {
  Peer& peer = *peers_[p];
  if (peer.state != Peer::State::kUnknown) {
    error = "process " + std::to_string(p) + " was invited before";
    return false;
  }
  fill_random(&peer.own_key, sizeof(peer.own_key));
  *address = address_of(peer.own_key);
  for (std::uint32_t n = 0; n < PluginAddress::kConnections; ++n) {
    if (!plugin_.listen(settings_.device, address->handles[n], &peer.in[n].listener)) {
      error = plugin_.title() + " cannot listen: " + plugin_.problem() + ". Check its device " +
              plugin_.devices()[static_cast<std::size_t>(settings_.device)].name +
              ", or choose another one";
      close(p);
      return false;
    }
  }
  address->checksum = checksum_of(*address);
  // Messages, of both directions and channels, and the greetings.
  const std::size_t each = std::size_t{depth_} * kMessageBytes;
  const std::size_t lines = 2 * PluginAddress::kConnections;
  peer.messages.resize(2 * kChannels * each + lines * kGreetingBytes);
  unsigned char* at = peer.messages.data();
  for (std::uint32_t c = 0; c < kChannels; ++c) {
    Sender& s = peer.senders[c];
    s.heads = &peer.out[number_of(c, kHeads)], s.payloads = &peer.out[number_of(c, kPayloads)];
    s.messages = at;
    s.frames.resize(depth_);
    Receiver& r = peer.receivers[c];
    r.heads = &peer.in[number_of(c, kHeads)], r.payloads = &peer.in[number_of(c, kPayloads)];
    r.messages = at + each;
    r.frames.resize(depth_);
    r.head_requests.resize(depth_);
    at += 2 * each;
  }
  peer.greetings = at;
  peer.state = Peer::State::kInvited;
  return true;
}

// But for the handles and the checksum.
PluginAddress PluginFabric::address_of(std::uint64_t key) const {
  PluginAddress address;
  address.key = key;
  address.version = static_cast<std::uint32_t>(plugin_.version());
  address.most_payload = settings_.most_payload;
  plugin_.name().copy(address.plugin, sizeof(address.plugin));
  return address;
}

bool PluginFabric::meet(std::uint32_t p, const PluginAddress& address, std::string& error) {
  Peer& peer = *peers_[p];
  const std::string of_peer = "process " + std::to_string(p);
  if (peer.state != Peer::State::kInvited) {
    error = of_peer + " was not invited, or was met before";
    return false;
  }
  if (address.magic != PluginAddress::kMagic || address.checksum != checksum_of(address)) {
    error = "the address of " + of_peer + " is none of a network plugin's, or was damaged";
    return false;
  }
  const PluginAddress mine = address_of(0);
  if (plugin_of(address) != plugin_of(mine) || address.version != mine.version) {
    error = of_peer + " uses the network plugin " + plugin_of(address) + ", v" +
            std::to_string(address.version) + ", and here it is " + plugin_.title() +
            ". Give both the same one";
    return false;
  }
  if (address.most_payload != mine.most_payload) {
    error = of_peer + " sends slices of at most " + std::to_string(address.most_payload) +
            " bytes, and here it is " + std::to_string(mine.most_payload) +
            ". Give both the same sizes of slots";
    return false;
  }
  peer.address = address;
  for (Line& line : peer.out) line.state = Line::State::kMeeting;
  for (Line& line : peer.in) line.state = Line::State::kMeeting;
  peer.state = Peer::State::kMeeting;
  return true;
}

bool PluginFabric::met(std::uint32_t p) const { return peers_[p]->is_open(); }

void PluginFabric::fail(Peer& peer, const std::string& why) {
  if (peer.state >= Peer::State::kFailed) return;
  peer.state = Peer::State::kFailed;
  peer.why = plugin_.title() + ": " + why;
}

bool PluginFabric::enroll(Line& line, const FabricMemory& memory) {
  void* enrolled = nullptr;
  if (!plugin_.enroll(line.comm, memory.begin, memory.bytes, &enrolled)) return false;
  line.enrolled.push_back(enrolled);
  return true;
}

// Behind the peer's messages, and behind the greeting: no stranger's connection may have them.
bool PluginFabric::enroll_payloads(Line& line) {
  return std::all_of(memory_.begin(), memory_.end(),
                     [&](const FabricMemory& m) { return enroll(line, m); });
}

// What the plugin calls the memory of a payload. False: it was never told of it.
bool PluginFabric::find_memory(Peer& peer, const Line& line, const unsigned char* at,
                               std::size_t bytes, void** memory) {
  const auto after =
      std::upper_bound(memory_.begin(), memory_.end(), at,
                       [](const unsigned char* a, const FabricMemory& m) { return a < m.begin; });
  if (after != memory_.begin()) {
    const FabricMemory& m = *(after - 1);
    if (at + bytes <= m.begin + m.bytes) {
      *memory = line.enrolled[static_cast<std::size_t>(after - memory_.begin())];
      return true;
    }
  }
  fail(peer, "a payload outside of the memory that was named");
  return false;
}

bool PluginFabric::connect(Peer& peer, Line& line, std::uint32_t number) {
  if (line.state == Line::State::kMeeting) {
    if (!plugin_.connect(settings_.device, peer.address.handles[number], &line.comm)) return false;
    if (line.comm == nullptr) return true;
    if (!enroll(line, peer.own())) return false;
    line.state = Line::State::kGreeting;
  }
  if (line.state != Line::State::kGreeting) return true;
  if (line.request == nullptr) {
    unsigned char* const text = peer.greetings + number * kGreetingBytes;
    store_le(text, kGreeting, 8);
    store_le(text + 8, peer.address.key, 8);
    store_le(text + 16, number, 8);
    if (!plugin_.send(line.comm, text, kGreetingBytes, line.messages(), &line.request)) {
      return false;
    }
    if (line.request == nullptr) return true;
  }
  bool done = false;
  std::size_t bytes = 0;
  if (!plugin_.test(line.request, &done, &bytes)) return false;
  if (!done) return true;
  if (!enroll_payloads(line)) return false;
  line.state = Line::State::kOpen;
  return true;
}

bool PluginFabric::accept(Peer& peer, Line& line, std::uint32_t number) {
  unsigned char* const text =
      peer.greetings + (PluginAddress::kConnections + number) * kGreetingBytes;
  if (line.state == Line::State::kMeeting) {
    if (!plugin_.accept(line.listener, &line.comm)) return false;
    if (line.comm == nullptr) return true;
    line.patience_ends = std::chrono::steady_clock::now() +
                         std::chrono::milliseconds(settings_.greeting_patience_ms);
    if (!enroll(line, peer.own())) return false;
    line.state = Line::State::kGreeting;
  }
  if (line.state != Line::State::kGreeting) return true;
  if (line.request == nullptr) {
    if (!plugin_.receive(line.comm, text, kGreetingBytes, line.messages(), &line.request)) {
      return false;
    }
  }
  bool done = false;
  std::size_t bytes = 0;
  const bool lives = line.request == nullptr || plugin_.test(line.request, &done, &bytes);
  if (lives && !done) {
    if (std::chrono::steady_clock::now() > line.patience_ends) dismiss(peer, line);
    return true;
  }
  if (!lives || bytes != kGreetingBytes || load_le(text, 8) != kGreeting ||
      load_le(text + 8, 8) != peer.own_key || load_le(text + 16, 8) != number) {
    dismiss(peer, line);
    return true;
  }
  if (!enroll_payloads(line)) return false;
  line.state = Line::State::kOpen;
  // (Whether it closes is of no concern: nobody else is to connect.)
  plugin_.close_listen(line.listener);
  line.listener = nullptr;
  return true;
}

// The connection of who is not the peer, or does not show it. The peer is waited for as before.
void PluginFabric::dismiss(Peer& peer, Line& line) {
  ++strangers_;
  ++peer.strangers;
  void* const listener = std::exchange(line.listener, nullptr);
  if (!close(line, false)) {
    // The next greeting would come to where this one still may.
    peer.undead = true;
    fail(peer, "somebody else has connected in the peer's place: " + plugin_.problem());
  }
  line.listener = listener;
  line.state = Line::State::kMeeting;
}

// Whether all connections are there.
bool PluginFabric::meet_further(Peer& peer) {
  std::uint32_t open = 0;
  for (std::uint32_t n = 0; n < PluginAddress::kConnections; ++n) {
    if (!connect(peer, peer.out[n], n) || !accept(peer, peer.in[n], n)) {
      fail(peer, "cannot connect: " + plugin_.problem() +
                     (peer.strangers == 0 ? ""
                                          : ", after " + std::to_string(peer.strangers) +
                                                " connections that were not the peer's"));
    }
    if (peer.state != Peer::State::kMeeting) return false;
    if (peer.out[n].state == Line::State::kOpen && peer.in[n].state == Line::State::kOpen) ++open;
  }
  if (open != PluginAddress::kConnections) return false;
  peer.state = Peer::State::kOpen;
  return true;
}

// ---- sending ----

bool PluginFabric::send(std::uint32_t p, FrameChannel channel, const FrameBytes& head,
                        const unsigned char* payload, std::uint32_t bytes, std::uint64_t cookie) {
  Peer& peer = *peers_[p];
  if (!peer.is_open()) return false;
  Sender& s = peer.senders[static_cast<std::size_t>(channel)];
  if (s.begun - std::min(s.heads_done, s.payloads_done) == depth_) return false;
  if (bytes > settings_.most_payload) {
    fail(peer, "a payload of " + std::to_string(bytes) + " bytes, more than was agreed");
    return false;
  }
  Outgoing& o = s.at(s.begun);
  unsigned char* const message = s.message(s.begun);
  const bool is_inline = bytes <= kInlineBytes;
  o = {};
  o.head_bytes = kHeadBytes + (is_inline ? bytes : 0);
  o.payload = is_inline ? nullptr : payload;
  o.bytes = bytes;
  o.cookie = cookie;
  store_le(message, bytes, 4);
  store_le(message + 4, is_inline ? 1 : 0, 4);
  std::memcpy(message + kPreambleBytes, head.bytes, kFrameBytes);
  if (is_inline && bytes != 0) std::memcpy(message + kHeadBytes, payload, bytes);
  ++s.begun;
  post(peer, s);  // (what does not go now goes later)
  return true;
}

// Whatever the plugin takes now.
bool PluginFabric::post(Peer& peer, Sender& s) {
  const std::uint64_t before = s.heads_posted + s.payloads_posted;
  while (s.heads_posted != s.begun) {
    Outgoing& o = s.at(s.heads_posted);
    if (!plugin_.send(s.heads->comm, s.message(s.heads_posted), o.head_bytes, s.heads->messages(),
                      &o.head_request)) {
      fail(peer, plugin_.problem());
      return true;
    }
    if (o.head_request == nullptr) break;
    ++s.heads_posted;
  }
  for (; s.payloads_posted != s.begun; ++s.payloads_posted) {
    Outgoing& o = s.at(s.payloads_posted);
    if (o.payload == nullptr) continue;
    void* memory = nullptr;
    if (!find_memory(peer, *s.payloads, o.payload, o.bytes, &memory)) return true;
    if (!plugin_.send(s.payloads->comm, o.payload, o.bytes, memory, &o.payload_request)) {
      fail(peer, plugin_.problem());
      return true;
    }
    if (o.payload_request == nullptr) break;
  }
  return s.heads_posted + s.payloads_posted != before;
}

// Requests are tested in their order, as NCCL does.
bool PluginFabric::poll(Peer& peer, Sender& s, FabricSink& sink) {
  bool moved = post(peer, s);
  bool done = false;
  std::size_t bytes = 0;
  for (; peer.is_open() && s.heads_done != s.heads_posted; ++s.heads_done, moved = true) {
    if (!plugin_.test(s.at(s.heads_done).head_request, &done, &bytes)) {
      fail(peer, plugin_.problem());
    }
    if (!done) break;
  }
  for (; peer.is_open() && s.payloads_done != s.payloads_posted; moved = true) {
    Outgoing& o = s.at(s.payloads_done);
    if (o.payload != nullptr) {
      if (!plugin_.test(o.payload_request, &done, &bytes)) fail(peer, plugin_.problem());
      if (!done) break;
    }
    const bool tell = o.bytes != 0;
    const std::uint64_t cookie = o.cookie;
    ++s.payloads_done;
    if (tell) sink.sent(peer.number, cookie);
  }
  return moved;
}

// ---- receiving ----

bool PluginFabric::post(Peer& peer, Receiver& r) {
  const std::uint64_t before = r.heads_posted + r.posted;
  for (; r.heads_posted - r.heads_taken != depth_; ++r.heads_posted) {
    void*& request = r.head_requests[r.heads_posted % depth_];
    if (!plugin_.receive(r.heads->comm, r.message(r.heads_posted), kMessageBytes,
                         r.heads->messages(), &request)) {
      fail(peer, plugin_.problem());
      return true;
    }
    if (request == nullptr) break;
  }
  for (; r.posted != r.landed; ++r.posted) {
    Incoming& i = r.at(r.posted);
    void* memory = nullptr;
    if (!find_memory(peer, *r.payloads, i.at, i.bytes, &memory)) return true;
    if (!plugin_.receive(r.payloads->comm, i.at, i.bytes, memory, &i.request)) {
      fail(peer, plugin_.problem());
      return true;
    }
    if (i.request == nullptr) break;
  }
  return r.heads_posted + r.posted != before;
}

// The oldest message, of so many bytes. Whether the connection goes on.
bool PluginFabric::take_head(Peer& peer, Receiver& r, std::size_t bytes, FabricSink& sink) {
  const unsigned char* const message = r.message(r.heads_taken);
  const std::uint64_t payload = bytes < kHeadBytes ? 0 : load_le(message, 4);
  const std::uint64_t is_inline = bytes < kHeadBytes ? 0 : load_le(message + 4, 4);
  // (What the receive was posted for bounds `bytes` only if the plugin keeps to it.)
  if (bytes < kHeadBytes || bytes > kMessageBytes || is_inline > 1 ||
      payload > (is_inline != 0 ? std::min(kInlineBytes, settings_.most_payload)
                                : settings_.most_payload) ||
      bytes != kHeadBytes + (is_inline != 0 ? payload : 0)) {
    fail(peer, "a message that is none of ours");
    return false;
  }
  FrameBytes head;
  std::memcpy(head.bytes, message + kPreambleBytes, kFrameBytes);
  const Landing to = sink.land(peer.number, head);
  if (to.refused || !peer.is_open()) {
    // The request is done, and must not be asked for again: nothing else may come of this peer.
    fail(peer, "a frame after its end");
    return false;
  }
  if (to.bytes != payload) {
    fail(peer, "a payload of another length than its head says");
    return false;
  }
  if (is_inline != 0 || payload == 0) {
    if (to.at != nullptr && payload != 0) std::memcpy(to.at, message + kHeadBytes, payload);
    ++r.heads_taken;
    sink.arrived(peer.number, head, to.cookie);
    return peer.is_open();
  }
  Incoming& i = r.at(r.landed++);
  i.head = head;
  i.cookie = to.cookie;
  i.at = to.at == nullptr ? waste_.data() : to.at;
  i.bytes = to.bytes;
  i.request = nullptr;
  ++r.heads_taken;
  return true;
}

bool PluginFabric::poll(Peer& peer, Receiver& r, FabricSink& sink) {
  bool moved = post(peer, r);
  bool done = false;
  std::size_t bytes = 0;
  // Not more than can land.
  while (peer.is_open() && r.heads_taken != r.heads_posted && r.landed - r.come != depth_) {
    if (!plugin_.test(r.head_requests[r.heads_taken % depth_], &done, &bytes)) {
      fail(peer, plugin_.problem());
    }
    if (!done) break;
    moved = true;
    if (!take_head(peer, r, bytes, sink)) return true;
  }
  if (moved && peer.is_open()) post(peer, r);
  while (peer.is_open() && r.come != r.posted) {
    Incoming& i = r.at(r.come);
    if (!plugin_.test(i.request, &done, &bytes)) fail(peer, plugin_.problem());
    if (!done) break;
    moved = true;
    if (bytes != i.bytes) {
      fail(peer, "of a payload of " + std::to_string(i.bytes) + " bytes " + std::to_string(bytes) +
                     " have come");
      break;
    }
    ++r.come;
    sink.arrived(peer.number, i.head, i.cookie);
  }
  return moved;
}

bool PluginFabric::poll(FabricSink& sink) {
  bool moved = false;
  for (const auto& p : peers_) {
    Peer& peer = *p;
    if (peer.state == Peer::State::kMeeting && meet_further(peer)) moved = true;
    for (std::uint32_t c = 0; c < kChannels && peer.is_open(); ++c) {
      if (poll(peer, peer.receivers[c], sink)) moved = true;
      if (peer.is_open() && poll(peer, peer.senders[c], sink)) moved = true;
    }
    if (peer.state == Peer::State::kFailed) {
      moved = true;
      peer.state = Peer::State::kOver;
      sink.broken(peer.number, peer.why.c_str());
      // (A sink that was through with the peer does not close it.)
      if (peer.state == Peer::State::kOver) close(peer.number);
    }
  }
  return moved;
}

// ---- closing ----

// What does not close is over all the same. Whether no memory is read or written any more by it:
// either its end or that of each registration sees to that.
bool PluginFabric::close(Line& line, bool sends) {
  bool through = true;
  if (line.comm != nullptr) {
    bool dismissed = true;
    for (void* const memory : line.enrolled) {
      if (!plugin_.dismiss(line.comm, memory)) dismissed = false;
    }
    through =
        (sends ? plugin_.close_send(line.comm) : plugin_.close_receive(line.comm)) || dismissed;
  }
  if (line.listener != nullptr) plugin_.close_listen(line.listener);
  line = {};
  return through;
}

void PluginFabric::close(std::uint32_t p) {
  Peer& peer = *peers_[p];
  for (Line& line : peer.out) peer.undead = !close(line, true) || peer.undead;
  for (Line& line : peer.in) peer.undead = !close(line, false) || peer.undead;
  if (peer.undead && !peer.messages.empty()) leak(peer.messages);
  peer.state = Peer::State::kClosed;
}

bool PluginFabric::drained(std::uint32_t p) const {
  return peers_[p]->state == Peer::State::kClosed && !peers_[p]->undead;
}

}  // namespace unjam
