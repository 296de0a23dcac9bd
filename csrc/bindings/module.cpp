// Python bindings of the native runtime. Conversion only: no logic lives here.
#include <pybind11/pybind11.h>

#include "../runtime/cpu_features.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native runtime of Rewright.";
  m.def("cpu_features", [] {
    py::list names;
    for (const char* name : rewright::cpu_features()) names.append(name);
    return names;
  }, "Vector instruction sets that this processor offers and the host kernels can use.");
}
