// How launches that overlap keep their order (device/device_program.cpp decides which do).
#pragma once

namespace rewright {

// A launch may begin before the one before it has ended, and fetch what no launch writes. Counts lie in the
// card's memory and begin a step at zero. All null: the launch before has ended.
struct Order {
  const int* before;  // ended blocks of the launch before, or null
  int blocks;         // of all it has
  const int* known;   // above zero once the launch before has chosen experts, or null: they are known
  int* done;          // ended blocks of this launch, or null
  int* chosen;        // raised when this launch has chosen experts, or null
};

}  // namespace rewright
