#include "cuda/transpose/op.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/lru_cache.h"
#include "cuda/runtime/module.h"
#include "cuda/runtime/nvrtc.h"
#include "cuda/transpose/kernel_source.h"

namespace jaxgrad {
namespace {

constexpr int64_t kMaxElements = std::numeric_limits<int32_t>::max();  // the kernels use 32-bit offsets
constexpr unsigned kMany = 32;                                         // rows or columns
constexpr int64_t kMaxElementBytes = 16;                               // that a thread copies at a time
constexpr size_t kFirstFew = 3, kPairs = 6, kFirstMove = 7;            // indices into kTransposeKernels
constexpr size_t kBatchAxes = std::extent_v<decltype(TransposeArguments::sizes)>;
static_assert(kBatchAxes == kMaxSpatial, "besides its batch axes, an array has rows and columns");

// The kernels, loaded on one device. They stay loaded, since a CUDA graph may run them later.
class Kernels {
 public:
  explicit Kernels(int device) : module_(nvrtc::compile(kTransposeSource, driver::architecture(device))) {
    for (size_t i = 0; i < functions_.size(); ++i) functions_[i] = module_.function(kTransposeKernels[i]);
  }

  CUfunction function(size_t kernel) const { return functions_[kernel]; }

 private:
  driver::Module module_;
  std::array<CUfunction, kTransposeKernels.size()> functions_{};
};

std::shared_ptr<const Kernels> kernels(int device) {
  static auto& loaded = *new LruCache<int, Kernels, std::hash<int>>(std::numeric_limits<size_t>::max());
  return loaded.get(device, [&] { return std::make_shared<const Kernels>(device); });
}

struct Axis {
  int64_t size, in, out;  // elements; strides in elements, `out` is negative if the axis is reversed
};

// The axes of more than one element, outermost first in `from`. Neighbors that stay neighbors are merged into one axis,
// if both are reversed or neither is.
std::vector<Axis> merged_axes(int count, const ConvOperand& from, const ConvOperand& to) {
  std::vector<Axis> axes;
  for (int axis = 0; axis < count; ++axis)
    if (from.sizes[axis] > 1) axes.push_back({from.sizes[axis], from.strides[axis], to.strides[axis]});
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.in > b.in; });
  std::vector<Axis> merged;
  for (const Axis& axis : axes) {
    const int64_t size = axis.size;
    if (!merged.empty() && merged.back().in == size * axis.in && merged.back().out == size * axis.out) {
      merged.back() = {merged.back().size * size, axis.in, axis.out};
    } else {
      merged.push_back(axis);
    }
  }
  return merged;
}

// Indices into the merged axes.
struct Roles {
  size_t rows, columns;
};

// The columns are the contiguous axis of the input, the rows that of the output. If this is the same axis, the elements
// of rows stay contiguous and the longest other axis has the rows. Empty if the kernels do not support the transpose.
std::optional<Roles> roles_of(const std::vector<Axis>& axes) {
  const auto index_of_first = [&](auto condition) {
    return static_cast<size_t>(std::find_if(axes.begin(), axes.end(), condition) - axes.begin());
  };
  Roles roles{};
  roles.columns = index_of_first([](const Axis& axis) { return axis.in == 1; });
  roles.rows = index_of_first([](const Axis& axis) { return std::abs(axis.out) == 1; });
  if (roles.columns < axes.size() && axes[roles.columns].out == 1) {
    const auto longest = std::max_element(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) {
      return b.in != 1 && (a.in == 1 || a.size < b.size);
    });
    roles.rows = static_cast<size_t>(longest - axes.begin());
  }
  if (roles.columns == axes.size() || roles.rows == axes.size() || roles.columns == roles.rows) return std::nullopt;
  return roles;
}

int64_t element_count(const std::vector<Axis>& axes) {
  int64_t count = 1;
  for (const Axis& axis : axes) count *= axis.size;
  return count;
}

int narrow(int64_t value) {
  if (std::abs(value) > kMaxElements) throw std::invalid_argument("arrays of 2^31 elements or more are not supported");
  return static_cast<int>(value);
}

TransposeArguments describe(std::vector<Axis> axes) {
  narrow(element_count(axes));
  const std::optional<Roles> roles = roles_of(axes);
  if (!roles) throw std::invalid_argument("the kernels do not support this transpose");
  Axis& rows = axes[roles->rows];
  const Axis& columns = axes[roles->columns];
  TransposeArguments t{};
  if (rows.out == -1) {  // counts the rows from the other end, so that they are contiguous in `out`
    t.in_start = narrow((rows.size - 1) * rows.in);
    rows = {rows.size, -rows.in, 1};
  }
  for (const Axis& axis : axes)
    if (axis.out < 0) t.out_start += narrow((axis.size - 1) * -axis.out);
  t.rows = narrow(rows.size);
  t.columns = narrow(columns.size);
  t.in_row_stride = narrow(rows.in);
  t.out_row_stride = narrow(rows.out);
  t.out_column_stride = narrow(columns.out);
  std::fill_n(t.sizes, kBatchAxes, 1);
  size_t batch = 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (i == roles->rows || i == roles->columns) continue;
    t.sizes[batch] = narrow(axes[i].size);
    t.in_strides[batch] = narrow(axes[i].in);
    t.out_strides[batch++] = narrow(axes[i].out);
  }
  return t;
}

bool has_few(const TransposeArguments& t) { return std::min(t.rows, t.columns) < kMany; }

// Whether rows stay rows.
bool moves_rows(const TransposeArguments& t) { return t.out_column_stride == 1; }

void set_tiles(TransposeArguments& t, bool pairs) {
  if (moves_rows(t)) {
    t.tile_columns = std::min<unsigned>(t.columns, kTransposeElements);
    t.tile_rows = std::min(t.rows, kTransposeElements / t.tile_columns);
  } else if (has_few(t)) {  // few rows are combined with many columns, and vice versa
    t.tile_rows = std::min(t.rows, t.columns < kMany ? kTransposeElements / t.columns : kMany);
    t.tile_columns = std::min(t.columns, kTransposeElements / t.tile_rows);
  } else {
    t.tile_rows = kTransposeRows;
    t.tile_columns = pairs ? kTransposeRows : kTransposeColumns;
  }
  t.row_tiles = (t.rows + t.tile_rows - 1) / t.tile_rows;
  t.column_tiles = (t.columns + t.tile_columns - 1) / t.tile_columns;
}

// Whether groups of `count` elements, a power of 2, stay aligned: within rows and, if rows become columns, within
// columns too. The start of an array is a multiple of its strides.
bool is_aligned(const TransposeArguments& t, unsigned count, int64_t element_bytes, const void* in, const void* out) {
  unsigned bits = t.columns | t.in_row_stride;
  bits |= moves_rows(t) ? t.out_row_stride : t.rows | t.out_column_stride;
  for (size_t axis = 0; axis < kBatchAxes; ++axis) bits |= t.in_strides[axis] | t.out_strides[axis];
  const auto address = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out);
  return bits % count == 0 && address % (count * element_bytes) == 0;
}

// Describes the same rows with elements that are `count` times as wide.
void widen(TransposeArguments& t, int count) {
  for (unsigned* number : {&t.in_start, &t.out_start, &t.columns}) *number /= count;
  for (int* stride : {&t.in_row_stride, &t.out_row_stride}) *stride /= count;
  for (int (*strides)[kBatchAxes] : {&t.in_strides, &t.out_strides})
    for (int& stride : *strides) stride /= count;
}

// The index of a kernel for elements of this size within its group.
size_t index_of(int64_t bytes) { return bytes == 2 ? 0 : bytes == 4 ? 1 : bytes == 8 ? 2 : 3; }

// Chooses the kernel. If rows are moved, their elements become as wide as one thread can copy.
size_t choose_kernel(TransposeArguments& t, int64_t element_bytes, const void* in, const void* out) {
  if (moves_rows(t)) {
    int64_t bytes = kMaxElementBytes;
    while (bytes > element_bytes && !is_aligned(t, bytes / element_bytes, element_bytes, in, out)) bytes /= 2;
    widen(t, static_cast<int>(bytes / element_bytes));
    return kFirstMove + index_of(bytes);
  }
  if (has_few(t)) return kFirstFew + index_of(element_bytes);
  return element_bytes == 2 && is_aligned(t, 2, element_bytes, in, out) ? kPairs : index_of(element_bytes);
}

// The dense strides of axes at the positions of `spec`.
ConvAxes dense_strides(const std::vector<int64_t>& sizes, const std::vector<int64_t>& spec) {
  ConvAxes strides{};
  int64_t stride = 1;
  for (size_t position = spec.size(); position-- > 0;) {
    const auto found = std::find(spec.begin(), spec.end(), static_cast<int64_t>(position));
    if (found == spec.end()) throw std::invalid_argument("each spec must be a permutation of the axes");
    const auto axis = static_cast<size_t>(found - spec.begin());
    strides[axis] = stride;
    stride *= sizes[axis];
  }
  return strides;
}

}  // namespace

bool transpose_supported(const std::vector<int64_t>& sizes, const std::vector<int64_t>& from_spec,
                         const std::vector<int64_t>& to_spec, const std::vector<int64_t>& reversed_axes) {
  ConvOperand from, to;
  if (sizes.size() > from.sizes.size() || from_spec.size() != sizes.size() || to_spec.size() != sizes.size())
    throw std::invalid_argument("there must be at most five axes, and each spec must have a position for each axis");
  std::copy(sizes.begin(), sizes.end(), from.sizes.begin());
  to.sizes = from.sizes;
  from.strides = dense_strides(sizes, from_spec);
  to.strides = dense_strides(sizes, to_spec);
  for (const int64_t axis : reversed_axes) to.strides.at(static_cast<size_t>(axis)) *= -1;
  const std::vector<Axis> axes = merged_axes(static_cast<int>(sizes.size()), from, to);
  const std::optional<Roles> roles = roles_of(axes);
  if (!roles || element_count(axes) > kMaxElements) return false;
  const bool moves_rows = axes[roles->columns].out == 1;
  const bool reverses = std::any_of(axes.begin(), axes.end(), [](const Axis& axis) { return axis.out < 0; });
  return !moves_rows || (reverses && from_spec != to_spec);
}

void load_transpose_kernels(int device) { kernels(device); }

TransposeLaunch transpose_launch(int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
                                 const ConvOperand& to, const void* out) {
  TransposeArguments t = describe(merged_axes(axes, from, to));
  const size_t kernel = choose_kernel(t, element_bytes, in, out);
  set_tiles(t, kernel == kPairs);
  int64_t blocks = static_cast<int64_t>(t.row_tiles) * t.column_tiles;
  for (const unsigned size : t.sizes) blocks *= size;
  return {kernel, t, static_cast<unsigned>(narrow(blocks))};
}

void transpose(CUstream stream, int device, int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
               const ConvOperand& to, void* out) {
  const std::shared_ptr<const Kernels> loaded = kernels(device);
  TransposeLaunch launch = transpose_launch(axes, element_bytes, from, in, to, out);
  std::array<void*, 3> arguments = {&in, &out, &launch.arguments};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(loaded->function(launch.kernel), launch.blocks, 1, 1, kTransposeThreads,
                                              1, 1, 0, stream, arguments.data(), nullptr));
}

}  // namespace jaxgrad
