// The pooling kernels. This file is compiled once per instruction set; JAXGRAD_ISA names the namespace.
#include "cpu/pool/max.h"
#include "cpu/pool/plane.h"
#include "cpu/pool/planes.h"
#include "cpu/pool/scratch.h"
#include "cpu/pool/sum.h"
#include "cpu/runtime/parallel_for.h"

namespace jaxgrad::JAXGRAD_ISA {
namespace {

template <class S>
class PoolRun {
 public:
  using T = Compute<S>;

  explicit PoolRun(const PoolCall<S>& call) : call_(call), s_(call.shape), parts_(call.pass, call.shape) {}

  void run(Parallel& parallel) {
    if (s_.channels == 0) return;
    if (parts_.reduces_planes()) return run_reductions(parallel);
    const int64_t tasks = parts_.tasks(), bytes = scratch_bytes<T>(parts_);
    const int64_t workers = max_of(1, min_of(min_of(parallel.threads(), tasks), call_.workspace_bytes / bytes));
    int64_t next = 0;
    parallel_for(parallel, workers, [&](int64_t worker) {
      Arena arena(call_.workspace + worker * bytes);
      const PoolScratch<T> scratch(parts_, arena);
      for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) {
        if (parts_.copies) {
          run_copies(task, scratch);
        } else {
          run_in_place(task / parts_.count, parts_.box(task % parts_.count), scratch);
        }
      }
    });
  }

 private:
  void run_reductions(Parallel& parallel) const {
    const int64_t positions = s_.x[0] * s_.x[1] * s_.x[2], n = positions * s_.channels;
    const int64_t each = ceil_div(kTypicalPositions * 4, max_of(n, 1));
    const T divisor = static_cast<T>(call_.divisor);
    parallel_for(parallel, ceil_div(s_.outer, each), [&](int64_t task) {
      for (int64_t i = task * each; i < min_of(s_.outer, (task + 1) * each); ++i) {
        if (call_.pass == PoolPass::kMax) store(call_.result + i, reduce_plane<MaxStep>(call_.x + i * n, n), 1);
        if (call_.pass == PoolPass::kSum)
          store(call_.result + i, reduce_plane<SumStep>(call_.x + i * n, n) / divisor, 1);
        if (call_.pass == PoolPass::kSumInputGradient)
          fill_plane(call_.second + i * s_.channels, static_cast<int>(s_.channels), positions, divisor,
                     call_.result + i * n);
      }
    });
  }

  // The arrays, without x, y and so on, with the layouts of these ranges.
  template <class A>
  PoolArrays<A> arrays(const Range (&x)[kPoolAxes], const Range (&y)[kPoolAxes], const Range (&dx)[kPoolAxes],
                       int64_t channels, const PoolScratch<T>& scratch) const {
    const bool is_power_of_two = (call_.divisor & (call_.divisor - 1)) == 0;
    return {nullptr,
            nullptr,
            nullptr,
            nullptr,
            scratch.selected,
            channels,
            static_cast<T>(call_.divisor),
            is_power_of_two ? 1 / static_cast<T>(call_.divisor) : 0,
            {x, channels},
            {y, channels},
            {dx, channels}};
  }

  void run_in_place(int64_t outer, const PoolBox& box, const PoolScratch<T>& scratch) const {
    const Range x[] = {{0, s_.x[0]}, {0, s_.x[1]}, {0, s_.x[2]}}, y[] = {{0, s_.y[0]}, {0, s_.y[1]}, {0, s_.y[2]}};
    PoolArrays<S> found = arrays<S>(x, y, x, s_.channels, scratch);
    const int64_t x_at = outer * positions(x) * s_.channels, y_at = outer * positions(y) * s_.channels;
    if (parts_.has_x) found.x = call_.x + x_at;
    if (parts_.has_tangent) found.tangent = call_.second + x_at;
    found.y = (parts_.is_dx ? const_cast<S*>(call_.second) : call_.result) + y_at;
    if (parts_.is_dx) found.dx = call_.result + x_at;
    compute(found, box, scratch);
  }

  void run_copies(int64_t task, const PoolScratch<T>& scratch) const {
    const PoolBox box = parts_.copied_box();
    const int axis = parts_.axis;
    const bool is_max = call_.pass != PoolPass::kSum;
    const auto x = [&](auto copy) { for_planes(task, s_.x, box.x[axis], parts_.x_shift(), copy); };
    const auto y = [&](auto copy) { for_planes(task, s_.y, box.y[axis], parts_.y_shift(), copy); };
    const auto dx = [&](auto copy) { for_planes(task, s_.x, box.dx[axis], parts_.x_shift(), copy); };
    const T padding = static_cast<T>(is_max ? -__builtin_inff() : 0.0f);
    if (parts_.has_x) x([&](const Planes& p, int64_t at) { read_planes<S>(p, call_.x, padding, scratch.x + at); });
    if (parts_.has_tangent)
      x([&](const Planes& p, int64_t at) { read_planes<S>(p, call_.second, 0, scratch.tangent + at); });
    if (parts_.is_dx) y([&](const Planes& p, int64_t at) { read_planes<S>(p, call_.second, 0, scratch.y + at); });
    PoolArrays<T> found = arrays<T>(box.x, box.y, box.dx, s_.channels * kPlanes, scratch);
    found.x = scratch.x, found.tangent = scratch.tangent, found.y = scratch.y, found.dx = scratch.dx;
    compute(found, box, scratch);
    if (parts_.is_dx) {
      dx([&](const Planes& p, int64_t at) { write_planes<S>(p, scratch.dx + at, call_.result); });
    } else {
      y([&](const Planes& p, int64_t at) { write_planes<S>(p, scratch.y + at, call_.result); });
    }
  }

  // Calls copy(planes, offset in the copy) for each run of contiguous elements. range: of the split axis, for part 0.
  template <class Copy>
  void for_planes(int64_t task, const int64_t (&sizes)[kPoolAxes], Range range, int64_t shift, Copy copy) const {
    const int axis = parts_.axis;
    int64_t runs = 1, row = s_.channels;
    for (int i = 0; i < axis; ++i) runs *= sizes[i];
    for (int i = axis + 1; i < kPoolAxes; ++i) row *= sizes[i];
    Planes planes;
    planes.n = range.size() * row;
    int64_t outer = task * kPlanes / parts_.count, part = task * kPlanes % parts_.count;
    for (int i = 0; i < kPlanes; ++i) {
      const int64_t begin = range.begin + part * shift;
      const Range rows =
          outer < s_.outer ? intersection({0, range.size()}, {-begin, sizes[axis] - begin}) : Range{0, 0};
      planes.offsets[i] = (outer * runs * sizes[axis] + begin) * row;
      planes.present[i] = {rows.begin * row, rows.end * row};
      if (++part == parts_.count) part = 0, ++outer;
    }
    for (int64_t r = 0; r < runs; ++r) {
      copy(planes, r * planes.n * kPlanes);
      for (int64_t& offset : planes.offsets) offset += sizes[axis] * row;
    }
  }

  template <class A>
  void compute(const PoolArrays<A>& arrays, const PoolBox& box, const PoolScratch<T>& scratch) const {
    const WindowLoop<A> windows(s_, box, arrays, scratch.taps);
    const auto y = [&](int64_t o0, int64_t o1) { return arrays.y_layout.at(o0, o1, box.y[2].begin); };
    switch (call_.pass) {
      case PoolPass::kMax:
        return windows.template run<MaxOfWindow>(box.y[0], box.y[1], y);
      case PoolPass::kMaxInputGradient:
        if (parts_.has_tiles()) return windows.template run<MaxGradientOfTile>(box.y[0], box.y[1], y);
        return max_gradient(arrays, box, windows, scratch);
      case PoolPass::kMaxTangent:
        return windows.template run<TangentOfWindow>(box.y[0], box.y[1], y);
      case PoolPass::kSum:
        return windows.template run<SumOfWindow>(box.y[0], box.y[1], y);
      case PoolPass::kSumInputGradient: {
        if (parts_.has_tiles()) return windows.template run<SumGradientOfTile>(box.y[0], box.y[1], y);
        const ElementLoop<A> elements(s_, box, arrays, scratch.windows, scratch.phases);
        for (int64_t i = box.dx[0].begin; i < box.dx[0].end; ++i)
          for (int64_t j = box.dx[1].begin; j < box.dx[1].end; ++j)
            elements.template run<SumGradient>(i, j, [](int64_t, int64_t) { return int64_t{0}; });
      }
    }
  }

  template <class A>
  void max_gradient(const PoolArrays<A>& arrays, const PoolBox& box, const WindowLoop<A>& windows,
                    const PoolScratch<T>& scratch) const {
    const ElementLoop<A> elements(s_, box, arrays, scratch.windows, scratch.phases);
    const SelectedRing ring(s_, box, arrays.channels);
    const auto selected = [&](int64_t o0, int64_t o1) { return ring.at(o0, o1); };
    const int axis = ring.axis;
    Range ranges[] = {box.y[0], box.y[1]};
    int64_t next = box.y[axis].begin;
    for (int64_t i = box.dx[0].begin; i < box.dx[0].end; ++i)
      for (int64_t j = box.dx[1].begin; j < box.dx[1].end; ++j) {
        const int64_t last = floor_div((axis == 0 ? i : j) + s_.padding[axis], s_.strides[axis]);
        for (; next < min_of(last + 1, box.y[axis].end); ++next) {
          ranges[axis] = {next, next + 1};
          windows.template run<SelectedOfWindow>(ranges[0], ranges[1], selected);
        }
        elements.template run<MaxGradient<S>>(i, j, selected);
      }
  }

  const PoolCall<S>& call_;
  const PoolShape& s_;
  const PoolParts parts_;
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
  const int64_t each = storage_bytes == 8 ? scratch_bytes<double>(parts) : scratch_bytes<float>(parts);
  return each * max_of(1, min_of(threads, parts.tasks()));
}

}  // namespace jaxgrad::JAXGRAD_ISA
