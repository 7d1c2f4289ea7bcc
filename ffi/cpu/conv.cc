#include "conv.h"

#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "onednn.h"

namespace jaxgrad {
namespace {

using namespace onednn;

constexpr int64_t kAlignment = 64;
constexpr size_t kCapacity = 512;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

dnnl_data_type_t data_type(ConvType type) { return type == ConvType::kBFloat16 ? dnnl_bf16 : dnnl_f32; }

// oneDNN's view of an operand: its own sizes and strides, or (`any`) the layout left to the primitive.
MemoryDesc describe(const ConvOperand& operand, int axes, ConvType type, bool any) {
  dnnl_memory_desc_t created = nullptr;
  if (any) {
    JAXGRAD_ONEDNN(api().dnnl_memory_desc_create_with_tag(&created, axes, operand.sizes.data(), data_type(type),
                                                          dnnl_format_tag_any));
  } else {
    JAXGRAD_ONEDNN(api().dnnl_memory_desc_create_with_strides(&created, axes, operand.sizes.data(), data_type(type),
                                                              operand.strides.data()));
  }
  return MemoryDesc(created);
}

// A filter, with the groups as an axis of their own where there are several.
MemoryDesc describe_filter(const ConvKey& key, ConvType type, bool any) {
  if (key.groups == 1) return describe(key.w, key.spatial + 2, type, any);
  dnnl_dims_t sizes, strides;
  sizes[0] = key.groups;
  sizes[1] = key.w.sizes[0] / key.groups;
  strides[0] = key.w.strides[0] * sizes[1];
  strides[1] = key.w.strides[0];
  for (int axis = 1; axis < key.spatial + 2; ++axis) {
    sizes[axis + 1] = key.w.sizes[axis];
    strides[axis + 1] = key.w.strides[axis];
  }
  dnnl_memory_desc_t created = nullptr;
  if (any) {
    JAXGRAD_ONEDNN(
        api().dnnl_memory_desc_create_with_tag(&created, key.spatial + 3, sizes, data_type(type), dnnl_format_tag_any));
  } else {
    JAXGRAD_ONEDNN(
        api().dnnl_memory_desc_create_with_strides(&created, key.spatial + 3, sizes, data_type(type), strides));
  }
  return MemoryDesc(created);
}

MemoryDesc describe_bias(const ConvKey& key, ConvType type) {
  dnnl_memory_desc_t created = nullptr;
  const dnnl_dims_t sizes = {key.w.sizes[0]};
  JAXGRAD_ONEDNN(api().dnnl_memory_desc_create_with_tag(&created, 1, sizes, data_type(type), dnnl_a));
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

// One operand of a plan: in the caller's layout, and in the primitive's with a reorder where the two differ.
struct Operand {
  int argument = 0;
  MemoryDesc outside, inside;
  Primitive reorder;   // null: the primitive reads or writes the caller's buffer
  int64_t offset = 0;  // of the reordered copy in the workspace
};

class OneDnnPlan final : public ConvPlan {
 public:
  OneDnnPlan(const ConvKey& key, bool own_layout) {
    const int axes = key.spatial + 2;
    const ConvType result = key.result_type, operand = key.type;
    const bool filter = key.kind == ConvKind::kBackwardFilter, input = key.kind == ConvKind::kBackwardInput;
    const MemoryDesc x = describe(key.x, axes, input ? result : operand, own_layout);
    const MemoryDesc w = describe_filter(key, filter ? result : operand, true);
    const MemoryDesc y = describe(key.y, axes, key.kind == ConvKind::kForward ? result : operand, own_layout);
    const MemoryDesc bias =
        key.has_bias ? describe_bias(key, filter || key.kind == ConvKind::kForward ? result : operand) : nullptr;
    create_primitive(key, x, w, y, bias);

    MemoryDesc outside_x = describe(key.x, axes, input ? result : operand, false);
    MemoryDesc outside_w = describe_filter(key, filter ? result : operand, false);
    MemoryDesc outside_y = describe(key.y, axes, key.kind == ConvKind::kForward ? result : operand, false);
    switch (key.kind) {
      case ConvKind::kForward:
        first_ = read(DNNL_ARG_SRC, std::move(outside_x), dnnl_query_src_md);
        second_ = read(DNNL_ARG_WEIGHTS, std::move(outside_w), dnnl_query_weights_md);
        result_ = write(DNNL_ARG_DST, std::move(outside_y), dnnl_query_dst_md);
        break;
      case ConvKind::kBackwardInput:
        first_ = read(DNNL_ARG_DIFF_DST, std::move(outside_y), dnnl_query_diff_dst_md);
        second_ = read(DNNL_ARG_WEIGHTS, std::move(outside_w), dnnl_query_weights_md);
        result_ = write(DNNL_ARG_DIFF_SRC, std::move(outside_x), dnnl_query_diff_src_md);
        break;
      case ConvKind::kBackwardFilter:
        first_ = read(DNNL_ARG_SRC, std::move(outside_x), dnnl_query_src_md);
        second_ = read(DNNL_ARG_DIFF_DST, std::move(outside_y), dnnl_query_diff_dst_md);
        result_ = write(DNNL_ARG_DIFF_WEIGHTS, std::move(outside_w), dnnl_query_diff_weights_md);
    }
    if (key.has_bias) {
      bias_ = query(description_, filter ? dnnl_query_diff_weights_md : dnnl_query_weights_md, 1);
      bias_argument_ = filter ? DNNL_ARG_DIFF_BIAS : DNNL_ARG_BIAS;
    }
    scratchpad_ = query(description_, dnnl_query_scratchpad_md);
    scratchpad_offset_ = take(bytes_of(scratchpad_));
    primitive_ = create(description_);
  }

  int64_t workspace_bytes() const override { return workspace_ + kAlignment; }

  int64_t reorders() const {
    return (first_.reorder != nullptr) + (second_.reorder != nullptr) + (result_.reorder != nullptr);
  }

  std::string implementation() const override {
    const char* name = nullptr;
    JAXGRAD_ONEDNN(api().dnnl_primitive_desc_query(description_.get(), dnnl_query_impl_info_str, 0, &name));
    return name;
  }

  void run(const void* first, const void* second, void* bias, void* result, std::byte* workspace) const override {
    workspace += (kAlignment - reinterpret_cast<uintptr_t>(workspace) % kAlignment) % kAlignment;
    const Memory first_memory = bring_in(first_, first, workspace);
    const Memory second_memory = bring_in(second_, second, workspace);
    void* target = result_.reorder ? workspace + result_.offset : result;
    const Memory result_memory = memory(result_.inside, target);
    const Memory scratchpad = memory(scratchpad_, workspace + scratchpad_offset_);
    const Memory bias_memory = bias_ ? memory(bias_, bias) : nullptr;
    std::vector<std::pair<int, dnnl_memory_t>> arguments = {{first_.argument, first_memory.get()},
                                                            {second_.argument, second_memory.get()},
                                                            {result_.argument, result_memory.get()},
                                                            {DNNL_ARG_SCRATCHPAD, scratchpad.get()}};
    if (bias_) arguments.emplace_back(bias_argument_, bias_memory.get());
    execute(primitive_, arguments);
    if (result_.reorder) {
      const Memory out = memory(result_.outside, result);
      execute(result_.reorder, {{DNNL_ARG_FROM, result_memory.get()}, {DNNL_ARG_TO, out.get()}});
    }
    JAXGRAD_ONEDNN(api().dnnl_stream_wait(stream()));
  }

 private:
  void create_primitive(const ConvKey& key, const MemoryDesc& x, const MemoryDesc& w, const MemoryDesc& y,
                        const MemoryDesc& bias) {
    dnnl_dims_t strides, dilates, low, high;
    for (int i = 0; i < key.spatial; ++i) {
      strides[i] = key.window_strides[i];
      dilates[i] = key.rhs_dilation[i] - 1;  // oneDNN counts the gaps
      low[i] = key.padding_low[i];
      high[i] = key.padding_high[i];
    }
    const Attributes attributes = scratchpad_from_caller();
    dnnl_primitive_desc_t created = nullptr;
    // The backward passes are described next to the forward one that they belong to; a hint is not needed for the
    // kernels that read any layout, and is made where it is.
    switch (key.kind) {
      case ConvKind::kForward:
        JAXGRAD_ONEDNN(api().dnnl_convolution_forward_primitive_desc_create(
            &created, engine(), dnnl_forward_training, dnnl_convolution_direct, x.get(), w.get(), bias.get(), y.get(),
            strides, dilates, low, high, attributes.get()));
        break;
      case ConvKind::kBackwardInput: {
        const PrimitiveDesc hint = forward_hint(key, strides, dilates, low, high);
        JAXGRAD_ONEDNN(api().dnnl_convolution_backward_data_primitive_desc_create(
            &created, engine(), dnnl_convolution_direct, x.get(), w.get(), y.get(), strides, dilates, low, high,
            hint.get(), attributes.get()));
        break;
      }
      case ConvKind::kBackwardFilter: {
        const PrimitiveDesc hint = forward_hint(key, strides, dilates, low, high);
        JAXGRAD_ONEDNN(api().dnnl_convolution_backward_weights_primitive_desc_create(
            &created, engine(), dnnl_convolution_direct, x.get(), w.get(), bias.get(), y.get(), strides, dilates, low,
            high, hint.get(), attributes.get()));
      }
    }
    description_.reset(created);
  }

  static PrimitiveDesc forward_hint(const ConvKey& key, const dnnl_dims_t strides, const dnnl_dims_t dilates,
                                    const dnnl_dims_t low, const dnnl_dims_t high) {
    const int axes = key.spatial + 2;
    const MemoryDesc x = describe(key.x, axes, key.type, true), w = describe_filter(key, key.type, true),
                     y = describe(key.y, axes, key.type, true);
    dnnl_primitive_desc_t created = nullptr;
    JAXGRAD_ONEDNN(api().dnnl_convolution_forward_primitive_desc_create(
        &created, engine(), dnnl_forward_training, dnnl_convolution_direct, x.get(), w.get(), nullptr, y.get(), strides,
        dilates, low, high, nullptr));
    return PrimitiveDesc(created);
  }

  int64_t take(int64_t bytes) {
    const int64_t at = workspace_;
    workspace_ += aligned(bytes);
    return at;
  }

  Operand place(int argument, MemoryDesc outside, dnnl_query_t what) {
    Operand operand{argument, std::move(outside), query(description_, what), nullptr, 0};
    if (api().dnnl_memory_desc_equal(operand.outside.get(), operand.inside.get()) == 0)
      operand.offset = take(bytes_of(operand.inside));
    return operand;
  }

  static Primitive reorder(const MemoryDesc& from, const MemoryDesc& to) {
    if (api().dnnl_memory_desc_equal(from.get(), to.get()) != 0) return nullptr;
    dnnl_primitive_desc_t created = nullptr;
    JAXGRAD_ONEDNN(
        api().dnnl_reorder_primitive_desc_create(&created, from.get(), engine(), to.get(), engine(), nullptr));
    return create(PrimitiveDesc(created));
  }

  Operand read(int argument, MemoryDesc outside, dnnl_query_t what) {
    Operand operand = place(argument, std::move(outside), what);
    operand.reorder = reorder(operand.outside, operand.inside);
    return operand;
  }

  Operand write(int argument, MemoryDesc outside, dnnl_query_t what) {
    Operand operand = place(argument, std::move(outside), what);
    operand.reorder = reorder(operand.inside, operand.outside);
    return operand;
  }

  static Memory bring_in(const Operand& operand, const void* data, std::byte* workspace) {
    if (!operand.reorder) return memory(operand.inside, data);
    const Memory outside = memory(operand.outside, data);
    Memory inside = memory(operand.inside, workspace + operand.offset);
    execute(operand.reorder, {{DNNL_ARG_FROM, outside.get()}, {DNNL_ARG_TO, inside.get()}});
    return inside;
  }

  PrimitiveDesc description_;
  Primitive primitive_;
  Operand first_, second_, result_;
  MemoryDesc bias_, scratchpad_;
  int bias_argument_ = 0;
  int64_t scratchpad_offset_ = 0, workspace_ = 0;
};

// A bounded cache, the plan unused for longest leaving first.
class PlanCache {
 public:
  std::shared_ptr<const ConvPlan> get(const ConvKey& key) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (auto found = index_.find(key); found != index_.end()) {
        ++hits_;
        order_.splice(order_.begin(), order_, found->second);
        return found->second->second;
      }
      ++misses_;
    }
    // Built outside the lock: another thread may build the same plan, and then one of the two is dropped.
    auto plan = build_plan(key);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(key); found != index_.end()) return found->second->second;
    order_.emplace_front(key, plan);
    index_.emplace(key, order_.begin());
    if (order_.size() > kCapacity) {
      index_.erase(order_.back().first);
      order_.pop_back();
    }
    return plan;
  }

  ConvPlanCacheInfo info() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {hits_, misses_, static_cast<int64_t>(order_.size()), static_cast<int64_t>(kCapacity)};
  }

 private:
  static std::shared_ptr<const ConvPlan> build_plan(const ConvKey& key);

  using Entry = std::pair<ConvKey, std::shared_ptr<const ConvPlan>>;
  std::mutex mutex_;
  std::list<Entry> order_;
  std::unordered_map<ConvKey, std::list<Entry>::iterator, ConvKeyHash> index_;
  int64_t hits_ = 0, misses_ = 0;
};

bool channels_last(const ConvOperand& operand) { return operand.strides[1] == 1; }

// Channels-last activations are read as they lie; others in the layout that the kernel likes best, reordered.
std::shared_ptr<const ConvPlan> PlanCache::build_plan(const ConvKey& key) {
  const bool as_they_lie = channels_last(key.x) && channels_last(key.y);
  return std::make_shared<OneDnnPlan>(key, !as_they_lie);
}

PlanCache& cache() {
  static PlanCache plans;
  return plans;
}

}  // namespace

bool ConvKey::operator==(const ConvKey& o) const {
  return kind == o.kind && type == o.type && result_type == o.result_type && has_bias == o.has_bias &&
         spatial == o.spatial && groups == o.groups && x == o.x && w == o.w && y == o.y &&
         window_strides == o.window_strides && rhs_dilation == o.rhs_dilation && padding_low == o.padding_low &&
         padding_high == o.padding_high && threads == o.threads;
}

size_t ConvKeyHash::operator()(const ConvKey& key) const {
  size_t hash = 0;
  auto mix = [&](int64_t value) { hash = (hash ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u + (hash >> 29); };
  auto mix_all = [&](const auto& values) {
    for (int64_t value : values) mix(value);
  };
  mix(static_cast<int64_t>(key.kind));
  mix(static_cast<int64_t>(key.type));
  mix(static_cast<int64_t>(key.result_type));
  mix(key.has_bias);
  mix(key.spatial);
  mix(key.groups);
  for (const ConvOperand* operand : {&key.x, &key.w, &key.y}) {
    mix_all(operand->sizes);
    mix_all(operand->strides);
  }
  mix_all(key.window_strides);
  mix_all(key.rhs_dilation);
  mix_all(key.padding_low);
  mix_all(key.padding_high);
  mix(key.threads);
  return hash;
}

std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key) { return cache().get(key); }

ConvPlanCacheInfo conv_plan_cache_info() { return cache().info(); }

}  // namespace jaxgrad
