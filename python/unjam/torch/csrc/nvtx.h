// Ranges for NVTX tools (Nsight Systems, and whatever NVTX_INJECTION64_PATH names), in a domain of
// unjam's. NVTX is headers alone, which find the tool when the first function is called. An adapter
// that was compiled without them has no ranges: nvtx_built_in() tells.
#pragma once

#include <cstdint>
#include <string>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define UNJAM_NVTX 1
#endif

namespace unjam_torch {

#ifdef UNJAM_NVTX

using NvtxRange = nvtxRangeId_t;

constexpr bool nvtx_built_in() { return true; }

// Null where no tool listens.
inline nvtxDomainHandle_t nvtx_domain() {
  static nvtxDomainHandle_t const domain = nvtxDomainCreateA("unjam");
  return domain;
}
inline NvtxRange nvtx_begin(const std::string& text) {
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = text.c_str();
  return nvtxDomainRangeStartEx(nvtx_domain(), &event);
}
// From any thread.
inline void nvtx_end(NvtxRange range) { nvtxDomainRangeEnd(nvtx_domain(), range); }

#else

using NvtxRange = std::uint64_t;
constexpr bool nvtx_built_in() { return false; }
inline void* nvtx_domain() { return nullptr; }
inline NvtxRange nvtx_begin(const std::string& /*text*/) { return 0; }
inline void nvtx_end(NvtxRange /*range*/) {}

#endif

}  // namespace unjam_torch
