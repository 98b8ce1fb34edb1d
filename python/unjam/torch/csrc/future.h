// Python's futures of Works.
#pragma once

#include <pybind11/pybind11.h>

namespace unjam_torch {

// Adds `take_over(instance, future)`: what the __init__ of a class that derives from torch's Future
// calls for its instance to be that future (the same one, not a copy).
void bind_futures(pybind11::module_& m);

}  // namespace unjam_torch
