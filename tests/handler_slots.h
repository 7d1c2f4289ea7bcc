/* Handlers that XLA calls by other functions: each goes through `call`, which the file that includes this one defines.
 */
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

static XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame);

/* Runs a handler with a stream and with scratch memory from these functions. */
static XLA_FFI_Error* call_with(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame, XLA_FFI_Stream_Get* get_stream,
                                XLA_FFI_DeviceMemory_Allocate* allocate, XLA_FFI_DeviceMemory_Free* release) {
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = get_stream;
  api.XLA_FFI_DeviceMemory_Allocate = allocate;
  api.XLA_FFI_DeviceMemory_Free = release;
  const XLA_FFI_Api* given = frame->api;
  frame->api = &api;
  XLA_FFI_Error* error = handler(frame);
  frame->api = given;
  return error;
}

#define SLOT(n)                        \
  static XLA_FFI_Handler* handler_##n; \
  static XLA_FFI_Error* slot_##n(XLA_FFI_CallFrame* frame) { return call(handler_##n, frame); }
#define EVERY_SLOT(X) \
  X(0)                \
  X(1)                \
  X(2)                \
  X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)
EVERY_SLOT(SLOT)

#define HANDLER_OF(n) &handler_##n,
#define CALL_OF(n) slot_##n,

/* Returns a handler that runs `handler` by `call`. At most 24. */
XLA_FFI_Handler* handler_through_call(XLA_FFI_Handler* handler) {
  XLA_FFI_Handler** const slots[] = {EVERY_SLOT(HANDLER_OF)};
  XLA_FFI_Handler* const calls[] = {EVERY_SLOT(CALL_OF)};
  for (unsigned i = 0; i < sizeof calls / sizeof *calls; ++i)
    if (*slots[i] == NULL) return *slots[i] = handler, calls[i];
  abort();
}
