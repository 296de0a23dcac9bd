#include "plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace rewright {
namespace {

using Json = nlohmann::json;

constexpr int64_t kFormat = 2;
constexpr int64_t kMost = int64_t{1} << 46;
constexpr int64_t kMostTokens = 1 << 24;  // in one step

const Json& member(const Json& object, const char* key, const std::string& where) {
  check(object.is_object() && object.contains(key), where + " has no " + key);
  return object[key];
}

std::string text(const Json& value, const std::string& where) {
  check(value.is_string(), where + " is not a string");
  return value.get<std::string>();
}

int64_t size(const Json& value, const std::string& where) {
  check(value.is_number_integer(), where + " is not an integer");
  check(!value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(kMost), where + " is too large");
  const int64_t number = value.get<int64_t>();
  check(0 <= number && number <= kMost, where + " is out of range");
  return number;
}

Attr attribute(const Json& value, const std::string& where) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_float()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  const auto integer = [&](const Json& item) {
    check(item.is_number_integer() && (!item.is_number_unsigned() || item.get<uint64_t>() <= uint64_t{1} << 62),
          where + " is no attribute");
    return item.get<int64_t>();
  };
  if (value.is_array()) {
    std::vector<int64_t> list;
    for (const Json& item : value) list.push_back(integer(item));
    return list;
  }
  return integer(value);
}

Space space(const std::string& name, const std::string& where) {
  if (name == "arena") return Space::kArena;
  if (name == "state") return Space::kState;
  if (name == "weight") return Space::kWeight;
  if (name == "kernel") return Space::kKernel;
  check(name == "input", where + " lies in no known space");
  return Space::kInput;
}

Place place(const Json& value, const Plan& plan, const std::string& where) {
  Place result;
  result.type = parse_type(text(member(value, "type", where), where + ": type"));
  result.space = space(text(member(value, "space", where), where + ": space"), where);
  if (value.contains("layout")) result.layout = text(value["layout"], where + ": layout");
  if (result.space == Space::kArena || result.space == Space::kState) {
    result.offset = size(member(value, "offset", where), where + ": offset");
    result.bytes = value.contains("bytes") ? size(value["bytes"], where + ": bytes") : result.type.nbytes();
    const int64_t whole = result.space == Space::kArena ? plan.arena_bytes : plan.state_bytes;
    check(result.type.nbytes() <= result.bytes, where + " is larger than its bytes");
    check(result.bytes <= whole && result.offset <= whole - result.bytes, where + " ends beyond its space");
    check(result.offset % 64 == 0, where + " is not aligned");
  }
  return result;
}

std::vector<std::string> names(const Json& value, const Plan& plan, bool optional, const std::string& where) {
  check(value.is_array(), where + " is not a list");
  std::vector<std::string> result;
  for (const Json& item : value) {
    if (optional && item.is_null()) {
      result.emplace_back();
      continue;
    }
    result.push_back(text(item, where));
    check(plan.values.contains(result.back()), where + " names no value: " + result.back());
  }
  return result;
}

std::map<std::string, Attr> attributes(const Json& value, const std::string& where) {
  check(value.is_object(), where + ": attrs is no object");
  std::map<std::string, Attr> result;
  for (const auto& [name, attr] : value.items()) {
    if (!attr.is_null()) result.emplace(name, attribute(attr, where + ": attribute " + name));
  }
  return result;
}

PlannedPart part(const Json& value, const Plan& plan, const std::string& where) {
  PlannedPart result;
  result.name = text(member(value, "name", where), where + ": name");
  result.op = text(member(value, "op", where), where + ": op");
  result.reads = names(member(value, "reads", where), plan, true, where + ": reads");
  result.writes = names(member(value, "writes", where), plan, false, where + ": writes");
  result.attrs = attributes(member(value, "attrs", where), where);
  return result;
}

PlannedLaunch launch(const Json& value, const Plan& plan, const std::string& where) {
  PlannedLaunch result;
  result.symbol = text(member(value, "symbol", where), where + ": symbol");
  result.phase = text(member(value, "phase", where), where + ": phase");
  result.reads = names(member(value, "reads", where), plan, true, where + ": reads");
  result.writes = names(member(value, "writes", where), plan, false, where + ": writes");
  for (const std::string& name : result.writes) {
    const Space written = plan.values.at(name).space;
    check(written == Space::kArena || written == Space::kState, where + " writes " + name + ", which is given");
  }
  result.attrs = attributes(member(value, "attrs", where), where);
  if (value.contains("parts")) {
    check(value["parts"].is_array(), where + ": parts is not a list");
    for (const Json& item : value["parts"]) result.parts.push_back(part(item, plan, where + ": part"));
  }
  const Json& workspace = member(value, "workspace", where);
  check(workspace.is_array() && workspace.size() == 2, where + ": workspace is no pair");
  result.workspace_offset = size(workspace[0], where + ": workspace");
  result.workspace_bytes = size(workspace[1], where + ": workspace");
  check(result.workspace_bytes <= plan.arena_bytes && result.workspace_offset <= plan.arena_bytes - result.workspace_bytes,
        where + ": workspace ends beyond the arena");
  check(result.workspace_offset % 64 == 0, where + ": workspace is not aligned");
  // Kernels keep lists of rows there and trust them.
  for (const auto* used : {&result.reads, &result.writes}) {
    for (const std::string& name : *used) {
      const Place* value = name.empty() ? nullptr : &plan.values.at(name);
      if (value == nullptr || value->space != Space::kArena) continue;
      check(value->offset + value->bytes <= result.workspace_offset ||
                result.workspace_offset + result.workspace_bytes <= value->offset,
            where + ": workspace overlaps " + name);
    }
  }
  return result;
}

Plan read(const Json& value) {
  Plan plan;
  check(size(member(value, "format", "the plan"), "format") == kFormat, "this is no plan of format 2");
  plan.target = text(member(value, "target", "the plan"), "target");
  const Json& variant = member(value, "variant", "the plan");
  const int64_t batch = size(member(variant, "batch", "variant"), "batch");
  const int64_t tokens = size(member(variant, "tokens", "variant"), "tokens");
  check(1 <= batch && batch <= kMostTokens && 1 <= tokens && tokens <= kMostTokens / batch, "the variant's batch or tokens are out of range");
  plan.batch = static_cast<int>(batch);
  plan.tokens = static_cast<int>(tokens);
  plan.capacity = size(member(variant, "capacity", "variant"), "capacity");
  const Json& all = member(variant, "all_positions", "variant");
  check(all.is_boolean(), "all_positions is not true or false");
  plan.all_positions = all.get<bool>();
  plan.arena_bytes = size(member(value, "arena_bytes", "the plan"), "arena_bytes");
  plan.state_bytes = size(member(value, "state_bytes", "the plan"), "state_bytes");
  const Json& values = member(value, "values", "the plan");
  check(values.is_object(), "values is no object");
  for (const auto& [name, item] : values.items()) {
    check(!name.empty(), "a value has no name");
    plan.values.emplace(name, place(item, plan, "value " + name));
  }
  const Json& launches = member(value, "launches", "the plan");
  check(launches.is_array(), "launches is not a list");
  for (size_t i = 0; i < launches.size(); ++i) {
    plan.launches.push_back(launch(launches[i], plan, "launch " + std::to_string(i)));
  }
  const Json& results = member(value, "results", "the plan");
  check(results.is_object(), "results is no object");
  for (const auto& [name, item] : results.items()) {
    const std::string of = text(item, "result " + name);
    check(plan.values.contains(of), "result " + name + " names no value: " + of);
    plan.results.emplace(name, of);
  }
  return plan;
}

}  // namespace

Plan parse_plan(const std::string& text) {
  try {
    return read(Json::parse(text));
  } catch (const Json::exception& e) {
    std::string what = e.what();  // quotes what it read, which may end within a character
    std::replace_if(what.begin(), what.end(), [](unsigned char c) { return c < 32 || c > 126; }, '?');
    throw PlanError("the plan is not valid JSON: " + what);
  }
}

}  // namespace rewright
