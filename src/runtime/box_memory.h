// What runs of resharding have of a rank's device: memory for bundles, words that the host and the
// device reach, and words that streams wait for.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/box_mover.h"
#include "runtime/heap.h"

namespace unjam {

// Any thread.
class BoxMemory {
 public:
  // `mover` outlives this.
  explicit BoxMemory(BoxMover& mover);

  BoxMover& mover() { return mover_; }

  // Of the device, and kept for later runs when it is given back. nullptr: `error`. (Not of the
  // user's heap: that peers could store straight into it has made no run faster.)
  unsigned char* take(std::uint64_t bytes, std::string& error);
  void give_back(const unsigned char* memory);

  // Of the host, and reached by the device. nullptr: too many are in use.
  std::uint64_t* take_words(std::uint64_t count);
  void give_back_words(const std::uint64_t* words);

  // A word that becomes `value` when something has ended. Words are used again, and only grow: so a
  // stream that comes to its wait long after the end does not wait.
  struct End {
    std::uint64_t* word = nullptr;  // nullptr: too many are under way
    std::uint64_t value = 0;
  };
  End take_end();
  void reach(const End& end);

 private:
  BoxMover& mover_;
  Heap words_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Heap>> chunks_;
  std::vector<std::uint64_t*> free_ends_;
};

}  // namespace unjam
