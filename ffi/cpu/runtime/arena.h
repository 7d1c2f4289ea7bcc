// Divides the workspace of a call, a buffer that XLA allocates, into arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxgrad {

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Returns 64-byte aligned pieces of one buffer. With a null buffer it only computes the size of the workspace.
class Arena {
 public:
  explicit Arena(std::byte* base) : base_(base) {}

  template <class T>
  T* take(int64_t elements) {
    const int64_t at = round_up(reinterpret_cast<intptr_t>(base_) + used_, 64) - reinterpret_cast<intptr_t>(base_);
    used_ = at + elements * static_cast<int64_t>(sizeof(T));
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }

  // The size of a buffer that holds all pieces, whatever its alignment.
  int64_t bytes() const { return used_ + 64; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

}  // namespace jaxgrad
