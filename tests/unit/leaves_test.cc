// Host leaves against an element-at-a-time reference that shares no code with them: integers in
// 128 bits, floats in a type wide enough that rounding twice is rounding once, narrow floats by
// searching tables of their values.
#include "device/host/leaves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace unjam {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

constexpr std::size_t kMaxElems = 4097;
constexpr std::size_t kMaxSlots = 7;
constexpr std::size_t kGuard = 64;
constexpr unsigned char kPoison = 0xa5;

// ---- The reference. -----------------------------------------------------------------------------

std::uint64_t float_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
float float_of(std::uint64_t bits) {
  const std::uint32_t low = static_cast<std::uint32_t>(bits);
  float x;
  std::memcpy(&x, &low, sizeof x);
  return x;
}
double double_of(std::uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
std::uint64_t double_bits(double x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

struct NarrowSpec {
  int exponent, mantissa;
  bool infinity, saturates;
};

NarrowSpec spec_of(DType t) {
  switch (t) {
    case DType::kFloat16:
      return {5, 10, true, false};
    case DType::kBfloat16:
      return {8, 7, true, false};
    case DType::kFloat8E4M3:
      return {4, 3, false, true};
    default:
      return {5, 2, true, true};
  }
}

// All non-negative values of a narrow format, by their bits; NaN beyond the numbers.
std::vector<float> make_values(const NarrowSpec& spec) {
  std::vector<float> values;
  const int bias = (1 << (spec.exponent - 1)) - 1;
  const unsigned top = (1u << spec.exponent) - 1;
  for (unsigned e = 0; e <= top; ++e) {
    for (unsigned m = 0; m < 1u << spec.mantissa; ++m) {
      double value = e == 0 ? std::ldexp(m, 1 - bias - spec.mantissa)
                            : std::ldexp((1u << spec.mantissa) + m,
                                         static_cast<int>(e) - bias - spec.mantissa);
      if (e == top && spec.infinity) value = m == 0 ? HUGE_VAL : std::nan("");
      if (e == top && !spec.infinity && m == (1u << spec.mantissa) - 1) value = std::nan("");
      values.push_back(static_cast<float>(value));
    }
  }
  return values;
}

const std::vector<float>& values_of(DType t) {
  static const std::vector<float> values[kNumDTypes] = {{},
                                                        {},
                                                        {},
                                                        {},
                                                        {},
                                                        {},
                                                        make_values(spec_of(DType::kFloat16)),
                                                        make_values(spec_of(DType::kBfloat16)),
                                                        {},
                                                        {},
                                                        make_values(spec_of(DType::kFloat8E4M3)),
                                                        make_values(spec_of(DType::kFloat8E5M2))};
  return values[static_cast<int>(t)];
}

float decode_narrow(DType t, std::uint64_t bits) {
  const std::vector<float>& values = values_of(t);
  const float value = values[bits % values.size()];
  return bits >= values.size() ? -value : value;
}

std::uint64_t encode_narrow(DType t, float x) {
  const std::vector<float>& values = values_of(t);
  const NarrowSpec spec = spec_of(t);
  if (std::isnan(x)) return values.size() - 1;
  const std::uint64_t sign = std::signbit(x) ? values.size() : 0;
  // Number of finite values: the largest exponent has infinity and NaN, or NaN alone at its end.
  const std::size_t finite =
      values.size() - (spec.infinity ? std::size_t{1} << spec.mantissa : std::size_t{1});
  const double magnitude = std::fabs(static_cast<double>(x));
  const double last = values[finite - 1];
  if (magnitude >= last) {
    const bool over = magnitude - last >= (last - values[finite - 2]) / 2;
    return sign | (over && !spec.saturates ? finite : finite - 1);
  }
  const auto above = std::upper_bound(values.begin(), values.begin() + static_cast<long>(finite),
                                      magnitude, [](double a, float b) { return a < b; });
  const std::size_t high = static_cast<std::size_t>(above - values.begin());
  const double up = values[high] - magnitude;
  const double down = magnitude - values[high - 1];
  if (up == down) return sign | (high % 2 == 0 ? high : high - 1);
  return sign | (up < down ? high : high - 1);
}

// Two floats of precision p are added and multiplied exactly enough in one of 2p + 2 bits.
template <class T, class Wide>
T reference_op(Op op, T a, T b) {
  switch (op) {
    case Op::kSum:
    case Op::kAvg:
      return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    case Op::kProd:
      return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    default:
      if (std::isnan(a)) return a;
      if (std::isnan(b)) return b;
      if (op == Op::kMin) return b < a ? b : a;
      return b > a ? b : a;
  }
}

template <class T, class Wide>
T reference_float(const SliceJob& job, const std::vector<T>& x) {
  T acc{};
  for (std::size_t s = 0; s < x.size(); ++s) {
    T value = x[s];
    const bool scaled =
        job.scale_sources == ScaleSources::kAll ||
        (job.scale_sources == ScaleSources::kLocal && static_cast<int>(s) == job.local_src);
    if (job.op == Op::kAvg && scaled) {
      value =
          static_cast<T>(static_cast<Wide>(value) * static_cast<Wide>(static_cast<T>(job.scale)));
    }
    acc = s == 0 ? value : reference_op<T, Wide>(job.op, acc, value);
  }
  return acc;
}

std::uint64_t reference_integer(const SliceJob& job, const std::vector<std::uint64_t>& raw) {
  const int bits = 8 * static_cast<int>(dtype_bytes(job.dtype));
  const bool is_signed =
      job.dtype == DType::kInt8 || job.dtype == DType::kInt32 || job.dtype == DType::kInt64;
  const auto wrap = [&](__int128 x) {
    const __int128 modulus = static_cast<__int128>(1) << bits;
    x %= modulus;
    if (x < 0) x += modulus;
    if (is_signed && x >= modulus / 2) x -= modulus;
    return x;
  };
  __int128 acc = wrap(static_cast<__int128>(raw[0]));
  for (std::size_t s = 1; s < raw.size(); ++s) {
    const __int128 x = wrap(static_cast<__int128>(raw[s]));
    if (job.op == Op::kProd) {
      // The product of two unsigned 64-bit numbers may exceed the signed 128-bit range.
      const unsigned __int128 product =
          static_cast<unsigned __int128>(acc) * static_cast<unsigned __int128>(x);
      acc = wrap(static_cast<__int128>(static_cast<std::uint64_t>(product)));
    } else if (job.op == Op::kMin) {
      acc = x < acc ? x : acc;
    } else if (job.op == Op::kMax) {
      acc = x > acc ? x : acc;
    } else {
      acc = wrap(acc + x);
    }
  }
  if (job.op == Op::kAvg) acc /= static_cast<__int128>(job.divisor);
  const std::uint64_t mask = bits == 64 ? ~0ull : (1ull << bits) - 1;
  return static_cast<std::uint64_t>(acc) & mask;
}

bool is_plain_copy(const SliceJob& job) {
  if (job.num_src != 1) return false;
  if (job.op != Op::kAvg) return true;
  if (is_integer(job.dtype)) return job.divisor == 1;
  return job.scale_sources == ScaleSources::kNone ||
         (job.scale_sources == ScaleSources::kLocal && job.local_src != 0);
}

std::uint64_t reference(const SliceJob& job, const std::vector<std::uint64_t>& raw) {
  if (is_plain_copy(job)) return raw[0];
  if (is_integer(job.dtype)) return reference_integer(job, raw);
  if (job.dtype == DType::kFloat64) {
    std::vector<double> x;
    for (std::uint64_t bits : raw) x.push_back(double_of(bits));
    const double result = reference_float<double, __float128>(job, x);
    return std::isnan(result) ? 0x7fffffffffffffff : double_bits(result);
  }
  std::vector<float> x;
  for (std::uint64_t bits : raw) {
    x.push_back(job.dtype == DType::kFloat32 ? float_of(bits) : decode_narrow(job.dtype, bits));
  }
  const float result = reference_float<float, double>(job, x);
  if (job.dtype != DType::kFloat32) return encode_narrow(job.dtype, result);
  return std::isnan(result) ? 0x7fffffff : float_bits(result);
}

// ---- Inputs. ------------------------------------------------------------------------------------

// Of an element's sources one in `rarity` is special; the rest are ordinary, so that not every
// result is NaN, infinite or zero.
std::uint64_t make_input(DType t, Op op, std::size_t element, std::mt19937_64& random) {
  if (element % 4 == 0) return random();  // any bits
  const bool special = random() % 24 == 0;
  if (is_integer(t)) {
    const int bits = 8 * static_cast<int>(dtype_bytes(t));
    constexpr std::uint64_t kOne = 1;
    const std::uint64_t specials[] = {0, ~0ull, kOne << (bits - 1), (kOne << (bits - 1)) - 1};
    if (special) return specials[random() % 4];
    return op == Op::kProd ? 2 * (random() % 8) + 1 : random() % 100 - 50;
  }
  const double inf = std::numeric_limits<double>::infinity();
  const double specials[] = {0.0, -0.0, inf, -inf, std::nan(""), 1e-41, 448, -60000, 6e-8, 3.3e38};
  double x;
  if (special) {
    x = specials[random() % 10];
  } else if (op == Op::kProd) {
    x = 1.0 + static_cast<double>(random() % 64) / 256 - 0.1;
  } else if (element % 4 == 1) {
    x = static_cast<double>(random() % 33) - 16;  // many ties and zeros
  } else {
    x = std::ldexp(static_cast<double>(random() % 2048), static_cast<int>(random() % 12) - 14);
    if (random() % 2 == 0) x = -x;
  }
  if (t == DType::kFloat64) return double_bits(x);
  if (t == DType::kFloat32) return float_bits(static_cast<float>(x));
  return encode_narrow(t, static_cast<float>(x));
}

// ---- The harness. -------------------------------------------------------------------------------

std::vector<HostIsa> isas() {
  std::vector<HostIsa> result;
  for (int i = 0; i < kNumHostIsas; ++i) {
    if (host_isa_available(static_cast<HostIsa>(i))) result.push_back(static_cast<HostIsa>(i));
  }
  return result;
}

// Whether nobody has written there. (In one call: the address sanitizer looks at each of ours.)
bool untouched(const unsigned char* begin, std::size_t bytes) {
  static const std::vector<unsigned char> poison(kMaxElems * 8 + 64, kPoison);
  return std::memcmp(begin, poison.data(), bytes) == 0;
}

// Bytes between guards, which begin `offset` bytes behind a cache line.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : storage_(bytes + 3 * kGuard + 64) {}
  unsigned char* reset(std::size_t offset, std::size_t bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    data_ = storage_.data() + (kGuard - address % kGuard) + kGuard + offset;
    bytes_ = bytes;
    std::memset(data_ - kGuard, kPoison, bytes + 2 * kGuard);
    return data_;
  }
  unsigned char* data() { return data_; }
  bool guards_intact() const {
    return untouched(data_ - kGuard, kGuard) && untouched(data_ + bytes_, kGuard);
  }

 private:
  std::vector<unsigned char> storage_;
  unsigned char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

enum class InPlace { kNo, kFirst, kLast, kBothDestinations };

class LeavesTest : public testing::TestWithParam<int> {
 protected:
  DType dtype() const { return static_cast<DType>(GetParam()); }
};

// Expected results do not depend on the count: they are computed once for the most elements.
class Case {
 public:
  Case(SliceJob job, std::uint64_t seed) : job_(job), size_(dtype_bytes(job.dtype)) {
    std::mt19937_64 random(seed);
    inputs_.resize(job.num_src, std::vector<unsigned char>(kMaxElems * size_));
    expected_.resize(kMaxElems * size_);
    std::vector<std::uint64_t> raw(job.num_src);
    for (std::size_t i = 0; i < kMaxElems; ++i) {
      for (std::size_t s = 0; s < job.num_src; ++s) {
        raw[s] = make_input(job.dtype, job.op, i, random);
        if (size_ < 8) raw[s] &= (1ull << (8 * size_)) - 1;
        std::memcpy(&inputs_[s][i * size_], &raw[s], size_);
      }
      const std::uint64_t result = reference(job, raw);
      std::memcpy(&expected_[i * size_], &result, size_);
    }
    for (std::size_t s = 0; s < job.num_src; ++s) sources_.emplace_back(kMaxElems * size_ + 64);
  }

  // dsts: bit 0 dst_user, the rest: how many slots. offsets: 0 all aligned; 1 all off by one
  // element; 2 each pointer differs.
  void check(HostIsa isa, std::size_t count, int offsets, InPlace in_place, int dsts,
             unsigned threads) {
    const std::size_t bytes = count * size_;
    const auto offset = [&](std::size_t index) {
      return offsets == 0 ? 0 : offsets == 1 ? size_ : (index * size_ * 3 + size_) % 64;
    };
    SliceJob job = job_;
    job.elems = count;
    for (std::size_t s = 0; s < job.num_src; ++s) {
      job.src[s] = sources_[s].reset(offset(s), bytes);
      std::memcpy(sources_[s].data(), inputs_[s].data(), bytes);
    }
    user_.reset(offset(job.num_src), bytes);
    if (dsts & 1) job.dst_user = user_.data();
    job.num_dst = static_cast<std::uint16_t>(dsts >> 1);
    for (std::size_t d = 0; d < kMaxSlots; ++d) {
      job.dst_slot[d] = slots_[d].reset(offset(job.num_src + 1u + d), bytes);
    }
    const std::size_t last = job.num_src - 1u;
    std::size_t first_overwritten = job.num_src, second_overwritten = job.num_src;
    if (in_place == InPlace::kFirst) {
      (dsts & 1 ? job.dst_user : job.dst_slot[0]) = sources_[first_overwritten = 0].data();
    } else if (in_place == InPlace::kLast) {
      (dsts >= 2 ? job.dst_slot[0] : job.dst_user) = sources_[first_overwritten = last].data();
    } else if (in_place == InPlace::kBothDestinations) {
      job.dst_user = sources_[first_overwritten = last].data();
      if (job.num_dst == 0) job.num_dst = 1;
      job.dst_slot[0] = sources_[second_overwritten = 0].data();
    }
    for (unsigned t = 0; t < threads; ++t) run_leaf_host_with(isa, job, t, threads);

    const std::string what = std::string(to_string(isa)) + " " + to_string(job.dtype) + " " +
                             to_string(job.op) + " sources " + std::to_string(job.num_src) +
                             " count " + std::to_string(count) + " offsets " +
                             std::to_string(offsets) + " in place " +
                             std::to_string(static_cast<int>(in_place)) + " dsts " +
                             std::to_string(dsts) + " threads " + std::to_string(threads) +
                             " scaling " + std::to_string(static_cast<int>(job.scale_sources)) +
                             " divisor " + std::to_string(job.divisor);
    std::vector<void*> dsts_used(job.dst_slot, job.dst_slot + job.num_dst);
    if (job.dst_user != nullptr) dsts_used.push_back(job.dst_user);
    for (void* dst : dsts_used) {
      const unsigned char* got = static_cast<unsigned char*>(dst);
      if (std::memcmp(got, expected_.data(), bytes) == 0) continue;
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(std::memcmp(got + i * size_, &expected_[i * size_], size_), 0)
            << what << ": element " << i << describe(job, i, got + i * size_);
      }
    }
    ASSERT_TRUE(user_.guards_intact()) << what;
    ASSERT_TRUE(job.dst_user == user_.data() || untouched(user_.data(), bytes)) << what;
    for (std::size_t d = 0; d < kMaxSlots; ++d) {
      ASSERT_TRUE(slots_[d].guards_intact()) << what;
      const bool used = d < job.num_dst && job.dst_slot[d] == slots_[d].data();
      ASSERT_TRUE(used || untouched(slots_[d].data(), bytes)) << what;
    }
    for (std::size_t s = 0; s < job.num_src; ++s) {
      ASSERT_TRUE(sources_[s].guards_intact()) << what;
      if (s == first_overwritten || s == second_overwritten) continue;
      ASSERT_EQ(std::memcmp(sources_[s].data(), inputs_[s].data(), bytes), 0) << what;
    }
  }

 private:
  std::string describe(const SliceJob& job, std::size_t i, const unsigned char* got) const {
    const auto hex = [&](const unsigned char* p) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, p, size_);
      char text[24];
      std::snprintf(text, sizeof text, " %llx", static_cast<unsigned long long>(bits));
      return std::string(text);
    };
    std::string text = ": got" + hex(got) + ", expected" + hex(&expected_[i * size_]) + ", from";
    for (std::size_t s = 0; s < std::min<std::size_t>(job.num_src, 4); ++s) {
      text += hex(&inputs_[s][i * size_]);
    }
    return text;
  }

  SliceJob job_;
  std::size_t size_;
  std::vector<std::vector<unsigned char>> inputs_;
  std::vector<unsigned char> expected_;
  std::vector<Buffer> sources_;
  Buffer user_{kMaxElems * 8 + 64};
  std::vector<Buffer> slots_ = std::vector<Buffer>(kMaxSlots, Buffer(kMaxElems * 8 + 64));
};

// Jobs of one dtype, op and number of sources: without scaling, and for averages with each kind.
std::vector<SliceJob> jobs_of(DType dtype, Op op, int num_src) {
  SliceJob job;
  job.dtype = dtype;
  job.op = op;
  job.num_src = static_cast<std::uint16_t>(num_src);
  std::vector<SliceJob> jobs{job};
  if (op != Op::kAvg) return jobs;
  if (is_integer(dtype)) {
    for (std::uint32_t divisor : {2u, 3u, 64u, 255u, 1000003u, 0xffffffffu}) {
      jobs.push_back(job);
      jobs.back().divisor = divisor;
    }
    return jobs;
  }
  for (ScaleSources which : {ScaleSources::kLocal, ScaleSources::kAll}) {
    for (double scale : {1.0 / 3, 0.125}) {
      job.scale_sources = which;
      job.local_src = static_cast<std::int16_t>(num_src / 2);
      job.scale = scale;
      jobs.push_back(job);
    }
  }
  job.scale_sources = ScaleSources::kLocal;
  job.local_src = -1;  // nothing local in this slice
  jobs.push_back(job);
  return jobs;
}

// The user, one slot, both, several slots, everything.
constexpr int kDsts[] = {1, 2, 3, 6, 15};

TEST_P(LeavesTest, AgreeWithTheReference) {
  std::uint64_t seed = 1;
  unsigned rotation = 0;
  for (int op = 0; op < kNumOps; ++op) {
    for (int num_src : {1, 2, 3, 8, 64}) {
      for (const SliceJob& job : jobs_of(dtype(), static_cast<Op>(op), num_src)) {
        Case test(job, seed++);
        for (HostIsa isa : isas()) {
          for (std::size_t count : {0, 1, 2, 3, 7, 16, 63, 64, 65, 1000, 4097}) {
            // Every combination would take minutes: each (job, set, count) takes the next ones, and
            // they come round with every value of the others.
            const int all_variants = count >= 1000 ? 4 : num_src == 64 ? 8 : 24;
            const int variants = kSanitized ? all_variants / 4 : all_variants;
            for (int i = 0; i < variants; ++i, ++rotation) {
              test.check(isa, count, static_cast<int>(rotation % 3),
                         static_cast<InPlace>(rotation / 3 % 4), kDsts[rotation / 2 % 5],
                         1u << rotation % 5 % 3);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST_P(LeavesTest, EveryPlacement) {
  for (int num_src : {1, 2, 3}) {
    SliceJob job;
    job.dtype = dtype();
    job.num_src = static_cast<std::uint16_t>(num_src);
    Case test(job, 99);
    for (HostIsa isa : isas()) {
      for (std::size_t count : {0, 1, 3, 16, 65, 1000}) {
        for (int offsets = 0; offsets < 3; ++offsets) {
          for (int in_place = 0; in_place < 4; ++in_place) {
            for (const int dsts : kDsts) {
              for (unsigned threads : {1u, 2u, 3u, 4u}) {
                test.check(isa, count, offsets, static_cast<InPlace>(in_place), dsts, threads);
                if (HasFatalFailure()) return;
              }
            }
          }
        }
      }
    }
  }
}

// Chosen values rather than random ones: every pair of them, in both orders.
TEST_P(LeavesTest, PairsOfSpecialValues) {
  std::vector<std::uint64_t> specials;
  const int bits = 8 * static_cast<int>(dtype_bytes(dtype()));
  const std::uint64_t mask = bits == 64 ? ~0ull : (1ull << bits) - 1;
  // The patterns around the ends of the exponents, of both signs, are the special ones of any
  // format: zeros, infinities, NaNs quiet and signalling, subnormals, the largest and smallest.
  for (std::uint64_t base :
       {0ull, 0x3ull, 0x7ull, 0x38ull, 0x40ull, 0x70ull, 0x78ull, 0x7cull, 0x7fcull, 0x7f8ull,
        0x7ffull, 0x8ull, 0xfull, 0xf8ull, 0x400ull, 0x3ffull, 0x3c0ull, 0x7feull, 0x1ull}) {
    for (int shift = bits % 12; shift < bits && bits > 8; shift += 4) {
      for (int delta : {-1, 0, 1}) {
        specials.push_back(((base << shift) + static_cast<std::uint64_t>(delta)) & mask);
      }
    }
  }
  if (bits == 8) {
    for (std::uint64_t pattern = 0; pattern < 256; ++pattern) specials.push_back(pattern);
  }
  std::sort(specials.begin(), specials.end());
  specials.erase(std::unique(specials.begin(), specials.end()), specials.end());
  const std::size_t n = std::min<std::size_t>(specials.size(), 256);
  const std::size_t stride = specials.size() / n;
  const std::size_t size = dtype_bytes(dtype());
  std::vector<unsigned char> a(n * n * size), b(n * n * size), got(n * n * size);
  for (std::size_t i = 0; i < n * n; ++i) {
    std::memcpy(&a[i * size], &specials[i / n * stride], size);
    std::memcpy(&b[i * size], &specials[i % n * stride], size);
  }
  std::vector<std::uint64_t> expected(n * n);
  for (int op = 0; op < kNumOps; ++op) {
    SliceJob job;
    job.dtype = dtype();
    job.op = static_cast<Op>(op);
    job.num_src = 2;
    for (std::size_t i = 0; i < n * n; ++i) {
      expected[i] = reference(job, {specials[i / n * stride], specials[i % n * stride]});
    }
    job.src[0] = a.data();
    job.src[1] = b.data();
    job.dst_user = got.data();
    job.elems = n * n;
    for (HostIsa isa : isas()) {
      run_leaf_host_with(isa, job, 0, 1);
      for (std::size_t i = 0; i < n * n; ++i) {
        std::uint64_t result = 0;
        std::memcpy(&result, &got[i * size], size);
        if (result == expected[i]) continue;  // (an assertion for each takes longer than the leaf)
        const std::uint64_t x = specials[i / n * stride], y = specials[i % n * stride];
        FAIL() << to_string(isa) << " " << to_string(job.op) << std::hex << " of " << x << " and "
               << y << " is " << result << ", expected " << expected[i];
      }
    }
  }
}

// A copy is of bits, whatever they mean.
TEST_P(LeavesTest, CopiesKeepNanPayloads) {
  std::vector<unsigned char> from(4096), user(4096), slot(4096);
  std::mt19937 random(5);
  for (unsigned char& c : from) c = static_cast<unsigned char>(random() | 0x7c);
  SliceJob job;
  job.dtype = dtype();
  job.op = Op::kMax;
  job.num_src = 1;
  job.src[0] = from.data();
  job.dst_user = user.data();
  job.dst_slot[0] = slot.data();
  job.num_dst = 1;
  job.elems = from.size() / dtype_bytes(dtype());
  run_leaf_host(job, 0, 1);
  EXPECT_EQ(user, from);
  EXPECT_EQ(slot, from);
}

// Copies of different lengths, one of them empty, some to slots, some to the user, some to both.
TEST_P(LeavesTest, IndependentCopies) {
  const std::size_t size = dtype_bytes(dtype());
  const std::uint32_t lengths[] = {1000, 0, 1, 4097, 63};
  constexpr std::size_t kCopies = std::size(lengths);
  std::mt19937 random(6);
  for (HostIsa isa : isas()) {
    for (unsigned threads : {1u, 2u, 3u, 4u}) {
      SliceJob job;
      job.dtype = dtype();
      job.copies = true;
      job.num_src = kCopies;
      std::vector<std::vector<unsigned char>> from(kCopies);
      std::vector<Buffer> to(kCopies, Buffer(kMaxElems * 8 + 64));
      std::vector<Buffer> also(kCopies, Buffer(kMaxElems * 8 + 64));
      for (std::size_t i = 0; i < kCopies; ++i) {
        from[i].resize(lengths[i] * size + 1);
        for (unsigned char& c : from[i]) c = static_cast<unsigned char>(random());
        unsigned char* dst = to[i].reset(i * size, lengths[i] * size);
        job.copy_elems[i] = lengths[i];
        job.src[i] = from[i].data();
        (i % 2 == 0 ? job.dst_slot : job.dst_copy)[i] = dst;
        unsigned char* second = also[i].reset((i + 1) * size, lengths[i] * size);
        if (i % 4 == 0) job.dst_copy[i] = second;
      }
      for (unsigned t = 0; t < threads; ++t) run_leaf_host_with(isa, job, t, threads);
      for (std::size_t i = 0; i < kCopies; ++i) {
        ASSERT_EQ(std::memcmp(to[i].data(), from[i].data(), lengths[i] * size), 0) << i;
        ASSERT_TRUE(to[i].guards_intact()) << i;
        ASSERT_TRUE(also[i].guards_intact()) << i;
        if (i % 4 != 0) continue;
        ASSERT_EQ(std::memcmp(also[i].data(), from[i].data(), lengths[i] * size), 0) << i;
      }
    }
  }
}

// The threads of a block at once, in place: sanitizers would see pieces that overlap.
TEST_P(LeavesTest, ThreadsTogether) {
  constexpr unsigned kThreads = 4;
  const std::size_t elems = 5003;
  std::vector<unsigned char> a((elems + 1) * 8, 1), b((elems + 1) * 8, 2);
  const std::vector<unsigned char> before = a;
  SliceJob job;
  job.dtype = dtype();
  job.op = Op::kMin;
  job.num_src = 2;
  job.src[0] = a.data() + dtype_bytes(dtype());
  job.src[1] = b.data();
  job.dst_user = a.data() + dtype_bytes(dtype());
  job.dst_slot[0] = b.data();
  job.num_dst = 1;
  job.elems = elems;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < kThreads; ++t) {
    threads.emplace_back([&job, t] { run_leaf_host(job, t, kThreads); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(a, before);
  EXPECT_TRUE(std::equal(b.begin(), b.begin() + static_cast<long>(elems * dtype_bytes(dtype())),
                         before.begin()));
}

TEST(HostIsaTest, TheBestIsAvailable) {
  EXPECT_TRUE(host_isa_available(HostIsa::kBase));
  EXPECT_TRUE(host_isa_available(best_host_isa()));
}

INSTANTIATE_TEST_SUITE_P(AllTypes, LeavesTest, testing::Range(0, kNumDTypes),
                         [](const testing::TestParamInfo<int>& info) {
                           return std::string(to_string(static_cast<DType>(info.param)));
                         });

}  // namespace
}  // namespace unjam
