// The kernels over the rows of row_layout.h. All steps of a row run while it is in the cache.
#pragma once

#include "cpu/norm/merge.h"
#include "cpu/norm/operations.h"
#include "cpu/norm/row_layout.h"
#include "cpu/norm/scale_sums.h"

namespace jaxgrad::JAXGRAD_ISA {

template <class T>
JAXGRAD_INLINE T sum_of_lanes(Vector<T> v) {
  constexpr int kL = kLanes<T>;
  Bits<T> lane;
#pragma GCC unroll 16
  for (int i = 0; i < kL; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int half = kL / 2; half > 0; half /= 2) v += __builtin_shuffle(v, (lane + half) & (kL - 1));
  return v[0];
}

// Adds the elements [first, first + length) to totals.
template <class T, class Op, class ParamsAt>
JAXGRAD_INLINE void reduce_run(const Op& op, int64_t first, int64_t length, ParamsAt params_at,
                               double (&totals)[Op::kSums]) {
  constexpr int64_t kPart = 1 << 14;  // more terms would make the sums of float inaccurate
  for (int64_t begin = 0; begin < length; begin += kPart) {
    Vector<T> sums[kRunSums][Op::kSums] = {};
    add_run<T>(
        op, first + begin, min_of(kPart, length - begin),
        [&](int64_t j, auto lanes) { return params_at(begin + j, lanes); }, sums);
#pragma GCC unroll 2
    for (int s = 0; s < Op::kSums; ++s)
      totals[s] += static_cast<double>(sum_of_lanes<T>((sums[0][s] + sums[1][s]) + (sums[2][s] + sums[3][s])));
  }
}

template <class Q>
class NormRows {
 public:
  using T = Compute<Q>;

  NormRows(const NormShape& shape, std::byte* workspace, Parallel& parallel)
      : layout_(shape),
        n_(static_cast<double>(shape.group_elements())),
        arena_(workspace),
        memory_(layout_, arena_),
        parallel_(parallel) {}

  static int64_t workspace(const NormShape& shape) {
    Arena arena(nullptr);
    Memory(RowLayout(shape), arena);
    return arena.bytes();
  }

  template <class Act>
  void forward(const NormStatistics<Q>* statistics, const NormNormalize<Q>* normalize, Act) {
    if (normalize == nullptr)
      return for_rows([&](const Task&, const Rows& rows) { compute_statistics(*statistics, rows); });
    const Columns columns = expand(*normalize);
    const Normalize<Q, Act> op{normalize->x, normalize->residual, normalize->y};
    for_rows([&](const Task& task, const Rows& rows) {
      if (statistics != nullptr) compute_statistics(*statistics, rows);
      for (int64_t i = 0; i < rows.count; ++i)
        apply<T>(op, parameters(*normalize, columns, task, rows[i]), layout_.tile(rows[i]));
    });
  }

  template <bool kFrozen, class Act>
  void backward(const NormBackward<Q>& call, Act) {
    const Columns columns = expand(call);
    const ArgumentGradient<Q, Act> gradient{call.y, call.residual, call.dy};
    const InputGradient<Q, Act, kFrozen> dx{call.x, gradient, call.dx, call.dresidual};
    const bool needs_scale_sums = call.dscale != nullptr || call.dbias != nullptr;
    const bool needs_dx = call.dx != nullptr || call.dresidual != nullptr;
    parallel_for(parallel_, layout_.tasks(), [&](int64_t index) {
      const Task task = layout_.task(index);
      T *const dscale = memory_.sums.dscale(task.part), *const dbias = memory_.sums.dbias(task.part);
      for (int64_t j = task.begin * layout_.span; j < task.end * layout_.span; ++j) dscale[j] = dbias[j] = 0;
      layout_.for_rows(task, [&](const Rows& rows) {
        RowParameters<T> row_parameters[Rows::kMax];
        for (int64_t i = 0; i < rows.count; ++i) {
          row_parameters[i] = parameters(call, columns, task, rows[i]);
          if (needs_scale_sums) row_parameters[i].dscale = dscale, row_parameters[i].dbias = dbias;
          if (kFrozen && !needs_scale_sums) continue;
          const Sums sums = add_gradients(call, gradient, row_parameters[i], rows[i]);
          if (!kFrozen) set_input_gradient(call, rows[i], sums, row_parameters[i]);
        }
        for (int64_t i = 0; needs_dx && i < rows.count; ++i) apply<T>(dx, row_parameters[i], layout_.tile(rows[i]));
      });
    });
    if (needs_scale_sums) memory_.sums.finish(call.dscale, call.dbias, parallel_);
  }

 private:
  using Task = RowLayout::Task;

  // Scale and bias, one element per column: [K, C * span]
  struct Columns {
    const T *scale, *bias;
  };
  struct Memory {
    Memory(const RowLayout& layout, Arena& arena)
        : expanded(arena.take<T>(layout.span == 1 ? 0 : 2 * layout.s.K * layout.width())),
          sums(layout.s.K, layout.blocks, layout.s.C, layout.span, arena) {}

    T* expanded;
    ScaleSums<T> sums;
  };

  template <class Body>
  void for_rows(Body body) const {
    parallel_for(parallel_, layout_.tasks(), [&](int64_t index) {
      const Task task = layout_.task(index);
      layout_.for_rows(task, [&](const Rows& rows) { body(task, rows); });
    });
  }

  template <class Call>
  Columns expand(const Call& call) const {
    if (layout_.span == 1) return {call.scale, call.bias};
    const int64_t channels = layout_.s.K * layout_.s.C;
    T *const scale = memory_.expanded, *const bias = scale + channels * layout_.span;
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t j = c * layout_.span; j < (c + 1) * layout_.span; ++j) {
        scale[j] = call.scale[c];
        if (call.bias != nullptr) bias[j] = call.bias[c];
      }
    return {scale, call.bias == nullptr ? nullptr : bias};
  }

  void compute_statistics(const NormStatistics<Q>& call, const Rows& rows) const {
    const int64_t length = layout_.s.group_elements();
    const auto no_parameters = [](int64_t, auto) { return NoParameters::Params(); };
    double sums[Rows::kMax][1] = {}, rests[Rows::kMax][2] = {};
    T means[Rows::kMax];
    for (int64_t i = 0; i < rows.count; ++i) {
      if (call.mean == nullptr)
        reduce_run<T>(Squares<Q>{call.x}, first_element(rows[i]), length, no_parameters, sums[i]);
      else
        reduce_run<T>(Sum<Q>{call.x}, first_element(rows[i]), length, no_parameters, sums[i]);
    }
    if (call.mean == nullptr) {
      for (int64_t i = 0; i < rows.count; ++i) write_statistics(call, rows[i].group, n_, T(0), T(0), sums[i][0]);
      return;
    }
    for (int64_t i = 0; i < rows.count; ++i) {
      means[i] = static_cast<T>(sums[i][0] / n_);
      const RowMean<T> mean{splat(means[i])};
      reduce_run<T>(
          Deviations<Q>{call.x}, first_element(rows[i]), length, [&](int64_t, auto) { return mean; }, rests[i]);
    }
    for (int64_t i = 0; i < rows.count; ++i) {
      const double low = rests[i][0] / n_;
      write_statistics(call, rows[i].group, n_, means[i], static_cast<T>(low - low == 0 ? low : 0),
                       rests[i][1] - rests[i][0] * low);
    }
  }

  template <class Call>
  RowParameters<T> parameters(const Call& call, const Columns& columns, const Task& task, const Row& row) const {
    const T rstd = call.rstd[row.group];
    RowParameters<T> found{};
    found.mean = call.mean == nullptr ? T(0) : call.mean[row.group];
    found.rstd = rstd;
    found.offset = call.mean_low == nullptr ? T(0) : -call.mean_low[row.group] * rstd;
    found.scale = columns.scale + task.call * layout_.width();
    if (columns.bias != nullptr) found.bias = columns.bias + task.call * layout_.width();
    return found;
  }

  // The sums of g scale and g scale xhat over a row, with xhat = (x - mean) rstd.
  struct Sums {
    double a = 0, b = 0;
  };

  // Adds to the gradients of scale and bias, too, if row_parameters has them.
  template <class Act>
  Sums add_gradients(const NormBackward<Q>& call, const ArgumentGradient<Q, Act>& gradient,
                     const RowParameters<T>& row_parameters, const Row& row) const {
    if (layout_.in_columns()) {
      double sums[2] = {};
      const int64_t column = row.channel * layout_.span;
      reduce_run<T>(
          RowGradientSums<Q, Act>{call.x, gradient}, first_element(row), layout_.s.group_elements(),
          [&](int64_t j, auto lanes) { return row_parameters.at(column + j, lanes); }, sums);
      return {sums[0], sums[1]};
    }
    Sums found;
    for (int64_t c = row.channel; c < row.channel + layout_.s.group_channels(); ++c) {
      double sums[2] = {};  // of g and g (x - mean)
      const auto parameters = row_parameters.of(c);
      reduce_run<T>(
          GradientSums<Q, Act>{call.x, gradient}, row.sample * layout_.s.sample_elements() + c * layout_.s.I,
          layout_.s.I, [&](int64_t, auto) { return parameters; }, sums);
      const double product = row_parameters.rstd * sums[1] + row_parameters.offset * sums[0];
      found.a += static_cast<double>(row_parameters.scale[c]) * sums[0];
      found.b += static_cast<double>(row_parameters.scale[c]) * product;
      if (row_parameters.dscale == nullptr) continue;
      row_parameters.dscale[c] += static_cast<T>(product);
      row_parameters.dbias[c] += static_cast<T>(sums[0]);
    }
    return found;
  }

  // As in SampleParameters::fill_input_gradient(). offset = -mean_low rstd.
  void set_input_gradient(const NormBackward<Q>& call, const Row& row, const Sums& sums,
                          RowParameters<T>& row_parameters) const {
    const double rstd = static_cast<double>(row_parameters.rstd);
    const double dmean = call.dmean == nullptr ? 0 : static_cast<double>(call.dmean[row.group]);
    const double dvar = call.dvar == nullptr ? 0 : static_cast<double>(call.dvar[row.group]);
    const double low = call.mean_low == nullptr ? 0 : static_cast<double>(call.mean_low[row.group]);
    const double tilt = (2 * dvar - rstd * rstd * sums.b) / n_;
    row_parameters.tilt = static_cast<T>(tilt);
    if (call.mean != nullptr) row_parameters.level = static_cast<T>((dmean - rstd * sums.a) / n_ - low * tilt);
  }

  int64_t first_element(const Row& row) const {
    return row.sample * layout_.s.sample_elements() + row.channel * layout_.s.I;
  }

  const RowLayout layout_;
  const double n_;  // elements of a row
  Arena arena_;
  const Memory memory_;
  Parallel& parallel_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
