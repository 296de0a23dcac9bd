#include "cpu_features.h"

namespace rewright {

std::vector<const char*> cpu_features() {
  std::vector<const char*> names;
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.push_back("avx2+fma");
  if (__builtin_cpu_supports("avx512f")) names.push_back("avx512f");
#elif defined(__aarch64__)
  names.push_back("neon");
#endif
  return names;
}

}  // namespace rewright
