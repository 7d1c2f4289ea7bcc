// The batch normalization kernels. This file is compiled once per instruction set; JAXGRAD_ISA names the namespace.
//
// A call that reads x twice starts the second time at the end of x, which is still in the cache.
#include "cpu/batch_norm/loops.h"
#include "cpu/batch_norm/merge.h"
#include "cpu/batch_norm/operations.h"
#include "cpu/runtime/parallel_for.h"

namespace jaxgrad::JAXGRAD_ISA {
namespace {

enum Parameter { kMean, kSlope, kShift, kTilt, kLevel };

// The layout and the workspace of one call, and the loops over its tasks.
template <class T>
struct Pass {
  Pass(const BatchNormShape& shape, std::byte* workspace, Parallel& parallel)
      : layout(shape), arena(workspace), scratch(layout, arena), parallel(parallel) {}

  template <class Body>
  void for_tasks(Body body) {
    parallel_for(parallel, layout.tasks(), [&](int64_t index) { body(layout.task(index)); });
  }
  template <class Op>
  void apply_from_the_end(const Op& op) {
    const int64_t last = layout.tasks() - 1;
    parallel_for(parallel, layout.tasks(), [&](int64_t index) { apply<T>(op, layout, layout.task(last - index)); });
  }

  // Sets the parameter of every column to value(c), where c is the channel of the column.
  template <class Value>
  void fill(Parameter parameter, Value value) {
    T* const columns = scratch.parameters[parameter];
    for (int64_t c = 0; c < layout.shape.C; ++c) {
      const T here = static_cast<T>(value(c));
      layout.for_columns(c, [&](int64_t j) { columns[j] = here; });
    }
  }

  // scale (x - mean - mean_low) rstd + bias = (x - mean) slope + shift
  template <class Call>
  void fill_affine(const Call& call) {
    fill(kMean, [&](int64_t c) { return call.mean[c]; });
    fill(kSlope, [&](int64_t c) { return slope(call, c); });
    if (call.bias == nullptr) return;
    fill(kShift, [&](int64_t c) {
      const double correction = low(call, c) * slope(call, c);  // not finite if scale is infinite
      return static_cast<double>(call.bias[c]) - (correction - correction == 0 ? correction : 0);
    });
  }
  template <class Call>
  static double slope(const Call& call, int64_t c) {
    return static_cast<double>(call.scale[c]) * static_cast<double>(call.rstd[c]);
  }
  template <class Call>
  static double low(const Call& call, int64_t c) {
    return call.mean_low == nullptr ? 0 : static_cast<double>(call.mean_low[c]);
  }

  T* parameter(Parameter p) const { return scratch.parameters[p]; }

  const BatchNormLayout layout;
  Arena arena;
  const BatchNormScratch<T> scratch;
  Parallel& parallel;
};

template <class S, bool kResidual, bool kRelu>
void normalize(const BatchNormNormalize<S>& call, Pass<Compute<S>>& pass) {
  pass.apply_from_the_end(Normalize<S, kResidual, kRelu>{
      call.x, call.residual, call.y, {pass.parameter(kMean), pass.parameter(kSlope), pass.parameter(kShift)}});
}

template <class S, ReluMask kReluMask>
GradientSums<S, kReluMask> gradient_sums(const BatchNormBackward<S>& call, const Pass<Compute<S>>& pass) {
  return {call.x, {call.y, call.dy}, {pass.parameter(kMean), pass.parameter(kSlope), pass.parameter(kShift)}};
}

template <class S, ReluMask kReluMask, bool kFrozen>
InputGradient<S, kReluMask, kFrozen> input_gradient(const BatchNormBackward<S>& call, const Pass<Compute<S>>& pass) {
  return {call.x,
          {call.y, call.dy},
          call.dx,
          call.dresidual,
          {pass.parameter(kMean), pass.parameter(kSlope), pass.parameter(kShift), pass.parameter(kTilt),
           pass.parameter(kLevel)}};
}

// With G and GX the sums of g and of g (x - mean), dbias = G and dscale = rstd (GX - mean_low G).
template <class S, class T = Compute<S>>
void finish_sums(const BatchNormBackward<S>& call, Pass<T>& pass) {
  merge_sums(pass.layout, pass.scratch, 2);
  double *dbias = pass.scratch.totals[0], *dscale = pass.scratch.totals[1];
  for (int64_t c = 0; c < call.shape.C; ++c) {
    dscale[c] = static_cast<double>(call.rstd[c]) * (dscale[c] - pass.low(call, c) * dbias[c]);
    if (call.dbias != nullptr) call.dbias[c] = static_cast<T>(dbias[c]);
    if (call.dscale != nullptr) call.dscale[c] = static_cast<T>(dscale[c]);
  }
}

// dx = scale rstd (g - dbias / n - xhat dscale / n) + dmean / n + 2 dvar (x - mean) / n with xhat = (x - mean) rstd.
// This is the backward pass of Ioffe and Szegedy (2015) plus the cotangents of the returned mean and variance. It is
// linear in g and x - mean: dx = g slope + (x - mean) tilt + level.
template <class S, class T = Compute<S>>
void fill_input_gradient(const BatchNormBackward<S>& call, Pass<T>& pass) {
  const double n = static_cast<double>(pass.layout.channel_count());
  const double *dbias = pass.scratch.totals[0], *dscale = pass.scratch.totals[1];
  const auto tilt = [&](int64_t c) {
    const double dvar = call.dvar == nullptr ? 0 : static_cast<double>(call.dvar[c]);
    return (2 * dvar - pass.slope(call, c) * static_cast<double>(call.rstd[c]) * dscale[c]) / n;
  };
  pass.fill(kTilt, tilt);
  pass.fill(kLevel, [&](int64_t c) {
    const double dmean = call.dmean == nullptr ? 0 : static_cast<double>(call.dmean[c]);
    return (dmean - pass.slope(call, c) * dbias[c]) / n - pass.low(call, c) * tilt(c);
  });
}

template <class S, ReluMask kReluMask>
void backward(const BatchNormBackward<S>& call, Pass<Compute<S>>& pass) {
  using T = Compute<S>;
  pass.fill_affine(call);
  const auto sums = gradient_sums<S, kReluMask>(call, pass);
  pass.for_tasks([&](const BatchNormTask& task) { reduce<T>(sums, pass.layout, task, pass.scratch.sums); });
  finish_sums(call, pass);
  if (call.dx == nullptr && call.dresidual == nullptr) return;
  fill_input_gradient(call, pass);
  pass.apply_from_the_end(input_gradient<S, kReluMask, false>(call, pass));
}

// dx does not depend on the sums, so each task computes both while its elements are in the cache.
template <class S>
void frozen_backward(const BatchNormBackward<S>& call, Pass<Compute<S>>& pass) {
  using T = Compute<S>;
  pass.fill_affine(call);
  const auto sums = gradient_sums<S, ReluMask::kAll>(call, pass);
  const auto dx = input_gradient<S, ReluMask::kAll, true>(call, pass);
  const bool needs_sums = call.dscale != nullptr || call.dbias != nullptr;
  pass.for_tasks([&](const BatchNormTask& task) {
    if (needs_sums) reduce<T>(sums, pass.layout, task, pass.scratch.sums);
    if (call.dx != nullptr) apply<T>(dx, pass.layout, task);
  });
  if (needs_sums) finish_sums(call, pass);
}

}  // namespace

int64_t batch_norm_workspace(const BatchNormShape& shape, int64_t storage_bytes) {
  const BatchNormLayout layout(shape);
  Arena arena(nullptr);
  if (storage_bytes == sizeof(double))
    BatchNormScratch<double>(layout, arena);
  else
    BatchNormScratch<float>(layout, arena);
  return arena.bytes();
}

template <class S>
void batch_norm_statistics(const BatchNormStatistics<S>& call, Parallel& parallel) {
  using T = Compute<S>;
  Pass<T> pass(call.shape, call.workspace, parallel);
  pass.for_tasks([&](const BatchNormTask& task) {
    T* const* sums = pass.scratch.sums;
    T* const means = sums[0] + task.block * pass.layout.stride;
    const T per_element = T(1) / static_cast<T>(pass.layout.count(task.block));
    reduce<T>(Sum<S>{call.x}, pass.layout, task, sums);
    for (int64_t j = task.begin; j < task.end; ++j) means[j] *= per_element;
    reduce<T>(Deviations<S>{call.x, {means}}, pass.layout, task, sums + 1);
  });
  merge_moments(call, pass.layout, pass.scratch);
}

template <class S>
void batch_norm_normalize(const BatchNormNormalize<S>& call, Parallel& parallel) {
  Pass<Compute<S>> pass(call.shape, call.workspace, parallel);
  pass.fill_affine(call);
  if (call.residual != nullptr)
    return call.relu ? normalize<S, true, true>(call, pass) : normalize<S, true, false>(call, pass);
  return call.relu ? normalize<S, false, true>(call, pass) : normalize<S, false, false>(call, pass);
}

template <class S>
void batch_norm_backward(const BatchNormBackward<S>& call, Parallel& parallel) {
  Pass<Compute<S>> pass(call.shape, call.workspace, parallel);
  if (call.frozen) return frozen_backward(call, pass);
  if (!call.relu) return backward<S, ReluMask::kAll>(call, pass);
  return call.y != nullptr ? backward<S, ReluMask::kPositiveAfter>(call, pass)
                           : backward<S, ReluMask::kPositiveBefore>(call, pass);
}

#define JAXGRAD_INSTANTIATE(S)                                                      \
  template void batch_norm_statistics<S>(const BatchNormStatistics<S>&, Parallel&); \
  template void batch_norm_normalize<S>(const BatchNormNormalize<S>&, Parallel&);   \
  template void batch_norm_backward<S>(const BatchNormBackward<S>&, Parallel&);
JAXGRAD_INSTANTIATE(float)
JAXGRAD_INSTANTIATE(double)
JAXGRAD_INSTANTIATE(BFloat16)
JAXGRAD_INSTANTIATE(Float16)

}  // namespace jaxgrad::JAXGRAD_ISA
