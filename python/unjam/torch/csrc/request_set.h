// The requests that one operation of torch consists of.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "unjam/unjam.h"

namespace unjam_torch {

// Constant once the operation is put together, so any thread may look.
class RequestSet {
 public:
  // How a request has failed. text: as long as the request lives.
  struct Failure {
    unjamResult_t code;
    const char* text;
  };

  RequestSet() = default;
  ~RequestSet() {
    for (unjamRequest_t request : requests_) unjamRequestFree(request);
  }
  RequestSet(const RequestSet&) = delete;
  RequestSet& operator=(const RequestSet&) = delete;

  void add(unjamRequest_t request) { requests_.push_back(request); }
  // Where the first request fails the others may never be complete: that ends the operation. If
  // another one fails, the rest still come to their end, and write outputs until then.
  void set_first_decides() { first_decides_ = true; }

  bool empty() const { return requests_.empty(); }
  std::size_t size() const { return requests_.size(); }
  auto begin() const { return requests_.begin(); }
  auto end() const { return requests_.end(); }

  // Whether the operation is over where this request fails.
  bool decides(unjamRequest_t request) const {
    return first_decides_ && request == requests_.front();
  }
  // Whether all are complete, or one has failed that decides. Does not block.
  bool over() const {
    for (unjamRequest_t request : requests_) {
      const auto [done, code] = test(request);
      if (!done) return false;
      if (code != UNJAM_SUCCESS && decides(request)) break;
    }
    return true;
  }
  // Of an operation that is over: whether nothing uses its tensors any more. Not so where the first
  // request has failed and others go on.
  bool idle() const {
    return !first_decides_ ||
           std::all_of(begin(), end(), [](unjamRequest_t request) { return test(request).done; });
  }
  std::optional<Failure> failure() const {
    for (unjamRequest_t request : requests_) {
      const unjamResult_t code = test(request).code;
      if (code != UNJAM_SUCCESS) return Failure{code, unjamRequestError(request)};
    }
    return std::nullopt;
  }

  struct Tested {
    bool done;
    unjamResult_t code;
  };
  static Tested test(unjamRequest_t request) {
    int done = 0;
    const unjamResult_t code = unjamTest(request, &done);
    return {done != 0, code};
  }

 private:
  std::vector<unjamRequest_t> requests_;
  bool first_decides_ = false;
};

}  // namespace unjam_torch
