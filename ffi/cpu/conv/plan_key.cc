#include "cpu/conv/plan_key.h"

namespace jaxgrad {

bool ConvKey::operator==(const ConvKey& o) const {
  return ConvProblem::operator==(o) && type == o.type && has_bias == o.has_bias && threads == o.threads &&
         one_of_several == o.one_of_several;
}

size_t ConvKeyHash::operator()(const ConvKey& key) const {
  Hash hash;
  hash.mix(static_cast<const ConvProblem&>(key));
  hash.mix(static_cast<int64_t>(key.type));
  hash.mix(key.has_bias);
  hash.mix(key.threads);
  hash.mix(key.one_of_several);
  return hash.value();
}

}  // namespace jaxgrad
