#include "cpu/conv/onednn_plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/conv/kernel_faults.h"
#include "cpu/runtime/onednn.h"
#include "cpu/runtime/onednn_threads.h"

namespace jaxgrad {
namespace {

using namespace onednn;

constexpr int64_t kAlignment = 64;

// oneDNN computes with sizes, strides, dilations and padding, and with sums of them, as int.
bool fits_int(const ConvKey& key) {
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  const auto all_fit = [](const auto& values) {
    return std::all_of(values.begin(), values.end(), [](int64_t value) { return value <= kMax; });
  };
  if (!all_fit(key.x.sizes) || !all_fit(key.w.sizes) || !all_fit(key.y.sizes) || !all_fit(key.rhs_dilation))
    return false;
  for (int i = 0; i < key.spatial; ++i) {
    const int64_t padded = key.x.sizes[i + 2] + key.padding_low[i] + key.padding_high[i];
    if (padded > kMax || key.window_strides[i] > kMax - padded) return false;
  }
  return true;
}

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

dnnl_data_type_t data_type(ConvType type) { return type == ConvType::kBFloat16 ? dnnl_bf16 : dnnl_f32; }

MemoryDesc with_strides(int axes, const dnnl_dims_t sizes, ConvType type, const dnnl_dims_t strides) {
  dnnl_memory_desc_t created = nullptr;
  JAXGRAD_ONEDNN(api().dnnl_memory_desc_create_with_strides(&created, axes, sizes, data_type(type), strides));
  return MemoryDesc(created);
}

MemoryDesc of_any_layout(int axes, const dnnl_dims_t sizes, ConvType type) {
  dnnl_memory_desc_t created = nullptr;
  JAXGRAD_ONEDNN(api().dnnl_memory_desc_create_with_tag(&created, axes, sizes, data_type(type), dnnl_format_tag_any));
  return MemoryDesc(created);
}

// The memory descriptor of activations in a layout.
MemoryDesc describe(const ConvOperand& operand, int axes, ConvType type, ConvLayout layout) {
  if (layout == ConvLayout::kAny) return of_any_layout(axes, operand.sizes.data(), type);
  const ConvAxes strides = layout == ConvLayout::kCaller
                               ? operand.strides
                               : dense_strides(operand, axes - 2, layout == ConvLayout::kChannelsLast);
  return with_strides(axes, operand.sizes.data(), type, strides.data());
}

// The memory descriptor of the weights, with the groups as an additional first axis if there are several. With `any`,
// oneDNN chooses the layout; weights are small, so a reorder is cheap.
MemoryDesc describe_weights(const ConvKey& key, bool any) {
  const int axes = key.spatial + 2 + (key.groups > 1);
  dnnl_dims_t sizes, strides;
  int to = 0;
  if (key.groups > 1) {
    sizes[to] = key.groups;
    strides[to++] = key.w.strides[0] * (key.w.sizes[0] / key.groups);
  }
  for (int axis = 0; axis < key.spatial + 2; ++axis, ++to) {
    sizes[to] = axis == 0 ? key.w.sizes[0] / key.groups : key.w.sizes[axis];
    strides[to] = key.w.strides[axis];
  }
  return any ? of_any_layout(axes, sizes, key.type) : with_strides(axes, sizes, key.type, strides);
}

MemoryDesc describe_bias(const ConvKey& key) {
  dnnl_memory_desc_t created = nullptr;
  const dnnl_dims_t sizes = {key.w.sizes[0]};
  JAXGRAD_ONEDNN(api().dnnl_memory_desc_create_with_tag(&created, 1, sizes, data_type(key.type), dnnl_a));
  return MemoryDesc(created);
}

Attributes scratchpad_from_caller() {
  dnnl_primitive_attr_t created = nullptr;
  JAXGRAD_ONEDNN(api().dnnl_primitive_attr_create(&created));
  Attributes attributes(created);
  JAXGRAD_ONEDNN(api().dnnl_primitive_attr_set_scratchpad_mode(created, dnnl_scratchpad_mode_user));
  return attributes;
}

MemoryDesc query(const PrimitiveDesc& primitive, dnnl_query_t what, int index = 0) {
  const_dnnl_memory_desc_t found = api().dnnl_primitive_desc_query_md(primitive.get(), what, index);
  dnnl_memory_desc_t clone = nullptr;
  JAXGRAD_ONEDNN(api().dnnl_memory_desc_clone(&clone, found));
  return MemoryDesc(clone);
}

std::string implementation_of(const PrimitiveDesc& description) {
  const char* name = nullptr;
  JAXGRAD_ONEDNN(api().dnnl_primitive_desc_query(description.get(), dnnl_query_impl_info_str, 0, &name));
  return name;
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// Moves on in oneDNN's list of kernels to the first one that is accepted. Returns whether there is one.
template <class Accepts>
bool advance(PrimitiveDesc& description, Accepts accepts) {
  while (!accepts(implementation_of(description)))
    if (api().dnnl_primitive_desc_next_impl(description.get()) != dnnl_success) return false;
  return true;
}

// Returns the first kernel in oneDNN's list that has no known fault.
//
// oneDNN 3.7 to 3.12 prefer a convolution between two transpositions for float32 input gradients of few features. It
// takes up to eight times as long as the next optimized kernel in the list, which is returned instead.
template <class Create>
PrimitiveDesc select_kernel(const ConvKey& key, Create create) {
  const auto is_safe = [&](const std::string& name) { return !has_known_fault(key, name); };
  const auto transposes = [](const std::string& name) { return starts_with(name, "jit_uni_ncsp"); };
  PrimitiveDesc preferred = create();
  if (!advance(preferred, is_safe)) throw Error(dnnl_unimplemented, "advance(preferred, is_safe)", __FILE__, __LINE__);
  if (!transposes(implementation_of(preferred))) return preferred;
  PrimitiveDesc next = create();
  const bool found = advance(
      next, [&](const std::string& name) { return is_safe(name) && !transposes(name) && !starts_with(name, "ref"); });
  return found ? std::move(next) : std::move(preferred);
}

Primitive create(const PrimitiveDesc& description) {
  dnnl_primitive_t created = nullptr;
  JAXGRAD_ONEDNN(api().dnnl_primitive_create(&created, description.get()));
  return Primitive(created);
}

Memory memory(const MemoryDesc& description, const void* data) {
  dnnl_memory_t created = nullptr;
  JAXGRAD_ONEDNN(api().dnnl_memory_create(&created, description.get(), engine(), const_cast<void*>(data)));
  return Memory(created);
}

int64_t bytes_of(const MemoryDesc& description) {
  return static_cast<int64_t>(api().dnnl_memory_desc_get_size(description.get()));
}

dnnl_stream_t stream() {
  thread_local const Stream own = [] {
    dnnl_stream_t created = nullptr;
    JAXGRAD_ONEDNN(api().dnnl_stream_create(&created, engine(), dnnl_stream_default_flags));
    return Stream(created);
  }();
  return own.get();
}

void execute(const Primitive& primitive, const std::vector<std::pair<int, dnnl_memory_t>>& arguments) {
  std::vector<dnnl_exec_arg_t> list;
  list.reserve(arguments.size());
  for (const auto& [index, argument] : arguments) list.push_back({index, argument});
  JAXGRAD_ONEDNN(api().dnnl_primitive_execute(primitive.get(), stream(), static_cast<int>(list.size()), list.data()));
}

// An operand of a plan, in the layouts of the caller and of the primitive.
struct Operand {
  int argument = 0;
  MemoryDesc caller, primitive;
  Primitive reorder;   // null if both layouts are the same: the primitive then uses the buffer of the caller
  int64_t offset = 0;  // of the reordered copy in the workspace
};

// The same convolution without strides along spatial axes on which y has one element, where they have no effect, and
// without the elements of x behind the window. oneDNN 3.7 to 3.12 compute the forward pass of one input feature with
// such strides from memory that is not x.
ConvKey without_idle_strides(ConvKey key) {
  if (key.pass != ConvPass::kForward) return key;
  for (int i = 0; i < key.spatial; ++i) {
    const int64_t reach = (key.w.sizes[i + 2] - 1) * key.rhs_dilation[i] + 1 - key.padding_low[i];
    if (key.y.sizes[i + 2] != 1 || key.window_strides[i] == 1 || reach <= 0) continue;
    key.window_strides[i] = 1;
    key.x.sizes[i + 2] = std::min(key.x.sizes[i + 2], reach);
    key.padding_high[i] = reach - key.x.sizes[i + 2];
  }
  return key;
}

class OneDnnPlan final : public ConvPlan {
 public:
  OneDnnPlan(const ConvKey& caller_key, ConvLayout layout) : threads_(caller_key.threads) {
    const ConvKey key = without_idle_strides(caller_key);
    if (!(key.x == caller_key.x)) layout = ConvLayout::kAny;  // a part of x is not dense, as the kernels need it
    if (!fits_int(key)) throw Error(dnnl_unimplemented, "fits_int(key)", __FILE__, __LINE__);
    const ThreadCount thread_count(threads_);
    const int axes = key.spatial + 2;
    const MemoryDesc bias = key.has_bias ? describe_bias(key) : nullptr;
    description_ = describe_primitive(key, describe(key.x, axes, key.type, layout), describe_weights(key, true),
                                      describe(key.y, axes, key.type, layout), bias);

    MemoryDesc caller_x = describe(key.x, axes, key.type, ConvLayout::kCaller);
    MemoryDesc caller_w = describe_weights(key, false);
    MemoryDesc caller_y = describe(key.y, axes, key.type, ConvLayout::kCaller);
    switch (key.pass) {
      case ConvPass::kForward:
        first_ = make_input(DNNL_ARG_SRC, std::move(caller_x), dnnl_query_src_md);
        second_ = make_input(DNNL_ARG_WEIGHTS, std::move(caller_w), dnnl_query_weights_md);
        result_ = make_output(DNNL_ARG_DST, std::move(caller_y), dnnl_query_dst_md);
        break;
      case ConvPass::kInputGradient:
        first_ = make_input(DNNL_ARG_DIFF_DST, std::move(caller_y), dnnl_query_diff_dst_md);
        second_ = make_input(DNNL_ARG_WEIGHTS, std::move(caller_w), dnnl_query_weights_md);
        result_ = make_output(DNNL_ARG_DIFF_SRC, std::move(caller_x), dnnl_query_diff_src_md);
        break;
      case ConvPass::kWeightGradient:
        first_ = make_input(DNNL_ARG_SRC, std::move(caller_x), dnnl_query_src_md);
        second_ = make_input(DNNL_ARG_DIFF_DST, std::move(caller_y), dnnl_query_diff_dst_md);
        result_ = make_output(DNNL_ARG_DIFF_WEIGHTS, std::move(caller_w), dnnl_query_diff_weights_md);
    }
    if (key.has_bias) {
      const bool is_weight_gradient = key.pass == ConvPass::kWeightGradient;
      bias_ = query(description_, is_weight_gradient ? dnnl_query_diff_weights_md : dnnl_query_weights_md, 1);
      bias_argument_ = is_weight_gradient ? DNNL_ARG_DIFF_BIAS : DNNL_ARG_BIAS;
    }
    scratchpad_ = query(description_, dnnl_query_scratchpad_md);
    scratchpad_offset_ = allocate(bytes_of(scratchpad_));
    primitive_ = create(description_);
  }

  int64_t workspace_bytes() const override { return workspace_ + kAlignment; }

  std::string implementation() const override { return implementation_of(description_); }

  void run(const void* first, const void* second, void* bias, void* result, std::byte* workspace) const override {
    if (threads_ == 1) {
      const ThreadCount thread_count(1);
      run_on_current_thread(first, second, bias, result, workspace);
    } else {
      run_with_team([&] { run_on_current_thread(first, second, bias, result, workspace); });
    }
  }

 private:
  void run_on_current_thread(const void* first, const void* second, void* bias, void* result,
                             std::byte* workspace) const {
    workspace += (kAlignment - reinterpret_cast<uintptr_t>(workspace) % kAlignment) % kAlignment;
    const Memory first_memory = reorder_input(first_, first, workspace);
    const Memory second_memory = reorder_input(second_, second, workspace);
    void* const target = result_.reorder ? workspace + result_.offset : result;
    const Memory result_memory = memory(result_.primitive, target);
    const Memory scratchpad = memory(scratchpad_, workspace + scratchpad_offset_);
    const Memory bias_memory = bias_ ? memory(bias_, bias) : nullptr;
    std::vector<std::pair<int, dnnl_memory_t>> arguments = {{first_.argument, first_memory.get()},
                                                            {second_.argument, second_memory.get()},
                                                            {result_.argument, result_memory.get()},
                                                            {DNNL_ARG_SCRATCHPAD, scratchpad.get()}};
    if (bias_) arguments.emplace_back(bias_argument_, bias_memory.get());
    execute(primitive_, arguments);
    if (result_.reorder) {
      const Memory out = memory(result_.caller, result);
      execute(result_.reorder, {{DNNL_ARG_FROM, result_memory.get()}, {DNNL_ARG_TO, out.get()}});
    }
    JAXGRAD_ONEDNN(api().dnnl_stream_wait(stream()));
  }

  static PrimitiveDesc describe_primitive(const ConvKey& key, const MemoryDesc& x, const MemoryDesc& w,
                                          const MemoryDesc& y, const MemoryDesc& bias) {
    dnnl_dims_t strides, dilates, low, high;
    for (int i = 0; i < key.spatial; ++i) {
      strides[i] = key.window_strides[i];
      dilates[i] = key.rhs_dilation[i] - 1;  // oneDNN counts the elements between two taps
      low[i] = key.padding_low[i];
      high[i] = key.padding_high[i];
    }
    const Attributes attributes = scratchpad_from_caller();
    // The gradient passes take the forward primitive as a hint, which must outlive the search for a kernel.
    const PrimitiveDesc hint =
        key.pass == ConvPass::kForward ? nullptr : forward_hint(key, strides, dilates, low, high);
    return select_kernel(key, [&] {
      dnnl_primitive_desc_t created = nullptr;
      switch (key.pass) {
        case ConvPass::kForward:
          JAXGRAD_ONEDNN(api().dnnl_convolution_forward_primitive_desc_create(
              &created, engine(), dnnl_forward_training, dnnl_convolution_direct, x.get(), w.get(), bias.get(), y.get(),
              strides, dilates, low, high, attributes.get()));
          break;
        case ConvPass::kInputGradient:
          JAXGRAD_ONEDNN(api().dnnl_convolution_backward_data_primitive_desc_create(
              &created, engine(), dnnl_convolution_direct, x.get(), w.get(), y.get(), strides, dilates, low, high,
              hint.get(), attributes.get()));
          break;
        case ConvPass::kWeightGradient:
          JAXGRAD_ONEDNN(api().dnnl_convolution_backward_weights_primitive_desc_create(
              &created, engine(), dnnl_convolution_direct, x.get(), w.get(), bias.get(), y.get(), strides, dilates, low,
              high, hint.get(), attributes.get()));
      }
      return PrimitiveDesc(created);
    });
  }

  static PrimitiveDesc forward_hint(const ConvKey& key, const dnnl_dims_t strides, const dnnl_dims_t dilates,
                                    const dnnl_dims_t low, const dnnl_dims_t high) {
    const int axes = key.spatial + 2;
    const MemoryDesc x = describe(key.x, axes, key.type, ConvLayout::kAny), w = describe_weights(key, true),
                     y = describe(key.y, axes, key.type, ConvLayout::kAny);
    dnnl_primitive_desc_t created = nullptr;
    JAXGRAD_ONEDNN(api().dnnl_convolution_forward_primitive_desc_create(
        &created, engine(), dnnl_forward_training, dnnl_convolution_direct, x.get(), w.get(), nullptr, y.get(), strides,
        dilates, low, high, nullptr));
    return PrimitiveDesc(created);
  }

  int64_t allocate(int64_t bytes) {
    const int64_t at = workspace_;
    workspace_ += aligned(bytes);
    return at;
  }

  Operand make_operand(int argument, MemoryDesc caller, dnnl_query_t what) {
    Operand operand{argument, std::move(caller), query(description_, what), nullptr, 0};
    if (api().dnnl_memory_desc_equal(operand.caller.get(), operand.primitive.get()) == 0)
      operand.offset = allocate(bytes_of(operand.primitive));
    return operand;
  }

  static Primitive reorder(const MemoryDesc& from, const MemoryDesc& to) {
    if (api().dnnl_memory_desc_equal(from.get(), to.get()) != 0) return nullptr;
    dnnl_primitive_desc_t created = nullptr;
    JAXGRAD_ONEDNN(
        api().dnnl_reorder_primitive_desc_create(&created, from.get(), engine(), to.get(), engine(), nullptr));
    return create(PrimitiveDesc(created));
  }

  Operand make_input(int argument, MemoryDesc caller, dnnl_query_t what) {
    Operand operand = make_operand(argument, std::move(caller), what);
    operand.reorder = reorder(operand.caller, operand.primitive);
    return operand;
  }

  Operand make_output(int argument, MemoryDesc caller, dnnl_query_t what) {
    Operand operand = make_operand(argument, std::move(caller), what);
    operand.reorder = reorder(operand.primitive, operand.caller);
    return operand;
  }

  static Memory reorder_input(const Operand& operand, const void* data, std::byte* workspace) {
    if (!operand.reorder) return memory(operand.primitive, data);
    const Memory source = memory(operand.caller, data);
    Memory reordered = memory(operand.primitive, workspace + operand.offset);
    execute(operand.reorder, {{DNNL_ARG_FROM, source.get()}, {DNNL_ARG_TO, reordered.get()}});
    return reordered;
  }

  const int threads_;
  PrimitiveDesc description_;
  Primitive primitive_;
  Operand first_, second_, result_;
  MemoryDesc bias_, scratchpad_;
  int bias_argument_ = 0;
  int64_t scratchpad_offset_ = 0, workspace_ = 0;
};

}  // namespace

std::shared_ptr<const ConvPlan> make_onednn_plan(const ConvKey& key, ConvLayout layout) {
  return std::make_shared<OneDnnPlan>(key, layout);
}

}  // namespace jaxgrad
