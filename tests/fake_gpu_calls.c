/* Runs the handlers of the CUDA module in programs for the CPU, with the libraries of fake_cuda.c: gives them a stream
   and scratch memory, which XLA has for programs on a GPU only. */
#include <stdlib.h>

#include "handler_slots.h"
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
  create_error = frame->api->XLA_FFI_Error_Create;
  return call_with(handler, frame, get_stream, allocate, release);
}

size_t fake_scratch_bytes(void) { return scratch_bytes; }
void fake_scratch_limit(size_t bytes) { scratch_limit = bytes; }
