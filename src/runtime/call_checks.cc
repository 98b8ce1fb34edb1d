#include "runtime/call_checks.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "plan/common.h"
#include "plan/registry.h"

namespace unjam {

Result check_call(const unjamGroup& group, const Call& call) {
  const auto bad = [](std::string text) {
    return Result{UNJAM_ERROR_INVALID_ARGUMENT, std::move(text)};
  };
  const Signature& s = call.signature;
  const auto outside = [](auto value, int n) {
    return static_cast<int>(value) < 0 || static_cast<int>(value) >= n;
  };
  if (outside(s.kind, kNumKinds)) return bad("unknown kind: give a value of unjamKind_t");
  if (outside(s.dtype, kNumDTypes)) {
    return bad("unknown data type: give a value of unjamDataType_t");
  }
  if (outside(s.op, kNumOps)) return bad("unknown reduction operator: give a value of unjamOp_t");
  const auto n = static_cast<std::uint64_t>(group.members.size());
  // (A send/recv's ends were checked in the group that its channel belongs to.)
  if (s.kind != Kind::kSendRecv && has_root(s.kind) &&
      (s.root < 0 || static_cast<std::uint64_t>(s.root) >= n)) {
    return bad("root " + std::to_string(s.root) + ": the group has ranks 0 to " +
               std::to_string(n - 1));
  }
  if (s.algorithm >= 0 && !row_of(static_cast<Algorithm>(s.algorithm)).serves(s.kind)) {
    return bad(std::string("algorithm ") + to_string(static_cast<Algorithm>(s.algorithm)) +
               " does not serve " + to_string(s.kind) + ": use one of " + algorithms_for(s.kind));
  }
  const std::uint64_t size = dtype_bytes(s.dtype);
  const std::uint64_t most = std::numeric_limits<std::int64_t>::max();
  if (s.count > most / size / (blocked(s.kind) ? n : 1)) {
    return bad("count " + std::to_string(s.count) + " of " + to_string(s.dtype) +
               " overflows the address space: give the number of elements" +
               (blocked(s.kind) ? " per rank" : ""));
  }
  return {};
}

BufferBytes buffer_bytes(const unjamGroup& group, const Call& call) {
  const Signature& s = call.signature;
  const KindRow& kind = row_of(s.kind);
  if (!kind.buffers) return {};
  if (group.is_own()) {
    const std::uint64_t message = s.count * dtype_bytes(s.dtype);
    return {call.half == Half::kRecv ? 0 : message, call.half == Half::kSend ? 0 : message};
  }
  const int rank = group.parent == nullptr ? group.rank : group.parent->rank;
  const std::uint64_t block = s.count * dtype_bytes(s.dtype);
  const std::uint64_t all = kind.blocks ? group.members.size() * block : block;
  BufferBytes bytes;
  if (holds_some(kind.reads, rank, s.root)) bytes.send = input_is_block(s.kind) ? block : all;
  if (holds_some(kind.writes, rank, s.root)) bytes.recv = output_is_block(s.kind) ? block : all;
  return bytes;
}

std::uint64_t copied_alone(const unjamGroup& group, const Call& call) {
  return call.send == call.recv ? 0 : buffer_bytes(group, call).recv;
}

Result check_buffers(const unjamGroup& group, const Call& call) {
  const Signature& s = call.signature;
  const auto [send_bytes, recv_bytes] = buffer_bytes(group, call);
  const auto bad = [](std::string text) {
    return Result{UNJAM_ERROR_INVALID_ARGUMENT, std::move(text)};
  };
  const int rank = group.parent == nullptr ? group.rank : group.parent->rank;
  const bool needs_send = send_bytes != 0, needs_recv = recv_bytes != 0;
  const auto missing = [&](const char* what, const char* does) {
    return bad(std::string("the ") + what + " buffer is NULL, but rank " + std::to_string(rank) +
               "'s part of " + s.text() + " " + does + " it");
  };
  if (needs_send && call.send == nullptr) return missing("send", "reads");
  if (needs_recv && call.recv == nullptr) return missing("recv", "writes");
  const std::uint64_t size = dtype_bytes(s.dtype);
  const auto send = reinterpret_cast<std::uintptr_t>(call.send);
  const auto recv = reinterpret_cast<std::uintptr_t>(call.recv);
  if ((needs_send && send % size != 0) || (needs_recv && recv % size != 0)) {
    return bad(
        "a buffer is not aligned to its element type: give addresses that are multiples of " +
        std::to_string(size) + " bytes for " + to_string(s.dtype));
  }
  if (!needs_send || !needs_recv) return {};
  const std::uint64_t own = static_cast<std::uint64_t>(group.rank) * s.count * size;
  const bool in_place = send_bytes < recv_bytes   ? send == recv + own
                        : send_bytes > recv_bytes ? recv == send + own
                                                  : send == recv;
  const bool apart = send + send_bytes <= recv || recv + recv_bytes <= send;
  if (!apart && !row_of(s.kind).in_place) {
    return bad(std::string("the send and recv buffers overlap, and ") + to_string(s.kind) +
               " cannot be done in place: separate them");
  }
  if (!apart && !in_place) {
    return bad(std::string("the send and recv buffers overlap: separate them, or call ") +
               to_string(s.kind) + " in place: " +
               (send_bytes < recv_bytes   ? "send == recv + rank*count"
                : send_bytes > recv_bytes ? "recv == send + rank*count"
                                          : "send == recv"));
  }
  return {};
}

bool writes_into(const Submitted& s, const void* memory, std::uint64_t bytes) {
  const std::uint64_t written = buffer_bytes(*s.key->group, s.call).recv;
  const auto output = reinterpret_cast<std::uintptr_t>(s.call.recv);
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  return written != 0 && output < begin + bytes && begin < output + written;
}

}  // namespace unjam
