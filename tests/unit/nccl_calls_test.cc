// NCCL's interface: collectives, sends and receives of all types and operators, groups, streams.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "api/nccl/scale.h"
#include "tests/support/nccl_api.h"

namespace unjam_test {
namespace {

using unjam::nccl::bytes_of;
using unjam::nccl::with_type;

class NcclCalls : public OnHost {};

// Whole numbers in any type: small enough to be exact in all of them.
struct Typed {
  int nccl;
  unjamDataType_t dtype;
};
constexpr Typed kTypes[] = {{0, UNJAM_INT8},     {1, UNJAM_UINT8},        {2, UNJAM_INT32},
                            {3, UNJAM_UINT32},   {4, UNJAM_INT64},        {5, UNJAM_UINT64},
                            {6, UNJAM_FLOAT16},  {7, UNJAM_FLOAT32},      {8, UNJAM_FLOAT64},
                            {9, UNJAM_BFLOAT16}, {10, UNJAM_FLOAT8_E4M3}, {11, UNJAM_FLOAT8_E5M2}};

class Numbers {
 public:
  Numbers(const Typed& type, std::size_t count)
      : type_(type), bytes_(count * bytes_of(type.dtype) + 8) {}
  unsigned char* at(std::size_t i) { return bytes_.data() + i * bytes_of(type_.dtype); }
  void set(std::size_t i, double value) {
    with_type(type_.dtype, [&](auto element) {
      using T = decltype(element);
      T x{};
      if constexpr (std::is_arithmetic_v<T>) {
        x = static_cast<T>(value);
      } else {
        x = unjam::from_float<T>(static_cast<float>(value));
      }
      std::memcpy(at(i), &x, sizeof(x));
    });
  }
  double get(std::size_t i) {
    double value = 0;
    with_type(type_.dtype, [&](auto element) {
      using T = decltype(element);
      T x{};
      std::memcpy(&x, at(i), sizeof(x));
      if constexpr (std::is_arithmetic_v<T>) {
        value = static_cast<double>(x);
      } else {
        value = static_cast<double>(unjam::to_float(x));
      }
    });
    return value;
  }

 private:
  const Typed type_;
  std::vector<unsigned char> bytes_;
};

void expect(Numbers& x, std::size_t i, double value, const std::string& what) {
  if (x.get(i) != value) {
    fail(what + ": element " + std::to_string(i) + " is " + std::to_string(x.get(i)) + ", not " +
         std::to_string(value));
  }
}

TEST_F(NcclCalls, ReduceAllTypesWithAllOperators) {
  constexpr int kRanks = 3, kCount = 5;
  const NcclId id = new_nccl_id();
  // Of ranks that give 1, 2 and 3: the sum, the product, the largest, the smallest, the mean.
  constexpr double kResults[] = {6, 6, 3, 1, 2};
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    for (const Typed& type : kTypes) {
      for (int op = 0; op < 5; ++op) {
        const std::string what = "type " + std::to_string(type.nccl) + " op " + std::to_string(op);
        for (const bool in_place : {false, true}) {
          Numbers in(type, kRanks * kCount), out(type, kRanks * kCount);
          for (int i = 0; i < kRanks * kCount; ++i) in.set(static_cast<std::size_t>(i), rank + 1);
          Numbers& to = in_place ? in : out;
          NCCL_CHECK(ncclAllReduce(in.at(0), to.at(0), kCount, type.nccl, op, comm, nullptr));
          synchronize();
          for (std::size_t i = 0; i < kCount; ++i) expect(to, i, kResults[op], what);

          for (std::size_t i = 0; i < kRanks * kCount; ++i) in.set(i, rank + 1);
          const auto own = static_cast<std::size_t>(rank * kCount);
          unsigned char* const part = in_place ? in.at(own) : out.at(0);
          NCCL_CHECK(ncclReduceScatter(in.at(0), part, kCount, type.nccl, op, comm, nullptr));
          synchronize();
          for (std::size_t i = 0; i < kCount; ++i) {
            expect(to, (in_place ? own : 0) + i, kResults[op], what + " scattered");
          }

          for (std::size_t i = 0; i < kCount; ++i) in.set(i, rank + 1);
          void* const at_root = rank == 1 ? to.at(0) : nullptr;
          NCCL_CHECK(ncclReduce(in.at(0), at_root, kCount, type.nccl, op, 1, comm, nullptr));
          synchronize();
          for (std::size_t i = 0; i < kCount && rank == 1; ++i) {
            expect(to, i, kResults[op], what + " at a root");
          }
        }
      }
    }
    NCCL_CHECK(ncclCommDestroy(comm));
  });
}

TEST_F(NcclCalls, MoveData) {
  constexpr int kRanks = 3, kCount = 1000;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    const auto own = static_cast<std::size_t>(rank * kCount);
    using Values = std::vector<std::int32_t>;
    const auto mine = [&](int of, int to) { return 100 * of + to; };
    const auto equal = [&](const Values& x, std::size_t from, int value, const char* what) {
      const auto begin = x.begin() + static_cast<std::ptrdiff_t>(from);
      if (std::count(begin, begin + kCount, value) != kCount) fail(what);
    };
    for (const bool in_place : {false, true}) {
      Values all(kRanks * kCount, -1), part(kCount, rank);
      if (in_place) std::fill_n(all.begin() + rank * kCount, kCount, rank);
      const void* from = in_place ? all.data() + own : part.data();
      NCCL_CHECK(ncclAllGather(from, all.data(), kCount, kNcclInt32, comm, nullptr));
      synchronize();
      for (int r = 0; r < kRanks; ++r) {
        equal(all, static_cast<std::size_t>(r * kCount), r, "all-gather");
      }

      Values gathered(kRanks * kCount, -1);
      if (in_place && rank == 2) std::fill_n(gathered.begin() + 2 * kCount, kCount, 2);
      from = in_place && rank == 2 ? gathered.data() + own : part.data();
      NCCL_CHECK(ncclGather(from, rank == 2 ? gathered.data() : nullptr, kCount, kNcclInt32, 2,
                            comm, nullptr));
      synchronize();
      for (int r = 0; r < kRanks && rank == 2; ++r) {
        equal(gathered, static_cast<std::size_t>(r * kCount), r, "gather");
      }

      Values given(kRanks * kCount), got(kCount, -1);
      for (int r = 0; r < kRanks; ++r) {
        std::fill_n(given.begin() + r * kCount, kCount, mine(rank, r));
      }
      const bool at_place = in_place && rank == 1;
      NCCL_CHECK(ncclScatter(rank == 1 ? given.data() : nullptr,
                             at_place ? given.data() + own : got.data(), kCount, kNcclInt32, 1,
                             comm, nullptr));
      synchronize();
      equal(at_place ? given : got, at_place ? own : 0, mine(1, rank), "scatter");

      Values sent(kCount, rank), received(kCount, -1);
      NCCL_CHECK(ncclBroadcast(sent.data(), in_place ? sent.data() : received.data(), kCount,
                               kNcclInt32, 1, comm, nullptr));
      synchronize();
      equal(in_place ? sent : received, 0, 1, "broadcast");
    }
    Values given(kRanks * kCount), got(kRanks * kCount, -1), here(kCount, rank);
    for (int r = 0; r < kRanks; ++r) {
      std::fill_n(given.begin() + r * kCount, kCount, mine(rank, r));
    }
    NCCL_CHECK(ncclAlltoAll(given.data(), got.data(), kCount, kNcclInt32, comm, nullptr));
    NCCL_CHECK(ncclBcast(here.data(), kCount, kNcclInt32, 2, comm, nullptr));
    synchronize();
    for (int r = 0; r < kRanks; ++r) {
      equal(got, static_cast<std::size_t>(r * kCount), mine(r, rank), "all-to-all");
    }
    equal(here, 0, 2, "ncclBcast");
    NCCL_CHECK(ncclCommDestroy(comm));
  });
}

TEST_F(NcclCalls, MultiplyBeforeTheyAdd) {
  constexpr int kRanks = 2, kCount = 4;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    for (const Typed& type : kTypes) {
      // Each rank has a scalar of its own: 2 and 3.
      Numbers scalar(type, 1), in(type, kRanks * kCount), out(type, kCount);
      scalar.set(0, rank + 2);
      for (std::size_t i = 0; i < kRanks * kCount; ++i) in.set(i, 2);
      for (const int residence : {0, 1}) {
        int op = 0;
        NCCL_CHECK(ncclRedOpCreatePreMulSum(&op, scalar.at(0), type.nccl, residence, comm));
        NCCL_CHECK(ncclAllReduce(in.at(0), out.at(0), kCount, type.nccl, op, comm, nullptr));
        NCCL_CHECK(ncclRedOpDestroy(op, comm));  // what was called keeps it
        synchronize();
        for (std::size_t i = 0; i < kCount; ++i) expect(out, i, 10, "2*2 + 2*3");
        EXPECT_EQ(ncclAllReduce(in.at(0), out.at(0), kCount, type.nccl, op, comm, nullptr),
                  Code::kInvalidArgument);
        EXPECT_EQ(ncclRedOpDestroy(op, comm), Code::kInvalidArgument);
        NCCL_CHECK(ncclRedOpCreatePreMulSum(&op, scalar.at(0), type.nccl, residence, comm));
        NCCL_CHECK(ncclReduceScatter(in.at(0), out.at(0), kCount, type.nccl, op, comm, nullptr));
        synchronize();
        for (std::size_t i = 0; i < kCount; ++i) expect(out, i, 10, "scattered");
        expect(in, 0, 2, "the input");
        NCCL_CHECK(ncclRedOpDestroy(op, comm));
      }
    }
    NCCL_CHECK(ncclCommDestroy(comm));
  });
}

TEST_F(NcclCalls, StreamKeepsItsOrder) {
  constexpr int kRanks = 2;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    std::int64_t x = 1;
    for (int i = 0; i < 20; ++i) {
      NCCL_CHECK(ncclAllReduce(&x, &x, 1, kNcclInt64, kNcclSum, comm, stream_named(1)));
    }
    synchronize(1);
    if (x != 1 << 20) fail("a call has read what the one before had not written");
    NCCL_CHECK(ncclCommDestroy(comm));
  });
}

TEST_F(NcclCalls, GroupsExchangeInAnyOrder) {
  constexpr int kRanks = 3;
  constexpr std::size_t kCount = 300'000;  // more than waits in a connector
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    for (int turn = 0; turn < 4; ++turn) {
      std::vector<std::vector<float>> in(kRanks), out(kRanks);
      NCCL_CHECK(ncclGroupStart());
      for (int i = 0; i < kRanks; ++i) {
        const int peer = (i * (turn % 2 == 0 ? 1 : 2) + rank) % kRanks;
        const auto p = static_cast<std::size_t>(peer);
        in[p].assign(kCount, -1);
        out[p].assign(kCount, static_cast<float>(10 * rank + peer));
        const auto send = [&] {
          NCCL_CHECK(ncclSend(out[p].data(), kCount, kNcclFloat32, peer, comm, nullptr));
        };
        if (turn < 2) send();
        NCCL_CHECK(ncclRecv(in[p].data(), kCount, kNcclFloat32, peer, comm, nullptr));
        if (turn >= 2) send();
      }
      NCCL_CHECK(ncclGroupEnd());
      synchronize();
      for (int peer = 0; peer < kRanks; ++peer) {
        const auto value = static_cast<float>(10 * peer + rank);
        const auto& got = in[static_cast<std::size_t>(peer)];
        if (std::count(got.begin(), got.end(), value) != static_cast<std::ptrdiff_t>(kCount)) {
          fail("turn " + std::to_string(turn) + ": wrong data of rank " + std::to_string(peer));
        }
      }
    }
    NCCL_CHECK(ncclCommDestroy(comm));
  });
}

TEST_F(NcclCalls, CommunicatorsInCrossedOrder) {
  constexpr int kRanks = 2, kComms = 4, kTurns = 10;
  std::vector<NcclId> ids;
  for (int c = 0; c < kComms; ++c) ids.push_back(new_nccl_id());
  run_nccl_ranks(kRanks, [&](int rank) {
    std::vector<ncclComm_t> comms;
    for (const NcclId& id : ids) comms.push_back(init_nccl(kRanks, id, rank));
    std::array<std::int64_t, kComms> x{};
    x.fill(1);
    for (int turn = 0; turn < kTurns; ++turn) {
      // Apart, in streams of their own; then in one stream, in one group.
      for (const bool grouped : {false, true}) {
        if (grouped) NCCL_CHECK(ncclGroupStart());
        for (int i = 0; i < kComms; ++i) {
          const int c = rank == 0 ? i : kComms - 1 - i;
          const auto place = static_cast<std::size_t>(c);
          NCCL_CHECK(ncclAllReduce(&x[place], &x[place], 1, kNcclInt64, kNcclSum, comms[place],
                                   stream_named(grouped ? 9 : c + 1)));
        }
        if (grouped) {
          NCCL_CHECK(ncclGroupEnd());
          synchronize(9);
        } else {
          for (int c = 0; c < kComms; ++c) synchronize(c + 1);
        }
      }
    }
    for (const std::int64_t value : x) {
      if (value != std::int64_t{1} << (2 * kTurns)) fail("a wrong sum");
    }
    for (const ncclComm_t comm : comms) NCCL_CHECK(ncclCommDestroy(comm));
  });
}

TEST_F(NcclCalls, OneThreadDrivesAllRanks) {
  constexpr int kRanks = 4;
  std::array<ncclComm_t, kRanks> comms{};
  NCCL_CHECK(ncclCommInitAll(comms.data(), kRanks, nullptr));
  std::array<float, kRanks> x{};
  NCCL_CHECK(ncclGroupStart());
  for (std::size_t r = 0; r < kRanks; ++r) {
    x[r] = static_cast<float>(r);
    NCCL_CHECK(ncclAllReduce(&x[r], &x[r], 1, kNcclFloat32, kNcclSum, comms[r], nullptr));
  }
  NCCL_CHECK(ncclGroupEnd());
  for (std::size_t r = 0; r < kRanks; ++r) {
    unjam::nccl::set_host_device(static_cast<int>(r));
    synchronize();
    EXPECT_EQ(x[r], 6.0F);
  }
  unjam::nccl::set_host_device(0);
  for (const ncclComm_t comm : comms) NCCL_CHECK(ncclCommDestroy(comm));
}

TEST_F(NcclCalls, WhatIsWrongIsRefused) {
  ncclComm_t comm = nullptr;
  NCCL_CHECK(ncclCommInitRank(&comm, 1, new_nccl_id(), 0));
  float x = 1, y = 2;
  const auto refused = [&](Code code, Code expected, const std::string& text) {
    EXPECT_EQ(code, expected);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find(text), std::string::npos)
        << ncclGetLastError(nullptr);
  };
  const Code invalid = Code::kInvalidArgument;
  refused(ncclAllReduce(&x, &y, 1, 12, 0, comm, nullptr), invalid, "data type 12");
  refused(ncclAllReduce(&x, &y, 1, 7, 5, comm, nullptr), invalid, "operator 5");
  refused(ncclAllReduce(&x, &y, 1, 7, -1, comm, nullptr), invalid, "operator -1");
  refused(ncclAllReduce(nullptr, &y, 1, 7, 0, comm, nullptr), invalid, "sendbuff");
  refused(ncclAllReduce(&x, nullptr, 1, 7, 0, comm, nullptr), invalid, "recvbuff");
  refused(ncclBroadcast(&x, &y, 1, 7, 1, comm, nullptr), invalid, "rank 1");
  refused(ncclReduce(&x, &y, 1, 7, 0, -1, comm, nullptr), invalid, "rank -1");
  refused(ncclAllReduce(&x, &y, 1, 7, 0, nullptr, nullptr), invalid, "no communicator");
  refused(ncclAllReduce(&x, &y, 1, 7, 0, reinterpret_cast<ncclComm_t>(&x), nullptr), invalid,
          "no communicator");
  refused(ncclSend(&x, 1, 7, 0, comm, nullptr), Code::kInvalidUsage, "sends to itself");
  refused(ncclGroupEnd(), Code::kInvalidUsage, "without ncclGroupStart");
  void* window = &x;
  refused(ncclCommWindowRegister(comm, &x, 4, &window, 0), Code::kInvalidUsage, "does not serve");
  EXPECT_EQ(window, nullptr);
  // Nothing is nothing.
  NCCL_CHECK(ncclAllReduce(&x, &y, 0, 7, 0, comm, nullptr));
  // A group with a call that was refused does nothing, and the next one is as new.
  NCCL_CHECK(ncclGroupStart());
  NCCL_CHECK(ncclAllReduce(&x, &y, 1, 7, 0, comm, nullptr));
  EXPECT_EQ(ncclAllReduce(&x, &y, 1, 77, 0, comm, nullptr), invalid);
  refused(ncclGroupEnd(), invalid, "data type 77");
  synchronize();
  EXPECT_EQ(y, 2.0F);
  NCCL_CHECK(ncclGroupStart());
  NCCL_CHECK(ncclAllReduce(&x, &y, 1, 7, 0, comm, nullptr));
  refused(ncclGroupSimulateEnd(nullptr), Code::kInvalidUsage, "does not estimate");
  synchronize();
  EXPECT_EQ(y, 2.0F);
  NCCL_CHECK(ncclGroupStart());
  NCCL_CHECK(ncclGroupStart());
  NCCL_CHECK(ncclAllReduce(&x, &y, 1, 7, 0, comm, nullptr));
  NCCL_CHECK(ncclGroupEnd());
  NCCL_CHECK(ncclGroupEnd());
  synchronize();
  EXPECT_EQ(y, 1.0F);
  NCCL_CHECK(ncclCommDestroy(comm));
  refused(ncclAllReduce(&x, &y, 1, 7, 0, comm, nullptr), invalid, "no communicator");
}

TEST_F(NcclCalls, ManyCallsAtOnce) {
  constexpr int kRanks = 2, kCalls = 2000;
  const NcclId id = new_nccl_id();
  run_nccl_ranks(kRanks, [&](int rank) {
    const ncclComm_t comm = init_nccl(kRanks, id, rank);
    std::vector<std::int32_t> x(kCalls, rank + 1);
    NCCL_CHECK(ncclGroupStart());
    for (auto& value : x) {
      NCCL_CHECK(ncclAllReduce(&value, &value, 1, kNcclInt32, kNcclSum, comm, nullptr));
    }
    NCCL_CHECK(ncclGroupEnd());
    synchronize();
    if (std::count(x.begin(), x.end(), 3) != kCalls) fail("a wrong sum");
    NCCL_CHECK(ncclCommDestroy(comm));
  });
}

}  // namespace
}  // namespace unjam_test
