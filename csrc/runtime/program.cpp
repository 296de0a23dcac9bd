#include "program.h"

#include <algorithm>
#include <cstring>
namespace rewright {

Step step_of(const Plan& plan, const int32_t* inputs) {
  Step step;
  step.batch = plan.batch;
  step.tokens = plan.tokens;
  step.ids = inputs;
  step.pos = step.ids + plan.batch * plan.tokens;
  step.n_valid = step.pos + plan.batch;
  step.slot = step.n_valid + plan.batch;
  return step;
}

Program::Program(const Plan& plan, const Memory& memory) {
  check(plan.target == "host", "the plan is for target " + plan.target + ", this executes host");
  check(plan.arena_bytes <= memory.arena_bytes && plan.state_bytes <= memory.state_bytes, "arena or state is too small");
  inputs_.resize(plan.batch * (plan.tokens + 3));
  step_ = step_of(plan, inputs_.data());
  slots_ = 1 << 30;
  positions_ = plan.capacity;
  for (size_t i = 0; i < plan.launches.size(); ++i) {
    const PlannedLaunch& launch = plan.launches[i];
    const auto entry = kernel_registry().find(launch.symbol);
    CallSite site;
    site.where = "launch " + std::to_string(i) + " (" + launch.symbol + ", " + launch.phase + ")";
    site.require(entry != kernel_registry().end(), "no such kernel");
    for (const std::string& name : launch.reads) {
      site.operands.push_back(name.empty() ? Tensor{} : bind_place(plan.values.at(name), name, memory, step_));
    }
    for (const std::string& name : launch.writes) site.results.push_back(bind_place(plan.values.at(name), name, memory, step_));
    site.attrs = launch.attrs;
    site.workspace = static_cast<char*>(memory.arena) + launch.workspace_offset;
    site.workspace_bytes = launch.workspace_bytes;
    site.step = &step_;
    kernels_.push_back(entry->second.make(site));
    scratch_bytes_ = std::max(scratch_bytes_, kernels_.back()->scratch_bytes());
  }
  for (const auto& [name, place] : plan.values) {
    if (place.space == Space::kState && place.type.rank() > 0) {
      slots_ = std::min<int64_t>(slots_, place.type.dim(0));
    }
  }
  for (const auto& [name, value] : plan.results) results_.emplace(name, bind_place(plan.values.at(value), value, memory, step_));
}

Tensor bind_place(const Place& place, const std::string& name, const Memory& memory, const Step& step) {
  Tensor tensor = place.type;
  tensor.layout = place.layout;
  switch (place.space) {
    case Space::kArena:
      tensor.data = static_cast<char*>(memory.arena) + place.offset;
      break;
    case Space::kState:
      tensor.data = static_cast<char*>(memory.state) + place.offset;
      break;
    case Space::kKernel:  // it never leaves a kernel
      break;
    case Space::kWeight: {
      const auto found = memory.weights.find(name);
      check(found != memory.weights.end(), "there is no weight " + name);
      check(found->second.nbytes == tensor.nbytes(), "weight " + name + " has " + std::to_string(found->second.nbytes) +
                                                         " bytes, the plan says " + std::to_string(tensor.nbytes()));
      tensor.data = const_cast<void*>(found->second.data);
      check(reinterpret_cast<uintptr_t>(tensor.data) % std::max(1, bits_of(tensor.dtype) / 8) == 0,
            "weight " + name + " is not aligned to its elements");
      break;
    }
    case Space::kInput: {
      const bool ids = name == "tokens";
      const bool fits = tensor.dtype == DType::kI32 && tensor.count() == step.batch * (ids ? step.tokens : 1);
      check(fits, "input " + name + " is of another type");
      check(ids || name == "pos" || name == "n_valid" || name == "slot", "there is no input " + name);
      tensor.data = const_cast<int32_t*>(ids ? step.ids : name == "pos" ? step.pos : name == "slot" ? step.slot : step.n_valid);
      break;
    }
  }
  return tensor;
}

void Program::run(Team& team, const int32_t* ids, const int32_t* pos, const int32_t* n_valid, const int32_t* slot) {
  const int batch = step_.batch;
  for (int b = 0; b < batch; ++b) {
    check(0 <= n_valid[b] && n_valid[b] <= step_.tokens, "n_valid is out of range");
    if (n_valid[b] == 0) continue;
    check(0 <= pos[b] && pos[b] <= positions_ - n_valid[b], "pos is out of range");
    check(0 <= slot[b] && slot[b] < slots_, "slot is out of range");
    for (int other = 0; other < b; ++other) {
      check(n_valid[other] == 0 || slot[other] != slot[b], "two rows of a step have one slot");
    }
  }
  int32_t* to = inputs_.data();
  std::memcpy(to, ids, sizeof(int32_t) * batch * step_.tokens);
  to += batch * step_.tokens;
  for (const int32_t* from : {pos, n_valid, slot}) {
    std::memcpy(to, from, sizeof(int32_t) * batch);
    to += batch;
  }
  for (int b = 0; b < batch; ++b) {  // masked rows address nothing, whatever they hold
    if (n_valid[b] == 0) inputs_[batch * step_.tokens + b] = inputs_[batch * (step_.tokens + 2) + b] = 0;
  }
  team.run([this](Worker& worker) {
    for (const std::unique_ptr<Kernel>& kernel : kernels_) {
      kernel->run(worker);
      worker.barrier();
    }
  });
}

const Tensor& Program::result(const std::string& name) const {
  const auto found = results_.find(name);
  check(found != results_.end(), "the step has no result " + name);
  return found->second;
}

}  // namespace rewright
