// What the files of the C API share: the thread's last message, and texts into callers' buffers.
#pragma once

#include <cstddef>
#include <string>

#include "runtime/result.h"
#include "unjam/unjam.h"

namespace unjam::api {

// Keeps the message for unjamGetLastError; gives the code back.
unjamResult_t fail(unjamResult_t code, std::string message);
unjamResult_t finish(const Result& result);
// Of a handle that may be used here.
unjamResult_t check_group(unjamGroup_t group);
unjamResult_t check_request(unjamRequest_t request);
unjamResult_t copy_text(const std::string& text, char* buffer, std::size_t bytes,
                        std::size_t* needed);

}  // namespace unjam::api
