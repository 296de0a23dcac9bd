#include "team.h"

#include <condition_variable>
#include <mutex>

namespace rewright {

void Barrier::wait() {
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  // A core that the others need is given back after a while: more threads than cores still work.
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
    if (spins < 4096) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      std::this_thread::yield();
    }
  }
}

Worker::Worker(int rank, int size, Barrier* barrier, size_t scratch_bytes)
    : rank_(rank), size_(size), barrier_(barrier), memory_(new char[scratch_bytes + 64]) {
  const auto start = reinterpret_cast<uintptr_t>(memory_.get());
  scratch_ = reinterpret_cast<float*>((start + 63) / 64 * 64);
}

// Wakes the other threads for a step; between steps they sleep.
struct Team::Signal {
  std::mutex mutex;
  std::condition_variable wake;
  const std::function<void(Worker&)>* work = nullptr;
  uint64_t generation = 0;
  bool stop = false;
};

Team::Team(int threads, size_t scratch_bytes) : barrier_(threads), signal_(std::make_unique<Signal>()) {
  for (int rank = 0; rank < threads; ++rank) {
    workers_.push_back(std::make_unique<Worker>(rank, threads, &barrier_, scratch_bytes));
  }
  for (int rank = 1; rank < threads; ++rank) {
    threads_.emplace_back([this, rank] {
      uint64_t seen = 0;
      for (;;) {
        const std::function<void(Worker&)>* work;
        {
          std::unique_lock lock(signal_->mutex);
          signal_->wake.wait(lock, [&] { return signal_->stop || signal_->generation != seen; });
          if (signal_->stop) return;
          seen = signal_->generation;
          work = signal_->work;
        }
        (*work)(*workers_[rank]);
        barrier_.wait();
      }
    });
  }
}

Team::~Team() {
  {
    std::lock_guard lock(signal_->mutex);
    signal_->stop = true;
  }
  signal_->wake.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void(Worker&)>& work) {
  if (workers_.size() == 1) return work(*workers_[0]);
  {
    std::lock_guard lock(signal_->mutex);
    signal_->work = &work;
    ++signal_->generation;
  }
  signal_->wake.notify_all();
  work(*workers_[0]);
  barrier_.wait();
}

}  // namespace rewright
