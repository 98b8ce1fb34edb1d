// Calls in streams and beside them, as the runtime makes them, with a device that is a script: full
// streams, refusals, aborts; threads of one rank that must not wait for one another.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/cuda_library.h"
#include "tests/support/job.h"
#include "tests/support/scripted_device.h"

namespace unjam_test {
namespace {

constexpr std::size_t kCount = 16;

unjamConfig_t cuda_config() {
  unjamConfig_t config = default_config();
  config.device = UNJAM_DEVICE_CUDA;
  config.lanes = 1;
  return config;
}

class Streams : public testing::Test {
 protected:
  void begin(int ranks, std::size_t room, bool whole_lines = false) {
    device_ = std::make_unique<ScriptedDevice>(room);
    device_->links_are(whole_lines);
    unjam::replace_cuda_driver(device_.get());
    job_ = std::make_unique<Job>(ranks, cuda_config());
  }
  void TearDown() override {
    job_.reset();
    unjam::replace_cuda_driver(nullptr);
  }

  // No data move, so any buffer will do.
  static unjamResult_t call(unjamGroup_t group, const std::string& key, unjamStreamOrder_t order,
                            void* stream, unjamRequest_t* request, std::size_t count = kCount) {
    static float buffer[2 * kCount];
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    options.stream = stream;
    options.stream_order = order;
    return unjamAllReduce(group, key.c_str(), buffer, buffer, count, UNJAM_FLOAT32, UNJAM_SUM,
                          &options, request);
  }
  static unjamRequest_t must_call(unjamGroup_t group, const std::string& key,
                                  unjamStreamOrder_t order, void* stream) {
    unjamRequest_t request = nullptr;
    UNJAM_CHECK(call(group, key, order, stream, &request));
    return request;
  }

  // So many threads of each rank, each with a stream of its own.
  void run_each(int ranks, int threads, const std::function<void(Rank&, int, void*)>& body) {
    std::vector<std::pair<int, std::function<void(Rank&)>>> bodies;
    for (int i = 0; i < ranks * threads; ++i) {
      void* const stream = device_->create_stream();
      bodies.emplace_back(i / threads,
                          [&body, t = i % threads, stream](Rank& me) { body(me, t, stream); });
    }
    job_->run_threads(bodies);
  }

  // Whether the last call was, by ScriptedDevice::refuse().
  static bool refused() {
    return std::string(unjamGetLastError()).find("takes nothing") != std::string::npos;
  }

  std::unique_ptr<ScriptedDevice> device_;
  std::unique_ptr<Job> job_;
};

TEST_F(Streams, CallsBesideAFullOneGoOn) {
  constexpr int kAhead = 20;
  begin(2, 4);
  void* const full = device_->create_stream();
  void* const other = device_->create_stream();
  void* const of_0 = device_->create_stream();
  std::atomic<bool> through{false};
  const auto others = [](Rank& me, void* stream) {
    for (int i = 0; i < 3; ++i) {
      const std::string what = "rank " + std::to_string(me.rank);
      me.wait(must_call(me.all, "other", UNJAM_STREAM_SYNC, stream), what + ", in a stream");
      me.wait(must_call(me.all, "behind", UNJAM_STREAM_ASYNC, stream), what + ", behind a stream");
      me.wait(must_call(me.all, "beside", UNJAM_STREAM_NONE, nullptr), what + ", beside streams");
    }
  };
  const auto ahead = [&](Rank& me, void* stream) {
    std::vector<unjamRequest_t> requests;
    for (int i = 0; i < kAhead; ++i) {
      requests.push_back(must_call(me.all, "ahead", UNJAM_STREAM_SYNC, stream));
    }
    for (unjamRequest_t request : requests) me.wait(request, "ahead");
  };
  job_->run_threads({{1, [&](Rank& me) { ahead(me, full); }},
                     {1,
                      [&](Rank& me) {
                        if (!eventually([&] { return device_->held_up(full) != 0; })) {
                          fail("the stream takes all");
                        }
                        others(me, other);
                        if (device_->held_up(full) == 0) fail("the stream had room");
                        through = true;
                      }},
                     {0, [&](Rank& me) {
                        others(me, of_0);
                        if (!eventually([&] { return through.load(); })) fail("rank 1 waits");
                        ahead(me, of_0);
                      }}});
}

// A wait of a stream, too; and the rank's state can be asked for.
TEST_F(Streams, WaitsInAFullOneKeepNobody) {
  begin(2, 1);
  void* const full = device_->create_stream();
  std::atomic<bool> through{false};
  job_->run_threads(
      {{1,
        [&](Rank& me) {
          const unjamRequest_t late = must_call(me.all, "late", UNJAM_STREAM_NONE, nullptr);
          for (int i = 0; i < 3; ++i) UNJAM_CHECK(unjamStreamWait(late, full));
          me.wait(late, "the late one");
        }},
       {1,
        [&](Rank& me) {
          if (!eventually([&] { return device_->held_up(full) != 0; })) fail("it takes all");
          EXPECT_EQ(stats_of(me.context).pending, 1U);
          EXPECT_NE(explain(me.context).find("late"), std::string::npos);
          me.wait(must_call(me.all, "other", UNJAM_STREAM_NONE, nullptr), "another");
          if (device_->held_up(full) == 0) fail("the stream had room");
          through = true;
        }},
       {0, [&](Rank& me) {
          me.wait(must_call(me.all, "other", UNJAM_STREAM_NONE, nullptr), "another");
          if (!eventually([&] { return through.load(); })) fail("rank 1 waits");
          me.wait(must_call(me.all, "late", UNJAM_STREAM_NONE, nullptr), "the late one");
        }}});
}

// Who waits for room comes back when the job is given up, and so do those behind it.
TEST_F(Streams, AbortWhileOneIsFull) {
  begin(2, 2);
  void* const full = device_->create_stream();
  std::atomic<int> ended{0};
  const auto run_ahead = [&](Rank& me) {
    std::vector<unjamRequest_t> requests;
    for (int i = 0; i < 10; ++i) {
      unjamRequest_t request = nullptr;
      if (call(me.all, "never", UNJAM_STREAM_SYNC, full, &request) != UNJAM_SUCCESS) break;
      requests.push_back(request);
    }
    EXPECT_LT(requests.size(), 10U);
    for (unjamRequest_t r : requests) wait_error(me.context, r, UNJAM_ERROR_ABORTED, "a call");
    ++ended;
  };
  job_->run_threads({{0, run_ahead}, {0, run_ahead}, {0, [&](Rank& me) {
                                                        if (!eventually([&] {
                                                              return device_->held_up(full) == 1;
                                                            })) {
                                                          fail("not one waits for room");
                                                        }
                                                        UNJAM_CHECK(unjamAbort(me.context));
                                                      }}});
  EXPECT_EQ(ended.load(), 2);
}

// As if it had not been made: the next call is the same use, and peers never hear of it.
TEST_F(Streams, ARefusedCallLeavesNothing) {
  begin(2, 8);
  void* const streams[] = {device_->create_stream(), device_->create_stream()};
  std::atomic<int> called{0};  // by rank 0
  job_->run([&](Rank& me) {
    void* const stream = streams[me.rank];
    // Nobody else has called it yet, so another count is no mistake of its own.
    const std::size_t count = me.rank == 0 ? 2 * kCount : kCount;
    for (int i = 0; i < 80; ++i) {  // beyond what is kept of a key's past
      if (me.rank != 0 && !eventually([&] { return called > i; })) fail("rank 0 does not call");
      const auto order = i % 3 == 0 ? UNJAM_STREAM_ASYNC : UNJAM_STREAM_SYNC;
      if (i % 4 != me.rank) {
        device_->refuse(stream, 1, i % 5 == 0);
        unjamRequest_t request = nullptr;
        EXPECT_EQ(call(me.all, "key", order, stream, &request, count), UNJAM_ERROR_SYSTEM);
        EXPECT_EQ(request, nullptr);
        const unjamStats_t stats = stats_of(me.context);
        EXPECT_EQ(stats.submitted, static_cast<std::uint64_t>(i));
        EXPECT_EQ(stats.completed, stats.submitted);
      }
      const unjamRequest_t request = must_call(me.all, "key", order, stream);
      if (me.rank == 0) {  // which is alone until then
        device_->refuse(stream, 1, i % 4 == 0);
        EXPECT_NE(unjamStreamWait(request, stream), UNJAM_SUCCESS);
        called = i + 1;
      }
      me.wait(request, "use " + std::to_string(i));
    }
    // Not even a key of which it was the first, or a place for a call.
    constexpr int kTimes = 5000;
    device_->refuse(stream, kTimes);
    for (int i = 0; i < kTimes; ++i) {
      ASSERT_EQ(call(me.all, "other", UNJAM_STREAM_SYNC, stream, nullptr), UNJAM_ERROR_SYSTEM);
    }
    me.wait(must_call(me.all, "other", UNJAM_STREAM_SYNC, stream), "another key");
    // Nor among the keys that are busy, of which there may be 64.
    for (int i = 0; i < 100; ++i) {
      const std::string key = "key " + std::to_string(i);
      device_->refuse(stream, 1);
      EXPECT_EQ(call(me.all, key, UNJAM_STREAM_SYNC, stream, nullptr), UNJAM_ERROR_SYSTEM);
      me.wait(must_call(me.all, key, UNJAM_STREAM_SYNC, stream), key);
    }
  });
}

// Long packets are lines where the links are such that they come whole, unless somebody says
// otherwise.
TEST_F(Streams, LinesByTheLinks) {
  struct Case {
    const char *lines, *whole_lines;
    bool links, want_lines, want_whole;
  };
  const Case cases[] = {
      {nullptr, nullptr, true, true, true}, {nullptr, nullptr, false, false, false},
      {"-1", "-1", true, true, true},       {"0", nullptr, true, false, false},
      {"1", nullptr, true, true, true},     {"1", nullptr, false, true, false},
      {nullptr, "0", true, false, false},   {nullptr, "1", false, true, true},
      {"0", "1", false, false, true},       {"1", "0", true, true, false},
  };
  const auto set = [](const char* name, const char* value) {
    ASSERT_EQ(value != nullptr ? setenv(name, value, 1) : unsetenv(name), 0);
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.lines == nullptr ? "unset" : c.lines) + " " +
                 (c.whole_lines == nullptr ? "unset" : c.whole_lines) + ", links " +
                 (c.links ? "whole" : "not"));
    set("UNJAM_LINES", c.lines);
    set("UNJAM_WHOLE_LINES", c.whole_lines);
    begin(2, 4, c.links);
    set("UNJAM_LINES", nullptr);
    set("UNJAM_WHOLE_LINES", nullptr);
    const auto started = device_->started();
    EXPECT_EQ(started.size(), 2u);
    for (const auto& options : started) {
      EXPECT_EQ(options.lines, c.want_lines);
      EXPECT_EQ(options.whole_lines, c.want_whole);
    }
    TearDown();
  }
}

// Names the ranks, the device and what to do; and nothing of it is left behind.
TEST_F(Streams, WithoutPeerAccessNobodyBegins) {
  device_ = std::make_unique<ScriptedDevice>(4);
  device_->devices_are(3);
  device_->keep_apart(1, 2);
  unjam::replace_cuda_driver(device_.get());
  const unjamConfig_t config = cuda_config();
  unjamContext_t contexts[3] = {};
  for (int repeated = 0; repeated < 2; ++repeated) {
    EXPECT_EQ(unjamInitAll(contexts, 3, &config), UNJAM_ERROR_SYSTEM);
    EXPECT_EQ(std::string(unjamGetLastError()),
              "rank 1 (device 1) cannot reach the memory of rank 2: no way from device 1 to device "
              "2. The CUDA device needs peer access between all ranks' GPUs (`unjam doctor`, in a "
              "process that sees them all, tells which have it)");
    for (const unjamContext_t context : contexts) EXPECT_EQ(context, nullptr);
  }
  // Those that reach each other are a job.
  device_->keep_apart(0, 2);
  job_ = std::make_unique<Job>(2, config);
  job_->run([](Rank& me) {
    me.wait(must_call(me.all, "key", UNJAM_STREAM_NONE, nullptr), "a call of the two");
  });
}

// However late whoever tells of a peer's end gets on: what the engine has ended for it says who.
TEST_F(Streams, WhatEndsWithAPeerNamesIt) {
  begin(2, 4);
  device_->hold_up_who_tells(50'000);
  std::atomic<bool> called{false};
  job_->run([&](Rank& me) {
    if (me.rank == 1) {
      if (!eventually([&] { return called.load(); })) fail("rank 0 does not call");
      UNJAM_CHECK(unjamAbort(me.context));
      return;
    }
    const unjamRequest_t request = must_call(me.all, "key", UNJAM_STREAM_NONE, nullptr);
    called.store(true);
    const std::string why = wait_error(me.context, request, UNJAM_ERROR_PEER, "a call of the two");
    if (why.find("rank 1") == std::string::npos) fail("it says only: " + why);
  });
}

// Nobody looks at what the failed start has let go of (which address sanitizers see).
TEST_F(Streams, WhereEnginesDoNotStartNobodyBegins) {
  device_ = std::make_unique<ScriptedDevice>(4);
  device_->refuse_to_start(true);
  unjam::replace_cuda_driver(device_.get());
  const unjamConfig_t config = cuda_config();
  unjamContext_t contexts[2] = {};
  EXPECT_EQ(unjamInitAll(contexts, 2, &config), UNJAM_ERROR_SYSTEM);
  EXPECT_NE(std::string(unjamGetLastError()).find("loading kernels: none for this device"),
            std::string::npos)
      << unjamGetLastError();
  for (const unjamContext_t context : contexts) EXPECT_EQ(context, nullptr);
  device_->refuse_to_start(false);
  job_ = std::make_unique<Job>(2, config);
  job_->run([](Rank& me) {
    me.wait(must_call(me.all, "key", UNJAM_STREAM_NONE, nullptr), "a call of the two");
  });
}

unjamGroup_t alone_of(const Rank& me) {
  unjamGroup_t group = nullptr;
  UNJAM_CHECK(unjamGroupCreate(me.context, &me.rank, 1, "alone", &group));
  return group;
}

// The scripted device says so where the engine hears of one of these calls.
TEST_F(Streams, AGroupOfOneOnlyCopies) {
  begin(1, 4);
  void* const stream = device_->create_stream();
  job_->run([&](Rank& me) {
    std::vector<std::int32_t> from(100), to(100);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::int32_t>(i) - 7;
    using Call =
        std::function<unjamResult_t(const char*, const unjamCallOptions_t*, unjamRequest_t*)>;
    const std::size_t n = from.size();
    const Call calls[] = {
        [&](const char* key, const unjamCallOptions_t* options, unjamRequest_t* r) {
          return unjamAllReduce(me.all, key, from.data(), to.data(), n, UNJAM_INT32, UNJAM_AVG,
                                options, r);
        },
        [&](const char* key, const unjamCallOptions_t* options, unjamRequest_t* r) {
          return unjamAllGather(me.all, key, from.data(), to.data(), n, UNJAM_INT32, options, r);
        },
        [&](const char* key, const unjamCallOptions_t* options, unjamRequest_t* r) {
          return unjamReduceScatter(me.all, key, from.data(), to.data(), n, UNJAM_INT32, UNJAM_MAX,
                                    options, r);
        },
        [&](const char* key, const unjamCallOptions_t* options, unjamRequest_t* r) {
          return unjamAllToAll(me.all, key, from.data(), to.data(), n, UNJAM_INT32, options, r);
        },
        [&](const char* key, const unjamCallOptions_t* options, unjamRequest_t* r) {
          return unjamBroadcast(me.all, key, from.data(), to.data(), n, UNJAM_INT32, 0, options, r);
        },
    };
    for (const auto order : {UNJAM_STREAM_NONE, UNJAM_STREAM_ASYNC, UNJAM_STREAM_SYNC}) {
      unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
      options.stream = order == UNJAM_STREAM_NONE ? nullptr : stream;
      options.stream_order = order;
      for (const Call& call : calls) {
        for (const char* key : {"", "key"}) {
          std::fill(to.begin(), to.end(), -1);
          unjamRequest_t request = nullptr;
          UNJAM_CHECK(call(key, &options, &request));
          me.wait(request, "a copy");
          EXPECT_EQ(to, from);
        }
      }
      // Nothing to copy: in place, and a barrier.
      unjamRequest_t request = nullptr;
      UNJAM_CHECK(unjamAllReduce(me.all, "key", to.data(), to.data(), n, UNJAM_INT32, UNJAM_SUM,
                                 &options, &request));
      me.wait(request, "in place");
      UNJAM_CHECK(unjamBarrier(me.all, "key", &options, &request));
      me.wait(request, "a barrier");
      EXPECT_EQ(to, from);
    }
    EXPECT_EQ(stats_of(me.context).pending, 0U);
  });
}

// It is complete when its stream comes to it, not before; and refused as others are.
TEST_F(Streams, AGroupOfOneStandsInItsStream) {
  begin(2, 8);
  void* const streams[] = {device_->create_stream(), device_->create_stream()};
  std::atomic<bool> seen{false};
  job_->run([&](Rank& me) {
    const unjamGroup_t alone = alone_of(me);
    void* const stream = streams[me.rank];
    if (me.rank == 1) {
      if (!eventually([&] { return seen.load(); })) fail("rank 0 does not see");
      me.wait(must_call(me.all, "late", UNJAM_STREAM_SYNC, stream), "late");
      return;
    }
    void* const other = device_->create_stream();
    const unjamRequest_t late = must_call(me.all, "late", UNJAM_STREAM_SYNC, stream);
    device_->refuse(stream, 1);
    unjamRequest_t behind = nullptr;
    EXPECT_EQ(call(alone, "key", UNJAM_STREAM_ASYNC, stream, &behind), UNJAM_ERROR_SYSTEM);
    EXPECT_EQ(behind, nullptr);
    behind = must_call(alone, "key", UNJAM_STREAM_ASYNC, stream);
    // In other streams, and in none, under the same key too.
    me.wait(must_call(alone, "key", UNJAM_STREAM_SYNC, other), "in another stream");
    me.wait(must_call(alone, "key", UNJAM_STREAM_NONE, nullptr), "in none");
    int done = 0;
    UNJAM_CHECK(unjamTest(behind, &done));
    EXPECT_EQ(done, 0);
    UNJAM_CHECK(unjamStreamWait(behind, other));
    seen = true;
    me.wait(late, "late");
    me.wait(behind, "behind it");
    me.wait(must_call(alone, "key", UNJAM_STREAM_SYNC, other), "behind the wait");
    UNJAM_CHECK(unjamGroupDestroy(alone));
  });
}

// A rank's message to itself is copied behind what the streams of both its calls held, whichever
// call comes first, and in whatever stream, or none, the other one is.
TEST_F(Streams, AMessageToOneselfIsBehindBothStreams) {
  begin(2, 8);
  void* const streams[] = {device_->create_stream(), device_->create_stream()};
  std::atomic<int> seen{0};
  const int rounds = 4;
  job_->run([&](Rank& me) {
    void* const stream = streams[me.rank];
    for (int round = 0; round < rounds; ++round) {
      if (me.rank == 1) {
        if (!eventually([&] { return seen.load() > round; })) fail("rank 0 does not see");
        me.wait(must_call(me.all, "late", UNJAM_STREAM_SYNC, stream), "late");
        continue;
      }
      void* const other = round % 2 == 0 ? device_->create_stream() : nullptr;
      const unjamRequest_t late = must_call(me.all, "late", UNJAM_STREAM_SYNC, stream);
      std::int32_t x = 100 + round, y = 0;
      const auto half = [&](bool sends, void* in) {
        unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
        options.stream = in;
        options.stream_order = in == nullptr ? UNJAM_STREAM_NONE : UNJAM_STREAM_ASYNC;
        unjamRequest_t request = nullptr;
        UNJAM_CHECK(sends ? unjamSend(me.all, "own", &x, 1, UNJAM_INT32, 0, &options, &request)
                          : unjamRecv(me.all, "own", &y, 1, UNJAM_INT32, 0, &options, &request));
        return request;
      };
      const bool receives_first = round < 2;
      const unjamRequest_t first = half(!receives_first, stream);
      const unjamRequest_t second = half(receives_first, other);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      for (const unjamRequest_t request : {first, second}) {
        int done = 0;
        UNJAM_CHECK(unjamTest(request, &done));
        EXPECT_EQ(done, 0) << "in front of what stands in the first call's stream";
      }
      EXPECT_EQ(y, 0);
      ++seen;
      me.wait(late, "late");
      me.wait(first, "the first call");
      me.wait(second, "the second call");
      EXPECT_EQ(y, 100 + round);
    }
  });
}

// Threads with a short stream each, keys of their own, and refusals.
TEST_F(Streams, ManyThreads) {
  constexpr int kRanks = 3, kThreads = 4, kCalls = kSanitized ? 150 : 400;
  begin(kRanks, 3);
  run_each(kRanks, kThreads, [this](Rank& me, int t, void* stream) {
    const std::uint64_t seed = mix(job_->seed(), static_cast<std::uint64_t>(t));
    std::uint64_t own = mix(seed, static_cast<std::uint64_t>(me.rank));
    std::vector<unjamRequest_t> requests;
    for (int i = 0; i < kCalls; ++i) {
      const std::uint64_t draw = mix(seed, static_cast<std::uint64_t>(i));
      const std::string key = std::to_string(t) + "/" + std::to_string(draw % 7);
      const auto order = draw >> 8 & 1 ? UNJAM_STREAM_SYNC : UNJAM_STREAM_ASYNC;
      own = mix(own);
      if (own % 11 == 0) device_->refuse(stream, 1);
      unjamRequest_t request = nullptr;
      while (call(me.all, key, order, stream, &request) != UNJAM_SUCCESS) {
        if (!refused() && unjamLastErrorIsTransient() == 0) fail(unjamGetLastError());
      }
      requests.push_back(request);
      if (own % 7 == 0) UNJAM_CHECK(unjamStreamWait(request, stream));
      if (own % 13 == 0) usleep(static_cast<useconds_t>(own >> 8 & 255));
    }
    for (unjamRequest_t request : requests) me.wait(request, "one of many");
  });
  for (int r = 0; r < kRanks; ++r) {
    const unjamStats_t stats = stats_of(job_->context(r));
    EXPECT_EQ(stats.pending, 0U);
    EXPECT_GE(stats.completed, static_cast<std::uint64_t>(kThreads * kCalls));
  }
}

// One key's uses come to the device in their order, whoever makes them, in whatever stream. (The
// earliest that is not complete is at a stream's head, so none waits in vain.)
TEST_F(Streams, OneKeyByManyThreads) {
  constexpr int kRanks = 2, kThreads = 4, kCalls = kSanitized ? 100 : 300;
  begin(kRanks, 2);
  run_each(kRanks, kThreads, [this](Rank& me, int t, void* stream) {
    std::uint64_t draw = mix(job_->seed(), static_cast<std::uint64_t>(t * kRanks + me.rank));
    std::vector<unjamRequest_t> requests;
    for (int i = 0; i < kCalls; ++i) {
      draw = mix(draw);
      if (draw % 11 == 0) device_->refuse(stream, 1);
      unjamRequest_t request = nullptr;
      while (call(me.all, "all", UNJAM_STREAM_SYNC, stream, &request) != UNJAM_SUCCESS) {
        if (!refused()) fail(unjamGetLastError());
      }
      requests.push_back(request);
      if (draw % 13 == 0) usleep(static_cast<useconds_t>(draw >> 8 & 255));
    }
    for (unjamRequest_t request : requests) me.wait(request, "a use of the key");
  });
}

}  // namespace
}  // namespace unjam_test
