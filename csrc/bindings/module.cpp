// Python bindings of the native runtime. Conversion only: no logic lives here. Pointers cross as
// integers; the memory behind them belongs to the caller.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../host/vector.h"
#include "../runtime/cpu_features.h"
#include "../runtime/program.h"
#include "../runtime/sampler.h"

namespace py = pybind11;

namespace {

using rewright::Memory;
using rewright::Program;
using rewright::Team;

template <typename T>
const T* pointer(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

std::unique_ptr<Program> make_program(const std::string& plan, const std::map<std::string, std::pair<uintptr_t, int64_t>>& weights,
                     std::pair<uintptr_t, int64_t> arena, std::pair<uintptr_t, int64_t> state) {
  Memory memory;
  for (const auto& [name, where] : weights) memory.weights[name] = {pointer<void>(where.first), where.second};
  memory.arena = reinterpret_cast<void*>(arena.first);
  memory.arena_bytes = arena.second;
  memory.state = reinterpret_cast<void*>(state.first);
  memory.state_bytes = state.second;
  return std::make_unique<Program>(rewright::parse_plan(plan), memory);
}

void run(Program& program, Team& team, uintptr_t ids, uintptr_t pos, uintptr_t n_valid, uintptr_t slot) {
  program.run(team, pointer<int32_t>(ids), pointer<int32_t>(pos), pointer<int32_t>(n_valid), pointer<int32_t>(slot));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native runtime of Rewright.";
  py::register_exception<rewright::PlanError>(m, "PlanError", PyExc_ValueError);
  m.def("cpu_features", [] {
    py::list names;
    for (const char* name : rewright::cpu_features()) names.append(name);
    return names;
  }, "Vector instruction sets that this processor offers and the host kernels can use.");
  m.def("vector_name", [] { return rewright::vector().name; }, "The instruction set that the host kernels use.");
  m.def("kernels", [] {
    std::map<std::string, std::string> signatures;
    for (const auto& [symbol, entry] : rewright::kernel_registry()) signatures[symbol] = entry.signature;
    return signatures;
  }, "Signature of every host kernel by symbol.");
  m.def("check_plan", [](const std::string& plan) { rewright::parse_plan(plan); }, py::arg("plan"),
        py::call_guard<py::gil_scoped_release>(), "Read a plan; PlanError says what is wrong with it.");
  m.def("sample", [](uintptr_t logits, int64_t count, double temperature, double top_p, uint64_t seed, uint64_t draw) {
    return rewright::sample(pointer<float>(logits), count, temperature, top_p, seed, draw);
  }, py::arg("logits"), py::arg("count"), py::arg("temperature"), py::arg("top_p"), py::arg("seed"), py::arg("draw"),
     py::call_guard<py::gil_scoped_release>(), "A token id from f32[count] logits at an address.");
  py::class_<Team>(m, "Team", "Threads that execute steps, the caller's being the first.")
      .def(py::init<int, size_t>(), py::arg("threads"), py::arg("scratch_bytes"))
      .def_property_readonly("size", &Team::size);
  py::class_<Program>(m, "Program", "A plan bound to memory.")
      .def(py::init(&make_program), py::arg("plan"), py::arg("weights"), py::arg("arena"), py::arg("state"))
      .def_property_readonly("batch", &Program::batch)
      .def_property_readonly("tokens", &Program::tokens)
      .def_property_readonly("scratch_bytes", &Program::scratch_bytes)
      .def("run", &run, py::arg("team"), py::arg("ids"), py::arg("pos"), py::arg("n_valid"), py::arg("slot"),
           py::call_guard<py::gil_scoped_release>(), "One step; pointers to i32[B,T] ids and i32[B] each.")
      .def("result", [](const Program& program, const std::string& name) {
        const rewright::Tensor& tensor = program.result(name);
        return std::pair(reinterpret_cast<uintptr_t>(tensor.data), tensor.nbytes());
      }, py::arg("name"), "Address and bytes of a result of the last step.");
}
