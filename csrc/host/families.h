// The kernels of the host target, by family. registry.cpp joins them.
#pragma once

#include "../runtime/kernel.h"

namespace rewright {

using Registry = std::map<std::string, KernelEntry>;

void add_attention_kernels(Registry& registry);
void add_compress_kernels(Registry& registry);
void add_embed_kernels(Registry& registry);
void add_expert_kernels(Registry& registry);
void add_hyper_connection_kernels(Registry& registry);
void add_index_kernels(Registry& registry);
void add_key_kernels(Registry& registry);
void add_linear_kernels(Registry& registry);
void add_norm_kernels(Registry& registry);
void add_quantize_kernels(Registry& registry);
void add_rope_kernels(Registry& registry);
void add_route_kernels(Registry& registry);
void add_state_kernels(Registry& registry);

}  // namespace rewright
