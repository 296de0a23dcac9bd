// A plan as JSON text -> checked values and launches. ir/plan.py describes the format. (The hash over
// kernel signatures is compared where the artifact is opened, before this.)
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernel.h"

namespace rewright {

enum class Space { kArena, kState, kWeight, kInput };

struct Place {
  Tensor type;  // without data
  Space space = Space::kArena;
  int64_t offset = 0;
  std::string layout;
};

struct PlannedLaunch {
  std::string symbol, phase;
  std::vector<std::string> reads;  // "" where an optional operand is absent
  std::vector<std::string> writes;
  std::map<std::string, Attr> attrs;
  int64_t workspace_offset = 0, workspace_bytes = 0;
};

struct Plan {
  std::string target;
  int batch = 0, tokens = 0;
  int64_t capacity = 0;
  bool all_positions = false;
  int64_t arena_bytes = 0, state_bytes = 0;
  std::map<std::string, Place> values;
  std::vector<PlannedLaunch> launches;
  std::map<std::string, std::string> results;
};

// Throws PlanError, and nothing else, for any text that is not a plan: every value lies within its
// space and every name that a launch uses is a value.
Plan parse_plan(const std::string& text);

}  // namespace rewright
