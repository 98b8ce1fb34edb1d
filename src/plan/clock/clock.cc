#include "plan/clock/clock.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "plan/clock/event_queue.h"
#include "plan/clock/network.h"

namespace unjam {
namespace {

constexpr std::uint32_t kNone = 0xffffffff;

Picoseconds picoseconds(double us) {
  return static_cast<Picoseconds>(std::llround(us * kPicosecondsAUs));
}

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// One direction between two lanes.
struct Channel {
  std::uint32_t way = 0;           // in Network
  std::uint32_t from = 0, to = 0;  // lanes; of a folded run those that stand for them
  std::uint32_t arrived = 0;       // and not taken
  std::uint32_t room = 0;
  // Slices so far: begun by the sender, through all ports, and given back. (For the critical path.)
  std::uint32_t begun = 0, sent = 0, taken = 0;
};

struct Message {
  std::uint32_t channel = 0;
  std::uint32_t port = 0;  // the next one on its way
  std::uint64_t bytes = 0;
  Picoseconds left = 0;  // the last port, as far as it is known
  Picoseconds queue = 0;
  std::uint32_t record = kNone;
};

// For the critical path: each slice, and what came of it.
struct SliceRecord {
  PathSlice slice;
  std::uint32_t before = kNone;  // the record of its cause
};
struct MessageRecord {
  std::uint32_t slice = kNone;
  Picoseconds queue = 0, transmit = 0;
};

struct Lane {
  std::uint32_t step = 0;  // of the program
  std::uint32_t repeat = 0;
  std::uint32_t slice = 0;
  std::uint64_t pass = 0;
  bool busy = false, waited = false, done = false;
  Cause cause = Cause::kStart;
  std::uint32_t cause_channel = kNone;
  std::uint32_t last_record = kNone;
};

class ClockRun {
 public:
  ClockRun(const Pattern& pattern, const Machine& machine, const RunOptions& options)
      : p_(pattern), m_(machine), options_(options), network_(pattern, machine) {
    const std::size_t lanes = at(p_.ranks) * p_.lanes;
    lanes_.resize(lanes);
    max_lag_.assign(at(p_.ranks), 0);
    for (int r = 0; r < p_.ranks; ++r) {
      for (const ClockStep& s : p_.program(r)) max_lag_[at(r)] = std::max(max_lag_[at(r)], s.lag);
    }
    channels_.resize(network_.ways().size() * p_.lanes);
    for (std::size_t w = 0; w < network_.ways().size(); ++w) {
      const Way& way = network_.ways()[w];
      for (std::uint32_t l = 0; l < p_.lanes; ++l) {
        Channel& c = channels_[w * p_.lanes + l];
        c.way = static_cast<std::uint32_t>(w);
        c.from = lane_of(way.from, l);
        c.to = lane_of(way.to, l);
        c.room = m_.slots;
      }
    }
    count_lane_loops();
    free_ports_.assign(network_.num_ports(), 0);
    busy_ports_.assign(network_.num_ports(), 0);
    cores_.assign(at(network_.nodes()) * at(m_.cores), 0);
    slice_ = picoseconds(m_.slice_us);
    wait_ = picoseconds(m_.wait_us);
    peer_ = picoseconds(m_.peer_us);
    engine_ps_ = ps_per_byte(m_.engine_gb_per_s);
    if (options_.keep_path) {
      messages_of_.resize(channels_.size() * m_.slots);
      releases_of_.resize(channels_.size() * m_.slots, kNone);
    }
  }

  RunResult run() {
    result_.rank_ends.assign(at(p_.ranks), 0);
    std::vector<Picoseconds> starts(at(p_.ranks), 0);
    for (const LateRank& late : options_.late) starts[at(late.rank)] = picoseconds(late.us);
    // (A lane's first event: as if a slice were done, of which nothing comes.)
    for (std::uint32_t e = 0; e < lanes_.size(); ++e) {
      events_.push(starts[at(rank_of(e))], e, Event::kSliceDone, kNone);
    }
    while (!events_.empty() && result_.error.empty()) {
      const Event event = events_.pop();
      now_ = event.time;
      happen(event);
    }
    if (result_.error.empty()) finish();
    return std::move(result_);
  }

 private:
  std::uint32_t lane_of(int rank, std::uint32_t lane) const {
    return static_cast<std::uint32_t>(rank) * p_.lanes + lane;
  }
  int rank_of(std::uint32_t e) const { return static_cast<int>(e / p_.lanes); }
  std::uint32_t lane_number(std::uint32_t e) const { return e % p_.lanes; }

  void count_lane_loops() {
    for (std::uint32_t l = 0; l < p_.lanes; ++l) {
      std::uint64_t longest = 0, full = std::numeric_limits<std::uint64_t>::max();
      for (std::uint32_t p = 0; p < p_.parts; ++p) {
        const std::uint64_t bytes = p_.lane_bytes[at(p) * p_.lanes + l];
        longest = std::max(longest, bytes);
        if (bytes != 0) full = std::min(full, bytes / p_.chunk_bytes);
      }
      if (longest == 0) full = 0;
      const std::uint64_t skipped = std::min(options_.skipped_loops, full);
      loops_.push_back((longest + p_.chunk_bytes - 1) / p_.chunk_bytes - skipped);
      first_skipped_.push_back(full - skipped);
      skipped_.push_back(skipped);
    }
    result_.loop_ends.assign(*std::max_element(loops_.begin(), loops_.end()), 0);
  }

  std::uint64_t chunk(std::uint32_t part, std::uint32_t lane, std::uint64_t loop) const {
    if (loop >= first_skipped_[lane]) loop += skipped_[lane];
    const std::uint64_t bytes = p_.lane_bytes[std::size_t{part} * p_.lanes + lane];
    const std::uint64_t begin = loop * p_.chunk_bytes;
    return begin >= bytes ? 0 : std::min(p_.chunk_bytes, bytes - begin);
  }

  // Bytes of the step's chunk: of the longest one, where each peer has its own.
  std::uint64_t work(const ClockStep& s, std::uint32_t lane, std::uint64_t loop) const {
    if ((s.flags & (kScatter | kCollect)) == 0) return chunk(s.part, lane, loop);
    std::uint64_t longest = 0;
    for (const int q : (s.flags & kScatter) != 0 ? p_.to(s) : p_.from(s)) {
      longest = std::max(longest, chunk(static_cast<std::uint32_t>(q), lane, loop));
    }
    return longest;
  }

  std::uint64_t part_of_slice(std::uint64_t length, std::uint32_t slice) const {
    const std::uint64_t begin = slice * p_.slice_bytes;
    return begin >= length ? 0 : std::min(p_.slice_bytes, length - begin);
  }

  // The slice that the lane is at: 0 bytes, if its step has none (any more).
  std::uint64_t slice_bytes(const Lane& lane, std::uint32_t number, const ClockStep& s) const {
    if (lane.pass < s.lag || lane.pass - s.lag >= loops_[number]) return 0;
    return part_of_slice(work(s, number, lane.pass - s.lag), lane.slice);
  }
  // What of it goes to, or comes from, one peer.
  std::uint64_t peer_bytes(const Lane& lane, std::uint32_t number, const ClockStep& s, int peer,
                           unsigned own_part_flag, std::uint64_t bytes) const {
    if ((s.flags & own_part_flag) == 0) return bytes;
    return part_of_slice(chunk(static_cast<std::uint32_t>(peer), number, lane.pass - s.lag),
                         lane.slice);
  }

  std::uint32_t repeats(const ClockStep& s) const {
    return s.grows ? s.repeats - options_.skipped_repeats : s.repeats;
  }

  void happen(const Event& event) {
    switch (event.type) {
      case Event::kSliceDone:
        if (lanes_[event.who].busy) complete(event.who);
        advance(event.who);
        break;
      case Event::kPort:
        travel(event.what);
        break;
      case Event::kArrival: {
        Channel& c = channels_[event.what];
        ++c.arrived;
        wake(c.to, Cause::kData, event.what);
        break;
      }
      case Event::kRoom: {
        Channel& c = channels_[event.what];
        ++c.room;
        wake(c.from, Cause::kRoom, event.what);
        break;
      }
    }
  }

  void wake(std::uint32_t e, Cause cause, std::uint32_t channel) {
    Lane& lane = lanes_[e];
    if (lane.busy || lane.done || !lane.waited) return;
    lane.cause = cause;
    lane.cause_channel = channel;
    advance(e);
  }

  // Steps and repeats, until a slice is begun, or waits.
  void advance(std::uint32_t e) {
    Lane& lane = lanes_[e];
    const int rank = rank_of(e);
    const std::uint32_t number = lane_number(e);
    const std::span<const ClockStep> program = p_.program(rank);
    while (lane.pass < loops_[number] + max_lag_[at(rank)]) {
      if (lane.step == program.size()) {
        end_pass(lane, rank);
        continue;
      }
      const ClockStep* s = &program[lane.step];
      const bool pair = (s->flags & kWithNext) != 0;
      const std::uint64_t bytes = slice_bytes(lane, number, *s);
      const std::uint64_t next = pair ? slice_bytes(lane, number, program[lane.step + 1]) : 0;
      if (bytes == 0 && next == 0) {
        const bool again = lane.slice > 0 && ++lane.repeat < repeats(*s);
        lane.slice = 0;
        if (again) continue;
        lane.repeat = 0;
        lane.step += pair ? 2 : 1;
        continue;
      }
      const bool first_can = bytes == 0 || can_move(e, *s, bytes);
      if (!first_can || (next != 0 && !can_move(e, program[lane.step + 1], next))) {
        lane.waited = true;
        return;
      }
      begin(e, bytes, next);
      return;
    }
    lane.done = true;
    result_.rank_ends[at(rank)] = std::max(result_.rank_ends[at(rank)], now_);
    if (now_ >= result_.end) {
      result_.end = now_;
      last_record_ = lane.last_record;
    }
  }

  void end_pass(Lane& lane, int rank) {
    lane.step = 0;
    const std::uint64_t lag = max_lag_[at(rank)];
    if (lane.pass >= lag) {
      Picoseconds& end = result_.loop_ends[lane.pass - lag];
      end = std::max(end, now_);
    }
    ++lane.pass;
  }

  bool can_move(std::uint32_t e, const ClockStep& s, std::uint64_t bytes) const {
    const Lane& lane = lanes_[e];
    const std::uint32_t number = lane_number(e);
    std::uint32_t k = network_.first_way(s);
    for (const int q : p_.from(s)) {
      const Channel& c = channels_[at(network_.way(k++)) * p_.lanes + number];
      if (peer_bytes(lane, number, s, q, kCollect, bytes) != 0 && c.arrived == 0) return false;
    }
    for (const int q : p_.to(s)) {
      const Channel& c = channels_[at(network_.way(k++)) * p_.lanes + number];
      if (peer_bytes(lane, number, s, q, kScatter, bytes) != 0 && c.room == 0) return false;
    }
    return true;
  }

  void begin(std::uint32_t e, std::uint64_t bytes, std::uint64_t next) {
    Lane& lane = lanes_[e];
    const std::span<const ClockStep> program = p_.program(rank_of(e));
    take(e, program[lane.step], bytes);
    double moved = static_cast<double>(bytes) * most_moved(program[lane.step]);
    Picoseconds more_peers = peer_ * further_peers(program[lane.step]);
    if (next != 0) {
      take(e, program[lane.step + 1], next);
      moved += static_cast<double>(next) * most_moved(program[lane.step + 1]);
      more_peers += peer_ * further_peers(program[lane.step + 1]);
    }
    const Picoseconds takes = slice_ + (lane.waited ? wait_ : 0) + more_peers +
                              static_cast<Picoseconds>(std::llround(moved * engine_ps_));
    Picoseconds start = now_;
    if (m_.cores > 0) {
      const auto first = cores_.begin() + network_.node_of(rank_of(e)) * m_.cores;
      const auto core = std::min_element(first, first + m_.cores);
      start = std::max(start, *core);
      *core = start + takes;
    }
    if (++result_.slices > kMostSlices) {
      result_.error = "it takes more than " + std::to_string(kMostSlices) +
                      " slices: give a smaller size, fewer ranks or larger slots";
    }
    if (lane.waited && lane.cause == Cause::kRoom) ++result_.waits_for_room;
    lane.busy = true;
    if (options_.keep_path) record(e, start, start + takes);
    lane.waited = false;
    events_.push(start + takes, e, Event::kSliceDone, kNone);
  }

  static Picoseconds further_peers(const ClockStep& s) {
    const Picoseconds peers = std::max(s.num_from, s.num_to);
    return peers > 0 ? peers - 1 : 0;
  }
  static double most_moved(const ClockStep& s) { return std::max(s.reads, s.writes); }

  // Takes what the slice needs, so that it can happen.
  void take(std::uint32_t e, const ClockStep& s, std::uint64_t bytes) {
    if (bytes == 0) return;
    const Lane& lane = lanes_[e];
    const std::uint32_t number = lane_number(e);
    std::uint32_t k = network_.first_way(s);
    for (const int q : p_.from(s)) {
      Channel& c = channels_[at(network_.way(k++)) * p_.lanes + number];
      if (peer_bytes(lane, number, s, q, kCollect, bytes) != 0) --c.arrived;
    }
    for (const int q : p_.to(s)) {
      Channel& c = channels_[at(network_.way(k++)) * p_.lanes + number];
      if (peer_bytes(lane, number, s, q, kScatter, bytes) == 0) continue;
      --c.room;
      ++c.begun;
    }
  }

  // The lane's slice is done: it is sent, and what it was made of is given back.
  void complete(std::uint32_t e) {
    Lane& lane = lanes_[e];
    const std::uint32_t number = lane_number(e);
    const std::span<const ClockStep> program = p_.program(rank_of(e));
    const std::uint32_t steps = (program[lane.step].flags & kWithNext) != 0 ? 2 : 1;
    for (std::uint32_t i = 0; i < steps; ++i) {
      const ClockStep& s = program[lane.step + i];
      const std::uint64_t bytes = slice_bytes(lane, number, s);
      if (bytes == 0) continue;
      std::uint32_t k = network_.first_way(s);
      for (const int q : p_.from(s)) {
        const std::uint32_t c = network_.way(k++) * p_.lanes + number;
        if (peer_bytes(lane, number, s, q, kCollect, bytes) != 0) give_back(e, c);
      }
      for (const int q : p_.to(s)) {
        const std::uint32_t c = network_.way(k++) * p_.lanes + number;
        const std::uint64_t sent = peer_bytes(lane, number, s, q, kScatter, bytes);
        if (sent != 0) send(e, c, sent);
      }
    }
    lane.busy = false;
    lane.cause = Cause::kOwn;
    ++lane.slice;
  }

  void give_back(std::uint32_t e, std::uint32_t channel) {
    Channel& c = channels_[channel];
    if (options_.keep_path) {
      releases_of_[std::size_t{channel} * m_.slots + c.taken % m_.slots] = lanes_[e].last_record;
    }
    ++c.taken;
    events_.push(now_ + network_.ways()[c.way].latency, c.from, Event::kRoom, channel);
  }

  void send(std::uint32_t e, std::uint32_t channel, std::uint64_t bytes) {
    ++result_.messages;
    std::uint32_t id;
    if (unused_.empty()) {
      id = static_cast<std::uint32_t>(messages_.size());
      messages_.emplace_back();
    } else {
      id = unused_.back();
      unused_.pop_back();
    }
    messages_[id] = {channel, 0, p_.wire_bytes(bytes), now_, 0, lanes_[e].last_record};
    travel(id);
  }

  // Through as many ports as it can enter now.
  void travel(std::uint32_t id) {
    Message& m = messages_[id];
    const Channel& c = channels_[m.channel];
    const Way& way = network_.ways()[c.way];
    while (m.port < way.num_ports) {
      const std::uint32_t port = network_.port(way, m.port, lane_number(c.from));
      Picoseconds& free = free_ports_[port];
      const Picoseconds start = std::max(now_, free);
      const auto takes = static_cast<Picoseconds>(
          std::llround(static_cast<double>(m.bytes) * network_.ps_of(port)));
      // It cannot be through before the port in front is.
      const Picoseconds end = std::max(start + takes, m.left);
      if (end > kLongestRun) result_.error = "it takes more than 1000000 s";
      busy_ports_[port] += takes;
      // (What trickles in from a slower port leaves room between.)
      free = start + takes;
      m.left = end;
      ++m.port;
      if (start > now_) {
        m.queue += start - now_;
        if (m.port < way.num_ports) {
          events_.push(start, c.from, Event::kPort, id);
          return;
        }
      }
    }
    if (options_.keep_path) {
      Channel& counted = channels_[m.channel];
      MessageRecord& r =
          messages_of_[std::size_t{m.channel} * m_.slots + counted.sent++ % m_.slots];
      r = {m.record, m.queue, m.left - posted(m) - m.queue};
    }
    events_.push(m.left + way.latency, c.to, Event::kArrival, m.channel);
    unused_.push_back(id);
  }

  Picoseconds posted(const Message& m) const {
    return m.record == kNone ? 0 : records_[m.record].slice.end;
  }

  void record(std::uint32_t e, Picoseconds start, Picoseconds end) {
    Lane& lane = lanes_[e];
    SliceRecord r;
    r.slice.rank = rank_of(e);
    r.slice.lane = static_cast<int>(lane_number(e));
    r.slice.step = lane.step;
    const ClockStep& step = p_.program(rank_of(e))[lane.step];
    r.slice.flags = step.flags;
    r.slice.loop = lane.pass < step.lag ? 0 : lane.pass - step.lag;
    r.slice.cause = lane.cause;
    r.slice.core = start - now_;
    r.slice.start = start;
    r.slice.end = end;
    r.before = lane.last_record;
    if (lane.cause == Cause::kData || lane.cause == Cause::kRoom) {
      add_cause(lane.cause_channel, &r);
    }
    lane.last_record = static_cast<std::uint32_t>(records_.size());
    records_.push_back(r);
  }

  // What has just arrived: the channel's last message that was sent and is there, or the last room.
  void add_cause(std::uint32_t channel, SliceRecord* r) {
    const Channel& c = channels_[channel];
    const Way& way = network_.ways()[c.way];
    r->slice.between_nodes = way.between_nodes;
    r->slice.latency = way.latency;
    if (r->slice.cause == Cause::kData) {
      // (The slice has taken it by now. Messages in flight are behind it.)
      const MessageRecord& m = messages_of_[std::size_t{channel} * m_.slots + c.taken % m_.slots];
      r->before = m.slice;
      r->slice.queue = m.queue;
      r->slice.transmit = m.transmit;
      r->slice.port = network_.slowest(way);
      r->slice.peer = rank_of(c.from);
    } else {
      // What the slice's room was given back by: it is counted among those begun by now.
      r->before = releases_of_[std::size_t{channel} * m_.slots + (c.begun - 1) % m_.slots];
      r->slice.peer = rank_of(c.to);
    }
  }

  void finish() {
    for (std::uint32_t e = 0; e < lanes_.size(); ++e) {
      if (lanes_[e].done) continue;
      result_.error = "rank " + std::to_string(rank_of(e)) + " cannot go on with " +
                      std::to_string(m_.slots) + " slots: step " + std::to_string(lanes_[e].step) +
                      " waits for ever";
      return;
    }
    for (std::uint32_t port = 0; port < busy_ports_.size(); ++port) {
      PortUse& use = result_.use[static_cast<std::size_t>(network_.class_of(port))];
      ++use.ports;
      if (busy_ports_[port] <= use.busy) continue;
      use.busy = busy_ports_[port];
      use.port = network_.place_of(port);
    }
    for (std::uint32_t i = last_record_; i != kNone; i = records_[i].before) {
      result_.path.push_back(records_[i].slice);
    }
    std::reverse(result_.path.begin(), result_.path.end());
  }

  const Pattern& p_;
  const Machine& m_;
  const RunOptions& options_;
  const Network network_;
  std::vector<Lane> lanes_;
  std::vector<std::uint32_t> max_lag_;
  std::vector<Channel> channels_;
  std::vector<Message> messages_;
  std::vector<std::uint32_t> unused_;
  EventQueue events_;
  std::vector<std::uint64_t> loops_, first_skipped_, skipped_;  // of each lane number
  std::vector<Picoseconds> free_ports_, busy_ports_, cores_;
  std::vector<SliceRecord> records_;
  std::vector<MessageRecord> messages_of_;
  std::vector<std::uint32_t> releases_of_;
  Picoseconds now_ = 0, slice_ = 0, wait_ = 0, peer_ = 0;
  double engine_ps_ = 0;
  std::uint32_t last_record_ = kNone;
  RunResult result_;
};

}  // namespace

LoopCounts count_loops(const Pattern& pattern) {
  LoopCounts counts;
  counts.full = std::numeric_limits<std::uint64_t>::max();
  for (std::uint32_t l = 0; l < pattern.lanes; ++l) {
    std::uint64_t full = std::numeric_limits<std::uint64_t>::max(), longest = 0;
    for (std::uint32_t p = 0; p < pattern.parts; ++p) {
      const std::uint64_t bytes = pattern.lane_bytes[std::size_t{p} * pattern.lanes + l];
      longest = std::max(longest, bytes);
      if (bytes != 0) full = std::min(full, bytes / pattern.chunk_bytes);
    }
    counts.most = std::max(counts.most, (longest + pattern.chunk_bytes - 1) / pattern.chunk_bytes);
    counts.full = std::min(counts.full, longest == 0 ? 0 : full);
  }
  return counts;
}

RunResult run_clock(const Pattern& pattern, const Machine& machine, const RunOptions& options) {
  return ClockRun(pattern, machine, options).run();
}

}  // namespace unjam
