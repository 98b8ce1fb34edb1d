#include "plan/check/lane_run.h"

#include <algorithm>
#include <utility>

#include "plan/check/validate.h"
#include "plan/describe.h"

namespace unjam {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

std::string name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

LaneRun::LaneRun(const PlanRequest& request, const std::vector<Plan>& plans, std::uint32_t lane,
                 int slots, std::uint32_t slot_bytes, std::vector<Loop> loops, ValuePool* values)
    : request_(request),
      plans_(plans),
      loops_(std::move(loops)),
      values_(values),
      capacity_(static_cast<std::uint64_t>(slots)),
      chunk_(plans[0].geometry.chunk),
      slice_elements_(unjam::slice_elements(plans[0], slot_bytes)),
      slices_(static_cast<std::uint32_t>((chunk_ + slice_elements_ - 1) / slice_elements_)),
      ranks_(index(request.ranks)),
      sets_(index(request.ranks)),
      connectors_into_(index(request.ranks)),
      loop_end_(loops_.size(), 0) {
  const Geometry& g = plans[0].geometry;
  for (std::uint32_t p = 0; p < g.parts; ++p) part_length_.push_back(g.lane_part(p, lane).length);
  if (values_ != nullptr) {
    const std::size_t cells = loops_.size() * g.parts * slices_;
    output_.assign(index(request.ranks), std::vector<ValueId>(cells, kNoValue));
    read_.assign(index(request.ranks), std::vector<std::uint8_t>(cells, 0));
    result_.assign(cells, kNoValue);
  }
  for (int r = 0; r < request.ranks; ++r) {
    const std::vector<Primitive>& program = plans[index(r)].primitives;
    if (!program.empty()) ranks_[index(r)].lag = program.back().lag;
    const Plan& plan = plans[index(r)];
    connectors_into_[index(r)].assign(plan.neighbours.size(), -1);
    for (const PeerSet& set : plan.sets) sets_[index(r)].push_back(ranks_in(plan, set));
  }
}

bool LaneRun::run() {
  for (int r = request_.ranks - 1; r >= 0; --r) wake(r);
  while (!runnable_.empty()) {
    const int r = runnable_.back();
    runnable_.pop_back();
    ranks_[index(r)].queued = false;
    if (!advance(r)) return false;
  }
  error_ = deadlock_text();
  if (error_.empty()) error_ = leftover_text();
  if (error_.empty()) error_ = alike_;
  return error_.empty();
}

std::uint64_t LaneRun::chunk_length(std::uint32_t part, std::uint64_t loop) const {
  const std::uint64_t length = part_length_[part], begin = loop * chunk_;
  return begin >= length ? 0 : std::min(chunk_, length - begin);
}

std::uint64_t LaneRun::work_length(int rank, std::uint32_t primitive, std::uint64_t loop) const {
  const Primitive& p = plans_[index(rank)].primitives[primitive];
  if ((p.flags & (kScatter | kCollect)) == 0) return chunk_length(p.part, loop);
  std::uint64_t longest = 0;
  const bool collects = (p.flags & kCollect) != 0;
  for (const int q : collects ? sources(rank, primitive) : targets(rank, primitive)) {
    longest = std::max(longest, chunk_length(static_cast<std::uint32_t>(q), loop));
  }
  return longest;
}

LaneRun::Ranks LaneRun::ranks_of(int rank, Peers peers, std::uint16_t wide) const {
  if (peers == kNobody) return {};
  if (is_set(peers)) return sets_[index(rank)][set_of(peers)];
  const std::uint16_t k = peers == kWidePeer ? wide : peers;
  return Ranks(plans_[index(rank)].neighbours).subspan(k, 1);
}

LaneRun::Ranks LaneRun::sources(int rank, std::uint32_t primitive) const {
  const Plan& plan = plans_[index(rank)];
  const bool wide = plan.primitives[primitive].from == kWidePeer;
  return ranks_of(rank, plan.primitives[primitive].from,
                  wide ? plan.wide_peers[primitive].from : kNoPeer);
}

LaneRun::Ranks LaneRun::targets(int rank, std::uint32_t primitive) const {
  const Plan& plan = plans_[index(rank)];
  const bool wide = plan.primitives[primitive].to == kWidePeer;
  return ranks_of(rank, plan.primitives[primitive].to,
                  wide ? plan.wide_peers[primitive].to : kNoPeer);
}

std::uint64_t LaneRun::length_from(int rank, const Primitive& p, int from,
                                   std::uint64_t length) const {
  if ((p.flags & kCollect) == 0) return length;
  return chunk_length(part_from(p, from), loops_[ranks_[index(rank)].loop].number);
}

std::uint64_t LaneRun::length_to(int rank, const Primitive& p, int to, std::uint64_t length) const {
  if ((p.flags & kScatter) == 0) return length;
  return chunk_length(part_to(p, to), loops_[ranks_[index(rank)].loop].number);
}

std::uint32_t LaneRun::part_from(const Primitive& p, int from) {
  return (p.flags & kCollect) != 0 ? static_cast<std::uint32_t>(from) : p.part;
}

std::uint32_t LaneRun::part_to(const Primitive& p, int to) {
  return (p.flags & kScatter) != 0 ? static_cast<std::uint32_t>(to) : p.part;
}

LaneRun::Connector& LaneRun::connector(int from, int to) {
  const std::vector<std::uint16_t>& neighbours = plans_[index(to)].neighbours;
  const auto at = std::lower_bound(neighbours.begin(), neighbours.end(), from);
  const bool known = at != neighbours.end() && *at == from;
  int& id = known ? connectors_into_[index(to)][static_cast<std::size_t>(at - neighbours.begin())]
                  : strange_
                        .try_emplace(std::uint64_t{static_cast<std::uint32_t>(from)} << 32 |
                                         static_cast<std::uint32_t>(to),
                                     -1)
                        .first->second;
  if (id < 0) {
    id = static_cast<int>(connectors_.size());
    connectors_.emplace_back();
    connectors_.back().from = from;
    connectors_.back().to = to;
    connectors_.back().slots.resize(capacity_);
  }
  return connectors_[index(id)];
}

// The message that `to` would receive next, or null; then `to` waits for it.
const LaneRun::Message* LaneRun::front(int from, int to) {
  Connector& c = connector(from, to);
  if (c.posted > c.consumed) return &c.slots[c.consumed % capacity_];
  ranks_[index(to)].waiting_on = static_cast<int>(&c - connectors_.data());
  ranks_[index(to)].waiting_to_send = false;
  return nullptr;
}

void LaneRun::wake(int rank) {
  if (ranks_[index(rank)].queued) return;
  ranks_[index(rank)].queued = true;
  runnable_.push_back(rank);
}

// Runs the rank until it waits or has finished; false on an error.
bool LaneRun::advance(int rank) {
  Rank& self = ranks_[index(rank)];
  const std::vector<Primitive>& program = plans_[index(rank)].primitives;
  while (!done(self)) {
    if (self.primitive == program.size()) {
      if (!finish_loop(rank)) return false;
      continue;
    }
    // What it waited for may have been the second of two that go together.
    if (self.primitive > 0 && (program[self.primitive - 1].flags & kWithNext) != 0) {
      --self.primitive;
    }
    const Primitive& p = program[self.primitive];
    // (What goes together moves one slice a peer, and here one after the other, once both can.)
    const bool together = (p.flags & kWithNext) != 0;
    const std::uint64_t length = slice_length(rank, self.primitive);
    const std::uint64_t next = together ? slice_length(rank, self.primitive + 1) : 0;
    if (length == 0 && next == 0) {  // all slices are done, or the chunk is empty
      self.primitive += together ? 2 : 1;
      self.slice = 0;
      continue;
    }
    const std::uint32_t first = self.primitive;
    Step step = ready(rank, first, length);
    if (step == Step::kMoved && next != 0) step = ready(rank, first + 1, next);
    if (step == Step::kMoved) ++self.time;
    if (step == Step::kMoved && length != 0) step = move(rank, first, length);
    if (step == Step::kMoved && next != 0) step = move(rank, first + 1, next);
    if (step == Step::kFailed) return false;
    if (step == Step::kBlocked) return true;
    self.primitive = first;
    ++self.slice;
  }
  return true;
}

// Of the primitive's chunk in this pass, how much its next slice has: 0 if there is none.
std::uint64_t LaneRun::slice_length(int rank, std::uint32_t primitive) const {
  const Rank& self = ranks_[index(rank)];
  const Primitive& p = plans_[index(rank)].primitives[primitive];
  if (self.pass < p.lag || self.pass - p.lag >= loops_.size()) return 0;  // there is no such chunk
  const std::uint64_t length = work_length(rank, primitive, loops_[self.pass - p.lag].number);
  const std::uint64_t begin = self.slice * slice_elements_;
  return begin >= length ? 0 : std::min(slice_elements_, length - begin);
}

// Makes a primitive the one that the rank is at.
const Primitive& LaneRun::enter(int rank, std::uint32_t primitive) {
  Rank& self = ranks_[index(rank)];
  const Primitive& p = plans_[index(rank)].primitives[primitive];
  self.primitive = primitive;
  self.loop = self.pass - p.lag;
  return p;
}

// Whether one slice of a primitive (with several peers: of each) can move: all of it, or nothing.
LaneRun::Step LaneRun::ready(int rank, std::uint32_t primitive, std::uint64_t length) {
  if (length == 0) return Step::kMoved;
  const Primitive& p = enter(rank, primitive);
  Rank& self = ranks_[index(rank)];
  self.waiting_on = -1;
  for (const int from : sources(rank, primitive)) {
    const std::uint64_t expected = length_from(rank, p, from, length);
    if (expected == 0) continue;
    const Message* m = front(from, rank);
    if (m == nullptr) return Step::kBlocked;
    if (!fits(rank, p, *m, from, expected)) return Step::kFailed;
    self.time = std::max(self.time, m->time);
  }
  for (const int to : targets(rank, primitive)) {
    if (length_to(rank, p, to, length) == 0) continue;
    const Connector& c = connector(rank, to);
    if (c.posted - c.consumed == capacity_) {
      self.waiting_on = static_cast<int>(&c - connectors_.data());
      self.waiting_to_send = true;
      return Step::kBlocked;
    }
    self.time = std::max(self.time, c.slots[c.posted % capacity_].time);
  }
  return Step::kMoved;
}

LaneRun::Step LaneRun::move(int rank, std::uint32_t primitive, std::uint64_t length) {
  const Primitive& p = enter(rank, primitive);
  Rank& self = ranks_[index(rank)];
  const Ranks from_ranks = sources(rank, primitive), to_ranks = targets(rank, primitive);
  const std::uint64_t time = self.time;

  ValueId value = kNoValue;
  if (values_ != nullptr) {
    if ((p.flags & (kScatter | kCollect)) == 0) {
      value = evaluate(rank, primitive, cell(rank, p.part, self.slice));
      if (value == kNoValue) return Step::kFailed;
    }
    if ((p.flags & kCollect) != 0) {
      for (const int from : from_ranks) {
        if (length_from(rank, p, from, length) == 0) continue;
        const std::size_t at = cell(rank, part_from(p, from), self.slice);
        const ValueId received = front(from, rank)->value;
        if (!may_store(rank, at, received, received) || !is_first(rank, at, *front(from, rank))) {
          return Step::kFailed;
        }
        output_[index(rank)][at] = received;
      }
    } else if ((p.flags & kCopy) != 0 && (p.flags & kScatter) == 0) {
      const std::size_t at = cell(rank, p.part, self.slice);
      // (A reduction of several is no one's that came.)
      const Message* const came =
          (p.flags & kRecv) != 0 && !from_set(p) ? front(from_ranks.front(), rank) : nullptr;
      if (!may_store(rank, at, value, came != nullptr ? came->value : kNoValue)) {
        return Step::kFailed;
      }
      if (came != nullptr && !is_first(rank, at, *came)) return Step::kFailed;
      output_[index(rank)][at] = value;
    }
    if ((p.flags & kScatter) != 0) {
      for (const int to : to_ranks) {
        const std::size_t at = cell(rank, part_to(p, to), self.slice);
        note_read(rank, at, p, 1);
        if ((p.flags & kCopy) == 0 || length_to(rank, p, to, length) == 0) continue;
        output_[index(rank)][at] = load_local(rank, p, at);
        if (output_[index(rank)][at] == kNoValue) return Step::kFailed;
      }
    } else if ((p.flags & kLocal) != 0 && (p.flags & kFromOutput) == 0) {
      const bool sends_to_many = to_ranks.size() > 1;
      note_read(rank, cell(rank, p.part, self.slice), p, sends_to_many ? 2 : 1);
    }
  }
  for (const int from : from_ranks) {
    if (length_from(rank, p, from, length) == 0) continue;
    Connector& c = connector(from, rank);
    c.slots[c.consumed++ % capacity_].time = time;
    const Rank& sender = ranks_[index(from)];
    if (sender.waiting_to_send && sender.waiting_on == &c - connectors_.data()) wake(from);
  }
  for (const int to : to_ranks) {
    const std::uint64_t sent = length_to(rank, p, to, length);
    if (sent == 0) continue;
    if (values_ != nullptr && (p.flags & kScatter) != 0) {
      value = load_local(rank, p, cell(rank, part_to(p, to), self.slice));
      if (value == kNoValue) return Step::kFailed;
    }
    const bool into_output = (p.flags & kIntoOutput) != 0;
    if (values_ != nullptr && into_output && !may_store_there(rank, p, to, value)) {
      return Step::kFailed;
    }
    Connector& c = connector(rank, to);
    note_alike(rank, p, c);
    c.slots[c.posted++ % capacity_] = {value,     part_to(p, to), self.slice,
                                       self.loop, self.primitive, hop_sent(p),
                                       sent,      time,           into_output};
    const Rank& receiver = ranks_[index(to)];
    if (!receiver.waiting_to_send && receiver.waiting_on == &c - connectors_.data()) wake(to);
    sends_anything_ = true;
    self.bytes += loops_[self.loop].weight * sent * dtype_bytes(request_.dtype);
  }
  return Step::kMoved;
}

// Looks whether the packet that is sent can be told from the one before it in the connector. (Slots
// have a flag each step.) What else is wrong with such a program says more.
void LaneRun::note_alike(int rank, const Primitive& p, const Connector& c) {
  if (!has_inline_flags(plans_[0].protocol) || c.posted == 0 || !alike_.empty()) return;
  const Message& last = c.slots[(c.posted - 1) % capacity_];
  if (last.loop != ranks_[index(rank)].loop || last.hop < hop_sent(p)) return;
  alike_ = where(rank) + " sends rank " + std::to_string(c.to) +
           " a packet with the flag of one before: of the same chunk and hop";
}

// Whether the message is what the primitive expects to receive.
bool LaneRun::fits(int rank, const Primitive& p, const Message& m, int from, std::uint64_t length) {
  const Rank& self = ranks_[index(rank)];
  std::uint32_t part = part_from(p, from);
  if (exchanges(request_.kind)) {
    // What comes from `from` belongs into its part here, and is this rank's part there.
    if (part != static_cast<std::uint32_t>(from)) {
      fail(where(rank) + " puts a slice from rank " + std::to_string(from) + " into part " +
           std::to_string(part) + " of an all-to-all");
      return false;
    }
    part = static_cast<std::uint32_t>(rank);
  }
  if (m.part == part && m.loop == self.loop && m.slice == self.slice && m.length == length) {
    if (m.into_output &&
        ((p.flags & kCopy) == 0 || (p.flags & (kReduce | kLocal | kFinish)) != 0)) {
      fail(where(rank) + " does not just copy into its output what rank " + std::to_string(from) +
           " primitive " + std::to_string(m.primitive) + " may have stored there");
      return false;
    }
    if (!has_inline_flags(plans_[0].protocol) || m.hop == hop_received(p)) return true;
    fail(where(rank) + " expects a packet of hop " + std::to_string(hop_received(p)) +
         ", but rank " + std::to_string(from) + " primitive " + std::to_string(m.primitive) +
         " has sent one of hop " + std::to_string(m.hop) + ": the flags differ");
    return false;
  }
  const auto text = [this](std::uint64_t elements, std::uint32_t part, std::uint32_t loop,
                           std::uint32_t slice) {
    return std::to_string(elements) + " elements of part " + std::to_string(part) + " loop " +
           std::to_string(loops_[loop].number) + " slice " + std::to_string(slice);
  };
  fail(where(rank) + " expects " + text(length, part, self.loop, self.slice) + ", but rank " +
       std::to_string(from) + " primitive " + std::to_string(m.primitive) + " has sent " +
       text(m.length, m.part, m.loop, m.slice) +
       (m.length == length ? "" : ": the lengths differ"));
  return false;
}

// The value of this slice, or kNoValue with the error set.
ValueId LaneRun::evaluate(int rank, std::uint32_t primitive, std::size_t cell) {
  const Primitive& p = plans_[index(rank)].primitives[primitive];
  const bool gathers = from_set(p);
  ValueId value = kNoValue;
  if ((p.flags & kLocal) != 0) {
    value = load_local(rank, p, cell);
    if (value == kNoValue) return kNoValue;
  }
  if (gathers) {
    value = gather(rank, primitive, value);
    if (value == kNoValue) return kNoValue;
  } else if ((p.flags & kContribute) != 0) {
    if (values_->state(value) != ValueState::kRaw) {
      return fail(where(rank) + " contributes " + values_->describe(value) + " a second time");
    }
    value = values_->contribute(value);
  }
  if ((p.flags & kRecv) != 0 && !gathers) {
    const ValueId received = front(sources(rank, primitive).front(), rank)->value;
    if ((p.flags & kReduce) != 0) {
      const std::pair<ValueId, const char*> operands[] = {{received, "received"}, {value, "local"}};
      for (const auto& [operand, which] : operands) {
        const ValueState state = values_->state(operand);
        if (state == ValueState::kPartial) continue;
        return fail(where(rank) + " reduces " + values_->describe(operand) + " (the " + which +
                    " slice)" +
                    (state == ValueState::kRaw ? ", which no kContribute has let in"
                                               : ", which is finished"));
      }
      value = values_->combine(received, value);
    } else {
      value = received;
    }
  }
  if ((p.flags & kFinish) != 0) {
    if (values_->state(value) != ValueState::kPartial) {
      return fail(where(rank) + " has kFinish on " + values_->describe(value) +
                  (values_->state(value) == ValueState::kRaw ? "" : ": finished twice"));
    }
    if (!values_->complete(value)) {
      return fail(where(rank) + " has kFinish on an incomplete result: it " +
                  values_->defect(value));
    }
    value = values_->finish(value);
  }
  return value;
}

ValueId LaneRun::load_local(int rank, const Primitive& p, std::size_t cell) {
  const ValueId written = output_[index(rank)][cell];
  if ((p.flags & kFromOutput) != 0) {
    return written != kNoValue ? written : fail(where(rank) + " reads output not yet written");
  }
  // In place, this is what the input holds by now.
  const ValueId input = values_->raw(rank);
  const bool may_be_in_place = row_of(request_.kind).in_place;
  if (may_be_in_place && written != kNoValue && written != input) {
    return fail(where(rank) + " reads input that, in place, is overwritten by then: it holds " +
                values_->describe(written));
  }
  return input;
}

ValueId LaneRun::gather(int rank, std::uint32_t primitive, ValueId local) {
  const Primitive& p = plans_[index(rank)].primitives[primitive];
  const bool partials = (p.flags & kPartials) != 0;
  if ((p.flags & kContribute) == 0) {
    return fail(where(rank) + " gathers contributions without kContribute");
  }
  if (values_->state(local) != ValueState::kRaw) {
    return fail(where(rank) + " gathers " + values_->describe(local) + " from " + name(rank) +
                ", not a raw contribution: contributed twice");
  }
  ValueId sum = kNoValue;
  const auto add = [&](ValueId v) { sum = sum == kNoValue ? v : values_->combine(sum, v); };
  const ValueId own = values_->contribute(local);
  bool own_is_in = false;
  for (const int from : sources(rank, primitive)) {
    if (!partials && !own_is_in && from > rank) {
      add(own);
      own_is_in = true;
    }
    const ValueId v = front(from, rank)->value;
    if (values_->state(v) != (partials ? ValueState::kPartial : ValueState::kRaw)) {
      return fail(where(rank) + " gathers " + values_->describe(v) + " from " + name(from) +
                  (partials ? ", not a sum that others go into"
                            : ", not a raw contribution: contributed twice"));
    }
    add(partials ? v : values_->contribute(v));
  }
  if (!own_is_in) add(own);
  return sum;
}

// By a primitive that reads it for one peer, or for itself; 2: for several.
void LaneRun::note_read(int rank, std::size_t cell, const Primitive& p, int times) {
  std::uint8_t& read = read_[index(rank)][cell];
  const int all = std::min<int>(2, (read & kReads) + times);
  const int carried = carrier_of(p) != Carrier::kBlocks ? int{kCarried} : read & kCarried;
  read = static_cast<std::uint8_t>(all | carried);
}

// Whether a value may be stored in the output while slices of earlier primitives are still under
// way here ("Slices in a pipeline" in docs/internals/engine.md). In place, what they read is lost
// with it; unless what was received has this rank's part in it, so that they are through. A carrier
// is through only if that part can have come by no other way than its slice: nothing else reads the
// cell. (Packets do not stream.)
bool LaneRun::may_store(int rank, std::size_t cell, ValueId value, ValueId received) {
  if (has_inline_flags(plans_[0].protocol) || !row_of(request_.kind).in_place ||
      read_[index(rank)][cell] == 0 || value == values_->raw(rank)) {
    return true;
  }
  const bool may_be_carried = read_[index(rank)][cell] == (2 | kCarried);
  if (values_->has(received, rank) && !may_be_carried) return true;
  fail(where(rank) + " stores " + values_->describe(value) +
       ", in place, over input that an earlier primitive" + (may_be_carried ? "'s carrier" : "") +
       " may still be reading");
  return false;
}

// The same of what the sender stores itself into the output of `to`, who may be anywhere in its
// program: it must have read its input there before the value can exist, or have none.
bool LaneRun::may_store_there(int rank, const Primitive& p, int to, ValueId value) {
  if (!has_input(request_, to, part_to(p, to)) || values_->has(value, to)) return true;
  fail(where(rank) + " stores " + values_->describe(value) + " into the output of rank " +
       std::to_string(to) + ", which, in place, may not have read its input there yet");
  return false;
}

// What a sender may have stored into the output at any time is the first that comes there: what the
// receiver stores itself before it looks could be on top of it.
bool LaneRun::is_first(int rank, std::size_t cell, const Message& m) {
  if (!m.into_output || output_[index(rank)][cell] == kNoValue) return true;
  fail(where(rank) + " has stored something itself where a sender may have stored into its output");
  return false;
}

// At the end of a pass: checks what the rank has written of the loop that is complete with it, and
// begins the next.
bool LaneRun::finish_loop(int rank) {
  Rank& self = ranks_[index(rank)];
  self.primitive = 0;
  if (self.pass++ < self.lag) return true;
  self.loop = self.pass - 1 - self.lag;
  loop_end_[self.loop] = std::max(loop_end_[self.loop], self.time);
  if (values_ != nullptr) {
    std::vector<ValueId>& output = output_[index(rank)];
    for (std::uint32_t part = 0; part < part_length_.size(); ++part) {
      if (!has_output(request_, rank, static_cast<int>(part))) continue;
      const std::uint64_t length = chunk_length(part, loops_[self.loop].number);
      for (std::uint32_t slice = 0; slice * slice_elements_ < length; ++slice) {
        const ValueId value = output[cell(rank, part, slice)];
        const std::string text = result_defect(rank, part, slice, value);
        if (!text.empty()) {
          fail(name(rank) + "'s output part " + std::to_string(part) + " loop " +
               std::to_string(loops_[self.loop].number) + " slice " + std::to_string(slice) + " " +
               text);
          return false;
        }
      }
    }
  }
  return true;
}

// What is wrong with a piece of the result; "" if nothing is.
std::string LaneRun::result_defect(int rank, std::uint32_t part, std::uint32_t slice, ValueId v) {
  if (v == kNoValue) return "is never written";
  if (!reduces(request_.kind)) {
    const bool of_root = row_of(request_.kind).reads == Holders::kRoot;
    const ValueId expected = values_->raw(of_root ? request_.root : static_cast<int>(part));
    if (v == expected) return "";
    return "holds " + values_->describe(v) + " instead of " + values_->describe(expected);
  }
  if (values_->state(v) == ValueState::kRaw) return "holds " + values_->describe(v);
  if (!values_->complete(v)) return values_->defect(v);
  if (values_->state(v) != ValueState::kFinished) return "is not finished: no kFinish";
  if (row_of(request_.kind).writes == Holders::kAll) {
    ValueId& first = result_[cell(rank, part, slice)];
    if (first == kNoValue) first = v;
    if (first != v) return "is reduced in another order than on other ranks: the bits can differ";
  }
  return "";
}

std::string LaneRun::where(int rank) const {
  const Rank& self = ranks_[index(rank)];
  return primitive_text(rank, self.primitive, plans_[index(rank)], request_.ranks) + " loop " +
         std::to_string(loops_[self.loop].number) + " slice " + std::to_string(self.slice);
}

std::string LaneRun::wait_text(int rank) const {
  const Rank& self = ranks_[index(rank)];
  const Connector& c = connectors_[index(self.waiting_on)];
  return where(rank) + " waits for rank " +
         (self.waiting_to_send ? std::to_string(c.to) + " to make room"
                               : std::to_string(c.from) + " to send");
}

// Called when nothing can move: "" if all programs are complete, else who waits for whom.
std::string LaneRun::deadlock_text() const {
  int rank = 0;
  while (rank < request_.ranks && done(ranks_[index(rank)])) ++rank;
  if (rank == request_.ranks) return "";
  // Every rank that is not done waits for one other: the path from any ends at one that is done, or
  // in a cycle.
  std::vector<int> path;
  std::vector<bool> seen(ranks_.size(), false);
  while (!done(ranks_[index(rank)]) && !seen[index(rank)]) {
    seen[index(rank)] = true;
    path.push_back(rank);
    const Rank& self = ranks_[index(rank)];
    const Connector& c = connectors_[index(self.waiting_on)];
    rank = self.waiting_to_send ? c.to : c.from;
  }
  const bool cycle = seen[index(rank)];
  if (cycle) path.erase(path.begin(), std::find(path.begin(), path.end(), rank));
  constexpr std::size_t kShown = 4;
  std::string text = "with " + std::to_string(capacity_) + " slots ";
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i >= kShown && i + 1 < path.size()) continue;
    if (i > kShown) text += "… ";
    text += wait_text(path[i]) + (i + 1 < path.size() ? "; " : "");
  }
  if (!cycle) return text + ", which has finished its program";
  text += ": a cycle of " + std::to_string(path.size()) + " ranks, ";
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i < 2 * kShown) {
      text += std::to_string(path[i]) + " -> ";
    } else if (i == 2 * kShown) {
      text += "… -> ";
    }
  }
  return text + std::to_string(rank);
}

std::string LaneRun::leftover_text() const {
  for (const Connector& c : connectors_) {
    if (c.posted == c.consumed) continue;
    const Message& m = c.slots[c.consumed % capacity_];
    return primitive_text(c.from, m.primitive, plans_[index(c.from)], request_.ranks) + " loop " +
           std::to_string(loops_[m.loop].number) + ": " + std::to_string(c.posted - c.consumed) +
           " slices sent to rank " + std::to_string(c.to) +
           " are left over, it never receives them";
  }
  return "";
}

ValueId LaneRun::fail(std::string text) {
  error_ = std::move(text);
  return kNoValue;
}

}  // namespace unjam
