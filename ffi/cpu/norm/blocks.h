// The kernels over the blocks of layout.h, for groups that are not contiguous in memory or too large for the cache.
#pragma once

#include "cpu/norm/merge.h"
#include "cpu/norm/operations.h"
#include "cpu/norm/samples.h"
#include "cpu/norm/scale_sums.h"

namespace jaxgrad::JAXGRAD_ISA {

// The parameters of the columns of one sample, from the arrays of a call.
template <class Call, class T>
class SampleParameters {
 public:
  SampleParameters(const Call& call, const NormLayout& layout, const Sample<T>& sample)
      : call_(call),
        layout_(layout),
        scratch_(sample.scratch),
        groups_(sample.index * layout.shape.G),
        channels_(sample.index / layout.shape.call_samples() * layout.shape.C) {}

  // scale (x - mean - mean_low) rstd + bias = (x - mean) slope + shift
  void fill_affine() const {
    for_channels([&](int64_t c, const Group& group) {
      const double correction = group.low * slope(c, group);  // not finite if scale is infinite
      const double bias = call_.bias == nullptr ? 0 : static_cast<double>(call_.bias[channels_ + c]);
      fill(kMean, c, group.mean);
      fill(kSlope, c, slope(c, group));
      fill(kShift, c, bias - (correction - correction == 0 ? correction : 0));
    });
  }

  // Sets the sums G of g and GX of g (x - mean) of each channel to the gradients of bias and scale, G and
  // rstd (GX - mean_low G).
  void finish_sums() const {
    double *dbias = scratch_.totals[0], *dscale = scratch_.totals[1];
    for_channels([&](int64_t c, const Group& group) { dscale[c] = group.rstd * (dscale[c] - group.low * dbias[c]); });
  }

  // dx = rstd (g scale - a / n - xhat b / n) + dmean / n + 2 dvar (x - mean) / n with xhat = (x - mean) rstd, where a
  // and b are the sums of g scale and g scale xhat over the group. This is the backward pass of Ioffe and Szegedy
  // (2015) plus the cotangents of the mean and the variance. It is linear in g and x - mean: dx = g slope + (x - mean)
  // tilt + level.
  void fill_input_gradient() const {
    const double n = static_cast<double>(layout_.shape.group_elements());
    const double *dbias = scratch_.totals[0], *dscale = scratch_.totals[1];
    const int64_t channels = layout_.shape.group_channels();
    for (int64_t g = 0; g < layout_.shape.G; ++g) {
      const Group group = group_at(g);
      double a = 0, b = 0;  // times rstd
      for (int64_t c = g * channels; c < (g + 1) * channels; ++c) {
        a += slope(c, group) * dbias[c];
        b += slope(c, group) * group.rstd * dscale[c];
      }
      const double dmean = value_or_zero(call_.dmean, groups_ + g), dvar = value_or_zero(call_.dvar, groups_ + g);
      const double tilt = (2 * dvar - b) / n, level = call_.mean == nullptr ? 0 : (dmean - a) / n - group.low * tilt;
      for (int64_t c = g * channels; c < (g + 1) * channels; ++c) {
        fill(kTilt, c, tilt);
        fill(kLevel, c, level);
      }
    }
  }

 private:
  struct Group {
    double mean, low, rstd;
  };
  Group group_at(int64_t g) const {
    return {value_or_zero(call_.mean, groups_ + g), value_or_zero(call_.mean_low, groups_ + g),
            static_cast<double>(call_.rstd[groups_ + g])};
  }
  // Calls body(c, group) for all channels.
  template <class Body>
  void for_channels(Body body) const {
    const int64_t channels = layout_.shape.group_channels();
    for (int64_t g = 0; g < layout_.shape.G; ++g) {
      const Group group = group_at(g);
      for (int64_t c = g * channels; c < (g + 1) * channels; ++c) body(c, group);
    }
  }
  // Sets the parameter of the columns of a channel.
  void fill(Parameter parameter, int64_t channel, double value) const {
    T* const columns = scratch_.parameters[parameter];
    const T here = static_cast<T>(value);
    layout_.for_channel_columns(channel, [&](int64_t j) { columns[j] = here; });
  }
  double slope(int64_t c, const Group& group) const {
    return static_cast<double>(call_.scale[channels_ + c]) * group.rstd;
  }
  static double value_or_zero(const T* values, int64_t at) {
    return values == nullptr ? 0 : static_cast<double>(values[at]);
  }

  const Call& call_;
  const NormLayout& layout_;
  const NormScratch<T>& scratch_;
  const int64_t groups_, channels_;  // where the statistics and the channels of the sample start
};

template <class Q>
class NormBlocks {
 public:
  using T = Compute<Q>;

  NormBlocks(const NormShape& shape, std::byte* workspace, Parallel& parallel)
      : s_(shape),
        layout_(shape),
        arena_(workspace),
        sums_(scale_sums(shape, arena_)),
        samples_(layout_, arena_.take<std::byte>(Samples<T>::bytes(layout_)), parallel),
        parallel_(parallel) {}

  static int64_t workspace(const NormShape& shape) {
    Arena arena(nullptr);
    scale_sums(shape, arena);
    arena.take<std::byte>(Samples<T>::bytes(NormLayout(shape)));
    return arena.bytes();
  }

  template <class Act>
  void forward(const NormStatistics<Q>* statistics, const NormNormalize<Q>* normalize, Act) {
    const auto reduce_block = per_task([&](const Sample<T>& sample, const NormTask& task) {
      if (statistics != nullptr) reduce_moments(*statistics, sample, task);
    });
    const auto merge = per_sample([&](const Sample<T>& sample) {
      if (statistics != nullptr) merge_moments(*statistics, layout_, sample.scratch, sample.index);
      if (normalize != nullptr) SampleParameters(*normalize, layout_, sample).fill_affine();
    });
    if (normalize == nullptr) return samples_.run(reduce_block, merge);
    const Normalize<Q, Act> op{normalize->x, normalize->residual, normalize->y};
    const auto write = per_task_from_the_end([&](const Sample<T>& sample, const NormTask& task) {
      apply<T>(op, ColumnParameters<T, 3>{sample.scratch.parameters}, tile(sample, task));
    });
    if (statistics == nullptr) return samples_.run(merge, write);
    samples_.run(reduce_block, merge, write);
  }

  template <bool kFrozen, class Act>
  void backward(const NormBackward<Q>& call, Act) {
    const ArgumentGradient<Q, Act> gradient{call.y, call.residual, call.dy};
    const GradientSums<Q, Act> sums{call.x, gradient};
    const InputGradient<Q, Act, kFrozen> dx{call.x, gradient, call.dx, call.dresidual};
    const bool needs_dx = call.dx != nullptr || call.dresidual != nullptr;
    const bool needs_sums = !kFrozen || call.dscale != nullptr || call.dbias != nullptr;
    const auto prepare =
        per_sample([&](const Sample<T>& sample) { SampleParameters(call, layout_, sample).fill_affine(); });
    const auto write = [&](const Sample<T>& sample, const NormTask& task) {
      if (needs_dx) apply<T>(dx, ColumnParameters<T, kFrozen ? 3 : 5>{sample.scratch.parameters}, tile(sample, task));
    };
    const auto reduce_block = per_task([&](const Sample<T>& sample, const NormTask& task) {
      if (needs_sums)
        reduce<T>(sums, ColumnParameters<T, 3>{sample.scratch.parameters}, tile(sample, task), sample.scratch.sums,
                  task.block * layout_.stride);
      if (kFrozen) write(sample, task);  // dx does not depend on the sums, and the elements are in the cache
    });
    const auto merge = per_sample([&](const Sample<T>& sample) {
      if (needs_sums) merge_gradients(call, sample);
      if (!kFrozen) SampleParameters(call, layout_, sample).fill_input_gradient();
    });
    if (kFrozen || !needs_dx)
      samples_.run(prepare, reduce_block, merge);
    else
      samples_.run(prepare, reduce_block, merge, per_task_from_the_end(write));
    sums_.finish(call.dscale, call.dbias, parallel_);
  }

 private:
  static ScaleSums<T> scale_sums(const NormShape& s, Arena& arena) { return {s.K, s.call_samples(), s.C, 1, arena}; }

  Tile tile(const Sample<T>& sample, const NormTask& task) const {
    return layout_.tile(task, sample.index * s_.sample_elements());
  }

  void reduce_moments(const NormStatistics<Q>& call, const Sample<T>& sample, const NormTask& task) const {
    const Tile part = tile(sample, task);
    const int64_t at = task.block * layout_.stride;
    T* const* sums = sample.scratch.sums;
    if (call.mean == nullptr) return reduce<T>(Squares<Q>{call.x}, NoParameters(), part, sums, at);
    reduce<T>(Sum<Q>{call.x}, NoParameters(), part, sums, at);
    T* const means = sums[0] + at;
    const T per_element = T(1) / static_cast<T>(part.rows * part.run);
    for (int64_t j = task.begin; j < task.end; ++j) means[j] *= per_element;
    const T* const parameters[] = {means};
    reduce<T>(Deviations<Q>{call.x}, ColumnParameters<T, 1>{parameters}, part, sums + 1, at);
  }

  void merge_gradients(const NormBackward<Q>& call, const Sample<T>& sample) const {
    merge_sums(layout_, sample.scratch, 2);
    SampleParameters(call, layout_, sample).finish_sums();
    const double *dbias = sample.scratch.totals[0], *dscale = sample.scratch.totals[1];
    for (int64_t c = 0; c < s_.C; ++c) {
      sums_.dscale(sample.index)[c] = static_cast<T>(dscale[c]);
      sums_.dbias(sample.index)[c] = static_cast<T>(dbias[c]);
    }
  }

  const NormShape& s_;
  const NormLayout layout_;
  Arena arena_;
  const ScaleSums<T> sums_;
  const Samples<T> samples_;
  Parallel& parallel_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
