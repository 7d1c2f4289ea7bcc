#include "cpu/conv/call.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/runtime/onednn.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {
namespace {

float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Rounds to nearest, ties to even.
BFloat16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return {static_cast<uint16_t>(bits >> 16 | 0x40)};  // a quiet NaN
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Runs body(first, last) for ranges of [0, n), on all threads.
template <class Body>
void for_ranges(Parallel& parallel, int64_t n, Body body) {
  constexpr int64_t kRange = 1 << 16;
  auto run = [&](int64_t range) { body(range * kRange, std::min((range + 1) * kRange, n)); };
  parallel.run((n + kRange - 1) / kRange, &run,
               [](void* context, int64_t range) { (*static_cast<decltype(run)*>(context))(range); });
}

// The float32 copy of a bfloat16 array of all problems.
class Float32Copy {
 public:
  template <class Bytes>
  Float32Copy(ConvArray<Bytes> array, int64_t num_problems)
      : num_problems_(num_problems),
        size_(array.data == nullptr ? 0 : num_problems * array.bytes / int64_t{sizeof(BFloat16)}),
        values_(new float[static_cast<size_t>(size_)]) {}

  void read(const void* data, Parallel& parallel) {
    for_ranges(parallel, size_, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) values_[i] = widen(static_cast<const BFloat16*>(data)[i]);
    });
  }
  void write(void* data, Parallel& parallel) const {
    for_ranges(parallel, size_, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) static_cast<BFloat16*>(data)[i] = narrow(values_[i]);
    });
  }

  ConvArray<std::byte> array() {
    if (size_ == 0) return {nullptr, 0};
    return {reinterpret_cast<std::byte*>(values_.get()), size_ * int64_t{sizeof(float)} / num_problems_};
  }
  ConvArray<const std::byte> const_array() {
    const auto found = array();
    return {found.data, found.bytes};
  }

 private:
  int64_t num_problems_, size_;
  std::unique_ptr<float[]> values_;
};

void call_in_float32(ConvSchedule schedule, const ConvArrays& arrays, ConvWorkspace workspace, Parallel& parallel) {
  schedule.key.type = ConvType::kFloat32;
  const int64_t n = schedule.num_problems;
  Float32Copy first(arrays.first, n), second(arrays.second, n), bias(arrays.bias, n), result(arrays.result, n);
  first.read(arrays.first.data, parallel);
  second.read(arrays.second.data, parallel);
  const bool bias_is_result = schedule.key.pass == ConvPass::kWeightGradient;
  if (!bias_is_result) bias.read(arrays.bias.data, parallel);
  call_conv(schedule, {first.const_array(), second.const_array(), bias.array(), result.array()}, workspace, parallel);
  result.write(arrays.result.data, parallel);
  if (bias_is_result) bias.write(arrays.bias.data, parallel);
}

// The plan of the key, or null if oneDNN has no bfloat16 kernel for it.
std::shared_ptr<const ConvPlan> find_plan(const ConvKey& key) {
  struct Missing {};
  static LruCache<ConvKey, Missing, ConvKeyHash> missing(512);  // to search for a kernel takes longer than a small call
  if (key.type == ConvType::kBFloat16 && missing.find(key) != nullptr) return nullptr;
  try {
    return conv_plan(key);
  } catch (const onednn::Error& error) {
    if (error.status != dnnl_unimplemented || key.type != ConvType::kBFloat16) throw;
    missing.put(key, std::make_shared<Missing>());
    return nullptr;
  }
}

}  // namespace

void call_conv(const ConvSchedule& schedule, const ConvArrays& arrays, ConvWorkspace workspace, Parallel& parallel) {
  const auto plan = find_plan(schedule.key);
  if (plan == nullptr) return call_in_float32(schedule, arrays, workspace, parallel);
  const int64_t needed = conv_workspace(*plan, schedule);
  std::unique_ptr<std::byte[]> allocated;
  if (workspace.bytes < needed) {
    allocated.reset(new std::byte[static_cast<size_t>(needed)]);
    workspace.data = allocated.get();
  }
  run_conv(*plan, schedule, arrays, workspace.data, parallel);
}

}  // namespace jaxgrad
