#include "api/nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <set>
#include <shared_mutex>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/hash.h"

namespace unjam::nccl {
namespace {

// How long a waiting thread does not look whether its communicator was aborted.
constexpr std::int64_t kLookUs = 50'000;
// As many requests are kept until somebody looks at them.
constexpr std::size_t kKept = 64;
// What is under way ends soon when its group was aborted.
constexpr std::int64_t kAbortUs = 10'000'000;

}  // namespace

Status aborted_status() { return invalid_usage("the communicator was aborted (ncclCommAbort)"); }

Communicator::~Communicator() {
  const bool ended = aborted_.load() || revoked_.load();
  for (unjamRequest* const request : requests_) {
    // (A group with something pending cannot be destroyed.)
    if (ended) unjamWait(request, kAbortUs);
    unjamRequestFree(request);
  }
  if (data_.group != nullptr) unjamGroupDestroy(data_.group);
  if (data_.talk != nullptr) unjamGroupDestroy(data_.talk);
}

void Communicator::begin(std::shared_ptr<Job> job, Membership membership, int rank) {
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
    data_ = std::move(membership);
    rank_ = rank;
    life_ = Life::kReady;
  }
  changed_.notify_all();
  if (aborted_.load()) {  // while it was made: nobody else ends it
    abort();
    close();
  }
}

void Communicator::fail(const Status& why) {
  {
    const std::lock_guard lock(mutex_);
    if (life_ == Life::kInProgress) life_ = Life::kFailed;
    if (failure_.ok()) failure_ = why;
  }
  changed_.notify_all();
}

Status Communicator::state() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok() && !revoked_.load()) return failure_;
    if (life_ == Life::kInProgress || finalizing_) {
      return {Code::kInProgress, "the communicator is being made, or ends"};
    }
  }
  if (revoked_.load()) {  // what was under way ends with errors, as the program wants it
    take_results(true);
    const std::lock_guard lock(mutex_);
    if (queued_.load() == 0 && requests_.empty()) return {};
    return {Code::kInProgress, "the communicator was revoked, and calls of it end"};
  }
  // Whether anything of the job has failed is known at once; whose call it was is looked up then.
  unjamResult_t error = UNJAM_SUCCESS;
  if (unjamGetAsyncError(job_->data(), &error, nullptr, 0) != UNJAM_SUCCESS ||
      error == UNJAM_SUCCESS) {
    return {};
  }
  return take_results(true);
}

Status Communicator::check_made() {
  if (aborted_.load()) return aborted_status();
  const std::lock_guard lock(mutex_);
  if (life_ == Life::kFailed) return {failure_.code, "the communicator failed: " + failure_.text};
  if (life_ == Life::kInProgress) {
    return invalid_argument(
        "the communicator is not ready: wait until ncclCommGetAsyncError no longer gives "
        "ncclInProgress");
  }
  return {};
}

Status Communicator::check_ready() {
  if (Status s = check_made(); !s.ok()) return s;
  if (revoked_.load()) return invalid_usage("the communicator was revoked (ncclCommRevoke)");
  const std::lock_guard lock(mutex_);
  if (closed_ || finalizing_) return invalid_usage("the communicator was finalized");
  return {};
}

// ---- operations ----

void Communicator::leave() {
  queued_.fetch_sub(1);
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Communicator::keep(unjamRequest_t request) {
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(request);
    if (requests_.size() < kKept) return;
  }
  take_results(false);
}

// Frees what is complete. all: of everything, else of the oldest.
Status Communicator::take_results(bool all) {
  const std::lock_guard lock(mutex_);
  std::deque<unjamRequest_t> left;
  while (!requests_.empty()) {
    unjamRequest* const request = requests_.front();
    int done = 0;
    const unjamResult_t result = unjamTest(request, &done);
    if (done == 0) {
      if (!all) break;
      left.push_back(request);
    } else {
      if (result != UNJAM_SUCCESS && failure_.ok()) {
        failure_ = from_unjam(result, unjamRequestError(request));
      }
      unjamRequestFree(request);
    }
    requests_.pop_front();
  }
  if (all) requests_ = std::move(left);
  return failure_;
}

void Communicator::wait_for_room() {
  take_results(false);
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

Status Communicator::flush() {
  std::unique_lock lock(mutex_);
  while (queued_.load() != 0 && !aborted_.load()) {
    changed_.wait_for(lock, std::chrono::microseconds(kLookUs));
  }
  while (!requests_.empty() && !aborted_.load()) {
    // (Taken out meanwhile: another thread may take results.)
    unjamRequest* const request = requests_.front();
    requests_.pop_front();
    lock.unlock();
    const unjamResult_t result = unjamWait(request, kLookUs);
    int done = 0;
    const bool pending =
        result == UNJAM_ERROR_TIMEOUT && unjamTest(request, &done) == UNJAM_SUCCESS && done == 0;
    lock.lock();
    if (pending) {
      requests_.push_front(request);
      continue;
    }
    if (result != UNJAM_SUCCESS && failure_.ok()) {
      failure_ = from_unjam(result, unjamRequestError(request));
    }
    unjamRequestFree(request);
  }
  return aborted_.load() ? aborted_status() : failure_;
}

// ---- operators ----

int Communicator::add_scale(const Scale& scale) {
  const std::lock_guard lock(mutex_);
  const int op = next_scale_++;
  scales_[op] = std::make_shared<const Scale>(scale);
  return op;
}

std::shared_ptr<const Scale> Communicator::scale_of(int op) {
  const std::lock_guard lock(mutex_);
  const auto found = scales_.find(op);
  return found == scales_.end() ? nullptr : found->second;
}

bool Communicator::remove_scale(int op) {
  const std::lock_guard lock(mutex_);
  return scales_.erase(op) != 0;
}

// ---- registered memory ----

std::shared_ptr<Registration> Communicator::add_registration(void* memory, std::size_t bytes) {
  auto made = std::make_shared<Registration>(job_, memory, bytes);
  const std::lock_guard lock(mutex_);
  std::erase_if(registrations_, [](const auto& one) { return one->ended(); });
  if (closed_) {  // meanwhile
    made->end();
  } else {
    registrations_.push_back(made);
  }
  return made;
}

// ---- the end ----

Status Communicator::finalize() {
  {
    const std::lock_guard lock(mutex_);
    if (life_ != Life::kReady || closed_) return failure_;
    finalizing_ = true;
  }
  const Status status = flush();
  const std::lock_guard lock(mutex_);
  finalizing_ = false;
  closed_ = true;
  return status;
}

void Communicator::abort() {
  aborted_.store(true);
  std::deque<unjamRequest_t> requests;
  {
    std::unique_lock lock(mutex_);
    changed_.notify_all();
    if (life_ != Life::kReady) return;  // begin() sees it
    requests.swap(requests_);
  }
  unjamGroupAbort(data_.group);
  unjamGroupAbort(data_.talk);
  for (unjamRequest* const request : requests) {
    unjamWait(request, kAbortUs);
    unjamRequestFree(request);
  }
}

void Communicator::revoke() {
  revoked_.store(true);
  unjamGroupAbort(data_.group);
}

void Communicator::close() {
  std::vector<std::shared_ptr<Registration>> ended;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    ended.swap(registrations_);
  }
  for (const auto& registration : ended) registration->end();
}

// ---- others made from it ----

Status Communicator::exchange(std::uint64_t turn, const void* mine, std::size_t bytes, void* all) {
  return nccl::exchange(data_.talk, "exchange " + std::to_string(turn), mine, bytes, all);
}

std::uint64_t Communicator::next_shrink(const std::vector<int>& excluded) {
  const std::lock_guard lock(mutex_);
  return shrinks_[std::set<int>(excluded.begin(), excluded.end())]++;
}

namespace {

Status begin(const std::shared_ptr<Communicator>& child, const std::shared_ptr<Job>& job,
             std::string name, std::vector<int> members, int rank) {
  Membership membership;
  if (Status s = make_membership(*job, std::move(name), std::move(members), membership); !s.ok()) {
    child->fail(s);
    return s;
  }
  child->begin(job, std::move(membership), rank);
  return {};
}

std::string name_of(const UniqueId& id) {
  char text[32];
  std::snprintf(text, sizeof(text), "nccl %016llx",
                static_cast<unsigned long long>(
                    hash_bytes(std::string_view(id.internal, sizeof(id.internal)))));
  return text;
}

}  // namespace

Status initialise(const std::shared_ptr<Communicator>& child, const UniqueId& id, int rank,
                  int size) {
  std::shared_ptr<Job> job;
  std::vector<int> members;
  if (Status s = meet(id, rank, size, child->device(), job, members); !s.ok()) {
    child->fail(s);
    return s;
  }
  return begin(child, job, name_of(id), std::move(members), rank);
}

Status split(Communicator& parent, std::uint64_t turn, int color, int key,
             const std::shared_ptr<Communicator>& child) {
  struct Wish {
    std::int32_t color, key;
  };
  const Wish mine{color, key};
  std::vector<Wish> wishes(static_cast<std::size_t>(parent.size()));
  if (Status s = parent.exchange(turn, &mine, sizeof(mine), wishes.data()); !s.ok()) {
    if (child != nullptr) child->fail(s);
    return s;
  }
  if (child == nullptr) return {};
  std::vector<int> ranks;  // of the parent
  for (int r = 0; r < parent.size(); ++r) {
    if (wishes[static_cast<std::size_t>(r)].color == color) ranks.push_back(r);
  }
  std::sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    const std::int32_t of_a = wishes[static_cast<std::size_t>(a)].key;
    const std::int32_t of_b = wishes[static_cast<std::size_t>(b)].key;
    return of_a != of_b ? of_a < of_b : a < b;
  });
  std::vector<int> members;
  int rank = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == parent.rank()) rank = static_cast<int>(i);
    members.push_back(parent.members()[static_cast<std::size_t>(ranks[i])]);
  }
  const std::string name =
      parent.name() + ".split" + std::to_string(turn) + "." + std::to_string(color);
  return begin(child, parent.job(), name, std::move(members), rank);
}

Status shrink(Communicator& parent, std::uint64_t turn, const std::vector<int>& excluded,
              const std::shared_ptr<Communicator>& child) {
  const std::set<int> out(excluded.begin(), excluded.end());
  std::string without;
  for (const int r : out) without += "-" + std::to_string(r);
  std::vector<int> members;
  int rank = 0;
  for (int r = 0; r < parent.size(); ++r) {
    if (out.count(r) != 0) continue;
    if (r == parent.rank()) rank = static_cast<int>(members.size());
    members.push_back(parent.members()[static_cast<std::size_t>(r)]);
  }
  const std::string name = parent.name() + ".shrink" + without + "." + std::to_string(turn);
  return begin(child, parent.job(), name, std::move(members), rank);
}

// ---- handles ----

namespace {

struct Handles {
  std::shared_mutex mutex;
  std::unordered_map<ncclComm_t, std::shared_ptr<Communicator>> all;
};
Handles& handles() {
  static Handles* const all = new Handles;  // outlives what runs at the end of the process
  return *all;
}

}  // namespace

ncclComm_t hand_out(std::shared_ptr<Communicator> comm) {
  // An address that no other handle has while the communicator lives.
  const auto handle = reinterpret_cast<ncclComm_t>(comm.get());
  const std::lock_guard lock(handles().mutex);
  handles().all[handle] = std::move(comm);
  return handle;
}

std::shared_ptr<Communicator> find(ncclComm_t handle) {
  const std::shared_lock lock(handles().mutex);
  const auto found = handles().all.find(handle);
  return found == handles().all.end() ? nullptr : found->second;
}

std::shared_ptr<Communicator> take_back(ncclComm_t handle) {
  const std::lock_guard lock(handles().mutex);
  const auto found = handles().all.find(handle);
  if (found == handles().all.end()) return nullptr;
  std::shared_ptr<Communicator> comm = std::move(found->second);
  handles().all.erase(found);
  return comm;
}

}  // namespace unjam::nccl
