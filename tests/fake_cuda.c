/* A fake CUDA driver, cuDNN and NVRTC. The memory of the device is that of the host. cuDNN computes convolutions; of
   the kernels that NVRTC compiles, those of reference_kernels.cc are computed and the others are not. Environment
   variables set what the libraries offer and how they fail.

   FAKE_ENGINES: the engines of every convolution, best first: "number:workspace bytes:microseconds", with commas
   between

   FAKE_FUSED: the number of engines, from the first on, that support a fused epilogue; default 0

   FAKE_REFUSES: engines whose plans cannot be built: "number:status", with commas between

   FAKE_WRONG: engines with wrong results: "number:kind", with commas between. Wrong are the last element ("corner"),
   the first feature of the last group ("border"), the feature in the middle ("channel"), or all, by one per cent
   ("factor"); half of the columns are not written ("unwritten"), the first element is not a number ("nan"), and NaN
   becomes 0 ("zero"). With "scribble" the result is right, and the first element of the first operand is overwritten

   FAKE_CREATE: the status of creating a handle

   FAKE_BLOCK: the bytes of the largest block that can be allocated; default 16 MiB

   FAKE_FREE: the bytes of free memory; default unlimited

   FAKE_TOTAL: the bytes of memory; default 12 GiB

   FAKE_CONTEXT: 0 if no context is current on any thread; default 1

   FAKE_VERSION: the version of cuDNN; default 91900

   FAKE_NAME: the name of the device; default "Fake GPU"

   FAKE_NVRTC: the status of compiling a program; default 0

   FAKE_CUBIN: the bytes of a compiled program, which are checked when it is loaded; default 1

   FAKE_DRIVER: the version of the driver; default 13000

   FAKE_MAJOR, FAKE_MINOR: the compute capability; default 9 and 0

   FAKE_MULTIPROCESSORS: the number of multiprocessors; default that of an H200

   FAKE_SHARED: the bytes of shared memory per block; default that of an H200

   FAKE_OCCUPANCY: the blocks that a multiprocessor runs at once, and the clusters that the GPU does; default 1 and 64

   FAKE_REGISTERS: the registers of a thread of a kernel; default 168

   FAKE_BATCH_NORM: the bytes of workspace of batch normalization; without it, cuDNN does not support it. The residual
   needs some bytes of reserve space

   fake_executions() returns the number of executed plans, fake_compilations() that of compiled programs.

   fake_engine() returns the number of the engine that ran last.

   fake_fail(function, n, status): the n-th of the next calls of a function fails; with n = 0, all of them. A null
   function ends that. The variable FAKE_FAIL, "function:n:status", does the same from the start. fake_calls() returns
   the number of calls of the function since then.

   fake_fault(status): from now on the context is lost, and what uses it fails. 0 ends that, which no GPU can.

   fake_fault_at_failure(status): each failure that fake_fail() makes loses the context with this status; 0 ends that.

   fake_capture(1): every stream is captured, until fake_capture(0).

   fake_modules() returns the number of loaded modules, fake_descriptors() that of descriptors of cuDNN.

   fake_waiting(seconds): waiting for an event takes this long. fake_freeing(seconds): so does freeing memory, and
   unloading a module.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kDescriptorEngineConfig = 3, kDescriptorHeuristic = 4, kDescriptorPlan = 5 };
enum {
  kHeuristicMode = 200,
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kConfigEngine = 300,
  kConfigKnobs = 302,
  kConfigWorkspace = 303,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kKnobType = 600,
  kKnobValue = 601,
  kConvDilation = 102,
  kConvStrides = 103,
  kConvPadding = 105,
  kConvSpatial = 106,
  kPointwiseB = 752,
  kPointwiseY = 753,
  kPointwiseFunction = 750,
  kPointwiseMode = 0,
  kGraphOperations = 801,
  kTensorType = 901,
  kTensorSizes = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kPackIds = 1000,
  kPackData = 1001,
  kPackWorkspace = 1003,
  kEngineNumber = 1301
};
enum { kModeFallback = 2 };
enum { kTypeHandle = 0, kTypeBoolean = 2, kTypeInt64 = 3, kTypeDouble = 5, kTypePointer = 6, kTypeDescriptor = 15 };
enum { kFloat = 0, kDouble = 1, kHalf = 2, kBfloat16 = 9 };
enum { kModeRelu = 100 };
/* A convolution has its geometry, w, x and y under neighboring names: x - 2, x - 1, x and x + 1. */
enum { kForwardX = 704, kDataX = 710, kFilterX = 716 };

enum { kMaxAttributes = 24, kMaxValues = 8 };

typedef struct Descriptor {
  int type, mode, engine;   /* the engine's place in FAKE_ENGINES */
  struct Descriptor* graph; /* of a heuristic, an engine configuration and a plan */
  int num_attributes;
  struct {
    int name;
    int64_t count, values[kMaxValues]; /* numbers, or the bits of pointers */
  } attributes[kMaxAttributes];
} Descriptor;

static int executions, compilations, modules, descriptors, capturing, fault, fault_at_failure;
static long last_engine;
static double last_milliseconds, waiting_seconds, freeing_seconds;

int fake_executions(void) { return executions; }
int fake_compilations(void) { return compilations; }
long fake_engine(void) { return last_engine; }
int fake_modules(void) { return modules; }
int fake_descriptors(void) { return descriptors; }
void fake_capture(int on) { capturing = on; }
void fake_fault(int status) { fault = status; }
void fake_fault_at_failure(int status) { fault_at_failure = status; }
void fake_waiting(double seconds) { waiting_seconds = seconds; }
void fake_freeing(double seconds) { freeing_seconds = seconds; }

static struct {
  char function[64];
  long n;
  int status, calls;
} failing = {"?", 0, 0, 0}; /* "?": as FAKE_FAIL says */

void fake_fail(const char* function, long n, int status) {
  snprintf(failing.function, sizeof failing.function, "%s", function == NULL ? "" : function);
  failing.n = n;
  failing.status = status;
  failing.calls = 0;
}
int fake_calls(void) { return failing.calls; }

static int failure(const char* function) {
  if (failing.function[0] == '?') {
    const char* text = getenv("FAKE_FAIL");
    failing.function[0] = 0;
    if (text != NULL) sscanf(text, "%63[^:]:%ld:%d", failing.function, &failing.n, &failing.status);
  }
  if (strcmp(function, failing.function) != 0) return 0;
  const int call = __sync_add_and_fetch(&failing.calls, 1);
  const int status = failing.n == 0 || failing.n == call ? failing.status : 0;
  if (status != 0 && fault_at_failure != 0) fault = fault_at_failure;
  return status;
}

/* The first line of a function that may fail. */
#define MAY_FAIL                                      \
  do {                                                \
    const int injected_status = failure(__func__);    \
    if (injected_status != 0) return injected_status; \
  } while (0)
/* The same of a function of the driver that uses the context, and of one of cuDNN, which has its own status for that.
 */
#define USES_CONTEXT \
  MAY_FAIL;          \
  if (fault != 0) return fault
#define USES_DEVICE \
  MAY_FAIL;         \
  if (fault != 0) return 5000

static unsigned long long number_of(const char* name, unsigned long long otherwise) {
  const char* text = getenv(name);
  return text == NULL ? otherwise : strtoull(text, NULL, 10);
}

static int engines(void) {
  const char* text = getenv("FAKE_ENGINES");
  int count = text != NULL && *text != 0;
  for (; text != NULL && *text != 0; ++text) count += *text == ',';
  return count;
}

static void describe(int place, long* number, long* workspace, double* microseconds) {
  const char* text = getenv("FAKE_ENGINES");
  while (place-- > 0) text = strchr(text, ',') + 1;
  sscanf(text, "%ld:%ld:%lf", number, workspace, microseconds);
}

static int refusal(long number) {
  const char* text = getenv("FAKE_REFUSES");
  while (text != NULL && *text != 0) {
    long refused = 0;
    int status = 0;
    if (sscanf(text, "%ld:%d", &refused, &status) == 2 && refused == number) return status;
    text = strchr(text, ',');
    if (text != NULL) ++text;
  }
  return 0;
}

/* --- cuDNN ---------------------------------------------------------------------------------------------------------
 */

size_t cudnnGetVersion(void) { return number_of("FAKE_VERSION", 91900); }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char* cudnnGetErrorString(int status) { return status / 1000 == 3 ? "NOT_SUPPORTED" : "INTERNAL_ERROR"; }
void cudnnGetLastErrorString(char* message, size_t size) { snprintf(message, size, "the fake says so"); }
int cudnnCreate(void** handle) {
  USES_DEVICE;
  return *handle = (void*)1, (int)number_of("FAKE_CREATE", 0);
}
int cudnnSetStream(void) {
  MAY_FAIL;
  return 0;
}

int cudnnBackendCreateDescriptor(int type, void** descriptor) {
  MAY_FAIL;
  Descriptor* made = calloc(1, sizeof *made);
  made->type = type;
  *descriptor = made;
  __sync_add_and_fetch(&descriptors, 1);
  return 0;
}
int cudnnBackendDestroyDescriptor(void* descriptor) {
  __sync_sub_and_fetch(&descriptors, 1);
  return free(descriptor), 0;
}

static const int64_t* attribute(const Descriptor* d, int name) {
  for (int i = 0; i < d->num_attributes; ++i)
    if (d->attributes[i].name == name) return d->attributes[i].values;
  return NULL;
}
static const Descriptor* descriptor_of(const Descriptor* d, int name) {
  const int64_t* values = attribute(d, name);
  return values == NULL ? NULL : (const Descriptor*)(intptr_t)values[0];
}

int cudnnBackendSetAttribute(Descriptor* d, int name, int type, int64_t count, void* values) {
  MAY_FAIL;
  const int64_t numbers = count < kMaxValues ? count : kMaxValues;
  const int wide = type == kTypeInt64 || type == kTypePointer || type == kTypeDescriptor || type == kTypeHandle;
  const int size = wide || type == kTypeDouble ? 8 : type == kTypeBoolean ? 1 : 4;
  const int at = d->num_attributes++;
  d->attributes[at].name = name;
  d->attributes[at].count = numbers;
  for (int i = 0; i < numbers; ++i) memcpy(&d->attributes[at].values[i], (char*)values + i * size, (size_t)size);
  if (name == kHeuristicMode) d->mode = *(int*)values;
  if (name == kHeuristicGraph) d->graph = *(Descriptor**)values;
  if (name == kPlanConfig) d->engine = (*(Descriptor**)values)->engine, d->graph = (*(Descriptor**)values)->graph;
  return 0;
}

int cudnnBackendFinalize(Descriptor* d) {
  USES_DEVICE;
  if (d->type == kDescriptorHeuristic && d->mode == kModeFallback) return 3000; /* one list is enough */
  if (d->type != kDescriptorPlan) return 0;
  long number = 0, workspace = 0;
  double microseconds = 0;
  describe(d->engine, &number, &workspace, &microseconds);
  return refusal(number);
}

static int64_t num_operations(const Descriptor* graph) {
  for (int i = 0; i < graph->num_attributes; ++i)
    if (graph->attributes[i].name == kGraphOperations) return graph->attributes[i].count;
  return 0;
}

int cudnnBackendGetAttribute(Descriptor* d, int name, int type, int64_t asked, int64_t* count, void* values) {
  (void)type;
  MAY_FAIL;
  *count = 1;
  if (name == kHeuristicResults) {
    *count = num_operations(d->graph) > 1 ? (int64_t)number_of("FAKE_FUSED", 0) : engines();
    for (int i = 0; values != NULL && i < asked && i < *count; ++i)
      ((Descriptor**)values)[i]->engine = i, ((Descriptor**)values)[i]->graph = d->graph;
  } else if (name == kConfigEngine || name == kConfigKnobs) { /* one knob, 7, at the engine's place */
    (*(Descriptor**)values)->engine = d->engine;
  } else if (name == kKnobType) {
    *(int*)values = 7;
  } else if (name == kKnobValue) {
    *(int64_t*)values = d->engine;
  } else if (name == kConfigWorkspace || name == kPlanWorkspace || name == kEngineNumber) {
    long number = 0, workspace = 0;
    double microseconds = 0;
    describe(d->engine, &number, &workspace, &microseconds);
    *(int64_t*)values = name == kEngineNumber ? number : workspace;
  } else {
    *count = 0; /* notes: none */
  }
  return 0;
}

/* An operand with two spatial axes, or three: batch or output features, features, and three axes of which the first may
   be missing. */
typedef struct {
  void* data; /* NULL for intermediate results */
  int type;
  int64_t sizes[5], strides[5];
} Array;

static Array array_of(const Descriptor* tensor, const Descriptor* pack) {
  Array found = {NULL, 0, {1, 1, 1, 1, 1}, {0}};
  const int64_t *sizes = attribute(tensor, kTensorSizes), *strides = attribute(tensor, kTensorStrides);
  int rank = 0;
  for (int i = 0; i < tensor->num_attributes; ++i)
    if (tensor->attributes[i].name == kTensorSizes) rank = (int)tensor->attributes[i].count;
  for (int axis = 0; axis < rank; ++axis) {
    const int to = axis < 2 ? axis : axis + 5 - rank;
    found.sizes[to] = sizes[axis], found.strides[to] = strides[axis];
  }
  found.type = (int)(int32_t)attribute(tensor, kTensorType)[0];
  const int64_t *ids = attribute(pack, kPackIds), *data = attribute(pack, kPackData);
  for (int i = 0; i < 4 && ids[i] != 0; ++i)
    if (ids[i] == attribute(tensor, kTensorId)[0]) found.data = (void*)(intptr_t)data[i];
  return found;
}

static int64_t offset(const Array* array, const int64_t* index) {
  int64_t sum = 0;
  for (int axis = 0; axis < 5; ++axis) sum += index[axis] * array->strides[axis];
  return sum;
}

static double get(const Array* array, int64_t at) {
  switch (array->type) {
    case kFloat:
      return ((float*)array->data)[at];
    case kDouble:
      return ((double*)array->data)[at];
    case kHalf:
      return (double)((_Float16*)array->data)[at];
    default: {
      const uint32_t bits = (uint32_t)((uint16_t*)array->data)[at] << 16;
      float value;
      return memcpy(&value, &bits, 4), value;
    }
  }
}

static void put(const Array* array, int64_t at, double value) {
  switch (array->type) {
    case kFloat:
      ((float*)array->data)[at] = (float)value;
      break;
    case kDouble:
      ((double*)array->data)[at] = value;
      break;
    case kHalf:
      ((_Float16*)array->data)[at] = (_Float16)value;
      break;
    default: {
      const float single = (float)value;
      uint32_t bits;
      memcpy(&bits, &single, 4);
      ((uint16_t*)array->data)[at] = (uint16_t)((bits + (value == value ? 0x7fff + (bits >> 16 & 1) : 0)) >> 16);
    }
  }
}

/* Advances an index; returns 0 after the last one. */
static int next(int64_t* index, const int64_t* sizes, int rank) {
  for (int axis = rank; axis-- > 0;) {
    if (++index[axis] < sizes[axis]) return 1;
    index[axis] = 0;
  }
  return 0;
}

/* How the engine is wrong; empty if it is right. */
static const char* fault_of(long number, char* kind) {
  const char* text = getenv("FAKE_WRONG");
  while (text != NULL && *text != 0) {
    long wrong = 0;
    if (sscanf(text, "%ld:%15[a-z]", &wrong, kind) == 2 && wrong == number) return kind;
    text = strchr(text, ',');
    if (text != NULL) ++text;
  }
  return "";
}

/* Writes a result. `grouped`: its axis of features that the groups divide. */
static void write_result(const Array* result, const double* sums, long number, int grouped, int64_t groups) {
  char kind[16] = "";
  const char* const fault = fault_of(number, kind);
  const int64_t border = result->sizes[grouped] - result->sizes[grouped] / groups;
  int64_t i[5] = {0};
  do {
    int first = 1, last = 1;
    for (int axis = 0; axis < 5; ++axis) {
      first = first && i[axis] == 0;
      last = last && i[axis] == result->sizes[axis] - 1;
    }
    double value = sums[offset(result, i)];
    if (strcmp(fault, "corner") == 0 && last) value += 1;
    if (strcmp(fault, "border") == 0 && i[grouped] == border) value += 1;
    if (strcmp(fault, "channel") == 0 && i[grouped] == result->sizes[grouped] / 2) value += 1;
    if (strcmp(fault, "factor") == 0) value *= 1.01;
    if (strcmp(fault, "nan") == 0 && first) value = 0.0 / 0.0;
    if (strcmp(fault, "zero") == 0 && value != value) value = 0;
    if (strcmp(fault, "unwritten") == 0 && i[4] % 2 == 0) continue;
    put(result, offset(result, i), value);
  } while (next(i, result->sizes, 5));
}

/* One of the three passes: sums y = x w, x = y w or w = x y over all outputs and positions of the window; then the bias
   and relu of the other operations of the graph. */
static void convolve(const Descriptor* graph, const Descriptor* pack, long number) {
  const int64_t* const operations = attribute(graph, kGraphOperations);
  const Descriptor* const operation = (const Descriptor*)(intptr_t)operations[0];
  const int pass = attribute(operation, kForwardX) != NULL ? kForwardX
                   : attribute(operation, kDataX) != NULL  ? kDataX
                                                           : kFilterX;
  const Array x = array_of(descriptor_of(operation, pass), pack);
  const Array w = array_of(descriptor_of(operation, pass - 1), pack);
  const Array y = array_of(descriptor_of(operation, pass + 1), pack);
  const Descriptor* conv = descriptor_of(operation, pass - 2);
  const int n = (int)attribute(conv, kConvSpatial)[0];
  const int64_t *strides = attribute(conv, kConvStrides), *padding = attribute(conv, kConvPadding);
  const int64_t* dilation = attribute(conv, kConvDilation);
  const int grouped = pass == kFilterX ? 0 : 1;
  Array result = pass == kForwardX ? y : pass == kDataX ? x : w;
  int64_t count = 1;
  for (int axis = 0; axis < 5; ++axis) count *= result.sizes[axis];
  double* const sums = calloc((size_t)count, sizeof *sums); /* at the offset of each element */
  const int64_t groups = x.sizes[1] / w.sizes[1];
  int64_t o[5] = {0}; /* an element of y */
  do {
    int64_t k[5] = {0}; /* an element of w */
    do {
      int64_t at_w[5] = {o[1], k[1], k[2], k[3], k[4]};
      int64_t at_x[5] = {o[0], o[1] / (w.sizes[0] / groups) * w.sizes[1] + k[1], o[2], o[3], o[4]};
      int inside = 1;
      for (int axis = 5 - n; axis < 5; ++axis) {
        const int s = axis - 5 + n;
        at_x[axis] = o[axis] * strides[s] - padding[s] + k[axis] * dilation[s];
        inside = inside && at_x[axis] >= 0 && at_x[axis] < x.sizes[axis];
      }
      if (!inside) continue;
      const int64_t of_x = offset(&x, at_x), of_w = offset(&w, at_w), of_y = offset(&y, o);
      if (pass == kForwardX) sums[of_y] += get(&x, of_x) * get(&w, of_w);
      if (pass == kDataX) sums[of_x] += get(&y, of_y) * get(&w, of_w);
      if (pass == kFilterX) sums[of_w] += get(&x, of_x) * get(&y, of_y);
    } while (next(k + 1, w.sizes + 1, 4));
  } while (next(o, y.sizes, 5));
  for (int i = 1; i < num_operations(graph); ++i) {
    const Descriptor* const pointwise = (const Descriptor*)(intptr_t)operations[i];
    const int is_relu =
        (int32_t)attribute(descriptor_of(pointwise, kPointwiseFunction), kPointwiseMode)[0] == kModeRelu;
    int64_t at[5] = {0};
    do {
      double* const value = &sums[offset(&result, at)];
      if (is_relu) {
        *value = *value < 0 ? 0 : *value;
      } else {
        const Array bias = array_of(descriptor_of(pointwise, kPointwiseB), pack);
        *value += get(&bias, at[1]);
      }
    } while (next(at, result.sizes, 5));
    const Array written = array_of(descriptor_of(pointwise, kPointwiseY), pack);
    result.data = written.data, result.type = written.type;
  }
  write_result(&result, sums, number, grouped, groups);
  char kind[16] = "";
  if (strcmp(fault_of(number, kind), "scribble") == 0) {
    const Array operand = pass == kDataX ? y : x;
    put(&operand, 0, 100);
  }
  free(sums);
}

int cudnnBackendExecute(void* handle, Descriptor* plan, Descriptor* pack) {
  (void)handle;
  USES_DEVICE;
  long number = 0, workspace = 0;
  double microseconds = 0;
  describe(plan->engine, &number, &workspace, &microseconds);
  last_milliseconds = microseconds / 1000;
  last_engine = number;
  __sync_add_and_fetch(&executions, 1);
  convolve(plan->graph, pack, number);
  memset((void*)(intptr_t)attribute(pack, kPackWorkspace)[0], 0xff, (size_t)workspace);
  return 0;
}

/* --- cuDNN: batch normalization ------------------------------------------------------------------------------------
 */

enum { kActivation = 1, kAddActivation = 2, kReserveBytes = 64 };

/* Batch, channels and two spatial axes. */
typedef struct {
  int type, sizes[4], strides[4];
} Tensor;

static int create(size_t bytes, void** descriptor) {
  __sync_add_and_fetch(&descriptors, 1);
  return *descriptor = calloc(1, bytes), 0;
}
int cudnnCreateTensorDescriptor(void** descriptor) {
  MAY_FAIL;
  return create(sizeof(Tensor), descriptor);
}
int cudnnCreateActivationDescriptor(void** descriptor) {
  MAY_FAIL;
  return create(1, descriptor);
}
int cudnnDestroyTensorDescriptor(void* descriptor) { return cudnnBackendDestroyDescriptor(descriptor); }
int cudnnDestroyActivationDescriptor(void* descriptor) { return cudnnBackendDestroyDescriptor(descriptor); }
int cudnnSetActivationDescriptor(void) {
  MAY_FAIL;
  return 0;
}
int cudnnSetTensor4dDescriptorEx(Tensor* tensor, int type, int n, int c, int h, int w, int of_n, int of_c, int of_h,
                                 int of_w) {
  MAY_FAIL;
  *tensor = (Tensor){type, {n, c, h, w}, {of_n, of_c, of_h, of_w}};
  return 0;
}
int cudnnDeriveBNTensorDescriptor(Tensor* channels, const Tensor* x, int mode) {
  (void)mode;
  MAY_FAIL;
  *channels = (Tensor){x->type == kDouble ? kDouble : kFloat, {1, x->sizes[1], 1, 1}, {x->sizes[1], 1, 1, 1}};
  return 0;
}

static int batch_norm_bytes(size_t* bytes) {
  *bytes = number_of("FAKE_BATCH_NORM", 0);
  return *bytes == 0 ? 3000 : 0;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void* handle, int mode, int operation, void* x, void* z,
                                                             void* y, void* channels, void* activation, size_t* bytes) {
  (void)handle, (void)mode, (void)operation, (void)x, (void)z, (void)y, (void)channels, (void)activation;
  MAY_FAIL;
  return batch_norm_bytes(bytes);
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void* handle, int mode, int operation, void* x, void* y, void* dy,
                                                      void* dz, void* dx, void* channels, void* activation,
                                                      size_t* bytes) {
  (void)handle, (void)mode, (void)operation, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)channels;
  (void)activation;
  MAY_FAIL;
  return batch_norm_bytes(bytes);
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void* handle, int mode, int operation, void* activation,
                                                         void* x, size_t* bytes) {
  (void)handle, (void)mode, (void)activation, (void)x;
  MAY_FAIL;
  return *bytes = operation == kAddActivation ? kReserveBytes : 0, 0;
}

/* An array that a descriptor describes; it has a size of 1 for the last axis. */
static Array described(const Tensor* tensor, const void* data) {
  Array found = {(void*)(uintptr_t)data, tensor->type, {1, 1, 1, 1, 1}, {0}};
  for (int axis = 0; axis < 4; ++axis)
    found.sizes[axis] = tensor->sizes[axis], found.strides[axis] = tensor->strides[axis];
  return found;
}

/* Moves to the next element of a channel; returns 0 after the last one. */
static int next_of_channel(int64_t* index, const Array* array) {
  const int64_t sizes[5] = {array->sizes[0], 1, array->sizes[2], array->sizes[3], 1};
  const int64_t c = index[1];
  index[1] = 0;
  const int moved = next(index, sizes, 5);
  return index[1] = c, moved;
}

static double root(double value) { /* without the library of mathematics */
  double found = value > 1 ? value : 1;
  for (int i = 0; i < 200; ++i) found = (found + value / found) / 2;
  return found;
}

int cudnnBatchNormalizationForwardTrainingEx(void* handle, int mode, int operation, void* one, void* zero, Tensor* xd,
                                             void* x, Tensor* zd, void* z, Tensor* yd, void* y, Tensor* channels,
                                             void* scale, void* bias, double factor, void* running_mean,
                                             void* running_var, double epsilon, void* mean, void* rstd,
                                             void* activation, void* workspace, size_t bytes, void* reserve,
                                             size_t reserve_bytes) {
  (void)handle, (void)mode, (void)one, (void)zero, (void)factor;
  USES_DEVICE;
  if ((activation != NULL) != (operation != 0) || (zd != NULL) != (operation == kAddActivation)) return 2000;
  if (operation == kAddActivation && reserve_bytes < kReserveBytes) return 2000;
  const Array in = described(xd, x), out = described(yd, y), residual = described(zd == NULL ? xd : zd, z);
  const Array scales = described(channels, scale), biases = described(channels, bias);
  const Array means = described(channels, mean), rstds = described(channels, rstd);
  const Array running_means = described(channels, running_mean), running_vars = described(channels, running_var);
  const double count = (double)in.sizes[0] * (double)in.sizes[2] * (double)in.sizes[3];
  for (int64_t c = 0; c < in.sizes[1]; ++c) {
    double sum = 0, squares = 0;
    int64_t i[5] = {0, c};
    do sum += get(&in, offset(&in, i));
    while (next_of_channel(i, &in));
    const double average = sum / count;
    do squares += (get(&in, offset(&in, i)) - average) * (get(&in, offset(&in, i)) - average);
    while (next_of_channel(i, &in));
    const double inverse = 1 / root(squares / count + epsilon);
    do {
      double value = (get(&in, offset(&in, i)) - average) * inverse * get(&scales, c) + get(&biases, c);
      if (zd != NULL) value += get(&residual, offset(&residual, i));
      put(&out, offset(&out, i), operation != 0 && value < 0 ? 0 : value);
    } while (next_of_channel(i, &in));
    put(&means, c, average), put(&rstds, c, inverse);
    put(&running_means, c, average), put(&running_vars, c, squares / (count > 1 ? count - 1 : 1));
  }
  memset(workspace, 0xff, bytes);
  memset(reserve, 0xff, reserve_bytes);
  return 0;
}

int cudnnBatchNormalizationBackwardEx(void* handle, int mode, int operation, void* one, void* zero, void* one_too,
                                      void* zero_too, Tensor* xd, void* x, Tensor* yd, void* y, Tensor* dyd, void* dy,
                                      Tensor* dzd, void* dz, Tensor* dxd, void* dx, Tensor* channels, void* scale,
                                      void* bias, void* dscale, void* dbias, double epsilon, void* mean, void* rstd,
                                      void* activation, void* workspace, size_t bytes, void* reserve,
                                      size_t reserve_bytes) {
  (void)handle, (void)mode, (void)one, (void)zero, (void)one_too, (void)zero_too, (void)yd, (void)y, (void)dz;
  (void)epsilon, (void)reserve, (void)reserve_bytes;
  USES_DEVICE;
  if ((activation != NULL) != (operation != 0) || dzd != NULL || operation == kAddActivation) return 2000;
  const Array in = described(xd, x), gradient = described(dyd, dy), out = described(dxd, dx);
  const Array scales = described(channels, scale), biases = described(channels, bias);
  const Array means = described(channels, mean), rstds = described(channels, rstd);
  const Array dscales = described(channels, dscale), dbiases = described(channels, dbias);
  const double count = (double)in.sizes[0] * (double)in.sizes[2] * (double)in.sizes[3];
  for (int64_t c = 0; c < in.sizes[1]; ++c) {
    double sum = 0, product = 0; /* of the gradients, and of the gradients times the normalized elements */
    for (int pass = 0; pass < 2; ++pass) {
      int64_t i[5] = {0, c};
      do {
        const double normalized = (get(&in, offset(&in, i)) - get(&means, c)) * get(&rstds, c);
        double g = get(&gradient, offset(&gradient, i));
        if (operation == kActivation && normalized * get(&scales, c) + get(&biases, c) <= 0) g = 0;
        if (pass == 0) {
          sum += g, product += g * normalized;
        } else {
          const double centered = g - sum / count - normalized * product / count;
          put(&out, offset(&out, i), centered * get(&rstds, c) * get(&scales, c));
        }
      } while (next_of_channel(i, &in));
    }
    put(&dscales, c, product), put(&dbiases, c, sum);
  }
  return memset(workspace, 0xff, bytes), 0;
}

/* --- NVRTC -------------------------------------------------------------------------------------------------------
 */

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
const char* nvrtcGetErrorString(int status) { return status == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
int nvrtcCreateProgram(void** program) {
  MAY_FAIL;
  return *program = (void*)1, 0;
}
int nvrtcDestroyProgram(void) { return 0; }
int nvrtcCompileProgram(void) {
  MAY_FAIL;
  return ++compilations, (int)number_of("FAKE_NVRTC", 0);
}
int nvrtcGetProgramLogSize(void* program, size_t* size) { return (void)program, *size = 19, 0; }
int nvrtcGetProgramLog(void* program, char* log) { return (void)program, strcpy(log, "the fake has a log"), 0; }
static char code_at(long i) { return (char)(i * 7); } /* all bytes, among them ends of lines and of strings */
int nvrtcGetCUBINSize(void* program, size_t* size) {
  MAY_FAIL;
  return (void)program, *size = (size_t)number_of("FAKE_CUBIN", 1), 0;
}
int nvrtcGetCUBIN(void* program, char* code) {
  MAY_FAIL;
  const long bytes = number_of("FAKE_CUBIN", 1);
  for (long i = 0; i < bytes; ++i) code[i] = code_at(i);
  return (void)program, 0;
}

/* --- the driver ----------------------------------------------------------------------------------------------------
 */

int cuInit(void) {
  MAY_FAIL;
  return 0;
}
int cuDriverGetVersion(int* version) {
  MAY_FAIL;
  return *version = (int)number_of("FAKE_DRIVER", 13000), 0;
}
int cuDeviceGet(int* device, int ordinal) {
  MAY_FAIL;
  return *device = ordinal, 0;
}
int cuDeviceGetAttribute(int* value, int attribute) {
  MAY_FAIL;
  switch (attribute) {
    case 16: /* multiprocessors */
      return *value = (int)number_of("FAKE_MULTIPROCESSORS", 132), 0;
    case 75: /* compute capability: major */
      return *value = (int)number_of("FAKE_MAJOR", 9), 0;
    case 76: /* and minor */
      return *value = (int)number_of("FAKE_MINOR", 0), 0;
    case 81: /* bytes of shared memory of a multiprocessor */
      return *value = 233472, 0;
    case 97: /* and of a block */
      return *value = (int)number_of("FAKE_SHARED", 232448), 0;
    default:
      return *value = attribute, 0;
  }
}
int cuDeviceGetName(char* name, int size) {
  MAY_FAIL;
  const char* given = getenv("FAKE_NAME");
  return snprintf(name, (size_t)size, "%s", given == NULL ? "Fake GPU" : given), 0;
}
int cuDeviceTotalMem_v2(size_t* bytes) {
  MAY_FAIL;
  return *bytes = number_of("FAKE_TOTAL", 12ull << 30), 0;
}
int cuDevicePrimaryCtxRetain(void** context) {
  MAY_FAIL;
  return *context = (void*)1, 0;
}
int cuCtxGetCurrent(void** context) {
  MAY_FAIL;
  return *context = (void*)(uintptr_t)number_of("FAKE_CONTEXT", 1), 0;
}
int cuCtxGetDevice(int* device) {
  MAY_FAIL;
  return *device = 0, 0;
}
int cuCtxPushCurrent_v2(void) {
  MAY_FAIL;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) { return *context = (void*)1, 0; }
int cuStreamCreate(void** stream) {
  USES_CONTEXT;
  return *stream = (void*)1, 0;
}
int cuStreamDestroy_v2(void) { return 0; }
int cuStreamGetCtx(void* stream, void** context) {
  (void)stream;
  MAY_FAIL;
  return *context = (void*)1, 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  USES_CONTEXT;
  return *status = capturing, 0;
}
int cuStreamQuery(void) {
  USES_CONTEXT;
  if (capturing) abort(); /* this would end the capture, if the context is not lost */
  return 600;             /* CUDA_ERROR_NOT_READY: other work is on its way */
}
int cuStreamSynchronize(void) {
  USES_CONTEXT;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(void) {
  MAY_FAIL;
  return 0;
}
int cuEventCreate(void** event) {
  USES_CONTEXT;
  return *event = (void*)1, 0;
}
int cuEventDestroy_v2(void) { return 0; }
int cuEventRecord(void) {
  USES_CONTEXT;
  return 0;
}
int cuEventSynchronize(void) {
  USES_CONTEXT;
  usleep((useconds_t)(waiting_seconds * 1e6));
  return 0;
}
int cuEventElapsedTime(float* milliseconds) {
  USES_CONTEXT;
  return *milliseconds = (float)last_milliseconds, 0;
}
int cuEventElapsedTime_v2(float* milliseconds) { return cuEventElapsedTime(milliseconds); }
int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  USES_CONTEXT;
  if (bytes > number_of("FAKE_BLOCK", 16 << 20)) return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
  return *pointer = (uintptr_t)malloc(bytes), 0;
}
int cuMemGetInfo_v2(size_t* available, size_t* total) {
  MAY_FAIL;
  *available = number_of("FAKE_FREE", 1ull << 30);
  return *total = number_of("FAKE_TOTAL", 12ull << 30), 0;
}
int cuModuleLoadData(void** module, const char* code) {
  USES_CONTEXT;
  const long bytes = number_of("FAKE_CUBIN", 1);
  for (long i = 0; i < bytes; ++i)
    if (code[i] != code_at(i)) return 200; /* CUDA_ERROR_INVALID_IMAGE */
  __sync_add_and_fetch(&modules, 1);
  return *module = (void*)1, 0;
}
int cuModuleUnload(void) {
  usleep((useconds_t)(freeing_seconds * 1e6));
  return __sync_sub_and_fetch(&modules, 1), 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module;
  MAY_FAIL;
  char symbol[64];
  snprintf(symbol, sizeof symbol, "play_%s", name);
  void* const kernels = dlopen("libfake_kernels.so", RTLD_NOW);
  return *function = kernels == NULL ? NULL : dlsym(kernels, symbol), 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  (void)function;
  MAY_FAIL;
  if (attribute != 4) return 1; /* CU_FUNC_ATTRIBUTE_NUM_REGS, CUDA_ERROR_INVALID_VALUE */
  return *value = (int)number_of("FAKE_REGISTERS", 168), 0;
}
int cuFuncSetAttribute(void) {
  MAY_FAIL;
  return 0;
}
/* Kernels have one thread per block here, which they must work with. */
int cuLaunchKernel(void (*kernel)(unsigned, unsigned, void**), unsigned blocks, unsigned y, unsigned z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                   void** arguments) {
  (void)y, (void)z, (void)block_x, (void)block_y, (void)block_z, (void)shared_bytes, (void)stream;
  static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
  USES_CONTEXT;
  if (kernel == NULL) return 0;
  pthread_mutex_lock(&one_at_a_time);
  kernel(blocks, 1, arguments);
  pthread_mutex_unlock(&one_at_a_time);
  return 0;
}
/* Kernels of clusters are not computed. */
int cuLaunchKernelEx(const void* config, void (*kernel)(void)) {
  (void)config;
  USES_CONTEXT;
  return kernel == NULL ? 0 : 1; /* CUDA_ERROR_INVALID_VALUE */
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(void), int threads, size_t shared_bytes) {
  (void)kernel, (void)threads, (void)shared_bytes;
  USES_CONTEXT;
  return *blocks = (int)number_of("FAKE_OCCUPANCY", 1), 0;
}
int cuOccupancyMaxActiveClusters(int* clusters, void (*kernel)(void), const void* config) {
  (void)kernel, (void)config;
  USES_CONTEXT;
  return *clusters = (int)number_of("FAKE_OCCUPANCY", 64), 0;
}
int cuMemFree_v2(unsigned long long pointer) {
  usleep((useconds_t)(freeing_seconds * 1e6));
  return free((void*)(uintptr_t)pointer), 0;
}
int cuMemsetD32Async(unsigned long long pointer, unsigned value, size_t words) {
  USES_CONTEXT;
  for (size_t i = 0; i < words; ++i) ((unsigned*)(uintptr_t)pointer)[i] = value;
  return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes) {
  USES_CONTEXT;
  return memcpy((void*)(uintptr_t)to, from, bytes), 0;
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes) {
  USES_CONTEXT;
  return memcpy(to, (void*)(uintptr_t)from, bytes), 0;
}
int cuGetErrorString(int status, const char** text) {
  return *text = status == 2 ? "out of memory" : status == 700 ? "an illegal memory access" : "failed", 0;
}
