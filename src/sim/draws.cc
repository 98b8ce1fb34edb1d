#include "sim/draws.h"

#include <algorithm>
#include <cmath>

#include "base/hash.h"

namespace unjam::sim {

namespace {

constexpr std::uint64_t kDisorderStream = 1;
constexpr std::uint64_t kSyncStream = 2;
constexpr std::uint64_t kCoinStream = 3;

// SplitMix64, started at a hash of what the stream is for.
class Stream {
 public:
  Stream(std::uint64_t seed, std::uint64_t round, std::uint64_t stream)
      : state_(
            hash_combine(hash_combine(hash_combine(0x756e6a616d73696dull, seed), round), stream)) {}
  // Uniform over (0, 1].
  double next() {
    const std::uint64_t bits = mix64(state_);
    state_ += 0x9e3779b97f4a7c15ull;
    return static_cast<double>((bits >> 11) + 1) * 0x1p-53;
  }

 private:
  std::uint64_t state_;
};

// How often a coin of probability p falls in a row: P(n or more) = p^n.
std::uint32_t run_length(Stream& stream, double p, double factor, std::uint32_t most) {
  const double u = stream.next();
  if (u > p) return 0;
  if (p >= 1) return most;
  const double n = std::log(u) * factor;
  return n >= most ? most : static_cast<std::uint32_t>(n);
}

}  // namespace

Drawer::Drawer(const Job& job) : job_(job) {
  begin_.reserve(job.gpus() + 1);
  begin_.push_back(0);
  for (const std::uint32_t gpu : job.drawing_order()) {
    begin_.push_back(begin_.back() + job.length(gpu));
  }
  bucket_width_ = std::max<std::uint64_t>(1, job.invocations() / job.gpus());
  const std::uint64_t buckets = job.invocations() / bucket_width_ + 1;
  bucket_.reserve(buckets);
  std::uint32_t i = 0;
  for (std::uint64_t b = 0; b < buckets; ++b) {
    while (i + 1 < job.gpus() && begin_[i + 1] <= b * bucket_width_) ++i;
    bucket_.push_back(i);
  }
  const auto gap = [](double p) { return p > 0 && p < 1 ? 1 / std::log1p(-p) : 0; };
  const auto more = [](double p) { return p > 0 && p < 1 ? 1 / std::log(p) : 0; };
  gap_disorder_ = gap(job.spec().disorder);
  gap_sync_ = gap(job.spec().sync);
  more_disorder_ = more(job.spec().disorder);
  more_sync_ = more(job.spec().sync);
}

Drawer::Place Drawer::place(std::uint64_t invocation, std::uint32_t* hint) const {
  std::uint32_t i = std::max(*hint, bucket_[invocation / bucket_width_]);
  while (begin_[i + 1] <= invocation) ++i;
  *hint = i;
  return {job_.drawing_order()[i], static_cast<std::uint32_t>(invocation - begin_[i])};
}

void Drawer::draw(std::uint64_t round, Draws* draws) const {
  draws->disorders.clear();
  draws->syncs.clear();
  const JobSpec& spec = job_.spec();
  const auto all = static_cast<double>(job_.invocations());
  // Calls visit(place, stream) where a coin of probability p falls.
  const auto scatter = [&](std::uint64_t number, double p, double factor, auto&& visit) {
    if (p <= 0) return;
    Stream stream(spec.seed, round, number);
    std::uint64_t position = 0;
    std::uint32_t hint = 0;
    for (;;) {
      const double gap = p >= 1 ? 0 : std::log(stream.next()) * factor;
      if (gap >= all - static_cast<double>(position)) return;
      position += static_cast<std::uint64_t>(gap);
      if (position >= job_.invocations()) return;
      visit(place(position, &hint), stream);
      ++position;
    }
  };
  scatter(kDisorderStream, spec.disorder, gap_disorder_, [&](Place where, Stream& stream) {
    const std::uint32_t most = job_.length(where.gpu) - 1 - where.at;
    const std::uint32_t more =
        run_length(stream, spec.disorder, more_disorder_, most == 0 ? 0 : most - 1);
    if (most > 0) draws->disorders.push_back({where.gpu, where.at, 1 + more});
  });
  scatter(kSyncStream, spec.sync, gap_sync_, [&](Place where, Stream& stream) {
    const std::uint32_t more = run_length(stream, spec.sync, more_sync_, 1u << 20);
    draws->syncs.push_back({where.gpu, where.at, 1 + more});
  });
}

void Drawer::draw_by_coins(std::uint64_t round, Draws* draws) const {
  draws->disorders.clear();
  draws->syncs.clear();
  Stream stream(job_.spec().seed, round, kCoinStream);
  for (const std::uint32_t gpu : job_.drawing_order()) {
    const std::uint32_t length = job_.length(gpu);
    for (std::uint32_t at = 0; at < length; ++at) {
      std::uint32_t count = 0;
      while (stream.next() <= job_.spec().sync) ++count;
      if (count > 0) draws->syncs.push_back({gpu, at, count});
      std::uint32_t skips = 0;
      while (skips + 1 < length - at && stream.next() <= job_.spec().disorder) ++skips;
      if (skips > 0) draws->disorders.push_back({gpu, at, skips});
    }
  }
}

}  // namespace unjam::sim
