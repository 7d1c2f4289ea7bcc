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
SLOT(0)
SLOT(1)
SLOT(2)
SLOT(3)
SLOT(4)
SLOT(5)
SLOT(6)
SLOT(7)
SLOT(8)
SLOT(9)

/* Returns a handler that runs `handler` by `call`. At most ten. */
XLA_FFI_Handler* handler_through_call(XLA_FFI_Handler* handler) {
  XLA_FFI_Handler** const slots[] = {&handler_0, &handler_1, &handler_2, &handler_3, &handler_4,
                                     &handler_5, &handler_6, &handler_7, &handler_8, &handler_9};
  XLA_FFI_Handler* const calls[] = {slot_0, slot_1, slot_2, slot_3, slot_4, slot_5, slot_6, slot_7, slot_8, slot_9};
  for (int i = 0; i < 10; ++i)
    if (*slots[i] == NULL) return *slots[i] = handler, calls[i];
  abort();
}
