// An ncclComm_t: a group of a job, the operations that it has under way, and what has failed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "api/nccl/job.h"
#include "api/nccl/operation.h"
#include "api/nccl/registration.h"
#include "api/nccl/status.h"
#include "api/nccl/types.h"
#include "unjam/unjam.h"

namespace unjam::nccl {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // In progress until begin() or fail().
  Communicator(int device, bool blocking) : device_(device), blocking_(blocking) {}
  ~Communicator();

  int device() const { return device_; }
  bool blocking() const { return blocking_; }
  // Of those that have begun (begin() sets it, and nothing changes it before the destructor: a call
  // that another thread is in may use the groups although the communicator was aborted):
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(data_.members.size()); }
  const std::shared_ptr<Job>& job() const { return job_; }
  unjamGroup_t group() const { return data_.group; }
  const std::string& name() const { return data_.name; }
  const std::vector<int>& members() const { return data_.members; }

  void begin(std::shared_ptr<Job> job, Membership membership, int rank);
  void fail(const Status& why);
  // What ncclCommGetAsyncError says.
  Status state();
  // Whether it was made; and whether it takes calls now.
  Status check_made();
  Status check_ready();
  bool aborted() const { return aborted_.load(); }
  bool revoked() const { return revoked_.load(); }

  // ---- operations ----
  // What is between these is not submitted yet.
  void enter() { queued_.fetch_add(1); }
  void leave();
  // A request of an operation that was submitted; takes it over.
  void keep(unjamRequest_t request);
  // Waits for some of what is under way, for a moment: there may be room then.
  void wait_for_room();
  // Waits until everything has ended that was called, or it is aborted.
  Status flush();

  // ---- operators ----
  int add_scale(const Scale& scale);
  std::shared_ptr<const Scale> scale_of(int op);
  bool remove_scale(int op);

  // ---- registered memory ----
  std::shared_ptr<Registration> add_registration(void* memory, std::size_t bytes);

  // ---- the communicator's end ----
  // Waits for what is under way. May be called again.
  Status finalize();
  // Ends what is under way with an error, also on the other ranks.
  void abort();
  // The same, but that others can be made from it. state() says when it is quiet.
  void revoke();
  // Behind finalize() or abort(): takes no more calls, and ends its registrations. The groups go
  // with the last call that holds the communicator.
  void close();

  // ---- others made from it ----
  // All members give `bytes`; each gets everybody's. Collective, of those with the same turn.
  Status exchange(std::uint64_t turn, const void* mine, std::size_t bytes, void* all);
  // Turns are taken when the program calls, in its order: what is made then goes in any.
  std::uint64_t next_split() { return splits_.fetch_add(1); }
  std::uint64_t next_shrink(const std::vector<int>& excluded);

 private:
  enum class Life : std::uint8_t { kInProgress, kReady, kFailed };
  Status take_results(bool all);

  const int device_;
  const bool blocking_;
  int rank_ = 0;
  std::shared_ptr<Job> job_;
  Membership data_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Life life_ = Life::kInProgress;
  bool finalizing_ = false;
  bool closed_ = false;
  Status failure_;
  std::deque<unjamRequest_t> requests_;  // under way, or not looked at yet; the oldest first
  std::map<int, std::shared_ptr<const Scale>> scales_;
  std::vector<std::shared_ptr<Registration>> registrations_;
  std::map<std::set<int>, std::uint64_t> shrinks_;
  int next_scale_ = static_cast<int>(Op::kNumOps);

  std::atomic<std::uint64_t> queued_{0};
  std::atomic<std::uint64_t> splits_{0};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> revoked_{false};
};

// What calls of one that was aborted get.
Status aborted_status();

// The handles of programs. A handle that is none, or is none any more, gives null.
ncclComm_t hand_out(std::shared_ptr<Communicator> comm);
std::shared_ptr<Communicator> find(ncclComm_t handle);
std::shared_ptr<Communicator> take_back(ncclComm_t handle);

// What ncclCommInitRank, ncclCommSplit and ncclCommShrink make: `child` begins, or has failed. Of a
// split without a colour it is null.
Status initialise(const std::shared_ptr<Communicator>& child, const UniqueId& id, int rank,
                  int size);
Status split(Communicator& parent, std::uint64_t turn, int color, int key,
             const std::shared_ptr<Communicator>& child);
Status shrink(Communicator& parent, std::uint64_t turn, const std::vector<int>& excluded,
              const std::shared_ptr<Communicator>& child);

}  // namespace unjam::nccl
