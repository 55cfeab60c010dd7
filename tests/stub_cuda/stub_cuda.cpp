// A stand-in for libcuda.so.1 that runs nothing: it keeps the books of the functions that the loader calls, records
// launches, and fails on request. A "cubin" is the text "STUB <max threads> <symbol> <offset>:<size> ..." and so says
// what the driver would read from a real one. Not a model of the driver beyond what the tests look at.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kInvalidValue = 1, kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201,
              kInvalidHandle = 400, kNotFound = 500, kCaptureUnsupported = 900, kCaptureInvalidated = 901;
constexpr int kGlobal = 0, kRelaxed = 2;  // CUstreamCaptureMode

struct Kernel {
  std::string symbol;
  int max_threads;
  std::vector<std::pair<size_t, size_t>> params;
};

struct Function {
  Kernel* kernel;
  int device;
};

struct Config {  // CUlaunchConfig
  uint32_t grid[3], block[3], smem;
  void* stream;
  const char* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(Config) == 56);

struct Attribute {  // CUlaunchAttribute
  uint32_t id, pad;
  uint32_t value[16];
};
static_assert(sizeof(Attribute) == 72);

}  // namespace

extern "C" {

struct Launch {  // read by the tests through ctypes
  uint64_t thread;
  uint64_t stream;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t smem;
  int32_t pdl;
  int32_t device;
  uint32_t parameter_bytes;
  char symbol[64];
  unsigned char parameters[256];
};

}  // extern "C"

namespace {

std::mutex mutex;
std::map<std::string, int> calls;
std::map<std::string, std::pair<int, int>> failures;  // name -> (status, calls that still succeed)
std::map<std::string, int> next_failures;  // name -> status of the next call
std::vector<Launch> launches;
uint64_t launch_count;
int version, device_count, major_number, minor_number;
bool recording;

struct Capture {  // the one capture that there can be
  bool active, invalidated;
  int mode;
  const void* thread;
  uint64_t stream;
} capture;
thread_local int capture_mode = kGlobal;  // how this thread takes part in captures
thread_local char thread_marker;
thread_local std::vector<intptr_t> contexts;  // device + 1; 0 is none

int enter(const char* name) {
  std::lock_guard<std::mutex> guard(mutex);
  ++calls[name];
  if (auto once = next_failures.find(name); once != next_failures.end()) {
    int status = once->second;
    next_failures.erase(once);
    return status;
  }
  auto found = failures.find(name);
  if (found == failures.end()) return 0;
  return found->second.second-- > 0 ? 0 : found->second.first;
}

int current() { return contexts.empty() ? -1 : static_cast<int>(contexts.back()) - 1; }

// What loads or allocates: by the rules of cuThreadExchangeStreamCaptureMode it is forbidden, and ends a capture, unless
// this thread is relaxed, or there is none of its own that is not relaxed and none that forbids it to others.
int enter_unsafe(const char* name) {
  if (int status = enter(name)) return status;
  std::lock_guard<std::mutex> guard(mutex);
  if (!capture.active || capture_mode == kRelaxed) return 0;
  bool mine = capture.thread == &thread_marker && capture.mode != kRelaxed;
  bool others = capture.thread != &thread_marker && capture.mode == kGlobal && capture_mode == kGlobal;
  if (!mine && !others) return 0;
  capture.invalidated = true;
  return kCaptureUnsupported;
}

}  // namespace

#define ENTER(name) \
  if (int status = enter(name)) return status
#define ENTER_UNSAFE(name) \
  if (int status = enter_unsafe(name)) return status

extern "C" {

void stub_reset() {
  std::lock_guard<std::mutex> guard(mutex);
  calls.clear();
  failures.clear();
  next_failures.clear();
  launches.clear();
  launch_count = 0;
  version = 13000, device_count = 1, major_number = 9, minor_number = 0;
  capture = {};
  capture_mode = kGlobal;
  recording = true;
  contexts.clear();
}

void stub_fail(const char* name, int status, int after) {
  std::lock_guard<std::mutex> guard(mutex);
  failures[name] = {status, after};
}

void stub_fail_once(const char* name, int status) {
  std::lock_guard<std::mutex> guard(mutex);
  next_failures[name] = status;
}

void stub_mend(const char* name) {
  std::lock_guard<std::mutex> guard(mutex);
  failures.erase(name);
}

void stub_machine(int cuda, int devices, int major, int minor) {
  version = cuda, device_count = devices, major_number = major, minor_number = minor;
}

// Begins a capture of a stream by this thread. Ending it tells whether it survived.
void stub_begin_capture(int mode, uint64_t stream) {
  std::lock_guard<std::mutex> guard(mutex);
  capture = {true, false, mode, &thread_marker, stream};
}

int stub_end_capture() {
  std::lock_guard<std::mutex> guard(mutex);
  bool survived = capture.active && !capture.invalidated;
  capture = {};
  return survived;
}

int stub_capture_mode() { return capture_mode; }
void stub_record(int on) { recording = on; }

int stub_calls(const char* name) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = calls.find(name);
  return found == calls.end() ? 0 : found->second;
}

uint64_t stub_launches() { return launch_count; }

int stub_launch(size_t index, Launch* out) {
  std::lock_guard<std::mutex> guard(mutex);
  if (index >= launches.size()) return kInvalidValue;
  *out = launches[index];
  return 0;
}

void stub_make_current(int device) { contexts.assign(1, device + 1); }
void stub_make_none_current() { contexts.clear(); }
int stub_current() { return current(); }

int cuDriverGetVersion(int* out) {
  ENTER("cuDriverGetVersion");
  *out = version;
  return 0;
}

int cuInit(unsigned) {
  ENTER("cuInit");
  return 0;
}

int cuDeviceGetCount(int* out) {
  ENTER("cuDeviceGetCount");
  *out = device_count;
  return 0;
}

int cuDeviceGet(int* out, int ordinal) {
  ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= device_count) return kInvalidDevice;
  *out = ordinal;
  return 0;
}

int cuDeviceGetAttribute(int* out, int attribute, int) {
  ENTER("cuDeviceGetAttribute");
  *out = attribute == 75 ? major_number : minor_number;
  return 0;
}

int cuDevicePrimaryCtxRetain(intptr_t* out, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *out = device + 1;
  return 0;
}

int cuCtxGetCurrent(intptr_t* out) {
  ENTER("cuCtxGetCurrent");
  *out = current() + 1;
  return 0;
}

int cuCtxSetCurrent(intptr_t context) {
  ENTER("cuCtxSetCurrent");
  contexts.assign(1, context);
  return 0;
}

int cuCtxPushCurrent_v2(intptr_t context) {
  ENTER("cuCtxPushCurrent_v2");
  contexts.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(intptr_t* out) {
  ENTER("cuCtxPopCurrent_v2");
  if (contexts.empty()) return kInvalidContext;
  *out = contexts.back();
  contexts.pop_back();
  return 0;
}

int cuLibraryLoadData(Kernel** out, const char* code, void*, void*, unsigned, void*, void*, unsigned) {
  ENTER_UNSAFE("cuLibraryLoadData");
  std::istringstream text(code);
  std::string magic, param;
  auto* kernel = new Kernel;
  if (!(text >> magic >> kernel->max_threads >> kernel->symbol) || magic != "STUB") {
    delete kernel;
    return kInvalidImage;
  }
  while (text >> param) {
    size_t colon = param.find(':');
    kernel->params.emplace_back(std::stoul(param.substr(0, colon)), std::stoul(param.substr(colon + 1)));
  }
  *out = kernel;
  return 0;
}

int cuLibraryGetKernel(Kernel** out, Kernel* library, const char* name) {
  ENTER("cuLibraryGetKernel");
  if (library->symbol != name) return kNotFound;
  *out = library;
  return 0;
}

int cuKernelGetFunction(Function** out, Kernel* kernel) {
  ENTER_UNSAFE("cuKernelGetFunction");
  if (current() < 0) return kInvalidContext;
  *out = new Function{kernel, current()};
  return 0;
}

int cuFuncLoad(Function* function) {
  ENTER_UNSAFE("cuFuncLoad");
  return function->device == current() ? 0 : kInvalidContext;
}

int cuKernelGetParamInfo(Kernel* kernel, size_t index, size_t* offset, size_t* size) {
  ENTER("cuKernelGetParamInfo");
  if (current() < 0) return kInvalidContext;
  if (index >= kernel->params.size()) return kInvalidValue;
  *offset = kernel->params[index].first;
  *size = kernel->params[index].second;
  return 0;
}

int cuKernelGetAttribute(int* out, int attribute, Kernel* kernel, int) {
  ENTER("cuKernelGetAttribute");
  if (attribute != 0) return kInvalidValue;
  *out = kernel->max_threads;
  return 0;
}

int cuKernelSetAttribute(int, int, Kernel*, int) {
  ENTER_UNSAFE("cuKernelSetAttribute");
  return 0;
}

int cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
  ENTER_UNSAFE("cuMemHostAlloc");
  if (current() < 0) return kInvalidContext;
  if (flags != 3) return kInvalidValue;  // portable, mapped
  *out = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*out, 0xff, bytes);  // the driver does not clear it
  return 0;
}

int cuStreamIsCapturing(uint64_t stream, int* out) {
  ENTER("cuStreamIsCapturing");
  std::lock_guard<std::mutex> guard(mutex);
  *out = capture.active && capture.stream == stream ? 1 + capture.invalidated : 0;
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  if (*mode < kGlobal || *mode > kRelaxed) return kInvalidValue;
  std::swap(*mode, capture_mode);
  return 0;
}

int cuGetErrorName(int status, const char** out) {
  static const std::map<int, const char*> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"},        {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {100, "CUDA_ERROR_NO_DEVICE"},          {200, "CUDA_ERROR_INVALID_IMAGE"},
      {201, "CUDA_ERROR_INVALID_CONTEXT"},    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {400, "CUDA_ERROR_INVALID_HANDLE"},     {500, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},    {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {3, "CUDA_ERROR_NOT_INITIALIZED"},
      {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}, {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
  };
  auto found = names.find(status);
  if (found == names.end()) return kInvalidValue;
  *out = found->second;
  return 0;
}

int cuGetErrorString(int, const char**) { return kInvalidValue; }

int cuLaunchKernelEx(const Config* config, Function* function, void** params, void** extra) {
  if (!recording) {
    __atomic_add_fetch(&launch_count, 1, __ATOMIC_RELAXED);
    return 0;
  }
  ENTER("cuLaunchKernelEx");
  if (current() < 0) return kInvalidContext;
  if (current() != function->device) return kInvalidHandle;
  if (params != nullptr || extra == nullptr) return kInvalidValue;
  Launch launch = {};
  launch.thread = reinterpret_cast<uint64_t>(&thread_marker);
  launch.stream = reinterpret_cast<uint64_t>(config->stream);
  if (capture.active && capture.invalidated && capture.stream == launch.stream) return kCaptureInvalidated;
  std::memcpy(launch.grid, config->grid, sizeof launch.grid);
  std::memcpy(launch.block, config->block, sizeof launch.block);
  launch.smem = config->smem;
  launch.device = current();
  for (uint32_t i = 0; i < config->attribute_count; ++i) {
    Attribute attribute;
    std::memcpy(&attribute, config->attributes + i * sizeof attribute, sizeof attribute);
    if (attribute.id == 4) std::memcpy(launch.cluster, attribute.value, sizeof launch.cluster);
    else if (attribute.id == 6) launch.pdl = static_cast<int32_t>(attribute.value[0]);
    else return kInvalidValue;
  }
  std::snprintf(launch.symbol, sizeof launch.symbol, "%s", function->kernel->symbol.c_str());
  if (extra[0] != reinterpret_cast<void*>(1) || extra[2] != reinterpret_cast<void*>(2) || extra[4] != nullptr)
    return kInvalidValue;
  size_t bytes = *static_cast<size_t*>(extra[3]);
  size_t expected = 0;
  for (const auto& [offset, size] : function->kernel->params) expected = std::max(expected, offset + size);
  if (bytes != expected || bytes > sizeof launch.parameters) return kInvalidValue;
  launch.parameter_bytes = static_cast<uint32_t>(bytes);
  std::memcpy(launch.parameters, extra[1], bytes);
  std::lock_guard<std::mutex> guard(mutex);
  ++launch_count;
  if (launches.size() < 1 << 16) launches.push_back(launch);
  return 0;
}

}  // extern "C"
