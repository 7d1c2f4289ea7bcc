#include "cuda/cudnn_conv/execution.h"

#include <array>
#include <utility>

namespace jaxgrad {

using cudnn::api;
using cudnn::Descriptor;

ExecutionPlan build_execution_plan(const ConvCandidate& candidate, int device, bool capturing) {
  for (int attempts = 2;;) {
    const cudnn::Handle handle(device);
    try {
      Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle.get())
          .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, candidate.config)
          .finalize();
      const int64_t workspace_bytes = plan.integer(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
      return {std::move(plan), workspace_bytes};
    } catch (const cudnn::Error& error) {
      if (!capturing) handle.check_device(error);
      if (cudnn::is_unsupported(error) || --attempts == 0) throw;
    }
  }
}

void execute(const Descriptor& plan, const cudnn::Handle& handle, const ConvPointers& pointers, void* workspace) {
  constexpr std::array<int64_t, 4> ids = {kXId, kWId, kYId, kBiasId};
  const std::array<void*, 4> data = {pointers.x, pointers.w, pointers.y, pointers.bias};
  const int64_t count = pointers.bias == nullptr ? 3 : 4;
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids.data(), count)
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, data.data(), count)
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &workspace, 1)
      .finalize();
  JAXGRAD_CUDNN(api().cudnnBackendExecute(handle.get(), plan.get(), pack.get()));
}

}  // namespace jaxgrad
