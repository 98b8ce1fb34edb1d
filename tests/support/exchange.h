// One collective call on all ranks of a group: its buffers, its data, and what must come out,
// computed here from the contract in unjam.h and from nothing of unjam's.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/job.h"

namespace unjam_test {

inline constexpr int kNumDTypes = 12;
inline constexpr int kNumOps = 5;
inline constexpr int kNumKinds = 9;  // that a whole group calls: all but send/recv

// ---- element types ----

struct TypeInfo {
  const char* name;
  int bytes;
  char family;  // 'i' signed, 'u' unsigned, 'f' floating
  int mantissa;
  int exponent;
};

UNJAM_UNWATCHED inline const TypeInfo& type_info(unjamDataType_t t) {
  static constexpr TypeInfo kTypes[kNumDTypes] = {
      {"int8", 1, 'i', 0, 0},      {"uint8", 1, 'u', 0, 0},    {"int32", 4, 'i', 0, 0},
      {"uint32", 4, 'u', 0, 0},    {"int64", 8, 'i', 0, 0},    {"uint64", 8, 'u', 0, 0},
      {"float16", 2, 'f', 10, 5},  {"bfloat16", 2, 'f', 7, 8}, {"float32", 4, 'f', 23, 8},
      {"float64", 8, 'f', 52, 11}, {"e4m3", 1, 'f', 3, 4},     {"e5m2", 1, 'f', 2, 5},
  };
  return kTypes[t];
}

inline const char* name_of(unjamOp_t op) {
  static const char* const kNames[kNumOps] = {"sum", "prod", "min", "max", "avg"};
  return kNames[op];
}
inline const char* name_of(unjamKind_t kind) {
  static const char* const kNames[kNumKinds] = {"all_reduce", "all_gather", "reduce_scatter",
                                                "reduce",     "broadcast",  "all_to_all",
                                                "gather",     "scatter",    "barrier"};
  return kNames[kind];
}
UNJAM_UNWATCHED inline bool reduces(unjamKind_t k) {
  return k == UNJAM_ALL_REDUCE || k == UNJAM_REDUCE_SCATTER || k == UNJAM_REDUCE;
}
// One rank has all the input, or gets all the output.
inline bool from_root(unjamKind_t k) { return k == UNJAM_BROADCAST || k == UNJAM_SCATTER; }
inline bool to_root(unjamKind_t k) { return k == UNJAM_REDUCE || k == UNJAM_GATHER; }
inline bool has_root(unjamKind_t k) { return from_root(k) || to_root(k); }
inline bool may_be_in_place(unjamKind_t k) { return k != UNJAM_ALL_TO_ALL; }
// The input, or the output, of a rank has a block for every member.
inline bool sends_blocks(unjamKind_t k) {
  return k == UNJAM_REDUCE_SCATTER || k == UNJAM_ALL_TO_ALL || k == UNJAM_SCATTER;
}
inline bool receives_blocks(unjamKind_t k) {
  return k == UNJAM_ALL_GATHER || k == UNJAM_ALL_TO_ALL || k == UNJAM_GATHER;
}

UNJAM_UNWATCHED inline std::uint64_t low_bits(int bits) {
  return bits >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
}

// The number that a floating-point bit pattern stands for, by the format's definition.
inline double decode_by_definition(unjamDataType_t t, std::uint64_t bits) {
  const TypeInfo& f = type_info(t);
  const double sign = (bits >> (f.mantissa + f.exponent)) & 1 ? -1.0 : 1.0;
  const auto e = static_cast<int>((bits >> f.mantissa) & low_bits(f.exponent));
  const std::uint64_t m = bits & low_bits(f.mantissa);
  const auto top = static_cast<int>(low_bits(f.exponent));
  const int bias = top / 2;
  if (t == UNJAM_FLOAT8_E4M3) {
    if (e == top && m == 7) return std::numeric_limits<double>::quiet_NaN();
  } else if (e == top) {
    return m == 0 ? sign * std::numeric_limits<double>::infinity()
                  : std::numeric_limits<double>::quiet_NaN();
  }
  if (e == 0) return sign * std::ldexp(static_cast<double>(m), 1 - bias - f.mantissa);
  return sign * std::ldexp(static_cast<double>(m + (std::uint64_t{1} << f.mantissa)),
                           e - bias - f.mantissa);
}

UNJAM_UNWATCHED inline double decode(unjamDataType_t t, std::uint64_t bits) {
  switch (t) {
    case UNJAM_FLOAT32:
      return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    case UNJAM_FLOAT64:
      return std::bit_cast<double>(bits);
    default:
      break;
  }
  static const double* const* const kTables = [] {
    static std::array<std::vector<double>, kNumDTypes> tables;
    for (const unjamDataType_t d :
         {UNJAM_FLOAT16, UNJAM_BFLOAT16, UNJAM_FLOAT8_E4M3, UNJAM_FLOAT8_E5M2}) {
      const std::uint64_t n = std::uint64_t{1} << (8 * type_info(d).bytes);
      for (std::uint64_t b = 0; b < n; ++b) tables[d].push_back(decode_by_definition(d, b));
    }
    static std::array<const double*, kNumDTypes> begins;
    for (std::size_t d = 0; d < kNumDTypes; ++d) begins[d] = tables[d].data();
    return begins.data();
  }();
  return kTables[t][bits];
}

// The bit pattern of a value that the type holds exactly.
inline std::uint64_t encode(unjamDataType_t t, double value) {
  const TypeInfo& f = type_info(t);
  if (f.family != 'f') return static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
  if (t == UNJAM_FLOAT32) return std::bit_cast<std::uint32_t>(static_cast<float>(value));
  if (t == UNJAM_FLOAT64) return std::bit_cast<std::uint64_t>(value);
  static const auto kInverse = [] {
    std::array<std::map<double, std::uint64_t>, kNumDTypes> maps;
    for (const unjamDataType_t d :
         {UNJAM_FLOAT16, UNJAM_BFLOAT16, UNJAM_FLOAT8_E4M3, UNJAM_FLOAT8_E5M2}) {
      const std::uint64_t n = std::uint64_t{1} << (8 * type_info(d).bytes);
      for (std::uint64_t b = 0; b < n; ++b) maps[d].emplace(decode(d, b), b);  // +0 before -0
    }
    return maps;
  }();
  const auto found = kInverse[t].find(value);
  if (found == kInverse[t].end()) fail("the test encodes a value that its type does not hold");
  return found->second;
}

// Little endian. By size, as a copy of a size known only at run time is a call.
template <class T>
UNJAM_UNWATCHED inline std::uint64_t load_as(const unsigned char* p) {
  T bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return bits;
}
UNJAM_UNWATCHED inline std::uint64_t load_bits(const unsigned char* p, int bytes) {
  switch (bytes) {
    case 1:
      return *p;
    case 2:
      return load_as<std::uint16_t>(p);
    case 4:
      return load_as<std::uint32_t>(p);
    default:
      return load_as<std::uint64_t>(p);
  }
}
template <class T>
UNJAM_UNWATCHED inline void store_as(unsigned char* p, std::uint64_t bits) {
  const T low = static_cast<T>(bits);
  __builtin_memcpy(p, &low, sizeof low);
}
UNJAM_UNWATCHED inline void store_bits(unsigned char* p, std::uint64_t bits, int bytes) {
  switch (bytes) {
    case 1:
      return store_as<std::uint8_t>(p, bits);
    case 2:
      return store_as<std::uint16_t>(p, bits);
    case 4:
      return store_as<std::uint32_t>(p, bits);
    default:
      return store_as<std::uint64_t>(p, bits);
  }
}

UNJAM_UNWATCHED inline std::uint64_t hash_elements(const unsigned char* p, std::size_t bytes,
                                                   std::uint64_t h) {
  constexpr std::uint64_t kFactor = 0x9ddfea08eb382d69u;
  std::size_t i = 0;
  if (bytes >= 256) {  // four at a time, as one waits for its multiplication
    std::uint64_t four[] = {h, h + 1, h + 2, h + 3};
    for (; i + 32 <= bytes; i += 32) {
      for (std::size_t k = 0; k < 4; ++k) {
        four[k] = (four[k] ^ load_bits(p + i + 8 * k, 8)) * kFactor;
        four[k] ^= four[k] >> 29;
      }
    }
    for (const std::uint64_t lane : four) h = mix(h, lane);
  }
  for (; i + 8 <= bytes; i += 8) h = (h ^ load_bits(p + i, 8)) * kFactor, h ^= h >> 29;
  for (; i < bytes; ++i) h = (h ^ p[i]) * kFactor, h ^= h >> 29;
  return mix(h);
}
inline std::uint64_t hash_memory(const unsigned char* p, std::size_t bytes, std::uint64_t h = 1) {
  read_here(p, bytes);
  return hash_elements(p, bytes, h);
}

// ---- calls ----

// kExact: every sum, product and quotient on the way is exact in the type, whatever the order
// (averages over a number of ranks that is no power of two excepted). kRandom: it is not.
enum class Data { kExact, kRandom };

struct Spec {
  unjamKind_t kind = UNJAM_ALL_REDUCE;
  unjamDataType_t dtype = UNJAM_FLOAT32;
  unjamOp_t op = UNJAM_SUM;
  std::size_t count = 0;
  int root = 0;
  bool in_place = false;
  Data data = Data::kExact;
  std::uint64_t seed = 1;

  std::string text() const {
    std::ostringstream s;
    s << name_of(kind) << " " << type_info(dtype).name;
    if (reduces(kind)) s << " " << name_of(op);
    s << " count " << count;
    if (has_root(kind)) s << " root " << root;
    s << (in_place ? " in place" : " out of place") << (data == Data::kExact ? " exact" : " random")
      << " data seed " << seed;
    return s.str();
  }
};

inline bool all_are(const unsigned char* p, std::size_t bytes, unsigned char c) {
  return bytes == 0 || (p[0] == c && std::memcmp(p, p + 1, bytes - 1) == 0);
}

// A byte buffer between two guards, at an address that is aligned to the element and no more.
class Guarded {
 public:
  void allocate(std::size_t bytes, std::size_t misalign) {
    bytes_ = bytes;
    begin_ = kGuard + misalign;
    memory_.assign(begin_ + bytes + kGuard, kGuardByte);
  }
  unsigned char* data() { return memory_.data() + begin_; }
  const unsigned char* data() const { return memory_.data() + begin_; }
  std::size_t bytes() const { return bytes_; }
  bool allocated() const { return !memory_.empty(); }
  bool guards_intact() const {
    return all_are(memory_.data(), begin_, kGuardByte) &&
           all_are(data() + bytes_, memory_.size() - begin_ - bytes_, kGuardByte);
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kGuardByte = 0xa5;
  std::vector<unsigned char> memory_;
  std::size_t begin_ = 0, bytes_ = 0;
};

class Exchange {
 public:
  Exchange(const Spec& spec, int ranks)
      : Exchange(spec, ranks, std::vector<bool>(static_cast<std::size_t>(ranks), true)) {}
  // present: the group ranks that are in this process; no other has buffers here.
  Exchange(const Spec& spec, int ranks, const std::vector<bool>& present)
      : spec_(spec),
        n_(ranks),
        size_(static_cast<std::size_t>(type_info(spec.dtype).bytes)),
        present_(present),
        whole_(std::find(present.begin(), present.end(), false) == present.end()),
        ranks_(static_cast<std::size_t>(ranks)) {
    if (!has_root(spec.kind)) spec_.root = 0;
    if (!may_be_in_place(spec.kind)) spec_.in_place = false;
    if (spec.kind == UNJAM_BARRIER) spec_.count = 0;
    for (int r = 0; r < n_; ++r) {
      if (!present_[static_cast<std::size_t>(r)]) continue;
      PerRank& me = ranks_[static_cast<std::size_t>(r)];
      const std::size_t shift = size_ * (mix(spec_.seed, static_cast<std::uint64_t>(r)) % 16);
      if (!spec_.in_place) {
        me.send.allocate(send_count() * size_, shift);
        me.recv.allocate(recv_count() * size_, (shift + size_) % (16 * size_));
      } else if (!has_output(r) || (sends_blocks(spec_.kind) && has_input(r))) {
        me.send.allocate(send_count() * size_, shift);
      } else {
        me.recv.allocate(recv_count() * size_, shift);
      }
    }
    fill();
  }

  const Spec& spec() const { return spec_; }
  std::size_t memory() const {
    std::size_t bytes = 0;
    for (const PerRank& p : ranks_) bytes += p.send.bytes() + p.recv.bytes();
    return bytes;
  }

  // Writes inputs, poisons outputs; before every use but the first.
  void fill() {
    poison_ = static_cast<unsigned char>(poison_ + 0x31);
    for (int r = 0; r < n_; ++r) {
      if (!present_[static_cast<std::size_t>(r)]) continue;
      PerRank& me = ranks_[static_cast<std::size_t>(r)];
      if (me.recv.allocated()) std::memset(me.recv.data(), poison_, me.recv.bytes());
      if (me.send.allocated()) std::memset(me.send.data(), poison_, me.send.bytes());
      if (!has_input(r)) continue;
      const std::size_t elements = send_count();
      if (me.input.empty()) {
        me.input.resize(elements * size_);
        write_input(me.input.data(), r, elements);
      }
      if (elements != 0) {
        std::memcpy(const_cast<void*>(send(r)), me.input.data(), me.input.size());
      }
    }
  }

  const void* send(int r) const {
    const PerRank& me = ranks_[static_cast<std::size_t>(r)];
    if (me.send.allocated()) return me.send.data();
    if (!has_input(r)) return nullptr;
    const std::size_t shift =
        receives_blocks(spec_.kind) ? static_cast<std::size_t>(r) * spec_.count * size_ : 0;
    return me.recv.data() + shift;
  }
  void* recv(int r) {
    PerRank& me = ranks_[static_cast<std::size_t>(r)];
    if (me.recv.allocated()) return me.recv.data();
    if (!has_output(r)) return nullptr;
    return me.send.data() + static_cast<std::size_t>(r) * spec_.count * size_;
  }

  // The call of group rank r.
  unjamResult_t submit(int r, unjamGroup_t group, const char* key,
                       const unjamCallOptions_t* options, unjamRequest_t* request) {
    const void* from = send(r);
    void* to = recv(r);
    if (spec_.count == 0 && spec_.seed % 2 == 0) from = to = nullptr;
    switch (spec_.kind) {
      case UNJAM_ALL_REDUCE:
        return unjamAllReduce(group, key, from, to, spec_.count, spec_.dtype, spec_.op, options,
                              request);
      case UNJAM_ALL_GATHER:
        return unjamAllGather(group, key, from, to, spec_.count, spec_.dtype, options, request);
      case UNJAM_REDUCE_SCATTER:
        return unjamReduceScatter(group, key, from, to, spec_.count, spec_.dtype, spec_.op, options,
                                  request);
      case UNJAM_REDUCE:
        return unjamReduce(group, key, from, to, spec_.count, spec_.dtype, spec_.op, spec_.root,
                           options, request);
      case UNJAM_BROADCAST:
        return unjamBroadcast(group, key, from, to, spec_.count, spec_.dtype, spec_.root, options,
                              request);
      case UNJAM_ALL_TO_ALL:
        return unjamAllToAll(group, key, from, to, spec_.count, spec_.dtype, options, request);
      case UNJAM_GATHER:
        return unjamGather(group, key, from, to, spec_.count, spec_.dtype, spec_.root, options,
                           request);
      case UNJAM_SCATTER:
        return unjamScatter(group, key, from, to, spec_.count, spec_.dtype, spec_.root, options,
                            request);
      case UNJAM_BARRIER:
        return unjamBarrier(group, key, options, request);
      default:
        break;
    }
    return UNJAM_ERROR_INTERNAL;
  }

  // "" if everything is right on all ranks: results, guards, untouched inputs and equal bits. Where
  // not all ranks are present, guards and inputs only: results are then compared, by digest(r),
  // with those of a run of the same calls where all are.
  std::string check() const {
    if (std::string e = check_surroundings(); !e.empty()) return e;
    if (spec_.count == 0 || !whole_) return "";
    if (!reduces(spec_.kind)) return check_copies();
    return check_reduction();
  }
  // The part of it that the digest does not tell: guards and untouched inputs. Enough after a run
  // whose digest is that of an earlier one which check() found right.
  std::string check_surroundings() const {
    for (int r = 0; r < n_; ++r) {
      if (!present_[static_cast<std::size_t>(r)]) continue;
      const PerRank& me = ranks_[static_cast<std::size_t>(r)];
      const std::string rank = " on group rank " + std::to_string(r);
      if (me.send.allocated() && !me.send.guards_intact()) return error("input guard hit" + rank);
      if (me.recv.allocated() && !me.recv.guards_intact()) return error("output guard hit" + rank);
      if (std::string e = check_untouched(r); !e.empty()) return error(e + rank);
    }
    return "";
  }

  // Of all bits that ranks received.
  std::uint64_t digest() const {
    std::uint64_t h = 7;
    for (int r = 0; r < n_; ++r) {
      if (has_output(r)) h = hash_memory(output(r), recv_count() * size_, h);
    }
    return h;
  }
  std::uint64_t digest(int r) const { return hash_memory(output(r), recv_count() * size_); }
  // Whether group rank r is present and receives anything.
  bool receives(int r) const { return present_[static_cast<std::size_t>(r)] && has_output(r); }

  // Element i of what group rank r sends.
  UNJAM_UNWATCHED std::uint64_t input_bits(int r, std::size_t i) const {
    const TypeInfo& f = type_info(spec_.dtype);
    const std::uint64_t h =
        mix(spec_.seed + static_cast<std::uint64_t>(r) * 0xd1342543de82ef95u, i);
    if (f.family != 'f' || !reduces(spec_.kind)) return h & low_bits(8 * f.bytes);
    const std::uint64_t bias = low_bits(f.exponent) / 2;
    if (spec_.op == UNJAM_MIN || spec_.op == UNJAM_MAX) {
      // Any number; infinities only where no rounding would cut them.
      const std::uint64_t most = low_bits(f.exponent) - 1;
      return with_exponent(f, h, (h >> 53) % (most + 1));
    }
    const bool small = f.bytes == 1;
    // Of the ranks of a long chain only some may change the number, or it leaves the type's range.
    const auto un = static_cast<std::uint64_t>(n_);
    const bool active = (static_cast<std::uint64_t>(r) + i) % un < 4;
    if (spec_.op == UNJAM_PROD) {
      if (!active) return encode_small(1, 0);
      if (spec_.data == Data::kRandom) return with_exponent(f, h, bias - ((h >> 53) & 1));
      static constexpr int kPowers[] = {1, 0, -1, 1};
      const std::size_t k = (h >> 53) % 4;
      return encode_small(k == 1 || k == 3 ? -1 : 1, kPowers[k]);
    }
    if (spec_.data == Data::kRandom) return with_exponent(f, h, bias - ((h >> 53) & 3));
    if (small) {
      if (!active) return 0;
      static constexpr int kValues[] = {-2, -1, 1, 2};
      return encode_small(kValues[(h >> 53) % 4], 0);
    }
    return encode_small(static_cast<int>((h >> 53) % 7) - 3, 0);
  }

 private:
  struct PerRank {
    Guarded send, recv;
    std::vector<unsigned char> input;  // what it sends: every element is looked at several times
  };

  // A float of a random sign and fraction.
  UNJAM_UNWATCHED static std::uint64_t with_exponent(const TypeInfo& f, std::uint64_t h,
                                                     std::uint64_t e) {
    return (h & low_bits(f.mantissa)) | e << f.mantissa | (h >> 63) << (f.mantissa + f.exponent);
  }
  UNJAM_UNWATCHED void write_input(unsigned char* to, int r, std::size_t elements) const {
    for (std::size_t i = 0; i < elements; ++i) {
      store_bits(to + i * size_, input_bits(r, i), static_cast<int>(size_));
    }
  }

  std::size_t send_count() const {
    return spec_.count * (sends_blocks(spec_.kind) ? static_cast<std::size_t>(n_) : std::size_t{1});
  }
  std::size_t recv_count() const {
    return spec_.count *
           (receives_blocks(spec_.kind) ? static_cast<std::size_t>(n_) : std::size_t{1});
  }
  // As input_bits, of a rank that is present and has input.
  std::uint64_t kept_bits(int r, std::size_t i) const {
    return load_bits(kept(r) + i * size_, static_cast<int>(size_));
  }
  const unsigned char* kept(int r) const {
    return ranks_[static_cast<std::size_t>(r)].input.data();
  }
  // Whether a buffer holds these elements of what rank r sends.
  bool same(const unsigned char* p, int r, std::size_t first, std::size_t elements) const {
    return elements == 0 || std::memcmp(p, kept(r) + first * size_, elements * size_) == 0;
  }
  bool has_input(int r) const { return !from_root(spec_.kind) || r == spec_.root; }
  bool has_output(int r) const { return !to_root(spec_.kind) || r == spec_.root; }
  const unsigned char* output(int r) const {
    return static_cast<const unsigned char*>(const_cast<Exchange*>(this)->recv(r));
  }

  // value × 2^power, value in -3..3, from a table: encode() is slow.
  UNJAM_UNWATCHED std::uint64_t encode_small(int value, int power) const {
    using Table = std::array<std::array<std::array<std::uint64_t, 7>, 3>, kNumDTypes>;
    static const std::uint64_t* const kTable = [] {
      static Table table{};
      for (int t = 0; t < kNumDTypes; ++t) {
        if (type_info(static_cast<unjamDataType_t>(t)).family != 'f') continue;
        for (int p = -1; p <= 1; ++p) {
          for (int v = -3; v <= 3; ++v) {
            table[static_cast<std::size_t>(t)][static_cast<std::size_t>(p + 1)]
                 [static_cast<std::size_t>(v + 3)] =
                     encode(static_cast<unjamDataType_t>(t), std::ldexp(v, p));
          }
        }
      }
      return table[0][0].data();
    }();
    return kTable[(spec_.dtype * 3 + power + 1) * 7 + value + 3];
  }

  std::string error(const std::string& what) const {
    return spec_.text() + " on " + std::to_string(n_) + " ranks: " + what;
  }

  // What a call may not write.
  std::string check_untouched(int r) const {
    const PerRank& me = ranks_[static_cast<std::size_t>(r)];
    if (!spec_.in_place && me.send.allocated()) {
      if (!has_input(r) ? !poisoned(me.send) : !same(me.send.data(), r, 0, send_count()))
        return "the input was written to";
    }
    if (!has_output(r)) {
      if (me.recv.allocated() && !poisoned(me.recv)) return "the unused output was written to";
      if (spec_.in_place && !same(me.send.data(), r, 0, send_count()))
        return "the input was written to";
    }
    if (sends_blocks(spec_.kind) && spec_.in_place && me.send.allocated()) {
      for (std::size_t block = 0; block < static_cast<std::size_t>(n_); ++block) {
        if (block == static_cast<std::size_t>(r)) continue;
        std::size_t i = block * spec_.count;
        if (same(me.send.data() + i * size_, r, i, spec_.count)) continue;
        while (same(me.send.data() + i * size_, r, i, 1)) ++i;
        return "another rank's block of the input was written to, element " + std::to_string(i);
      }
    }
    return "";
  }
  bool poisoned(const Guarded& b) const { return all_are(b.data(), b.bytes(), poison_); }

  std::string check_equal_bits() const {
    for (int r = 1; r < n_; ++r) {
      if (std::memcmp(output(0), output(r), recv_count() * size_) == 0) continue;
      std::size_t i = 0;
      while (output(0)[i] == output(r)[i]) ++i;
      return error("group ranks 0 and " + std::to_string(r) + " have different bits at element " +
                   std::to_string(i / size_));
    }
    return "";
  }

  // Where what rank r must get as its element i comes from: a rank and its element.
  std::pair<int, std::size_t> source(int r, std::size_t i) const {
    const std::size_t own = static_cast<std::size_t>(r) * spec_.count;
    if (spec_.kind == UNJAM_BROADCAST) return {spec_.root, i};
    if (spec_.kind == UNJAM_SCATTER) return {spec_.root, own + i};
    const int from = static_cast<int>(i / spec_.count);
    return {from, i % spec_.count + (spec_.kind == UNJAM_ALL_TO_ALL ? own : 0)};
  }

  std::string check_copies() const {
    const bool alike = spec_.kind == UNJAM_BROADCAST || spec_.kind == UNJAM_ALL_GATHER;
    for (int r = 0; r < (alike ? 1 : n_); ++r) {
      // A block comes from one place.
      for (std::size_t b = 0; has_output(r) && b < recv_count(); b += spec_.count) {
        const auto [from, first] = source(r, b);
        if (same(output(r) + b * size_, from, first, spec_.count)) continue;
        std::size_t i = 0;
        while (same(output(r) + (b + i) * size_, from, first + i, 1)) ++i;
        const std::uint64_t got = load_bits(output(r) + (b + i) * size_, static_cast<int>(size_));
        return error("group rank " + std::to_string(r) + ", element " + std::to_string(b + i) +
                     ": bits " + std::to_string(got) + ", expected " +
                     std::to_string(kept_bits(from, first + i)));
      }
    }
    return alike ? check_equal_bits() : "";
  }

  std::string check_reduction() const {
    // What each rank gave, and the buffers that have the result, one after the other.
    std::vector<const unsigned char*> given;
    for (int r = 0; r < n_; ++r) given.push_back(kept(r));
    const bool in_blocks = spec_.kind == UNJAM_REDUCE_SCATTER;
    for (int block = 0; block < (in_blocks ? n_ : 1); ++block) {
      const int owner = in_blocks ? block : spec_.root;
      const std::size_t first = static_cast<std::size_t>(block) * spec_.count;
      read_here(output(owner), spec_.count * size_);
      const std::size_t at = first_wrong(output(owner), first, given.data());
      if (at == spec_.count) continue;
      const std::uint64_t got = load_bits(output(owner) + at * size_, static_cast<int>(size_));
      return error("group rank " + std::to_string(owner) + ", element " + std::to_string(at) +
                   ": " + words_on(first + at, got, given.data()));
    }
    return spec_.kind == UNJAM_ALL_REDUCE ? check_equal_bits() : "";
  }

  // The first of `count` elements that is not the reduction of the ranks' elements from `first` on.
  UNJAM_UNWATCHED std::size_t first_wrong(const unsigned char* result, std::size_t first,
                                          const unsigned char* const* given) const {
    const int bytes = static_cast<int>(size_);
    const bool of_floats = type_info(spec_.dtype).family == 'f';
    for (std::size_t i = 0; i < spec_.count; ++i) {
      const std::uint64_t got = load_bits(result + i * size_, bytes);
      if (of_floats) {
        double expected = 0, bound = 0;
        if (!right_float(first + i, got, given, expected, bound)) return i;
      } else if (integer(first + i, given) != got) {
        return i;
      }
    }
    return spec_.count;
  }

  std::string words_on(std::size_t i, std::uint64_t got, const unsigned char* const* given) const {
    if (type_info(spec_.dtype).family != 'f') {
      return std::to_string(got) + ", expected " + std::to_string(integer(i, given));
    }
    double expected = 0, bound = 0;
    right_float(i, got, given, expected, bound);
    std::ostringstream s;
    s.precision(17);
    s << decode(spec_.dtype, got) << ", expected " << expected << " ± " << bound << ", from";
    for (int r = 0; r < n_ && r < 9; ++r) s << " " << decode(spec_.dtype, kept_bits(r, i));
    return s.str();
  }

  // As a signed or unsigned 64-bit number with the type's value.
  UNJAM_UNWATCHED static std::uint64_t extend(const TypeInfo& f, std::uint64_t v) {
    const int bits = 8 * f.bytes;
    v &= low_bits(bits);
    if (f.family == 'i' && bits < 64 && (v >> (bits - 1)) != 0) v |= ~low_bits(bits);
    return v;
  }

  UNJAM_UNWATCHED std::uint64_t integer(std::size_t i, const unsigned char* const* given) const {
    const TypeInfo& f = type_info(spec_.dtype);
    std::uint64_t acc = 0;
    for (int r = 0; r < n_; ++r) {
      const std::uint64_t x = extend(f, load_bits(given[r] + i * size_, f.bytes));
      const bool less =
          f.family == 'i' ? static_cast<std::int64_t>(x) < static_cast<std::int64_t>(acc) : x < acc;
      if (r == 0) {
        acc = x;
      } else if (spec_.op == UNJAM_PROD) {
        acc *= x;
      } else if (spec_.op == UNJAM_MIN) {
        if (less) acc = x;
      } else if (spec_.op == UNJAM_MAX) {
        if (!less) acc = x;
      } else {
        acc += x;
      }
    }
    acc = extend(f, acc);
    if (spec_.op == UNJAM_AVG) {
      acc = f.family == 'i' ? static_cast<std::uint64_t>(static_cast<std::int64_t>(acc) / n_)
                            : acc / static_cast<std::uint64_t>(n_);
    }
    return acc & low_bits(8 * f.bytes);
  }

  // Whether the element is `expected`, up to `bound`.
  UNJAM_UNWATCHED bool right_float(std::size_t i, std::uint64_t got_bits,
                                   const unsigned char* const* given, double& expected,
                                   double& bound) const {
    const TypeInfo& f = type_info(spec_.dtype);
    double acc = 0, magnitude = 0;
    for (int r = 0; r < n_; ++r) {
      const double x = decode(spec_.dtype, load_bits(given[r] + i * size_, f.bytes));
      magnitude += __builtin_fabs(x);
      if (r == 0) {
        acc = x;
      } else if (spec_.op == UNJAM_PROD) {
        acc *= x;
      } else if (spec_.op == UNJAM_MIN) {
        if (x < acc) acc = x;
      } else if (spec_.op == UNJAM_MAX) {
        if (acc < x) acc = x;
      } else {
        acc += x;
      }
    }
    if (spec_.op == UNJAM_AVG) acc /= n_;
    const bool power_of_two = (n_ & (n_ - 1)) == 0;
    const bool exact = spec_.op == UNJAM_MIN || spec_.op == UNJAM_MAX || n_ == 1 ||
                       (spec_.data == Data::kExact && (spec_.op != UNJAM_AVG || power_of_two));
    bound = 0;
    if (!exact) {
      // One rounding a hop, of at most half a unit of a partial result, and one of 1/n.
      const double unit = __builtin_ldexp(1.0, -f.mantissa - 1);
      const double smallest = __builtin_ldexp(1.0, 2 - (1 << (f.exponent - 1)) - f.mantissa);
      if (spec_.op == UNJAM_PROD) magnitude = __builtin_fabs(acc) * 2;
      if (spec_.op == UNJAM_AVG) magnitude /= n_;
      bound = (n_ + 2) * (unit * magnitude * 1.5 + smallest);
    }
    expected = acc;
    const double got = decode(spec_.dtype, got_bits);
    return __builtin_fabs(got - acc) <= bound || got == acc;
  }

  Spec spec_;
  int n_;
  std::size_t size_;
  unsigned char poison_ = 0x42;
  std::vector<bool> present_;
  bool whole_;  // all are
  std::vector<PerRank> ranks_;
};

}  // namespace unjam_test
