// The weight gradient: sums over parts of the outputs, and then the sum of these in a fixed order.
#pragma once

#include "cpu/depthwise/product_sum.h"
#include "cpu/depthwise/transpose.h"
#include "cpu/depthwise/workers.h"

namespace jaxgrad::JAXGRAD_ISA {

// Division of the outputs of a problem: boxes of each image, some of which are a part. It depends on the shape alone,
// so that the result does not depend on the number of threads.
struct ProductParts {
  static constexpr int64_t kMaxParts = 32, kMaxPositions = 1024, kMaxFloats = 1 << 21;

  ProductParts(const DepthwiseShape& s, bool copies)
      : boxes(s.y, [&](const Box& box) {
          const int64_t inputs = max_inputs(s, box), outputs = box.positions();
          if (copies) scratch = {inputs, outputs};
          return outputs <= kMaxPositions && (!copies || outputs == 1 || inputs + outputs <= kMaxCopiedPositions);
        }) {
    rows = s.taps() + 1;
    padded = round_up(s.channels, kPaddedLanes);
    items = s.batch * boxes.count();
    parts = min_of(items, max_of(1, min_of(kMaxParts, kMaxFloats / (rows * padded))));
  }

  Scratch scratch{};
  Boxes boxes;
  int64_t rows, padded;  // of the sums of a part: taps and the bias, channels
  int64_t items, parts;
};

struct ProductWorkspace {
  ProductWorkspace(const DepthwiseShape& s, const ProductParts& split, int64_t workers, std::byte* base) : arena(base) {
    sums = arena.take<float>(s.problems * split.parts * split.rows * split.padded);
    shared_bytes = arena.bytes();
    copies = arena.take<float>(workers * split.scratch.floats());
  }

  Arena arena;
  int64_t shared_bytes;
  float *sums, *copies;
};

template <class S>
class WeightGradientPass {
 public:
  WeightGradientPass(const DepthwiseWeightGradient<S>& call, int64_t threads)
      : call_(call),
        shape_(call.shape),
        copies_(call.x.channel != 1 || call.dy.channel != 1),
        split_(shape_, copies_),
        threads_(threads),
        workspace_(shape_, split_, 1, call.workspace) {}

  void run(Parallel& parallel) {
    const int64_t width = copies_ ? kLanes<float> : channels_of_task();
    const int64_t groups = (shape_.channels + width - 1) / width, floats = split_.scratch.floats();
    const int64_t workers = workers_of(call_.workspace_bytes, workspace_.shared_bytes, floats, threads_);
    run_tasks(parallel, shape_.problems * split_.parts * groups, workers, workspace_.copies, floats,
              [&](int64_t task, float* scratch) {
                const int64_t c = task % groups * width, part = task / groups;
                add_part(part / split_.parts, part % split_.parts, c, min_of(width, shape_.channels - c), scratch);
              });
    const int64_t vectors = (shape_.channels + kLanes<float> - 1) / kLanes<float>;
    parallel_for(parallel, shape_.problems * vectors,
                 [&](int64_t task) { add_parts(task / vectors, task % vectors * kLanes<float>); });
  }

 private:
  // All channels, or fewer if there would be too few tasks for the threads.
  int64_t channels_of_task() const {
    const int64_t vectors = (shape_.channels + kLanes<float> - 1) / kLanes<float>;
    const int64_t groups = ceil_div(kTasksPerThread * threads_, shape_.problems * split_.parts);
    return ceil_div(vectors, min_of(groups, vectors)) * kLanes<float>;
  }

  float* sums_of(int64_t problem, int64_t part) const {
    return workspace_.sums + (problem * split_.parts + part) * split_.rows * split_.padded;
  }

  void add_part(int64_t problem, int64_t part, int64_t c, int64_t channels, float* scratch) const {
    float* const sums = sums_of(problem, part) + c;
    for (int64_t row = 0; row < split_.rows; ++row)
      for (int64_t i = 0; i < channels; i += kLanes<float>) store(sums + row * split_.padded + i, Vector<float>{});
    const int64_t boxes = split_.boxes.count(), items = split_.items, parts = split_.parts;
    for (int64_t item = part * items / parts; item < (part + 1) * items / parts; ++item)
      add_box(problem, item / boxes, split_.boxes[item % boxes], c, channels, sums, scratch);
  }

  void add_box(int64_t problem, int64_t image, const Box& box, int64_t c, int64_t channels, float* sums,
               float* scratch) const {
    const S* const x = call_.x.data + problem * call_.x.problem + image * call_.x.batch + c * call_.x.channel;
    const S* const dy = call_.dy.data + problem * call_.dy.problem + image * call_.dy.batch + c * call_.dy.channel;
    float* const bias_sums = call_.db == nullptr ? nullptr : sums + (split_.rows - 1) * split_.padded;
    const Axis axes[] = {forward_axis(shape_, 0).within(box.axes[0]), forward_axis(shape_, 1).within(box.axes[1]),
                         forward_axis(shape_, 2).within(box.axes[2])};
    if (!copies_) {
      const auto& from = call_.x.spatial;
      const auto& of = call_.dy.spatial;
      return ProductSum<S>{
          x, {from[0], from[1], from[2]}, dy, {of[0], of[1], of[2]}, sums, split_.padded, bias_sums, channels}
          .run(axes);
    }
    const int lanes = static_cast<int>(channels);
    const Box inputs = inputs_of(shape_, box);
    float* const outputs = scratch + split_.scratch.inputs * kLanes<float>;
    read_box(x, call_.x.channel, call_.x.spatial, inputs, lanes, scratch);
    read_box(dy, call_.dy.channel, call_.dy.spatial, box, lanes, outputs);
    const BoxSteps from(inputs), of(box);
    ProductSum<float>{scratch - from.origin,
                      {from.steps[0], from.steps[1], from.steps[2]},
                      outputs - of.origin,
                      {of.steps[0], of.steps[1], of.steps[2]},
                      sums,
                      split_.padded,
                      bias_sums,
                      kLanes<float>}
        .run(axes);
  }

  // Adds the parts of one vector of channels, and writes the gradients.
  void add_parts(int64_t problem, int64_t c) const {
    const int lanes = static_cast<int>(min_of(kLanes<float>, shape_.channels - c));
    auto total = [&](int64_t row) {
      Vector<float> sum = {};
      for (int64_t part = 0; part < split_.parts; ++part) sum += load(sums_of(problem, part) + row * split_.padded + c);
      return sum;
    };
    S* const dw = call_.dw.data + problem * call_.dw.problem + c * call_.dw.channel;
    int64_t row = 0;
    for (int64_t i = 0; i < shape_.window[0]; ++i)
      for (int64_t j = 0; j < shape_.window[1]; ++j)
        for (int64_t k = 0; k < shape_.window[2]; ++k, ++row) {
          S values[kLanes<float>];
          store(values, total(row));
          S* const to = dw + i * call_.dw.spatial[0] + j * call_.dw.spatial[1] + k * call_.dw.spatial[2];
          for (int lane = 0; lane < lanes; ++lane) to[lane * call_.dw.channel] = values[lane];
        }
    if (call_.db != nullptr) store(call_.db + problem * shape_.channels + c, total(row), lanes);
  }

  const DepthwiseWeightGradient<S>& call_;
  const DepthwiseShape& shape_;
  const bool copies_;
  const ProductParts split_;
  const int64_t threads_;
  ProductWorkspace workspace_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
