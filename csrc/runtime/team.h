// The threads that execute a plan. Every thread runs every kernel and takes its own share of the
// work, so one step is one parallel region with a barrier between dependent parts.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace rewright {

struct Range {
  int64_t begin, end;
};

// Threads wait here for each other. Spins first: the work between two barriers takes microseconds.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait();

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> phase_{0};
};

// One thread's place in the team.
class Worker {
 public:
  Worker(int rank, int size, Barrier* barrier, size_t scratch_bytes);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // This thread's part of `count` equal pieces of work: contiguous, ascending with the rank, cut at
  // multiples of `grain`. What a piece computes must not depend on where the cuts are.
  Range share(int64_t count, int64_t grain = 1) const {
    const int64_t units = (count + grain - 1) / grain;
    return {std::min(count, units * rank_ / size_ * grain), std::min(count, units * (rank_ + 1) / size_ * grain)};
  }

  // Wait until every thread of the team is here.
  void barrier() {
    if (size_ > 1) barrier_->wait();
  }

  // Memory of this thread alone, 64-byte aligned, as large as the largest kernel asked for.
  float* scratch() const { return scratch_; }

 private:
  int rank_, size_;
  Barrier* barrier_;
  std::unique_ptr<char[]> memory_;
  float* scratch_;
};

// Runs a function on every thread of a team, the caller's thread being the first.
class Team {
 public:
  Team(int threads, size_t scratch_bytes);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()); }
  void run(const std::function<void(Worker&)>& work);

 private:
  struct Signal;
  Barrier barrier_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<Signal> signal_;
  std::vector<std::thread> threads_;
};

}  // namespace rewright
