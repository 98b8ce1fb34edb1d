// The receiving half of the courier: each frame to its place, or its sender's end.
#include <algorithm>

#include "base/atomics.h"
#include "transport/network/courier.h"
#include "transport/network/mistake.h"

namespace unjam {
namespace {

// Cookies of land(): of what is here already; others are 0.
constexpr std::uint64_t kDrop = 1;

}  // namespace

void Courier::fail(std::uint32_t p, const char* why) {
  if (peers_[p].state != State::kOpen) return;
  peers_[p].state = State::kGone;
  fabric_.close(p);
  home_.gone(p, why);
}

void Courier::broken(std::uint32_t p, const char* why) { fail(p, why); }

// What this rank's lane has consumed of connector i, or the courier in its place. Acquire: pairs
// with the release of the word that take() has counted: whoever may write the slots again does so
// behind the lane's reads.
std::uint64_t Courier::consumed(Route& r, std::uint32_t i) {
  return std::max(load_acquire(cells(r.mirror)[i].consumed), r.in[i].given_up);
}

Courier::Route* Courier::checked_route(std::uint32_t p, const CourierFrame& f) const {
  if (!is_here(f.dst) || process_of_[f.src] != p) return nullptr;
  return route(f.dst, f.src, f.lane);
}

Landing Courier::land(std::uint32_t p, const FrameBytes& head) {
  Landing to;
  to.refused = true;
  if (peers_[p].state != State::kOpen) return to;
  CourierFrame f;
  const char* why = decode(head, shape_, &f);
  if (why == nullptr && f.type == FrameType::kData) {
    Route* const r = checked_route(p, f);
    bool drop = false;
    why = r == nullptr ? "a slice of other ranks" : refusal(*r, f, &drop);
    if (why == nullptr) {
      to.bytes = f.bytes;
      to.cookie = drop ? kDrop : 0;
      if (!drop) to.at = slot_of(r->own, f.lane, f.connectors[0], f.step, f.location);
      if (!drop && UNJAM_MISTAKE(kFlagFirst)) put_data(*r, f);
    }
  }
  if (why != nullptr) {
    ++counts_.refused;
    fail(p, why);
    return to;
  }
  to.refused = false;
  return to;
}

// Why a step has no place here that its sender owns; nullptr: it has one, which is now claimed, or
// is to be dropped. The invariant: see courier.h.
const char* Courier::refusal(Route& r, const CourierFrame& f, bool* drop) {
  const std::uint32_t i = f.connectors[0];
  In& in = r.in[i];
  const std::uint64_t mine = consumed(r, i);
  if (!UNJAM_MISTAKE(kBelieves)) {
    *drop = f.step < in.frontier ||
            (f.step - in.frontier < kSlotHeaders && (in.claimed & bit(f.step)) != 0);
    if (*drop) return nullptr;
    // The header is that of a step which was consumed, and so is the slot.
    if (f.step - mine >= kSlotHeaders) return "a slice whose place is another one's";
    if (f.location == 0) {
      if (f.step - mine >= shape_.guaranteed_slots) return "a slice in a slot that is taken";
    } else {
      const Borrowed& use = r.borrowed[f.location - 1];
      if (use.step_end != 0 && consumed(r, use.connector) < use.step_end) {
        return "a slice in a pool slot that is taken";
      }
    }
    if (in.begun && f.base == in.base) {
      if (in.ended || f.tag != in.tag || f.group != in.group) return "a slice of no owner";
    } else {
      // A new owner begins where everything was consumed.
      const bool all = in.claimed == 0 && in.frontier == mine && f.base == mine;
      if (!all) return "a slice of an owner that has not begun";
    }
  }
  if (!in.begun || f.base != in.base) {
    in.begun = true;
    in.ended = in.listed = false;
    in.tag = f.tag, in.base = f.base, in.group = f.group;
  }
  if (f.location != 0) r.borrowed[f.location - 1] = {i, f.step + 1};
  in.claimed = static_cast<std::uint16_t>(in.claimed | bit(f.step));
  return nullptr;
}

void Courier::arrived(std::uint32_t p, const FrameBytes& head, std::uint64_t cookie) {
  Peer& peer = peers_[p];
  if (peer.state != State::kOpen) return;
  CourierFrame f;
  const char* why = decode(head, shape_, &f);
  ++counts_.came;
  if (f.type != FrameType::kBye) ++peer.came;
  if (cookie == kDrop) {
    ++counts_.dropped;
  } else if (why == nullptr) {
    why = put(p, f);
  }
  if (why != nullptr) {
    ++counts_.refused;
    return fail(p, why);
  }
  if (peer.came == peer.bye && peer.state == State::kOpen) {
    peer.state = State::kLeft;
    home_.left(p);
  }
}

const char* Courier::put(std::uint32_t p, const CourierFrame& f) {
  if (f.type == FrameType::kBye) {
    if (peers_[p].bye != ~std::uint64_t{0} || f.step < peers_[p].came) return "a wrong good-bye";
    peers_[p].bye = f.step;  // when all of them are here, nothing more is heard
    return nullptr;
  }
  if (f.type == FrameType::kAnnounce) {
    if (!is_here(f.dst)) return "an announcement for another process";
    put_announcement(f);
    return nullptr;
  }
  Route* const r = checked_route(p, f);
  if (r == nullptr) return "a frame of other ranks";
  if (f.type == FrameType::kUnlist) return put_unlist(*r, f);
  if (f.type == FrameType::kData) {
    if (!UNJAM_MISTAKE(kFlagFirst)) put_data(*r, f);
    return nullptr;
  }
  for (std::uint32_t n = 0; n < f.count; ++n) {
    if (f.consumed[n] > r->out[f.connectors[n]].sent) return "credit for what was not sent";
  }
  for (std::uint32_t n = 0; n < f.count; ++n) {
    Out& out = r->out[f.connectors[n]];
    if (f.consumed[n] <= out.credit) continue;  // an earlier one, late
    out.credit = f.consumed[n];
    show(*r, f.connectors[n]);
  }
  return nullptr;
}

// The payload is there.
void Courier::put_data(Route& r, const CourierFrame& f) {
  const std::uint32_t i = f.connectors[0];
  In& in = r.in[i];
  if (!in.listed && !in.ended) list(r, i);
  SlotHeader& h = LaneTransport::header_of(steps(r.own, r.lane, i), f.step);
  store_relaxed(h.bytes, f.bytes);
  store_relaxed(h.location, f.location);
  // Release: the payload, which the carrier has stored, and the header come before.
  store_release(h.flag, f.flag);
  in.here = static_cast<std::uint16_t>(in.here | bit(f.step));
  while ((in.here & bit(in.frontier)) != 0) {
    in.here = static_cast<std::uint16_t>(in.here & ~bit(in.frontier));
    in.claimed = static_cast<std::uint16_t>(in.claimed & ~bit(in.frontier));
    ++in.frontier;
  }
  give_up_if_marked(r, i);
  home_.ring(r.rank, r.lane, CourierHome::Came::kData);
}

void Courier::give_up_if_marked(Route& r, std::uint32_t i) {
  In& in = r.in[i];
  if (!in.begun || consumed(r, i) == in.frontier) return;
  std::uint64_t* const marks = reinterpret_cast<std::uint64_t*>(r.mirror + shape_.void_offset());
  // Acquire: pairs with the release in mark_void(): the lane's last reads of the slots, and its
  // last credits, came before.
  const auto marked = [&](std::uint64_t tag) {
    return load_acquire(marks[(tag >> 8) % kVoidMarks]) == tag;
  };
  if (!marked(in.tag) && !marked(in.group)) return;
  in.given_up = in.frontier;
  queue_credit(r, i);
}

// As LaneTransport::open() does, in the place of the sender.
void Courier::list(Route& r, std::uint32_t i) {
  In& in = r.in[i];
  leave_place(r, in);
  DirectoryEntry& entry = entries(r.own)[i];
  store_relaxed(entry.base, in.base);
  // Release: a reader that sees the tag sees the base.
  store_release(entry.tag, in.tag);
  std::uint64_t* const words = places(r.own);
  auto at = static_cast<std::uint32_t>(in.tag >> 32) % shape_.places();
  std::uint32_t probes = 1;
  // There are more places than connectors, and each connector has one at most.
  for (; load_relaxed(words[at]) != 0; ++probes) at = at + 1 == shape_.places() ? 0 : at + 1;
  in.place = at;
  in.listed = true;
  if (probes > r.longest_probe) {
    r.longest_probe = probes;
    // Release, and before the place: see LaneTransport::find(). The ring comes behind.
    store_release(
        reinterpret_cast<DirectoryHead*>(r.own + shape_.directory_offset())->longest_probe, probes);
  }
  // Release: the entry's tag comes before.
  store_release(words[at], (in.tag & ~kPlaceConnector) | (i + 1));
}

// Of the connector's former owner, or its present one.
void Courier::leave_place(Route& r, In& in) {
  std::uint64_t& word = places(r.own)[in.place];
  const auto i = static_cast<std::uint64_t>(&in - r.in);
  // Nobody minds who still reads the word: it leads to an entry, and that has the whole tag.
  if ((load_relaxed(word) & kPlaceConnector) == i + 1) store_relaxed(word, std::uint64_t{0});
}

const char* Courier::put_unlist(Route& r, const CourierFrame& f) {
  const std::uint32_t i = f.connectors[0];
  In& in = r.in[i];
  if (!in.begun || f.base > in.base) return "the end of a listing that was none";
  if (f.base < in.base) return nullptr;  // a later owner has begun
  if (f.tag != in.tag || in.ended) return "the end of another key's listing";
  // The sender took the connector from the key, so all was consumed.
  if (in.claimed != 0 || consumed(r, i) != in.frontier) return "the end of a listing in use";
  in.ended = true;
  in.listed = false;
  // (Its place leads to an entry without its tag, until the connector has another owner.)
  // Relaxed, as in LaneTransport::unlist(). But who still sees the tag may look for steps that come
  // elsewhere and were rung for already, so it is rung again.
  store_relaxed(entries(r.own)[i].tag, kTagUnused);
  home_.ring(r.rank, r.lane, CourierHome::Came::kData);
  return nullptr;
}

// See announcement.h.
void Courier::put_announcement(const CourierFrame& f) {
  std::uint64_t& place =
      reinterpret_cast<std::uint64_t*>(bases_[f.dst][f.dst] + shape_.announcements())[f.location];
  const std::uint64_t word = f.step;
  const std::uint64_t found = load_acquire(place);
  if (found == word) return;
  if ((word & 0xffffffff) == 0) {
    store_release(place, word);  // the call has been ended
  } else if (found >> 32 == word >> 32 && found != 0) {
    home_.differs(f.dst, f.location, found, word);
  } else {
    compare_exchange(place, found, word);
  }
}

}  // namespace unjam
