/* Runs the handlers of the CUDA module in programs for the CPU, with the libraries of fake_cuda.c: gives them a stream
   and scratch memory, which XLA has for programs on a GPU only. */
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

static XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) { return args->stream = (void*)1, NULL; }

static XLA_FFI_Error_Create* create_error;
static size_t scratch_bytes, scratch_limit = (size_t)1 << 40;

static XLA_FFI_Error* allocate(XLA_FFI_DeviceMemory_Allocate_Args* args) {
  XLA_FFI_Error_Create_Args full = {sizeof full, NULL, "no memory", XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  if (args->size > scratch_limit) return create_error(&full);
  scratch_bytes += args->size;
  args->data = aligned_alloc(256, (args->size + 255) / 256 * 256);
  return NULL;
}

static XLA_FFI_Error* release(XLA_FFI_DeviceMemory_Free_Args* args) { return free(args->data), NULL; }

static XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  XLA_FFI_Api api = *frame->api;
  create_error = api.XLA_FFI_Error_Create;
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

/* Returns a handler for programs on the CPU that calls `handler`. At most ten. */
XLA_FFI_Handler* fake_gpu_handler(XLA_FFI_Handler* handler) {
  XLA_FFI_Handler** const slots[] = {&handler_0, &handler_1, &handler_2, &handler_3, &handler_4,
                                     &handler_5, &handler_6, &handler_7, &handler_8, &handler_9};
  XLA_FFI_Handler* const calls[] = {slot_0, slot_1, slot_2, slot_3, slot_4, slot_5, slot_6, slot_7, slot_8, slot_9};
  for (int i = 0; i < 10; ++i)
    if (*slots[i] == NULL) return *slots[i] = handler, calls[i];
  abort();
}

size_t fake_scratch_bytes(void) { return scratch_bytes; }
void fake_scratch_limit(size_t bytes) { scratch_limit = bytes; }
