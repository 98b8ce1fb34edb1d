#include "device/cuda/host/copy_thread.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/pause.h"
#include "device/cuda/host/cuda_error.h"

namespace unjam {
namespace {

// How long it polls, and then looks every now and then, since a call was expected or something was
// posted. (A call may begin much later than it was launched; what then waits for the first look is
// less than lanes' patience.)
constexpr std::uint64_t kPollNs = 2'000'000, kLookNs = 2'000'000'000;
constexpr useconds_t kLookApartUs = 20;

}  // namespace

CopyRing* CopyThread::allocate(std::string& error) {
  const OnDevice on(o_.device);
  const std::size_t rings = o_.ranks * sizeof(CopyRing);
  const std::size_t words = o_.ranks * kFalseSharingBytes;
  if (!cuda_ok(cudaHostAlloc(&pinned_, rings + words, cudaHostAllocPortable | cudaHostAllocMapped),
               "allocating pinned memory for copies", error)) {
    pinned_ = nullptr;
    return nullptr;
  }
  std::memset(pinned_, 0, rings + words);
  rings_ = static_cast<CopyRing*>(pinned_);
  peers_.resize(o_.ranks);
  for (std::uint32_t p = 0; p < o_.ranks; ++p) {
    peers_[p].finished = reinterpret_cast<std::uint64_t*>(static_cast<unsigned char*>(pinned_) +
                                                          rings + p * kFalseSharingBytes);
  }
  return rings_;
}

bool CopyThread::start(std::uint64_t* done, std::string& error) {
  const OnDevice on(o_.device);
  done_ = done;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how{};
  if (!cuda_ok(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000,
                                                cudaEnableDefault, &how),
               "cuStreamBatchMemOp", error) ||
      found == nullptr) {
    if (error.empty()) error = "the driver has no cuStreamBatchMemOp";
    return false;
  }
  batch_mem_op_ = reinterpret_cast<decltype(batch_mem_op_)>(found);
  for (std::uint32_t p = 0; p < o_.ranks; ++p) {
    if (p == o_.rank) continue;
    Peer& peer = peers_[p];
    if (!cuda_ok(cudaStreamCreateWithFlags(&peer.stream, cudaStreamNonBlocking),
                 "creating a stream for copies", error)) {
      return false;
    }
    // What gives the stream its queue, see first_launch.h.
    const std::unique_lock first = first_launch_.guard(peer.stream);
    if (!count(p, 0, error)) return false;
  }
  thread_ = std::thread([this] { run(); });
  return true;
}

void CopyThread::stop() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  if (pinned_ == nullptr) return;
  const OnDevice on(o_.device);
  for (Peer& peer : peers_) {
    if (peer.stream == nullptr) continue;
    // (Copies read and write what is freed behind this.)
    cudaStreamSynchronize(peer.stream);
    cudaStreamDestroy(peer.stream);
    peer.stream = nullptr;
  }
  cudaFreeHost(pinned_);
  pinned_ = nullptr;
}

void CopyThread::expect() {
  expected_ns_.store(monotonic_ns(), std::memory_order_seq_cst);
  // It says that it sleeps, then looks once more.
  if (!asleep_.load(std::memory_order_seq_cst)) return;
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

std::string CopyThread::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::uint64_t CopyThread::in_flight(std::uint32_t peer) {
  return peers_[peer].issued - load_acquire(*peers_[peer].finished);
}

bool CopyThread::issue(std::uint32_t to, const std::vector<CopyRows>& copies, std::uint64_t done) {
  Peer& peer = peers_[to];
  if (!copy(peer.stream, copies, refused_)) return false;
  ++peer.issued;
  return count(to, done, refused_);
}

bool CopyThread::copy(cudaStream_t stream, const std::vector<CopyRows>& copies,
                      std::string& error) {
  const auto address = [](std::uint64_t at) {
    return reinterpret_cast<void*>(at);  // NOLINT(performance-no-int-to-ptr)
  };
  targets_.clear();
  sources_.clear();
  sizes_.clear();
  for (const CopyRows& c : copies) {
    if (c.rows == 1) {
      targets_.push_back(address(c.target));
      sources_.push_back(address(c.source));
      sizes_.push_back(c.bytes);
    } else if (!cuda_ok(cudaMemcpy2DAsync(address(c.target), c.target_pitch, address(c.source),
                                          c.source_pitch, c.bytes, c.rows, cudaMemcpyDeviceToDevice,
                                          stream),
                        "copying rows by a copy engine", error)) {
      return false;
    }
  }
  if (sizes_.size() > 1 && copies_batches_) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
    const cudaError_t code = cudaMemcpyBatchAsync(targets_.data(), sources_.data(), sizes_.data(),
                                                  sizes_.size(), &attributes, &first, 1, stream);
    if (code == cudaSuccess) return true;
    cudaGetLastError();
    if (code != cudaErrorNotSupported && code != cudaErrorCallRequiresNewerDriver) {
      return cuda_ok(code, "copying by copy engines", error);
    }
    copies_batches_ = false;
  }
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (!cuda_ok(
            cudaMemcpyAsync(targets_[i], sources_[i], sizes_[i], cudaMemcpyDeviceToDevice, stream),
            "copying by a copy engine", error)) {
      return false;
    }
  }
  return true;
}

bool CopyThread::count(std::uint32_t to, std::uint64_t done, std::string& error) {
  const auto store = [](const std::uint64_t* where, std::uint64_t value) {
    CUstreamBatchMemOpParams op{};
    op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    op.writeValue.address = reinterpret_cast<CUdeviceptr>(where);
    op.writeValue.value64 = value;
    op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    return op;
  };
  // Behind all that was copied.
  CUstreamBatchMemOpParams stores[] = {store(done_ + to, done),
                                       store(peers_[to].finished, peers_[to].issued)};
  const CUresult code = batch_mem_op_(peers_[to].stream, 2, stores, 0);
  if (code == CUDA_SUCCESS) return true;
  error = "counting copies: the driver's error " + std::to_string(static_cast<int>(code));
  return false;
}

void CopyThread::sleep(std::uint64_t idle_ns, std::uint64_t expected) {
  if (idle_ns < kPollNs) {
    pause_core();
  } else if (idle_ns < kLookNs) {
    usleep(kLookApartUs);
  } else {
    // (Seq-cst, as in expect(): either this sees the call, or that sees that this sleeps.)
    std::unique_lock lock(mutex_);
    asleep_.store(true, std::memory_order_seq_cst);
    changed_.wait(lock, [&] {
      return stopping_ || expected_ns_.load(std::memory_order_seq_cst) != expected;
    });
    asleep_.store(false, std::memory_order_seq_cst);
  }
}

void CopyThread::run() {
  pthread_setname_np(pthread_self(), "unjam copies");
  cudaSetDevice(o_.device);
  const BesideCapture beside;
  CopyServer server(rings_, o_.ranks, o_.lane_pitch, o_.most_bytes);
  std::uint64_t found_ns = 0;
  for (std::uint32_t round = 0;; ++round) {
    const auto swept = o_.stuck ? CopyServer::Swept::kNothing : server.sweep(*this);
    if (swept == CopyServer::Swept::kNothing) {
      const std::uint64_t expected = expected_ns_.load(std::memory_order_seq_cst);
      const std::uint64_t now = monotonic_ns();
      sleep(now - std::min(std::max(found_ns, expected), now), expected);
    } else {
      found_ns = monotonic_ns();
      posts_.store(server.posts(), std::memory_order_relaxed);
      copies_.store(server.copies(), std::memory_order_relaxed);
      batches_.store(server.batches(), std::memory_order_relaxed);
      bytes_.store(server.bytes(), std::memory_order_relaxed);
      dropped_.store(server.dropped(), std::memory_order_relaxed);
    }
    if (swept != CopyServer::Swept::kFailed && round % 64 != 0) continue;
    const std::lock_guard lock(mutex_);
    if (swept == CopyServer::Swept::kFailed) failure_ = refused_;
    if (stopping_ || !failure_.empty()) return;
  }
}

}  // namespace unjam
