// What unjam.torch.ddp.keyed() gives a model's reducer.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>

namespace c10d {
class Reducer;
}

namespace unjam_torch {

class UnjamBackend;

// Averages of gradients, each bucket's under a key of its own that begins with `prefix`.
void average_by_keys(c10d::Reducer& reducer, c10::intrusive_ptr<UnjamBackend> backend,
                     const std::string& prefix);

}  // namespace unjam_torch
