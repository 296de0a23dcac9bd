#include "families.h"

namespace rewright {

const std::map<std::string, KernelEntry>& kernel_registry() {
  static const Registry registry = [] {
    Registry all;
    add_attention_kernels(all);
    add_compress_kernels(all);
    add_embed_kernels(all);
    add_expert_kernels(all);
    add_hyper_connection_kernels(all);
    add_index_kernels(all);
    add_key_kernels(all);
    add_linear_kernels(all);
    add_norm_kernels(all);
    add_quantize_kernels(all);
    add_rope_kernels(all);
    add_route_kernels(all);
    add_state_kernels(all);
    return all;
  }();
  return registry;
}

}  // namespace rewright
