// torch binds some of Work's methods without letting go of the GIL.
#pragma once

#include <Python.h>

namespace unjam_torch {

// Without the GIL for as long as it lives, if the thread has it: what blocks must not keep other
// Python threads, which may be what it waits for, from running.
class NoGil {
 public:
  NoGil() : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~NoGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace unjam_torch
