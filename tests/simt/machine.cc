#include "tests/simt/machine.h"

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "tests/support/fiber_switch.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace unjam_simt {
namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10;
// Of the steps at which others could go on, one in so many is taken.
constexpr std::uint64_t kStays = 6;
constexpr std::uint32_t kFastest = 64;
// Turns of a block's fibers before another block goes on, at most.
constexpr std::uint64_t kTurns = 64;

// Stacks, used again: to map them takes longer than what most fibers do.
class Stacks {
 public:
  ~Stacks() {
    for (void* const stack : free_) munmap(stack, kStackBytes);
  }
  unsigned char* take() {
    if (!free_.empty()) {
      void* const stack = free_.back();
      free_.pop_back();
      return static_cast<unsigned char*>(stack);
    }
    void* const stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) std::abort();
    return static_cast<unsigned char*>(stack);
  }
  void give_back(unsigned char* stack) {
#if defined(__SANITIZE_ADDRESS__)
    // (Of a fiber that was dropped in the middle its frames are still marked.)
    __asan_unpoison_memory_region(stack, kStackBytes);
#endif
    free_.push_back(stack);
  }

 private:
  std::vector<void*> free_;
};
Stacks stacks;

struct Fiber {
  void* sp = nullptr;
  unsigned char* stack = nullptr;
  std::uint32_t thread = 0;
  bool ended = false;
  // It waits while that word is this; nullptr: it does not.
  const std::uint64_t* word = nullptr;
  std::uint64_t was = 0;
  void* sanitizer = nullptr;  // its fake stack
  const void* at = nullptr;   // whence it came to its latest step
};

// What the lanes of a mask have come to.
struct Votes {
  std::uint32_t came = 0;
  std::uint64_t round = 0;
  std::uint64_t values[32] = {}, results[32] = {};
};
struct Barrier {
  std::uint32_t came = 0;
  bool all = true, result = true;
  std::uint64_t round = 0;
};

Block* block_here = nullptr;

// The executable's memory that is this thread's.
struct SharedVariables {
  unsigned char* begin = nullptr;
  std::size_t bytes = 0;
};
SharedVariables find_shared() {
  SharedVariables found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        auto& to = *static_cast<SharedVariables*>(result);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
          to.begin = static_cast<unsigned char*>(info->dlpi_tls_data);
          to.bytes = info->dlpi_phdr[i].p_memsz;
        }
        return 1;  // the first is the executable
      },
      &found);
  return found;
}

}  // namespace

class Block {
 public:
  Block(Machine& machine, Launch& launch, std::uint32_t index)
      : machine(machine),
        launch(launch),
        index(index),
        votes((launch.threads + 31) / 32),
        speeds(votes.size(), 1),
        fibers(launch.threads) {
    // Nothing may rely on what is there. (As a pointer it is aligned, for code that works out where
    // a word would be and does not look, and in no memory.)
    constexpr unsigned char kGarbage = 0xc0;
    std::memset(memory, kGarbage, kBlockMemoryBytes);
    shared.assign(find_shared().bytes, kGarbage);
    for (std::uint32_t t = 0; t < launch.threads; ++t) {
      Fiber& f = fibers[t];
      f.thread = t;
      f.stack = stacks.take();
      auto* top = reinterpret_cast<void**>(f.stack + kStackBytes);
      *--top = nullptr;
      *--top = reinterpret_cast<void*>(&enter);
      for (int i = 0; i < 6; ++i) *--top = nullptr;
      f.sp = top;
    }
  }
  ~Block() {
    for (const Fiber& f : fibers) stacks.give_back(f.stack);
    std::free(memory);
  }

  // Whether some fiber could go on.
  bool can_go_on() const {
    return !over && !launch.dropped && !is_held() && (began || launch.may_begin(machine.steps_));
  }
  bool is_held() const { return machine.steps_ < held_until; }
  bool is_held(std::uint32_t warp) const { return machine.steps_ < warp_held_until[warp]; }

  // Some of its fibers go on. False: none can.
  bool work(std::uint64_t turns) {
    const SharedVariables here = find_once();  // a kernel may have none
    if (here.bytes != 0) std::memcpy(here.begin, shared.data(), here.bytes);
    block_here = this;
    began = true;
    bool any = false;
    while (turns-- > 0 && live != 0 && !is_held() && !launch.dropped) {
      Fiber* const next = choose();
      if (next == nullptr) break;
      go(*next);
      any = true;
    }
    if (here.bytes != 0) std::memcpy(shared.data(), here.begin, here.bytes);
    block_here = nullptr;
    if (live == 0) {
      over = true;
      if (!let_next) ++launch.let_next;
      ++launch.ended;
    }
    return any;
  }

  // Where its threads are, by address in the executable (addr2line).
  std::string text() const {
    std::map<std::pair<const void*, bool>, std::vector<std::uint32_t>> places;
    for (const Fiber& f : fibers) {
      if (!f.ended) places[{f.at, ready(f)}].push_back(f.thread);
    }
    std::string text = "\nlaunch " + std::to_string(launch.number) + " block " +
                       std::to_string(index) +
                       (over    ? " is over"
                        : began ? ""
                                : " has not begun");
    if (!began) places.clear();
    for (const auto& [place, threads] : places) {
      char address[32];
      std::snprintf(address, sizeof(address), "%p", offset_of(place.first));
      text += std::string("\n  ") + address + (place.second ? "" : " waits") + ":";
      for (std::size_t i = 0; i < threads.size();) {
        std::size_t end = i + 1;
        while (end < threads.size() && threads[end] == threads[end - 1] + 1) ++end;
        text += " " + std::to_string(threads[i]);
        if (end - i > 1) text += "-" + std::to_string(threads[end - 1]);
        i = end;
      }
    }
    return text;
  }

  // By a fiber: back to the block's loop.
  void leave() {
    Fiber& f = *current;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(f.ended ? nullptr : &f.sanitizer, loop_stack, loop_bytes);
#endif
    unjam_fiber_switch(&f.sp, loop_sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f.sanitizer, &loop_stack, &loop_bytes);
#endif
  }
  void step() {
    count_step();
    if (machine.random_() % kStays == 0 || is_held()) leave();
  }
  void let_others() {
    count_step();
    leave();
  }
  void wait_while(const std::uint64_t& word, std::uint64_t was) {
    current->word = &word;
    current->was = was;
    leave();
    current->word = nullptr;
  }

  Machine& machine;
  Launch& launch;
  const std::uint32_t index;
  bool over = false, began = false, let_next = false;
  Fiber* current = nullptr;
  unsigned char* memory = static_cast<unsigned char*>(std::aligned_alloc(128, kBlockMemoryBytes));
  std::vector<unsigned char> shared;
  std::vector<std::map<std::uint32_t, Votes>> votes;  // of a warp, by mask
  std::map<unsigned, Barrier> barriers;

 private:
  static const SharedVariables& find_once() {
    static const SharedVariables found = find_shared();
    return found;
  }
  static const void* offset_of(const void* at) {
    static const std::uintptr_t base = [] {
      std::uintptr_t found = 0;
      dl_iterate_phdr(
          [](dl_phdr_info* info, std::size_t, void* result) {
            *static_cast<std::uintptr_t*>(result) = info->dlpi_addr;
            return 1;
          },
          &found);
      return found;
    }();
    return reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(at) - base);
  }
  static void enter() {
    Block& b = *block_here;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &b.loop_stack, &b.loop_bytes);
#endif
    b.launch.kernel();
    b.current->ended = true;
    --b.live;
    b.leave();
    std::abort();
  }
  void go(Fiber& f) {
    current = &f;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, f.stack, kStackBytes);
#endif
    unjam_fiber_switch(&loop_sp, f.sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    current = nullptr;
  }
  static bool ready(const Fiber& f) { return !f.ended && (f.word == nullptr || *f.word != f.was); }
  // A warp by its speed, and of it the first lane that can go on, or now and then any.
  Fiber* choose() {
    if (own_steps >= speeds_until) {
      speeds_until = own_steps + 1 + machine.random_() % machine.limits_.steps_per_speed;
      for (std::uint32_t& s : speeds) {
        s = machine.random_() % 4 == 0 ? 1 : 1 + machine.random_() % kFastest;
      }
    }
    std::uint64_t sum = 0;
    std::vector<std::uint32_t>& first = scratch;
    first.assign(speeds.size(), ~0u);
    for (std::uint32_t w = 0; w < speeds.size(); ++w) {
      if (is_held(w)) continue;
      const std::uint32_t begin = 32 * w;
      const auto end =
          std::min<std::uint32_t>(begin + 32, static_cast<std::uint32_t>(fibers.size()));
      const std::uint32_t shift = machine.random_() % 8 == 0 ? machine.random_() % 32 : 0;
      for (std::uint32_t i = 0; i < end - begin; ++i) {
        const std::uint32_t t = begin + (i + shift) % (end - begin);
        if (!ready(fibers[t])) continue;
        first[w] = t;
        sum += speeds[w];
        break;
      }
    }
    if (sum == 0) return nullptr;
    std::uint64_t at = machine.random_() % sum;
    for (std::uint32_t w = 0; w < speeds.size(); ++w) {
      if (first[w] == ~0u) continue;
      if (at < speeds[w]) return &fibers[first[w]];
      at -= speeds[w];
    }
    return nullptr;
  }

  void count_step() {
    machine.count_step();
    ++own_steps;
    for (const Hold& hold : launch.holds) {
      if (hold.block != index || hold.at != own_steps) continue;
      const std::uint64_t until = machine.steps_ + hold.steps;
      if (hold.warp == kAllWarps) {
        held_until = until;
      } else {
        warp_held_until[hold.warp % warp_held_until.size()] = until;
      }
    }
  }

  std::vector<std::uint32_t> speeds, scratch;
  std::uint64_t own_steps = 0, held_until = 0;
  std::vector<std::uint64_t> warp_held_until = std::vector<std::uint64_t>(speeds.size());
  std::uint64_t speeds_until = 0;
  std::vector<Fiber> fibers;
  std::size_t live = fibers.size();
  void* loop_sp = nullptr;
  const void* loop_stack = nullptr;
  std::size_t loop_bytes = 0;
};

Machine::Machine(std::uint64_t seed, Limits limits) : limits_(limits), random_(seed) {}
Machine::~Machine() = default;

const Launch* Machine::launch(std::uint32_t blocks, std::uint32_t threads,
                              std::function<void()> kernel, const Launch* behind) {
  auto l = std::make_unique<Launch>();
  l->number = launches_.size() + 1;
  l->blocks = blocks;
  l->threads = threads;
  l->kernel = std::move(kernel);
  l->behind = behind;
  for (std::uint32_t b = 0; b < blocks; ++b) {
    blocks_.push_back(std::make_unique<Block>(*this, *l, b));
  }
  launches_.push_back(std::move(l));
  return launches_.back().get();
}

Launch& Machine::of(const Launch* launch) {
  return **std::find_if(launches_.begin(), launches_.end(),
                        [&](const auto& l) { return l.get() == launch; });
}
void Machine::delay(const Launch* launch, std::uint64_t steps) { of(launch).late = steps; }
void Machine::hold(const Launch* launch, const Hold& hold) { of(launch).holds.push_back(hold); }

std::string Machine::run() {
  while (error_.empty()) {
    Block* const next = choose();
    if (next == nullptr) {
      const bool any = std::any_of(blocks_.begin(), blocks_.end(),
                                   [](const auto& b) { return !b->over && !b->launch.dropped; });
      if (!any) break;
      count_step();  // all that are left begin late
      continue;
    }
    if (!next->work(1 + random_() % kTurns)) count_step();
  }
  if (!error_.empty()) {
    for (const auto& b : blocks_) error_ += b->text();
  }
  return error_;
}

Block* Machine::choose() {
  std::vector<Block*>& able = able_;
  able.clear();
  for (const auto& b : blocks_) {
    if (b->can_go_on()) able.push_back(b.get());
  }
  return able.empty() ? nullptr : able[random_() % able.size()];
}

void Machine::count_step() {
  ++steps_;
  if (look_every_ != 0 && steps_ % look_every_ == 0) look_();
  if (steps_ > limits_.most_steps && error_.empty()) {
    error_ = "not over after " + std::to_string(steps_) + " steps";
  }
}

Position here() {
  if (block_here == nullptr) return {};
  return {block_here->current->thread, block_here->launch.threads, block_here->index,
          block_here->launch.blocks};
}
bool runs() { return block_here != nullptr && block_here->current != nullptr; }
void step() {
  if (!runs()) return;
  block_here->current->at = __builtin_return_address(0);
  block_here->step();
}
std::uint64_t now_ns() { return block_here->machine.now_ns(); }

void vote(std::uint32_t mask, std::uint64_t value, std::uint64_t (&values)[32]) {
  Block& b = *block_here;
  b.current->at = __builtin_return_address(0);
  b.step();
  const std::uint32_t lane = b.current->thread % 32;
  Votes& v = b.votes[b.current->thread / 32][mask];
  if ((mask >> lane & 1) == 0 || (v.came >> lane & 1) != 0) {
    std::fprintf(stderr, "thread %u votes where it has no vote\n", b.current->thread);
    std::abort();
  }
  v.values[lane] = value;
  v.came |= 1u << lane;
  if (v.came == mask) {
    std::copy(std::begin(v.values), std::end(v.values), v.results);
    v.came = 0;
    ++v.round;
  } else {
    b.wait_while(v.round, v.round);
  }
  // They stay until all lanes have come to the next vote.
  std::copy(std::begin(v.results), std::end(v.results), values);
}

bool meet(unsigned barrier, std::uint32_t threads, bool says, bool waits) {
  Block& b = *block_here;
  b.current->at = __builtin_return_address(0);
  b.step();
  Barrier& m = b.barriers[barrier];
  m.all = m.all && says;
  if (++m.came == threads) {
    m.result = m.all;
    m.came = 0;
    m.all = true;
    ++m.round;
  } else if (waits) {
    b.wait_while(m.round, m.round);
  }
  return m.result;
}

void wait_for_stream() {
  const Launch* const behind = block_here->launch.behind;
  while (behind != nullptr && !behind->is_over()) block_here->let_others();
}
void let_next_begin() {
  Block& b = *block_here;
  if (std::exchange(b.let_next, true)) return;
  ++b.launch.let_next;
}
std::uint64_t launch_number() { return block_here->launch.number; }
unsigned char* block_memory() { return block_here->memory; }

}  // namespace unjam_simt
