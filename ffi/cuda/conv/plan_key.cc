#include "cuda/conv/plan_key.h"

#include <sstream>

#include "cuda/runtime/driver.h"

namespace jaxgrad {
namespace {

template <class Values>
void put(std::ostream& text, const char* name, const Values& values) {
  text << ' ' << name;
  char before = '=';
  for (const int64_t value : values) {
    text << before << value;
    before = ',';
  }
}

void put(std::ostream& text, const char* name, const ConvOperand& operand) {
  put(text, name, operand.sizes);
  put(text, "strides", operand.strides);
}

}  // namespace

std::string choice_key(const ConvKey& key, int64_t reserved_bytes) {
  std::ostringstream text;
  text << "conv kind=" << static_cast<int64_t>(key.kind) << " spatial=" << key.spatial << " groups=" << key.groups;
  put(text, "x", key.x);
  put(text, "w", key.w);
  put(text, "y", key.y);
  put(text, "window_strides", key.window_strides);
  put(text, "rhs_dilation", key.rhs_dilation);
  put(text, "padding_low", key.padding_low);
  put(text, "padding_high", key.padding_high);
  text << " type=" << static_cast<int64_t>(key.type) << " bias=" << key.has_bias << " relu=" << key.relu
       << " allow_tf32=" << key.allow_tf32 << " deterministic=" << key.deterministic
       << " search=" << static_cast<int64_t>(key.search) << " reserved=" << reserved_bytes << "; "
       << cudnn::describe_build() << "; " << driver::describe_device(key.device);
  return text.str();
}

}  // namespace jaxgrad
