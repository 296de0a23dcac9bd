// Which launches of a step overlap, and the step launched so.
//
// A step is a chain of launches that mostly stream weights, each for microseconds, and each needing what the
// one before wrote. Left to the stream's order, the memory idles while one ends and the next starts. So a
// launch that can wait by itself begins as soon as the one before the one before it has ended: it fills its
// rings with weights and then waits on a count in the card's memory. Two streams take the chain in turns.
// Short launches of one op that need nothing of the last launch of the chain run beside it on a third one.
//
// Why it cannot hang: of the chain only two launches run at a time. The second has no more blocks than the
// card has multiprocessors, and one of each fits a multiprocessor, so that wherever its blocks lie there is
// room for the first to go on, and the first waits for nothing but launches that end by themselves.
#pragma once

#include "device_kernel.h"

namespace rewright {

// Memory that a launch of a plan reads and writes, weights left out.
struct Touched {
  std::vector<std::pair<const void*, size_t>> reads, writes;
};
Touched touched_by(const DeviceSite& site);
// Whether two launches must keep their order.
bool conflict(const Touched& a, const Touched& b);

class Schedule {
 public:
  // `launches`: of each launch of a plan those of the card; `touched`: what each of the plan's touches.
  Schedule(const std::vector<std::vector<DeviceLaunch>>& launches, const std::vector<Touched>& touched, Device& device);

  void run(uintptr_t stream) const;
  size_t early() const { return early_; }
  size_t aside() const { return aside_; }

 private:
  static constexpr int kNone = -1, kSide = 2;
  struct Step {
    DeviceLaunch launch;
    int stream;               // 0, 1: the chain's; 2: at the side
    std::vector<int> after;   // steps on other streams that must have ended
    bool recorded = false;    // another stream waits for it
  };

  Device& device_;
  std::vector<Step> steps_;
  std::shared_ptr<void> counts_;
  size_t counts_bytes_ = 0, early_ = 0, aside_ = 0;
  int ends_[3] = {kNone, kNone, kNone};  // the last step of each stream
  std::vector<std::shared_ptr<void>> streams_, events_;  // events: by step, null where none is recorded
};

}  // namespace rewright
