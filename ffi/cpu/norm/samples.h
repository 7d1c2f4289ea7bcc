// The order in which the steps of a call run over the samples and their tasks.
#pragma once

#include "cpu/norm/layout.h"
#include "cpu/runtime/parallel_for.h"

namespace jaxgrad::JAXGRAD_ISA {

constexpr int64_t kMaxSlots = 256;  // samples that are computed at the same time

template <class T>
struct Sample {
  int64_t index;
  NormScratch<T> scratch;
};

// A step of a call: body(sample, task), for every task of a sample.
template <class Body, bool kReversed>
struct TaskStep {
  static constexpr bool kFromTheEnd = kReversed;
  static int64_t tasks(const NormLayout& layout) { return layout.tasks(); }
  template <class T>
  void run(const NormLayout& layout, const Sample<T>& sample, int64_t index) const {
    body(sample, layout.task(index));
  }
  Body body;
};

// A step of a call: body(sample).
template <class Body>
struct SampleStep {
  static constexpr bool kFromTheEnd = false;
  static int64_t tasks(const NormLayout&) { return 1; }
  template <class T>
  void run(const NormLayout&, const Sample<T>& sample, int64_t) const {
    body(sample);
  }
  Body body;
};

template <class Body>
SampleStep<Body> per_sample(Body body) {
  return {body};
}
template <class Body>
TaskStep<Body, false> per_task(Body body) {
  return {body};
}
// From the last task to the first: a step that reads x again starts with what is still in the cache.
template <class Body>
TaskStep<Body, true> per_task_from_the_end(Body body) {
  return {body};
}

template <class T>
class Samples {
 public:
  Samples(const NormLayout& layout, std::byte* workspace, Parallel& parallel)
      : layout_(layout), workspace_(workspace), parallel_(parallel) {}

  static int64_t bytes(const NormLayout& layout) { return slots(layout) * slot_bytes(layout); }

  // Each thread runs all steps on a sample while it is in the cache. If there are few samples, the threads share the
  // tasks of each step instead.
  template <class... Steps>
  void run(Steps... steps) const {
    const int64_t samples = layout_.shape.S, workers = min_of(parallel_.threads(), kMaxSlots);
    if (samples <= slots(layout_) && samples % workers != 0 && samples < 4 * workers) {
      (run_step(steps), ...);
      return;
    }
    int64_t next = 0;
    parallel_for(parallel_, workers, [&](int64_t worker) {
      for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < samples;) {
        const Sample<T> sample = at(i, worker);
        (run_on(sample, steps), ...);
      }
    });
  }

 private:
  static int64_t slots(const NormLayout& layout) { return min_of(layout.shape.S, kMaxSlots); }
  static int64_t slot_bytes(const NormLayout& layout) {
    Arena arena(nullptr);
    NormScratch<T>(layout, arena);
    return round_up(arena.bytes(), 64);
  }
  Sample<T> at(int64_t index, int64_t slot) const {
    Arena arena(workspace_ + slot * slot_bytes(layout_));
    return {index, NormScratch<T>(layout_, arena)};
  }

  template <class Step>
  void run_on(const Sample<T>& sample, const Step& step) const {
    const int64_t tasks = step.tasks(layout_);
    for (int64_t i = 0; i < tasks; ++i) step.run(layout_, sample, Step::kFromTheEnd ? tasks - 1 - i : i);
  }
  template <class Step>
  void run_step(const Step& step) const {
    const int64_t tasks = step.tasks(layout_), all = layout_.shape.S * tasks;
    parallel_for(parallel_, all, [&](int64_t i) {
      const int64_t index = Step::kFromTheEnd ? all - 1 - i : i, sample = index / tasks;
      step.run(layout_, at(sample, sample), index % tasks);
    });
  }

  const NormLayout& layout_;
  std::byte* const workspace_;
  Parallel& parallel_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
