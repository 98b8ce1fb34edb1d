// What libunjam_cuda.so offers to libunjam.so, which opens it where it is needed: the memory and
// the engines of ranks on CUDA devices. No symbol of the one is used by the other but the factory.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/daemon.h"
#include "transport/arena.h"
#include "transport/windows.h"

namespace unjam {

// Grows with every change of what stands in this header or below it: the two libraries are made
// together.
inline constexpr int kCudaDriverVersion = 12;

// Addresses of a rank's arena, the same for all devices of this process, and the device memory that
// stands behind parts of it. Any thread. What adds to it waits for nothing that a device does.
class DeviceArena {
 public:
  virtual ~DeviceArena() = default;
  virtual unsigned char* data() const = 0;
  // Of its device's memory, for that device alone. Not cleared.
  virtual bool add(std::uint64_t offset, std::uint64_t bytes, std::string& error) = 0;
  // What another process has added there and shared, for no device yet. Takes the descriptor in any
  // case.
  virtual bool adopt(std::uint64_t offset, std::uint64_t bytes, int fd, std::string& error) = 0;
  // Of the part that begins there: a descriptor for other processes; -1: `error`.
  virtual int share(std::uint64_t offset, std::string& error) = 0;
  // Lets a device of this process read and write it.
  virtual bool map_for(int device, std::uint64_t offset, std::string& error) = 0;
  // Bytes of all parts.
  virtual std::uint64_t bytes() const = 0;
};

// Memory of cudaMalloc(), as other processes find it.
struct WindowName {
  std::array<unsigned char, 64> allocation{};  // CUDA's name of it
  std::uint64_t offset = 0;                    // in bytes
};

struct CudaRankOptions {
  int device = 0;
  std::uint32_t rank = 0;
  ArenaShape shape;
  EnginePolicy policy;
  std::uint32_t slots = 0;  // invocations under way at most
  std::uint32_t keys = 0;   // whose state is kept at most
  std::uint32_t block_threads = 512;
  bool shares_device = false;                 // with another rank of this process
  std::uint64_t trace_events = 0;             // a lane
  bool in_stream = true;                      // calls in streams may run without the engine
  bool lines = false;                         // long packets are lines
  bool whole_lines = false;                   // see CudaDriver::lines_come_whole()
  std::uint32_t in_stream_patience_us = 200;  // of those through slots: the least wait for a peer
  bool in_stream_overlap = true;              // and whether they may begin as what is in front ends
  bool copies = false;                        // lanes may ask copy engines, see engine/copy_ring.h
  bool copies_stuck = false;                  // for tests: nobody carries them out
  std::uint64_t copies_in_flight = 0;         // bytes a peer, at most
  std::vector<unsigned char*> bases;          // of all ranks' arenas
  std::vector<void*> links;        // of all ranks: where host memory for HostLink is, see below
  WindowEntry* windows = nullptr;  // the rank's table, in host memory that the device reaches
  Room* rooms = nullptr;           // likewise
  // To be called, without a lock, every now and then while the engine has work: lanes may want
  // more of rooms.
  std::function<void()> look_at_wishes;
};

// Host memory of each rank that its peers' devices reach: in its shared host memory, behind the
// announcements.
inline constexpr std::uint64_t kLinkOffset = 16384;
inline constexpr std::uint64_t kLinkBytes = 65536;

class CudaDriver {
 public:
  virtual ~CudaDriver() = default;
  // How many devices there are; 0: `why` not.
  virtual int devices(std::string& why) = 0;
  // The calling thread's current device.
  virtual int current() = 0;
  virtual std::string name(int device) = 0;
  // How many SMs it has; 0: it does not say.
  virtual int sms(int device) = 0;
  // Whether a line of 64 bytes that a warp of one GPU of this machine stores into another's memory
  // in one instruction comes there whole. The same for all processes of the machine that see the
  // same GPUs through NVML, whatever CUDA shows them. (Why, or why not: StreamDaemon::footprint().)
  virtual bool lines_come_whole() = 0;

  // Its first part, of `base` bytes, is there at once, and zeroed.
  virtual std::unique_ptr<DeviceArena> create_arena(int device, std::uint64_t bytes,
                                                    std::uint64_t base, std::string& error) = 0;
  // Of another process, by way of a device of this one. Takes the descriptor, of the first part, in
  // any case.
  virtual std::unique_ptr<DeviceArena> adopt_arena(int device, int fd, std::uint64_t bytes,
                                                   std::uint64_t base, std::string& error) = 0;
  // Lets all devices of this process reach host memory (page-aligned). Once for each memory.
  virtual bool register_host(void* memory, std::uint64_t bytes, std::string& error) = 0;
  virtual void unregister_host(void* memory) = 0;

  // ---- windows (unjamMemRegister()) ----
  // Whether all of that memory is one allocation's of cudaMalloc(), on that device.
  virtual bool check_window(int device, const void* memory, std::uint64_t bytes,
                            std::string& error) = 0;
  // For other processes.
  virtual bool name_window(int device, const void* memory, WindowName& name,
                           std::string& error) = 0;
  // The next ones may wait for what the devices do: without locks, by a thread for which nobody
  // waits.
  // Lets `device` store into what cudaMalloc() has given, or will, on another device of this
  // process.
  virtual bool reach(int device, int other, std::string& error) = 0;
  // Maps for `device` what another process has named, the whole allocation; where the name's memory
  // is; nullptr: `error`. To be closed as often as it was opened.
  virtual unsigned char* open_window(int device, const WindowName& name, std::string& error) = 0;
  virtual void close_window(int device, const WindowName& name) = 0;

  // Device memory that a rank's engine would take.
  virtual std::uint64_t engine_bytes(const CudaRankOptions& options) = 0;
  // Starts a rank's engine. `copy`: the host's side of its state: cq.words, cq.capacity, cancelled
  // and the lanes' numbers are set. Null: `error`.
  virtual std::unique_ptr<StreamDaemon> start(const CudaRankOptions& options, RankState& copy,
                                              std::string& error) = 0;
};

using CudaDriverFactory = CudaDriver* (*)(int version);
inline constexpr const char* kCudaDriverFactory = "unjam_cuda_driver";

}  // namespace unjam
