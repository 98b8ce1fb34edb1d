#include "transport/network/loop_fabric.h"

#include <algorithm>
#include <cstring>

namespace unjam {
namespace {

std::uint64_t sum_of(const unsigned char* payload, std::uint32_t bytes) {
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < bytes; ++i) sum = sum * 0x100000001b3u + payload[i] + 1;
  return sum;
}

}  // namespace

std::size_t LoopNet::memory_bytes(const LoopOptions& o) {
  Carver count(nullptr);
  const std::size_t ways = std::size_t{o.processes} * o.processes;
  count.take<Way>(ways);
  count.take<Entry>(ways * kChannels * o.depth);
  count.take<unsigned char>(ways * kChannels * o.depth * o.copied_bytes);
  return count.bytes();
}

LoopNet::LoopNet(const LoopOptions& options, unsigned char* memory) : options_(options) {
  Carver carver(memory);
  const std::size_t ways = std::size_t{options.processes} * options.processes;
  const std::size_t entries = ways * kChannels * options.depth;
  ways_ = carver.take<Way>(ways);
  entries_ = carver.take<Entry>(entries);
  unsigned char* const copies = carver.take<unsigned char>(entries * options.copied_bytes);
  for (std::size_t i = 0; i < entries; ++i) entries_[i].copy = copies + i * options.copied_bytes;
}

void LoopNet::cut(std::uint32_t a, std::uint32_t b) {
  const std::lock_guard lock(mutex_);
  way(a, b).cut = way(b, a).cut = true;
}

bool LoopNet::empty() {
  const std::lock_guard lock(mutex_);
  const std::size_t entries =
      std::size_t{options_.processes} * options_.processes * kChannels * options_.depth;
  return std::all_of(entries_, entries_ + entries,
                     [](const Entry& e) { return e.stage == Stage::kFree; });
}

bool LoopNet::overwritten() {
  const std::lock_guard lock(mutex_);
  return overwritten_;
}

std::uint32_t LoopFabric::choose(LoopOptions::Choice what, std::uint32_t n) const {
  const LoopOptions& o = net_.options_;
  return o.choose == nullptr ? 0 : o.choose(o.context, what, n);
}

bool LoopFabric::send(std::uint32_t peer, FrameChannel channel, const FrameBytes& head,
                      const unsigned char* payload, std::uint32_t bytes, std::uint64_t cookie) {
  const LoopOptions& o = net_.options_;
  const bool copies =
      bytes != 0 && bytes <= o.copied_bytes && choose(LoopOptions::Choice::kCopies, 2) == 1;
  const std::lock_guard lock(net_.mutex_);
  LoopNet::Way& way = net_.way(self_, peer);
  if (way.cut || way.closed) return true;  // it goes nowhere
  LoopNet::Entry* const all = net_.entries(self_, peer, static_cast<std::uint32_t>(channel));
  LoopNet::Entry* const e = std::find_if(
      all, all + o.depth, [](const LoopNet::Entry& x) { return x.stage == LoopNet::Stage::kFree; });
  if (e == all + o.depth) return false;
  e->head = head;
  e->payload = payload;
  e->bytes = bytes;
  e->done = 0;
  e->cookie = cookie;
  e->order = way.sent++;
  e->let_go = bytes == 0;
  e->again = false;
  e->sum = sum_of(payload, bytes);
  e->stage = LoopNet::Stage::kUnderWay;
  if (copies) {
    std::memcpy(e->copy, payload, bytes);
    e->payload = e->copy;
  }
  return true;
}

// One payload that is not needed any more; or none, as it is chosen.
bool LoopFabric::let_go(std::uint32_t peer, std::uint32_t channel, FabricSink& sink) {
  using Stage = LoopNet::Stage;
  const std::uint32_t depth = net_.options_.depth;
  LoopNet::Entry* const all = net_.entries(self_, peer, channel);
  const auto done = [](const LoopNet::Entry& e) {
    return !e.let_go &&
           (e.stage == Stage::kDelivered || (e.stage != Stage::kFree && e.payload == e.copy));
  };
  std::uint32_t n = 0;
  {
    const std::lock_guard lock(net_.mutex_);
    n = static_cast<std::uint32_t>(std::count_if(all, all + depth, done));
  }
  if (n == 0) return false;
  std::uint32_t nth = choose(LoopOptions::Choice::kLetsGo, n + 1);
  if (nth == n) return false;
  std::uint64_t cookie = 0;
  {
    const std::lock_guard lock(net_.mutex_);
    for (LoopNet::Entry* e = all; e != all + depth; ++e) {
      if (!done(*e) || nth-- != 0) continue;
      e->let_go = true;
      if (sum_of(e->payload, e->bytes) != e->sum) net_.overwritten_ = true;
      cookie = e->cookie;
      if (e->stage == Stage::kDelivered) e->stage = Stage::kFree;
      break;
    }
  }
  sink.sent(peer, cookie);
  return true;
}

// One piece of one frame; or none, as it is chosen.
bool LoopFabric::deliver(std::uint32_t peer, std::uint32_t channel, FabricSink& sink) {
  using Stage = LoopNet::Stage;
  const LoopOptions& o = net_.options_;
  LoopNet::Entry* const all = net_.entries(peer, self_, channel);
  const auto comes = [](const LoopNet::Entry& e) {
    return e.stage == Stage::kUnderWay || e.stage == Stage::kLanded;
  };
  LoopNet::Entry* e = nullptr;
  std::uint32_t n = 0;
  {
    const std::lock_guard lock(net_.mutex_);
    n = static_cast<std::uint32_t>(std::count_if(all, all + o.depth, comes));
  }
  if (n == 0) return false;
  const std::uint32_t ways = o.reorders ? n : 1;
  std::uint32_t nth = choose(LoopOptions::Choice::kDelivers, ways + 1);
  if (nth == ways) return false;
  bool landed = false;
  {
    const std::lock_guard lock(net_.mutex_);
    // By age, so that who chooses 0 keeps the order. (Others may have come meanwhile.)
    std::uint64_t from = 0;
    for (;; --nth) {
      e = nullptr;
      for (LoopNet::Entry* x = all; x != all + o.depth; ++x) {
        if (comes(*x) && x->order >= from && (e == nullptr || x->order < e->order)) e = x;
      }
      if (e == nullptr || nth == 0) break;
      from = e->order + 1;
    }
    if (e == nullptr) return false;
    landed = e->stage == Stage::kLanded;
    e->stage = Stage::kDelivering;
  }
  const bool lost = net_.loses != 0 && e->head.bytes[1] == net_.loses;
  if (!landed && !lost) {
    e->landing = sink.land(peer, e->head);
    if (e->landing.refused) return true;
    if (e->landing.bytes != e->bytes) {
      sink.broken(peer, "a payload of another length");
      return true;
    }
  }
  if (!lost && e->done != e->bytes) {
    const std::uint32_t piece = o.piece == 0 ? e->bytes : std::min(o.piece, e->bytes - e->done);
    if (e->landing.at != nullptr) {
      std::memcpy(e->landing.at + e->done, e->payload + e->done, piece);
    }
    e->done += piece;
  }
  const bool whole = lost || e->done == e->bytes;
  if (whole && !lost) sink.arrived(peer, e->head, e->landing.cookie);
  const std::lock_guard lock(net_.mutex_);
  if (e->stage != Stage::kDelivering) return true;  // closed meanwhile
  if (whole && net_.repeats && !e->again && e->head.bytes[1] == 1) {
    e->again = true;
    e->done = 0;
    e->stage = Stage::kUnderWay;
    return true;
  }
  e->stage = !whole ? Stage::kLanded : e->let_go ? Stage::kFree : Stage::kDelivered;
  return true;
}

bool LoopFabric::poll(FabricSink& sink) {
  bool moved = false;
  for (std::uint32_t p = 0; p < net_.options_.processes; ++p) {
    if (p == self_) continue;
    bool tell = false, over = false;
    {
      const std::lock_guard lock(net_.mutex_);
      LoopNet::Way& way = net_.way(p, self_);
      over = way.cut || way.closed;
      tell = over && !way.told;
      if (over) way.told = true;
    }
    if (tell) {
      moved = true;
      sink.broken(p, "the connection was cut");
    }
    if (over) continue;
    for (std::uint32_t c = 0; c < kChannels; ++c) {
      if (deliver(p, c, sink)) moved = true;
      if (let_go(p, c, sink)) moved = true;
    }
  }
  return moved;
}

void LoopFabric::close(std::uint32_t peer) {
  const std::lock_guard lock(net_.mutex_);
  net_.way(self_, peer).closed = net_.way(peer, self_).closed = true;
  net_.way(peer, self_).told = true;
  for (std::uint32_t c = 0; c < kChannels; ++c) {
    for (LoopNet::Entry* e : {net_.entries(self_, peer, c), net_.entries(peer, self_, c)}) {
      for (std::uint32_t i = 0; i < net_.options_.depth; ++i) {
        // (Who is delivering it here and now finds out.)
        e[i].stage = LoopNet::Stage::kFree;
      }
    }
  }
}

}  // namespace unjam
