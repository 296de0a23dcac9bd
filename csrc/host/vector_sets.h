// The tables of vector.h, one for each instruction set that this build has.
#pragma once

#include "vector.h"

namespace rewright {

extern const Vector kPortable;
#if defined(__x86_64__)
extern const Vector kAvx2;
extern const Vector kAvx512;
#endif

}  // namespace rewright
