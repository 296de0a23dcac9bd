// The kernels of the sm80 target, by family. registry.cpp joins them.
#pragma once

#include "device_kernel.h"

namespace rewright {

void add_attention_kernels(DeviceRegistry& registry);
void add_index_kernels(DeviceRegistry& registry);
void add_linear_kernels(DeviceRegistry& registry);
void add_compress_kernels(DeviceRegistry& registry);
void add_hyper_connection_kernels(DeviceRegistry& registry);
void add_key_kernels(DeviceRegistry& registry);
void add_moe_kernels(DeviceRegistry& registry);
void add_norm_kernels(DeviceRegistry& registry);
void add_quantize_kernels(DeviceRegistry& registry);
void add_rope_kernels(DeviceRegistry& registry);
void add_row_kernels(DeviceRegistry& registry);
void add_state_kernels(DeviceRegistry& registry);

void add_phases(DeviceRegistry& registry);

// Element (kernels/common/numeric.cuh) of a tensor's dtype; throws PlanError where it is neither bf16 nor f32.
int element_of(const DeviceSite& site, const Tensor& tensor);

}  // namespace rewright
