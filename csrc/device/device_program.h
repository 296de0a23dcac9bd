// A plan of the sm80 target bound to the card's memory.
#pragma once

#include "../runtime/program.h"
#include "device_kernel.h"
#include "schedule.h"

namespace rewright {

class DeviceProgram {
 public:
  // `memory` and `inputs` (i32: ids [B,T], then pos, n_valid and slot [B] each) are addresses on the card
  // that outlive the program; weights are there already. Throws PlanError or DeviceError.
  DeviceProgram(const Plan& plan, const Memory& memory, const int32_t* inputs, Device& device);
  DeviceProgram(const DeviceProgram&) = delete;
  DeviceProgram& operator=(const DeviceProgram&) = delete;

  // Launches everything, one after the other, or the launches [begin, end) of the plan only. Nothing is
  // waited for.
  void run(uintptr_t stream) const { run(stream, 0, launches_.size()); }
  void run(uintptr_t stream, size_t begin, size_t end) const;
  // The same for everything, overlapped as schedule.h says. Work on `stream` before and behind is not.
  void run_overlapped(uintptr_t stream) const { schedule_->run(stream); }
  // Launches that begin before the one before them has ended, and launches at the side.
  size_t early() const { return schedule_->early(); }
  size_t aside() const { return schedule_->aside(); }

  // Launches of the plan.
  size_t size() const { return launches_.size(); }
  // Names of the card's kernels that `run` launches, in order.
  std::vector<std::string> kernels() const;
  const Tensor& result(const std::string& name) const;

 private:
  Device& device_;
  Step step_;
  std::vector<std::vector<DeviceLaunch>> launches_;
  std::unique_ptr<Schedule> schedule_;
  std::map<std::string, Tensor> results_;
};

}  // namespace rewright
