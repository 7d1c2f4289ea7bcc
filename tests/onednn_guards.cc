// A convolution pass on oneDNN, on arrays between pages without access. tests/onednn_guards.py calls it.
//
// The kernels of oneDNN are compiled at run time, so that AddressSanitizer does not see what they read and write. An
// access outside of an array ends the process here, or is found as a change of the bytes beside the array.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/conv/op.h"
#include "cpu/runtime/onednn.h"
#include "cpu/runtime/onednn_threads.h"

namespace jaxgrad {
namespace {

constexpr unsigned char kBeside = 0xa5;     // the bytes between an array and the pages without access
constexpr unsigned char kUnwritten = 0xff;  // NaN

// An array that ends where a page without access begins, or begins where one ends.
class Guarded {
 public:
  Guarded(int64_t bytes, bool at_end) : bytes_(static_cast<size_t>(bytes)) {
    inner_ = std::max<size_t>(1, (bytes_ + page() - 1) / page()) * page();
    void* const mapped = mmap(nullptr, inner_ + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("mmap failed");
    base_ = static_cast<unsigned char*>(mapped);
    protect(PROT_READ | PROT_WRITE);
    std::memset(inner(), kBeside, inner_);
    data_ = inner() + (at_end ? inner_ - bytes_ : 0);
    std::memset(data_, kUnwritten, bytes_);
  }
  ~Guarded() { munmap(base_, inner_ + 2 * page()); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  void* data() { return data_; }
  void make_read_only() { protect(PROT_READ); }
  bool is_intact_beside() const {
    for (const unsigned char* byte = inner(); byte < inner() + inner_; ++byte)
      if ((byte < data_ || byte >= data_ + bytes_) && *byte != kBeside) return false;
    return true;
  }

 private:
  static size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
  unsigned char* inner() const { return base_ + page(); }
  void protect(int access) {
    if (mprotect(inner(), inner_, access) != 0) throw std::runtime_error("mprotect failed");
  }

  size_t bytes_, inner_;
  unsigned char *base_, *data_;
};

// Values that both types hold, and whose sums are exact in float32.
std::vector<double> small_integers(int64_t count, uint32_t seed) {
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<int>((seed >> 20) % 7) - 3;
  }
  return values;
}

int64_t bytes_of(ConvType type) { return type == ConvType::kBFloat16 ? 2 : 4; }

void store(const std::vector<double>& values, ConvType type, void* to) {
  for (size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<float>(values[i]);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (type == ConvType::kFloat32) {
      std::memcpy(static_cast<float*>(to) + i, &bits, sizeof bits);
    } else {
      const auto high = static_cast<uint16_t>(bits >> 16);
      std::memcpy(static_cast<uint16_t*>(to) + i, &high, sizeof high);
    }
  }
}

double load(const void* from, ConvType type, int64_t i) {
  uint32_t bits;
  if (type == ConvType::kFloat32) {
    std::memcpy(&bits, static_cast<const float*>(from) + i, sizeof bits);
  } else {
    uint16_t high;
    std::memcpy(&high, static_cast<const uint16_t*>(from) + i, sizeof high);
    bits = static_cast<uint32_t>(high) << 16;
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int64_t offset_of(const ConvOperand& operand, int64_t first, int64_t second, const int64_t* spatial, int count) {
  int64_t offset = first * operand.strides[0] + second * operand.strides[1];
  for (int i = 0; i < count; ++i) offset += spatial[i] * operand.strides[static_cast<size_t>(i + 2)];
  return offset;
}

// Advances an index of spatial axes; false after the last one.
bool advance(int64_t* index, const ConvOperand& operand, int count) {
  for (int i = count - 1; i >= 0; --i) {
    if (++index[i] < operand.sizes[static_cast<size_t>(i + 2)]) return true;
    index[i] = 0;
  }
  return false;
}

// Calls visit(offset in x, offset in w, offset in y) for every product of a convolution.
void for_each_product(const ConvKey& key, const std::function<void(int64_t, int64_t, int64_t)>& visit) {
  const int64_t out = key.w.sizes[0], in = key.w.sizes[1];
  int64_t y[kMaxSpatial] = {}, tap[kMaxSpatial] = {}, x[kMaxSpatial] = {};
  do {
    do {
      bool inside = true;
      for (int i = 0; i < key.spatial; ++i) {
        const auto axis = static_cast<size_t>(i);
        x[i] = y[i] * key.window_strides[axis] + tap[i] * key.rhs_dilation[axis] - key.padding_low[axis];
        inside = inside && x[i] >= 0 && x[i] < key.x.sizes[axis + 2];
      }
      if (!inside) continue;
      for (int64_t n = 0; n < key.y.sizes[0]; ++n)
        for (int64_t o = 0; o < out; ++o)
          for (int64_t i = 0; i < in; ++i)
            visit(offset_of(key.x, n, o / (out / key.groups) * in + i, x, key.spatial),
                  offset_of(key.w, o, i, tap, key.spatial), offset_of(key.y, n, o, y, key.spatial));
    } while (advance(tap, key.w, key.spatial));
  } while (advance(y, key.y, key.spatial));
}

struct Expected {
  std::vector<double> result, bias;
};

Expected expected(const ConvKey& key, const std::vector<double>& first, const std::vector<double>& second,
                  const std::vector<double>& bias) {
  const auto size = [&](const ConvOperand& operand) { return static_cast<size_t>(elements(operand, key.spatial)); };
  const auto at = [](const std::vector<double>& values, int64_t i) { return values[static_cast<size_t>(i)]; };
  Expected found;
  const auto add = [&](int64_t to, double value) { found.result[static_cast<size_t>(to)] += value; };
  int64_t place[kMaxSpatial] = {};
  switch (key.pass) {
    case ConvPass::kForward:
      found.result.resize(size(key.y));
      for_each_product(key, [&](int64_t x, int64_t w, int64_t y) { add(y, at(first, x) * at(second, w)); });
      if (!key.has_bias) break;
      do
        for (int64_t n = 0; n < key.y.sizes[0]; ++n)
          for (int64_t o = 0; o < key.w.sizes[0]; ++o) add(offset_of(key.y, n, o, place, key.spatial), at(bias, o));
      while (advance(place, key.y, key.spatial));
      break;
    case ConvPass::kInputGradient:
      found.result.resize(size(key.x));
      for_each_product(key, [&](int64_t x, int64_t w, int64_t y) { add(x, at(first, y) * at(second, w)); });
      break;
    case ConvPass::kWeightGradient:
      found.result.resize(size(key.w));
      for_each_product(key, [&](int64_t x, int64_t w, int64_t y) { add(w, at(first, x) * at(second, y)); });
      if (!key.has_bias) break;
      found.bias.resize(static_cast<size_t>(key.w.sizes[0]));
      do
        for (int64_t n = 0; n < key.y.sizes[0]; ++n)
          for (int64_t o = 0; o < key.w.sizes[0]; ++o)
            found.bias[static_cast<size_t>(o)] += at(second, offset_of(key.y, n, o, place, key.spatial));
      while (advance(place, key.y, key.spatial));
  }
  return found;
}

// The first value that is wrong, or an empty text.
std::string compare(const char* name, const std::vector<double>& values, ConvType type, const void* actual) {
  const double rounding = type == ConvType::kBFloat16 ? 1. / 64 : 1e-6;
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = load(actual, type, static_cast<int64_t>(i));
    if (!(std::abs(value - values[i]) <= rounding * (1 + std::abs(values[i]))))
      return std::string(name) + " " + std::to_string(i) + " is " + std::to_string(value) + " instead of " +
             std::to_string(values[i]);
  }
  return "";
}

// Runs a plan on guarded arrays. Returns what is wrong, or an empty text.
std::string run(const ConvPlan& plan, const ConvKey& key, bool at_end) {
  const ConvOperand *first_of = &key.x, *second_of = &key.w, *result_of = &key.y;
  if (key.pass == ConvPass::kInputGradient) first_of = &key.y, result_of = &key.x;
  if (key.pass == ConvPass::kWeightGradient) second_of = &key.y, result_of = &key.w;
  const int64_t width = bytes_of(key.type);
  const auto size = [&](const ConvOperand* operand) { return elements(*operand, key.spatial); };
  const std::vector<double> first_values = small_integers(size(first_of), 1),
                            second_values = small_integers(size(second_of), 2),
                            bias_values = small_integers(key.has_bias ? key.w.sizes[0] : 0, 3);
  Guarded first(size(first_of) * width, at_end), second(size(second_of) * width, at_end);
  Guarded bias(static_cast<int64_t>(bias_values.size()) * width, at_end), result(size(result_of) * width, at_end);
  store(first_values, key.type, first.data());
  store(second_values, key.type, second.data());
  const bool bias_is_result = key.pass == ConvPass::kWeightGradient;
  if (!bias_is_result) store(bias_values, key.type, bias.data());
  first.make_read_only();
  second.make_read_only();
  // An aligned workspace needs none of the bytes that plans have for its alignment.
  constexpr int64_t kAlignment = 64;
  Guarded workspace(plan.workspace_bytes() - kAlignment, at_end);
  plan.run(first.data(), second.data(), key.has_bias ? bias.data() : nullptr, result.data(),
           static_cast<std::byte*>(workspace.data()));
  const Expected values = expected(key, first_values, second_values, bias_values);
  std::string wrong;
  const auto append = [&](const std::string& problem) { wrong += wrong.empty() ? problem : "; " + problem; };
  if (!workspace.is_intact_beside()) append("writes beside the workspace");
  if (!result.is_intact_beside()) append("writes beside the result");
  if (!bias.is_intact_beside()) append("writes beside the bias gradient");
  if (const auto text = compare("result", values.result, key.type, result.data()); !text.empty()) append(text);
  if (const auto text = compare("bias gradient", values.bias, key.type, bias.data()); !text.empty()) append(text);
  return wrong;
}

// Creates an object of oneDNN.
template <class Object, class Create, class... Arguments>
Object make(Create create, Arguments... arguments) {
  typename Object::pointer created = nullptr;
  JAXGRAD_ONEDNN(create(&created, arguments...));
  return Object(created);
}

// Runs a kernel of oneDNN that writes past its scratchpad, if the library and the processor have it: the 1x1 kernel of
// the weight gradient, with strides and few features. Returns its name.
std::string run_faulty_kernel(bool at_end) {
  using namespace onednn;
  const auto describe = [](std::vector<int64_t> sizes, dnnl_format_tag_t layout) {
    return make<MemoryDesc>(api().dnnl_memory_desc_create_with_tag, static_cast<int>(sizes.size()), sizes.data(),
                            dnnl_f32, layout);
  };
  const MemoryDesc x = describe({1, 3, 32, 32}, dnnl_acdb), w = describe({8, 3, 1, 1}, dnnl_format_tag_any),
                   y = describe({1, 8, 16, 16}, dnnl_acdb);
  const dnnl_dims_t strides = {2, 2}, zeros = {0, 0};
  const auto attributes = make<Attributes>(api().dnnl_primitive_attr_create);
  JAXGRAD_ONEDNN(api().dnnl_primitive_attr_set_scratchpad_mode(attributes.get(), dnnl_scratchpad_mode_user));
  const auto hint = make<PrimitiveDesc>(api().dnnl_convolution_forward_primitive_desc_create, engine(),
                                        dnnl_forward_training, dnnl_convolution_direct, x.get(), w.get(), nullptr,
                                        y.get(), strides, zeros, zeros, zeros, nullptr);
  const auto description = make<PrimitiveDesc>(api().dnnl_convolution_backward_weights_primitive_desc_create, engine(),
                                               dnnl_convolution_direct, x.get(), w.get(), nullptr, y.get(), strides,
                                               zeros, zeros, zeros, hint.get(), attributes.get());
  const auto primitive = make<Primitive>(api().dnnl_primitive_create, description.get());
  const auto stream = make<Stream>(api().dnnl_stream_create, engine(), dnnl_stream_default_flags);
  const char* name = nullptr;
  JAXGRAD_ONEDNN(api().dnnl_primitive_desc_query(description.get(), dnnl_query_impl_info_str, 0, &name));
  std::vector<std::unique_ptr<Guarded>> arrays;
  std::vector<Memory> memories;
  std::vector<dnnl_exec_arg_t> arguments;
  for (const auto& [argument, what] :
       {std::pair(DNNL_ARG_SRC, dnnl_query_src_md), std::pair(DNNL_ARG_DIFF_DST, dnnl_query_diff_dst_md),
        std::pair(DNNL_ARG_DIFF_WEIGHTS, dnnl_query_diff_weights_md),
        std::pair(DNNL_ARG_SCRATCHPAD, dnnl_query_scratchpad_md)}) {
    const_dnnl_memory_desc_t layout = api().dnnl_primitive_desc_query_md(description.get(), what, 0);
    arrays.push_back(std::make_unique<Guarded>(static_cast<int64_t>(api().dnnl_memory_desc_get_size(layout)), at_end));
    memories.push_back(make<Memory>(api().dnnl_memory_create, layout, engine(), arrays.back()->data()));
    arguments.push_back({argument, memories.back().get()});
  }
  JAXGRAD_ONEDNN(api().dnnl_primitive_execute(primitive.get(), stream.get(), static_cast<int>(arguments.size()),
                                              arguments.data()));
  JAXGRAD_ONEDNN(api().dnnl_stream_wait(stream.get()));
  for (const auto& array : arrays)
    if (!array->is_intact_beside()) throw std::runtime_error(std::string(name) + ": writes beside an array");
  return name;
}

// Reads the arguments of a call: numbers, and lists of numbers after their length.
class Reader {
 public:
  explicit Reader(const int64_t* from) : from_(from) {}
  int64_t number() { return *from_++; }
  std::vector<int64_t> list() {
    const int64_t count = number();
    std::vector<int64_t> found(from_, from_ + count);
    from_ += count;
    return found;
  }

 private:
  const int64_t* from_;
};

ConvKey read_key(Reader reader) {
  const auto pass = static_cast<ConvPass>(reader.number());
  ConvKey key{};
  const auto type = static_cast<ConvType>(reader.number());
  const bool has_bias = reader.number() != 0;
  const bool whole_team = reader.number() != 0;
  const bool one_of_several = reader.number() != 0;
  ConvArguments arguments;
  for (auto* list : {&arguments.x, &arguments.w, &arguments.y, &arguments.lhs_spec, &arguments.rhs_spec,
                     &arguments.out_spec, &arguments.window_strides, &arguments.padding, &arguments.rhs_dilation})
    *list = reader.list();
  arguments.feature_group_count = reader.number();
  std::string error;
  static_cast<ConvProblem&>(key) = make_conv_problem(pass, arguments, error);
  if (!error.empty()) throw std::runtime_error(error);
  key.type = type;
  key.has_bias = has_bias;
  key.threads = whole_team ? onednn::team_size() : 1;
  key.one_of_several = one_of_several;
  return key;
}

}  // namespace
}  // namespace jaxgrad

extern "C" {

enum { kRight = 0, kNoKernel = 1, kWrong = 2 };

// Runs a pass, and writes the name of its kernel, or what is wrong, into `text`. Without a call, runs a kernel that is
// known to be faulty.
__attribute__((visibility("default"))) int guarded_conv(const char* library, const int64_t* call, int at_end,
                                                        char* text, int capacity) {
  using namespace jaxgrad;
  try {
    onednn::load(library);
    if (call == nullptr) {
      std::snprintf(text, static_cast<size_t>(capacity), "%s", run_faulty_kernel(at_end != 0).c_str());
      return kRight;
    }
    const ConvKey key = read_key(Reader(call));
    const auto plan = conv_plan(key);
    const std::string wrong = run(*plan, key, at_end != 0);
    std::snprintf(text, static_cast<size_t>(capacity), "%s%s%s", plan->implementation().c_str(),
                  wrong.empty() ? "" : ": ", wrong.c_str());
    return wrong.empty() ? kRight : kWrong;
  } catch (const onednn::Error& error) {
    std::snprintf(text, static_cast<size_t>(capacity), "%s", error.what());
    return error.status == dnnl_unimplemented ? kNoKernel : kWrong;
  } catch (const std::exception& error) {
    std::snprintf(text, static_cast<size_t>(capacity), "%s", error.what());
    return kWrong;
  }
}
}
