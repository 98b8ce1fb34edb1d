// Where the ranks of this process find windows (transport/windows.h): those of each other, and
// those of other processes' ranks that they can map.
//
// Each rank has a table that its engines read. On the host an entry is made at once. On CUDA
// devices a thread makes them, for whatever maps memory may wait for all that a device does, and so
// for a stream that waits for the very rank that registers: nobody may wait for that thread. Until
// it has come to a window, and for good where it cannot map it, peers use slots.
//
// A mapping into another process is closed when the window's owner says that nobody stores there,
// and kept to the end where that is not sure: if a call into it has failed, or its owner has.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/cuda_driver.h"
#include "runtime/shared_pages.h"
#include "transport/windows.h"

namespace unjam {

class WindowMaps {
 public:
  // let_go: a window of another process's rank was closed, as that was asked for. Called without
  // a lock.
  using LetGo = std::function<void(int owner, std::uint64_t serial)>;
  WindowMaps(int ranks, LetGo let_go);
  ~WindowMaps();  // as stop()
  WindowMaps(const WindowMaps&) = delete;
  WindowMaps& operator=(const WindowMaps&) = delete;

  // The table of a rank of this process: whole pages of zeroes at first. Null: `error`.
  WindowEntry* table(int rank, std::string& error);
  std::uint64_t table_bytes() const;

  // A rank of this process that may store into a window.
  struct Viewer {
    int rank = 0;
    int device = -1;  // -1: on the host
  };
  // A window: of a rank of this process, which has a base, or of another's, which has a name.
  struct Source {
    int owner = 0;
    std::uint64_t serial = 0;
    unsigned char* base = nullptr;  // rounded down to a unit
    int device = -1;
    std::optional<WindowName> name;
  };
  // cuda: null on the host. Viewers may have yet to begin.
  void add(CudaDriver* cuda, const Source& source, const std::vector<Viewer>& viewers);
  // False: there is none. `stored_into`: somebody may be at it, so mappings stay.
  bool remove(int owner, std::uint64_t serial, bool stored_into);
  // The same of all windows of a rank that has left, or is gone.
  void forget(int owner, bool stored_into);
  // Nothing is mapped any more. No engine of this process may run.
  void stop();

  // Windows of peers, as a rank of this process has them.
  struct Usage {
    std::uint64_t mapped = 0;
    std::uint64_t awaited = 0;      // the thread has yet to come to them
    std::uint64_t unreachable = 0;  // they cannot be mapped
    std::string why;                // of the latest of those; "": there was none
  };
  Usage usage(int rank) const;

 private:
  struct Record {
    CudaDriver* cuda = nullptr;
    Source source;
    std::vector<Viewer> viewers;  // that have yet to have it, or to learn that they cannot
    std::vector<Viewer> mapped, unreachable;
  };
  // What was mapped of another process's.
  struct Mapping {
    CudaDriver* cuda = nullptr;
    int device = 0;
    WindowName name;
  };
  struct Job {
    int owner = 0;
    std::uint64_t serial = 0;
    bool closes = false;
    std::vector<Mapping> mappings;  // to be closed
  };
  using Id = std::pair<int, std::uint64_t>;  // owner, serial

  WindowEntry* make_table(int rank, std::string& error);  // with the lock
  std::uint64_t table_entries() const { return static_cast<std::uint64_t>(ranks_) * kWindows; }
  WindowEntry& entry(const Viewer& viewer, const Id& id);
  void drop(const Id& id, bool stored_into);  // with the lock
  void queue(Job job);                        // with the lock
  void work();
  void open(const Job& job);
  static void close(const std::vector<Mapping>& mappings);

  const int ranks_;
  const LetGo let_go_;
  mutable std::mutex mutex_;
  std::map<int, SharedPages<WindowEntry>> tables_;  // by rank
  std::map<Id, Record> records_;
  std::map<int, std::string> why_;  // by rank, see Usage
  std::vector<Mapping> kept_;
  std::deque<Job> jobs_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace unjam
