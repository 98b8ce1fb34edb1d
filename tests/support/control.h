// What tests and fuzzers of the control layer share: an example of every message, decoding by type,
// and clients that do as they like.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "control/channel.h"
#include "control/fd_message.h"
#include "control/messages.h"
#include "control/rendezvous.h"
#include "control/socket_address.h"

namespace unjam_test {

using unjam::Channel;
using unjam::Fd;
using unjam::Frame;
using unjam::JobSecret;
using unjam::MessageType;

inline constexpr MessageType kAllMessageTypes[] = {
    MessageType::kHello,       MessageType::kProof,    MessageType::kRefused,
    MessageType::kJoin,        MessageType::kPresent,  MessageType::kFailed,
    MessageType::kStart,       MessageType::kMemory,   MessageType::kPeers,
    MessageType::kGone,        MessageType::kDeparted, MessageType::kQuery,
    MessageType::kAnswer,      MessageType::kFail,     MessageType::kSnapshotRequest,
    MessageType::kSnapshot,    MessageType::kWindow,   MessageType::kWindowGone,
    MessageType::kWindowLetGo, MessageType::kGaveUp,   MessageType::kRoom,
    MessageType::kGreeting,    MessageType::kLost,
};

inline std::uint16_t number_of(MessageType t) { return static_cast<std::uint16_t>(t); }

template <class M>
bool decode_as(std::string_view bytes, std::string& again) {
  M m;
  if (!m.decode(bytes)) return false;
  again = m.encode();
  return true;
}

// Whether the bytes are a message of that type; `again`: it, encoded again.
inline bool decode_any(MessageType type, std::string_view bytes, std::string& again) {
  switch (type) {
    case MessageType::kHello:
      return decode_as<unjam::HelloMessage>(bytes, again);
    case MessageType::kProof:
      return decode_as<unjam::ProofMessage>(bytes, again);
    case MessageType::kRefused:
      return decode_as<unjam::RefusedMessage>(bytes, again);
    case MessageType::kJoin:
      return decode_as<unjam::JoinMessage>(bytes, again);
    case MessageType::kWho:
      again = bytes;
      return bytes.empty();
    case MessageType::kPresent:
      return decode_as<unjam::PresentMessage>(bytes, again);
    case MessageType::kFailed:
      return decode_as<unjam::FailedMessage>(bytes, again);
    case MessageType::kStart:
      return decode_as<unjam::StartMessage>(bytes, again);
    case MessageType::kMemory:
    case MessageType::kPeers:
      return decode_as<unjam::HandedMessage>(bytes, again);
    case MessageType::kGone:
      return decode_as<unjam::GoneMessage>(bytes, again);
    case MessageType::kGaveUp:
      return decode_as<unjam::GaveUpMessage>(bytes, again);
    case MessageType::kDeparted:
      return decode_as<unjam::DepartedMessage>(bytes, again);
    case MessageType::kQuery:
      return decode_as<unjam::QueryMessage>(bytes, again);
    case MessageType::kAnswer:
      return decode_as<unjam::AnswerMessage>(bytes, again);
    case MessageType::kFail:
      return decode_as<unjam::FailMessage>(bytes, again);
    case MessageType::kSnapshotRequest:
      return decode_as<unjam::SnapshotRequestMessage>(bytes, again);
    case MessageType::kSnapshot:
      return decode_as<unjam::SnapshotMessage>(bytes, again);
    case MessageType::kWindow:
      return decode_as<unjam::WindowMessage>(bytes, again);
    case MessageType::kWindowGone:
      return decode_as<unjam::WindowGoneMessage>(bytes, again);
    case MessageType::kWindowLetGo:
      return decode_as<unjam::WindowLetGoMessage>(bytes, again);
    case MessageType::kRoom:
      return decode_as<unjam::RoomMessage>(bytes, again);
    case MessageType::kGreeting:
      return decode_as<unjam::GreetingMessage>(bytes, again);
    case MessageType::kLost:
      return decode_as<unjam::LostMessage>(bytes, again);
    case MessageType::kBeat:
    case MessageType::kAllHere:
      again = bytes;
      return bytes.empty();
  }
  return false;
}

struct SampleMessage {
  MessageType type;
  std::string bytes;
};

// Each type with its lists empty, and with them filled. `rank`: whom they speak of.
inline std::vector<SampleMessage> sample_messages(std::uint32_t rank = 2, std::uint32_t ranks = 3) {
  using namespace unjam;
  std::vector<SampleMessage> all;
  const auto add = [&](MessageType type, const auto& m) { all.push_back({type, m.encode()}); };
  HelloMessage hello;
  hello.nonce[0] = 0x1122334455667788, hello.nonce[1] = ~0ull;
  add(MessageType::kHello, hello);
  ProofMessage proof;
  proof.nonce[0] = 5, proof.tag[1] = 7;
  add(MessageType::kProof, proof);
  RefusedMessage refused;
  refused.code = 3;
  add(MessageType::kRefused, refused);
  refused.rank = static_cast<std::int32_t>(rank), refused.text = "no \"place\"\n\xff";
  add(MessageType::kRefused, refused);
  JoinMessage join;
  join.rank = rank, join.ranks = ranks, join.arena_bytes = 1 << 20;
  add(MessageType::kJoin, join);
  join.settings = "lanes=2, guaranteed_slots=5", join.cpus = {3, ~0ull};
  add(MessageType::kJoin, join);
  PresentMessage present;
  add(MessageType::kPresent, present);
  present.joined = {5, ~0ull};
  add(MessageType::kPresent, present);
  FailedMessage failed;
  add(MessageType::kFailed, failed);
  failed.text = "rank 1 left";
  add(MessageType::kFailed, failed);
  StartMessage start;
  start.me = 1, start.process_of = {0, 1, 0}, start.pids = {100, 200};
  add(MessageType::kStart, start);
  start.hosts = {"a", "b"}, start.host_of = {0, 1, 0}, start.cpus = {7};
  add(MessageType::kStart, start);
  start.hosts.clear(), start.host_of.clear(), start.process_of[2] = StartMessage::kElsewhere;
  add(MessageType::kStart, start);
  add(MessageType::kMemory, HandedMessage{});
  add(MessageType::kMemory, HandedMessage{{{rank, 1}, {0, 2}}});
  add(MessageType::kPeers, HandedMessage{{{1, 2}}});
  GoneMessage gone;
  gone.rank = rank, gone.why = "it was aborted";
  add(MessageType::kGone, gone);
  gone.ended = true;
  add(MessageType::kGone, gone);
  GaveUpMessage gave_up;
  gave_up.rank = rank, gave_up.of = {5, rank};
  add(MessageType::kGaveUp, gave_up);
  DepartedMessage departed;
  departed.rank = rank;
  add(MessageType::kDeparted, departed);
  departed.calls = {{11, 1}, {12, ~0ull}};
  PendingCall call;
  call.call = {11, 2, "group", "key"};
  call.signature = "broadcast int8 root 0 count 9";
  call.members = {0, 1, 2};
  call.age_ms = 1500;
  departed.untaken = {call, call};
  add(MessageType::kDeparted, departed);
  QueryMessage query;
  add(MessageType::kQuery, query);
  query.calls = {{11, 0}, {12, 3}, {11, 0}};
  add(MessageType::kQuery, query);
  AnswerMessage answer;
  add(MessageType::kAnswer, answer);
  answer.asked = {{11, 0}};
  answer.said = {{11, 0, rank, true, "all_reduce float32 sum count 4"}, {11, 0, rank, false, ""}};
  answer.known = {{12, 1, "ranks disagree"}};
  add(MessageType::kAnswer, answer);
  FailMessage fail;
  fail.tag = 11, fail.n = 2, fail.code = 4, fail.text = "was not complete after 3 s";
  add(MessageType::kFail, fail);
  SnapshotRequestMessage request;
  request.number = 1;
  add(MessageType::kSnapshotRequest, request);
  SnapshotMessage snapshot;
  snapshot.number = 1;
  add(MessageType::kSnapshot, snapshot);
  RankSnapshot r;
  r.rank = static_cast<int>(rank), r.holds = true, r.lacks = "no memory is left";
  r.running = {1, -1}, r.words = {77, 78};
  r.pending = {call, call};
  r.pending[1].mutual = false;
  r.untaken = {call};
  r.calls = {{11, 3}, {12, 1}};
  snapshot.ranks = {r, r};
  add(MessageType::kSnapshot, snapshot);
  WindowMessage window;
  window.rank = rank, window.serial = 65;
  add(MessageType::kWindow, window);
  window.allocation = std::string(kLongestWindowName, '\x80'), window.offset = 1 << 20;
  add(MessageType::kWindow, window);
  WindowGoneMessage window_gone;
  window_gone.rank = rank, window_gone.serial = 65;
  add(MessageType::kWindowGone, window_gone);
  window_gone.stored_into = true;
  add(MessageType::kWindowGone, window_gone);
  WindowLetGoMessage let_go;
  let_go.rank = rank, let_go.serial = 65;
  add(MessageType::kWindowLetGo, let_go);
  RoomMessage room;
  room.owner = rank, room.peer = 0, room.connectors = 8;
  add(MessageType::kRoom, room);
  room.owner = 0, room.peer = rank, room.offers = true;
  add(MessageType::kRoom, room);
  GreetingMessage greeting;
  greeting.from = 1, greeting.pid = 77;
  add(MessageType::kGreeting, greeting);
  greeting.cpus = {3, ~0ull}, greeting.carrier = std::string(700, '\x81');
  add(MessageType::kGreeting, greeting);
  LostMessage lost;
  lost.process = 1, lost.why = "closed by the other end";
  add(MessageType::kLost, lost);
  return all;
}

// ---- descriptors ----

inline std::pair<Fd, Fd> socket_pair() {
  int pair[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) return {};
  return {Fd(pair[0]), Fd(pair[1])};
}

inline Fd memory_fd(std::size_t bytes = 4096) {
  Fd fd(memfd_create("unjam-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return {};
  fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return fd;
}

inline int open_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  int count = -1;  // the folder's own
  while (const dirent* e = readdir(folder)) count += e->d_name[0] != '.' ? 1 : 0;
  closedir(folder);
  return count;
}

// The ports at which this process listens. To knock there tells less: a port that was given back
// may be another process's by now.
inline std::set<std::uint16_t> listening_ports() {
  std::set<std::uint16_t> ports;
  DIR* folder = opendir("/proc/self/fd");
  while (const dirent* e = readdir(folder)) {
    const int fd = std::atoi(e->d_name);
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    ports.insert(unjam::local_address(fd).port);
  }
  closedir(folder);
  return ports;
}

// Bytes with descriptors, past all rules. False: refused by the other end.
inline bool send_raw(int socket, std::string_view bytes, const std::vector<int>& fds = {}) {
  while (!bytes.empty()) {
    iovec part{const_cast<char*>(bytes.data()), bytes.size()};
    unjam::FdSpace<64> space;
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    unjam::attach_fds(fds, space, message);
    const ssize_t n = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) return false;
    return static_cast<std::size_t>(n) == bytes.size();
  }
  return true;
}

// A frame as on the wire, its header telling of `bytes` and `fds` whatever is there.
inline std::string frame_bytes(std::uint16_t type, std::string_view payload, std::uint32_t bytes,
                               std::uint8_t fds, std::uint8_t zero = 0) {
  std::string t(8, '\0');
  std::memcpy(t.data(), &bytes, 4);
  std::memcpy(t.data() + 4, &type, 2);
  t[6] = static_cast<char>(fds);
  t[7] = static_cast<char>(zero);
  return t.append(payload);
}
inline std::string frame_bytes(std::uint16_t type, std::string_view payload, std::uint8_t fds = 0) {
  return frame_bytes(type, payload, static_cast<std::uint32_t>(payload.size()), fds);
}

// ---- rendezvous ----

inline JobSecret secret_from(std::uint64_t seed) {
  JobSecret secret{};
  for (std::size_t i = 0; i < secret.size(); ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    secret[i] = static_cast<unsigned char>(seed >> 56);
  }
  const auto pid = getpid();  // no two test programs at once under one name
  std::memcpy(secret.data(), &pid, sizeof(pid));
  return secret;
}

inline Fd listen_as(const JobSecret& secret) {
  sockaddr_un address;
  const socklen_t size = unjam::rendezvous_address(secret, address);
  Fd s(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (bind(s.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return {};
  if (listen(s.get(), 256) != 0) return {};
  return s;
}

inline Fd knock(const JobSecret& secret) {
  sockaddr_un address;
  const socklen_t size = unjam::rendezvous_address(secret, address);
  Fd s(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connect(s.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return {};
  return s;
}

// A client by hand: connected, greeted, and with `proof_secret` proven. Empty where that failed.
inline Channel prove_by_hand(const JobSecret& secret, const JobSecret& proof_secret,
                             Frame& answer) {
  std::string error;
  Channel channel(knock(secret), unjam::kLongestFrame);
  unjam::HelloMessage hello;
  if (!channel.open() || !channel.await(answer, 10000, error) || !hello.decode(answer.payload)) {
    return {};
  }
  unjam::ProofMessage proof;
  proof.nonce[0] = 42;
  unjam::proof_tag(proof_secret, 'c', hello.nonce, proof.nonce, proof.tag);
  channel.post(number_of(MessageType::kProof), proof.encode());
  if (!channel.flush_all(10000, error) || !channel.await(answer, 10000, error)) return {};
  return channel;
}

}  // namespace unjam_test
