// unjamGroupAbort: what it ends, here and on peers, and what it leaves alone.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "tests/support/processes.h"

namespace unjam_test {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class Pair {
 public:
  explicit Pair(int ranks) : contexts_(static_cast<std::size_t>(ranks)) {
    unjamConfig_t config = default_config();
    UNJAM_CHECK(unjamInitAll(contexts_.data(), ranks, &config));
    for (const char* name : {"ends", "goes on"}) {
      std::vector<unjamGroup_t> groups(contexts_.size());
      for (std::size_t r = 0; r < contexts_.size(); ++r) {
        UNJAM_CHECK(unjamGroupCreate(contexts_[r], nullptr, 0, name, &groups[r]));
      }
      (std::string(name) == "ends" ? ends : goes_on) = groups;
    }
  }
  ~Pair() {
    for (const unjamContext_t context : contexts_) {
      unjamAbort(context);
      unjamDestroy(context);
    }
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  std::vector<unjamGroup_t> ends, goes_on;

 private:
  std::vector<unjamContext_t> contexts_;
};

unjamRequest_t all_reduce(unjamGroup_t group, const char* key, float* x) {
  unjamRequest_t request = nullptr;
  UNJAM_CHECK(unjamAllReduce(group, key, x, x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &request));
  return request;
}

unjamResult_t end_of(unjamRequest_t request, std::string* text = nullptr) {
  const unjamResult_t result = unjamWait(request, kPatienceUs);
  if (text != nullptr) *text = unjamRequestError(request);
  unjamRequestFree(request);
  return result;
}

TEST(GroupAbort, EndsWhatIsPendingHereAndWhatPeersHavePending) {
  Pair job(3);
  std::array<float, 8> x{};
  const unjamRequest_t mine = all_reduce(job.ends[0], "a", &x[0]);
  const unjamRequest_t common = all_reduce(job.ends[1], nullptr, &x[1]);
  unjamRequest_t received = nullptr;
  UNJAM_CHECK(unjamRecv(job.ends[2], nullptr, &x[2], 1, UNJAM_FLOAT32, 0, nullptr, &received));
  const unjamRequest_t other = all_reduce(job.goes_on[0], "a", &x[3]);

  EXPECT_EQ(unjamGroupAbort(job.ends[0]), UNJAM_SUCCESS);
  std::string text;
  EXPECT_EQ(end_of(mine, &text), UNJAM_ERROR_ABORTED);
  EXPECT_TRUE(has(text, "'ends' was aborted")) << text;
  EXPECT_EQ(end_of(common, &text), UNJAM_ERROR_PEER);
  EXPECT_TRUE(has(text, "rank 0 has given up the group")) << text;
  EXPECT_EQ(end_of(received), UNJAM_ERROR_PEER);

  // The other group is not touched.
  const unjamRequest_t second = all_reduce(job.goes_on[1], "a", &x[4]);
  const unjamRequest_t third = all_reduce(job.goes_on[2], "a", &x[5]);
  EXPECT_EQ(end_of(other), UNJAM_SUCCESS);
  EXPECT_EQ(end_of(second), UNJAM_SUCCESS);
  EXPECT_EQ(end_of(third), UNJAM_SUCCESS);
}

TEST(GroupAbort, RefusesLaterCallsHereAndEndsThoseOfPeers) {
  Pair job(2);
  float x = 0, y = 0;
  UNJAM_CHECK(unjamGroupAbort(job.ends[0]));
  EXPECT_EQ(
      unjamAllReduce(job.ends[0], "new", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr),
      UNJAM_ERROR_ABORTED);
  EXPECT_EQ(unjamSend(job.ends[0], "new", &x, 1, UNJAM_FLOAT32, 1, nullptr, nullptr),
            UNJAM_ERROR_ABORTED);
  EXPECT_EQ(end_of(all_reduce(job.ends[1], nullptr, &y)), UNJAM_ERROR_PEER);
  unjamRequest_t sent = nullptr;
  const unjamResult_t refused =
      unjamSend(job.ends[1], nullptr, &y, 1, UNJAM_FLOAT32, 0, nullptr, &sent);
  EXPECT_EQ(refused == UNJAM_SUCCESS ? end_of(sent) : refused, UNJAM_ERROR_PEER);
  // Twice is once; and the group can go.
  EXPECT_EQ(unjamGroupAbort(job.ends[0]), UNJAM_SUCCESS);
  EXPECT_EQ(unjamGroupDestroy(job.ends[0]), UNJAM_SUCCESS);
  EXPECT_EQ(unjamGroupDestroy(job.ends[1]), UNJAM_SUCCESS);
}

TEST(GroupAbort, RankThatHasCompletedItsPartIsNotUndone) {
  Pair job(2);
  float x = 1, y = 2;
  const unjamRequest_t a = all_reduce(job.ends[0], "k", &x);
  const unjamRequest_t b = all_reduce(job.ends[1], "k", &y);
  EXPECT_EQ(end_of(a), UNJAM_SUCCESS);
  UNJAM_CHECK(unjamGroupAbort(job.ends[0]));
  EXPECT_EQ(end_of(b), UNJAM_SUCCESS);
  EXPECT_EQ(y, 3.0F);
}

TEST(GroupAbort, BetweenProcesses) {
  const Layout processes = layout({1, 1});
  const auto said = run_layout(processes, default_config(), base_seed(), [](Job& job) {
    job.run([](Rank& rank) {
      unjamGroup_t group = nullptr, other = nullptr;
      UNJAM_CHECK(unjamGroupCreate(rank.context, nullptr, 0, "ends", &group));
      UNJAM_CHECK(unjamGroupCreate(rank.context, nullptr, 0, "goes on", &other));
      float x = 1;
      if (rank.rank == 0) {
        UNJAM_CHECK(unjamGroupAbort(group));
      } else if (const unjamResult_t r = end_of(all_reduce(group, nullptr, &x));
                 r != UNJAM_ERROR_PEER) {
        fail("rank 1 was told " + code_text(r));
      }
      UNJAM_CHECK(end_of(all_reduce(other, nullptr, &x)));
    });
    return std::string("done");
  });
  EXPECT_EQ(said.size(), 2U);
}

}  // namespace
}  // namespace unjam_test
