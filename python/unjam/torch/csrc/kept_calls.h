// Operations that are to be looked at again at their end: a stream waits for them, the library has
// called, or nobody holds them any more.
#pragma once

#include <memory>

namespace unjam_torch {

class Call;

// Keeps an operation until it is complete. Its tensors go in a thread that calls torch, and never
// in one of the library's, which must not take the GIL.
void keep_until_complete(std::shared_ptr<Call> call);
// By threads that call torch: lets go of operations that are complete, and reports those that have
// failed unseen. all: looks at all of them, however many there are.
void release_complete(bool all = false);
// In the child of a fork() what is kept stays as it is: it is the parent's to end.
void forked_kept_calls();

}  // namespace unjam_torch
