#include "runtime/box_memory.h"

#include <algorithm>

#include "base/atomics.h"

namespace unjam {
namespace {

constexpr std::uint64_t kEnds = 1024;
constexpr std::uint64_t kEndBytes = kEnds * sizeof(std::uint64_t);
// Device memory comes in such portions, or as large as what is asked for.
constexpr std::uint64_t kChunkBytes = std::uint64_t{32} << 20;

}  // namespace

BoxMemory::BoxMemory(BoxMover& mover)
    : mover_(mover), words_(mover.pinned() + kEndBytes, BoxMover::kPinnedBytes - kEndBytes) {
  auto* const ends = reinterpret_cast<std::uint64_t*>(mover.pinned());
  for (std::uint64_t i = kEnds; i-- > 0;) free_ends_.push_back(ends + i);
}

unsigned char* BoxMemory::take(std::uint64_t bytes, std::string& error) {
  void* found = nullptr;
  const std::lock_guard lock(mutex_);
  for (const auto& chunk : chunks_) {
    if (chunk->allocate(bytes, found).ok()) return static_cast<unsigned char*>(found);
  }
  const std::uint64_t rounded =
      (bytes + Heap::kAlignment - 1) / Heap::kAlignment * Heap::kAlignment;
  const std::uint64_t added = std::max(kChunkBytes, rounded);
  unsigned char* const memory = mover_.add(added, error);
  if (memory == nullptr) return nullptr;
  chunks_.push_back(std::make_unique<Heap>(memory, added));
  const Result result = chunks_.back()->allocate(bytes, found);
  error = result.message;
  return static_cast<unsigned char*>(found);
}

void BoxMemory::give_back(const unsigned char* memory) {
  const std::lock_guard lock(mutex_);
  for (const auto& chunk : chunks_) {
    if (chunk->holds(memory, 1)) chunk->free(memory);
  }
}

std::uint64_t* BoxMemory::take_words(std::uint64_t count) {
  void* found = nullptr;
  if (!words_.allocate(count * sizeof(std::uint64_t), found).ok()) return nullptr;
  return static_cast<std::uint64_t*>(found);
}

void BoxMemory::give_back_words(const std::uint64_t* words) { words_.free(words); }

BoxMemory::End BoxMemory::take_end() {
  const std::lock_guard lock(mutex_);
  if (free_ends_.empty()) return {};
  std::uint64_t* const word = free_ends_.back();
  free_ends_.pop_back();
  return {word, load_relaxed(*word) + 1};
}

void BoxMemory::reach(const End& end) {
  store_release(*end.word, end.value);
  const std::lock_guard lock(mutex_);
  free_ends_.push_back(end.word);
}

}  // namespace unjam
