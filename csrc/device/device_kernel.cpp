#include "device_kernel.h"

namespace rewright {

namespace {

template <typename T>
const T& need(const Part& part, const char* name) {
  const auto found = part.attrs.find(name);
  const T* value = found == part.attrs.end() ? nullptr : std::get_if<T>(&found->second);
  if (value == nullptr) throw PlanError(part.where + ": attribute " + name + " is missing or of another type");
  return *value;
}

}  // namespace

int64_t Part::integer(const char* name) const { return need<int64_t>(*this, name); }

double Part::number(const char* name) const {
  const auto found = attrs.find(name);
  if (found != attrs.end()) {
    if (const int64_t* whole = std::get_if<int64_t>(&found->second)) return static_cast<double>(*whole);
  }
  return need<double>(*this, name);
}

std::string Part::text(const char* name) const { return need<std::string>(*this, name); }

}  // namespace rewright
