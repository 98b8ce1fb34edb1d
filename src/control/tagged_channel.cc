#include "control/tagged_channel.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/random_bytes.h"
#include "control/messages.h"

namespace unjam {
namespace {

constexpr std::int32_t kRefusedAsMisuse = 2, kRefusedAsMismatch = 3;  // as the C API's results
// Letters of proofs and of keys; those of the rendezvous of one host are others.
constexpr char kCallerProof = 'a', kDoorProof = 'd', kCallerKey = 'A', kDoorKey = 'D';
constexpr std::size_t kLongestRefusal = 4096;
constexpr std::size_t kScratchKept = 1 << 16;

constexpr std::uint16_t wire_type(MessageType t) { return static_cast<std::uint16_t>(t); }

std::string version_text(std::uint32_t theirs, std::uint32_t ours) {
  return "version " + std::to_string(theirs) + " of the agents' protocol, this end speaks " +
         std::to_string(ours) + ": use one version of unjam on all hosts";
}

}  // namespace

TaggedChannel::TaggedChannel(Fd socket, Role role, const JobSecret& secret, std::uint32_t version,
                             std::size_t longest)
    // A caller may be told at length why it is refused; who knocks at a door has little to say.
    : channel_(std::move(socket), role == Role::kDoor ? kLongestStrangerFrame : kLongestRefusal),
      role_(role),
      secret_(secret),
      version_(version),
      longest_(longest) {
  if (role == Role::kCaller) return;
  fill_random(door_nonce_, sizeof(door_nonce_));
  HelloMessage hello;
  hello.version = version_;
  std::memcpy(hello.nonce, door_nonce_, sizeof(hello.nonce));
  channel_.post(wire_type(MessageType::kHello), hello.encode());
}

bool TaggedChannel::receive(std::string& error) {
  bool live = channel_.receive(error);
  Frame frame;
  while (!proven_ && fault_.empty() && channel_.pop(frame)) take(frame);
  if (live && channel_.broken()) live = channel_.receive(error);
  if (fault_.empty()) return live;
  error = fault_;
  return false;
}

void TaggedChannel::take(const Frame& frame) {
  if (!frame.fds.empty()) {
    fault_ = "a frame with file descriptors";
  } else if (role_ == Role::kDoor) {
    take_proof_of_caller(frame);
  } else if (RefusedMessage refusal;
             frame.type == wire_type(MessageType::kRefused) && refusal.decode(frame.payload)) {
    fault_ = "refused: " + refusal.text;
  } else if (!greeted_) {
    take_hello(frame);
  } else {
    take_proof_of_door(frame);
  }
}

void TaggedChannel::take_hello(const Frame& frame) {
  HelloMessage hello;
  if (frame.type != wire_type(MessageType::kHello) || !hello.decode(frame.payload)) {
    fault_ = "what answers there is not unjam";
    return;
  }
  if (hello.version != version_) {
    fault_ = "refused: the other end speaks " + version_text(hello.version, version_);
    return;
  }
  greeted_ = true;
  std::memcpy(door_nonce_, hello.nonce, sizeof(door_nonce_));
  fill_random(caller_nonce_, sizeof(caller_nonce_));
  ProofMessage proof;
  proof.version = version_;
  std::memcpy(proof.nonce, caller_nonce_, sizeof(proof.nonce));
  proof_tag(secret_, kCallerProof, door_nonce_, caller_nonce_, proof.tag);
  channel_.post(wire_type(MessageType::kProof), proof.encode());
}

void TaggedChannel::take_proof_of_caller(const Frame& frame) {
  ProofMessage proof;
  if (frame.type != wire_type(MessageType::kProof) || !proof.decode(frame.payload)) {
    fault_ = "a stranger: the first message was no proof of the secret";
    return;
  }
  if (proof.version != version_) {
    refuse(version_text(proof.version, version_));
    return;
  }
  std::uint64_t expected[2];
  proof_tag(secret_, kCallerProof, door_nonce_, proof.nonce, expected);
  if (!same_tag(expected, proof.tag)) {
    refuse("the wrong secret: use the unique id of this job on all hosts");
    return;
  }
  ProofMessage mine;
  mine.version = version_;
  proof_tag(secret_, kDoorProof, door_nonce_, proof.nonce, mine.tag);
  channel_.post(wire_type(MessageType::kProof), mine.encode());
  begin(door_nonce_, proof.nonce);
}

void TaggedChannel::take_proof_of_door(const Frame& frame) {
  ProofMessage proof;
  std::uint64_t expected[2];
  proof_tag(secret_, kDoorProof, door_nonce_, caller_nonce_, expected);
  if (frame.type != wire_type(MessageType::kProof) || !proof.decode(frame.payload) ||
      !same_tag(expected, proof.tag)) {
    fault_ = "the other end does not know this job's secret";
    return;
  }
  begin(door_nonce_, caller_nonce_);
}

void TaggedChannel::begin(const std::uint64_t door_nonce[2], const std::uint64_t caller_nonce[2]) {
  const SipKey of_caller = session_key(secret_, kCallerKey, door_nonce, caller_nonce);
  const SipKey of_door = session_key(secret_, kDoorKey, door_nonce, caller_nonce);
  out_key_ = role_ == Role::kDoor ? of_door : of_caller;
  in_key_ = role_ == Role::kDoor ? of_caller : of_door;
  proven_ = true;
  channel_.set_longest(longest_ + kTagBytes);
}

// The other end learns why; the owner closes after a flush().
void TaggedChannel::refuse(const std::string& why) {
  RefusedMessage m;
  m.code = why[0] == 'v' ? kRefusedAsMismatch : kRefusedAsMisuse;
  m.text = why;
  channel_.post(wire_type(MessageType::kRefused), m.encode());
  fault_ = "refused: " + why;
  std::string unused;
  channel_.flush(unused);
}

std::uint64_t TaggedChannel::tag_of(const SipKey& key, std::uint64_t number, std::uint16_t type,
                                    std::string_view payload) {
  scratch_.resize(sizeof(number) + sizeof(type));
  std::memcpy(scratch_.data(), &number, sizeof(number));
  std::memcpy(scratch_.data() + sizeof(number), &type, sizeof(type));
  scratch_.append(payload);
  const std::uint64_t tag = siphash(key, scratch_);
  if (scratch_.capacity() > kScratchKept) std::string().swap(scratch_);
  return tag;
}

void TaggedChannel::post(std::uint16_t type, std::string_view payload) {
  if (!proven_) throw std::logic_error("a frame to an end that is not proven");
  if (payload.size() > longest_) throw std::logic_error("a frame that is too long");
  const std::uint64_t tag = tag_of(out_key_, sent_++, type, payload);
  std::string bytes;
  bytes.reserve(payload.size() + kTagBytes);
  bytes.append(payload).append(reinterpret_cast<const char*>(&tag), kTagBytes);
  sent_bytes_ += bytes.size();
  channel_.post(type, bytes);
}

bool TaggedChannel::pop(Frame& frame) {
  if (!proven_ || !fault_.empty() || !channel_.pop(frame)) return false;
  if (!frame.fds.empty() || frame.payload.size() < kTagBytes) {
    fault_ = "a frame without a tag";
    return false;
  }
  std::uint64_t tag;
  const std::size_t size = frame.payload.size() - kTagBytes;
  std::memcpy(&tag, frame.payload.data() + size, kTagBytes);
  frame.payload.resize(size);
  if (tag != tag_of(in_key_, received_++, frame.type, frame.payload)) {
    fault_ = "a frame with a wrong tag: it was altered, injected, repeated or lost on the way";
    return false;
  }
  return true;
}

}  // namespace unjam
