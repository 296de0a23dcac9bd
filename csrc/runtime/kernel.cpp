#include "kernel.h"

namespace rewright {

const Tensor& CallSite::operand(size_t index) const {
  check(index < operands.size(), where + ": has no operand " + std::to_string(index));
  return operands[index];
}

const Tensor& CallSite::required(size_t index) const {
  const Tensor& tensor = operand(index);
  require(static_cast<bool>(tensor), "operand " + std::to_string(index) + " is absent");
  return tensor;
}

const Tensor& CallSite::result(size_t index) const {
  check(index < results.size(), where + ": has no result " + std::to_string(index));
  return results[index];
}

void CallSite::require(bool condition, const std::string& what) const {
  if (!condition) throw PlanError(where + ": " + what);
}

namespace {

template <typename T>
const T* find(const CallSite& site, const char* name) {
  const auto found = site.attrs.find(name);
  if (found == site.attrs.end()) return nullptr;
  const T* value = std::get_if<T>(&found->second);
  site.require(value != nullptr, std::string("attribute ") + name + " is of another type");
  return value;
}

template <typename T>
const T& need(const CallSite& site, const char* name) {
  const T* value = find<T>(site, name);
  site.require(value != nullptr, std::string("attribute ") + name + " is missing");
  return *value;
}

}  // namespace

bool CallSite::flag(const char* name, bool otherwise) const {
  const bool* value = find<bool>(*this, name);
  return value ? *value : otherwise;
}

int64_t CallSite::integer(const char* name) const { return need<int64_t>(*this, name); }

int64_t CallSite::integer(const char* name, int64_t otherwise) const {
  const int64_t* value = find<int64_t>(*this, name);
  return value ? *value : otherwise;
}

double CallSite::number(const char* name) const {
  const auto found = attrs.find(name);
  require(found != attrs.end(), std::string("attribute ") + name + " is missing");
  if (const int64_t* whole = std::get_if<int64_t>(&found->second)) return static_cast<double>(*whole);
  return need<double>(*this, name);
}

double CallSite::number(const char* name, double otherwise) const {
  return attrs.contains(name) ? number(name) : otherwise;
}

std::string CallSite::text(const char* name, const std::string& otherwise) const {
  const std::string* value = find<std::string>(*this, name);
  return value ? *value : otherwise;
}

std::vector<int64_t> CallSite::list(const char* name) const {
  const auto* value = find<std::vector<int64_t>>(*this, name);
  return value ? *value : std::vector<int64_t>{};
}

}  // namespace rewright
