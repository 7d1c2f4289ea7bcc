#include "common/handler.h"

#include <exception>
#include <new>
#include <string>

#include "common/errors.h"

namespace jaxgrad {
namespace {

XLA_FFI_Error* make_error(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.errc = code;
  args.message = message;
  return frame->api->XLA_FFI_Error_Create(&args);
}

XLA_FFI_Error* make_error(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* target,
                          const char* reason) {
  try {
    return make_error(frame, code, (std::string(target) + ": " + reason).c_str());
  } catch (const std::bad_alloc&) {
    return make_error(frame, code, target);
  }
}

}  // namespace

XLA_FFI_Error* call_handler(const char* target, XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) noexcept {
  try {
    return handler(frame);
  } catch (const MissingLibrary& error) {
    return make_error(frame, XLA_FFI_Error_Code_FAILED_PRECONDITION, target, error.what());
  } catch (const OutOfMemory& error) {
    return make_error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, target, error.what());
  } catch (const std::bad_alloc&) {
    return make_error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, target, "out of host memory");
  } catch (const std::exception& error) {
    return make_error(frame, XLA_FFI_Error_Code_INTERNAL, target, error.what());
  } catch (...) {
    return make_error(frame, XLA_FFI_Error_Code_INTERNAL, target, "an exception that is no std::exception");
  }
}

}  // namespace jaxgrad
