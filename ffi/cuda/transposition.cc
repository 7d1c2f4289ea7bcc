#include "transposition.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../common/plan_cache.h"
#include "driver.h"
#include "kernel_sources.h"
#include "kernels/transposition.h"
#include "nvrtc.h"

namespace jaxgrad {
namespace {

constexpr unsigned kMany = 32;  // rows or columns
constexpr size_t kBatchAxes = std::extent_v<decltype(Transposition::sizes)>;
static_assert(kBatchAxes == kMaxSpatial, "an array has rows and columns besides");

// The kernels, loaded on one device for as long as the process lives: a CUDA graph may run them that long.
class Kernels {
 public:
  explicit Kernels(int device)
      : code_(nvrtc::compile(std::string(kTranspositionHeader) + kTranspositionSource, driver::architecture(device))) {
    const driver::RelaxedCapture relaxed;
    JAXGRAD_DRIVER(driver::api().cuModuleLoadData(&module_, code_->data()));
    // Asked for by name, a kernel is loaded at once, and not when it is first launched.
    constexpr std::array<const char*, kCount> names = {"transpose_2",     "transpose_4",     "transpose_8",
                                                       "transpose_few_2", "transpose_few_4", "transpose_few_8",
                                                       "transpose_pairs"};
    try {
      for (size_t i = 0; i < names.size(); ++i)
        JAXGRAD_DRIVER(driver::api().cuModuleGetFunction(&functions_[i], module_, names[i]));
    } catch (...) {
      driver::api().cuModuleUnload(module_);
      throw;
    }
  }
  ~Kernels() { driver::api().cuModuleUnload(module_); }
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // few: there are few rows or columns.
  CUfunction of_elements(int64_t bytes, bool few) const {
    return functions_[(bytes == 2 ? 0 : bytes == 4 ? 1 : 2) + (few ? 3 : 0)];
  }
  CUfunction of_pairs() const { return functions_.back(); }

 private:
  static constexpr size_t kCount = 7;
  std::shared_ptr<const std::string> code_;
  CUmodule module_ = nullptr;
  std::array<CUfunction, kCount> functions_{};
};

std::shared_ptr<const Kernels> kernels(int device) {
  static auto& loaded = *new PlanCache<int, Kernels, std::hash<int>>(std::numeric_limits<size_t>::max());
  return loaded.get(device, [&] { return std::make_shared<const Kernels>(device); });
}

struct Axis {
  int64_t size, in, out;  // elements; strides in elements
};

// The axes of more than one element, outermost first as they lie in `from`. Those that stay neighbours are one.
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

unsigned narrow(int64_t value) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("an array of more than 2^31 elements cannot be transposed");
  return static_cast<unsigned>(value);
}

Transposition describe(const std::vector<Axis>& axes) {
  const auto columns = std::find_if(axes.begin(), axes.end(), [](const Axis& axis) { return axis.in == 1; });
  const auto rows = std::find_if(axes.begin(), axes.end(), [](const Axis& axis) { return axis.out == 1; });
  if (columns == axes.end() || rows == axes.end() || columns == rows)
    throw std::invalid_argument("the arrays are no transposition of each other, of different last axes");
  Transposition t{};
  t.rows = narrow(rows->size);
  t.columns = narrow(columns->size);
  t.row_stride = narrow(rows->in);
  t.column_stride = narrow(columns->out);
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

void set_tiles(Transposition& t, bool pairs) {
  if (has_few(t)) {  // few rows get many columns, and the other way round
    t.tile_rows = std::min(t.rows, t.columns < kMany ? kTransposeElements / t.columns : kMany);
    t.tile_columns = std::min(t.columns, kTransposeElements / t.tile_rows);
  } else {
    t.tile_rows = kTransposeRows;
    t.tile_columns = pairs ? kTransposeRows : kTransposeColumns;
  }
  t.row_tiles = (t.rows + t.tile_rows - 1) / t.tile_rows;
  t.column_tiles = (t.columns + t.tile_columns - 1) / t.tile_columns;
}

bool takes_pairs(const Transposition& t, int64_t element_bytes, const void* in, const void* out) {
  unsigned odd = t.rows | t.columns | t.row_stride | t.column_stride;
  for (size_t axis = 0; axis < kBatchAxes; ++axis) odd |= t.in_strides[axis] | t.out_strides[axis];
  const auto address = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out);
  return element_bytes == 2 && odd % 2 == 0 && address % 4 == 0 && !has_few(t);
}

}  // namespace

void load_transposition(int device) { kernels(device); }

void transpose(CUstream stream, int device, int axes, int64_t element_bytes, const ConvOperand& from, const void* in,
               const ConvOperand& to, void* out) {
  const std::shared_ptr<const Kernels> loaded = kernels(device);
  Transposition t = describe(merged_axes(axes, from, to));
  const bool pairs = takes_pairs(t, element_bytes, in, out);
  set_tiles(t, pairs);
  int64_t blocks = static_cast<int64_t>(t.row_tiles) * t.column_tiles;
  for (const unsigned size : t.sizes) blocks *= size;
  std::array<void*, 3> arguments = {&in, &out, &t};
  const CUfunction kernel = pairs ? loaded->of_pairs() : loaded->of_elements(element_bytes, has_few(t));
  JAXGRAD_DRIVER(driver::api().cuLaunchKernel(kernel, narrow(blocks), 1, 1, kTransposeThreads, 1, 1, 0, stream,
                                              arguments.data(), nullptr));
}

}  // namespace jaxgrad
