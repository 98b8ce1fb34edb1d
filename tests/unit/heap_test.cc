// The heap: its bookkeeping against a simple model, unjamMemAlloc and unjamMemFree, and what the
// engine is told of outputs that lie there.
#include "runtime/heap.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "runtime/context.h"
#include "tests/support/job.h"
#include "tests/support/json.h"

namespace unjam_test {
namespace {

using unjam::Heap;

constexpr std::uint64_t kUnit = Heap::kAlignment;

#define EXPECT_REFUSED(result, expected, words)                                   \
  do {                                                                            \
    const unjam::Result r = (result);                                             \
    EXPECT_EQ(r.code, expected) << r.message;                                     \
    EXPECT_NE(r.message.find(words), std::string::npos) << "says: " << r.message; \
  } while (false)

// Never dereferenced: the heap does not look at its memory.
unsigned char* const kBase = reinterpret_cast<unsigned char*>(std::uintptr_t{1} << 40);

unsigned char* allocate(Heap& heap, std::uint64_t bytes) {
  void* p = nullptr;
  const unjam::Result r = heap.allocate(bytes, p);
  EXPECT_TRUE(r.ok()) << r.message;
  return static_cast<unsigned char*>(p);
}

TEST(Heap, TakesTheSmallestHoleThatFitsAndJoinsHoles) {
  Heap heap(kBase, 16 * kUnit);
  unsigned char* const a = allocate(heap, 4 * kUnit);
  unsigned char* const b = allocate(heap, 1);
  unsigned char* const c = allocate(heap, 2 * kUnit - 1);
  unsigned char* const d = allocate(heap, kUnit + 1);
  EXPECT_EQ(a, kBase);
  EXPECT_EQ(b, a + 4 * kUnit);
  EXPECT_EQ(c, b + kUnit);
  EXPECT_EQ(d, c + 2 * kUnit);
  EXPECT_EQ(heap.usage().used, 9 * kUnit);
  EXPECT_EQ(heap.usage().largest_free, 7 * kUnit);
  EXPECT_TRUE(heap.free(a).ok());
  EXPECT_TRUE(heap.free(c).ok());
  EXPECT_EQ(allocate(heap, 2 * kUnit), c) << "the smaller hole";
  EXPECT_TRUE(heap.free(c).ok());
  EXPECT_TRUE(heap.free(b).ok()) << "joins the holes on either side";
  EXPECT_EQ(allocate(heap, 7 * kUnit), a) << "of two holes of 7 units the lower one";
  EXPECT_EQ(heap.usage().allocations, 2u);
}

TEST(Heap, SaysWhatIsWrong) {
  Heap heap(kBase, 8 * kUnit);
  void* p = &heap;
  EXPECT_TRUE(heap.allocate(0, p).ok());
  EXPECT_EQ(p, nullptr);
  EXPECT_TRUE(heap.free(nullptr).ok());
  unsigned char* const a = allocate(heap, 3 * kUnit);
  unsigned char* const b = allocate(heap, kUnit);
  EXPECT_TRUE(heap.free(a).ok());
  for (const std::uint64_t bytes : {5 * kUnit, 8 * kUnit, 9 * kUnit, UINT64_MAX}) {
    p = &heap;
    EXPECT_REFUSED(heap.allocate(bytes, p), UNJAM_ERROR_RESOURCES,
                   "no room for " + std::to_string(bytes) +
                       " bytes: of 4096 bytes 3584 are free, at most 2048 of them in one piece");
    EXPECT_EQ(p, nullptr);
  }
  EXPECT_REFUSED(heap.free(a), UNJAM_ERROR_INVALID_USAGE, "freed already");
  EXPECT_REFUSED(heap.free(b + kUnit), UNJAM_ERROR_INVALID_USAGE, "freed already");
  EXPECT_REFUSED(heap.free(b + 1), UNJAM_ERROR_INVALID_ARGUMENT,
                 "1 bytes behind the beginning of an allocation of 512");
  EXPECT_REFUSED(heap.free(kBase - 1), UNJAM_ERROR_INVALID_ARGUMENT, "not in this rank's heap");
  EXPECT_REFUSED(heap.free(kBase + 8 * kUnit), UNJAM_ERROR_INVALID_ARGUMENT, "not in this rank's");
  EXPECT_REFUSED(heap.free(&heap), UNJAM_ERROR_INVALID_ARGUMENT, "not in this rank's heap");
  EXPECT_EQ(heap.usage().used, kUnit) << "what is refused changes nothing";

  Heap none(kBase, 0);
  EXPECT_REFUSED(none.allocate(1, p), UNJAM_ERROR_RESOURCES, "set UNJAM_HEAP (heap_bytes)");
  EXPECT_TRUE(none.allocate(0, p).ok());
  EXPECT_REFUSED(none.free(kBase), UNJAM_ERROR_INVALID_ARGUMENT, "not in this rank's heap");
}

// Peers may still store into outputs of calls that have failed.
TEST(Heap, WhatIsRetiredIsNobodysAgain) {
  std::vector<unsigned char> memory(4 * Heap::kAlignment);
  Heap heap(memory.data(), memory.size());
  void* first = nullptr;
  void* second = nullptr;
  ASSERT_TRUE(heap.allocate(1, first).ok());
  ASSERT_TRUE(heap.allocate(1, second).ok());
  heap.retire(static_cast<unsigned char*>(first) + 7);  // anywhere within
  ASSERT_TRUE(heap.free(first).ok());
  EXPECT_FALSE(heap.free(first).ok());
  EXPECT_EQ(heap.usage().used, 2 * Heap::kAlignment);
  EXPECT_EQ(heap.usage().allocations, 1u);
  ASSERT_TRUE(heap.free(second).ok());
  for (int i = 0; i < 3; ++i) {
    void* other = nullptr;
    ASSERT_TRUE(heap.allocate(1, other).ok());
    EXPECT_NE(other, first);
  }
  void* other = nullptr;
  EXPECT_FALSE(heap.allocate(1, other).ok());
  heap.retire(memory.data() + memory.size() - 1);  // of an allocation that is there
  heap.retire(first);                              // of none
}

TEST(Heap, Holds) {
  Heap heap(kBase, 4 * kUnit);
  EXPECT_TRUE(heap.holds(kBase, 4 * kUnit));
  EXPECT_TRUE(heap.holds(kBase + 4 * kUnit - 1, 1));
  EXPECT_FALSE(heap.holds(kBase - 1, 1));
  EXPECT_FALSE(heap.holds(kBase - 1, 2));
  EXPECT_FALSE(heap.holds(kBase, 4 * kUnit + 1));
  EXPECT_FALSE(heap.holds(kBase + kUnit, UINT64_MAX));
  EXPECT_FALSE(heap.holds(kBase + 4 * kUnit, 1));
  EXPECT_FALSE(heap.holds(nullptr, 1));
}

// Who owns each unit; 0: nobody.
class Model {
 public:
  explicit Model(std::size_t units) : owner_(units) {}

  // Where `units` go: the first of the smallest holes that have as many; -1: nowhere.
  int place(std::size_t units) const {
    int best = -1;
    std::size_t best_size = owner_.size() + 1;
    for (const auto& [begin, size] : holes()) {
      if (size < units || size >= best_size) continue;
      best = static_cast<int>(begin);
      best_size = size;
    }
    return best;
  }
  void take(std::size_t begin, std::size_t units) {
    ++last_;
    for (std::size_t i = 0; i < units; ++i) owner_[begin + i] = last_;
  }
  void free(std::size_t begin) {
    const int owner = owner_[begin];
    for (int& o : owner_) {
      if (o == owner) o = 0;
    }
  }
  bool is_free(std::size_t unit) const { return owner_[unit] == 0; }
  bool begins(std::size_t unit) const {
    return owner_[unit] != 0 && (unit == 0 || owner_[unit - 1] != owner_[unit]);
  }
  Heap::Usage usage() const {
    Heap::Usage u;
    u.bytes = owner_.size() * kUnit;
    for (const auto& [begin, size] : holes())
      u.largest_free = std::max(u.largest_free, size * kUnit);
    for (std::size_t i = 0; i < owner_.size(); ++i) {
      if (owner_[i] != 0) u.used += kUnit;
      if (begins(i)) ++u.allocations;
    }
    return u;
  }

 private:
  std::map<std::size_t, std::size_t> holes() const {
    std::map<std::size_t, std::size_t> found;
    for (std::size_t i = 0; i < owner_.size(); ++i) {
      if (owner_[i] != 0) continue;
      const std::size_t begin = i;
      while (i < owner_.size() && owner_[i] == 0) ++i;
      found[begin] = i - begin;
    }
    return found;
  }
  std::vector<int> owner_;
  int last_ = 0;
};

TEST(Heap, DoesAsASimpleModel) {
  for (std::uint64_t trial = 0; trial < 40; ++trial) {
    const std::uint64_t seed = mix(base_seed(), trial);
    std::mt19937_64 random(seed);
    const std::size_t units = 1 + random() % 64;
    SCOPED_TRACE("UNJAM_TEST_SEED=" + std::to_string(base_seed()) + ", trial " +
                 std::to_string(trial) + ", " + std::to_string(units) + " units");
    Heap heap(kBase, units * kUnit + random() % kUnit);
    Model model(units);
    int taken = 0, refused = 0;
    for (int step = 0; step < 600 && !HasFailure(); ++step) {
      if (random() % 2 == 0) {
        const std::uint64_t bytes = 1 + random() % ((random() % 4 == 0 ? units : 4) * kUnit);
        const std::size_t wanted = (bytes + kUnit - 1) / kUnit;
        const int place = model.place(wanted);
        void* p = nullptr;
        const unjam::Result r = heap.allocate(bytes, p);
        ASSERT_EQ(r.code, place < 0 ? UNJAM_ERROR_RESOURCES : UNJAM_SUCCESS) << r.message;
        if (place < 0) {
          ++refused;
          continue;
        }
        ++taken;
        ASSERT_EQ(p, kBase + static_cast<std::size_t>(place) * kUnit);
        model.take(static_cast<std::size_t>(place), wanted);
      } else {
        const std::size_t unit = random() % units,
                          within = random() % 8 == 0 ? random() % kUnit : 0;
        const unjam::Result r = heap.free(kBase + unit * kUnit + within);
        const bool ok = model.begins(unit) && within == 0;
        ASSERT_EQ(r.code, ok                    ? UNJAM_SUCCESS
                          : model.is_free(unit) ? UNJAM_ERROR_INVALID_USAGE
                                                : UNJAM_ERROR_INVALID_ARGUMENT)
            << r.message;
        if (ok) model.free(unit);
      }
      const Heap::Usage is = heap.usage(), should = model.usage();
      ASSERT_EQ(is.bytes, should.bytes);
      ASSERT_EQ(is.used, should.used);
      ASSERT_EQ(is.largest_free, should.largest_free);
      ASSERT_EQ(is.allocations, should.allocations);
    }
    EXPECT_GT(taken, 0);
    EXPECT_GT(refused, 0);
  }
}

// ---- the API ----

struct OneRank {
  unjamContext_t context = nullptr;
  explicit OneRank(std::uint64_t heap_bytes) {
    unjamConfig_t config = default_config();
    config.heap_bytes = heap_bytes;
    UNJAM_CHECK(unjamInitAll(&context, 1, &config));
  }
  ~OneRank() { EXPECT_EQ(unjamDestroy(context), UNJAM_SUCCESS) << unjamGetLastError(); }
  unsigned char* allocate(std::size_t bytes) const {
    void* p = nullptr;
    UNJAM_CHECK(unjamMemAlloc(context, bytes, &p));
    return static_cast<unsigned char*>(p);
  }
  Json usage() const { return JsonReader::parse(info(context))["heap"]; }
};

TEST(MemAlloc, GivesMemoryThatIsTold) {
  const OneRank one(100000);  // rounded up to whole pages
  EXPECT_EQ(one.usage()["bytes"].number, 102400);
  unsigned char* const a = one.allocate(1000);
  unsigned char* const b = one.allocate(50000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 512, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % 512, 0u);
  std::memset(a, 1, 1000);
  std::memset(b, 2, 50000);
  EXPECT_EQ(std::count(a, a + 1000, 1), 1000);
  EXPECT_EQ(one.usage()["used"].number, 1024 + 50176);
  EXPECT_EQ(one.usage()["largest_free"].number, 102400 - 1024 - 50176);
  EXPECT_EQ(one.usage()["allocations"].number, 2);
  EXPECT_EQ(unjamMemFree(one.context, a), UNJAM_SUCCESS);
  EXPECT_EQ(one.usage()["allocations"].number, 1);
  EXPECT_EQ(unjamMemFree(one.context, b), UNJAM_SUCCESS);
}

TEST(MemAlloc, ChecksItsArguments) {
  const OneRank one(4096), other(4096);
  void* p = nullptr;
  EXPECT_EQ(unjamMemAlloc(nullptr, 1, &p), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemAlloc(one.context, 1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemAlloc(one.context, 4097, &p), UNJAM_ERROR_RESOURCES);
  EXPECT_NE(std::string(unjamGetLastError()).find("UNJAM_HEAP"), std::string::npos);
  EXPECT_EQ(p, nullptr);
  p = one.allocate(4096);
  EXPECT_EQ(unjamMemFree(other.context, p), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemFree(one.context, p), UNJAM_SUCCESS);
  EXPECT_EQ(unjamMemFree(one.context, p), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_EQ(unjamMemFree(nullptr, p), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_EQ(unjamMemFree(nullptr, &p), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemFree(nullptr, nullptr), UNJAM_SUCCESS);
  EXPECT_EQ(unjamMemFree(one.context, nullptr), UNJAM_SUCCESS);
}

bool is_mapped(const void* page) {
  unsigned char resident = 0;
  return mincore(const_cast<void*>(page), 1, &resident) == 0;
}

TEST(MemAlloc, OutlivesItsContext) {
  unsigned char *a = nullptr, *b = nullptr, *freed = nullptr;
  {
    const OneRank one(16384), other(4096);
    a = one.allocate(4096);
    b = one.allocate(4096);
    freed = other.allocate(4096);
    EXPECT_EQ(unjamMemFree(nullptr, freed), UNJAM_SUCCESS);
  }
  EXPECT_FALSE(is_mapped(freed));
  std::memset(a, 1, 4096);
  EXPECT_EQ(unjamMemFree(nullptr, a), UNJAM_SUCCESS);
  EXPECT_EQ(unjamMemFree(nullptr, a), UNJAM_ERROR_INVALID_USAGE) << "b keeps the heap";
  std::memset(b, 2, 4096);
  EXPECT_TRUE(is_mapped(b));
  EXPECT_EQ(unjamMemFree(nullptr, b), UNJAM_SUCCESS);
  EXPECT_FALSE(is_mapped(b)) << "the context has gone with the last of its memory";
  EXPECT_EQ(unjamMemFree(nullptr, b), UNJAM_ERROR_INVALID_ARGUMENT);
}

// Memory that two have at a time would be overwritten.
TEST(MemAlloc, FromManyThreads) {
  const OneRank one(64 * 1024);
  std::vector<std::thread> threads;
  for (unsigned char t = 1; t <= 4; ++t) {
    threads.emplace_back([&one, t] {
      std::mt19937_64 random(mix(base_seed(), t));
      for (int i = 0; i < 2000; ++i) {
        const std::size_t bytes = 1 + random() % 8000;
        unsigned char* const p = one.allocate(bytes);  // 4 times 8 KiB always fit, however they lie
        std::memset(p, t, bytes);
        if (i % 16 == 0) std::this_thread::yield();
        if (static_cast<std::size_t>(std::count(p, p + bytes, t)) != bytes) {
          ADD_FAILURE() << "another thread has written to this one's memory; UNJAM_TEST_SEED="
                        << base_seed();
          return;
        }
        UNJAM_CHECK(unjamMemFree(one.context, p));
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(one.usage()["allocations"].number, 0);
}

// The ends of contexts that memory has kept, and of others, at the same time in many threads.
TEST(MemAlloc, ContextsEndWhileOthersFree) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 40; ++i) {
        unjamConfig_t config = default_config();
        config.heap_bytes = 8192;
        unjamContext_t contexts[2];
        UNJAM_CHECK(unjamInitAll(contexts, 2, &config));
        std::vector<std::thread> ends;
        for (int r = 0; r < 2; ++r) {
          ends.emplace_back([context = contexts[r]] {
            void *a = nullptr, *b = nullptr;
            UNJAM_CHECK(unjamMemAlloc(context, 100, &a));
            UNJAM_CHECK(unjamMemAlloc(context, 100, &b));
            std::thread other([a] { EXPECT_EQ(unjamMemFree(nullptr, a), UNJAM_SUCCESS); });
            EXPECT_EQ(unjamDestroy(context), UNJAM_SUCCESS);
            EXPECT_EQ(unjamMemFree(nullptr, b), UNJAM_SUCCESS);
            other.join();
          });
        }
        for (std::thread& e : ends) e.join();
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST(MemAlloc, SizeFromTheEnvironment) {
  const auto heap_of = [](const char* text, std::uint64_t configured) {
    EXPECT_EQ(setenv("UNJAM_HEAP", text, 1), 0);
    const OneRank one(configured);
    return static_cast<std::uint64_t>(one.usage()["bytes"].number);
  };
  EXPECT_EQ(heap_of("8192", 0), 8192u);
  EXPECT_EQ(heap_of("12K", 0), 12288u);
  EXPECT_EQ(heap_of("3M", 0), std::uint64_t{3} << 20);
  EXPECT_EQ(heap_of("1G", 0), std::uint64_t{1} << 30);  // never touched
  EXPECT_EQ(heap_of("3M", 4096), 4096u) << "the configuration comes first";
  EXPECT_EQ(heap_of("3M", UINT64_MAX), 0u) << "and can say that there is none";
  for (const char* text : {"-4K", "4KB", "K", "4k", "1.5M", "2T", "99999999999G", "-1"}) {
    ASSERT_EQ(setenv("UNJAM_HEAP", text, 1), 0);
    unjamContext_t c = nullptr;
    EXPECT_EQ(unjamInitAll(&c, 1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT) << text;
    EXPECT_NE(std::string(unjamGetLastError()).find("with K, M, G or T behind it"),
              std::string::npos)
        << unjamGetLastError();
  }
  // Other sizes as well; what is no size takes no suffix.
  unsetenv("UNJAM_HEAP");
  ASSERT_EQ(setenv("UNJAM_GUARANTEED_SLOT_BYTES", "16K", 1), 0);
  unjamContext_t c = nullptr;
  ASSERT_EQ(unjamInitAll(&c, 1, nullptr), UNJAM_SUCCESS) << unjamGetLastError();
  EXPECT_EQ(JsonReader::parse(info(c))["settings"]["UNJAM_GUARANTEED_SLOT_BYTES"].number, 16384);
  EXPECT_EQ(unjamDestroy(c), UNJAM_SUCCESS);
  unsetenv("UNJAM_GUARANTEED_SLOT_BYTES");
  ASSERT_EQ(setenv("UNJAM_IDLE_KEYS", "1K", 1), 0);
  EXPECT_EQ(unjamInitAll(&c, 1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  unsetenv("UNJAM_IDLE_KEYS");
  unjamConfig_t config = default_config();
  config.heap_bytes = (std::uint64_t{1} << 40) + 1;
  EXPECT_EQ(unjamInitAll(&c, 1, &config), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(unjamGetLastError()).find("UNJAM_HEAP"), std::string::npos);
  // Of before there were heaps.
  config.size = offsetof(unjamConfig_t, heap_bytes);
  ASSERT_EQ(unjamInitAll(&c, 1, &config), UNJAM_SUCCESS) << unjamGetLastError();
  EXPECT_EQ(unjamDestroy(c), UNJAM_SUCCESS);
}

TEST(MemAlloc, RanksMustAgreeOnTheSize) {
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  std::string said[2];
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      unjamConfig_t config = default_config();
      config.heap_bytes = r == 0 ? 4096 : 8192;
      unjamContext_t c = nullptr;
      EXPECT_NE(unjamInit(&c, 2, id, r, &config), UNJAM_SUCCESS);
      said[r] = unjamGetLastError();
    });
  }
  for (std::thread& t : ranks) t.join();
  for (const std::string& text : said) {
    EXPECT_NE(text.find("UNJAM_HEAP=4096"), std::string::npos) << text;
    EXPECT_NE(text.find("UNJAM_HEAP=8192"), std::string::npos) << text;
  }
}

// ---- what the engine is told ----

TEST(OutputInArena, OnlyOfOutputsThatLieInTheHeapAsAWhole) {
  constexpr int kRanks = 3;
  unjamConfig_t config = default_config();
  config.heap_bytes = 8192;
  unjamContext_t contexts[kRanks];
  UNJAM_CHECK(unjamInitAll(contexts, kRanks, &config));
  for (int rank = 0; rank < kRanks; ++rank) {
    unjamGroup_t group = nullptr;
    UNJAM_CHECK(unjamGroupCreate(contexts[rank], nullptr, 0, nullptr, &group));
    void* p = nullptr;
    UNJAM_CHECK(unjamMemAlloc(contexts[rank], 8192, &p));
    unsigned char* const heap = static_cast<unsigned char*>(p);
    std::uint64_t other[16];

    const auto told = [&](unjam::Kind kind, std::uint64_t count, void* recv, int root = 1) {
      unjam::Call call;
      call.signature.kind = kind;
      call.signature.dtype = unjam::DType::kFloat64;
      call.signature.count = count;
      call.signature.root = root;
      call.send = other;
      call.recv = recv;
      return group->context->output_place(*group, call);
    };
    using enum unjam::Kind;
    const std::uint64_t begin = told(kAllReduce, 1024, heap);
    EXPECT_NE(begin, 0u);
    EXPECT_EQ(begin % (std::uint64_t{2} << 20), 0u) << "the heap begins on a boundary of its own";
    EXPECT_EQ(told(kAllReduce, 1023, heap + 8), begin + 8);
    EXPECT_EQ(told(kAllReduce, 1024, heap + 8), 0u) << "it ends behind the heap";
    EXPECT_EQ(told(kAllReduce, 1, heap - 8), 0u);
    EXPECT_EQ(told(kAllReduce, 1, heap + 8192), 0u);
    EXPECT_EQ(told(kAllReduce, 2, other), 0u);
    EXPECT_EQ(told(kAllReduce, 1, nullptr), 0u);
    EXPECT_EQ(told(kAllReduce, 0, heap), 0u);
    EXPECT_EQ(told(kBarrier, 1, heap), 0u);
    // A block of each rank: 341 of 8 bytes fit three times, 342 do not.
    for (const unjam::Kind kind : {kAllGather, kAllToAll}) {
      EXPECT_EQ(told(kind, 341, heap), begin);
      EXPECT_EQ(told(kind, 342, heap), 0u);
    }
    EXPECT_EQ(told(kReduceScatter, 1024, heap), begin);
    EXPECT_EQ(told(kScatter, 1024, heap), begin);
    EXPECT_EQ(told(kBroadcast, 1024, heap), begin);
    // Only the root has an output.
    EXPECT_EQ(told(kReduce, 1024, heap, rank), begin);
    EXPECT_EQ(told(kReduce, 1024, heap, (rank + 1) % kRanks), 0u);
    EXPECT_EQ(told(kGather, 341, heap, rank), begin);
    EXPECT_EQ(told(kGather, 342, heap, rank), 0u);
    EXPECT_EQ(told(kGather, 1, heap, (rank + 1) % kRanks), 0u);
  }
  for (unjamContext_t c : contexts) EXPECT_EQ(unjamDestroy(c), UNJAM_SUCCESS);
}

}  // namespace
}  // namespace unjam_test
