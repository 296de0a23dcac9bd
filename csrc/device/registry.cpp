#include "families.h"

namespace rewright {

const DeviceRegistry& device_registry() {
  static const DeviceRegistry registry = [] {
    DeviceRegistry all;
    add_attention_kernels(all);
    add_index_kernels(all);
    add_compress_kernels(all);
    add_hyper_connection_kernels(all);
    add_key_kernels(all);
    add_linear_kernels(all);
    add_moe_kernels(all);
    add_norm_kernels(all);
    add_phases(all);
    add_quantize_kernels(all);
    add_rope_kernels(all);
    add_row_kernels(all);
    add_state_kernels(all);
    return all;
  }();
  return registry;
}

int element_of(const DeviceSite& site, const Tensor& tensor) {
  site.require(tensor.dtype == DType::kBF16 || tensor.dtype == DType::kF32, "a tensor is neither bf16 nor f32");
  return tensor.dtype == DType::kF32;
}

}  // namespace rewright
