// The device that is this CPU.
#include "../emulation/emulation.h"
#include "driver.h"

#include <cstring>
#include <new>

namespace rewright {

namespace {

constexpr unsigned kMostSharedBytes = 163 << 10;  // of a block on SM80
constexpr int kSharedOfMultiprocessor = 164 << 10;

class Emulation : public Device {
 public:
  explicit Emulation(int multiprocessors) : multiprocessors_(multiprocessors) {}

  int multiprocessors() const override { return multiprocessors_; }

  Function function(const std::string& name, unsigned shared_bytes, unsigned params_bytes) override {
    const emulation::Emulated found = emulation::find_kernel(name.c_str());
    if (found.function == nullptr) throw DeviceError("this build has no kernel " + name);
    if (found.params_bytes != params_bytes) {
      throw DeviceError("the kernel " + name + " takes " + std::to_string(found.params_bytes) + " bytes of parameters, not " +
                        std::to_string(params_bytes));
    }
    if (shared_bytes > kMostSharedBytes) throw DeviceError("the kernel " + name + " needs too much shared memory");
    return {reinterpret_cast<void*>(found.function), name};
  }

  std::shared_ptr<void> upload(const void* data, size_t bytes) override {
    std::shared_ptr<void> held(::operator new(bytes, std::align_val_t{64}), [](void* p) { ::operator delete(p, std::align_val_t{64}); });
    std::memcpy(held.get(), data, bytes);
    return held;
  }

  void download(void* data, const void* from, size_t bytes) override { std::memcpy(data, from, bytes); }

  void launch(const DeviceLaunch& launch, uintptr_t) override {
    try {
      emulation::run_grid(reinterpret_cast<emulation::KernelFunction>(launch.function.handle), launch.params.data(), launch.grid,
                          launch.threads, launch.shared_bytes);
    } catch (const std::runtime_error& e) {
      throw DeviceError(launch.function.name + ": " + e.what());
    }
  }

  // Launches run one after the other, so any two fit, and their counts have always been raised in time.
  int shared_of_multiprocessor() const override { return kSharedOfMultiprocessor; }
  bool fit_together(const DeviceLaunch&, const DeviceLaunch&) override { return true; }
  std::shared_ptr<void> make_stream() override { return nullptr; }
  std::shared_ptr<void> make_event() override { return nullptr; }
  void record(void*, uintptr_t) override {}
  void wait(uintptr_t, void*) override {}
  void zero(void* data, size_t bytes, uintptr_t) override { std::memset(data, 0, bytes); }

 private:
  int multiprocessors_;
};

}  // namespace

std::unique_ptr<Device> open_emulation(int multiprocessors) { return std::make_unique<Emulation>(multiprocessors); }

}  // namespace rewright
