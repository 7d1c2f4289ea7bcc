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

CUfunction Module::function(const char* name, int64_t shared_bytes) const {
  const RelaxedCapture relaxed;
  CUfunction found = nullptr;
  JAXGRAD_DRIVER(api().cuModuleGetFunction(&found, module_, name));
  if (shared_bytes > 0)
    JAXGRAD_DRIVER(api().cuFuncSetAttribute(found, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                            static_cast<int>(shared_bytes)));
  return found;
}

int resident_blocks(CUfunction function, int64_t threads, int64_t shared_bytes) {
  int blocks = 0;
  JAXGRAD_DRIVER(api().cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, static_cast<int>(threads),
                                                                   static_cast<size_t>(shared_bytes)));
  return blocks;
}

}  // namespace jaxgrad::driver
