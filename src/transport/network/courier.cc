// The courier's memory, its driver, and its sending half; courier_receive.cc is the other one.
#include "transport/network/courier.h"

#include <algorithm>

#include "base/atomics.h"
#include "transport/network/mistake.h"

namespace unjam {
namespace {

// Queues of connectors: linked by a member of theirs, each in one once at most.
template <class T, class Fifo>
void push(Fifo& fifo, T* all, std::uint32_t i, std::uint32_t T::* next) {
  constexpr std::uint32_t kNone = 0xffffffff;
  all[i].*next = kNone;
  (fifo.head == kNone ? fifo.head : all[fifo.tail].*next) = i;
  fifo.tail = i;
}
template <class T, class Fifo>
std::uint32_t pop(Fifo& fifo, T* all, std::uint32_t T::* next) {
  const std::uint32_t i = fifo.head;
  fifo.head = all[i].*next;
  return i;
}

// The step from `from` on that has this number modulo kSlotHeaders.
constexpr std::uint64_t step_from(std::uint64_t from, std::uint64_t modulo) {
  return from + (modulo - from) % kSlotHeaders;
}
static_assert((kSlotHeaders & (kSlotHeaders - 1)) == 0, "differences wrap");

// Fabric cookies.
constexpr std::uint64_t cookie_of(std::uint64_t route, std::uint32_t connector,
                                  FrameChannel channel, std::uint64_t step) {
  return route << 32 | std::uint64_t{connector} << 16 | static_cast<std::uint64_t>(channel) << 8 |
         step % kSlotHeaders;
}

}  // namespace

// ---- memory ----

std::size_t Courier::memory_bytes(const CourierSettings& s) {
  std::uint64_t here = 0, elsewhere = 0;
  for (std::uint32_t r = 0; r < s.shape.ranks; ++r) {
    const bool is_here = s.process_of[r] == s.self;
    here += is_here ? 1 : 0;
    elsewhere += is_here || s.process_of[r] == kBeside ? 0 : 1;
  }
  Carver count(nullptr);
  count.take<std::uint16_t>(s.shape.ranks);
  count.take<Route>(here * elsewhere * s.shape.lanes);
  count.take<std::uint32_t>(here * elsewhere * s.shape.lanes);
  count.take<std::uint64_t*>(here * s.shape.lanes * s.shape.ranks);
  count.take<Peer>(s.processes);
  count.take<Announcements>(elsewhere);
  std::size_t bytes = count.bytes();
  Carver route(nullptr);
  route.take<std::uint64_t>(s.shape.connectors);
  route.take<std::uint64_t>(s.shape.connectors);
  route.take<Out>(s.shape.connectors);
  route.take<In>(s.shape.connectors);
  route.take<Borrowed>(s.shape.pool_slots);
  bytes += route.bytes() * here * elsewhere * s.shape.lanes;
  Carver announced(nullptr);
  announced.take<std::uint64_t>(kAnnouncements);
  return bytes + announced.bytes() * elsewhere;
}

void Courier::carve(Carver& carver) {
  index_ = carver.take<std::uint16_t>(shape_.ranks);
  for (std::uint32_t r = 0; r < shape_.ranks; ++r) {
    if (is_here(r)) index_[r] = static_cast<std::uint16_t>(here_++);
    if (is_remote(r)) index_[r] = static_cast<std::uint16_t>(elsewhere_++);
  }
  num_routes_ = here_ * elsewhere_ * shape_.lanes;
  routes_ = carver.take<Route>(num_routes_);
  by_process_ = carver.take<std::uint32_t>(num_routes_);
  groups_ = carver.take<std::uint64_t*>(std::size_t{here_} * shape_.lanes * shape_.ranks);
  peers_ = carver.take<Peer>(processes_);
  announcements_ = carver.take<Announcements>(elsewhere_);
}

Courier::Courier(const CourierSettings& s, unsigned char* memory, Fabric& fabric, CourierHome& home)
    : shape_(s.shape),
      processes_(s.processes),
      self_(s.self),
      process_of_(s.process_of),
      bases_(s.bases),
      window_(s.window),
      fabric_(fabric),
      home_(home) {
  Carver carver(memory);
  carve(carver);
  for (std::uint32_t r = 0; r < shape_.ranks; ++r) {
    if (!is_here(r)) continue;
    for (std::uint32_t q = 0; q < shape_.ranks; ++q) {
      if (!is_remote(q)) continue;
      for (std::uint32_t l = 0; l < shape_.lanes; ++l) {
        Route& to = *route(r, q, l);
        to.rank = static_cast<std::uint16_t>(r);
        to.peer = static_cast<std::uint16_t>(q);
        to.lane = l;
        to.process = process_of_[q];
        to.own = bases_[r][r] + shape_.block(r, q) + shape_.head(l);
        to.mirror = bases_[r][q] + shape_.block(q, r) + shape_.head(l);
        to.board.posted = carver.take<std::uint64_t>(shape_.connectors);
        to.board.groups = carver.take<std::uint64_t>(shape_.connectors);
        to.out = carver.take<Out>(shape_.connectors);
        to.in = carver.take<In>(shape_.connectors);
        to.borrowed = carver.take<Borrowed>(shape_.pool_slots);
        groups_[(std::size_t{index_[r]} * shape_.lanes + l) * shape_.ranks + q] = to.board.groups;
      }
      Announcements& a = announcements_[index_[q]];
      a.home = static_cast<std::uint16_t>(q);
      a.mirror = reinterpret_cast<const std::uint64_t*>(bases_[r][q] + shape_.announcements());
    }
  }
  for (std::uint32_t q = 0; q < elsewhere_; ++q) {
    announcements_[q].sent = carver.take<std::uint64_t>(kAnnouncements);
  }
  std::uint32_t n = 0;
  for (std::uint32_t p = 0; p < processes_; ++p) {
    peers_[p].first = n;
    for (std::uint32_t i = 0; i < num_routes_; ++i) {
      if (routes_[i].process == p) by_process_[n++] = i;
    }
    peers_[p].count = n - peers_[p].first;
  }
}

Courier::Route* Courier::route(std::uint32_t rank, std::uint32_t peer, std::uint32_t lane) const {
  return routes_ + (std::size_t{index_[rank]} * elsewhere_ + index_[peer]) * shape_.lanes + lane;
}

unsigned char* Courier::slot_of(unsigned char* part, std::uint32_t lane, std::uint32_t i,
                                std::uint64_t step, std::uint32_t location) const {
  if (location != 0) {
    return part - shape_.head(lane) + shape_.borrowed(lane) +
           std::uint64_t{location - 1} * shape_.pool_slot_bytes;
  }
  return steps(part, lane, i) + kSlotHeaders * sizeof(SlotHeader) +
         step % shape_.guaranteed_slots * shape_.guaranteed_slot_bytes;
}

// Of a step that is posted and not shown as consumed.
std::uint32_t Courier::step_bytes(Route& r, std::uint32_t i, std::uint64_t step) const {
  return load_relaxed(LaneTransport::header_of(steps(r.mirror, r.lane, i), step).bytes);
}

// ---- for lanes ----

bool Courier::posted(std::uint32_t rank, std::uint32_t lane, std::uint32_t peer,
                     const PublishedWord& word) {
  if (!is_remote(peer)) return false;
  leave_word(route(rank, peer, lane)->board,
             posted_at(shape_, bases_[rank][peer], peer, rank, lane, word.place));
  return true;
}

void Courier::marked(std::uint32_t rank, std::uint32_t lane, std::uint32_t peer) {
  if (is_remote(peer)) leave_marks(route(rank, peer, lane)->board);
}

std::uint64_t* const* Courier::groups(std::uint32_t rank, std::uint32_t lane) const {
  return groups_ + (std::size_t{index_[rank]} * shape_.lanes + lane) * shape_.ranks;
}

void Courier::announced() { fetch_add<std::uint64_t>(announced_, 1); }

// Release: what was posted comes before.
void Courier::leave(std::uint32_t peer) { store_release(peers_[peer].leaves, 1u); }

// ---- driving ----

// The exchange acquires, and the store that ends it releases: drivers follow each other.
bool Courier::take_driving() {
  return load_relaxed(driven_) == 0 && compare_exchange(driven_, 0u, 1u);
}

bool Courier::arm() {
  if (!take_driving()) return false;
  const bool armed = fabric_.arm();
  store_release(driven_, 0u);
  return armed;
}

bool Courier::drive() {
  if (!take_driving()) return false;
  bool moved = fabric_.poll(*this);
  if (look()) moved = true;
  for (std::uint32_t p = 0; p < processes_; ++p) {
    if (p != self_ && peers_[p].state != State::kGone && speak(p)) moved = true;
  }
  store_release(driven_, 0u);
  return moved;
}

bool Courier::look() {
  bool found = false;
  for (std::uint32_t n = 0; n < num_routes_; ++n) {
    Route& r = routes_[n];
    if (peers_[r.process].state != State::kGone && look(r)) found = true;
  }
  return found;
}

bool Courier::look(Route& r) {
  const std::uint64_t data = r.seen_data, credits = r.seen_credits, marks = r.seen_marks;
  // (Hints are believed as far as they are connectors.)
  if (!r.board.data.read(r.seen_data, [&](std::uint32_t i) {
        if (i < shape_.connectors) queue_steps(r, i);
      })) {
    for (std::uint32_t i = 0; i < shape_.connectors; ++i) queue_steps(r, i);
  }
  if (!r.board.credits.read(r.seen_credits, [&](std::uint32_t i) {
        if (i < shape_.connectors) queue_credit(r, i);
      })) {
    for (std::uint32_t i = 0; i < shape_.connectors; ++i) queue_credit(r, i);
  }
  // Acquire: pairs with the release in leave_marks().
  r.seen_marks = load_acquire(r.board.marks);
  if (r.seen_marks != marks) {
    for (std::uint32_t i = 0; i < shape_.connectors; ++i) give_up_if_marked(r, i);
  }
  return r.seen_data != data || r.seen_credits != credits || r.seen_marks != marks;
}

void Courier::queue_steps(Route& r, std::uint32_t i) {
  Out& out = r.out[i];
  // Acquire: pairs with the release in leave_word().
  if (out.queued || load_acquire(r.board.posted[i]) == out.sent) return;
  const bool is_long = step_bytes(r, i, out.sent) > kShortBytes;
  out.queued = true;
  push(r.steps[is_long ? 1 : 0], r.out, i, &Out::next);
}

void Courier::queue_credit(Route& r, std::uint32_t i) {
  In& in = r.in[i];
  if (in.queued || consumed(r, i) == in.credited) return;
  in.queued = true;
  push(r.credits, r.in, i, &In::next);
}

// ---- sending ----

bool Courier::send_head(std::uint32_t p, const CourierFrame& frame) {
  if (!fabric_.send(p, FrameChannel::kShort, encode(frame), nullptr, 0, 0)) return false;
  ++counts_.sent;
  if (frame.type != FrameType::kBye) ++peers_[p].sent;
  return true;
}

// What frees places at the other end goes first, then what is short.
bool Courier::speak(std::uint32_t p) {
  Peer& peer = peers_[p];
  if (peer.has_left) return false;
  const std::uint64_t before = peer.sent;
  bool room = true;
  for (std::uint32_t k = 0; k < peer.count && room; ++k) {
    Route& r = routes_[by_process_[peer.first + k]];
    room = send_credits(r) && send_unlists(r);
  }
  if (room) room = send_announcements(p);
  if (room) send_steps(peer, p, FrameChannel::kShort);
  send_steps(peer, p, FrameChannel::kBulk);
  const bool moved = peer.sent != before;
  if (load_acquire(peer.leaves) != 0) send_bye(p);
  return moved;
}

bool Courier::send_credits(Route& r) {
  while (r.credits.head != kNone) {
    CourierFrame f;
    f.type = FrameType::kCredits;
    f.src = r.rank, f.dst = r.peer;
    f.lane = static_cast<std::uint8_t>(r.lane);
    for (std::uint32_t i = r.credits.head; i != kNone && f.count < CourierFrame::kMostCredits;
         i = r.in[i].next) {
      f.connectors[f.count] = static_cast<std::uint16_t>(i);
      f.consumed[f.count++] = consumed(r, i);
    }
    if (!send_head(r.process, f)) return false;
    for (std::uint32_t n = 0; n < f.count; ++n) {
      In& in = r.in[pop(r.credits, r.in, &In::next)];
      in.queued = false;
      in.credited = f.consumed[n];
    }
  }
  return true;
}

bool Courier::send_unlists(Route& r) {
  while (r.unlists.head != kNone) {
    const std::uint32_t i = r.unlists.head;
    Out& out = r.out[i];
    if (out.unlists) {
      CourierFrame f;
      f.type = FrameType::kUnlist;
      f.src = r.rank, f.dst = r.peer;
      f.lane = static_cast<std::uint8_t>(r.lane);
      f.connectors[0] = static_cast<std::uint16_t>(i);
      f.tag = out.tag, f.base = out.base;
      if (!send_head(r.process, f)) return false;
      out.tag = kTagUnused;
    }
    out.unlists = out.in_unlists = false;
    pop(r.unlists, r.out, &Out::next_unlist);
  }
  return true;
}

bool Courier::send_announcements(std::uint32_t p) {
  // Acquire: pairs with the addition in announced(): the word is there.
  const std::uint64_t now = load_acquire(announced_);
  for (std::uint32_t q = 0; q < elsewhere_; ++q) {
    Announcements& a = announcements_[q];
    if (a.seen == now || process_of_[a.home] != p) continue;
    for (std::uint32_t place = 0; place < kAnnouncements; ++place) {
      const std::uint64_t word = load_relaxed(a.mirror[place]);
      if (word == a.sent[place]) continue;
      CourierFrame f;
      f.type = FrameType::kAnnounce;
      f.dst = a.home;
      f.location = place;
      f.step = word;
      if (!send_head(p, f)) return false;
      a.sent[place] = word;
    }
    a.seen = now;
  }
  return true;
}

// Routes take turns: each may send as many bytes as the longest slot has, and keeps what is left
// for its next turn while it has something to send.
bool Courier::send_steps(Peer& peer, std::uint32_t p, FrameChannel channel) {
  const auto c = static_cast<std::size_t>(channel);
  const std::uint32_t turn =
      std::max({shape_.guaranteed_slot_bytes, shape_.pool_slot_bytes, kShortBytes});
  std::uint32_t empty = 0;
  while (empty < peer.count && peers_[p].state != State::kGone) {
    Route& r = routes_[by_process_[peer.first + peer.turn[c]]];
    Fifo& queue = r.steps[c];
    empty = queue.head == kNone ? empty + 1 : 0;
    std::uint32_t& allowance = r.allowance[c];
    if (queue.head != kNone) allowance += turn;
    while (queue.head != kNone) {
      const std::uint32_t i = queue.head;
      Out& out = r.out[i];
      const std::uint32_t bytes = step_bytes(r, i, out.sent);
      if (bytes > allowance) break;
      if (!send_step(r, i, channel, bytes)) {
        allowance -= std::min(turn, allowance);  // the turn is to be had again
        return false;
      }
      allowance -= bytes;
      pop(queue, r.out, &Out::next);
      out.queued = false;
      queue_steps(r, i);
    }
    if (queue.head == kNone) allowance = 0;
    peer.turn[c] = peer.turn[c] + 1 == peer.count ? 0 : peer.turn[c] + 1;
  }
  return true;
}

// The connector's next step, which is posted. Nobody consumes it before it is sent, so the lane
// leaves all of it as it is: its header and slot, and the connector to its owner. What it has
// stored about them was acquired with the count of what was posted.
bool Courier::send_step(Route& r, std::uint32_t i, FrameChannel channel, std::uint32_t bytes) {
  Peer& peer = peers_[r.process];
  std::uint64_t& under_way = peer.under_way[static_cast<std::size_t>(channel)];
  if (under_way != 0 && under_way + bytes > window_) return false;
  Out& out = r.out[i];
  SlotHeader& h = LaneTransport::header_of(steps(r.mirror, r.lane, i), out.sent);
  DirectoryEntry& entry = entries(r.mirror)[i];
  CourierFrame f;
  f.src = r.rank, f.dst = r.peer;
  f.lane = static_cast<std::uint8_t>(r.lane);
  f.connectors[0] = static_cast<std::uint16_t>(i);
  f.step = out.sent;
  f.bytes = bytes;
  f.location = load_relaxed(h.location);
  f.flag = load_relaxed(h.flag);
  f.tag = load_relaxed(entry.tag);
  f.base = load_relaxed(entry.base);
  f.group = load_relaxed(r.board.groups[i]);
  const auto number = static_cast<std::uint64_t>(&r - routes_);
  if (!fabric_.send(r.process, channel, encode(f), slot_of(r.mirror, r.lane, i, f.step, f.location),
                    bytes, cookie_of(number, i, channel, f.step))) {
    return false;
  }
  ++counts_.sent, ++peer.sent;
  if (f.tag != out.tag || f.base != out.base) {
    end_listing(r, i, f.tag);
    out.tag = f.tag, out.base = f.base;
    out.unlists = false;  // the former owner's: the receiver sees the new one
  }
  ++out.sent;
  if (bytes == 0) {
    sent(r.process, cookie_of(number, i, channel, f.step));
  } else {
    under_way += bytes;
  }
  return true;
}

// The key with this tag has another connector than its former one, if it had one: `but`. The lane
// gave up the former first.
void Courier::end_listing(Route& r, std::uint32_t but, std::uint64_t tag) {
  for (std::uint32_t i = 0; i < shape_.connectors; ++i) {
    Out& out = r.out[i];
    if (i == but || out.tag != tag || UNJAM_MISTAKE(kNeverUnlists)) continue;
    out.unlists = true;
    if (out.in_unlists) continue;
    out.in_unlists = true;
    push(r.unlists, r.out, i, &Out::next_unlist);
  }
}

bool Courier::idle(const Peer& peer) const {
  for (std::uint32_t k = 0; k < peer.count; ++k) {
    const Route& r = routes_[by_process_[peer.first + k]];
    for (const Fifo& queue : {r.steps[0], r.steps[1], r.credits, r.unlists}) {
      if (queue.head != kNone) return false;
    }
  }
  return peer.under_way[0] + peer.under_way[1] == 0;
}

void Courier::send_bye(std::uint32_t p) {
  Peer& peer = peers_[p];
  // What was posted before leave() is seen now.
  for (std::uint32_t k = 0; k < peer.count; ++k) look(routes_[by_process_[peer.first + k]]);
  if (!idle(peer)) return;
  CourierFrame f;
  f.type = FrameType::kBye;
  f.step = peer.sent;
  peer.has_left = send_head(p, f);
}

void Courier::sent(std::uint32_t p, std::uint64_t cookie) {
  const std::uint64_t number = cookie >> 32;
  const auto i = static_cast<std::uint32_t>(cookie >> 16 & 0xffff);
  if (number >= num_routes_ || i >= shape_.connectors) return fail(p, "a carrier's mistake");
  Route& r = routes_[number];
  Out& out = r.out[i];
  const std::uint64_t step = step_from(out.complete, cookie & 0xff);
  if (step >= out.sent || (out.completed & bit(step)) != 0) return fail(p, "a carrier's mistake");
  const std::uint32_t bytes = step_bytes(r, i, step);
  if (bytes != 0) peers_[p].under_way[cookie >> 8 & 1] -= bytes;
  out.completed = static_cast<std::uint16_t>(out.completed | bit(step));
  while (out.complete != out.sent && (out.completed & bit(out.complete)) != 0) {
    out.completed = static_cast<std::uint16_t>(out.completed & ~bit(out.complete));
    ++out.complete;
  }
  show(r, i);
}

void Courier::show(Route& r, std::uint32_t i) {
  Out& out = r.out[i];
  const std::uint64_t now =
      UNJAM_MISTAKE(kShowsEarly) ? out.credit : std::min(out.credit, out.complete);
  if (now == out.shown) return;
  out.shown = now;
  // Release: the peer has read these slots where they went to, and the carrier, which has told us,
  // here.
  store_release(cells(r.own)[i].consumed, now);
  home_.ring(r.rank, r.lane, CourierHome::Came::kRoom);
}

}  // namespace unjam
