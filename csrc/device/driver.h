// The card: kernels by name, launches on a stream. Either a GPU through the CUDA driver, which is opened
// when the first one is made, or this CPU, where csrc/emulation runs the same kernel sources.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
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

  // How it takes part in launches that overlap (kernels/common/order.h).
  int order_offset = -1;          // of the Order in the parameters; -1: it has none
  bool waits = false;             // it can begin before the launch before it has ended
  bool ends = false;              // it counts its ended blocks
  bool chooses = false;           // it says when it has chosen experts
  std::vector<std::pair<const void*, size_t>> choice;  // the experts, where it needs them before it waits
  std::vector<std::pair<const void*, size_t>> early;   // what else it reads before it waits, weights left out
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
  // Bytes of the card's memory that are complete before the call.
  virtual void download(void* data, const void* from, size_t bytes) = 0;
  virtual void launch(const DeviceLaunch& launch, uintptr_t stream) = 0;

  // Bytes of shared memory of a multiprocessor, one kilobyte less for each block on it.
  virtual int shared_of_multiprocessor() const = 0;
  // Whether a multiprocessor takes a block of both at once.
  virtual bool fit_together(const DeviceLaunch& a, const DeviceLaunch& b) = 0;
  // Streams and events of the card, freed with the last reference. `wait`: what is launched on a stream from
  // now on begins when all that was on the event's stream when it was recorded has ended.
  virtual std::shared_ptr<void> make_stream() = 0;
  virtual std::shared_ptr<void> make_event() = 0;
  virtual void record(void* event, uintptr_t stream) = 0;
  virtual void wait(uintptr_t stream, void* event) = 0;
  virtual void zero(void* data, size_t bytes, uintptr_t stream) = 0;
};

// The card `ordinal` with the .fatbin files at `paths`. Its primary context is shared with whoever else
// uses the card in this process.
std::unique_ptr<Device> open_cuda(int ordinal, const std::vector<std::string>& paths);

// This CPU in the place of a card with few multiprocessors.
std::unique_ptr<Device> open_emulation(int multiprocessors);

}  // namespace rewright
