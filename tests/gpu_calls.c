/* Runs the handlers of the CUDA module on a GPU in programs for the CPU: compute-sanitizer cannot watch the processes
   in which JAX uses a GPU. Operands and results are copied between the host and memory of the GPU that has exactly
   their sizes. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "handler_slots.h"
#include "xla/ffi/api/c_api.h"

typedef unsigned long long Pointer; /* to memory of the GPU */
int cuCtxPopCurrent_v2(void** context);
int cuCtxPushCurrent_v2(void* context);
int cuDeviceGet(int* device, int ordinal);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuInit(unsigned flags);
int cuMemAlloc_v2(Pointer* pointer, size_t bytes);
int cuMemFree_v2(Pointer pointer);
int cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, void* stream);
int cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes, void* stream);
int cuMemsetD32Async(Pointer pointer, unsigned value, size_t words, void* stream);
int cuStreamCreate(void** stream, unsigned flags);
int cuStreamSynchronize(void* stream);

static void check(int status, const char* what) {
  if (status == 0) return;
  fprintf(stderr, "CUDA: status %d in %s\n", status, what);
  abort();
}
#define CHECK(call) check(call, #call)

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void *context, *stream;
static long calls;
static XLA_FFI_Handler* called[24]; /* as many as handler_slots.h has */
static int num_called;

/* What is freed at the end of the call. XLA may free memory before the work of the stream that uses it has run. */
static struct {
  Pointer pointer;
  size_t bytes;
} allocated[256];
static int num_allocated;

static Pointer allocate(size_t bytes) {
  Pointer pointer = 0;
  if (num_allocated == 256) abort();
  if (bytes > 0) CHECK(cuMemAlloc_v2(&pointer, bytes));
  allocated[num_allocated].pointer = pointer;
  allocated[num_allocated++].bytes = bytes;
  return pointer;
}

/* Leaves NaN in the memory, which is soon allocated again: what a kernel does not write is seldom right then. */
static void free_all(void) {
  for (int i = 0; i < num_allocated; ++i)
    if (allocated[i].bytes >= 4)
      CHECK(cuMemsetD32Async(allocated[i].pointer, 0xFFFFFFFF, allocated[i].bytes / 4, stream));
  CHECK(cuStreamSynchronize(stream));
  for (; num_allocated > 0; --num_allocated)
    if (allocated[num_allocated - 1].bytes > 0) CHECK(cuMemFree_v2(allocated[num_allocated - 1].pointer));
}

static XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) { return args->stream = stream, NULL; }
static XLA_FFI_Error* allocate_scratch(XLA_FFI_DeviceMemory_Allocate_Args* args) {
  return args->data = (void*)(size_t)allocate(args->size), NULL;
}
static XLA_FFI_Error* free_scratch(XLA_FFI_DeviceMemory_Free_Args* args) { return (void)args, NULL; }

static size_t bytes_of(const XLA_FFI_Buffer* buffer) {
  size_t bytes = 0;
  switch (buffer->dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
      bytes = 1;
      break;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      bytes = 2;
      break;
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
      bytes = 4;
      break;
    case XLA_FFI_DataType_F64:
      bytes = 8;
      break;
    default:
      abort();
  }
  for (int64_t i = 0; i < buffer->rank; ++i) bytes *= buffer->dims[i];
  return bytes;
}

static XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE || frame->extension_start != NULL) return handler(frame);
  pthread_mutex_lock(&mutex);
  if (context == NULL) {
    int device = 0;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
  }
  CHECK(cuCtxPushCurrent_v2(context));
  if (stream == NULL) CHECK(cuStreamCreate(&stream, /* non-blocking */ 1));

  const int64_t num_args = frame->args.size, count = num_args + frame->rets.size;
  XLA_FFI_Buffer** buffers = malloc((count + 1) * sizeof *buffers);
  void** on_host = malloc((count + 1) * sizeof *on_host);
  for (int64_t i = 0; i < count; ++i) {
    buffers[i] = i < num_args ? frame->args.args[i] : frame->rets.rets[i - num_args];
    on_host[i] = buffers[i]->data;
    Pointer data = 0;
    for (int64_t j = 0; j < i; ++j) /* a result may be in the memory of an operand */
      if (on_host[j] == on_host[i] && bytes_of(buffers[i]) > 0) data = (size_t)buffers[j]->data;
    if (data == 0) data = allocate(bytes_of(buffers[i]));
    if (i < num_args) CHECK(cuMemcpyHtoDAsync_v2(data, on_host[i], bytes_of(buffers[i]), stream));
    buffers[i]->data = (void*)(size_t)data;
  }

  XLA_FFI_Error* error = call_with(handler, frame, get_stream, allocate_scratch, free_scratch);

  for (int64_t i = num_args; i < count; ++i)
    CHECK(cuMemcpyDtoHAsync_v2(on_host[i], (size_t)buffers[i]->data, bytes_of(buffers[i]), stream));
  free_all();
  for (int64_t i = 0; i < count; ++i) buffers[i]->data = on_host[i];
  free(buffers);
  free(on_host);
  ++calls;
  int place = 0;
  while (place < num_called && called[place] != handler) ++place;
  if (place == num_called) called[num_called++] = handler;
  void* popped = NULL;
  CHECK(cuCtxPopCurrent_v2(&popped));
  pthread_mutex_unlock(&mutex);
  return error;
}

/* Calls that ran on the GPU. */
long num_gpu_calls(void) { return calls; }

/* Handlers that made them. */
int num_handlers(void) { return num_called; }
