/* A fake CUDA driver, cuDNN and NVRTC that compute nothing. Environment variables set what they offer and how they
   fail.

   FAKE_ENGINES: the engines of every convolution, best first: "number:workspace bytes:microseconds", with commas
   between

   FAKE_FUSED: the number of engines, from the first on, that support a fused epilogue; default 0

   FAKE_REFUSES: engines whose plans cannot be built: "number:status", with commas between

   FAKE_CREATE: the status of creating a handle

   FAKE_BLOCK: the bytes of the largest block that can be allocated; default unlimited

   FAKE_FREE: the bytes of free memory; default unlimited

   FAKE_TOTAL: the bytes of memory; default 12 GiB

   FAKE_VERSION: the version of cuDNN; default 91900

   FAKE_NAME: the name of the device; default "Fake GPU"

   FAKE_NVRTC: the status of compiling a program; default 0

   FAKE_DRIVER: the version of the driver; default 13000

   FAKE_SHARED: the bytes of shared memory per block; default that of an H200

   fake_executions() returns the number of executed plans, fake_compilations() that of compiled programs.
*/
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
  kGraphOperations = 801,
  kEngineNumber = 1301
};
enum { kModeFallback = 2 };

typedef struct {
  int type, mode, engine; /* the engine's place in FAKE_ENGINES */
  int64_t operations;     /* of a graph */
} Descriptor;

static int executions, compilations;
static double last_milliseconds;

int fake_executions(void) { return executions; }
int fake_compilations(void) { return compilations; }

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
int cudnnCreate(void** handle) { return *handle = (void*)1, (int)number_of("FAKE_CREATE", 0); }
int cudnnSetStream(void) { return 0; }

/* Batch normalisation, which this cuDNN has none of. */
#define NOT_SUPPORTED(name) \
  int name(void) { return 3000; }
NOT_SUPPORTED(cudnnBatchNormalizationBackwardEx)
NOT_SUPPORTED(cudnnBatchNormalizationForwardTrainingEx)
NOT_SUPPORTED(cudnnCreateActivationDescriptor)
NOT_SUPPORTED(cudnnCreateTensorDescriptor)
NOT_SUPPORTED(cudnnDeriveBNTensorDescriptor)
NOT_SUPPORTED(cudnnDestroyActivationDescriptor)
NOT_SUPPORTED(cudnnDestroyTensorDescriptor)
NOT_SUPPORTED(cudnnGetBatchNormalizationBackwardExWorkspaceSize)
NOT_SUPPORTED(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize)
NOT_SUPPORTED(cudnnGetBatchNormalizationTrainingExReserveSpaceSize)
NOT_SUPPORTED(cudnnSetActivationDescriptor)
NOT_SUPPORTED(cudnnSetTensor4dDescriptorEx)

int cudnnBackendCreateDescriptor(int type, void** descriptor) {
  Descriptor* made = calloc(1, sizeof *made);
  made->type = type;
  *descriptor = made;
  return 0;
}
int cudnnBackendDestroyDescriptor(void* descriptor) { return free(descriptor), 0; }

int cudnnBackendSetAttribute(Descriptor* d, int name, int type, int64_t count, void* values) {
  (void)type;
  if (name == kHeuristicMode) d->mode = *(int*)values;
  if (name == kGraphOperations) d->operations = count;
  if (name == kHeuristicGraph) d->operations = (*(Descriptor**)values)->operations;
  if (name == kPlanConfig) d->engine = (*(Descriptor**)values)->engine;
  return 0;
}

int cudnnBackendFinalize(Descriptor* d) {
  if (d->type == kDescriptorHeuristic && d->mode == kModeFallback) return 3000; /* one list is enough */
  if (d->type != kDescriptorPlan) return 0;
  long number = 0, workspace = 0;
  double microseconds = 0;
  describe(d->engine, &number, &workspace, &microseconds);
  return refusal(number);
}

int cudnnBackendGetAttribute(Descriptor* d, int name, int type, int64_t asked, int64_t* count, void* values) {
  (void)type;
  *count = 1;
  if (name == kHeuristicResults) {
    *count = d->operations > 1 ? (int64_t)number_of("FAKE_FUSED", 0) : engines();
    for (int i = 0; values != NULL && i < asked && i < *count; ++i) ((Descriptor**)values)[i]->engine = i;
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

int cudnnBackendExecute(void* handle, Descriptor* plan, void* pack) {
  (void)handle, (void)pack;
  long number = 0, workspace = 0;
  double microseconds = 0;
  describe(plan->engine, &number, &workspace, &microseconds);
  last_milliseconds = microseconds / 1000;
  ++executions;
  return 0;
}

/* --- NVRTC -------------------------------------------------------------------------------------------------------
 */

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
const char* nvrtcGetErrorString(int status) { return status == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
int nvrtcCreateProgram(void** program) { return *program = (void*)1, 0; }
int nvrtcDestroyProgram(void) { return 0; }
int nvrtcCompileProgram(void) { return ++compilations, (int)number_of("FAKE_NVRTC", 0); }
int nvrtcGetProgramLogSize(void* program, size_t* size) { return (void)program, *size = 19, 0; }
int nvrtcGetProgramLog(void* program, char* log) { return (void)program, strcpy(log, "the fake has a log"), 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) { return (void)program, *size = 1, 0; }
int nvrtcGetCUBIN(void* program, char* code) { return (void)program, *code = 0, 0; }

/* --- the driver ----------------------------------------------------------------------------------------------------
 */

static int zero(void* value, size_t size) { return memset(value, 0, size), 0; }

int cuInit(void) { return 0; }
int cuDriverGetVersion(int* version) { return *version = (int)number_of("FAKE_DRIVER", 13000), 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute) {
  switch (attribute) {
    case 16: /* multiprocessors */
      return *value = 132, 0;
    case 75: /* compute capability: major */
      return *value = 9, 0;
    case 76: /* and minor */
      return *value = 0, 0;
    case 81: /* bytes of shared memory of a multiprocessor */
      return *value = 233472, 0;
    case 97: /* and of a block */
      return *value = (int)number_of("FAKE_SHARED", 232448), 0;
    default:
      return *value = attribute, 0;
  }
}
int cuDeviceGetName(char* name, int size) {
  const char* given = getenv("FAKE_NAME");
  return snprintf(name, (size_t)size, "%s", given == NULL ? "Fake GPU" : given), 0;
}
int cuDeviceTotalMem_v2(size_t* bytes) { return *bytes = number_of("FAKE_TOTAL", 12ull << 30), 0; }
int cuDevicePrimaryCtxRetain(void** context) { return *context = (void*)1, 0; }
int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
int cuCtxGetDevice(int* device) { return zero(device, sizeof *device); }
int cuCtxPushCurrent_v2(void) { return 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = (void*)1, 0; }
int cuStreamCreate(void** stream) { return *stream = (void*)1, 0; }
int cuStreamDestroy_v2(void) { return 0; }
int cuStreamGetCtx(void* stream, void** context) { return (void)stream, *context = (void*)1, 0; }
int cuStreamIsCapturing(void* stream, int* status) { return (void)stream, zero(status, sizeof *status); }
int cuStreamSynchronize(void) { return 0; }
int cuThreadExchangeStreamCaptureMode(void) { return 0; }
int cuEventCreate(void** event) { return *event = (void*)1, 0; }
int cuEventDestroy_v2(void) { return 0; }
int cuEventRecord(void) { return 0; }
int cuEventSynchronize(void) { return 0; }
int cuEventElapsedTime(float* milliseconds) { return *milliseconds = (float)last_milliseconds, 0; }
int cuEventElapsedTime_v2(float* milliseconds) { return cuEventElapsedTime(milliseconds); }
int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  if (bytes > number_of("FAKE_BLOCK", 1ull << 40)) return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
  return *pointer = 4096, 0;
}
int cuMemGetInfo_v2(size_t* available, size_t* total) {
  *available = number_of("FAKE_FREE", 1ull << 30);
  return cuDeviceTotalMem_v2(total);
}
int cuModuleLoadData(void** module) { return *module = (void*)1, 0; }
int cuModuleUnload(void) { return 0; }
int cuModuleGetFunction(void** function) { return *function = (void*)1, 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuLaunchKernel(void) { return 0; }
int cuMemFree_v2(void) { return 0; }
int cuMemsetD32Async(void) { return 0; }
int cuGetErrorString(int status, const char** text) { return *text = status == 2 ? "out of memory" : "failed", 0; }
