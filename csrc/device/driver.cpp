#include "driver.h"

#include <dlfcn.h>

#include <fstream>
#include <iterator>

namespace rewright {

namespace {

// The few entry points of the driver that are used, with the types of cuda.h spelled out: the extension
// is built where no CUDA toolkit is, and libcuda is looked for when a card is first asked for.
using Result = int;
struct Api {
  Result (*init)(unsigned);
  Result (*device_get)(int*, int);
  Result (*device_attribute)(int*, int, int);
  Result (*context_retain)(void**, int);
  Result (*context_set)(void*);
  Result (*module_load)(void**, const void*);
  Result (*module_function)(void**, void*, const char*);
  Result (*function_attribute)(void*, int, int);
  Result (*memory_alloc)(uint64_t*, size_t);
  Result (*memory_free)(uint64_t);
  Result (*memory_write)(uint64_t, const void*, size_t);
  Result (*memory_read)(void*, uint64_t, size_t);
  Result (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  Result (*function_value)(int*, int, void*);
  Result (*memory_zero)(uint64_t, unsigned char, size_t, void*);
  Result (*stream_create)(void**, unsigned);
  Result (*stream_destroy)(void*);
  Result (*stream_wait)(void*, void*, unsigned);
  Result (*event_create)(void**, unsigned);
  Result (*event_destroy)(void*);
  Result (*event_record)(void*, void*);
  Result (*error_name)(Result, const char**);
};

// CUdevice_attribute, CUfunction_attribute, flags
constexpr int kMultiprocessorCount = 16, kMaxSharedPerMultiprocessor = 81, kMaxRegistersPerMultiprocessor = 82, kMaxSharedPerBlockOptin = 97;
constexpr int kStaticSharedBytes = 1, kRegisters = 4, kMaxDynamicSharedBytes = 8, kSharedCarveout = 9;
constexpr unsigned kNonBlocking = 1, kDisableTiming = 2;
constexpr Result kNotFound = 500;

const Api& api() {
  static const Api opened = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw DeviceError("the NVIDIA driver is not installed: libcuda.so.1 was not found");
    }
    Api found{};
    const auto resolve = [&](auto& into, const char* name) {
      into = reinterpret_cast<std::remove_reference_t<decltype(into)>>(dlsym(library, name));
      if (into == nullptr) throw DeviceError(std::string("the NVIDIA driver is too old: it has no ") + name);
    };
    resolve(found.init, "cuInit");
    resolve(found.device_get, "cuDeviceGet");
    resolve(found.device_attribute, "cuDeviceGetAttribute");
    resolve(found.context_retain, "cuDevicePrimaryCtxRetain");
    resolve(found.context_set, "cuCtxSetCurrent");
    resolve(found.module_load, "cuModuleLoadData");
    resolve(found.module_function, "cuModuleGetFunction");
    resolve(found.function_attribute, "cuFuncSetAttribute");
    resolve(found.memory_alloc, "cuMemAlloc_v2");
    resolve(found.memory_free, "cuMemFree_v2");
    resolve(found.memory_write, "cuMemcpyHtoD_v2");
    resolve(found.memory_read, "cuMemcpyDtoH_v2");
    resolve(found.launch, "cuLaunchKernel");
    resolve(found.function_value, "cuFuncGetAttribute");
    resolve(found.memory_zero, "cuMemsetD8Async");
    resolve(found.stream_create, "cuStreamCreate");
    resolve(found.stream_destroy, "cuStreamDestroy_v2");
    resolve(found.stream_wait, "cuStreamWaitEvent");
    resolve(found.event_create, "cuEventCreate");
    resolve(found.event_destroy, "cuEventDestroy_v2");
    resolve(found.event_record, "cuEventRecord");
    resolve(found.error_name, "cuGetErrorName");
    return found;
  }();
  return opened;
}

void require(Result result, const std::string& what) {
  if (result == 0) return;
  const char* name = nullptr;
  api().error_name(result, &name);
  throw DeviceError(what + ": " + (name ? name : "error " + std::to_string(result)));
}

class Cuda : public Device {
 public:
  Cuda(int ordinal, const std::vector<std::string>& paths) {
    require(api().init(0), "the NVIDIA driver does not start");
    int device = 0;
    require(api().device_get(&device, ordinal), "there is no card " + std::to_string(ordinal));
    require(api().device_attribute(&multiprocessors_, kMultiprocessorCount, device), "the card cannot be asked");
    require(api().device_attribute(&most_shared_, kMaxSharedPerBlockOptin, device), "the card cannot be asked");
    require(api().device_attribute(&shared_of_multiprocessor_, kMaxSharedPerMultiprocessor, device), "the card cannot be asked");
    require(api().device_attribute(&registers_of_multiprocessor_, kMaxRegistersPerMultiprocessor, device), "the card cannot be asked");
    require(api().context_retain(&context_, device), "the card cannot be used");  // kept until the process ends
    require(api().context_set(context_), "the card cannot be used");
    for (const std::string& path : paths) {
      std::ifstream file(path, std::ios::binary);
      const std::string image{std::istreambuf_iterator<char>(file), {}};
      if (image.empty()) throw DeviceError("the kernels in " + path + " cannot be read");
      void* module = nullptr;
      require(api().module_load(&module, image.data()), "the card cannot load the kernels in " + path);
      modules_.push_back(module);
    }
  }

  int multiprocessors() const override { return multiprocessors_; }

  Function function(const std::string& name, unsigned shared_bytes, unsigned) override {
    Function& found = functions_[name];
    for (size_t i = 0; found.handle == nullptr && i < modules_.size(); ++i) {
      const Result result = api().module_function(&found.handle, modules_[i], name.c_str());
      if (result != kNotFound) require(result, "the kernel " + name + " cannot be loaded");
      if (result == kNotFound) found.handle = nullptr;
    }
    if (found.handle == nullptr) throw DeviceError("this build has no kernel " + name);
    if (found.name.empty()) {
      found.name = name;
      // A multiprocessor that changes how it divides its memory must be empty: two kernels that are to run
      // side by side must agree, so all ask for the most shared memory.
      require(api().function_attribute(found.handle, kSharedCarveout, 100), "the kernel " + name + " cannot be set up");
    }
    if (shared_bytes > static_cast<unsigned>(most_shared_)) {
      throw DeviceError("the kernel " + name + " needs " + std::to_string(shared_bytes) +
                        " bytes of shared memory, a block of this card has " + std::to_string(most_shared_));
    }
    unsigned& set = shared_[name];
    if (shared_bytes > set) {
      set = shared_bytes;
      require(api().function_attribute(found.handle, kMaxDynamicSharedBytes, static_cast<int>(set)),
              "the kernel " + name + " cannot have its shared memory");
    }
    return found;
  }

  std::shared_ptr<void> upload(const void* data, size_t bytes) override {
    uint64_t address = 0;
    require(api().memory_alloc(&address, bytes), "the card has no memory for the parameters of a launch");
    std::shared_ptr<void> held(reinterpret_cast<void*>(address), [](void* p) { api().memory_free(reinterpret_cast<uint64_t>(p)); });
    require(api().memory_write(address, data, bytes), "the parameters of a launch cannot be copied");
    return held;
  }

  void download(void* data, const void* from, size_t bytes) override {
    require(api().memory_read(data, reinterpret_cast<uint64_t>(from), bytes), "calibrated scales cannot be copied from the card");
  }

  void launch(const DeviceLaunch& launch, uintptr_t stream) override {
    void* params[] = {const_cast<uint64_t*>(launch.params.data())};
    require(api().launch(launch.function.handle, launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, 1, 1,
                         launch.shared_bytes, reinterpret_cast<void*>(stream), params, nullptr),
            "the kernel " + launch.function.name + " cannot be launched");
  }

  int shared_of_multiprocessor() const override { return shared_of_multiprocessor_; }

  bool fit_together(const DeviceLaunch& a, const DeviceLaunch& b) override {
    int shared = 0, registers = 0;
    for (const DeviceLaunch* launch : {&a, &b}) {
      int fixed = 0, each = 0;
      require(api().function_value(&fixed, kStaticSharedBytes, launch->function.handle), "a kernel cannot be asked");
      require(api().function_value(&each, kRegisters, launch->function.handle), "a kernel cannot be asked");
      shared += fixed + static_cast<int>(launch->shared_bytes) + kReservedShared;
      registers += (each + 7) / 8 * 8 * static_cast<int>((launch->threads + 31) / 32 * 32);
    }
    return shared <= shared_of_multiprocessor_ && registers <= registers_of_multiprocessor_ && a.threads + b.threads <= 2048;
  }

  std::shared_ptr<void> make_stream() override {
    void* stream = nullptr;
    require(api().stream_create(&stream, kNonBlocking), "a stream cannot be made");
    return {stream, [](void* p) { api().stream_destroy(p); }};
  }
  std::shared_ptr<void> make_event() override {
    void* event = nullptr;
    require(api().event_create(&event, kDisableTiming), "an event cannot be made");
    return {event, [](void* p) { api().event_destroy(p); }};
  }
  void record(void* event, uintptr_t stream) override {
    require(api().event_record(event, reinterpret_cast<void*>(stream)), "an event cannot be recorded");
  }
  void wait(uintptr_t stream, void* event) override {
    require(api().stream_wait(reinterpret_cast<void*>(stream), event, 0), "a stream cannot wait");
  }
  void zero(void* data, size_t bytes, uintptr_t stream) override {
    require(api().memory_zero(reinterpret_cast<uint64_t>(data), 0, bytes, reinterpret_cast<void*>(stream)), "memory cannot be cleared");
  }

 private:
  static constexpr int kReservedShared = 1024;  // of every block, by the system
  int multiprocessors_ = 0, most_shared_ = 0, shared_of_multiprocessor_ = 0, registers_of_multiprocessor_ = 0;
  void* context_ = nullptr;
  std::vector<void*> modules_;
  std::map<std::string, Function> functions_;
  std::map<std::string, unsigned> shared_;
};

}  // namespace

std::unique_ptr<Device> open_cuda(int ordinal, const std::vector<std::string>& paths) {
  return std::make_unique<Cuda>(ordinal, paths);
}

}  // namespace rewright
