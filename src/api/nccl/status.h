// What a call has to say, in NCCL's codes, and the texts behind ncclGetLastError.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "api/nccl/types.h"
#include "unjam/unjam.h"

namespace unjam::nccl {

struct Status {
  Code code = Code::kSuccess;
  std::string text;

  bool ok() const { return code == Code::kSuccess; }
};

inline Status invalid_argument(std::string text) {
  return {Code::kInvalidArgument, std::move(text)};
}
inline Status invalid_usage(std::string text) { return {Code::kInvalidUsage, std::move(text)}; }

// Of a function of the C API that this thread has just called.
Status from_unjam(unjamResult_t result);
Status from_unjam(unjamResult_t result, const std::string& text);

// Keeps the text of a failure for last_error(); gives the code back.
Code report(const Status& status);
// The last failure's text of this thread; of any thread, if it has none; "" if there is none.
const char* last_error();

// No exception crosses the C boundary.
template <class F>
Code guarded(F&& f) {
  try {
    return report(f());
  } catch (const std::bad_alloc&) {
    return report({Code::kSystemError, "out of memory"});
  } catch (const std::exception& e) {
    return report({Code::kSystemError, e.what()});
  }
}

}  // namespace unjam::nccl
