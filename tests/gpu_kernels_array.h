// What the checks of gpu_kernels.cc share: arrays on the GPU, and both passes of a call.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

// Elements of a FloatType as float32.
inline float decoded(FloatType type, uint16_t bits) {
  if (type == FloatType::kBFloat16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? std::numeric_limits<float>::quiet_NaN()
                     : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                     : std::ldexp(1024.F + static_cast<float>(fraction), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}
// Of zeros, and of normal numbers with few digits.
inline uint16_t encoded(FloatType type, float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  if (type == FloatType::kBFloat16 || value == 0) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023));
}

// An array of a FloatType on the GPU, and its elements on the host.
struct GpuArray {
  FloatType type;
  std::vector<float> host;
  driver::Memory memory;

  GpuArray(FloatType of, size_t count) : type(of), host(count), memory(static_cast<int64_t>(count) * bytes_of(of)) {}

  // Random multiples of scale / 8, or in float32 any numbers, up to `scale`.
  void draw(float scale, std::mt19937& random, CUstream stream) {
    for (float& value : host)
      value = type == FloatType::kFloat32 ? std::uniform_real_distribution<float>(-scale, scale)(random)
                                          : scale / 8 * static_cast<float>(static_cast<int>(random() % 17) - 8);
    write(stream);
  }
  void write(CUstream stream) {
    std::vector<uint16_t> bits;
    for (const float value : host) bits.push_back(encoded(type, value));
    const bool is_wide = type == FloatType::kFloat32;
    memory.write(is_wide ? static_cast<const void*>(host.data()) : bits.data(), host.size() * (is_wide ? 4 : 2),
                 stream);
    JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));
  }
  void read(CUstream stream) {
    std::vector<uint16_t> bits(host.size());
    const bool is_wide = type == FloatType::kFloat32;
    memory.read(is_wide ? static_cast<void*>(host.data()) : bits.data(), host.size() * (is_wide ? 4 : 2), stream);
    JAXGRAD_DRIVER(driver::api().cuStreamSynchronize(stream));
    for (size_t i = 0; !is_wide && i < host.size(); ++i) host[i] = decoded(type, bits[i]);
  }
};

// The largest difference of an array on the GPU from `right`, relative to the largest value of `right`, or to 1.
inline double largest_error(GpuArray& found, const std::vector<double>& right, CUstream stream) {
  found.read(stream);
  double largest = 0, size = 1;
  for (const double value : right) size = std::max(size, std::abs(value));
  for (size_t i = 0; i < right.size(); ++i) {
    const double error = std::abs(found.host[i] - right[i]) / size;
    largest = error <= largest ? largest : std::isnan(error) ? INFINITY : error;
  }
  return largest;
}

// The error of a call, which has run(is_backward, stream) and error(stream).
template <class Call, class Case>
double error_of(const Case& of, int device, CUstream stream) {
  Call call(of, device, stream);
  for (const bool is_backward : {false, true}) call.run(is_backward, stream);
  return call.error(stream);
}

// Of two calls, each on a stream of its own. Their launches compete for the multiprocessors.
template <class Call, class Case>
double error_on_streams(const std::array<Case, 2>& of, int device, const std::array<CUstream, 2>& streams, int rounds) {
  std::array<Call, 2> calls = {Call(of[0], device, streams[0]), Call(of[1], device, streams[1])};
  for (int round = 0; round < rounds; ++round)
    for (const bool is_backward : {false, true})
      for (size_t i = 0; i < calls.size(); ++i) calls[i].run(is_backward, streams[i]);
  return std::max(calls[0].error(streams[0]), calls[1].error(streams[1]));
}

}  // namespace jaxgrad
