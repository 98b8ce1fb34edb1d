// What a call in place has in its output already is read, and not written: the root's buffer of a
// broadcast or a scatter, and the own part of an all-gather or a gather. Here, on the host device,
// they are in memory that cannot be written, so a store there kills the test.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/support/job.h"

namespace unjam_test {
namespace {

constexpr int kRanks = 3, kRoot = 1;

// Whole pages of 32-bit numbers, of which some are only read.
class Pages {
 public:
  explicit Pages(std::size_t numbers) : bytes_(numbers * sizeof(std::int32_t)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) fail("mmap");
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::int32_t* data() const { return static_cast<std::int32_t*>(data_); }
  void only_read(std::size_t first, std::size_t numbers) const {
    if (mprotect(data() + first, numbers * sizeof(std::int32_t), PROT_READ) != 0) fail("mprotect");
  }

 private:
  std::size_t bytes_;
  void* data_;
};

std::int32_t number(int rank, std::size_t i) {
  return static_cast<std::int32_t>(mix(static_cast<std::uint64_t>(rank), i));
}
void fill(std::int32_t* data, int rank, std::size_t first, std::size_t numbers) {
  for (std::size_t i = 0; i < numbers; ++i) data[i] = number(rank, first + i);
}
void expect(const std::int32_t* data, int rank, std::size_t first, std::size_t numbers,
            const std::string& what) {
  for (std::size_t i = 0; i < numbers; ++i) {
    if (data[i] == number(rank, first + i)) continue;
    fail(what + ": rank " + std::to_string(rank) + "'s number " + std::to_string(first + i) +
         " is wrong");
  }
}

void broadcast(const Rank& me, std::size_t count) {
  const Pages pages(count);
  if (me.rank == kRoot) {
    fill(pages.data(), kRoot, 0, count);
    pages.only_read(0, count);
  }
  unjamRequest_t request = nullptr;
  UNJAM_CHECK(unjamBroadcast(me.all, "broadcast", pages.data(), pages.data(), count, UNJAM_INT32,
                             kRoot, nullptr, &request));
  me.wait(request, "broadcast");
  expect(pages.data(), kRoot, 0, count, "broadcast");
}

void all_gather(const Rank& me, std::size_t count) {
  const Pages pages(kRanks * count);
  const std::size_t own = static_cast<std::size_t>(me.rank) * count;
  fill(pages.data() + own, me.rank, 0, count);
  pages.only_read(own, count);
  unjamRequest_t request = nullptr;
  UNJAM_CHECK(unjamAllGather(me.all, "all-gather", pages.data() + own, pages.data(), count,
                             UNJAM_INT32, nullptr, &request));
  me.wait(request, "all-gather");
  for (int q = 0; q < kRanks; ++q) {
    expect(pages.data() + static_cast<std::size_t>(q) * count, q, 0, count, "all-gather");
  }
}

void gather(const Rank& me, std::size_t count) {
  const bool root = me.rank == kRoot;
  const Pages pages((root ? kRanks : 1) * count);
  std::int32_t* const own = pages.data() + (root ? kRoot * count : 0);
  fill(own, me.rank, 0, count);
  pages.only_read(root ? kRoot * count : 0, count);
  unjamRequest_t request = nullptr;
  UNJAM_CHECK(unjamGather(me.all, "gather", own, root ? pages.data() : nullptr, count, UNJAM_INT32,
                          kRoot, nullptr, &request));
  me.wait(request, "gather");
  for (int q = 0; root && q < kRanks; ++q) {
    expect(pages.data() + static_cast<std::size_t>(q) * count, q, 0, count, "gather");
  }
}

void scatter(const Rank& me, std::size_t count) {
  const bool root = me.rank == kRoot;
  const Pages pages((root ? kRanks : 1) * count);
  if (root) {
    fill(pages.data(), kRoot, 0, kRanks * count);
    pages.only_read(0, kRanks * count);
  }
  std::int32_t* const own = pages.data() + (root ? kRoot * count : 0);
  unjamRequest_t request = nullptr;
  UNJAM_CHECK(unjamScatter(me.all, "scatter", root ? pages.data() : nullptr, own, count,
                           UNJAM_INT32, kRoot, nullptr, &request));
  me.wait(request, "scatter");
  expect(own, kRoot, static_cast<std::size_t>(me.rank) * count, count, "scatter");
}

class InPlace : public testing::TestWithParam<int> {};

TEST_P(InPlace, WhatIsThereIsNotWritten) {
  unjamConfig_t config = default_config();
  config.algorithm = GetParam();
  config.lanes = 2;
  const std::size_t page = static_cast<std::size_t>(getpagesize()) / sizeof(std::int32_t);
  Job job(kRanks, config);
  job.run([&](Rank& me) {
    // Packets, a slice, and many slices.
    for (const std::size_t pages : {1u, 16u, 300u}) {
      broadcast(me, pages * page);
      all_gather(me, pages * page);
      gather(me, pages * page);
      scatter(me, pages * page);
    }
  });
}

std::string name_of(const testing::TestParamInfo<int>& algorithm) {
  const char* const names[] = {"ByTable", "Ring", "Direct", "Mesh"};
  return names[algorithm.param + 1];
}
INSTANTIATE_TEST_SUITE_P(Algorithms, InPlace, testing::Values(-1, 0, 1, 2), name_of);

}  // namespace
}  // namespace unjam_test
