// Integer arithmetic that notices overflow, for sizes that come from a caller.
#pragma once

#include <cstdint>

namespace jaxgrad {

// The result of +, - and * overflows if an operand did.
class CheckedInt {
 public:
  CheckedInt(int64_t value) : value_(value) {}

  friend CheckedInt operator+(CheckedInt a, CheckedInt b) {
    CheckedInt sum(0, a, b);
    sum.overflowed_ |= __builtin_add_overflow(a.value_, b.value_, &sum.value_);
    return sum;
  }
  friend CheckedInt operator-(CheckedInt a, CheckedInt b) {
    CheckedInt difference(0, a, b);
    difference.overflowed_ |= __builtin_sub_overflow(a.value_, b.value_, &difference.value_);
    return difference;
  }
  friend CheckedInt operator*(CheckedInt a, CheckedInt b) {
    CheckedInt product(0, a, b);
    product.overflowed_ |= __builtin_mul_overflow(a.value_, b.value_, &product.value_);
    return product;
  }

  bool overflowed() const { return overflowed_; }
  int64_t value() const { return value_; }  // meaningless after an overflow

 private:
  CheckedInt(int64_t value, CheckedInt a, CheckedInt b) : value_(value), overflowed_(a.overflowed_ || b.overflowed_) {}

  int64_t value_;
  bool overflowed_ = false;
};

}  // namespace jaxgrad
