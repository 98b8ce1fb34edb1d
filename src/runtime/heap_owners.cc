#include "runtime/heap_owners.h"

#include <list>
#include <mutex>

#include "base/fork_guard.h"
#include "runtime/context.h"

namespace unjam {
namespace {

struct Owner {
  std::weak_ptr<Context> context;
  std::shared_ptr<Context> kept;  // destroyed, and memory of its heap is allocated
};
struct Owners {
  std::mutex mutex;
  std::list<Owner> list;
};
// Never destroyed: what the program has not freed at its end need not go.
Owners& owners() { return per_process<Owners>(); }

}  // namespace

void own_heap(const std::shared_ptr<Context>& context) {
  Owners& o = owners();
  std::lock_guard lock(o.mutex);
  o.list.remove_if([](const Owner& owner) { return owner.context.expired(); });
  o.list.push_back({context, nullptr});
}

void keep_heap(const std::shared_ptr<Context>& context) {
  Owners& o = owners();
  std::lock_guard lock(o.mutex);
  if (context->heap().usage().allocations == 0) return;
  for (Owner& owner : o.list) {
    if (owner.context.lock() == context) owner.kept = context;
  }
}

Result free_anywhere(const void* pointer) {
  if (pointer == nullptr) return {};
  std::shared_ptr<Context> last;  // goes after the lock: its end takes a while
  Owners& o = owners();
  std::lock_guard lock(o.mutex);
  for (Owner& owner : o.list) {
    const std::shared_ptr<Context> context = owner.context.lock();
    if (context == nullptr || !context->heap().holds(pointer, 1)) continue;
    Result result = context->heap().free(pointer);
    if (owner.kept != nullptr && context->heap().usage().allocations == 0) {
      last = std::move(owner.kept);
    }
    return result;
  }
  return {UNJAM_ERROR_INVALID_ARGUMENT,
          "the pointer is in no heap of this process: free what unjamMemAlloc gave"};
}

}  // namespace unjam
