// Where each of several processes is, for the others to see. Made before they are forked.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <new>
#include <string>

#include "tests/support/job.h"

namespace unjam_test {

class Stages {
 public:
  Stages() {
    void* const memory = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    stage_ = new (memory) std::atomic<int>(0);
  }
  void reach(int stage) const { stage_->store(stage); }
  void await(int stage) const {
    if (!eventually([&] { return stage_->load() >= stage; })) {
      fail("the other process does not come to stage " + std::to_string(stage));
    }
  }

 private:
  std::atomic<int>* stage_ = nullptr;
};

}  // namespace unjam_test
