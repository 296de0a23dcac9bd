// A plan as JSON text -> checked values and launches. ir/plan.py describes the format. (The hash over
// kernel signatures is compared where the artifact is opened, before this.)
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernel.h"

namespace rewright {

// kKernel: a value between the parts of one launch, which has no memory.
enum class Space { kArena, kState, kWeight, kInput, kKernel };

struct Place {
  Tensor type;  // without data
  Space space = Space::kArena;
  int64_t offset = 0;
  int64_t bytes = 0;  // in arena and state: of its memory, as many as its type's or more
  std::string layout;
};

// One op of a launch that computes several.
struct PlannedPart {
  std::string name, op;
  std::vector<std::string> reads;  // "" where an optional operand is absent
  std::vector<std::string> writes;
  std::map<std::string, Attr> attrs;
};

struct PlannedLaunch {
  std::string symbol, phase;
  std::vector<std::string> reads;  // "" where an optional operand is absent
  std::vector<std::string> writes;
  std::map<std::string, Attr> attrs;
  std::vector<PlannedPart> parts;  // of launches that compute several ops
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
