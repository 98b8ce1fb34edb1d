// How one operation of torch ended, and whether a user knows.
#pragma once

#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "unjam/unjam.h"
#include "world.h"

namespace unjam_torch {

// Guarded by the operation's mutex, but what is atomic.
class Outcome {
 public:
  // Null: it has not failed, as far as anybody has looked.
  const std::exception_ptr& error() const { return error_; }
  void set(const char* what, unjamResult_t code, const char* text) {
    if (code == UNJAM_ERROR_TIMEOUT) late_ = text;
    try {
      raise(what, code, text);
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  // What comes after a failure says less than the failure.
  void set_if_none(std::exception_ptr error) {
    if (error_ == nullptr) error_ = std::move(error);
  }
  // What the engine says of an operation that it has ended for its age, once; else "".
  std::string take_late() { return std::exchange(late_, {}); }
  void drop_late() { late_.clear(); }

  // Whether somebody who asked was told of the failure. Else the process group is put out of use,
  // for its outputs are wrong and nobody knows.
  bool told() const { return told_.load(); }
  // True: it was told before.
  bool set_told() { return told_.exchange(true); }

 private:
  std::exception_ptr error_;
  std::string late_;
  std::atomic<bool> told_{false};
};

}  // namespace unjam_torch
