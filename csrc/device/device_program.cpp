#include "device_program.h"

namespace rewright {

DeviceProgram::DeviceProgram(const Plan& plan, const Memory& memory, const int32_t* inputs, Device& device) : device_(device) {
  check(plan.target == "sm80", "the plan is for target " + plan.target + ", this executes sm80");
  check(plan.arena_bytes <= memory.arena_bytes && plan.state_bytes <= memory.state_bytes, "arena or state is too small");
  step_ = step_of(plan, inputs);
  std::vector<Touched> touched;
  for (size_t i = 0; i < plan.launches.size(); ++i) {
    const PlannedLaunch& launch = plan.launches[i];
    DeviceSite site;
    site.where = "launch " + std::to_string(i) + " (" + launch.symbol + ", " + launch.phase + ")";
    const auto entry = device_registry().find(launch.symbol);
    site.require(entry != device_registry().end(), "no such kernel");
    const auto bound = [&](const std::string& name) {
      return name.empty() ? Tensor{} : bind_place(plan.values.at(name), name, memory, step_);
    };
    for (const std::string& name : launch.reads) site.operands.push_back(bound(name));
    for (const std::string& name : launch.writes) site.results.push_back(bound(name));
    site.attrs = launch.attrs;
    for (const PlannedPart& planned : launch.parts) {
      Part part;
      part.where = site.where + ", part " + planned.name;
      part.op = planned.op;
      for (const std::string& name : planned.reads) {
        part.operands.push_back(bound(name));
        part.present.push_back(!name.empty());
      }
      for (const std::string& name : planned.writes) part.results.push_back(bound(name));
      part.attrs = planned.attrs;
      site.parts.push_back(std::move(part));
    }
    site.workspace = static_cast<char*>(memory.arena) + launch.workspace_offset;
    site.workspace_bytes = launch.workspace_bytes;
    site.step = &step_;
    site.device = &device;
    launches_.push_back(entry->second.make(site));
    touched.push_back(touched_by(site));
  }
  schedule_ = std::make_unique<Schedule>(launches_, touched, device);
  for (const auto& [name, value] : plan.results) results_.emplace(name, bind_place(plan.values.at(value), value, memory, step_));
}

void DeviceProgram::run(uintptr_t stream, size_t begin, size_t end) const {
  check(begin <= end && end <= launches_.size(), "there are no such launches");
  for (size_t i = begin; i < end; ++i) {
    for (const DeviceLaunch& launch : launches_[i]) device_.launch(launch, stream);
  }
}

std::vector<std::string> DeviceProgram::kernels() const {
  std::vector<std::string> names;
  for (const std::vector<DeviceLaunch>& launches : launches_) {
    for (const DeviceLaunch& launch : launches) names.push_back(launch.function.name);
  }
  return names;
}

const Tensor& DeviceProgram::result(const std::string& name) const {
  const auto found = results_.find(name);
  check(found != results_.end(), "the step has no result " + name);
  return found->second;
}

}  // namespace rewright
