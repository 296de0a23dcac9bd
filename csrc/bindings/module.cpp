// Python bindings of the native runtime. Conversion only: no logic lives here. Pointers cross as
// integers; the memory behind them belongs to the caller.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../device/device_program.h"
#include "../device/sampling.h"
#include "../host/vector.h"
#include "../runtime/cpu_features.h"
#include "../runtime/program.h"
#include "../runtime/sampler.h"

#include <optional>

namespace py = pybind11;

namespace {

using rewright::Device;
using rewright::DeviceProgram;
using rewright::DeviceSampler;
using rewright::Memory;
using rewright::Program;
using rewright::Team;

template <typename T>
const T* pointer(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

using Address = std::pair<uintptr_t, int64_t>;  // and bytes

Memory memory_of(const std::map<std::string, Address>& weights, Address arena, Address state) {
  Memory memory;
  for (const auto& [name, where] : weights) memory.weights[name] = {pointer<void>(where.first), where.second};
  memory.arena = reinterpret_cast<void*>(arena.first);
  memory.arena_bytes = arena.second;
  memory.state = reinterpret_cast<void*>(state.first);
  memory.state_bytes = state.second;
  return memory;
}

std::unique_ptr<Program> make_program(const std::string& plan, const std::map<std::string, Address>& weights, Address arena,
                                      Address state) {
  return std::make_unique<Program>(rewright::parse_plan(plan), memory_of(weights, arena, state));
}

std::unique_ptr<DeviceProgram> make_device_program(const std::string& plan, const std::map<std::string, Address>& weights,
                                                   Address arena, Address state, uintptr_t inputs, Device& device) {
  return std::make_unique<DeviceProgram>(rewright::parse_plan(plan), memory_of(weights, arena, state),
                                         pointer<int32_t>(inputs), device);
}

std::unique_ptr<DeviceSampler> make_device_sampler(Device& device, Address logits, int batch, uintptr_t rows, uintptr_t weights,
                                                   uintptr_t inputs, uintptr_t ring, int ring_length, int ring_rows) {
  rewright::SampleParams p{};
  p.logits = pointer<float>(logits.first);
  p.rows = reinterpret_cast<rewright::SampleRow*>(rows);
  p.weights = reinterpret_cast<unsigned long long*>(weights);
  p.ids = reinterpret_cast<int*>(inputs);
  p.pos = p.ids + batch;
  p.n_valid = p.pos + batch;
  p.ring = reinterpret_cast<int*>(ring);
  p.ring_length = ring_length;
  p.ring_rows = ring_rows;
  p.pitch = batch > 0 ? logits.second / batch : 0;
  p.vocabulary = static_cast<int>(p.pitch / static_cast<int64_t>(sizeof(float)));
  return std::make_unique<DeviceSampler>(device, p, batch);
}

py::bytes sample_row(double temperature, double top_p, uint64_t seed, uint64_t draw, int left, const std::vector<int>& stop) {
  const rewright::SampleRow row = rewright::sample_row(temperature, top_p, seed, draw, left, stop);
  return {reinterpret_cast<const char*>(&row), sizeof(row)};
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
  py::register_exception<rewright::DeviceError>(m, "DeviceError", PyExc_RuntimeError);
  m.def("device_kernels", [] {
    std::map<std::string, std::string> signatures;
    for (const auto& [symbol, entry] : rewright::device_registry()) signatures[symbol] = entry.signature;
    return signatures;
  }, "Signature of every sm80 kernel by symbol.");
  py::class_<Device>(m, "Device", "A card, or this CPU in the place of one.")
      .def_property_readonly("multiprocessors", &Device::multiprocessors);
  m.def("open_cuda", &rewright::open_cuda, py::arg("ordinal"), py::arg("paths"),
        "The card with the kernels in the .fatbin files at `paths`; DeviceError says why it cannot be used.");
  m.def("open_emulation", &rewright::open_emulation, py::arg("multiprocessors"), "This CPU running the kernels' sources.");
  py::class_<DeviceProgram>(m, "DeviceProgram", "A plan bound to a card's memory.")
      .def(py::init(&make_device_program), py::arg("plan"), py::arg("weights"), py::arg("arena"), py::arg("state"),
           py::arg("inputs"), py::arg("device"), py::keep_alive<1, 7>())
      .def_property_readonly("launches", &DeviceProgram::size)
      .def_property_readonly("kernels", &DeviceProgram::kernels, "Names of the card's kernels that `run` launches, in order.")
      .def("run", [](const DeviceProgram& program, uintptr_t stream, size_t begin, std::optional<size_t> end) {
        program.run(stream, begin, end.value_or(program.size()));
      }, py::arg("stream"), py::arg("begin") = 0, py::arg("end") = py::none(), py::call_guard<py::gil_scoped_release>(),
         "Launch the plan's launches [begin, end) on a stream; nothing is waited for.")
      .def("run_overlapped", &DeviceProgram::run_overlapped, py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
           "Launch the whole plan behind a stream's work, launches that can overlapping; nothing is waited for.")
      .def_property_readonly("early", &DeviceProgram::early)
      .def_property_readonly("aside", &DeviceProgram::aside)
      .def("result", [](const DeviceProgram& program, const std::string& name) {
        const rewright::Tensor& tensor = program.result(name);
        return std::pair(reinterpret_cast<uintptr_t>(tensor.data), tensor.nbytes());
      }, py::arg("name"), "Address and bytes of a result of the last step.");
  py::class_<DeviceSampler>(m, "DeviceSampler", "The choice of the next tokens, behind the launches of a decode step.")
      .def(py::init(&make_device_sampler), py::arg("device"), py::arg("logits"), py::arg("batch"), py::arg("rows"),
           py::arg("weights"), py::arg("inputs"), py::arg("ring"), py::arg("ring_length"), py::arg("ring_rows"),
           py::keep_alive<1, 2>())
      .def_property_readonly("kernels", &DeviceSampler::kernels, "Names of the kernels that `run` launches.")
      .def("run", &DeviceSampler::run, py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
           "Launch it on a stream; nothing is waited for.");
  m.def("sample_row", &sample_row, py::arg("temperature"), py::arg("top_p"), py::arg("seed"), py::arg("draw"), py::arg("left"),
        py::arg("stop"), "The bytes of a row of a DeviceSampler that is about to draw.");
  m.attr("MOST_STOPS") = rewright::kMostStops;
  m.attr("NOTHING_YET") = rewright::kNothingYet;
  m.attr("NONE_FINITE") = rewright::kNoneFinite;
  m.attr("NAN_FIRST") = rewright::kNaNFirst;
}
