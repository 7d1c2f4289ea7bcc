// The kernels of the norms against plain loops, for gpu_kernels.cc.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "cuda/norm/op.h"
#include "cuda/runtime/driver.h"
#include "gpu_kernels_array.h"

namespace jaxgrad {

struct NormCase {
  NormShape shape;
  FloatType type;
  Activation activation = Activation::kNone;
  bool residual = false, centered = true;
};

// Both passes of a call, whose launches need not be waited for.
class NormCall {
 public:
  static constexpr double kEpsilon = 1e-3;

  NormCall(const NormCase& of, int device, CUstream stream)
      : c_(of),
        x_(c_.type, count()),
        residual_(c_.type, count()),
        dy_(c_.type, count()),
        y_(c_.type, count()),
        dx_(c_.type, count()),
        dresidual_(c_.type, count()),
        scale_(kWide, of_calls()),
        bias_(kWide, of_calls()),
        mean_(kWide, of_groups()),
        low_(kWide, of_groups()),
        var_(kWide, of_groups()),
        rstd_(kWide, of_groups()),
        dscale_(kWide, of_calls()),
        dbias_(kWide, of_calls()),
        plans_{norm_plan(key(false), device), norm_plan(key(true), device)},
        workspaces_{driver::Memory(plans_[0]->program.workspace_bytes + 1),
                    driver::Memory(plans_[1]->program.workspace_bytes + 1)} {
    std::mt19937 random(static_cast<unsigned>(count()));
    for (GpuArray* array : {&x_, &residual_, &dy_}) array->draw(2, random, stream);
    for (GpuArray* array : {&scale_, &bias_}) array->draw(1, random, stream);
  }

  void run(bool is_backward, CUstream stream) const { run(is_backward, *plans_[is_backward], stream); }

  // The largest error of the results; see largest_error.
  double error(CUstream stream) {
    expect();
    double largest = 0;
    const auto compare = [&](GpuArray& found, const Vector& right) {
      largest = std::max(largest, largest_error(found, right, stream));
    };
    compare(y_, y);
    compare(dx_, dx);
    compare(dscale_, dscale);
    compare(dbias_, dbias);
    if (c_.residual) compare(dresidual_, dresidual);
    return largest;
  }

  // How a backward pass without the last block ends, for whose sums the others wait. An error loses the context.
  CUresult status_without_a_block(CUstream stream) const {
    NormPlan plan = *plans_[1];
    --plan.program.blocks;  // of the launch; the kernel has all of them
    run(true, plan, stream);
    return driver::api().cuStreamSynchronize(stream);
  }

 private:
  using Vector = std::vector<double>;
  static constexpr FloatType kWide = FloatType::kFloat32;

  NormCase c_;
  GpuArray x_, residual_, dy_, y_, dx_, dresidual_, scale_, bias_, mean_, low_, var_, rstd_, dscale_, dbias_;
  std::array<std::shared_ptr<const NormPlan>, 2> plans_;  // forward, backward
  std::array<driver::Memory, 2> workspaces_;
  Vector y, dx, dresidual, dscale, dbias;  // in double precision

  size_t count() const { return static_cast<size_t>(c_.shape.elements()); }
  size_t of_calls() const { return static_cast<size_t>(c_.shape.K * c_.shape.C); }
  size_t of_groups() const { return static_cast<size_t>(c_.shape.S * c_.shape.G); }
  bool reads_y() const { return c_.residual && c_.activation == Activation::kRelu; }

  NormKey key(bool is_backward) const {
    NormKey key{is_backward ? NormPass::kBackward : NormPass::kForward, c_.shape, c_.type};
    key.activation = c_.activation;
    key.centered = c_.centered;
    key.residual = c_.residual;
    if (is_backward && c_.residual && c_.activation != Activation::kNone)
      key.third = reads_y() ? NormThird::kY : NormThird::kResidual;
    return key;
  }

  void run(bool is_backward, const NormPlan& plan, CUstream stream) const {
    const auto wide = [](const GpuArray& array) { return static_cast<float*>(array.memory.data()); };
    NormArrays a{};
    a.x = x_.memory.data(), a.dy = dy_.memory.data(), a.y = y_.memory.data(), a.residual = residual_.memory.data();
    a.result = (is_backward ? dx_ : y_).memory.data(), a.dresidual = dresidual_.memory.data();
    a.scale = wide(scale_), a.bias = wide(bias_);
    a.given_mean = a.mean = wide(mean_), a.given_mean_low = a.mean_low = wide(low_);
    a.given_rstd = a.rstd = wide(rstd_), a.var = wide(var_);
    a.dscale = wide(dscale_), a.dbias = wide(dbias_);
    norm(stream, plan, a, kEpsilon, workspaces_[is_backward].data());
  }

  // The activation of z and its derivative.
  std::array<double, 2> activated(double z) const {
    const double sigmoid = 1 / (1 + std::exp(-z));
    constexpr double kScale = 0.7978845608028654, kCubic = 0.044715;  // sqrt(2 / pi)
    const double tanh = std::tanh(kScale * (z + kCubic * z * z * z));
    switch (c_.activation) {
      case Activation::kRelu:
        return {std::max(z, 0.), z > 0 ? 1. : 0.};
      case Activation::kSilu:
        return {z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))};
      case Activation::kGelu:
        return {z / 2 * (1 + tanh), (1 + tanh) / 2 + z / 2 * (1 - tanh * tanh) * kScale * (1 + 3 * kCubic * z * z)};
      default:
        return {z, 1};
    }
  }

  void expect() {
    const NormShape& s = c_.shape;
    y.assign(count(), 0), dx = dresidual = y;
    dscale.assign(of_calls(), 0), dbias = dscale;
    const double n = static_cast<double>(s.group_elements());
    for (int64_t sample = 0; sample < s.S; ++sample)
      for (int64_t group = 0; group < s.G; ++group) {
        const auto each = [&](auto visit) {  // visit(element, of scale)
          for (int64_t o = 0; o < s.O; ++o)
            for (int64_t c = group * s.group_channels(); c < (group + 1) * s.group_channels(); ++c)
              for (int64_t i = 0; i < s.I; ++i)
                visit(static_cast<size_t>(((sample * s.O + o) * s.C + c) * s.I + i),
                      static_cast<size_t>(sample / s.call_samples() * s.C + c));
        };
        double mean = 0, var = 0, level = 0, tilt = 0;
        if (c_.centered) each([&](size_t at, size_t) { mean += x_.host[at] / n; });
        each([&](size_t at, size_t) { var += (x_.host[at] - mean) * (x_.host[at] - mean) / n; });
        const double rstd = 1 / std::sqrt(var + kEpsilon);
        const auto xhat = [&](size_t at) { return (x_.host[at] - mean) * rstd; };
        each([&](size_t at, size_t c) {
          const double added = c_.residual ? residual_.host[at] : 0;
          const auto [value, slope] = activated(xhat(at) * scale_.host[c] + bias_.host[c] + added);
          y[at] = value;
          dresidual[at] = dy_.host[at] * slope;
          dbias[c] += dresidual[at];
          dscale[c] += dresidual[at] * xhat(at);
          if (c_.centered) level += dresidual[at] * scale_.host[c] / n;
          tilt += dresidual[at] * scale_.host[c] * xhat(at) / n;
        });
        each([&](size_t at, size_t c) { dx[at] = rstd * (dresidual[at] * scale_.host[c] - level - xhat(at) * tilt); });
      }
  }
};

}  // namespace jaxgrad
