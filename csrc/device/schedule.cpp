#include "schedule.h"

#include <algorithm>

#include "../kernels/common/order.h"

namespace rewright {

namespace {

using Ranges = std::vector<std::pair<const void*, size_t>>;

bool meet(const Ranges& a, const Ranges& b) {
  for (const auto& [p, n] : a) {
    for (const auto& [q, m] : b) {
      if (static_cast<const char*>(p) < static_cast<const char*>(q) + m && static_cast<const char*>(q) < static_cast<const char*>(p) + n) return true;
    }
  }
  return false;
}

void add(Ranges& ranges, const std::vector<Tensor>& tensors) {
  for (const Tensor& t : tensors) {
    if (t) ranges.emplace_back(t.data, static_cast<size_t>(t.nbytes()));
  }
}

void set_order(DeviceLaunch& launch, const Order& order) {
  std::memcpy(reinterpret_cast<char*>(launch.params.data()) + launch.order_offset, &order, sizeof order);
}

}  // namespace

Touched touched_by(const DeviceSite& site) {
  Touched touched;
  add(touched.reads, site.operands);
  add(touched.writes, site.results);
  for (const Part& part : site.parts) {
    add(touched.reads, part.operands);
    add(touched.writes, part.results);
  }
  if (site.workspace_bytes) touched.writes.emplace_back(site.workspace, static_cast<size_t>(site.workspace_bytes));
  return touched;
}

bool conflict(const Touched& a, const Touched& b) {
  return meet(a.writes, b.reads) || meet(a.reads, b.writes) || meet(a.writes, b.writes);
}

Schedule::Schedule(const std::vector<std::vector<DeviceLaunch>>& launches, const std::vector<Touched>& touched, Device& device)
    : device_(device) {
  const int multiprocessors = device.multiprocessors();
  size_t count = 0;
  for (const auto& made : launches) count += made.size();
  counts_bytes_ = 2 * count * sizeof(int);
  const std::vector<int> zeros(2 * count + 1);
  counts_ = device.upload(zeros.data(), zeros.size() * sizeof(int));
  int* const counts = static_cast<int*>(counts_.get());

  int last = kNone, last_plan = kNone, before_last = kNone;  // of the chain
  std::vector<int> side;                                     // steps at the side that the chain has not joined
  std::vector<size_t> side_plans;
  std::vector<Order> orders(count, Order{});
  const auto after = [&](int step, int other) {
    if (other == kNone || steps_[other].stream == steps_[step].stream) return;
    steps_[step].after.push_back(other);
    steps_[other].recorded = true;
  };
  for (size_t i = 0; i < launches.size(); ++i) {
    const bool single = launches[i].size() == 1 && launches[i][0].order_offset < 0;
    if (single && last != kNone && !conflict(touched[i], touched[last_plan])) {
      // At the side: behind all of the chain but its last launch.
      const int step = static_cast<int>(steps_.size());
      steps_.push_back({launches[i][0], kSide, {}, false});
      after(step, before_last);
      side.push_back(step);
      side_plans.push_back(i);
      ++aside_;
      continue;
    }
    const bool joins = std::any_of(side_plans.begin(), side_plans.end(), [&](size_t s) { return conflict(touched[i], touched[s]); });
    for (const DeviceLaunch& launch : launches[i]) {
      const int step = static_cast<int>(steps_.size());
      Step made{launch, 0, {}, false};
      bool early = last != kNone && launch.waits && steps_[last].launch.ends && !joins;
      early = early && launch.grid[0] * launch.grid[1] * launch.grid[2] <= static_cast<unsigned>(multiprocessors);
      early = early && !meet(launch.early, touched[last_plan].writes);
      early = early && (steps_[last].launch.chooses || !meet(launch.choice, touched[last_plan].writes));
      early = early && device.fit_together(steps_[last].launch, launch);
      if (last != kNone) made.stream = early ? 1 - steps_[last].stream : steps_[last].stream;
      steps_.push_back(made);
      if (early) {
        after(step, before_last);
        for (int other : std::vector<int>(steps_[last].after)) after(step, other);  // what the one before waits for
        const DeviceLaunch& first = steps_[last].launch;
        orders[last].done = counts + 2 * last;
        orders[step].before = counts + 2 * last;
        orders[step].blocks = static_cast<int>(first.grid[0] * first.grid[1] * first.grid[2]);
        if (!launch.choice.empty() && first.chooses) orders[last].chosen = const_cast<int*>(orders[step].known = counts + 2 * last + 1);
        ++early_;
      } else if (joins) {
        for (int s : side) after(step, s);
        side.clear();
        side_plans.clear();
      }
      before_last = last;
      last = step;
      last_plan = static_cast<int>(i);
    }
  }
  for (size_t s = 0; s < steps_.size(); ++s) {
    if (steps_[s].launch.order_offset >= 0) set_order(steps_[s].launch, orders[s]);
  }
  for (size_t s = 0; s < steps_.size(); ++s) ends_[steps_[s].stream] = static_cast<int>(s);
  for (int s : ends_) {
    if (s != kNone) steps_[s].recorded = true;
  }
  streams_ = {device.make_stream(), device.make_stream()};
  events_.resize(steps_.size() + 1);
  for (size_t s = 0; s < steps_.size(); ++s) {
    if (steps_[s].recorded) events_[s] = device.make_event();
  }
  events_.back() = device.make_event();
}

void Schedule::run(uintptr_t stream) const {
  const uintptr_t streams[] = {stream, reinterpret_cast<uintptr_t>(streams_[0].get()), reinterpret_cast<uintptr_t>(streams_[1].get())};
  device_.zero(counts_.get(), counts_bytes_, stream);
  void* const begun = events_.back().get();
  device_.record(begun, stream);
  bool used[] = {true, false, false};
  for (size_t s = 0; s < steps_.size(); ++s) {
    const Step& step = steps_[s];
    const uintptr_t on = streams[step.stream];
    if (!used[step.stream]) device_.wait(on, begun);
    used[step.stream] = true;
    for (int other : step.after) device_.wait(on, events_[other].get());
    device_.launch(step.launch, on);
    if (step.recorded) device_.record(events_[s].get(), on);
  }
  for (int s : {ends_[1], ends_[2]}) {
    if (s != kNone) device_.wait(stream, events_[s].get());
  }
}

}  // namespace rewright
