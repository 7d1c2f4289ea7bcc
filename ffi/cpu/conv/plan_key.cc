#include "cpu/conv/plan_key.h"

namespace jaxgrad {

bool ConvKey::operator==(const ConvKey& o) const {
  return ConvProblem::operator==(o) && type == o.type && has_bias == o.has_bias && threads == o.threads;
}

size_t ConvKeyHash::operator()(const ConvKey& key) const {
  Hash hash;
  hash.mix(static_cast<const ConvProblem&>(key));
  hash.mix(static_cast<int64_t>(key.type));
  hash.mix(key.has_bias);
  hash.mix(key.threads);
  return hash.value();
}

}  // namespace jaxgrad
