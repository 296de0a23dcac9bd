#include "vector.h"

#include <cstdlib>
#include <cstring>

#include "vector_sets.h"

namespace rewright {
namespace {

const Vector& choose() {
  const char* wanted = std::getenv("REWRIGHT_VECTOR");
  const auto allowed = [wanted](const Vector& set) { return !wanted || !*wanted || std::strcmp(wanted, set.name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && allowed(kAvx512)) return kAvx512;
  if (avx2 && allowed(kAvx2)) return kAvx2;
#endif
  return kPortable;
}

}  // namespace

const Vector& vector() {
  static const Vector& chosen = choose();
  return chosen;
}

}  // namespace rewright
