// torch binds some of Work's methods without letting go of the GIL.
#pragma once

#include <Python.h>

#include <string>

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

// Runs the handlers of signals that have come, if this is the thread in which Python does that.
// Throws what they raise, which torch hands on to the caller (KeyboardInterrupt, say). Not with a
// lock: a handler may call anything.
void run_signal_handlers();
// Whether one has raised something there: who leaves for that does not want to wait.
bool signal_handler_raised();

// Where in the user's program the calling thread is, in Python's words; "": nowhere in Python.
std::string call_site();

// Whether the current stream is being captured into a CUDA graph: what torch tells to Python only.
inline bool stream_is_captured() {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject* const cuda = PyImport_ImportModule("torch.cuda");
  PyObject* const told =
      cuda == nullptr ? nullptr : PyObject_CallMethod(cuda, "is_current_stream_capturing", nullptr);
  const bool captured = told != nullptr && PyObject_IsTrue(told) == 1;
  PyErr_Clear();
  Py_XDECREF(told);
  Py_XDECREF(cuda);
  PyGILState_Release(state);
  return captured;
}

}  // namespace unjam_torch
