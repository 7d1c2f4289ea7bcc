#include "cuda/transpose/op.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "common/lru_cache.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/nvrtc.h"
#include "cuda/transpose/kernel_source.h"

namespace jaxgrad {
namespace {

constexpr unsigned kMany = 32;                      // rows or columns
constexpr int64_t kWidest = 16;                     // bytes that a thread takes at a time
constexpr size_t kFew = 3, kPairs = 6, kMoves = 7;  // the first of the kernels of a kind
constexpr size_t kBatchAxes = std::extent_v<decltype(Transposition::sizes)>;
static_assert(kBatchAxes == kMaxSpatial, "an array has rows and columns besides");

// The kernels, loaded on one device for as long as the process lives: a CUDA graph may run them that long.
class Kernels {
 public:
  explicit Kernels(int device) : code_(nvrtc::compile(std::string(kTransposeSource), driver::architecture(device))) {
    const driver::RelaxedCapture relaxed;
    JAXGRAD_DRIVER(driver::api().cuModuleLoadData(&module_, code_->data()));
    try {  // asked for by name, a kernel is loaded at once, and not when it is first launched
      for (size_t i = 0; i < functions_.size(); ++i)
        JAXGRAD_DRIVER(driver::api().cuModuleGetFunction(&functions_[i], module_, kTranspositionKernels[i]));
    } catch (...) {
      driver::api().cuModuleUnload(module_);
      throw;
    }
  }
  ~Kernels() { driver::api().cuModuleUnload(module_); }
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  CUfunction function(size_t kernel) const { return functions_[kernel]; }

 private:
  std::shared_ptr<const std::string> code_;
  CUmodule module_ = nullptr;
  std::array<CUfunction, kTranspositionKernels.size()> functions_{};
};

std::shared_ptr<const Kernels> kernels(int device) {
  static auto& loaded = *new PlanCache<int, Kernels, std::hash<int>>(std::numeric_limits<size_t>::max());
  return loaded.get(device, [&] { return std::make_shared<const Kernels>(device); });
}

struct Axis {
  int64_t size, in, out;  // elements; strides in elements, `out` negative where the axis is reversed
};

// The axes of more than one element, outermost first as they lie in `from`. Those that stay neighbours are one: axes
// that are all reversed, or none of them.
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

int narrow(int64_t value) {
  if (std::abs(value) > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("an array of more than 2^31 elements cannot be transposed");
  return static_cast<int>(value);
}

Transposition describe(std::vector<Axis> axes) {
  const auto columns = std::find_if(axes.begin(), axes.end(), [](const Axis& axis) { return axis.in == 1; });
  auto rows = std::find_if(axes.begin(), axes.end(), [](const Axis& axis) { return std::abs(axis.out) == 1; });
  if (columns != axes.end() && columns->out == 1)  // then any other axis may have the rows: the longest
    rows = std::max_element(axes.begin(), axes.end(),
                            [](const Axis& a, const Axis& b) { return b.in != 1 && (a.in == 1 || a.size < b.size); });
  if (columns == axes.end() || rows == axes.end() || columns == rows)
    throw std::invalid_argument("the arrays are no transposition of each other that the kernels take");
  Transposition t{};
  if (rows->out == -1) {  // they lie side by side where they are counted as `out` has them
    t.in_start = narrow((rows->size - 1) * rows->in);
    *rows = {rows->size, -rows->in, 1};
  }
  for (const Axis& axis : axes)
    if (axis.out < 0) t.out_start += narrow((axis.size - 1) * -axis.out);
  t.rows = narrow(rows->size);
  t.columns = narrow(columns->size);
  t.in_row_stride = narrow(rows->in);
  t.out_row_stride = narrow(rows->out);
  t.out_column_stride = narrow(columns->out);
  std::fill_n(t.sizes, kBatchAxes, 1);
  size_t batch = 0;
  for (auto axis = axes.begin(); axis != axes.end(); ++axis) {
    if (axis == rows || axis == columns) continue;
    t.sizes[batch] = narrow(axis->size);
    t.in_strides[batch] = narrow(axis->in);
    t.out_strides[batch++] = narrow(axis->out);
  }
  return t;
}

bool has_few(const Transposition& t) { return std::min(t.rows, t.columns) < kMany; }

// Whether rows are moved as they are.
bool moves_rows(const Transposition& t) { return t.out_column_stride == 1; }

void set_tiles(Transposition& t, bool pairs) {
  if (moves_rows(t)) {
    t.tile_columns = std::min<unsigned>(t.columns, kTransposeElements);
    t.tile_rows = std::min(t.rows, kTransposeElements / t.tile_columns);
  } else if (has_few(t)) {  // few rows get many columns, and the other way round
    t.tile_rows = std::min(t.rows, t.columns < kMany ? kTransposeElements / t.columns : kMany);
    t.tile_columns = std::min(t.columns, kTransposeElements / t.tile_rows);
  } else {
    t.tile_rows = kTransposeRows;
    t.tile_columns = pairs ? kTransposeRows : kTransposeColumns;
  }
  t.row_tiles = (t.rows + t.tile_rows - 1) / t.tile_rows;
  t.column_tiles = (t.columns + t.tile_columns - 1) / t.tile_columns;
}

// Whether `many` elements, a power of 2, may be taken at a time: in rows, and where these become columns, of as many.
// Where an array starts is a multiple of strides.
bool takes(const Transposition& t, unsigned many, int64_t element_bytes, const void* in, const void* out) {
  unsigned bits = t.columns | t.in_row_stride;
  bits |= moves_rows(t) ? t.out_row_stride : t.rows | t.out_column_stride;
  for (size_t axis = 0; axis < kBatchAxes; ++axis) bits |= t.in_strides[axis] | t.out_strides[axis];
  const auto address = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out);
  return bits % many == 0 && address % (many * element_bytes) == 0;
}

// The same rows, of wider elements.
void widen(Transposition& t, int many) {
  for (unsigned* number : {&t.in_start, &t.out_start, &t.columns}) *number /= many;
  for (int* stride : {&t.in_row_stride, &t.out_row_stride}) *stride /= many;
  for (int (*strides)[kBatchAxes] : {&t.in_strides, &t.out_strides})
    for (int& stride : *strides) stride /= many;
}

// The place of a kernel among those of its kind.
size_t place_of(int64_t bytes) { return bytes == 2 ? 0 : bytes == 4 ? 1 : bytes == 8 ? 2 : 3; }

// The kernel; where rows are moved, their elements become as wide as a thread can take at a time.
size_t choose_kernel(Transposition& t, int64_t element_bytes, const void* in, const void* out) {
  if (moves_rows(t)) {
    int64_t bytes = kWidest;
    while (bytes > element_bytes && !takes(t, bytes / element_bytes, element_bytes, in, out)) bytes /= 2;
    widen(t, static_cast<int>(bytes / element_bytes));
    return kMoves + place_of(bytes);
  }
  if (has_few(t)) return kFew + place_of(element_bytes);
  return element_bytes == 2 && takes(t, 2, element_bytes, in, out) ? kPairs : place_of(element_bytes);
}

}  // namespace

void load_transposition(int device) { kernels(device); }

TranspositionLaunch transposition_launch(int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
                                         const ConvOperand& to, const void* out) {
  Transposition t = describe(merged_axes(axes, from, to));
  const size_t kernel = choose_kernel(t, element_bytes, in, out);
  set_tiles(t, kernel == kPairs);
  int64_t blocks = static_cast<int64_t>(t.row_tiles) * t.column_tiles;
  for (const unsigned size : t.sizes) blocks *= size;
  return {kernel, t, static_cast<unsigned>(narrow(blocks))};
}

void transpose(CUstream stream, int device, int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
               const ConvOperand& to, void* out) {
  const std::shared_ptr<const Kernels> loaded = kernels(device);
  TranspositionLaunch launch = transposition_launch(axes, element_bytes, from, in, to, out);
  std::array<void*, 3> arguments = {&in, &out, &launch.description};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(loaded->function(launch.kernel), launch.blocks, 1, 1, kTransposeThreads,
                                              1, 1, 0, stream, arguments.data(), nullptr));
}

}  // namespace jaxgrad
