// The one exception of the native runtime: a plan, a model or a request that cannot be executed.
#pragma once

#include <stdexcept>
#include <string>

namespace rewright {

// The text says what is wrong and where.
struct PlanError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(bool condition, const std::string& what) {
  if (!condition) throw PlanError(what);
}

}  // namespace rewright
