#include "cuda/runtime/module.h"

#include <utility>

namespace jaxgrad::driver {

Module::Module(std::shared_ptr<const std::string> code) : code_(std::move(code)) {
  const RelaxedCapture relaxed;
  JAXGRAD_DRIVER(api().cuModuleLoadData(&module_, code_->data()));
}

Module::~Module() {
  context_.free([&] { api().cuModuleUnload(module_); });
}

CUfunction Module::function(const char* name) const {
  const RelaxedCapture relaxed;
  CUfunction found = nullptr;
  JAXGRAD_DRIVER(api().cuModuleGetFunction(&found, module_, name));
  return found;
}

}  // namespace jaxgrad::driver
