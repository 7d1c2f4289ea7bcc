// The forward pass and the input gradient: both are sums over the window.
#pragma once

#include "cpu/depthwise/transpose.h"
#include "cpu/depthwise/window_sum.h"
#include "cpu/depthwise/workers.h"

namespace jaxgrad::JAXGRAD_ISA {

// One of the two passes. in, out: x and y, or dy and dx.
template <class S>
struct WindowCall {
  bool is_forward;
  DepthwiseShape shape;
  DepthwiseActivations<const S> in;
  DepthwiseWeights<const S> w;
  const S* bias;
  bool relu;
  DepthwiseActivations<S> out;
  std::byte* workspace;
  int64_t workspace_bytes;
};

// The workspace: weights by phase, biases, and the scratch of the workers.
struct WindowWorkspace {
  WindowWorkspace(const DepthwiseShape& s, Scratch scratch, int64_t workers, std::byte* base) : arena(base) {
    padded = round_up(s.channels, kPaddedLanes);
    w = arena.take<float>(s.problems * s.taps() * padded);
    bias = arena.take<float>(s.problems * padded);
    shared_bytes = arena.bytes();
    copies = arena.take<float>(workers * scratch.floats());
  }

  Arena arena;
  int64_t padded, shared_bytes;
  float *w, *bias, *copies;
};

// The division of the outputs into boxes.
struct WindowBoxes {
  WindowBoxes(bool is_forward, const DepthwiseShape& s, bool copies, int64_t max_positions)
      : boxes(is_forward ? s.y : s.x, [&](const Box& box) {
          const int64_t inputs = is_forward ? max_inputs(s, box) : max_outputs(s, box), outputs = box.positions();
          if (copies) scratch = {inputs, outputs};
          return copies ? inputs + outputs <= kMaxCopiedPositions : outputs <= max_positions;
        }) {}

  Scratch scratch{};
  Boxes boxes;
};

template <class S>
class WindowPass {
 public:
  WindowPass(const WindowCall<S>& call, int64_t threads)
      : call_(call),
        shape_(call.shape),
        copies_(call.in.channel != 1 || call.out.channel != 1),
        split_(call.is_forward, shape_, copies_, max_positions(threads)),
        threads_(threads),
        workspace_(shape_, split_.scratch, 1, call.workspace) {}

  void run(Parallel& parallel) {
    pack(parallel);
    const int64_t width = copies_ ? kLanes<float> : shape_.channels;
    const int64_t groups = (shape_.channels + width - 1) / width, boxes = split_.boxes.count();
    const int64_t floats = split_.scratch.floats();
    const int64_t workers = workers_of(call_.workspace_bytes, workspace_.shared_bytes, floats, threads_);
    run_tasks(parallel, shape_.problems * shape_.batch * boxes * groups, workers, workspace_.copies, floats,
              [&](int64_t task, float* scratch) {
                const int64_t group = task % groups, box = task / groups % boxes, image = task / groups / boxes;
                const int64_t c = group * width;
                run_box(image / shape_.batch, image % shape_.batch, split_.boxes[box], c,
                        min_of(width, shape_.channels - c), scratch);
              });
  }

 private:
  // The positions of a box that is not copied: few enough that every thread has several boxes.
  int64_t max_positions(int64_t threads) const {
    constexpr int64_t kMin = 64;
    const int64_t (&sizes)[kDepthwiseAxes] = call_.is_forward ? shape_.y : shape_.x;
    const int64_t all = shape_.problems * shape_.batch * sizes[0] * sizes[1] * sizes[2];
    return max_of(kMin, all / (kTasksPerThread * threads));
  }

  // Calls body(axes, taps before the phase) for the phases of the outputs.
  template <class Body>
  void for_phases(Body body) const {
    if (call_.is_forward) {
      const Axis axes[] = {forward_axis(shape_, 0), forward_axis(shape_, 1), forward_axis(shape_, 2)};
      return body(axes, 0);
    }
    int64_t taps = 0;
    const int64_t (&strides)[kDepthwiseAxes] = shape_.strides;
    const int64_t (&sizes)[kDepthwiseAxes] = shape_.x;
    for (int64_t i = 0; i < min_of(strides[0], sizes[0]); ++i)
      for (int64_t j = 0; j < min_of(strides[1], sizes[1]); ++j)
        for (int64_t k = 0; k < min_of(strides[2], sizes[2]); ++k) {
          const Axis axes[] = {input_gradient_axis(shape_, 0, i), input_gradient_axis(shape_, 1, j),
                               input_gradient_axis(shape_, 2, k)};
          body(axes, taps);
          taps += axes[0].taps * axes[1].taps * axes[2].taps;
        }
  }

  // Copies weights and biases to the workspace: [problems, taps, channels] in the order of the phases.
  void pack(Parallel& parallel) {
    const int64_t vectors = workspace_.padded / kLanes<float>;
    parallel_for(parallel, shape_.problems * vectors, [&](int64_t task) {
      const int64_t problem = task / vectors, c = task % vectors * kLanes<float>;
      const int lanes = static_cast<int>(max_of(0, min_of(kLanes<float>, shape_.channels - c)));
      float* const to = workspace_.w + problem * shape_.taps() * workspace_.padded + c;
      const S* const from = call_.w.data + problem * call_.w.problem + c * call_.w.channel;
      for_phases([&](const Axis(&axes)[kDepthwiseAxes], int64_t taps) {
        for (int64_t i = 0; i < axes[0].taps; ++i)
          for (int64_t j = 0; j < axes[1].taps; ++j)
            for (int64_t k = 0; k < axes[2].taps; ++k, ++taps) {
              const int64_t at = (axes[0].first_tap + i * axes[0].tap_step) * call_.w.spatial[0] +
                                 (axes[1].first_tap + j * axes[1].tap_step) * call_.w.spatial[1] +
                                 (axes[2].first_tap + k * axes[2].tap_step) * call_.w.spatial[2];
              S values[kLanes<float>] = {};
              for (int lane = 0; lane < lanes; ++lane) values[lane] = from[at + lane * call_.w.channel];
              store(to + taps * workspace_.padded, load(values));
            }
      });
      if (call_.bias != nullptr)
        store(workspace_.bias + problem * workspace_.padded + c,
              load(call_.bias + problem * shape_.channels + min_of(c, shape_.channels), lanes));
    });
  }

  void run_box(int64_t problem, int64_t image, const Box& box, int64_t c, int64_t channels, float* scratch) const {
    const float* const w = workspace_.w + problem * shape_.taps() * workspace_.padded + c;
    const float* const bias = call_.bias == nullptr ? nullptr : workspace_.bias + problem * workspace_.padded + c;
    const S* const in = call_.in.data + problem * call_.in.problem + image * call_.in.batch + c * call_.in.channel;
    S* const out = call_.out.data + problem * call_.out.problem + image * call_.out.batch + c * call_.out.channel;
    if (!copies_) {
      const auto& from = call_.in.spatial;
      const auto& to = call_.out.spatial;
      return sum(WindowSum<S>{in,
                              {from[0], from[1], from[2]},
                              out,
                              {to[0], to[1], to[2]},
                              w,
                              workspace_.padded,
                              bias,
                              call_.relu,
                              channels},
                 box);
    }
    const int lanes = static_cast<int>(channels);
    const Box inputs = call_.is_forward ? inputs_of(shape_, box) : outputs_of(shape_, box);
    float* const sums = scratch + split_.scratch.inputs * kLanes<float>;
    read_box(in, call_.in.channel, call_.in.spatial, inputs, lanes, scratch);
    const BoxSteps from(inputs), to(box);
    sum(WindowSum<float>{scratch - from.origin,
                         {from.steps[0], from.steps[1], from.steps[2]},
                         sums - to.origin,
                         {to.steps[0], to.steps[1], to.steps[2]},
                         w,
                         workspace_.padded,
                         bias,
                         call_.relu,
                         kLanes<float>},
        box);
    write_box(sums, call_.out.channel, call_.out.spatial, box, lanes, out);
  }

  template <class T>
  void sum(WindowSum<T> part, const Box& box) const {
    const float* const w = part.w;
    for_phases([&](const Axis(&axes)[kDepthwiseAxes], int64_t taps) {
      const Axis within[] = {axes[0].within(box.axes[0]), axes[1].within(box.axes[1]), axes[2].within(box.axes[2])};
      part.w = w + taps * workspace_.padded;
      part.run(within);
    });
  }

  const WindowCall<S>& call_;
  const DepthwiseShape& shape_;
  const bool copies_;
  const WindowBoxes split_;
  const int64_t threads_;
  WindowWorkspace workspace_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
