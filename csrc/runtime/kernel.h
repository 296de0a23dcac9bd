// What a kernel is: an object made when a plan is loaded, run once for every launch of a step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "error.h"
#include "team.h"
#include "tensor.h"

namespace rewright {

// The rows of one step. Rows from n_valid on are masked: kernels neither read nor write them, and
// what an activation holds there is undefined.
struct Step {
  int batch = 0;   // B
  int tokens = 0;  // T
  const int32_t* ids = nullptr;      // [B,T] tokens
  const int32_t* pos = nullptr;      // [B] position of the first token
  const int32_t* n_valid = nullptr;  // [B]
  const int32_t* slot = nullptr;     // [B]
};

using Attr = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>>;

// Everything that a launch in a plan says, resolved: the constructor of a kernel reads it, checks it
// and throws PlanError where it does not fit.
class CallSite {
 public:
  std::string where;             // "launch 12 (layers.0.attn.wq_a)", for messages
  std::vector<Tensor> operands;  // in the op's order
  std::vector<Tensor> results;   // in the order of its roles
  std::map<std::string, Attr> attrs;
  void* workspace = nullptr;  // shared by the team, valid during the launch
  int64_t workspace_bytes = 0;
  const Step* step = nullptr;  // outlives the kernel; its pointers are set before every step

  const Tensor& operand(size_t index) const;  // may be absent
  const Tensor& required(size_t index) const;
  const Tensor& result(size_t index) const;
  bool flag(const char* name, bool otherwise) const;
  int64_t integer(const char* name) const;
  int64_t integer(const char* name, int64_t otherwise) const;
  double number(const char* name) const;
  double number(const char* name, double otherwise) const;
  std::string text(const char* name, const std::string& otherwise) const;
  std::vector<int64_t> list(const char* name) const;  // empty if it is not given
  void require(bool condition, const std::string& what) const;
  // The workspace as T[count]; throws if the plan reserved less.
  template <typename T>
  T* take_workspace(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    require(taken_ + bytes <= workspace_bytes, "the plan reserves too little workspace");
    T* start = reinterpret_cast<T*>(static_cast<char*>(workspace) + taken_);
    taken_ += bytes;
    return start;
  }

 private:
  int64_t taken_ = 0;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  // Called by every thread of the team; returns when this thread's share is done.
  virtual void run(Worker& worker) = 0;
  // Bytes of scratch that each thread needs.
  virtual size_t scratch_bytes() const { return 0; }
};

using MakeKernel = std::unique_ptr<Kernel> (*)(CallSite&);

struct KernelEntry {
  std::string signature;  // as codegen/kernel.py spells it
  MakeKernel make;
};

// Every kernel of this library by symbol.
const std::map<std::string, KernelEntry>& kernel_registry();

template <typename K>
std::unique_ptr<Kernel> make_kernel(CallSite& site) {
  return std::make_unique<K>(site);
}

}  // namespace rewright
