// The pooling kernels. This file is compiled once per instruction set; JAXGRAD_ISA names the namespace.
#include "cpu/pool/max.h"
#include "cpu/pool/planes.h"
#include "cpu/pool/sum.h"
#include "cpu/runtime/parallel_for.h"

namespace jaxgrad::JAXGRAD_ISA {
namespace {

template <class S>
class PoolRun {
 public:
  using T = Compute<S>;
  static constexpr int kL = kLanes<T>;

  explicit PoolRun(const PoolCall<S>& call)
      : call_(call), s_(call.shape), parts_(call.pass, call.shape), divisor_(static_cast<T>(call.divisor)) {}

  void run(Parallel& parallel) {
    const int64_t width = parts_.copies ? kL : 1, blocks = ceil_div(s_.outer, width), tasks = blocks * parts_.count;
    const int64_t bytes = scratch_bytes<S>(parts_);
    const int64_t workers = max_of(1, min_of(min_of(parallel.threads(), tasks), call_.workspace_bytes / bytes));
    int64_t next = 0;
    parallel_for(parallel, workers, [&](int64_t worker) {
      Arena arena(call_.workspace + worker * bytes);
      const PoolScratch<S> scratch(parts_, arena);
      for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) {
        const Range results = parts_.results(task % parts_.count);
        const int64_t first = task / parts_.count * width;
        if (parts_.copies) {
          run_planes(first, static_cast<int>(min_of(kL, s_.outer - first)), results, scratch);
        } else {
          run_channels(first, results, scratch);
        }
      }
    });
  }

 private:
  void run_channels(int64_t outer, Range results, const PoolScratch<S>& scratch) const {
    PoolArrays<S> arrays{};
    arrays.channels = s_.channels;
    const int64_t x_size = s_.x[0] * arrays.x_step(s_, 0), y_size = s_.y[0] * arrays.y_step(s_, 0);
    if (parts_.has_x) arrays.x = call_.x + outer * x_size;
    if (parts_.is_dx) {
      arrays.y = const_cast<S*>(call_.second) + outer * y_size;
      arrays.dx = call_.result + outer * x_size;
    } else {
      if (parts_.has_tangent) arrays.tangent = call_.second + outer * x_size;
      arrays.y = call_.result + outer * y_size;
    }
    compute(arrays, results, scratch);
  }

  // Computes up to kLanes planes, copied to vectors.
  void run_planes(int64_t outer, int lanes, Range results, const PoolScratch<S>& scratch) const {
    const Range windows = parts_.windows(results), elements = elements_of(s_, parts_.axis, windows);
    const int64_t x_size = s_.x[0] * s_.x[1] * s_.x[2], y_size = s_.y[0] * s_.y[1] * s_.y[2];
    PoolArrays<S> arrays{};
    arrays.channels = kL;
    const auto in = [&](const S* array, int64_t size, int64_t row, Range rows, S* copy) {
      read_planes(array + outer * size + rows.begin * row, size, rows.size() * row, lanes, copy);
      return copy - rows.begin * row * kL;
    };
    if (parts_.has_x) arrays.x = in(call_.x, x_size, parts_.x_row, elements, scratch.x);
    if (parts_.has_tangent) arrays.tangent = in(call_.second, x_size, parts_.x_row, elements, scratch.tangent);
    if (parts_.is_dx) {
      arrays.y = in(call_.second, y_size, parts_.y_row, windows, scratch.y);
      arrays.dx = scratch.dx - results.begin * parts_.x_row * kL;
    } else {
      arrays.y = scratch.y - windows.begin * parts_.y_row * kL;
    }
    compute(arrays, results, scratch);
    const int64_t row = parts_.is_dx ? parts_.x_row : parts_.y_row, size = parts_.is_dx ? x_size : y_size;
    write_planes(parts_.is_dx ? scratch.dx : scratch.y, size, results.size() * row, lanes,
                 call_.result + outer * size + results.begin * row);
  }

  void compute(const PoolArrays<S>& arrays, Range results, const PoolScratch<S>& scratch) const {
    int64_t x_steps[kPoolAxes], y_steps[kPoolAxes];
    for (int i = 0; i < kPoolAxes; ++i) x_steps[i] = arrays.x_step(s_, i), y_steps[i] = arrays.y_step(s_, i);
    if (!parts_.has_x) return sum_gradients(arrays, results, x_steps, y_steps, scratch.last_axis);
    const Range windows = parts_.windows(results);
    const Range own = parts_.is_dx ? results : Range{0, s_.x[parts_.axis]};
    const WindowLoop loop(s_, parts_.axis, windows, own, x_steps, parts_.is_dx || parts_.has_tangent);
    const int64_t step = x_steps[parts_.axis];
    int64_t zeroed = results.begin;  // rows of dx, just before windows add to them
    const auto zero_up_to = [&](int64_t end) {
      end = min_of(end, results.end);
      if (end <= zeroed) return;
      __builtin_memset(arrays.dx + zeroed * step, 0, (end - zeroed) * step * sizeof(S));
      zeroed = end;
    };
    loop.for_windows(scratch.taps, scratch.edge_taps,
                     [&](const TapList& list, int64_t origin, int64_t o0, int64_t o1, int64_t o2) {
                       if (parts_.is_dx) {
                         const int64_t o[] = {o0, o1, o2}, row = o[parts_.axis];
                         zero_up_to(elements_of(s_, parts_.axis, {row, row + 1}).end);
                       }
                       const int64_t at = o0 * y_steps[0] + o1 * y_steps[1] + o2 * y_steps[2];
                       window(arrays, list, origin, at);
                     });
    if (parts_.is_dx) zero_up_to(results.end);
  }

  // The input gradient of sums, one element of x after the other.
  void sum_gradients(const PoolArrays<S>& arrays, Range results, const int64_t (&x_steps)[kPoolAxes],
                     const int64_t (&y_steps)[kPoolAxes], WindowsOfElement* last_axis) const {
    Range own[] = {{0, s_.x[0]}, {0, s_.x[1]}, {0, s_.x[2]}};
    own[parts_.axis] = results;
    for (int64_t k = own[2].begin; k < own[2].end; ++k) last_axis[k] = WindowsOfElement(s_, 2, k);
    for (int64_t i = own[0].begin; i < own[0].end; ++i)
      for (int64_t j = own[1].begin; j < own[1].end; ++j) {
        const WindowsOfElement outer(s_, 0, i), inner(s_, 1, j);
        for (int64_t k = own[2].begin; k < own[2].end; ++k) {
          const WindowsOfElement& last = last_axis[k];
          const int64_t counts[] = {outer.count, inner.count, last.count};
          const int64_t steps[] = {outer.step * y_steps[0], inner.step * y_steps[1], last.step * y_steps[2]};
          const S* const dy = arrays.y + outer.first * y_steps[0] + inner.first * y_steps[1] + last.first * y_steps[2];
          S* const dx = arrays.dx + i * x_steps[0] + j * x_steps[1] + k * x_steps[2];
          for_channels(arrays.channels, [&](int64_t c, auto vectors, auto lanes) __attribute__((always_inline)) {
            SumOfGradients<S, decltype(vectors)::value>::run(counts, steps, dy + c, dx + c, divisor_, lanes);
          });
        }
      }
  }

  template <int n>
  struct Count {
    static constexpr int value = n;
  };
  // Calls body(first channel, number of vectors, lanes) for vectors of channels, up to four at a time.
  template <class Body>
  static JAXGRAD_INLINE void for_channels(int64_t channels, Body body) {
    int64_t c = 0;
    for (; c + 4 * kL <= channels; c += 4 * kL) body(c, Count<4>{}, AllLanes<T>{});
    for (; c + kL <= channels; c += kL) body(c, Count<1>{}, AllLanes<T>{});
    if (c < channels) body(c, Count<1>{}, static_cast<int>(channels - c));
  }

  // Computes one window for all channels.
  void window(const PoolArrays<S>& arrays, const TapList& list, int64_t origin, int64_t at) const {
    for_channels(arrays.channels, [&](int64_t c, auto n, auto lanes) __attribute__((always_inline)) {
      vectors<decltype(n)::value>(arrays, list, origin + c, at + c, lanes);
    });
  }

  template <int kVectors, class Lanes>
  __attribute__((noinline)) void vectors(const PoolArrays<S>& arrays, const TapList& list, int64_t origin, int64_t at,
                                         Lanes lanes) const {
    switch (call_.pass) {
      case PoolPass::kMax:
        return MaxOfWindow<S, kVectors>::run(list, arrays.x + origin, arrays.y + at, lanes);
      case PoolPass::kMaxInputGradient:
        return ScatterOfWindow<S, kVectors>::run(list, arrays.x + origin, arrays.y + at, arrays.dx + origin, lanes);
      case PoolPass::kSum:
        return SumOfWindow<S, kVectors>::run(list, arrays.x + origin, arrays.y + at, divisor_, lanes);
      case PoolPass::kSumInputGradient:  // sum_gradients()
        return;
      case PoolPass::kMaxTangent:
        return TangentOfWindow<S, kVectors>::run(list, arrays.x + origin, arrays.tangent + origin, arrays.y + at,
                                                 lanes);
    }
  }

  const PoolCall<S>& call_;
  const PoolShape& s_;
  const PoolParts parts_;
  const T divisor_;
};

}  // namespace

template <class S>
void pool(const PoolCall<S>& call, Parallel& parallel) {
  PoolRun<S>(call).run(parallel);
}
template void pool<float>(const PoolCall<float>&, Parallel&);
template void pool<double>(const PoolCall<double>&, Parallel&);
template void pool<BFloat16>(const PoolCall<BFloat16>&, Parallel&);
template void pool<Float16>(const PoolCall<Float16>&, Parallel&);

int64_t pool_workspace(PoolPass pass, const PoolShape& shape, int64_t storage_bytes, int64_t threads) {
  const PoolParts parts(pass, shape);
  const int64_t each = storage_bytes == 8   ? scratch_bytes<double>(parts)
                       : storage_bytes == 4 ? scratch_bytes<float>(parts)
                                            : scratch_bytes<BFloat16>(parts);
  return each * threads;
}

}  // namespace jaxgrad::JAXGRAD_ISA
