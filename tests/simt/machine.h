// A machine that runs kernels of src/device/cuda/kernels on the CPU, in one OS thread: each thread
// of a block is a fiber. Who goes on is chosen by a seed, at every operation of base/atomics.h and
// device/cuda/hardware/atomics.cuh, at every vote of a warp, and at every barrier; warps are given
// speeds, which change, so that any of them may be late. The same seed gives the same run.
//
// __shared__ variables are thread_local here: the executable's thread-local memory is the block's
// that runs, and is exchanged as another one goes on.
//
// Time is counted in such steps. Memory is sequentially consistent: what is found is every order of
// operations, not what a fence would have to prevent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace unjam_simt {

class Block;

// A block, or one warp of it, stands still when the block has made so many steps, while others make
// so many.
inline constexpr std::uint32_t kAllWarps = ~0u;
struct Hold {
  std::uint32_t block = 0, warp = kAllWarps;
  std::uint64_t at = 0, steps = 0;
};

// A kernel's grid.
struct Launch {
  std::uint64_t number = 0;  // of the machine's launches
  std::uint32_t blocks = 1, threads = 32;
  std::function<void()> kernel;    // by each thread
  const Launch* behind = nullptr;  // in its stream
  // So many blocks have let the next launch begin, or have ended; and have ended.
  std::uint32_t let_next = 0, ended = 0;

  std::uint64_t late = 0;   // it begins so many steps
  std::uint64_t since = 0;  // behind this one, 0: not yet known
  std::vector<Hold> holds;
  bool dropped = false;

  bool is_over() const { return ended == blocks; }
  bool may_begin(std::uint64_t steps) {
    if (behind != nullptr && behind->let_next != behind->blocks) return false;
    if (since == 0) since = steps + 1;
    return steps >= since - 1 + late;
  }
};

class Machine {
 public:
  struct Limits {
    std::uint64_t most_steps = 20'000'000;
    std::uint32_t ns_per_step = 1;
    std::uint32_t steps_per_speed = 4000;  // of a block, at most: then its warps get other speeds
  };
  explicit Machine(std::uint64_t seed) : Machine(seed, Limits{}) {}
  Machine(std::uint64_t seed, Limits limits);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Behind another launch of its stream, or nullptr. Stays where it is.
  const Launch* launch(std::uint32_t blocks, std::uint32_t threads, std::function<void()> kernel,
                       const Launch* behind = nullptr);
  // It begins no sooner than so many steps behind when it could.
  void delay(const Launch* launch, std::uint64_t steps);
  void hold(const Launch* launch, const Hold& hold);
  // Its blocks do nothing more, wherever they are: as if their process had been killed.
  void drop(const Launch* launch) { of(launch).dropped = true; }
  // Until all have ended. An error: they do not.
  std::string run();
  // Between two steps of any fibers, by whom the machine is set up: all may be looked at.
  void each_step(std::uint64_t every, std::function<void()> look) {
    look_every_ = every;
    look_ = std::move(look);
  }

  std::uint64_t steps() const { return steps_; }
  std::uint64_t now_ns() const { return 1'000'000 + steps_ * limits_.ns_per_step; }

 private:
  friend class Block;
  Launch& of(const Launch* launch);
  void count_step();
  Block* choose();

  Limits limits_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Launch>> launches_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> able_;
  std::string error_;
  std::uint64_t steps_ = 0, look_every_ = 0;
  std::function<void()> look_;
};

// ---- what the running thread asks ----

struct Position {
  std::uint32_t thread = 0, threads = 0, block = 0, blocks = 0;
};
Position here();
bool runs();  // in a machine, not while one is set up
void step();  // others may go on
std::uint64_t now_ns();
// Of those in `mask`, which all come to it: value of each lane, in `values`.
void vote(std::uint32_t mask, std::uint64_t value, std::uint64_t (&values)[32]);
// A barrier of the block that so many threads come to; whether all of them said so.
bool meet(unsigned barrier, std::uint32_t threads, bool says, bool waits);
void wait_for_stream();
void let_next_begin();
std::uint64_t launch_number();
// The block's.
inline constexpr std::size_t kBlockMemoryBytes = std::size_t{227} << 10;
unsigned char* block_memory();

}  // namespace unjam_simt
