// News of failures while a thread of the user's holds a context's lock for as long as it likes
// (FailureNotices): whoever tells must not wait for it, what is in the engine must end, and nothing
// may be forgotten when it lets go at last.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "runtime/context.h"
#include "tests/support/job.h"

namespace unjam {

// A call that holds the lock and does not return.
class StuckCall {
 public:
  explicit StuckCall(const std::shared_ptr<Context>& context)
      : context_(context), lock_(context->mutex_) {}

  void returns() { lock_.unlock(); }
  // Whether the engine has ended something that nobody has taken out of the CQ.
  bool engine_has_ended_something() const {
    RingCq& cq = context_->memory_->rank().cq;
    const std::uint64_t h = load_relaxed(cq.head);
    return load_acquire(cq.words[h % cq.capacity]) >> 24 == ((h + 1) & 0xffffffffffull);
  }
  // What a call would meet that is only about to enter the engine: whether it is cancelled there,
  // and why.
  std::pair<bool, Result> enter(unjamGroup& group, const std::string& key, std::uint64_t n) {
    Key k;
    k.group = &group;
    k.state.tag = key_tag(group, key);
    Submitted s;
    s.key = &k;
    s.n = n;
    const std::uint16_t slot = context_->free_slots_.back();
    context_->enter_slot(slot, s);
    const bool cancelled = load_acquire(context_->memory_->rank().cancelled[slot]) != 0;
    return {cancelled, context_->notices_.leave(slot)};
  }

 private:
  const std::shared_ptr<Context> context_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace unjam

namespace unjam_test {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class News : public testing::Test {
 protected:
  static constexpr std::size_t kCount = 100;

  // All ranks' part of an all-reduce that waits for those that do not call.
  unjamRequest_t call(int rank, const char* key) {
    unjamRequest_t request = nullptr;
    UNJAM_CHECK(unjamAllReduce(job_.all(rank), key, in_[rank], out_[rank], kCount, UNJAM_FLOAT32,
                               UNJAM_SUM, nullptr, &request));
    return request;
  }
  const std::shared_ptr<unjam::Context>& context(int rank) const { return job_.all(rank)->context; }
  // In a thread of its own, which must be through with it while others hold what they hold.
  void tell(const std::function<void()>& news) {
    std::atomic<bool> told{false};
    teller_ = std::thread([news, &told] {
      news();
      told.store(true);
    });
    EXPECT_TRUE(eventually([&] { return told.load(); })) << "who tells is stuck";
    stuck_->returns();
    teller_.join();
  }

  float in_[3][kCount] = {}, out_[3][kCount] = {};
  Job job_{3};
  std::unique_ptr<unjam::StuckCall> stuck_;
  std::thread teller_;
};

TEST_F(News, OfACallThatWasRefused) {
  unjamRequest_t of_0 = call(0, "k"), of_1 = call(1, "k"), other = call(0, "other");
  stuck_ = std::make_unique<unjam::StuckCall>(context(0));
  tell([&] {
    context(0)->fail_call(unjam::key_tag(*job_.all(0), "k"), 0,
                          {UNJAM_ERROR_MISMATCH, "they differ"});
    EXPECT_TRUE(eventually([&] { return stuck_->engine_has_ended_something(); }))
        << "what it may wait for goes on";
    // As if the call that is stuck had not been in the engine before.
    const auto [cancelled, why] = stuck_->enter(*job_.all(0), "k", 1);
    EXPECT_TRUE(cancelled);
    EXPECT_EQ(why.message, "they differ");
    EXPECT_FALSE(stuck_->enter(*job_.all(0), "other", 1).first);
  });
  EXPECT_TRUE(
      contains(wait_error(job_.context(0), of_0, UNJAM_ERROR_MISMATCH, "rank 0"), "they differ"));
  unjamRequest_t more = nullptr;
  EXPECT_EQ(unjamAllReduce(job_.all(0), "k", in_[0], out_[0], kCount, UNJAM_FLOAT32, UNJAM_SUM,
                           nullptr, &more),
            UNJAM_ERROR_MISMATCH);
  // Other keys go on.
  unjamRequest_t other_1 = call(1, "other"), other_2 = call(2, "other");
  wait_ok(job_.context(0), other, "rank 0");
  wait_ok(job_.context(1), other_1, "rank 1");
  wait_ok(job_.context(2), other_2, "rank 2");
  UNJAM_CHECK(unjamAbort(job_.context(1)));
  wait_error(job_.context(1), of_1, UNJAM_ERROR_ABORTED, "rank 1");
}

TEST_F(News, IsHeardByTheNextCall) {
  unjamRequest_t first[] = {call(0, "k"), call(1, "k"), call(2, "k")};
  for (const int r : {0, 1, 2}) wait_ok(job_.context(r), first[r], "rank " + std::to_string(r));
  const std::uint64_t tag = unjam::key_tag(*job_.all(0), "k");
  stuck_ = std::make_unique<unjam::StuckCall>(context(0));
  tell([&] { context(0)->fail_call(tag, 1, {UNJAM_ERROR_MISMATCH, "they differ"}); });
  const std::string why = wait_error(job_.context(0), call(0, "k"), UNJAM_ERROR_MISMATCH, "rank 0");
  EXPECT_TRUE(contains(why, "they differ")) << why;
}

TEST_F(News, OfAPeerThatIsGone) {
  unjamRequest_t of_0 = call(0, "k"), of_2 = call(2, "k");
  stuck_ = std::make_unique<unjam::StuckCall>(context(0));
  tell([&] {
    UNJAM_CHECK(unjamAbort(job_.context(1)));
    // Nor does anybody else wait behind the one that is stuck.
    const std::string of_2_why = wait_error(job_.context(2), of_2, UNJAM_ERROR_PEER, "rank 2");
    EXPECT_TRUE(contains(of_2_why, "rank 1 is gone")) << of_2_why;
    EXPECT_TRUE(eventually([&] { return stuck_->engine_has_ended_something(); }))
        << "what it may wait for goes on";
    const auto [cancelled, why] = stuck_->enter(*job_.all(0), "other", 0);
    EXPECT_TRUE(cancelled);
    EXPECT_EQ(why.code, UNJAM_ERROR_PEER);
  });
  const std::string why = wait_error(job_.context(0), of_0, UNJAM_ERROR_PEER, "rank 0");
  EXPECT_TRUE(contains(why, "rank 1 is gone")) << why;
  unjamRequest_t more = nullptr;
  EXPECT_EQ(unjamAllReduce(job_.all(0), "other", in_[0], out_[0], kCount, UNJAM_FLOAT32, UNJAM_SUM,
                           nullptr, &more),
            UNJAM_ERROR_PEER);
}

TEST_F(News, OfTheRanksOwnAbort) {
  unjamRequest_t of_0 = call(0, "k"), of_1 = call(1, "k");
  stuck_ = std::make_unique<unjam::StuckCall>(context(0));
  tell([&] {
    UNJAM_CHECK(unjamAbort(job_.context(0)));
    EXPECT_TRUE(eventually([&] { return stuck_->engine_has_ended_something(); }))
        << "what it may wait for goes on";
    const std::string why = wait_error(job_.context(1), of_1, UNJAM_ERROR_PEER, "rank 1");
    EXPECT_TRUE(contains(why, "rank 0 is gone")) << why;
  });
  unjamRequest_t more = nullptr;
  EXPECT_EQ(unjamAllReduce(job_.all(0), "other", in_[0], out_[0], kCount, UNJAM_FLOAT32, UNJAM_SUM,
                           nullptr, &more),
            UNJAM_ERROR_ABORTED);
  wait_error(job_.context(0), of_0, UNJAM_ERROR_ABORTED, "rank 0");
}

}  // namespace
}  // namespace unjam_test
