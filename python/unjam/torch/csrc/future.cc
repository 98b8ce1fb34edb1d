// Apart from the module, for torch's header here takes long to compile.
#include "future.h"

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace py = pybind11;

namespace unjam_torch {

void bind_futures(py::module_& m) {
  using torch::jit::PythonFutureWrapper;
  // A further constructor of torch's class. pybind11 adds those to classes that the module defines
  // itself; here it is a function that is told to be one.
  const py::object future = py::module_::import("torch").attr("_C").attr("Future");
  m.attr("take_over") = py::cpp_function(
      [](py::detail::value_and_holder& place, const std::shared_ptr<PythonFutureWrapper>& of) {
        auto own = std::make_shared<PythonFutureWrapper>(of->fut);
        place.value_ptr() = own.get();
        place.type->init_instance(place.inst, &own);
      },
      py::name("__init__"), py::is_method(future), py::detail::is_new_style_constructor());
}

}  // namespace unjam_torch
