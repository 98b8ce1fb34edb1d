// The slice that is ready: its description for the leaf that moves it, what connectors and peers
// are told of it, and what it changes in the invocation's context.
#pragma once

#include <cstdint>

#include "engine/readiness.h"

namespace unjam {

template <class Dev>
class Slices : protected Readiness<Dev> {
 public:
  using Base = Readiness<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::add_sent, Base::advance, Base::chunk, Base::count, Base::count_shared, Base::dev_,
      Base::elems_of, Base::has_sets, Base::in_disorder, Base::inline_flags, Base::is_marked,
      Base::is_patient, Base::job, Base::kCopies, Base::lane_, Base::local_at, Base::member,
      Base::own_source, Base::part_of, Base::place_of, Base::s_, Base::seek, Base::side,
      Base::slice_flags, Base::takes_part, typename Base::Part;

  // By the lead: all of the slice's jobs that the waits have not filled in.
  UNJAM_HD void build_jobs(const ActiveContext& a) {
    for (std::uint32_t in = 0; in < (s_.pair ? 2u : 1u); ++in) build_job(a, in != 0);
  }

  UNJAM_HD void build_job(const ActiveContext& a, bool in) {
    const Invocation& inv = a.inv;
    const Geometry& g = inv.geometry;
    const Primitive p = side(in);
    const std::uint16_t flags = p.flags;
    SliceJob& job = this->job(in);
    job.copies = (flags & kCopies) != 0;
    job.dtype = g.dtype;
    job.op = inv.op;
    job.protocol = inv.protocol;
    if constexpr (Dev::kInlinePacketFlags) {
      if (has_inline_flags(inv.protocol)) {
        // (Packets do not lag: the pass is the chunk. What only sends makes the first hop, and
        // nothing received is looked at.)
        const std::uint32_t hop = hop_received(p);
        job.flag = job.sent_flag = packet_flag(inv.seed, a.dyn.loop, hop);
        if (hop_sent(p) != hop && (flags & kSend) != 0) {
          job.sent_flag = packet_flag(inv.seed, a.dyn.loop, hop_sent(p));
        }
      }
    }
    if (job.copies) {
      // (And one more, without data: movers share copies out by how many there are, of a group's
      // size.)
      job.copy_elems[inv.num_neighbours] = 0;
      job.num_src = static_cast<std::uint16_t>(inv.num_neighbours + 1);
      job.num_dst = 0;
      job.local_src = -1;
      job.elems = 0;
      job.dst_user = nullptr;
      return;
    }
    const std::uint64_t offset = chunk(in).offset + a.dyn.through;
    const void* local = local_at(inv, p, offset);
    job.elems = s_.pair ? static_cast<std::uint32_t>(chunk(in).length) : s_.elems;
    job.dst_user = flags & kCopy ? inv.output_at(offset) : nullptr;
    job.num_dst = 0;
    if ((flags & kSend) != 0) {
      job.num_dst = static_cast<std::uint16_t>(to_set(p) ? count_bits(s_.to.set) : 1);
    }
    const bool gathers = from_set(p);
    const bool average = inv.op == Op::kAvg && inv.group_size > 1;
    const bool scales = average && !is_integer(g.dtype) && (flags & kContribute);
    if ((flags & kRecv) != 0 && !gathers && s_.view.data == nullptr) {
      // It is in the output already. From there it goes on, if it does.
      job.dst_user = nullptr;
      if (job.num_dst == 0) job.elems = 0;
      s_.view.data = inv.output_at(offset) - a.dyn.taken;
    }
    if (gathers) {
      const std::uint32_t own = own_source(a);
      job.src[own] = local;
      job.num_src = static_cast<std::uint16_t>(count_bits(s_.from.set) + 1);
      job.local_src = static_cast<std::int16_t>(own);
      const bool sums = (flags & kPartials) != 0;
      job.scale_sources = !scales ? ScaleSources::kNone
                          : sums  ? ScaleSources::kLocal
                                  : ScaleSources::kAll;
    } else {
      std::uint16_t n = 0;
      if (flags & kRecv) job.src[n++] = s_.view.data + a.dyn.taken;
      job.local_src = flags & kLocal ? static_cast<std::int16_t>(n) : std::int16_t{-1};
      if (flags & kLocal) job.src[n++] = local;
      job.num_src = n;
      job.scale_sources = scales ? ScaleSources::kLocal : ScaleSources::kNone;
    }
    job.divisor =
        average && is_integer(g.dtype) && (flags & kFinish) ? inv.group_size : std::uint32_t{1};
    if (scales) job.scale = 1.0 / inv.group_size;
  }

  // By the lead: of the slice that is described.
  UNJAM_HD bool is_carried() const {
    if (!is_marked()) return false;
    const SliceJob& job = this->job(false);
    const bool is_copy = job.scale_sources == ScaleSources::kNone && job.divisor == 1;
    return is_copy && s_.location[0] != 0 && s_.location[0] != kInOutput;
  }

  UNJAM_HD std::uint32_t slice_bytes(const ActiveContext& a) const {
    return s_.elems * dtype_bytes(a.inv.geometry.dtype);
  }

  // Counts the slice that is described at its connectors, writes what peers are to read about
  // it, and down what publishing it takes. In front of move_on().
  UNJAM_HD void count_slice(ActiveContext& a) {
    Posting* postings = s_.postings[s_.which];
    std::uint32_t several = 0;
    if (has_sets()) {
      several = 2 * std::uint32_t{a.inv.num_neighbours};
      for (std::uint32_t i = dev_.first(); i < several; i += dev_.stride()) {
        const Part part = part_of(a, i);
        Posting& w = postings[i];
        w.what = Posting::kNothing;
        if (!takes_part(part)) continue;
        if (part.in) {
          count_in(a, part.k, w);
        } else {
          count_out(a, part.k, place_of(part.k), elems_of(part), w);
        }
      }
    }
    if (!dev_.leads()) return;
    // One peer to send to, one to receive from: two places.
    s_.num_postings[s_.which] = several + 2;
    Posting& out = postings[several];
    Posting& in = postings[several + 1];
    out.what = in.what = Posting::kNothing;
    if (s_.to.one != kNoPeer) count_out(a, s_.to.one, 0, s_.elems, out);
    if (s_.from.one != kNoPeer && a.dyn.taken + slice_bytes(a) == s_.view.bytes) {
      count_in(a, s_.from.one, in);
    }
  }

  UNJAM_HD void count_out(ActiveContext& a, std::uint32_t k, std::uint32_t at, std::uint32_t elems,
                          Posting& w) {
    Wire& out = a.outs[k];
    w.peer = member(a, k);
    w.what = Posting::kSlice;
    const std::uint32_t bytes = elems * dtype_bytes(a.inv.geometry.dtype);
    const std::uint32_t location = s_.location[at];
    if (inline_flags(a)) {
      s_.transport.advance(out);
      w.word.place = nullptr;  // the data carried their flags
    } else {
      w.word = s_.transport.post(w.peer, out, a.inv.seed, location, bytes);
    }
    a.out[a.neighbours[k]].posted = out.count;
    count_shared(s_.sent_bytes, bytes);
    if (location == kInOutput) {
      count_shared(s_.sent_into_outputs, 1);
    } else if (location != 0) {
      count_shared(s_.sent_borrowed, 1);
    }
  }

  UNJAM_HD void count_in(ActiveContext& a, std::uint32_t k, Posting& w) {
    w.peer = member(a, k);
    w.what = Posting::kCredit;
    w.word = s_.transport.take(a.ins[k]);
    a.in[a.neighbours[k]].consumed = a.ins[k].count;
  }

  // Makes the slice visible to the peers. First all that is to be visible is written, then one
  // fence of each thread that publishes is behind it, then it is published. (What was sent as
  // packets needs neither.) Whether this thread has fenced.
  UNJAM_HD static bool post_slice(DevHandle dev, BlockShared& shared, std::uint32_t which) {
    const std::uint32_t n = shared.num_postings[which];
    const std::uint32_t lane = shared.transport.lane;
    bool fenced = false;
    for (std::uint32_t i = dev.first(); i < n; i += dev.stride()) {
      const Posting& w = shared.postings[which][i];
      if (w.what == Posting::kNothing) continue;
      if (w.word.place != nullptr) {
        if (!fenced) dev.fence();
        fenced = true;
        Dev::publish(*w.word.place, w.word.value);
        if constexpr (requires { dev.posted(w.peer, lane, w.word); }) {
          if (dev.posted(w.peer, lane, w.word)) continue;
        }
      }
      dev.ring(w.peer, lane, w.what == Posting::kSlice ? RingFor::kData : RingFor::kRoom);
    }
    return fenced;
  }

  UNJAM_HD void move_on(ActiveContext& a) {
    count(lane_.stats.slices);
    add_sent();
    if constexpr (Dev::kHostWatches) {
      bump(a.key->slices);
      store_relaxed<std::uint64_t>(a.key->lack, lack_word(Lack::kNothing, 0, a.inv.n));
    }
    a.dirty = 1;
    a.dyn.handed.stage = Stage::kSlices;  // what slices have begun is theirs
    s_.moved = true;
    --s_.quantum;
    const std::uint16_t flags = slice_flags();
    if (flags & kRecv) {
      count(lane_.stats.received);
      s_.heard = true;
      s_.received = true;
      // Peers are at it. (What is sent says nothing about them: it goes to who is not there, too,
      // and who stuck to its collective then would miss them where they are. In disorder nor does
      // what was there before this lane: they may have been here, and gone on; but for the front.
      // For packets with flags inside their leaf waits.)
      if (s_.waited || !in_disorder() || is_patient(a.inv) || inline_flags(a)) {
        s_.threshold = dev_.threshold(s_.policy.after_success(s_.threshold));
      }
    }
    if (s_.from.one != kNoPeer && (a.dyn.taken += slice_bytes(a)) == s_.view.bytes) {
      a.dyn.taken = 0;
    }
    if ((flags & kCopies) == 0 && !s_.pair) {  // the others' slices are their chunks
      a.dyn.through += s_.elems;
      if (a.dyn.through != s_.chunk.length) return;
      a.dyn.through = 0;
    }
    advance(a);
    s_.ended = !seek(a);
  }
};

}  // namespace unjam
