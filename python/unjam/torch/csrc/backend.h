// The c10d::Backend: torch's operations as unjam's.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "key.h"
#include "tensors.h"
#include "work.h"
#include "world.h"

namespace unjam_torch {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct UnjamOptions : c10d::Backend::Options {
  explicit UnjamOptions(std::chrono::milliseconds limit = kBackendDefaultTimeout)
      : c10d::Backend::Options("unjam", limit) {}
};

// What this rank has called, for unjam.check_order(). While it is on, each call adds a line.
class CallLog {
 public:
  static CallLog& get();
  void enable(bool on) { on_.store(on); }
  struct Line {
    std::string group, key, what;
    int source = -1, destination = -1;  // of a send or receive: ranks in the group
    std::string rest;                   // what else the ranks agree on
    std::string tensor;                 // its type and shape
    std::string site;                   // where it was called
  };
  void add(Line line);
  bool on() const { return on_.load(std::memory_order_relaxed); }
  std::vector<Line> take();
  void forked() { new (&mutex_) std::mutex; }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<Line> lines_;
};

class UnjamBackend : public c10d::Backend {
 public:
  UnjamBackend(std::shared_ptr<Groups> groups, int rank, c10::intrusive_ptr<UnjamOptions> options,
               std::string key_prefix, bool owns_world);
  ~UnjamBackend() override;

  const std::string getBackendName() const override { return "unjam"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsSplitting() const override { return true; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  c10d::ErrorType getError() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override;

  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  // The same group under a further key. It is local, needs no memory, and ends with this one.
  c10::intrusive_ptr<UnjamBackend> keyed(const std::string& name);

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& received,
                        std::vector<std::int64_t>& sent,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  const std::string& name() const { return name_; }
  const std::string& key_prefix() const { return prefix_; }
  std::shared_ptr<Groups> groups() const;  // throws once it is shut down
  std::shared_ptr<Groups> groups_or_null() const;
  std::shared_ptr<World> owned_world() const;
  std::shared_ptr<Groups> take_groups();

 private:
  class Launch;
  friend class Launch;

  int root(std::int64_t rank, const char* what) const;
  int peer(int rank, const char* what) const;
  WorkPtr exchange(Launch& launch, const Tensors& received, const Tensors& sent);
  std::vector<c10::intrusive_ptr<UnjamBackend>> keyed_ones() const;

  const c10::intrusive_ptr<UnjamOptions> options_;
  const std::string prefix_;
  const std::string name_;
  const bool owns_world_;
  const std::shared_ptr<GroupStatus> status_;
  std::atomic<std::uint64_t> sequence_{0};
  mutable std::mutex mutex_;
  std::shared_ptr<Groups> groups_;                            // null once it is shut down
  std::vector<c10::weak_intrusive_ptr<UnjamBackend>> keyed_;  // keyed()'s
};

// Shuts down, at the end of the process, the backends that nobody has shut down.
void shutdown_all(std::int64_t patience_us);
// In the child of a fork(): locks may be held by threads that are not there.
void forked();
std::vector<std::shared_ptr<World>> worlds();
// The default process group's; null if that is none of unjam's.
std::shared_ptr<World> default_world();

}  // namespace unjam_torch
