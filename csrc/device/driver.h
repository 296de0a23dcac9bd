// The card: kernels by name, launches on a stream. Either a GPU through the CUDA driver, which is opened
// when the first one is made, or this CPU, where csrc/emulation runs the same kernel sources.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace rewright {

// The driver is missing or refused something.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Function {
  void* handle = nullptr;
  std::string name;
};

// One launch, complete but for the stream.
struct DeviceLaunch {
  Function function;
  unsigned grid[3] = {1, 1, 1};
  unsigned threads = 0;
  unsigned shared_bytes = 0;      // dynamic
  std::vector<uint64_t> params;   // the kernel's parameter struct
  unsigned params_bytes = 0;
  std::shared_ptr<void> memory;   // of the card, that the parameters point to
};

class Device {
 public:
  virtual ~Device() = default;
  // Workers of a launch that fills the card with one block each.
  virtual int multiprocessors() const = 0;
  // Throws DeviceError if there is no such kernel, or with more shared memory than a block can have.
  virtual Function function(const std::string& name, unsigned shared_bytes, unsigned params_bytes) = 0;
  // A copy of `bytes` bytes in the card's memory, freed with the last reference; what `launch` reads.
  virtual std::shared_ptr<void> upload(const void* data, size_t bytes) = 0;
  virtual void launch(const DeviceLaunch& launch, uintptr_t stream) = 0;
};

// The card `ordinal` with the .fatbin files at `paths`. Its primary context is shared with whoever else
// uses the card in this process.
std::unique_ptr<Device> open_cuda(int ordinal, const std::vector<std::string>& paths);

// This CPU in the place of a card with few multiprocessors.
std::unique_ptr<Device> open_emulation(int multiprocessors);

}  // namespace rewright
