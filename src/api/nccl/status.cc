#include "api/nccl/status.h"

#include <mutex>

namespace unjam::nccl {
namespace {

// Of all threads: a watchdog asks for the text of what another thread has met.
struct Latest {
  std::mutex mutex;
  std::string text;
};
Latest& latest() {
  static Latest* const texts = new Latest;  // outlives threads that run at the end of the process
  return *texts;
}

thread_local std::string own_text;
thread_local std::string borrowed_text;

Code code_of(unjamResult_t result) {
  switch (result) {
    case UNJAM_SUCCESS:
      return Code::kSuccess;
    case UNJAM_ERROR_INVALID_ARGUMENT:
      return Code::kInvalidArgument;
    case UNJAM_ERROR_INVALID_USAGE:
    case UNJAM_ERROR_MISMATCH:
    case UNJAM_ERROR_ABORTED:
      return Code::kInvalidUsage;
    case UNJAM_ERROR_PEER:
    case UNJAM_ERROR_TIMEOUT:
      return Code::kRemoteError;
    case UNJAM_ERROR_RESOURCES:
    case UNJAM_ERROR_SYSTEM:
      return Code::kSystemError;
    case UNJAM_ERROR_INTERNAL:
      break;
  }
  return Code::kInternalError;
}

}  // namespace

Status from_unjam(unjamResult_t result, const std::string& text) {
  if (result == UNJAM_SUCCESS) return {};
  return {code_of(result), std::string(unjamGetErrorString(result)) + ": " + text};
}

Status from_unjam(unjamResult_t result) {
  return result == UNJAM_SUCCESS ? Status{} : from_unjam(result, unjamGetLastError());
}

Code report(const Status& status) {
  if (status.ok() || status.code == Code::kInProgress) return status.code;
  own_text = status.text;
  const std::lock_guard lock(latest().mutex);
  latest().text = status.text;
  return status.code;
}

const char* last_error() {
  if (!own_text.empty()) return own_text.c_str();
  const std::lock_guard lock(latest().mutex);
  borrowed_text = latest().text;
  return borrowed_text.c_str();
}

}  // namespace unjam::nccl
