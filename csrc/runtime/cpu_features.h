// Which vector instruction sets this processor offers, asked once at run time.
#pragma once

#include <vector>

namespace rewright {

// Names in ascending width; empty where only the portable path can run.
std::vector<const char*> cpu_features();

}  // namespace rewright
