// The thread that carries out what a rank's lanes post for copy engines (engine/copy_server.h): a
// stream for each peer, of copies, and of the counts behind them.
//
// It may be held up by the driver, whose calls for copies wait while another thread of the process
// is in cudaFree or the like; nothing depends on it (engine/copy_ring.h). It polls while calls are
// under way that may post, now and then while there were some lately, and else sleeps.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda/host/first_launch.h"
#include "engine/copy_server.h"

namespace unjam {

class CopyThread : private CopyEngines {
 public:
  struct Options {
    int device = 0;
    std::uint32_t rank = 0, ranks = 1;
    std::uint64_t lane_pitch = 0;  // see CopyServer
    std::uint64_t most_bytes = 0;  // issued together, for a peer
    // For tests: posts are never looked at, as if the driver held the thread up for ever.
    bool stuck = false;
  };
  explicit CopyThread(const Options& options) : o_(options) {}
  ~CopyThread() override { stop(); }
  CopyThread(const CopyThread&) = delete;
  CopyThread& operator=(const CopyThread&) = delete;

  // The rings, [ranks], in memory that the device reaches; what lanes may post to from then
  // on. nullptr: `error` says why.
  CopyRing* allocate(std::string& error);
  // `done`: [ranks], in the device's memory. False: `error` says why.
  bool start(std::uint64_t* done, std::string& error);
  // What is issued has come to its end; nothing more is.
  void stop();

  // Before a call is launched that may post. By any thread.
  void expect();

  struct Figures {
    std::uint64_t posts = 0, copies = 0, batches = 0, bytes = 0, dropped = 0;
  };
  Figures figures() const {
    const auto now = [](const std::atomic<std::uint64_t>& x) {
      return x.load(std::memory_order_relaxed);
    };
    return {now(posts_), now(copies_), now(batches_), now(bytes_), now(dropped_)};
  }
  // What the driver has refused, if it has: then nothing more is carried out. "": nothing.
  std::string failure() const;

 private:
  bool issue(std::uint32_t peer, const std::vector<CopyRows>& copies, std::uint64_t done) override;
  std::uint64_t in_flight(std::uint32_t peer) override;
  bool copy(cudaStream_t stream, const std::vector<CopyRows>& copies, std::string& error);
  bool count(std::uint32_t peer, std::uint64_t done, std::string& error);
  void run();
  // `expected`: expected_ns_, as `idle_ns` was made of it.
  void sleep(std::uint64_t idle_ns, std::uint64_t expected);

  // One peer's.
  struct Peer {
    cudaStream_t stream = nullptr;
    std::uint64_t issued = 0;           // batches
    std::uint64_t* finished = nullptr;  // of them, as the stream has stored it; pinned
  };

  const Options o_;
  void* pinned_ = nullptr;
  CopyRing* rings_ = nullptr;
  std::uint64_t* done_ = nullptr;
  std::vector<Peer> peers_;  // by rank
  FirstLaunch first_launch_;
  decltype(&cuStreamBatchMemOp) batch_mem_op_ = nullptr;
  bool copies_batches_ = true;  // the driver does
  std::string refused_;         // why the latest that the driver has refused was
  // Filled anew for each batch.
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<std::size_t> sizes_;

  std::atomic<std::uint64_t> posts_{0}, copies_{0}, batches_{0}, bytes_{0}, dropped_{0};
  std::atomic<std::uint64_t> expected_ns_{0};
  std::atomic<bool> asleep_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace unjam
