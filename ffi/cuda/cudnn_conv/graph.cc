#include "cuda/cudnn_conv/graph.h"

#include <algorithm>
#include <utility>

namespace jaxgrad {
namespace {

using cudnn::api;
using cudnn::data_type;
using cudnn::Descriptor;

constexpr int64_t kAlignment = 16;  // bytes; the buffers of XLA have a larger alignment
constexpr int64_t kMaxNotes = CUDNN_NUMERICAL_NOTE_TYPE_COUNT;
constexpr int64_t kFirstVirtualId = 16;  // of intermediate results, which are never in memory

// Values of all axes, with `before` values ahead of the spatial ones. Convolutions of cuDNN have two or three spatial
// axes; a single axis becomes the second one, after an axis of size 1.
template <class Values>
std::vector<int64_t> with_unit_axis(const ConvKey& key, const Values& values, size_t before, int64_t unit) {
  std::vector<int64_t> all(values.begin(), values.begin() + static_cast<int64_t>(before) + key.spatial);
  if (key.spatial == 1) all.insert(all.begin() + static_cast<int64_t>(before), unit);
  return all;
}

cudnnDataType_t compute_type(const ConvKey& key) {
  return key.type == FloatType::kFloat64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
}

Descriptor tensor(const ConvKey& key, const ConvOperand& operand, int64_t id, bool is_virtual = false) {
  const std::vector<int64_t> sizes = with_unit_axis(key, operand.sizes, 2, 1);
  const std::vector<int64_t> strides = with_unit_axis(key, operand.strides, 2, operand.sizes[2] * operand.strides[2]);
  Descriptor made(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  made.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id)
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, is_virtual ? compute_type(key) : data_type(key.type))
      .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual)
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, sizes.data(), static_cast<int64_t>(sizes.size()))
      .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), static_cast<int64_t>(strides.size()))
      .finalize();
  return made;
}

Descriptor convolution(const ConvKey& key) {
  const auto low = with_unit_axis(key, key.padding_low, 0, 0), high = with_unit_axis(key, key.padding_high, 0, 0);
  const auto strides = with_unit_axis(key, key.window_strides, 0, 1);
  const auto dilation = with_unit_axis(key, key.rhs_dilation, 0, 1);
  const auto n = static_cast<int64_t>(low.size());
  Descriptor made(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  made.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, compute_type(key))
      .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION)
      .set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, n)
      .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, low.data(), n)
      .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, high.data(), n)
      .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, strides.data(), n)
      .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, dilation.data(), n)
      .finalize();
  return made;
}

// The operation of a pass and its attributes.
struct OperationNames {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};

OperationNames names_of(ConvPass pass) {
  switch (pass) {
    case ConvPass::kForward:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
    case ConvPass::kInputGradient:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
    default:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
  }
}

Descriptor pointwise(const ConvKey& key, cudnnPointwiseMode_t mode) {
  Descriptor made(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  made.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode)
      .set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute_type(key));
  if (mode == CUDNN_POINTWISE_RELU_FWD)
    made.set(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, CUDNN_PROPAGATE_NAN);
  made.finalize();
  return made;
}

// result = function(value), or function(value, other), element by element.
Descriptor elementwise(const Descriptor& function, const Descriptor& value, const Descriptor* other,
                       const Descriptor& result) {
  Descriptor made(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  made.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, function)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, value)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, result);
  if (other != nullptr) made.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *other);
  made.finalize();
  return made;
}

Descriptor engine_of(const Descriptor& config) {
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t pointer = engine.get();
  int64_t count = 0;
  JAXGRAD_CUDNN(api().cudnnBackendGetAttribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                               1, &count, &pointer));
  return engine;
}

// The last release in which these engines were found to be wrong (9.19, on an H200). In a later one, engine_check.h
// decides whether they are used.
constexpr size_t kLastWrongRelease = 91999;

// The wrong engines that were found before engine_check.h, which finds others. With padding that differs between the
// two sides, they compute as if it were symmetric, or return NaN. Engine 78 is correct on small shapes, but wrong for a
// window of 2 with dilation 512 over 16384 elements, padded by 512 on one side. Engine 39 returns 0 for relu(NaN), even
// if NaN propagation is requested.
bool is_known_wrong(const ConvKey& key, int64_t engine) {
  if (key.relu && engine == 39) return true;
  if (key.padding_low == key.padding_high) return false;
  if (key.pass == ConvPass::kWeightGradient) return engine == 1 || engine == 18 || engine == 20;
  return key.pass == ConvPass::kInputGradient && (engine == 50 || engine == 78);
}

using Notes = std::vector<cudnnBackendNumericalNote_t>;

bool has_note(const Notes& notes, cudnnBackendNumericalNote_t note) {
  return std::find(notes.begin(), notes.end(), note) != notes.end();
}

// Whether an engine with these numerical notes respects the math settings of the key.
bool respects_math_settings(const ConvKey& key, const Notes& notes) {
  const auto has = [&](cudnnBackendNumericalNote_t note) { return has_note(notes, note); };
  if (has(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION)) return false;
  if (key.deterministic && has(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)) return false;
  if (has(CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13)) return false;  // only half of the digits are correct
  const bool exact = key.type == FloatType::kFloat64 || (key.type == FloatType::kFloat32 && !key.allow_tf32);
  if (!exact) return true;
  for (const auto note : {CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS,
                          CUDNN_NUMERICAL_NOTE_FFT, CUDNN_NUMERICAL_NOTE_WINOGRAD})
    // The tensor cores for float64 do not round operands.
    if (has(note) && !(note == CUDNN_NUMERICAL_NOTE_TENSOR_CORE && key.type == FloatType::kFloat64)) return false;
  return true;
}

// The engine configurations that a heuristic of cuDNN lists; empty if the heuristic does not support the operation.
// After another error the list is unknown, and an empty one would change the program.
std::vector<Descriptor> configs(const ConvGraph& graph, cudnnBackendHeurMode_t mode) {
  std::vector<Descriptor> found;
  Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.graph())
      .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  try {
    heuristic.finalize();
  } catch (const cudnn::Error& error) {
    if (cudnn::is_unsupported(error)) return found;
    throw;
  }
  int64_t count = 0;
  JAXGRAD_CUDNN(api().cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                               CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr));
  std::vector<cudnnBackendDescriptor_t> pointers;
  for (int64_t i = 0; i < count; ++i) {
    found.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    pointers.push_back(found.back().get());
  }
  if (count == 0) return found;
  int64_t filled = 0;
  JAXGRAD_CUDNN(api().cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                               CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &filled, pointers.data()));
  found.resize(static_cast<size_t>(std::min(filled, count)));
  return found;
}

}  // namespace

ConvOperand bias_of(const ConvKey& key) {
  const int64_t features = key.w.sizes[0];
  const bool channels_last = key.y.strides[1] == 1;
  ConvOperand bias;
  bias.sizes.fill(1);
  bias.strides.fill(channels_last ? features : 1);
  bias.sizes[1] = bias.strides[0] = features;
  bias.strides[1] = 1;
  return bias;
}

ConvGraph conv_graph(const ConvKey& key, const cudnn::Handle& handle) {
  ConvGraph made;
  auto& descriptors = made.descriptors;
  const Descriptor& x = descriptors.emplace_back(tensor(key, key.x, kXId));
  const Descriptor& w = descriptors.emplace_back(tensor(key, key.w, kWId));
  const Descriptor& y = descriptors.emplace_back(tensor(key, key.y, kYId));
  const Descriptor& conv = descriptors.emplace_back(convolution(key));
  const int last = key.has_bias + key.relu;
  // Operation 0 is the convolution. The last operation writes y, the others write virtual tensors.
  const auto result_of = [&](int operation) -> const Descriptor& {
    return operation == last
               ? y
               : descriptors.emplace_back(tensor(key, key.y, kFirstVirtualId + operation, /*is_virtual=*/true));
  };
  std::vector<cudnnBackendDescriptor_t> operations;
  const Descriptor* value = &result_of(0);
  const OperationNames names = names_of(key.pass);
  Descriptor& operation = descriptors.emplace_back(names.operation);
  operation.set(names.x, x).set(names.w, w).set(names.y, *value).set(names.convolution, conv);
  if (key.type == FloatType::kFloat64) {
    operation.set(names.alpha, CUDNN_TYPE_DOUBLE, 1.0).set(names.beta, CUDNN_TYPE_DOUBLE, 0.0);
  } else {
    operation.set(names.alpha, CUDNN_TYPE_FLOAT, 1.0f).set(names.beta, CUDNN_TYPE_FLOAT, 0.0f);
  }
  operation.finalize();
  operations.push_back(operation.get());
  const auto append = [&](cudnnPointwiseMode_t mode, const Descriptor* other) {
    const Descriptor& function = descriptors.emplace_back(pointwise(key, mode));
    const Descriptor& result = result_of(static_cast<int>(operations.size()));
    operations.push_back(descriptors.emplace_back(elementwise(function, *value, other, result)).get());
    value = &result;
  };
  if (key.has_bias) append(CUDNN_POINTWISE_ADD, &descriptors.emplace_back(tensor(key, bias_of(key), kBiasId)));
  if (key.relu) append(CUDNN_POINTWISE_RELU_FWD, nullptr);
  Descriptor& graph = descriptors.emplace_back(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph
      .set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, operations.data(),
           static_cast<int64_t>(operations.size()))
      .set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle.get())
      .finalize();
  return made;
}

std::vector<ConvCandidate> conv_candidates(const ConvKey& key, const ConvGraph& graph, bool with_known_wrong) {
  std::vector<ConvCandidate> candidates;
  const auto add = [&](cudnnBackendHeurMode_t mode) {
    for (Descriptor& config : configs(graph, mode)) {
      const Descriptor engine = engine_of(config);
      const auto notes = engine.list<cudnnBackendNumericalNote_t>(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                                                  CUDNN_TYPE_NUMERICAL_NOTE, kMaxNotes);
      const int64_t number = engine.integer(CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
      const bool is_wrong = is_known_wrong(key, number);
      const bool leaves_out = is_wrong && !with_known_wrong && api().cudnnGetVersion() <= kLastWrongRelease;
      if (!respects_math_settings(key, notes) || leaves_out) continue;
      const int64_t workspace = config.integer(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE);
      const bool has_transforms =
          has_note(notes, CUDNN_NUMERICAL_NOTE_WINOGRAD) || has_note(notes, CUDNN_NUMERICAL_NOTE_FFT);
      candidates.push_back(
          {std::move(config), workspace, "engine " + std::to_string(number), has_transforms, is_wrong});
    }
  };
  if (key.search != ConvSearch::kFallback) add(CUDNN_HEUR_MODE_A);
  add(CUDNN_HEUR_MODE_FALLBACK);
  return candidates;
}

std::string tag_of(const ConvCandidate& candidate) {
  std::string tag = "eng" + std::to_string(engine_of(candidate.config).integer(CUDNN_ATTR_ENGINE_GLOBAL_INDEX));
  std::vector<Descriptor> knobs;
  std::vector<cudnnBackendDescriptor_t> pointers;
  for (int i = 0; i < CUDNN_KNOB_TYPE_COUNTS; ++i)
    pointers.push_back(knobs.emplace_back(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR).get());
  int64_t filled = 0;
  JAXGRAD_CUDNN(api().cudnnBackendGetAttribute(candidate.config.get(), CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                                               CUDNN_TYPE_BACKEND_DESCRIPTOR, CUDNN_KNOB_TYPE_COUNTS, &filled,
                                               pointers.data()));
  for (int64_t i = 0; i < filled; ++i) {
    const auto types = knobs[i].list<cudnnBackendKnobType_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1);
    for (const auto type : types)
      tag += "_k" + std::to_string(type) + "=" + std::to_string(knobs[i].integer(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE));
  }
  return tag;
}

}  // namespace jaxgrad
