// NCCL's interface: how communicators are made, share jobs, split, shrink, fail and end.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "api/nccl/communicator.h"
#include "tests/support/nccl_api.h"

namespace unjam_test {
namespace {

class NcclCommunicators : public OnHost {};

std::string last() { return ncclGetLastError(nullptr); }

const void* job_of(ncclComm_t comm) { return unjam::nccl::find(comm)->job().get(); }

std::int64_t sum(ncclComm_t comm, std::int64_t x, int stream = 0) {
  NCCL_CHECK(ncclAllReduce(&x, &x, 1, kNcclInt64, kNcclSum, comm, stream_named(stream)));
  synchronize(stream);
  return x;
}

void expect_sum(ncclComm_t comm, std::int64_t mine, std::int64_t all) {
  const std::int64_t got = sum(comm, mine);
  if (got != all) fail("the sum is " + std::to_string(got) + ", not " + std::to_string(all));
}

Code error_of(ncclComm_t comm) {
  Code code = Code::kSuccess;
  NCCL_CHECK(ncclCommGetAsyncError(comm, &code));
  return code;
}

TEST_F(NcclCommunicators, SayWhatTheyAre) {
  int version = 0;
  NCCL_CHECK(ncclGetVersion(&version));
  EXPECT_EQ(version, 22809);
  constexpr int kRanks = 3;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    int count = 0, user = -1, device = -1;
    NCCL_CHECK(ncclCommCount(comm, &count));
    NCCL_CHECK(ncclCommUserRank(comm, &user));
    NCCL_CHECK(ncclCommCuDevice(comm, &device));
    if (count != kRanks || user != rank || device != rank) fail("a wrong number");
    if (error_of(comm) != Code::kSuccess) fail(last());
    NCCL_CHECK(ncclCommFinalize(comm));
    float x = 0;
    if (ncclAllReduce(&x, &x, 1, kNcclFloat32, 0, comm, nullptr) != Code::kInvalidUsage) {
      fail("a call after ncclCommFinalize was taken");
    }
    NCCL_CHECK(ncclCommDestroy(comm));
    if (ncclCommDestroy(comm) != Code::kInvalidArgument) fail("destroyed twice");
  });
}

TEST_F(NcclCommunicators, OfSomeRanksAreGroupsOfTheJobOfAll) {
  constexpr int kRanks = 4;
  const NcclId all_id = new_nccl_id(), some_id = new_nccl_id(), back_id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t all = init_nccl(kRanks, all_id, rank);
    const ncclComm_t back = init_nccl(kRanks, back_id, kRanks - 1 - rank);  // in another order
    if (job_of(back) != job_of(all)) fail("the same ranks have two jobs");
    std::array<std::int64_t, kRanks> places{};
    std::int64_t me = rank;
    NCCL_CHECK(ncclAllGather(&me, places.data(), 1, kNcclInt64, back, nullptr));
    synchronize();
    for (int r = 0; r < kRanks; ++r) {
      if (places[static_cast<std::size_t>(r)] != kRanks - 1 - r) fail("a wrong order of ranks");
    }
    if (rank != 1) {
      const ncclComm_t some = init_nccl(3, some_id, rank == 0 ? 2 : rank - 2);
      if (job_of(some) != job_of(all)) fail("some of the ranks have a job of their own");
      expect_sum(some, rank, 5);
      NCCL_CHECK(ncclCommDestroy(some));
    }
    NCCL_CHECK(ncclCommDestroy(all));
    expect_sum(back, 1, kRanks);  // the job lives for as long as it has a communicator
    NCCL_CHECK(ncclCommDestroy(back));
  });
}

TEST_F(NcclCommunicators, OfNoCommonJobMakeOne) {
  constexpr int kRanks = 3;
  const NcclId first_id = new_nccl_id(), second_id = new_nccl_id(), all_id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    ncclComm_t first = nullptr, second = nullptr;
    if (rank < 2) first = init_nccl(2, first_id, rank);
    if (rank > 0) second = init_nccl(2, second_id, rank - 1);
    const ncclComm_t all = init_nccl(kRanks, all_id, rank);
    expect_sum(all, 1, kRanks);
    if (first != nullptr) expect_sum(first, 1, 2);
    if (second != nullptr) expect_sum(second, 1, 2);
    if (first != nullptr && job_of(first) == job_of(all)) fail("three ranks in a job of two");
    for (const ncclComm_t comm : {first, second, all}) NCCL_CHECK(ncclCommDestroy(comm));
  });
}

TEST_F(NcclCommunicators, Split) {
  constexpr int kRanks = 5;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t all = init_nccl(kRanks, id, rank);
    for (int turn = 0; turn < 2; ++turn) {
      // Ranks 0, 2, 4 in reversed order; 1 and 3 with equal keys; then rank 4 without a colour.
      const int color = turn == 1 && rank == 4 ? -1 : rank % 2;
      const int key = rank % 2 == 0 ? -rank : 7;
      ncclComm_t part = nullptr;
      NCCL_CHECK(ncclCommSplit(all, color, key, &part, nullptr));
      if (color == -1) {
        if (part != nullptr) fail("no colour, but a communicator");
        continue;
      }
      int count = 0, mine = -1;
      NCCL_CHECK(ncclCommCount(part, &count));
      NCCL_CHECK(ncclCommUserRank(part, &mine));
      const int evens = turn == 0 ? 3 : 2;
      if (count != (color == 0 ? evens : 2)) fail("a wrong size: " + std::to_string(count));
      const int expected = color == 1 ? rank / 2 : (turn == 0 ? 2 - rank / 2 : 1 - rank / 2);
      if (mine != expected) fail("a wrong rank: " + std::to_string(mine));
      if (job_of(part) != job_of(all)) fail("a split has made a job");
      expect_sum(part, 1, count);
      // A split of a split.
      ncclComm_t alone = nullptr;
      NCCL_CHECK(ncclCommSplit(part, mine, 0, &alone, nullptr));
      expect_sum(alone, rank, rank);
      NCCL_CHECK(ncclCommDestroy(alone));
      NCCL_CHECK(ncclCommDestroy(part));
    }
    ncclComm_t none = nullptr;
    if (ncclCommSplit(all, -2, 0, &none, nullptr) != Code::kInvalidArgument) fail("color -2");
    NCCL_CHECK(ncclCommDestroy(all));
  });
}

TEST_F(NcclCommunicators, SeveralSplitsOfOneAtATime) {
  constexpr int kRanks = 4, kSplits = 3;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t all = init_nccl(kRanks, id, rank);
    NcclConfig later{};
    later.size = sizeof(later);
    later.magic = unjam::nccl::kConfigMagic;
    later.version = 22809;
    later.blocking = 0;
    for (const bool grouped : {true, false, true, false}) {
      // By halves, by parity, and all in reversed order: what is mixed up has a wrong sum.
      const std::array<int, kSplits> colors{rank / 2, rank % 2, 0};
      const std::array<int, kSplits> sums{rank < 2 ? 1 : 5, rank % 2 == 0 ? 2 : 4, 6};
      std::array<ncclComm_t, kSplits> parts{};
      if (grouped) NCCL_CHECK(ncclGroupStart());
      for (std::size_t i = 0; i < kSplits; ++i) {
        const Code code =
            ncclCommSplit(all, colors[i], -rank, &parts[i], grouped ? nullptr : &later);
        if (code != (grouped ? Code::kSuccess : Code::kInProgress)) fail(last());
      }
      if (grouped) NCCL_CHECK(ncclGroupEnd());
      for (std::size_t i = 0; i < kSplits; ++i) {
        while (error_of(parts[i]) == Code::kInProgress) sleep_ms(1);
        if (error_of(parts[i]) != Code::kSuccess) fail(ncclGetLastError(parts[i]));
        expect_sum(parts[i], rank, sums[i]);
        NCCL_CHECK(ncclCommDestroy(parts[i]));
      }
    }
    NCCL_CHECK(ncclCommDestroy(all));
  });
}

TEST_F(NcclCommunicators, ShrinkWithoutThoseThatAreGone) {
  constexpr int kRanks = 3;
  const NcclId id = new_nccl_id();
  std::atomic<int> called{0};
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t all = init_nccl(kRanks, id, rank);
    if (rank == 1) {
      while (called.load() < 2) sleep_ms(1);
      NCCL_CHECK(ncclCommAbort(all));
      return;
    }
    // It is pending, for rank 1 never calls it: shrinking ends it.
    float x = 1;
    NCCL_CHECK(ncclAllReduce(&x, &x, 1, kNcclFloat32, kNcclSum, all, nullptr));
    called.fetch_add(1);
    int excluded = 1;
    ncclComm_t left = nullptr;
    if (ncclCommShrink(all, &rank, 1, &left, nullptr, 0) != Code::kInvalidArgument) {
      fail("a rank has excluded itself");
    }
    NCCL_CHECK(ncclCommShrink(all, &excluded, 1, &left, nullptr, 1));
    synchronize();
    expect_sum(left, 1, 2);
    if (error_of(left) != Code::kSuccess) fail("the new one has the old one's error");
    NCCL_CHECK(ncclCommDestroy(left));
    NCCL_CHECK(ncclCommDestroy(all));
  });
}

TEST_F(NcclCommunicators, AbortEndsWhatIsPendingAndNoOther) {
  constexpr int kRanks = 2;
  const NcclId id = new_nccl_id(), other_id = new_nccl_id();
  std::atomic<bool> called{false}, told{false};
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    const ncclComm_t other = init_nccl(kRanks, other_id, rank);
    if (job_of(comm) != job_of(other)) fail("two jobs");
    float x = 1;
    if (rank == 0) {
      NCCL_CHECK(ncclAllReduce(&x, &x, 1, kNcclFloat32, kNcclSum, comm, stream_named(1)));
      called = true;
      // The other rank aborts: this one is told, and by whom.
      const auto failed = [&] { return error_of(comm) != Code::kSuccess; };
      for (int i = 0; i < 60'000 && !failed(); ++i) sleep_ms(1);
      if (error_of(comm) != Code::kRemoteError) fail("no error came");
      const std::string text = ncclGetLastError(comm);
      if (text.find("rank 1 has given up") == std::string::npos) fail(text);
      synchronize(1);
      if (error_of(other) != Code::kSuccess) fail("the other communicator has an error");
      told = true;
    } else {
      while (!called.load()) sleep_ms(1);
      NCCL_CHECK(ncclCommAbort(comm));
      while (!told.load()) sleep_ms(1);
    }
    expect_sum(other, 1, 2);
    if (rank == 0) NCCL_CHECK(ncclCommAbort(comm));
    NCCL_CHECK(ncclCommDestroy(other));
  });
}

TEST_F(NcclCommunicators, AbortOfAPendingCallByAnotherThread) {
  constexpr int kRanks = 2;
  const NcclId id = new_nccl_id();
  std::atomic<bool> aborted{false};
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    float x = 1;
    if (rank == 1) {
      // What it calls afterwards ends, too.
      while (!aborted.load()) sleep_ms(1);
      NCCL_CHECK(ncclAllReduce(&x, &x, 1, kNcclFloat32, kNcclSum, comm, nullptr));
      synchronize();
      if (error_of(comm) != Code::kRemoteError) fail("a call after the abort has no error");
      NCCL_CHECK(ncclCommAbort(comm));
      return;
    }
    NCCL_CHECK(ncclRecv(&x, 1, kNcclFloat32, 1, comm, nullptr));
    NCCL_CHECK(ncclAllReduce(&x, &x, 1, kNcclFloat32, kNcclSum, comm, stream_named(1)));
    std::thread waiting([&] {
      unjam::nccl::set_host_device(0);
      synchronize();
    });
    NCCL_CHECK(ncclCommAbort(comm));
    waiting.join();
    aborted = true;
  });
}

TEST_F(NcclCommunicators, AbortBesideCallsOfOtherThreads) {
  constexpr int kRanks = 2, kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    const NcclId id = new_nccl_id();
    run_nccl_ranks(kRanks, [&](int rank) {
      const ncclComm_t comm = init_nccl(kRanks, id, rank);
      std::atomic<int> called{0};
      std::thread calling([&] {
        unjam::nccl::set_host_device(rank);
        Code code = Code::kSuccess;
        float x = 1;
        int number = 0;
        while (code == Code::kSuccess) {
          code = ncclAllReduce(&x, &x, 1, kNcclFloat32, kNcclSum, comm, nullptr);
          ncclCommCount(comm, &number);
          called.fetch_add(1);
        }
        called.store(kRounds);
        synchronize();
      });
      while (called.load() <= round) sleep_ms(0);
      NCCL_CHECK(ncclCommAbort(comm));
      calling.join();
    });
  }
}

TEST_F(NcclCommunicators, MoreUnderWayThanThereIsRoomForIsSaid) {
  constexpr int kRanks = 2, kKeys = 2;
  const std::array<NcclId, kKeys + 1> ids{new_nccl_id(), new_nccl_id(), new_nccl_id()};
  setenv("UNJAM_MAX_ACTIVE_KEYS", "2", 1);
  std::atomic<bool> refused{false};
  run_nccl_ranks(kRanks, [&](int rank) {
    std::array<ncclComm_t, kKeys + 1> comms{};
    for (std::size_t i = 0; i <= kKeys; ++i) comms[i] = init_nccl(kRanks, ids[i], rank);
    while (rank == 1 && !refused.load()) sleep_ms(1);
    std::array<std::int64_t, kKeys> x{1, 1};
    for (std::size_t i = 0; i < kKeys; ++i) {
      NCCL_CHECK(ncclAllReduce(&x[i], &x[i], 1, kNcclInt64, kNcclSum, comms[i],
                               stream_named(static_cast<int>(i) + 1)));
    }
    if (rank == 0) {
      unjam::nccl::Operation third;
      third.comm = unjam::nccl::find(comms[kKeys]);
      std::int64_t y = 1;
      third.recv = &y;
      third.count = 1;
      third.dtype = UNJAM_INT64;
      const auto pending = [&] {
        unjamStats_t stats{};
        stats.size = sizeof(stats);
        unjamGetStats(third.comm->job()->data(), &stats);
        return stats.pending == kKeys;
      };
      if (!eventually(pending)) fail("they are not under way");
      unjamRequest_t request = nullptr;
      const unjam::nccl::Status status = unjam::nccl::submit(third, &y, UNJAM_STREAM_NONE, &request,
                                                             std::chrono::milliseconds(100));
      refused = true;
      if (status.code != Code::kSystemError) fail("it was taken");
      for (const char* const part : {"2 keys", "UNJAM_MAX_ACTIVE_KEYS", "nothing has moved"}) {
        if (status.text.find(part) == std::string::npos) fail(status.text);
      }
    }
    for (std::size_t i = 0; i < kKeys; ++i) {
      synchronize(static_cast<int>(i) + 1);
      if (x[i] != kRanks) fail("a wrong sum");
    }
    expect_sum(comms[kKeys], 1, kRanks);
    for (const ncclComm_t comm : comms) NCCL_CHECK(ncclCommDestroy(comm));
  });
  unsetenv("UNJAM_MAX_ACTIVE_KEYS");
}

TEST_F(NcclCommunicators, RanksThatDisagreeAreTold) {
  constexpr int kRanks = 2;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    std::array<float, 4> x{};
    NCCL_CHECK(ncclAllReduce(x.data(), x.data(), rank == 0 ? 2 : 4, kNcclFloat32, kNcclSum, comm,
                             nullptr));
    synchronize();
    for (int i = 0; i < 60'000 && error_of(comm) == Code::kSuccess; ++i) sleep_ms(1);
    if (error_of(comm) != Code::kInvalidUsage) fail("no error came");
    const std::string text = ncclGetLastError(comm);
    if (text.find("count=2") == std::string::npos) fail(text);
    NCCL_CHECK(ncclCommAbort(comm));
  });
}

TEST_F(NcclCommunicators, RevokedOnesCanBeSplit) {
  constexpr int kRanks = 2;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    float x = 1;
    NCCL_CHECK(ncclRecv(&x, 1, kNcclFloat32, 1 - rank, comm, nullptr));
    NCCL_CHECK(ncclCommRevoke(comm, 0));
    while (error_of(comm) == Code::kInProgress) sleep_ms(1);
    if (error_of(comm) != Code::kSuccess) fail("it is not quiet");
    synchronize();
    if (error_of(comm) != Code::kSuccess) fail("an error that the program has asked for");
    if (ncclAllReduce(&x, &x, 1, kNcclFloat32, 0, comm, nullptr) != Code::kInvalidUsage) {
      fail("a revoked communicator takes calls");
    }
    ncclComm_t next = nullptr;
    NCCL_CHECK(ncclCommSplit(comm, 0, rank, &next, nullptr));
    expect_sum(next, 1, 2);
    NCCL_CHECK(ncclCommDestroy(comm));
    NCCL_CHECK(ncclCommDestroy(next));
  });
}

NcclConfig config_with(int blocking) {
  NcclConfig config{};
  config.size = sizeof(config);
  config.magic = unjam::nccl::kConfigMagic;
  config.version = 22809;
  config.blocking = blocking;
  return config;
}

TEST_F(NcclCommunicators, WithoutBlockingTheyComeLater) {
  constexpr int kRanks = 2;
  const NcclId id = new_nccl_id();
  std::atomic<bool> refused{false};
  run_nccl_ranks(kRanks, [&](int rank) {
    NcclConfig config = config_with(0);
    ncclComm_t comm = nullptr;
    if (rank == 1) {
      while (!refused.load()) sleep_ms(1);
    }
    if (ncclCommInitRankConfig(&comm, kRanks, id, rank, &config) != Code::kInProgress) {
      fail("it was not in progress");
    }
    float x = 1;
    if (rank == 0) {
      // The other rank has not come.
      if (error_of(comm) != Code::kInProgress) fail("it was made by one rank of two");
      const Code code = ncclAllReduce(&x, &x, 1, kNcclFloat32, 0, comm, nullptr);
      if (code != Code::kInvalidArgument) fail("a call was taken");
      refused = true;
    }
    while (error_of(comm) == Code::kInProgress) sleep_ms(1);
    if (error_of(comm) != Code::kSuccess) fail(ncclGetLastError(comm));
    expect_sum(comm, 1, 2);
    NCCL_CHECK(ncclCommDestroy(comm));
  });
}

TEST_F(NcclCommunicators, AbortedWhileTheyAreMade) {
  NcclConfig config = config_with(0);
  const NcclId id = new_nccl_id();
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), Code::kInProgress);
  EXPECT_EQ(ncclCommAbort(comm), Code::kSuccess);
  // The other rank comes all the same, so that nobody waits for the end of this process.
  run_nccl_ranks(1, [&](int) {
    unjam::nccl::set_host_device(1);
    ncclComm_t late = nullptr;
    ncclCommInitRank(&late, 2, id, 1);
    ncclCommAbort(late);
  });
}

TEST_F(NcclCommunicators, AbortedWhileABlockingCallMakesThem) {
  const NcclId id = new_nccl_id();
  ncclComm_t comm = nullptr;
  Code code = Code::kSuccess;
  std::thread making([&] {
    unjam::nccl::set_host_device(0);
    code = ncclCommInitRank(&comm, 2, id, 0);
  });
  const std::atomic_ref<ncclComm_t> handle(comm);
  while (handle.load() == nullptr) sleep_ms(1);
  EXPECT_EQ(ncclCommAbort(handle.load()), Code::kSuccess);
  run_nccl_ranks(1, [&](int) {
    unjam::nccl::set_host_device(1);
    ncclComm_t late = nullptr;
    ncclCommInitRank(&late, 2, id, 1);
    ncclCommAbort(late);
  });
  making.join();
  EXPECT_EQ(code, Code::kInvalidUsage);
  EXPECT_EQ(comm, nullptr);
}

TEST_F(NcclCommunicators, OneThreadMakesThoseOfAllRanks) {
  constexpr int kRanks = 3;
  const NcclId id = new_nccl_id();
  std::array<ncclComm_t, kRanks> comms{}, parts{};
  NCCL_CHECK(ncclGroupStart());
  for (int r = 0; r < kRanks; ++r) {
    unjam::nccl::set_host_device(r);
    NCCL_CHECK(ncclCommInitRank(&comms[static_cast<std::size_t>(r)], kRanks, id, r));
  }
  NCCL_CHECK(ncclGroupEnd());
  NCCL_CHECK(ncclGroupStart());
  for (std::size_t r = 0; r < kRanks; ++r) {
    NCCL_CHECK(ncclCommSplit(comms[r], r == 2 ? 1 : 0, 0, &parts[r], nullptr));
  }
  NCCL_CHECK(ncclGroupEnd());
  int count = 0;
  NCCL_CHECK(ncclCommCount(parts[0], &count));
  EXPECT_EQ(count, 2);
  unjam::nccl::set_host_device(0);
  for (std::size_t r = 0; r < kRanks; ++r) {
    NCCL_CHECK(ncclCommDestroy(parts[r]));
    NCCL_CHECK(ncclCommDestroy(comms[r]));
  }
}

TEST_F(NcclCommunicators, WhatCannotBeMadeIsRefused) {
  ncclComm_t comm = nullptr;
  const NcclId id = new_nccl_id();
  EXPECT_EQ(ncclCommInitRank(&comm, 0, id, 0), Code::kInvalidArgument);
  EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 2), Code::kInvalidArgument);
  EXPECT_EQ(ncclCommInitRank(nullptr, 1, id, 0), Code::kInvalidArgument);
  NcclId wrong{};
  EXPECT_EQ(ncclCommInitRank(&comm, 1, wrong, 0), Code::kInvalidArgument);
  EXPECT_NE(last().find("no unique id"), std::string::npos) << last();
  EXPECT_EQ(comm, nullptr);
  NcclConfig config = config_with(2);
  EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, id, 0, &config), Code::kInvalidArgument);
  config.magic = 1;
  EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, id, 0, &config), Code::kInvalidArgument);
  const int twice[] = {0, 0};
  std::array<ncclComm_t, 2> comms{};
  EXPECT_EQ(ncclCommInitAll(comms.data(), 2, twice), Code::kInvalidUsage);
  int number = 0;
  EXPECT_EQ(ncclCommCount(nullptr, &number), Code::kInvalidArgument);
  EXPECT_EQ(ncclCommDestroy(nullptr), Code::kSuccess);
}

TEST_F(NcclCommunicators, MemoryAndRegistrations) {
  void* memory = nullptr;
  NCCL_CHECK(ncclMemAlloc(&memory, 1 << 16));
  ASSERT_NE(memory, nullptr);
  ncclComm_t comm = nullptr, second = nullptr;
  NCCL_CHECK(ncclCommInitRank(&comm, 1, new_nccl_id(), 0));
  NCCL_CHECK(ncclCommInitRank(&second, 1, new_nccl_id(), 0));
  std::array<void*, 3> handles{};
  NCCL_CHECK(ncclCommRegister(comm, memory, 1 << 16, &handles[0]));
  NCCL_CHECK(ncclCommRegister(second, memory, 1 << 16, &handles[1]));  // of the same job
  NCCL_CHECK(ncclCommRegister(comm, memory, 1 << 10, &handles[2]));    // a part of it
  for (void* const handle : handles) NCCL_CHECK(ncclCommDeregister(comm, handle));
  EXPECT_EQ(ncclCommDeregister(comm, handles[0]), Code::kInvalidArgument);
  NCCL_CHECK(ncclCommRegister(comm, memory, 1 << 16, &handles[0]));
  NCCL_CHECK(ncclCommDeregister(comm, handles[0]));
  EXPECT_EQ(ncclCommRegister(comm, nullptr, 1, &handles[0]), Code::kInvalidArgument);
  NCCL_CHECK(ncclCommDestroy(comm));
  NCCL_CHECK(ncclCommDestroy(second));
  NCCL_CHECK(ncclMemFree(memory));
}

TEST_F(NcclCommunicators, RegistrationsEndWithThem) {
  std::array<float, 64> memory{};
  ncclComm_t comm = nullptr, second = nullptr;
  NCCL_CHECK(ncclCommInitRank(&comm, 1, new_nccl_id(), 0));
  NCCL_CHECK(ncclCommInitRank(&second, 1, new_nccl_id(), 0));
  const auto job = unjam::nccl::find(comm)->job();
  ASSERT_EQ(job_of(second), job.get());
  void* handle = nullptr;
  NCCL_CHECK(ncclCommRegister(comm, memory.data(), sizeof(memory), &handle));
  EXPECT_EQ(job->windows(), 1);
  NCCL_CHECK(ncclCommDestroy(comm));
  EXPECT_EQ(job->windows(), 0);
  EXPECT_EQ(ncclCommDeregister(comm, handle), Code::kSuccess);
  EXPECT_EQ(ncclCommDeregister(comm, handle), Code::kInvalidArgument);
  NCCL_CHECK(ncclCommDestroy(second));
}

TEST_F(NcclCommunicators, DeregisterWhileACallIsPending) {
  constexpr int kRanks = 2;
  const NcclId id = new_nccl_id(), other_id = new_nccl_id();
  std::atomic<bool> checked{false};
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    const ncclComm_t other = init_nccl(kRanks, other_id, rank);
    std::array<float, 64> memory{};
    while (rank == 1 && !checked.load()) sleep_ms(1);
    void* handle = nullptr;
    NCCL_CHECK(ncclCommRegister(comm, memory.data(), sizeof(memory), &handle));
    NCCL_CHECK(ncclAllReduce(memory.data(), memory.data(), 64, kNcclFloat32, kNcclSum, comm,
                             stream_named(1)));
    const auto job = unjam::nccl::find(comm)->job();
    if (rank == 0) {
      const auto pending = [&] {
        unjamStats_t stats{};
        stats.size = sizeof(stats);
        unjamGetStats(job->data(), &stats);
        return stats.pending == 1;
      };
      if (!eventually(pending)) fail("the call is not under way");
      NCCL_CHECK(ncclCommDeregister(comm, handle));
      if (job->windows() != 1) fail("no window, while a call into it is pending");
      checked = true;
    }
    synchronize(1);
    expect_sum(other, 1, kRanks);  // a further call, in front of which it goes
    if (job->windows() != (rank == 0 ? 0 : 1)) fail("a window that nobody has registered");
    NCCL_CHECK(ncclCommAbort(comm));
    if (job->windows() != 0) fail("a window of a communicator that is gone");
    NCCL_CHECK(ncclCommDestroy(other));
  });
}

TEST(NcclJobs, LeaveRoomOnADeviceForEachOther) {
  // The first has what it wants; each further one has half of what is left.
  int takes = 0, taken = 72, jobs = 0;
  while (const int lanes = unjam::nccl::lanes_beside(132, taken, takes)) {
    EXPECT_GE(lanes, 1);
    taken += takes;
    EXPECT_LE(taken, 132);
    ++jobs;
  }
  EXPECT_GE(jobs, 3);
  EXPECT_EQ(takes, 0);
}

}  // namespace
}  // namespace unjam_test
