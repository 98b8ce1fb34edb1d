// CUDA devices: calls in streams.
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "api/nccl/communicator.h"
#include "api/nccl/cuda_calls.h"
#include "api/nccl/machine.h"

namespace unjam::nccl {
namespace {

constexpr std::int64_t kScratchUs = 10'000'000;

// Operations that were called together, on their way into their streams.
class Launch {
 public:
  explicit Launch(std::vector<Operation> operations) : operations_(std::move(operations)) {}

  Status run() {
    for (const Operation& o : operations_) {
      if (Status s = cuda::check_stream(o.stream); !s.ok()) return s;
      streams_[o.comm.get()].insert(o.stream);
    }
    std::vector<OwnCopy> copies;
    if (Status s = take_own_copies(operations_, copies); !s.ok()) return s;
    // The group is one operation for each communicator: behind what all of its streams hold.
    if (Status s = join_streams(); !s.ok()) return s;
    Status status;
    for (const OwnCopy& c : copies) {
      if (!status.ok()) break;
      status =
          cuda::copy(c.recv.comm->device(), c.send.send, c.recv.recv, c.bytes(), c.recv.stream);
    }
    if (status.ok() && !copies.empty()) status = join_streams();
    std::vector<Called> called;
    for (std::size_t i = 0; i < operations_.size() && status.ok(); ++i) {
      status = call_one(i, called);
    }
    // Also where one was refused: the others are under way.
    for (Called& c : called) {
      const Status waits = wait_for(c);
      c.waited_for = waits.ok();
      if (status.ok()) status = waits;
    }
    for (const Called& c : called) {
      if (c.scratch != nullptr && (c.waited_for || is_over(c))) {
        cuda::leave_scratch(c.operation->comm->device(), c.scratch, c.operation->stream);
      }
      c.operation->comm->keep(c.request);
    }
    return status;
  }

 private:
  struct Called {
    const Operation* operation;
    unjamRequest_t request;
    bool in_order;
    void* scratch;
    bool waited_for;  // by its streams
  };

  Status join_streams() const {
    for (const auto& [comm, streams] : streams_) {
      if (streams.size() < 2) continue;
      const std::vector<void*> all(streams.begin(), streams.end());
      if (Status s = cuda::join(comm->device(), all); !s.ok()) return s;
    }
    return {};
  }

  Status call_one(std::size_t which, std::vector<Called>& called) {
    const Operation& o = operations_[which];
    Called c{&o, nullptr, may_go_in_order(operations_, which), nullptr, false};
    const void* input = o.send;
    if (o.scale != nullptr) {
      const int device = o.comm->device();
      const std::size_t elements = o.reduced_elements();
      const std::size_t bytes = elements * bytes_of(o.dtype);
      if (Status s = cuda::take_scratch(device, bytes, o.stream, &c.scratch); !s.ok()) return s;
      Status s = cuda::multiply(device, *o.scale, o.send, c.scratch, elements, o.stream);
      if (!s.ok()) {
        cuda::leave_scratch(device, c.scratch, o.stream);
        return s;
      }
      input = c.scratch;
    }
    const auto order = c.in_order ? UNJAM_STREAM_SYNC : UNJAM_STREAM_ASYNC;
    Status s = submit(o, input, order, &c.request);
    if (s.ok()) {
      called.push_back(c);
    } else if (c.scratch != nullptr) {
      cuda::leave_scratch(o.comm->device(), c.scratch, o.stream);
    }
    return s;
  }

  // Its own stream waits, unless the call is in the stream; and all others of its communicator.
  Status wait_for(const Called& c) const {
    for (void* const stream : streams_.at(c.operation->comm.get())) {
      if (c.in_order && stream == c.operation->stream) continue;
      const unjamResult_t result = unjamStreamWait(c.request, stream);
      if (result != UNJAM_SUCCESS) return from_unjam(result);
    }
    return {};
  }

  // Where no stream waits for it, this thread does. Its scratch stays if that takes too long: the
  // call may still read there.
  static bool is_over(const Called& c) {
    unjamWait(c.request, kScratchUs);
    int done = 0;
    unjamTest(c.request, &done);
    return done != 0;
  }

  std::vector<Operation> operations_;
  std::map<Communicator*, std::set<void*>> streams_;
};

class CudaMachine final : public Machine {
 public:
  unjamDevice_t kind() const override { return UNJAM_DEVICE_CUDA; }
  Status current_device(int& device) override { return cuda::current_device(device); }
  int multiprocessors(int device) override { return cuda::multiprocessors(device); }
  Status allocate(std::size_t bytes, void** memory) override {
    return cuda::allocate(bytes, memory);
  }
  Status release(void* memory) override { return cuda::release(memory); }
  Status launch(std::vector<Operation> operations) override {
    return Launch(std::move(operations)).run();
  }
};

}  // namespace

Machine& cuda_machine() {
  static CudaMachine* const machine = new CudaMachine;
  return *machine;
}

}  // namespace unjam::nccl
