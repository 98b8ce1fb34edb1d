// Whose heap an address is in, over all contexts of this process; and the contexts that were
// destroyed while memory of theirs was allocated: they stay, with their arenas, until it is freed.
#pragma once

#include <memory>

#include "runtime/result.h"

namespace unjam {

class Context;

// A context that has begun, and one that was destroyed.
void own_heap(const std::shared_ptr<Context>& context);
void keep_heap(const std::shared_ptr<Context>& context);

// As Heap::free(), in whichever heap of this process the pointer is.
Result free_anywhere(const void* pointer);

}  // namespace unjam
