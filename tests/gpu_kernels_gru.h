// The kernels of the GRU against plain loops, for gpu_kernels.cc.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gru/op.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/no_plan.h"
#include "gpu_kernels_array.h"

namespace jaxgrad {

struct GruCase {
  FloatType type;
  bool allow_tf32, linear;
  int T, B, H, D, groups;
  GruHolder holder;
  int rows_of_block = 0;           // of single blocks
  int rows_of_backward_block = 0;  // where the backward pass has another number
  float clip = std::numeric_limits<float>::infinity();
  bool resets_to_zero = false;  // or to given states
};

// The arrays of both passes. Half of the rows are shorter, and some are reset. The second direction is reversed.
struct GruArrays {
  GruCase c;
  size_t problems, states, steps;  // elements of [problems, B, H] and of y
  GpuArray inputs, r, bias, initial_h, reset_h, y, y_h, gates, dy, dy_h, dgates, recurrent_dgates, dh0, dreset_h;
  std::vector<int> lengths;
  std::vector<unsigned char> reset;
  driver::Memory lengths_memory, reset_memory;

  GruArrays(const GruCase& of, CUstream stream)
      : c(of),
        problems(static_cast<size_t>(c.groups * c.D)),
        states(problems * c.B * c.H),
        steps(states * c.T),
        inputs(FloatType::kFloat32, 3 * steps),
        r(c.type, problems * 3 * c.H * c.H),
        bias(c.type, problems * 6 * c.H),
        initial_h(c.type, states),
        reset_h(c.type, states),
        y(c.type, steps),
        y_h(c.type, states),
        gates(c.type, (c.linear ? 4 : 3) * steps),
        dy(c.type, steps),
        dy_h(c.type, states),
        dgates(c.type, 3 * steps),
        recurrent_dgates(c.type, 3 * steps),
        dh0(FloatType::kFloat32, states),
        dreset_h(FloatType::kFloat32, states),
        lengths(static_cast<size_t>(c.groups * c.B)),
        reset(static_cast<size_t>(c.groups * c.T * c.B)),
        lengths_memory(static_cast<int64_t>(lengths.size() * sizeof(int))),
        reset_memory(static_cast<int64_t>(reset.size())) {
    std::mt19937 random(static_cast<unsigned>(c.H));
    // With `clip`, pre-activations are near to zero or to twice the bound: rounding takes none to its other side.
    const bool has_clip = std::isfinite(c.clip);
    const float scale = has_clip ? 1.F / 64 : 1;
    inputs.draw(1, random, stream);
    if (has_clip) {
      for (float& value : inputs.host) value = 2 * c.clip * std::round(value * 1.5F);
      inputs.write(stream);
    }
    r.draw(scale * std::exp2(std::round(-std::log2(static_cast<float>(c.H)) / 2)), random, stream);
    bias.draw(scale, random, stream);
    for (GpuArray* array : {&initial_h, &reset_h, &dy, &dy_h}) array->draw(1, random, stream);
    if (c.resets_to_zero) std::fill(reset_h.host.begin(), reset_h.host.end(), 0.F);
    for (int& length : lengths)
      length = random() % 2 == 0 ? c.T : static_cast<int>(random() % static_cast<unsigned>(c.T + 1));
    for (unsigned char& flag : reset) flag = random() % 4 == 0;
    lengths_memory.write(lengths.data(), lengths.size() * sizeof(int), stream);
    reset_memory.write(reset.data(), reset.size(), stream);
    JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));
  }

  GruArguments arguments() const {
    GruArguments a{};
    a.steps = c.T, a.rows = c.B, a.hidden = c.H, a.directions = c.D, a.reversed = c.D == 2 ? 2 : 0;
    a.clip = c.clip;
    a.inputs = static_cast<const float*>(inputs.memory.data());
    a.r = r.memory.data(), a.bias = bias.memory.data();
    a.initial_h = initial_h.memory.data(), a.reset_h = c.resets_to_zero ? nullptr : reset_h.memory.data();
    a.lengths = static_cast<const int*>(lengths_memory.data());
    a.reset = static_cast<const unsigned char*>(reset_memory.data());
    a.y = y.memory.data(), a.y_h = y_h.memory.data(), a.gates = gates.memory.data();
    a.dy = dy.memory.data(), a.dy_h = dy_h.memory.data(), a.dgates = dgates.memory.data();
    a.recurrent_dgates = c.linear ? recurrent_dgates.memory.data() : nullptr;
    a.dh0 = static_cast<float*>(dh0.memory.data());
    a.dreset_h = c.resets_to_zero ? nullptr : static_cast<float*>(dreset_h.memory.data());
    return a;
  }

  GruKey key(bool is_backward, int device) const {
    GruKey key;
    key.is_backward = is_backward;
    key.type = c.type, key.allow_tf32 = c.allow_tf32, key.linear_before_reset = c.linear;
    key.problems = static_cast<int64_t>(problems), key.rows = c.B, key.hidden = c.H;
    key.device = device;
    key.has_lengths = key.has_resets = true, key.has_reset_h = !c.resets_to_zero;
    key.has_clip = std::isfinite(c.clip);
    return key;
  }

  // Throws NoPlan if another kernel than expected computes a pass.
  GruPlan plan(bool is_backward, int device) const {
    const GruVariant variant = gru_variant(key(is_backward, device));
    const int rows = is_backward && c.rows_of_backward_block != 0 ? c.rows_of_backward_block : c.rows_of_block;
    if (variant.holder != c.holder || (rows != 0 && variant.rows != rows))
      throw NoPlan("another kernel runs, of " + std::to_string(variant.rows) + " rows");
    return gru_plan(key(is_backward, device));
  }
};

// The results in double precision, of one row of one problem after the other.
struct GruExpected {
  std::vector<double> y, y_h, dgates, recurrent_dgates, dh0, dreset_h;

  explicit GruExpected(const GruArrays& a)
      : y(a.steps),
        y_h(a.states),
        dgates(3 * a.steps),
        recurrent_dgates(a.c.linear ? 3 * a.steps : 0),
        dh0(a.states),
        dreset_h(a.states) {
    for (size_t problem = 0; problem < a.problems; ++problem)
      for (int row = 0; row < a.c.B; ++row) add_row(a, problem, static_cast<size_t>(row));
  }

 private:
  using Vector = std::vector<double>;
  using ValueAndSlope = std::pair<double, double>;
  static ValueAndSlope sigmoid(double x) {
    const double value = 1 / (1 + std::exp(-x));
    return {value, value * (1 - value)};
  }
  static ValueAndSlope tanh(double x) {
    const double value = std::tanh(x);
    return {value, 1 - value * value};
  }
  struct Gate {  // of all units in a step
    Vector value, slope;
    explicit Gate(size_t units) : value(units), slope(units) {}
    void set(size_t unit, double before, double clip, ValueAndSlope (*activation)(double)) {
      const auto [its_value, its_slope] = activation(std::min(std::max(before, -clip), clip));
      value[unit] = its_value;
      slope[unit] = std::abs(before) < clip ? its_slope : 0;
    }
  };

  void add_row(const GruArrays& a, size_t problem, size_t row) {
    const GruCase& c = a.c;
    const auto H = static_cast<size_t>(c.H), T = static_cast<size_t>(c.T), B = static_cast<size_t>(c.B);
    const auto D = static_cast<size_t>(c.D), group = problem / D, direction = problem % D;
    const size_t state = (problem * B + row) * H;
    const float *const r = &a.r.host[problem * 3 * H * H], *const bias = &a.bias.host[problem * 6 * H];
    const auto product = [&](size_t gate, size_t unit, const Vector& h) {
      double sum = 0;
      for (size_t k = 0; k < H; ++k) sum += r[(gate * H + unit) * H + k] * h[k];
      return sum;
    };
    const auto transposed = [&](size_t gate, size_t unit, const Vector& d) {
      double sum = 0;
      for (size_t k = 0; k < H; ++k) sum += r[(gate * H + k) * H + unit] * d[k];
      return sum;
    };
    const auto length = static_cast<size_t>(a.lengths[group * B + row]);
    const auto time = [&](size_t step) { return direction == 1 ? T - 1 - step : step; };
    const auto of_step = [&](size_t t) { return (((group * T + t) * D + direction) * B + row) * H; };
    const auto of_gates = [&](size_t t) { return (((group * T + t) * B + row) * D + direction) * 3 * H; };
    const auto is_reset = [&](size_t t) { return a.reset[(group * T + t) * B + row] != 0; };
    std::vector<Vector> before(T), recurrent(T, Vector(H));
    std::vector<Gate> z(T, Gate(H)), rg(T, Gate(H)), n(T, Gate(H));
    Vector h(a.initial_h.host.begin() + static_cast<int64_t>(state),
             a.initial_h.host.begin() + static_cast<int64_t>(state + H));
    for (size_t step = 0; step < T; ++step) {
      const size_t t = time(step);
      if (t >= length) continue;
      if (is_reset(t)) std::copy_n(a.reset_h.host.begin() + static_cast<int64_t>(state), H, h.begin());
      before[t] = h;
      const auto x = [&](size_t gate, size_t u) {
        return a.inputs.host[of_gates(t) + gate * H + u] + double{bias[gate * H + u]} +
               (gate == 2 && c.linear ? 0 : bias[(3 + gate) * H + u]);
      };
      Vector gated(H);
      for (size_t u = 0; u < H; ++u) {
        z[t].set(u, x(0, u) + product(0, u, before[t]), c.clip, sigmoid);
        rg[t].set(u, x(1, u) + product(1, u, before[t]), c.clip, sigmoid);
        gated[u] = rg[t].value[u] * before[t][u];
      }
      for (size_t u = 0; u < H; ++u) {
        recurrent[t][u] = product(2, u, c.linear ? before[t] : gated) + (c.linear ? bias[5 * H + u] : 0);
        n[t].set(u, x(2, u) + (c.linear ? rg[t].value[u] : 1) * recurrent[t][u], c.clip, tanh);
        h[u] = (1 - z[t].value[u]) * n[t].value[u] + z[t].value[u] * before[t][u];
        y[of_step(t) + u] = h[u];
      }
    }
    std::copy(h.begin(), h.end(), y_h.begin() + static_cast<int64_t>(state));

    Vector dh(a.dy_h.host.begin() + static_cast<int64_t>(state), a.dy_h.host.begin() + static_cast<int64_t>(state + H));
    for (size_t step = T; step-- > 0;) {
      const size_t t = time(step);
      if (t >= length) continue;
      Vector dz(H), dr(H), dn(H), drecurrent(H), dproduct(H);
      for (size_t u = 0; u < H; ++u) {
        dh[u] += a.dy.host[of_step(t) + u];
        dz[u] = dh[u] * (before[t][u] - n[t].value[u]) * z[t].slope[u];
        dn[u] = dh[u] * (1 - z[t].value[u]) * n[t].slope[u];
        drecurrent[u] = c.linear ? dn[u] * rg[t].value[u] : dn[u];
      }
      for (size_t u = 0; u < H; ++u) {
        dproduct[u] = transposed(2, u, drecurrent);
        dr[u] = (c.linear ? dn[u] * recurrent[t][u] : dproduct[u] * before[t][u]) * rg[t].slope[u];
      }
      for (size_t u = 0; u < H; ++u) {
        const double of_n = c.linear ? dproduct[u] : dproduct[u] * rg[t].value[u];
        dh[u] = dh[u] * z[t].value[u] + of_n + transposed(0, u, dz) + transposed(1, u, dr);
        dgates[of_gates(t) + u] = dz[u];
        dgates[of_gates(t) + H + u] = dr[u];
        dgates[of_gates(t) + 2 * H + u] = dn[u];
        if (!c.linear) continue;
        recurrent_dgates[of_gates(t) + u] = dz[u];
        recurrent_dgates[of_gates(t) + H + u] = dr[u];
        recurrent_dgates[of_gates(t) + 2 * H + u] = drecurrent[u];
      }
      if (is_reset(t))
        for (size_t u = 0; u < H; ++u) dreset_h[state + u] += dh[u], dh[u] = 0;
    }
    std::copy(dh.begin(), dh.end(), dh0.begin() + static_cast<int64_t>(state));
  }
};

// Both passes of a call, whose launches need not be waited for.
class GruCall {
 public:
  GruCall(const GruCase& of, int device, CUstream stream)
      : arrays_(of, stream),
        plans_{arrays_.plan(/*is_backward=*/false, device), arrays_.plan(/*is_backward=*/true, device)},
        workspaces_{driver::Memory(plans_[0].workspace_bytes()), driver::Memory(plans_[1].workspace_bytes())} {}

  void run(bool is_backward, CUstream stream) const {
    plans_[is_backward].run(stream, arrays_.arguments(), workspaces_[is_backward].data());
  }

  // The largest error of the results, relative to the largest value of each array, or to 1.
  double error(CUstream stream) {
    const GruExpected expected(arrays_);
    double largest = 0;
    const auto compare = [&](GpuArray& found, const std::vector<double>& right) {
      largest = std::max(largest, largest_error(found, right, stream));
    };
    compare(arrays_.y, expected.y);
    compare(arrays_.y_h, expected.y_h);
    compare(arrays_.dgates, expected.dgates);
    if (arrays_.c.linear) compare(arrays_.recurrent_dgates, expected.recurrent_dgates);
    compare(arrays_.dh0, expected.dh0);
    if (!arrays_.c.resets_to_zero) compare(arrays_.dreset_h, expected.dreset_h);
    return largest;
  }

 private:
  GruArrays arrays_;
  std::array<GruPlan, 2> plans_;  // forward, backward
  std::array<driver::Memory, 2> workspaces_;
};

// How a launch of a team without its last block ends, for whose words the others wait. An error loses the context.
inline CUresult gru_status_without_a_block(int device, CUstream stream) {
  const GruArrays arrays({FloatType::kBFloat16, false, true, 3, 5, 300, 1, 1, GruHolder::kTeam}, stream);
  const GruKey key = arrays.key(/*is_backward=*/false, device);
  const GruPlan whole = arrays.plan(key.is_backward, device);
  GruVariant variant = gru_variant(key);
  if (variant.holders != 1) throw NoPlan("there are several teams");
  variant.padded -= variant.units;  // of the launch; the kernel has all units
  const GruPlan plan(std::static_pointer_cast<const GruKernel>(whole.kernel()), variant, key.problems);
  const driver::Memory workspace(plan.workspace_bytes());
  plan.run(stream, arrays.arguments(), workspace.data());
  return driver::api().cuStreamSynchronize(stream);
}

}  // namespace jaxgrad
