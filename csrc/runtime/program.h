// A plan bound to memory: kernels made, ready to run steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plan.h"
#include "team.h"

namespace rewright {

struct WeightMemory {
  const void* data;
  int64_t nbytes;
};

// What all variants of a model share. The memory belongs to the caller and outlives the program.
struct Memory {
  std::map<std::string, WeightMemory> weights;
  void* arena = nullptr;
  int64_t arena_bytes = 0;
  void* state = nullptr;
  int64_t state_bytes = 0;
};

// Where the inputs of a step lie in i32 memory: ids [B,T], then pos, n_valid and slot [B] each.
Step step_of(const Plan& plan, const int32_t* inputs);

// The memory of a value. Throws PlanError where it does not fit its place.
Tensor bind_place(const Place& place, const std::string& name, const Memory& memory, const Step& step);

class Program {
 public:
  // Throws PlanError: a symbol, weight or shape that does not fit, or another kernel ABI.
  Program(const Plan& plan, const Memory& memory);
  Program(const Program&) = delete;  // kernels point into it
  Program& operator=(const Program&) = delete;

  int batch() const { return step_.batch; }
  int tokens() const { return step_.tokens; }
  size_t scratch_bytes() const { return scratch_bytes_; }

  // One step: ids i32[B,T], pos, n_valid and slot i32[B]. Throws PlanError for values out of range.
  void run(Team& team, const int32_t* ids, const int32_t* pos, const int32_t* n_valid, const int32_t* slot);

  // A result of the last step.
  const Tensor& result(const std::string& name) const;

 private:
  Step step_;
  std::vector<int32_t> inputs_;  // ids, pos, n_valid, slot
  int slots_ = 0;
  int64_t positions_ = 0;
  std::vector<std::unique_ptr<Kernel>> kernels_;
  std::map<std::string, Tensor> results_;
  size_t scratch_bytes_ = 0;
};

}  // namespace rewright
