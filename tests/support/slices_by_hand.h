// What an engine does with a transport and a courier, step by step: slices whose bytes a seed and a
// step make. And what a process hears of its courier, counted.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/hash.h"
#include "transport/connector.h"
#include "transport/network/courier.h"

namespace unjam {

struct HomeThatCounts final : CourierHome {
  std::uint32_t data = 0, room = 0;  // rings
  std::uint32_t gone_count = 0, left_count = 0, differs_count = 0;
  std::uint32_t gone_peers = 0;  // a bit each
  const char* why = nullptr;
  std::uint64_t found = 0;

  void ring(std::uint32_t, std::uint32_t, Came what) override {
    ++(what == Came::kData ? data : room);
  }
  void gone(std::uint32_t peer, const char* text) override {
    ++gone_count;
    gone_peers |= 1u << peer;
    why = text;
  }
  void left(std::uint32_t) override { ++left_count; }
  void differs(std::uint32_t, std::uint32_t, std::uint64_t other, std::uint64_t) override {
    ++differs_count;
    found = other;
  }
};

// Every byte of a slice.
inline unsigned char byte_of(std::uint64_t seed, std::uint64_t step, std::uint32_t i) {
  return static_cast<unsigned char>(mix64(seed + step * 977) >> (i % 8 * 8));
}

// False: no connector, or no room.
inline bool send_slice(LaneTransport& t, Courier& courier, std::uint32_t to, std::uint64_t tag,
                       OutEndpoint& out, const std::uint32_t& in_use, std::uint64_t seed,
                       std::uint32_t bytes, std::uint64_t group) {
  if (out.connector == kNoConnector && !t.open(to, tag, group, out, &in_use)) return false;
  Wire wire = t.wire(out);
  const SendGrant g = t.grant(to, wire, bytes, load_acquire(t.credit_word(to, out.connector)));
  if (g.capacity < bytes) return false;
  for (std::uint32_t i = 0; i < bytes; ++i) g.data[i] = byte_of(seed, wire.count, i);
  const PublishedWord w = t.post(to, wire, seed, g.location, bytes);
  out.posted = wire.count;
  store_release(*w.place, w.value);
  courier.posted(t.rank, t.lane, to, w);
  return true;
}

// 0: nothing has come; 1: a slice; -1: a wrong one.
inline int receive_slice(LaneTransport& t, Courier& courier, std::uint32_t from, std::uint64_t tag,
                         InEndpoint& in, std::uint64_t seed, std::uint32_t bytes) {
  RecvView view;
  if (!t.resolve(from, tag, in)) return 0;
  Wire wire = t.wire(in);
  if (!t.poll(from, wire, seed, view)) return 0;
  if (view.bytes != bytes) return -1;
  for (std::uint32_t i = 0; i < bytes; ++i) {
    if (view.data[i] != byte_of(seed, wire.count, i)) return -1;
  }
  const PublishedWord w = t.take(wire);
  in.consumed = wire.count;
  store_release(*w.place, w.value);
  courier.posted(t.rank, t.lane, from, w);
  return 1;
}

}  // namespace unjam
