// A connection between two hosts of a job, over TCP: frames, after both ends have proven that they
// know the job's secret. Each frame then carries a keyed tag over its number, type and payload, so
// what was injected, altered, replayed, reordered or left out ends the connection. The key is the
// connection's own, and each direction has another. Payloads are not encrypted.
//
//   door:   Hello{version, nonce}
//   caller: Proof{version, nonce, tag}
//   door:   Proof{tag}, or Refused{why}
//
// Never blocks: what cannot be sent now is queued, and a peer that takes nothing is given up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "control/channel.h"
#include "control/proof.h"

namespace unjam {

class TaggedChannel {
 public:
  // The door has accepted the socket, the caller has connected it.
  enum class Role { kDoor, kCaller };
  static constexpr std::size_t kTagBytes = 8;

  TaggedChannel() = default;
  // Both ends must say the same `version`. `longest`: of payloads, once the other end is proven.
  TaggedChannel(Fd socket, Role role, const JobSecret& secret, std::uint32_t version,
                std::size_t longest);

  int fd() const { return channel_.fd(); }
  bool open() const { return channel_.open(); }
  void close() { channel_.close(); }
  bool proven() const { return proven_; }

  // Reads what has arrived, a bounded amount at a time, and takes part in the proof. False: closed
  // by the other end, refused, or broken (`error` says which). Frames that were complete before
  // that can still be popped.
  bool receive(std::string& error);
  bool more() const { return channel_.more(); }
  // The next frame of a proven end whose tag is right. False: none (yet), or broken().
  bool pop(Frame& frame);
  bool broken() const { return !fault_.empty() || channel_.broken(); }
  std::string fault() const { return fault_; }

  // Only once proven.
  void post(std::uint16_t type, std::string_view payload);
  bool flush(std::string& error) { return channel_.flush(error); }
  bool pending() const { return channel_.pending(); }
  std::size_t pending_bytes() const { return channel_.pending_bytes(); }
  std::uint64_t sent_frames() const { return sent_; }
  std::uint64_t sent_bytes() const { return sent_bytes_; }

 private:
  void take(const Frame& frame);
  void take_hello(const Frame& frame);
  void take_proof_of_caller(const Frame& frame);
  void take_proof_of_door(const Frame& frame);
  void refuse(const std::string& why);
  void begin(const std::uint64_t door_nonce[2], const std::uint64_t caller_nonce[2]);
  std::uint64_t tag_of(const SipKey& key, std::uint64_t number, std::uint16_t type,
                       std::string_view payload);

  Channel channel_;
  Role role_ = Role::kDoor;
  JobSecret secret_ = {};
  std::uint32_t version_ = 0;
  std::size_t longest_ = 0;
  bool greeted_ = false;  // the caller has answered the Hello
  bool proven_ = false;
  std::string fault_;
  std::uint64_t door_nonce_[2] = {}, caller_nonce_[2] = {};
  SipKey out_key_ = {}, in_key_ = {};
  std::uint64_t sent_ = 0, received_ = 0;  // frames with tags
  std::uint64_t sent_bytes_ = 0;
  std::string scratch_;
};

}  // namespace unjam
