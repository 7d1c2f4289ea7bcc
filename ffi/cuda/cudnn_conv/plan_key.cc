#include "cuda/cudnn_conv/plan_key.h"

#include <sstream>

#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/driver.h"

namespace jaxgrad {
namespace {

template <class Values>
void put(std::ostream& text, const char* name, const Values& values) {
  text << ' ' << name;
  char separator = '=';
  for (const int64_t value : values) {
    text << separator << value;
    separator = ',';
  }
}

void put(std::ostream& text, const char* name, const ConvOperand& operand) {
  put(text, name, operand.sizes);
  put(text, "strides", operand.strides);
}

// What the values of a result depend on.
std::string describe_values(const ConvKey& key) {
  std::ostringstream text;
  text << "conv kind=" << static_cast<int64_t>(key.pass) << " spatial=" << key.spatial << " groups=" << key.groups;
  put(text, "x", key.x);
  put(text, "w", key.w);
  put(text, "y", key.y);
  put(text, "window_strides", key.window_strides);
  put(text, "rhs_dilation", key.rhs_dilation);
  put(text, "padding_low", key.padding_low);
  put(text, "padding_high", key.padding_high);
  text << " type=" << static_cast<int64_t>(key.type) << " bias=" << key.has_bias << " relu=" << key.relu
       << " allow_tf32=" << key.allow_tf32;
  return text.str();
}

std::string describe_machine(const ConvKey& key) {
  return "; " + cudnn::describe_build() + "; " + driver::describe_device(key.device);
}

}  // namespace

bool ConvKey::operator==(const ConvKey& o) const {
  return ConvProblem::operator==(o) && type == o.type && has_bias == o.has_bias && relu == o.relu &&
         allow_tf32 == o.allow_tf32 && deterministic == o.deterministic && search == o.search &&
         workspace_limit == o.workspace_limit && device == o.device;
}

size_t ConvKeyHash::operator()(const ConvKey& key) const {
  Hash hash;
  hash.mix(static_cast<const ConvProblem&>(key));
  hash.mix(static_cast<int64_t>(key.type));
  hash.mix(key.has_bias);
  hash.mix(key.relu);
  hash.mix(key.allow_tf32);
  hash.mix(key.deterministic);
  hash.mix(static_cast<int64_t>(key.search));
  hash.mix(key.workspace_limit);
  hash.mix(key.device);
  return hash.value();
}

// The texts are part of the format of the stored files: a change discards all results stored before.
std::string stored_plan_key(const ConvKey& key, int64_t reserved_bytes) {
  return describe_values(key) + " deterministic=" + std::to_string(key.deterministic) +
         " search=" + std::to_string(static_cast<int64_t>(key.search)) + " reserved=" + std::to_string(reserved_bytes) +
         describe_machine(key);
}

std::string stored_check_key(const ConvKey& key) {
  return "check 2 of " + describe_values(key) + describe_machine(key);
}

}  // namespace jaxgrad
