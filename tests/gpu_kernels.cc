// Runs jaxgrad's own CUDA kernels without JAX, so that compute-sanitizer can watch them. .ci/gpu runs it.
//
//   gpu_kernels [PATH_OF_NVRTC [PART...]]         exits with 1 if a result is wrong. A PART is depthwise, gru,
//                                                 gru-streams, gru-blocks, norm, norm-streams or transpose
//   gpu_kernels PATH_OF_NVRTC PART                with gru-missing-block or norm-missing-block, exits with 1 if a team
//                                                 that waits in vain ends without an error; not under compute-sanitizer
//
// All arrays have exactly the sizes of the call.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/conv_problem.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/nvrtc.h"
#include "cuda/transpose/op.h"
#include "gpu_kernels_conv.h"
#include "gpu_kernels_gru.h"
#include "gpu_kernels_norm.h"

namespace jaxgrad {
namespace {

constexpr int kDevice = 0;
constexpr float kClip = 0.75F;
constexpr std::array<FloatType, 3> kTypes = {FloatType::kFloat32, FloatType::kBFloat16, FloatType::kFloat16};

int failures = 0;

void report(const std::string& what, double error, double allowed) {
  const bool right = error <= allowed;
  std::printf("%-60s %s (%.2g, allowed %.2g)\n", what.c_str(), right ? "right" : "WRONG", error, allowed);
  failures += right ? 0 : 1;
}

// An array [sizes], in row-major order, to one with the axes in the order of `to_spec`, some of them reversed.
void check_transpose(const std::vector<int64_t>& sizes, const std::vector<int64_t>& to_spec,
                     const std::vector<int64_t>& reversed, int64_t element_bytes, CUstream stream) {
  std::vector<int64_t> from_spec(sizes.size());
  std::iota(from_spec.begin(), from_spec.end(), 0);
  if (!transpose_supported(sizes, from_spec, to_spec, reversed)) throw std::runtime_error("unsupported transpose");
  ConvOperand from, to;
  const auto strides = [&](const std::vector<int64_t>& spec, ConvOperand& operand) {
    int64_t stride = 1;
    std::copy(sizes.begin(), sizes.end(), operand.sizes.begin());
    for (size_t position = spec.size(); position-- > 0;)
      for (size_t axis = 0; axis < spec.size(); ++axis)
        if (spec[axis] == static_cast<int64_t>(position)) {
          operand.strides[axis] = stride;
          stride *= sizes[axis];
        }
    return stride;
  };
  const int64_t count = strides(from_spec, from);
  strides(to_spec, to);
  const ConvOperand dense = to;
  for (const int64_t axis : reversed) to.strides[static_cast<size_t>(axis)] *= -1;

  const auto bytes = static_cast<size_t>(count * element_bytes);
  std::vector<unsigned char> in(bytes), out(bytes), expected(bytes);
  std::mt19937 random(static_cast<unsigned>(count));
  for (unsigned char& byte : in) byte = static_cast<unsigned char>(random());
  for (int64_t i = 0; i < count; ++i) {
    int64_t place = 0;
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      int64_t at = i / from.strides[axis] % sizes[axis];
      if (std::find(reversed.begin(), reversed.end(), static_cast<int64_t>(axis)) != reversed.end())
        at = sizes[axis] - 1 - at;
      place += at * dense.strides[axis];
    }
    std::copy_n(in.begin() + i * element_bytes, element_bytes, expected.begin() + place * element_bytes);
  }
  driver::Memory given(count * element_bytes);
  const driver::Memory result(count * element_bytes);
  given.write(in.data(), bytes, stream);
  transpose(stream, kDevice, static_cast<int>(sizes.size()), element_bytes, from, given.data(), to, result.data());
  result.read(out.data(), bytes, stream);
  JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));
  int64_t wrong = 0;
  for (size_t i = 0; i < bytes; ++i) wrong += out[i] != expected[i];
  std::string name = "transpose of " + std::to_string(element_bytes) + "-byte elements";
  for (const int64_t size : sizes) name += " " + std::to_string(size);
  report(name, static_cast<double>(wrong), 0);
}

// `error` returns the error of the call, or throws NoPlan.
template <class Error>
void report_gru(const std::string& name, const GruCase& call, Error error) {
  const bool is_tf32 = call.allow_tf32 && call.type == FloatType::kFloat32;
  const double allowed = call.type == FloatType::kBFloat16             ? 2e-2
                         : call.type == FloatType::kFloat16 || is_tf32 ? 3e-3
                                                                       : 5e-6;
  double found = INFINITY;
  try {
    found = error();
  } catch (const NoPlan& reason) {
    std::printf("%s\n", reason.what());
  }
  const std::string settings = std::string(is_tf32 ? ", TF32" : "") + (call.linear ? ", linear before reset" : "") +
                               (std::isfinite(call.clip) ? ", clip" : "") +
                               (call.resets_to_zero ? ", resets to zero" : "");
  report("GRU, " + name + ", " + std::to_string(8 * bytes_of(call.type)) + " bits" + settings, found, allowed);
}

// Blocks that multiply in float32; or those on tensor cores, clusters, teams, and pairs of their blocks, on a GPU of
// compute capability 9.0 with 100 to 150 multiprocessors.
void check_gru(bool of_blocks, FloatType type, bool allow_tf32, bool linear, CUstream stream) {
  const bool is_tf32 = allow_tf32 && type == FloatType::kFloat32;
  float clip = INFINITY;
  int checked = linear ? 1 : 0;  // each check resets to zero with one value of `linear`
  const auto check = [&](const char* name, int T, int B, int H, int D, int groups, GruHolder holder,
                         int rows_of_block = 0, int rows_of_backward_block = 0) {
    const GruCase call = {type,
                          allow_tf32,
                          linear,
                          T,
                          B,
                          H,
                          D,
                          groups,
                          holder,
                          rows_of_block,
                          rows_of_backward_block,
                          clip,
                          /*resets_to_zero=*/checked++ % 2 == 1};
    report_gru(name, call, [&] { return error_of<GruCall>(call, kDevice, stream); });
  };
  if (of_blocks) {
    check("block", 7, 5, 64, 2, 2, GruHolder::kBlock, 1);  // hidden units that fill the block
    check("block of two rows", 4, 90, 90, 2, 1, GruHolder::kBlock, 2);
    check("block of four rows", 3, 701, 20, 1, 1, GruHolder::kBlock, 4);
    check("block that takes registers", 5, 9, 103, 2, 2, GruHolder::kBlock, 1);
    clip = kClip;
    check("block", 7, 5, 43, 2, 2, GruHolder::kBlock, 1);
    return;
  }
  if (type != FloatType::kFloat32 || allow_tf32) {
    check("tensor block", 4, 400, 128, 2, 1, GruHolder::kTensorBlock, 8);
    check("tensor block, 64 units", 3, 600, 50, 2, 1, GruHolder::kTensorBlock, 8);
    check("cluster of four blocks", 4, 165, 128, 2, 1, GruHolder::kCluster);
    check("tensor blocks in turn", 4, 707, 101, 2, 2, GruHolder::kTensorBlock, 16, is_tf32 && linear ? 8 : 16);
  }
  check("cluster", 4, 17, 256, 1, 1, GruHolder::kCluster);
  check("teams", 11, 20, 512, 2, 1, GruHolder::kTeam);
  clip = kClip;  // and hidden units that do not fill the blocks
  if (type != FloatType::kFloat32 || allow_tf32) check("tensor block", 4, 400, 120, 2, 1, GruHolder::kTensorBlock, 8);
  check("cluster", 4, 17, 200, 1, 1, GruHolder::kCluster);
  check("teams", 11, 20, 300, 2, 1, GruHolder::kTeam);
}

// Teams and clusters on two streams. A launch of teams whose blocks do not all fit beside those of the other stream
// must wait until they do: started in part, it could keep the other from ending.
void check_gru_on_streams(FloatType type, const std::array<CUstream, 2>& streams) {
  const auto check = [&](const char* name, const std::array<GruCase, 2>& calls) {
    report_gru(name, calls[0], [&] { return error_on_streams<GruCall, GruCase>(calls, kDevice, streams, 20); });
  };
  const auto call = [&](int B, int H, int D, GruHolder holder) {
    return GruCase{type, /*allow_tf32=*/false, /*linear=*/true, /*T=*/11, B, H, D, /*groups=*/1, holder};
  };
  const GruCase few = call(5, 300, 1, GruHolder::kTeam), many = call(20, 300, 2, GruHolder::kTeam);
  check("teams beside clusters", {many, call(17, 200, 2, GruHolder::kCluster)});
  check("teams beside teams", {few, call(7, 400, 1, GruHolder::kTeam)});
  check("teams that wait for teams", {many, call(20, 400, 2, GruHolder::kTeam)});
}

void check_depthwise_passes(FloatType type, CUstream stream) {
  for (const ConvPass pass : {ConvPass::kForward, ConvPass::kInputGradient, ConvPass::kWeightGradient}) {
    const auto check = [&](const char* name, const std::vector<int64_t>& spatial, int64_t batch, int64_t features,
                           int64_t window, int64_t stride, int64_t dilation, int64_t low, int64_t high,
                           Extra extra = Extra::kNone) {
      const ConvProblem problem =
          depthwise_problem(spatial, batch, features, window, stride, dilation, low, high, pass);
      const double allowed = type == FloatType::kFloat32 ? 1e-6 : type == FloatType::kFloat16 ? 1e-3 : 8e-3;
      report(
          std::string("depthwise ") + name_of(pass) + ", " + name + ", " + std::to_string(8 * bytes_of(type)) + " bits",
          depthwise_error(problem, type, extra, kDevice, stream), allowed);
    };
    check("1D", {301}, 3, 40, 31, 1, 1, 15, 15);
    check("1D causal", {77}, 2, 12, 4, 1, 2, 6, 0);
    check("2D 3x3", {19, 23}, 5, 72, 3, 1, 1, 1, 1);
    check("2D 3x3 strides", {33, 30}, 3, 96, 3, 2, 1, 0, 1);
    check("2D 7x7", {14, 17}, 4, 34, 7, 1, 1, 3, 3);
    check("2D 5x5 dilation", {21, 16}, 2, 8, 5, 1, 2, 4, 4);
    check("2D 11x11", {18, 15}, 2, 24, 11, 1, 1, 5, 5);
    check("2D 13x13", {33, 40}, 2, 48, 13, 1, 1, 6, 6);
    check("2D 31x31", {21, 30}, 2, 24, 31, 1, 1, 15, 15);
    check("2D 21x21", {29, 28}, 2, 40, 21, 1, 1, 10, 10);
    check("2D 9x9", {14, 14}, 32, 384, 9, 1, 1, 4, 4);
    check("2D 13x13, several items of a block", {40, 40}, 9, 1040, 13, 1, 1, 6, 6);
    if (pass != ConvPass::kWeightGradient)
      check("2D 13x13, infinite", {33, 40}, 2, 48, 13, 1, 1, 6, 6, Extra::kInfinity);
    if (pass == ConvPass::kForward) {
      check("1D causal, bias and relu", {77}, 2, 12, 4, 1, 2, 6, 0, Extra::kBiasAndRelu);
      check("2D 3x3 strides, bias and relu", {33, 30}, 3, 96, 3, 2, 1, 0, 1, Extra::kBiasAndRelu);
      check("2D 13x13, bias and relu", {33, 40}, 2, 48, 13, 1, 1, 6, 6, Extra::kBiasAndRelu);
    }
    check("3D", {6, 11, 9}, 2, 20, 3, 1, 1, 1, 1);
    check("3D strides", {7, 12, 9}, 2, 12, 3, 2, 1, 0, 1);
  }
}

// Batch norm, group norm and rows, of one call and of several, in blocks that exchange their sums and in such that do
// not.
void check_norm(FloatType type, CUstream stream) {
  const double allowed = type == FloatType::kFloat32 ? 2e-5 : type == FloatType::kFloat16 ? 2e-3 : 1.6e-2;
  const auto check = [&](const char* name, const NormShape& shape, Activation activation, bool residual,
                         bool centered = true) {
    report(std::string("norm, ") + name + ", " + std::to_string(8 * bytes_of(type)) + " bits",
           error_of<NormCall>(NormCase{shape, type, activation, residual, centered}, kDevice, stream), allowed);
  };
  using A = Activation;
  check("batch", {1, 3001, 48, 1, 48}, A::kRelu, true);
  check("batch, channels first", {1, 9, 30, 104, 30}, A::kRelu, false);
  check("batch of three calls", {3, 700, 20, 1, 20, 3}, A::kNone, false);
  check("batch, one row", {1, 1, 40, 1, 40}, A::kNone, true);
  check("group", {5, 300, 96, 1, 8}, A::kSilu, false);
  check("group, channels first", {6, 1, 24, 77, 4, 2}, A::kGelu, true);
  check("group, one sample", {1, 5000, 64, 1, 32}, A::kSilu, true);
  for (const int64_t width : {2, 31, 96, 100, 768, 4096, 5000}) {
    const NormShape rows = {width > 1000 ? 37 : 2011, 1, width, 1, 1};
    check("rows", rows, A::kNone, false);
    check("rows", rows, width % 2 == 0 ? A::kGelu : A::kRelu, true, width % 3 == 0);
  }
  check("rows of two calls", {502, 1, 72, 1, 1, 2}, A::kSilu, false);
}

// Teams of norms beside each other, on two streams.
void check_norm_on_streams(FloatType type, const std::array<CUstream, 2>& streams) {
  const NormCase batch = {{1, 20000, 64, 1, 64}, type, Activation::kRelu, true};
  const NormCase rows = {{30000, 1, 96, 1, 1}, type}, group = {{2, 20000, 64, 1, 8}, type, Activation::kSilu};
  const double allowed = type == FloatType::kFloat32 ? 1e-4 : type == FloatType::kFloat16 ? 2e-3 : 1.6e-2;
  const std::string bits = ", " + std::to_string(8 * bytes_of(type)) + " bits";
  report("batch norm beside rows" + bits, error_on_streams<NormCall, NormCase>({batch, rows}, kDevice, streams, 200),
         allowed);
  report("batch norm beside group norm" + bits,
         error_on_streams<NormCall, NormCase>({batch, group}, kDevice, streams, 200), allowed);
}

constexpr std::array<const char*, 9> kParts = {
    "depthwise", "gru",          "gru-streams",       "gru-blocks",        "norm",
    "transpose", "norm-streams", "gru-missing-block", "norm-missing-block"};

int run(int arguments, char** argument) {
  for (int i = 2; i < arguments; ++i) {
    const std::string name = argument[i];
    if (std::find(kParts.begin(), kParts.end(), name) == kParts.end())
      throw std::invalid_argument("there is no part " + name);
  }
  const driver::CurrentDevice current(kDevice);
  nvrtc::load(arguments > 1 ? std::vector<std::string>{argument[1]} : std::vector<std::string>());
  driver::Stopwatch watch;
  const CUstream stream = watch.stream();
  const auto runs = [&](const char* part) {
    return arguments < 3 ||
           std::any_of(argument + 2, argument + arguments, [&](const char* name) { return std::string(name) == part; });
  };
  if (runs("depthwise")) {
    for (const FloatType type : kTypes) check_depthwise_passes(type, stream);
    for (const ConvPass pass : {ConvPass::kForward, ConvPass::kInputGradient, ConvPass::kWeightGradient})
      report(std::string("reference ") + name_of(pass) + ", 64 bits", reference_error(pass, kDevice, stream), 1e-14);
  }
  for (const bool of_blocks : {false, true})
    for (const bool linear : {false, true}) {
      if (!runs(of_blocks ? "gru-blocks" : "gru")) break;
      for (const FloatType type : kTypes) check_gru(of_blocks, type, /*allow_tf32=*/false, linear, stream);
      check_gru(of_blocks, FloatType::kFloat32, /*allow_tf32=*/true, linear, stream);
    }
  driver::Stopwatch other;
  if (runs("gru-streams"))
    for (const FloatType type : kTypes) check_gru_on_streams(type, {stream, other.stream()});
  for (const FloatType type : kTypes) {
    if (runs("norm")) check_norm(type, stream);
    if (runs("norm-streams")) check_norm_on_streams(type, {stream, other.stream()});
  }
  for (const int64_t bytes : {2, 4, 8}) {
    if (!runs("transpose")) break;
    check_transpose({65, 130}, {1, 0}, {}, bytes, stream);
    check_transpose({7, 3, 3, 258}, {3, 1, 2, 0}, {1, 2}, bytes, stream);
    check_transpose({300, 5, 9}, {2, 0, 1}, {}, bytes, stream);
    check_transpose({64, 3, 3, 128}, {3, 0, 1, 2}, {}, bytes, stream);
    check_transpose({12, 5, 7, 36}, {0, 2, 1, 3}, {1}, bytes, stream);
  }
  if (arguments == 3 && runs("gru-missing-block")) {  // last: the context is lost
    const bool has_ended = gru_status_without_a_block(kDevice, stream) != CUDA_SUCCESS;
    report("GRU, a team without one of its blocks ends with an error", has_ended ? 0 : INFINITY, 0);
  }
  if (arguments == 3 && runs("norm-missing-block")) {
    const NormCall call({{1, 20000, 64, 1, 64}, FloatType::kBFloat16}, kDevice, stream);
    const bool has_ended = call.status_without_a_block(stream) != CUDA_SUCCESS;
    report("norm, a team without one of its blocks ends with an error", has_ended ? 0 : INFINITY, 0);
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jaxgrad

int main(int arguments, char** argument) {
  try {
    return jaxgrad::run(arguments, argument);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
