// Launches the images of attnres-aot bundles: the code of a bundle's shared-object form, one source for every bundle.
//
// The images and a table of the manifest's facts are embedded as one payload (payload.py writes it, embed.S includes
// it). What follows from a variant is read from the table; there is no code per variant. The library exports functions
// of the TVM-FFI ABI (docs/shared_objects.md) and needs libtvm_ffi, libc and, to launch, libcuda.so.1, which it opens
// itself; it loads where there is no driver, and says then why it cannot launch.
//
// Written against the C interfaces of TVM-FFI, DLPack and the driver alone, without the C++ library: no exceptions, no
// allocation in a launch, and nothing to ship beside it. A failure is a kind (the name of the Python class) and words,
// which are those of the Python loader: attnres_aot/runtime holds the twin of each check, under the same name.
//
//   payload    what is embedded                     geometry   shapes, strides, overlap of operands
//   driver     libcuda, contexts, captures          consumer   binding, plans, launching
//   images     loading and proving code             producers  statistics, publish
//   faults     what a spin that ran out left        exports    objects and functions of the TVM-FFI ABI

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tvm/ffi/extra/c_env_api.h>

#if defined(__GLIBC__) && defined(__x86_64__)  // versions that every supported glibc has, whichever this is built on
#define OLD_GLIBC "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define OLD_GLIBC "GLIBC_2.17"
#endif
#ifdef OLD_GLIBC
__asm__(".symver dlopen,dlopen@" OLD_GLIBC);
__asm__(".symver dlsym,dlsym@" OLD_GLIBC);
__asm__(".symver dlerror,dlerror@" OLD_GLIBC);
__asm__(".symver dladdr,dladdr@" OLD_GLIBC);
#endif

// pthread_atfork without the part of it that libc links statically; there is no handle, as the library stays loaded.
extern "C" int __register_atfork(void (*)(), void (*)(), void (*)(), void*);

inline void* operator new(size_t, void* place) noexcept { return place; }

namespace {

// ---------------------------------------------------------------------------------------------------------- words --

#define COLD __attribute__((noinline, cold))  // keeps what only failures need out of what every launch runs

class Words {  // text that grows
 public:
  Words() = default;
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
  ~Words() { free(text_); }

  const char* c_str() const { return text_ ? text_ : ""; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void clear() { size_ = 0; }

  COLD Words& add(const char* text, size_t size) {
    if (size_ + size + 1 > room_) {
      room_ = 2 * (size_ + size + 1);
      text_ = static_cast<char*>(realloc(text_, room_));
      if (!text_) abort();
    }
    memcpy(text_ + size_, text, size);
    size_ += size;
    text_[size_] = 0;
    return *this;
  }
  COLD Words& operator<<(const char* text) { return add(text, strlen(text)); }
  Words& operator<<(const Words& other) { return add(other.c_str(), other.size()); }
  COLD Words& operator<<(int64_t number) { return format("%lld", static_cast<long long>(number)); }
  Words& operator<<(int number) { return *this << static_cast<int64_t>(number); }
  Words& operator<<(uint32_t number) { return *this << static_cast<int64_t>(number); }
  __attribute__((format(printf, 2, 3))) Words& format(const char* form, ...) {
    char buffer[128];
    va_list values;
    va_start(values, form);
    int size = vsnprintf(buffer, sizeof buffer, form, values);
    va_end(values);
    return add(buffer, size < 0 ? 0 : static_cast<size_t>(size));
  }
  COLD Words& line() { return empty() ? *this : *this << "\n"; }  // begins a line of a list of problems

 private:
  char* text_ = nullptr;
  size_t size_ = 0, room_ = 0;
};

template <typename T>
class List {  // of plain values
 public:
  List() = default;
  List(const List&) = delete;
  List& operator=(const List&) = delete;
  ~List() { free(items_); }

  void push(const T& item) {
    if (size_ == room_) {
      room_ = room_ ? 2 * room_ : 8;
      items_ = static_cast<T*>(realloc(static_cast<void*>(items_), room_ * sizeof(T)));
      if (!items_) abort();
    }
    items_[size_++] = item;
  }
  void clear() { size_ = 0; }
  size_t size() const { return size_; }
  T& operator[](size_t at) { return items_[at]; }
  const T& operator[](size_t at) const { return items_[at]; }
  T* begin() { return items_; }
  T* end() { return items_ + size_; }
  const T* begin() const { return items_; }
  const T* end() const { return items_ + size_; }

 private:
  T* items_ = nullptr;
  size_t size_ = 0, room_ = 0;
};

struct Failure {  // why something was not done; functions that take one return false when they fill it
  const char* kind = nullptr;
  Words words;

  bool of(const char* error) {
    kind = error;
    return false;
  }
};

const char* const kOperand = "OperandError";
const char* const kUsage = "UsageError";
const char* const kDriver = "DriverError";
const char* const kBundle = "BundleError";
const char* const kMiss = "VariantMissError";

class Mutex {
 public:
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

class Hold {
 public:
  explicit Hold(Mutex& mutex) : mutex_(mutex) { mutex_.lock(); }
  ~Hold() { mutex_.unlock(); }

 private:
  Mutex& mutex_;
};

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// -------------------------------------------------------------------------------------------------------- payload --
// The layout is that of attnres_aot/launcher/payload.py. Offsets are from the start of the payload.

struct Text {
  uint32_t offset, size;
};
struct Span {
  uint32_t offset, count;
};
struct PayloadHeader {
  char magic[8];
  uint32_t bundles, reserved;
  char digest[32];  // hex, of all that follows
  uint32_t tables[16];
};
struct ParamRecord {
  Text name;
  uint32_t offset, size;
};
struct KernelRecord {
  Text name;
  Span params;
};
struct ImageRecord {
  Text name, symbol, code;
  uint32_t kernel, cluster, rows_per_cluster, block_threads, smem_static, smem_dynamic, pdl;
};
struct Choice {
  uint32_t image, max_rows;  // max_rows: all bits set for no limit
};
struct Pair {
  uint32_t tp, dcp;
};
struct VariantRecord {
  Text name;
  int32_t nb, write;
  uint32_t has_delta, last, slots, aux, stats;
  Span choices, deployments;
};
struct ProducerRecord {
  Text name;
  uint32_t kernel;
  Span choices, deployments;
};
struct StatisticsTable {
  uint32_t tp, dcp;
  Text rows_text, blocks_text;
  Span rows, blocks;
};
struct TableRecord {
  uint32_t hidden, major, minor, suffix;  // suffix: 0, 'a' or 'f'
  uint32_t oldest_driver;                 // as cuDriverGetVersion counts
  Text name, arch, rule, driver_need, build_again, manifest;
  Span kernels, images, variants, producers, statistics;
};

extern "C" {
extern const char attnres_payload[] __attribute__((visibility("hidden")));
}

template <typename T>
struct Part {
  const T* first;
  uint32_t count;
  const T* begin() const { return first; }
  const T* end() const { return first + count; }
  const T& operator[](uint32_t at) const { return first[at]; }
};

template <typename T>
Part<T> part(Span span) {
  return {reinterpret_cast<const T*>(attnres_payload + span.offset), span.count};
}

const PayloadHeader& header() { return *reinterpret_cast<const PayloadHeader*>(attnres_payload); }
const TableRecord& table_record(uint32_t index) {
  return *reinterpret_cast<const TableRecord*>(attnres_payload + header().tables[index]);
}
const char* bytes_of(Text text) { return attnres_payload + text.offset; }
Words& operator<<(Words& words, Text text) { return words.add(bytes_of(text), text.size); }
bool equal(Text text, const char* word) {
  return strlen(word) == text.size && memcmp(bytes_of(text), word, text.size) == 0;
}

const char* library_path() {
  static char path[4096];
  static Mutex mutex;
  Hold hold(mutex);
  Dl_info info;
  if (!path[0] && dladdr(attnres_payload, &info) && info.dli_fname) snprintf(path, sizeof path, "%s", info.dli_fname);
  return path;
}

// --------------------------------------------------------------------------------------------------------- driver --

using Status = int;
using Context = void*;
using Kernel = void*;
using Function = void*;
using Stream = void*;

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid[3], block[3], smem;
  Stream stream;
  void* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig");
struct LaunchAttribute {  // CUlaunchAttribute
  uint32_t id, pad;
  uint32_t value[16];
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute");
constexpr uint32_t kClusterDimension = 4, kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_*
constexpr int kMaxThreads = 0, kMaxDynamicSmem = 8;                        // CU_FUNC_ATTRIBUTE_*
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;                // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
constexpr int kRelaxed = 2;                                                // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr Status kInvalidValue = 1, kNotInitialized = 3, kStubLibrary = 34, kNotFound = 500, kPeerEnabled = 704,
                 kCaptureImplicit = 906;
constexpr uint32_t kDefaultDynamicSmem = 48 << 10;  // bytes that any kernel may use without asking
constexpr int kMaxDevices = 64;

#define DRIVER_FUNCTIONS(X)                                                                                       \
  X(cuCtxGetCurrent, (Context*))                                                                                  \
  X(cuCtxPopCurrent_v2, (Context*))                                                                               \
  X(cuCtxPushCurrent_v2, (Context))                                                                               \
  X(cuCtxSetCurrent, (Context))                                                                                   \
  X(cuDeviceGet, (int*, int))                                                                                     \
  X(cuDeviceGetAttribute, (int*, int, int))                                                                       \
  X(cuDeviceGetCount, (int*))                                                                                     \
  X(cuDevicePrimaryCtxRetain, (Context*, int))                                                                    \
  X(cuDriverGetVersion, (int*))                                                                                   \
  X(cuFuncLoad, (Function))                                                                                       \
  X(cuGetErrorName, (Status, const char**))                                                                       \
  X(cuGetErrorString, (Status, const char**))                                                                     \
  X(cuInit, (unsigned))                                                                                           \
  X(cuKernelGetAttribute, (int*, int, Kernel, int))                                                               \
  X(cuKernelGetFunction, (Function*, Kernel))                                                                     \
  X(cuKernelGetParamInfo, (Kernel, size_t, size_t*, size_t*))                                                     \
  X(cuKernelSetAttribute, (int, int, Kernel, int))                                                                \
  X(cuLaunchKernelEx, (const LaunchConfig*, Function, void**, void**))                                            \
  X(cuLibraryGetKernel, (Kernel*, void*, const char*))                                                            \
  X(cuLibraryLoadData, (void**, const void*, void*, void*, unsigned, void*, void*, unsigned))                     \
  X(cuMemHostAlloc, (void**, size_t, unsigned))                                                                   \
  X(cuStreamIsCapturing, (Stream, int*))                                                                          \
  X(cuThreadExchangeStreamCaptureMode, (int*))
#define PEER_FUNCTIONS(X)                     \
  X(cuDeviceCanAccessPeer, (int*, int, int))  \
  X(cuCtxEnablePeerAccess, (Context, unsigned))

struct Driver {
#define MEMBER(name, arguments) Status(*name) arguments;
  DRIVER_FUNCTIONS(MEMBER)
  PEER_FUNCTIONS(MEMBER)  // nullptr where the driver lacks them: asked for by publishers into a peer's memory alone
#undef MEMBER
  int version;
  Context contexts[kMaxDevices];
};

Driver driver;
bool driver_open;    // read without a lock: set once, when all of `driver` is there
volatile bool forked;  // this process is a child of one in which the driver had been opened
Mutex driver_mutex;

const char* const kForked =
    "this process was forked after its parent had initialised CUDA, and CUDA does not survive a fork: start workers "
    "with the 'spawn' or 'forkserver' method, or use CUDA (torch's included) in the worker only";

const char* advice(Status status) {
  switch (status) {
    case 2: return "free device memory, or load the bundle before the engine takes all of it";
    case 100: return "no GPU is visible: check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus option";
    case 200: return "the image is damaged or of another toolkit generation: run `attnres-aot verify BUNDLE`";
    case 201: return "make the device current on this thread first, e.g. with torch.cuda.set_device";
    case 400:
      return "the stream belongs to another device or context, or is gone: launch on a stream of the bundle's device";
    case 209:
      return "the bundle's code does not run on this GPU: build one for its arch (`attnres-aot doctor` names it)";
    case 300: return "the bundle's file was not accepted: run `attnres-aot verify BUNDLE`";
    case 700:
      return "an earlier kernel on this device accessed invalid memory and the process cannot go on: find it with "
             "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer";
    case 701: return "too many resources for this GPU: the bundle was built for another one";
    case 702: return "a kernel ran for too long: is a mailbox's publisher missing?";
    case 719:
      return "an earlier kernel on this device failed and the process cannot go on: find it with "
             "CUDA_LAUNCH_BLOCKING=1; a ring consumer with a spin budget stops this way when its publisher is missing "
             "(attnres_aot.ring_fault())";
    case 802: return "start the fabric manager (nvidia-fabricmanager), which multi-GPU systems need";
    case 803:
      return "driver library and kernel module are of different releases: reboot after the driver update, or remove "
             "the driver library that the container brings";
    case 804: return "this GPU does not support the CUDA compatibility package: remove it from LD_LIBRARY_PATH";
    case 901:
      return "an earlier call ended the capture of this stream: the first error after the capture began says which";
    case 912: return "this GPU cannot place the kernel's cluster: is it a MIG slice? Use a larger one";
    default: break;
  }
  if (status >= 900 && status < 910)
    return "a stream capture forbids this; make and bind consumers and producers before capturing, which puts on the "
           "device all that their launches need";
  return "run `attnres-aot doctor` for the state of this machine";
}

bool refused(Status status, const char* what, Failure& failure) {
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(status, &name);
  driver.cuGetErrorString(status, &text);
  failure.words << "the CUDA driver refused to " << what << ": ";
  if (name) failure.words << name;
  else failure.words << "CUDA error " << status;
  if (text) failure.words << " (" << text << ")";
  failure.words << "; " << advice(status);
  return failure.of(kDriver);
}

void mark_forked() { forked = __atomic_load_n(&driver_open, __ATOMIC_ACQUIRE); }

bool open_driver_locked(Failure& failure) {
  const char* library = "libcuda.so.1";
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    failure.words << "no CUDA driver: " << library << " cannot be loaded (" << (why ? why : "unknown")
                  << "); install the NVIDIA driver, or start the container with access to the GPU (--gpus)";
    return failure.of(kDriver);
  }
  Words missing;
#define FIND(name, arguments)                                                  \
  driver.name = reinterpret_cast<Status(*) arguments>(dlsym(handle, #name));   \
  if (!driver.name) missing << (missing.empty() ? "" : ", ") << #name;
  DRIVER_FUNCTIONS(FIND)
#undef FIND
#define FIND(name, arguments) driver.name = reinterpret_cast<Status(*) arguments>(dlsym(handle, #name));
  PEER_FUNCTIONS(FIND)
#undef FIND
  Status status = driver.cuDriverGetVersion ? driver.cuDriverGetVersion(&driver.version) : kStubLibrary;
  if (status == kStubLibrary || driver.version == 0) {
    failure.words << "no CUDA driver: the " << library << " that was found is the CUDA toolkit's link-time stub; take "
                  << "the folder of the toolkit's stubs out of LD_LIBRARY_PATH and of the linker's configuration";
    return failure.of(kDriver);
  }
  int major = driver.version / 1000, minor = driver.version % 1000 / 10;
  if (driver.version < 12040) {
    failure.words << "the CUDA driver is too old: it serves CUDA " << major << "." << minor
                  << ", but launching needs 12.4 or newer; install driver 550.54.14 or later";
    return failure.of(kDriver);
  }
  if (!missing.empty()) {
    failure.words << library << " lacks " << missing << ", though it claims CUDA " << major << "." << minor
                  << ": it is not the NVIDIA driver's own library; install driver 550.54.14 or later";
    return failure.of(kDriver);
  }
  status = driver.cuInit(0);
  if (status == kNotInitialized) {  // what it answers in a child of a process that had initialised it
    failure.words << kForked;
    return failure.of(kDriver);
  }
  if (status) return refused(status, "start", failure);
  __register_atfork(nullptr, nullptr, mark_forked, nullptr);
  __atomic_store_n(&driver_open, true, __ATOMIC_RELEASE);
  return true;
}

bool open_driver(Failure& failure) {
  if (forked) {
    failure.words << kForked;
    return failure.of(kDriver);
  }
  if (__atomic_load_n(&driver_open, __ATOMIC_ACQUIRE)) return true;
  Hold hold(driver_mutex);
  return driver_open || open_driver_locked(failure);
}

bool primary_context(int ordinal, Context* out, Failure& failure) {  // retained for the life of the process
  Hold hold(driver_mutex);
  if (!driver.contexts[ordinal]) {
    int device = 0;
    Words what;
    if (Status status = driver.cuDeviceGet(&device, ordinal)) {
      what << "find device " << ordinal;
      return refused(status, what.c_str(), failure);
    }
    if (Status status = driver.cuDevicePrimaryCtxRetain(&driver.contexts[ordinal], device)) {
      what << "open device " << ordinal;
      return refused(status, what.c_str(), failure);
    }
  }
  *out = driver.contexts[ordinal];
  return true;
}

class Current {  // makes a context current, and restores what was current before
 public:
  explicit Current(Context context) { pushed_ = driver.cuCtxPushCurrent_v2(context) == 0; }
  ~Current() {
    Context popped;
    if (pushed_) driver.cuCtxPopCurrent_v2(&popped);
  }

 private:
  bool pushed_;
};

class Relaxed {  // lets this thread load and allocate while streams are captured: what it makes belongs to no graph
 public:
  Relaxed() { driver.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { driver.cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = kRelaxed;
};

bool is_capturing(int ordinal, Context context, bool* capturing, Failure& failure) {
  Current current(context);
  int state = 0;
  Status status = driver.cuStreamIsCapturing(TVMFFIEnvGetStream(kDLCUDA, ordinal), &state);
  if (status && status != kCaptureImplicit) {
    Words what;
    what << "tell whether the current stream of device " << ordinal << " is being captured";
    return refused(status, what.c_str(), failure);
  }
  *capturing = status == kCaptureImplicit || state != 0;
  return true;
}

// --------------------------------------------------------------------------------------------------------- images --

enum Argument {  // every kernel parameter that is filled
  kSource, kPrefix, kBlocks, kNorm, kQuery, kOutNorm, kOut, kAux, kMixture, kScal, kFault, kMailbox,
  kSourceRowStride, kSourceSlotStride, kPrefixRowStride, kBlocksRowStride, kBlocksBlockStride, kOutRowStride,
  kAuxRowStride, kWrite, kRows, kSpinBudget, kFaultTag, kEarly, kEps, kOutEps, kArguments
};
struct ArgumentName {
  const char* name;
  uint32_t size;
};
constexpr ArgumentName kArgumentNames[kArguments] = {
    {"source", 8}, {"prefix", 8}, {"blocks", 8}, {"norm", 8}, {"query", 8}, {"out_norm", 8}, {"out", 8}, {"aux", 8},
    {"mixture", 8}, {"scal", 8}, {"fault", 8}, {"mailbox", 8}, {"source_row_stride", 4}, {"source_slot_stride", 4},
    {"prefix_row_stride", 4}, {"blocks_row_stride", 4}, {"blocks_block_stride", 4}, {"out_row_stride", 4},
    {"aux_row_stride", 4}, {"write", 4}, {"rows", 4}, {"spin_budget", 4}, {"fault_tag", 4}, {"early", 4}, {"eps", 4},
    {"out_eps", 4}};
constexpr uint32_t kParameterRoom = 256;
enum KernelKind { kConsumer, kStatistics, kPublish, kKernels };
constexpr const char* kKernelNames[kKernels] = {"consumer", "statistics", "publish"};

struct Layout {  // where the parameters of a kernel lie
  int16_t offsets[kArguments];
  uint32_t bytes;
};

struct Loaded {  // an image on one device
  const ImageRecord* image;
  Function function;
};

struct Device;

struct Library {  // what a bundle of the payload is to every device
  const TableRecord* record;
  Layout layouts[kKernels];
  Kernel* kernels;  // by image; found once in a process
};

struct Device {  // a bundle on one device
  int ordinal;
  Context context;
  Library* library;
  Function* functions;  // by image; read without a lock
  const TableRecord& record() const { return *library->record; }
};

Mutex image_mutex;
Library* libraries[16];
Device* devices[kMaxDevices];
bool peers_open[kMaxDevices][kMaxDevices];

Words& operator<<(Words& words, const Device& device) { return words << "cuda:" << device.ordinal; }

Words& image_place(Words& words, const ImageRecord& image) {
  return words << "image '" << image.name << "' of " << library_path();
}

bool read_layouts(Library& library, Failure& failure) {
  for (Layout& layout : library.layouts) {
    layout.bytes = 0;
    for (int16_t& offset : layout.offsets) offset = -1;
  }
  for (const KernelRecord& kernel : part<KernelRecord>(library.record->kernels)) {
    int kind = 0;
    while (kind < kKernels && !equal(kernel.name, kKernelNames[kind])) ++kind;
    for (const ParamRecord& param : part<ParamRecord>(kernel.params)) {
      int at = 0;
      while (at < kArguments && !equal(param.name, kArgumentNames[at].name)) ++at;
      if (kind == kKernels || at == kArguments || kArgumentNames[at].size != param.size ||
          param.offset + param.size > kParameterRoom) {
        failure.words << library_path() << ": parameter list '" << kernel.name << "' is not what this launcher fills: '"
                      << param.name << "'; build it again";
        return failure.of(kBundle);
      }
      library.layouts[kind].offsets[at] = static_cast<int16_t>(param.offset);
      library.layouts[kind].bytes = static_cast<uint32_t>(larger(library.layouts[kind].bytes, param.offset + param.size));
    }
  }
  return true;
}

bool load_kernel(Library& library, uint32_t index, Failure& failure) {
  const ImageRecord& image = part<ImageRecord>(library.record->images)[index];
  Words where;
  image_place(where, image);
  void* module = nullptr;
  if (Status status = driver.cuLibraryLoadData(&module, bytes_of(image.code), nullptr, nullptr, 0, nullptr, nullptr, 0)) {
    Words what;
    what << "load " << where;
    return refused(status, what.c_str(), failure);
  }
  Words symbol;
  symbol << image.symbol;
  Status status = driver.cuLibraryGetKernel(&library.kernels[index], module, symbol.c_str());
  if (status == kNotFound) {
    library.kernels[index] = nullptr;
    failure.words << where << ": the binary has no kernel '" << symbol << "', so it is the code of something else; the "
                  << "bundle is damaged: build or copy it again";
    return failure.of(kBundle);
  }
  if (status) {
    library.kernels[index] = nullptr;
    Words what;
    what << "find kernel '" << symbol << "' in " << where;
    return refused(status, what.c_str(), failure);
  }
  return true;
}

bool prove_kernel(const Library& library, uint32_t index, const Device& device, Failure& failure) {
  const ImageRecord& image = part<ImageRecord>(library.record->images)[index];
  Kernel kernel = library.kernels[index];
  Words where, found, promised;
  image_place(where, image);
  Part<ParamRecord> params = part<ParamRecord>(part<KernelRecord>(library.record->kernels)[image.kernel].params);
  for (const ParamRecord& param : params)
    promised << (promised.empty() ? "(" : ", (") << param.offset << ", " << param.size << ")";
  for (size_t at = 0;; ++at) {
    size_t offset = 0, size = 0;
    Status status = driver.cuKernelGetParamInfo(kernel, at, &offset, &size);
    if (status == kInvalidValue) break;
    if (status) {
      Words what;
      what << "describe the parameters of " << where;
      return refused(status, what.c_str(), failure);
    }
    found << (found.empty() ? "(" : ", (") << static_cast<int64_t>(offset) << ", " << static_cast<int64_t>(size) << ")";
  }
  if (found.size() != promised.size() || memcmp(found.c_str(), promised.c_str(), found.size()) != 0) {
    failure.words << where << ": the binary's parameters are, as (offset, size), [" << found
                  << "], but the manifest promises [" << promised << "]; the bundle is damaged: build it again";
    return failure.of(kBundle);
  }
  int threads = 0;
  if (Status status = driver.cuKernelGetAttribute(&threads, kMaxThreads, kernel, device.ordinal)) {
    Words what;
    what << "tell the block size of " << where;
    return refused(status, what.c_str(), failure);
  }
  if (threads < static_cast<int>(image.block_threads)) {
    failure.words << where << ": the binary runs with at most " << threads << " threads per CTA, but the manifest says "
                  << image.block_threads << "; the bundle is damaged: build it again";
    return failure.of(kBundle);
  }
  return true;
}

// Puts an image on a device now, however lazily modules are loaded, so that no launch has to.
bool enter_kernel(Device& device, uint32_t index, Failure& failure) {
  const ImageRecord& image = part<ImageRecord>(device.record().images)[index];
  Kernel kernel = device.library->kernels[index];
  Words where, what;
  image_place(where, image);
  if (image.smem_dynamic + image.smem_static > kDefaultDynamicSmem) {
    int size = static_cast<int>(image.smem_dynamic);
    if (Status status = driver.cuKernelSetAttribute(kMaxDynamicSmem, size, kernel, device.ordinal)) {
      what << "give " << size << " bytes of shared memory to " << where;
      return refused(status, what.c_str(), failure);
    }
  }
  Function function = nullptr;
  Status status = driver.cuKernelGetFunction(&function, kernel);
  if (!status) status = driver.cuFuncLoad(function);
  if (status) {
    what << "put " << where << " on " << device;
    return refused(status, what.c_str(), failure);
  }
  __atomic_store_n(&device.functions[index], function, __ATOMIC_RELEASE);
  return true;
}

bool load_image(Device& device, uint32_t index, Failure& failure) {
  if (__atomic_load_n(&device.functions[index], __ATOMIC_ACQUIRE)) return true;
  Hold hold(image_mutex);
  if (device.functions[index]) return true;
  Relaxed relaxed;
  Current current(device.context);
  Library& library = *device.library;
  return (library.kernels[index] || load_kernel(library, index, failure)) &&
         prove_kernel(library, index, device, failure) && enter_kernel(device, index, failure);
}

bool load_choices(Device& device, Span choices, Failure& failure) {
  for (const Choice& choice : part<Choice>(choices))
    if (!load_image(device, choice.image, failure)) return false;
  return true;
}

uint32_t chosen(Span choices, int64_t rows) {
  Part<Choice> all = part<Choice>(choices);
  for (const Choice& choice : all)
    if (choice.max_rows == UINT32_MAX || rows <= choice.max_rows) return choice.image;
  return all[all.count - 1].image;
}

// Finds what a launch takes, and loads nothing: binding has put it on the device.
bool find_loaded(Device& device, Span choices, int64_t rows, Text what, Loaded* out, Failure& failure) {
  uint32_t index = chosen(choices, rows);
  const ImageRecord& image = part<ImageRecord>(device.record().images)[index];
  *out = {&image, __atomic_load_n(&device.functions[index], __ATOMIC_ACQUIRE)};
  if (out->function) return true;
  failure.words << "image '" << image.name << "' of " << library_path() << ", which " << what << " needs, is not on "
                << device << ", and a launch loads nothing; make the object that launches it anew, or call "
                << "attnres_aot.preload()";
  return failure.of(kDriver);
}

bool runs_on(const TableRecord& record, int major, int minor) {
  if (static_cast<int>(record.major) != major) return false;
  return record.suffix == 'a' ? static_cast<int>(record.minor) == minor : minor >= static_cast<int>(record.minor);
}

int distance(const TableRecord& record, int minor) {  // exact minor first, then `a`, `f`, plain
  int suffix = record.suffix == 'a' ? 0 : record.suffix == 'f' ? 1 : 2;
  return (minor - static_cast<int>(record.minor)) * 4 + suffix;
}

bool choose_bundle(int ordinal, int major, int minor, uint32_t* out, Failure& failure) {
  int best = -1;
  for (uint32_t index = 0; index < header().bundles; ++index) {
    const TableRecord& record = table_record(index);
    if (runs_on(record, major, minor) && (best < 0 || distance(record, minor) < distance(table_record(best), minor)))
      best = static_cast<int>(index);
  }
  if (best < 0) {
    failure.words << "no code of " << library_path() << " runs on cuda:" << ordinal << ", compute capability " << major
                  << "." << minor << "; it holds ";
    for (uint32_t index = 0; index < header().bundles; ++index) {
      const TableRecord& record = table_record(index);
      failure.words << (index ? "; " : "") << record.name << " for " << record.arch << ", which runs on " << record.rule;
    }
    failure.words << ". Next step: build a library for the device, with --format so";
    return failure.of(kBundle);
  }
  const TableRecord& record = table_record(static_cast<uint32_t>(best));
  if (driver.version < static_cast<int>(record.oldest_driver)) {
    failure.words << library_path() << ": its code needs a driver for " << record.driver_need
                  << " or later; this machine's serves CUDA " << driver.version / 1000 << "."
                  << driver.version % 1000 / 10;
    return failure.of(kBundle);
  }
  *out = static_cast<uint32_t>(best);
  return true;
}

bool open_device(int64_t ordinal, Device** out, Failure& failure) {
  if (!open_driver(failure)) return false;
  int count = 0;
  if (Status status = driver.cuDeviceGetCount(&count)) return refused(status, "count the devices", failure);
  if (ordinal < 0 || ordinal >= count || ordinal >= kMaxDevices) {
    failure.words << "there is no device " << ordinal << ": this process sees " << count << ", numbered from 0";
    return failure.of(kUsage);
  }
  int place = static_cast<int>(ordinal), device = 0, values[2] = {0, 0};
  Context context = nullptr;
  if (!primary_context(place, &context, failure)) return false;
  driver.cuDeviceGet(&device, place);
  for (int at = 0; at < 2; ++at)
    if (Status status = driver.cuDeviceGetAttribute(&values[at], at ? kCapabilityMinor : kCapabilityMajor, device)) {
      Words what;
      what << "tell the compute capability of device " << place;
      return refused(status, what.c_str(), failure);
    }
  Hold hold(image_mutex);
  if (!devices[place]) {
    uint32_t index = 0;
    if (!choose_bundle(place, values[0], values[1], &index, failure)) return false;
    const TableRecord& record = table_record(index);
    if (!libraries[index]) {
      auto* made = static_cast<Library*>(calloc(1, sizeof(Library)));
      made->record = &record;
      made->kernels = static_cast<Kernel*>(calloc(record.images.count, sizeof(Kernel)));
      if (!read_layouts(*made, failure)) return false;
      libraries[index] = made;
    }
    auto* made = static_cast<Device*>(calloc(1, sizeof(Device)));
    *made = {place, context, libraries[index], static_cast<Function*>(calloc(record.images.count, sizeof(Function)))};
    devices[place] = made;
  }
  *out = devices[place];
  return true;
}

// --------------------------------------------------------------------------------------------------------- faults --
// A device has one record {tag, row, slot, vector} in pinned host memory: its kernels write it with one 16-byte store
// before they trap, and it stays readable after the trap has ended the context. Never freed: graphs hold its address.

struct FaultKind {  // what launches that may give up are called
  const VariantRecord* variant;
  const TableRecord* bundle;
  uint32_t spin_budget;
};

constexpr uint32_t kMaxFaultKinds = 1 << 14;
Mutex fault_mutex;
void* fault_records[kMaxDevices];
FaultKind fault_kinds[kMaxFaultKinds];
uint32_t fault_kind_count = 1;  // tag 0 is an empty record

bool open_fault_record(Device& device, Failure& failure) {
  Hold hold(image_mutex);
  if (fault_records[device.ordinal]) return true;
  void* record = nullptr;
  Status status;
  {
    Relaxed relaxed;
    Current current(device.context);
    status = driver.cuMemHostAlloc(&record, 16, 0x1 | 0x2);  // CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP
  }
  if (status) {
    Words what;
    what << "allocate the fault record of device " << device.ordinal;
    return refused(status, what.c_str(), failure);
  }
  memset(record, 0, 16);
  __atomic_store_n(&fault_records[device.ordinal], record, __ATOMIC_RELEASE);
  return true;
}

bool fault_tag(const FaultKind& kind, int32_t* tag, Failure& failure) {
  Hold hold(fault_mutex);
  for (uint32_t at = 1; at < fault_kind_count; ++at) {
    const FaultKind& known = fault_kinds[at];
    if (known.variant == kind.variant && known.bundle == kind.bundle && known.spin_budget == kind.spin_budget) {
      *tag = static_cast<int32_t>(at);
      return true;
    }
  }
  if (fault_kind_count == kMaxFaultKinds) {
    failure.words << "spin_budget is " << kind.spin_budget << ", but " << kMaxFaultKinds - 1
                  << " different launches (variant, bundle, budget) have had one already, and a fault can name no more; "
                  << "use fewer different budgets";
    return failure.of(kUsage);
  }
  fault_kinds[fault_kind_count] = kind;
  *tag = static_cast<int32_t>(fault_kind_count++);
  return true;
}

bool read_fault(int ordinal, Words& words) {  // makes no call of the driver
  auto* record = static_cast<const volatile int32_t*>(__atomic_load_n(&fault_records[ordinal], __ATOMIC_ACQUIRE));
  if (!record || record[0] <= 0) return false;
  Hold hold(fault_mutex);
  uint32_t tag = static_cast<uint32_t>(record[0]);
  if (tag >= fault_kind_count) return false;
  const FaultKind& kind = fault_kinds[tag];
  words << "ring consumer " << kind.variant->name << " of " << kind.bundle->name << "-" << kind.bundle->arch
        << " gave up on cuda:" << ordinal << " after " << kind.spin_budget << " polls: slot " << record[2] << ", row "
        << record[1] << ", elements " << record[3] * 8 << " to " << record[3] * 8 + 7
        << " of its mailbox were not published";
  return true;
}

// ------------------------------------------------------------------------------------------------------- geometry --

constexpr int64_t kAlignment = 16, kVectorElems = 8, kMaxStride = INT32_MAX, kMaxRows = INT32_MAX, kElemBytes = 2;
constexpr int kMaxOperands = 5, kMaxFixed = 6;
const char* const kDelta = "delta";

struct Value {  // an argument that should be a tensor
  const TVMFFIAny* any;
  const DLTensor* tensor;  // nullptr: it is something else
};

int64_t stride_of(const DLTensor& tensor, int dim) {
  if (tensor.strides) return tensor.strides[dim];
  int64_t stride = 1;
  for (int at = tensor.ndim - 1; at > dim; --at) stride *= tensor.shape[at];
  return stride;
}

uint64_t address_of(const DLTensor& tensor) {
  return tensor.data ? reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset : 0;
}

int64_t elements_of(const DLTensor& tensor) {
  int64_t count = 1;
  for (int dim = 0; dim < tensor.ndim; ++dim) count *= tensor.shape[dim];
  return count;
}

bool is_bf16(const DLTensor& tensor) {
  return tensor.dtype.code == kDLBfloat && tensor.dtype.bits == 16 && tensor.dtype.lanes == 1;
}
bool is_fp32(const DLTensor& tensor) {
  return tensor.dtype.code == kDLFloat && tensor.dtype.bits == 32 && tensor.dtype.lanes == 1;
}

Words& operator<<(Words& words, DLDataType dtype) {
  const char* family = dtype.code == kDLBfloat    ? "bfloat"
                       : dtype.code == kDLFloat   ? "float"
                       : dtype.code == kDLInt     ? "int"
                       : dtype.code == kDLUInt    ? "uint"
                       : dtype.code == kDLComplex ? "complex"
                                                  : nullptr;
  if (dtype.lanes == 1 && dtype.code == kDLBool) return words << "torch.bool";
  if (dtype.lanes == 1 && family) return words << "torch." << family << static_cast<int>(dtype.bits);
  return words.format("dtype (code %u, %u bits, %u lanes)", dtype.code, dtype.bits, dtype.lanes);
}

Words& operator<<(Words& words, DLDevice device) {
  if (device.device_type == kDLCPU) return words << "cpu";
  if (device.device_type == kDLCUDA) return words << "cuda:" << device.device_id;
  return words << "device type " << static_cast<int>(device.device_type) << ":" << device.device_id;
}

Words& add_shape(Words& words, const DLTensor& tensor) {
  words << "[";
  for (int dim = 0; dim < tensor.ndim; ++dim) words << (dim ? ", " : "") << tensor.shape[dim];
  return words << "]";
}

Words& add_strides(Words& words, const DLTensor& tensor, const char* open, const char* close) {
  words << open;
  for (int dim = 0; dim < tensor.ndim; ++dim) words << (dim ? ", " : "") << stride_of(tensor, dim);
  return words << (tensor.ndim == 1 && *open == '(' ? "," : "") << close;
}

// Numbers as Python writes them: the shortest digits that read back as the same value.
Words& add_float(Words& words, double value) {
  if (value != value) return words << "nan";
  if (value - value != 0) return words << (value > 0 ? "inf" : "-inf");
  char buffer[40];
  for (int digits = 1; digits <= 17; ++digits) {
    snprintf(buffer, sizeof buffer, "%.*g", digits, value);
    if (strtod(buffer, nullptr) == value) break;
  }
  double magnitude = value < 0 ? -value : value;
  if (strchr(buffer, 'e') && magnitude >= 1e-4 && magnitude < 1e16) snprintf(buffer, sizeof buffer, "%.0f", value);
  words << buffer;
  return strpbrk(buffer, ".e") ? words : words << ".0";
}

bool text_of(const TVMFFIAny& any, const char** data, size_t* size) {
  if (any.type_index == kTVMFFIRawStr) {
    *data = any.v_c_str;
    *size = strlen(any.v_c_str);
  } else if (any.type_index == kTVMFFISmallStr) {
    *data = any.v_bytes;
    *size = any.small_str_len;
  } else if (any.type_index == kTVMFFIStr) {
    auto* bytes = reinterpret_cast<const TVMFFIByteArray*>(any.v_obj + 1);
    *data = bytes->data;
    *size = bytes->size;
  } else {
    return false;
  }
  return true;
}

const char* type_of(const TVMFFIAny& any) {  // as Python calls it
  switch (any.type_index) {
    case kTVMFFINone: return "NoneType";
    case kTVMFFIInt: return "int";
    case kTVMFFIBool: return "bool";
    case kTVMFFIFloat: return "float";
    case kTVMFFIRawStr: case kTVMFFISmallStr: case kTVMFFIStr: return "str";
    case kTVMFFIDLTensorPtr: case kTVMFFITensor: return "Tensor";
    case kTVMFFIArray: case kTVMFFIList: return "list";
    default: {
      const TVMFFITypeInfo* info = any.type_index < kTVMFFIStaticObjectBegin ? nullptr : TVMFFIGetTypeInfo(any.type_index);
      return info ? info->type_key.data : "object";
    }
  }
}

Words& operator<<(Words& words, const TVMFFIAny& any) {  // as Python's repr, as far as it matters
  const char* data;
  size_t size;
  switch (any.type_index) {
    case kTVMFFINone: return words << "None";
    case kTVMFFIInt: return words << any.v_int64;
    case kTVMFFIBool: return words << (any.v_int64 ? "True" : "False");
    case kTVMFFIFloat: return add_float(words, any.v_float64);
    default: break;
  }
  if (text_of(any, &data, &size)) return (words << "'").add(data, size) << "'";
  return words << type_of(any);
}

// Describes what was given for a message: dtype, shape, strides, device.
Words& operator<<(Words& words, const Value& value) {
  if (!value.tensor) return words << type_of(*value.any) << " " << *value.any;
  const DLTensor& tensor = *value.tensor;
  words << tensor.dtype << " ";
  add_shape(words, tensor) << " with strides ";
  return add_strides(words, tensor, "[", "]") << " on " << tensor.device;
}

struct Expected {  // what one operand has to be
  const char* name;
  int reads;      // it reads blocks 0 to reads - 1; an operand [rows, H] is one block
  int write;      // the block that it writes, or -1
  int blocks;     // -1: an operand [rows, H]; n: [rows, B, H] with B >= n
  Argument pointer;

  int touched() const { return reads > write ? reads : write + 1; }  // blocks up to the last that is touched
  bool touches(int block) const { return block < reads || block == write; }
};

struct View {  // geometry of one operand that passed
  Expected expected;
  int64_t rows, row_stride, block_stride, hidden;  // strides in elements; 0 where there is no second row or block
  int64_t extent;                                  // bytes to behind the last that may be touched
  int64_t offset(int block) const { return block * block_stride * kElemBytes; }
};

using Wide = __int128;

struct Ranges {  // byte ranges of one size at equal distances
  Wide start, step, count, size;
  Wide end() const { return start + (count - 1) * step + size; }
};

Wide floor_div(Wide a, Wide b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// The sum of (factor * i + offset) // modulus over 0 <= i < count; Graham, Knuth, Patashnik, Concrete Mathematics, 3.5.
Wide floor_sum(Wide count, Wide modulus, Wide factor, Wide offset) {
  Wide total = 0;
  for (;;) {
    Wide whole_factor = floor_div(factor, modulus), whole_offset = floor_div(offset, modulus);
    total += whole_factor * (count * (count - 1) / 2) + whole_offset * count;
    factor -= whole_factor * modulus;
    offset -= whole_offset * modulus;
    Wide highest = factor * count + offset;
    if (highest < modulus) return total;
    count = highest / modulus;  // lattice points under a line, counted along the other axis
    offset = highest % modulus;
    Wide next = factor;
    factor = modulus;
    modulus = next;
  }
}

// Tells whether any range of `one` shares a byte with any of `other`, in a time that does not grow with their number.
bool ranges_touch(const Ranges& one, const Ranges& other) {
  if (one.end() <= other.start || other.end() <= one.start) return false;
  Wide first = 0, last = one.count - 1, reach = one.size + other.size - 2;
  Wide shifted = one.start - other.start + one.size - 1;  // 0 <= shifted + i * step - j * other.step <= reach
  Wide span = (other.count - 1) * other.step + reach;
  if (one.step) {
    Wide from = -floor_div(shifted, one.step), to = floor_div(span - shifted, one.step);
    first = from > 0 ? from : 0;
    last = last < to ? last : to;
  } else {
    first = shifted >= 0 && shifted <= span ? 0 : 1;
    last = 0;  // all lie in one place
  }
  if (first > last) return false;
  if (other.step <= reach + 1 || other.count == 1) return true;  // no gap between its ranges is wide enough
  Wide offset = shifted + first * one.step, count = last - first + 1;
  return floor_sum(count, other.step, one.step, offset) > floor_sum(count, other.step, one.step, offset - reach - 1);
}

Ranges ranges_of(const View& view, uint64_t start) {
  return {start, view.row_stride * kElemBytes, view.rows, view.hidden * kElemBytes};
}

bool rows_touch(const View& one, uint64_t start, const View& other, uint64_t other_start) {
  return one.rows && other.rows && ranges_touch(ranges_of(one, start), ranges_of(other, other_start));
}

View make_view(const Expected& expected, const DLTensor& tensor) {
  View view = {expected, tensor.shape[0], 0, 0, tensor.shape[tensor.ndim - 1], 0};
  if (view.rows > 1) view.row_stride = stride_of(tensor, 0);
  if (expected.blocks >= 0 && tensor.shape[1] > 1) view.block_stride = stride_of(tensor, 1);
  if (int touched = expected.touched())
    view.extent = ((view.rows - 1) * view.row_stride + (touched - 1) * view.block_stride + view.hidden) * kElemBytes;
  return view;
}

void stride_problems(const Expected& what, const DLTensor& tensor, Words& problems) {
  for (int dim = 0; dim < tensor.ndim - 1; ++dim) {
    int64_t stride = stride_of(tensor, dim);
    const char* unit = dim ? "blocks" : "rows";
    if (tensor.shape[dim] <= 1) continue;  // a stride that is never followed may be anything
    if (stride % kVectorElems || stride < 0)
      problems.line() << what.name << " has " << stride << " elements between " << unit << "; a multiple of "
                      << kVectorElems << " (" << kAlignment << " bytes) is wanted";
    else if (stride / kVectorElems > kMaxStride)
      problems.line() << what.name << " has " << stride << " elements between " << unit << "; at most "
                      << kMaxStride * kVectorElems << " are allowed";
  }
}

bool overlaps_itself(const View& view, Words& problems) {
  const Expected& what = view.expected;
  if (what.write < 0) return false;
  bool touch = view.rows > 1 && view.row_stride < view.hidden;
  for (int other = 0; other < what.reads && !touch; ++other)
    touch = other != what.write && rows_touch(view, static_cast<uint64_t>(view.offset(what.write)), view,
                                              static_cast<uint64_t>(view.offset(other)));
  if (!touch) return false;
  problems.line() << what.name << " is written, but rows or blocks of it overlap, with strides [" << view.row_stride;
  if (what.blocks >= 0) problems << ", " << view.block_stride;
  problems << "]; copy it first";
  return true;
}

bool memory_problem(const char* name, const DLTensor& tensor, Words& problems) {
  if (elements_of(tensor) == 0 || address_of(tensor)) return false;
  problems.line() << name << " has no memory: its storage was freed or never allocated";
  return true;
}

void operand_problems(const Expected& what, const Value& value, const Device& device, Words& problems) {
  int64_t hidden = device.record().hidden;
  Words shape;
  shape << (what.blocks < 0 ? "[rows, " : "[rows, B, ") << hidden << "]";
  if (!value.tensor) {
    problems.line() << what.name << " is " << value << "; a dense torch.bfloat16 tensor " << shape << " is wanted";
    return;
  }
  const DLTensor& tensor = *value.tensor;
  if (!is_bf16(tensor)) {
    problems.line() << what.name << " is " << value << "; torch.bfloat16 is wanted";
  } else if (tensor.ndim != (what.blocks < 0 ? 2 : 3) || tensor.shape[tensor.ndim - 1] != hidden) {
    problems.line() << what.name << " is " << value << "; a tensor " << shape << " is wanted";
  } else if (tensor.device.device_type != kDLCUDA || tensor.device.device_id != device.ordinal) {
    problems.line() << what.name << " is " << value << "; a tensor on " << device << " is wanted";
  } else {
    Words found;
    if (stride_of(tensor, tensor.ndim - 1) != 1)
      found.line() << what.name << " is " << value << "; its last stride must be 1";
    if (what.blocks >= 0 && tensor.shape[1] < what.blocks)
      found.line() << what.name << " holds " << tensor.shape[1] << " blocks per row; at least " << what.blocks
                   << " are wanted";
    stride_problems(what, tensor, found);
    if (found.empty() && tensor.shape[0] > kMaxRows)
      found.line() << what.name << " has " << tensor.shape[0] << " rows; at most " << kMaxRows << " are allowed";
    if (found.empty() && !overlaps_itself(make_view(what, tensor), found))
      memory_problem(what.name, tensor, found);
    if (!found.empty()) problems.line() << found;
  }
}

bool check_geometry(const Expected* expected, const Value* values, int count, const Device& device, View* views,
                    Failure& failure) {
  for (int at = 0; at < count; ++at) operand_problems(expected[at], values[at], device, failure.words);
  if (!failure.words.empty()) return failure.of(kOperand);
  int64_t rows = -1;
  for (int at = 0; at < count; ++at) {
    views[at] = make_view(expected[at], *values[at].tensor);
    if (strcmp(expected[at].name, "out") == 0) rows = views[at].rows;
  }
  if (rows < 0) rows = views[0].rows;
  for (int at = 0; at < count; ++at)
    if (views[at].rows != rows)
      failure.words.line() << expected[at].name << " has " << views[at].rows << " rows, but out has " << rows
                           << "; all operands of a launch need the same number";
  return failure.words.empty() || failure.of(kOperand);
}

struct Bound {  // a tensor that is bound ahead of launches
  const char* name;
  uint64_t address;
  int64_t bytes;
  int64_t shape[3];
  TVMFFIObject* owner;  // keeps the memory, where the caller passed a tensor that owns it
  bool written;
};

// Lists what is wrong with a contiguous tensor that is bound ahead of launches; -1 in `shape` allows any length.
void vector_problems(const char* name, const Value& value, int ndim, const int64_t* shape, bool fp32, int64_t alignment,
                     Words& problems) {
  const char* dtype = fp32 ? "torch.float32" : "torch.bfloat16";
  if (!value.tensor) {
    problems.line() << name << " is " << type_of(*value.any) << "; a torch tensor [";
    for (int dim = 0; dim < ndim; ++dim) problems << (dim ? ", " : "") << shape[dim];
    problems << "] of " << dtype << " is wanted";
    return;
  }
  const DLTensor& tensor = *value.tensor;
  if (fp32 ? !is_fp32(tensor) : !is_bf16(tensor))
    problems.line() << name << " is " << tensor.dtype << "; " << dtype << " is wanted";
  bool fits = tensor.ndim == ndim, contiguous = true;
  for (int dim = 0; dim < ndim && fits; ++dim) fits = shape[dim] < 0 || tensor.shape[dim] == shape[dim];
  if (!fits) {
    problems.line() << name << " is ";
    add_shape(problems, tensor) << "; [";
    for (int dim = 0; dim < ndim; ++dim) {
      if (dim) problems << ", ";
      if (shape[dim] < 0) problems << "any";
      else problems << shape[dim];
    }
    problems << "] is wanted";
    return;
  }
  int64_t step = 1;
  for (int dim = ndim - 1; dim >= 0 && elements_of(tensor); --dim) {
    contiguous = contiguous && (tensor.shape[dim] == 1 || stride_of(tensor, dim) == step);
    step *= tensor.shape[dim];
  }
  if (!contiguous) {
    problems.line() << name << " has strides ";
    add_strides(problems, tensor, "(", ")") << "; it must be contiguous";
  } else if (!memory_problem(name, tensor, problems) && address_of(tensor) % static_cast<uint64_t>(alignment)) {
    problems.line() << name;
    problems.format(" starts at %#llx", static_cast<unsigned long long>(address_of(tensor)))
        << "; it must be aligned to " << alignment << " bytes";
  }
}

Bound bind(const char* name, const Value& value, bool written) {
  const DLTensor& tensor = *value.tensor;
  Bound bound = {name, address_of(tensor), elements_of(tensor) * tensor.dtype.bits / 8, {0, 0, 0}, nullptr, written};
  for (int dim = 0; dim < tensor.ndim && dim < 3; ++dim) bound.shape[dim] = tensor.shape[dim];
  if (value.any->type_index == kTVMFFITensor) {
    bound.owner = value.any->v_obj;
    TVMFFIObjectIncRef(bound.owner);
  }
  return bound;
}

void let_go(Bound& bound) {
  if (bound.owner) TVMFFIObjectDecRef(bound.owner);
  bound = {};
}

bool check_device(const char* name, const DLTensor& tensor, const Device& device, Failure& failure) {
  if (tensor.device.device_type == kDLCUDA && tensor.device.device_id == device.ordinal) return true;
  failure.words << name << ": on " << tensor.device << ", but the bundle was loaded for " << device;
  return failure.of(kOperand);
}

Words& add_distance(Words& words, int64_t distance) {
  if (!distance) return words << "at the same address";
  return words << (distance < 0 ? -distance : distance) << " bytes " << (distance > 0 ? "after" : "before") << " it";
}

// Checks that bound memory which is written, by launches or by producers, is bound once.
bool check_apart(const Bound* bound, int count, Failure& failure) {
  int order[kMaxFixed];
  for (int at = 0; at < count; ++at) {
    int place = at;
    for (; place > 0 && bound[order[place - 1]].address > bound[at].address; --place) order[place] = order[place - 1];
    order[place] = at;
  }
  for (int at = 0; at < count; ++at) {
    const Bound& one = bound[order[at]];
    for (int next = at + 1; next < count; ++next) {
      const Bound& other = bound[order[next]];
      if (other.address >= one.address + static_cast<uint64_t>(one.bytes)) break;
      if (!one.written && !other.written) continue;
      failure.words.line() << one.name << " overlaps " << other.name << ", which starts ";
      add_distance(failure.words, static_cast<int64_t>(other.address - one.address))
          << "; memory that is written must be apart";
    }
  }
  return failure.words.empty() || failure.of(kOperand);
}

struct Fixed {  // bound memory that stays where it is from launch to launch
  const char* name;
  uint64_t address;
  int64_t size;
  bool written;  // by the launch, so that no operand may touch it; otherwise only operands that are written must not
};

bool may_be_one_view(const View& source, const View& other) {
  const char* name = other.expected.name;
  return strcmp(source.expected.name, kDelta) == 0 && source.expected.blocks < 0 && other.expected.blocks < 0 &&
         (strcmp(name, "prefix") == 0 || strcmp(name, "aux") == 0 || strcmp(name, "out") == 0) &&
         source.row_stride == other.row_stride;
}

// Tells whether two operands share bytes in a way that would corrupt a result.
bool clash(const View& one, uint64_t start, const View& other, uint64_t other_start) {
  if (start == other_start && (may_be_one_view(one, other) || may_be_one_view(other, one))) return false;
  if (start + static_cast<uint64_t>(one.extent) <= other_start || other_start + static_cast<uint64_t>(other.extent) <= start)
    return false;
  for (int a = 0; a < one.expected.touched(); ++a)
    for (int b = 0; b < other.expected.touched(); ++b)
      if (one.expected.touches(a) && other.expected.touches(b) && (a == one.expected.write || b == other.expected.write) &&
          rows_touch(one, start + static_cast<uint64_t>(one.offset(a)), other,
                     other_start + static_cast<uint64_t>(other.offset(b))))
        return true;
  return false;
}

bool clash_with_fixed(const View& view, uint64_t start, const Fixed& fixed) {
  uint64_t end = fixed.address + static_cast<uint64_t>(fixed.size);
  if (start + static_cast<uint64_t>(view.extent) <= fixed.address || end <= start || !view.rows) return false;
  Ranges bound = {fixed.address, 0, 1, fixed.size};
  for (int block = 0; block < view.expected.touched(); ++block) {
    bool counts = block == view.expected.write || (fixed.written && block < view.expected.reads);
    if (counts && ranges_touch(ranges_of(view, start + static_cast<uint64_t>(view.offset(block))), bound)) return true;
  }
  return false;
}

void add_overlap(const char* name, uint64_t start, const char* other, uint64_t other_start, Words& problems) {
  problems.line() << name << " overlaps " << other << ", which starts ";
  add_distance(problems, static_cast<int64_t>(other_start - start))
      << "; delta may be one view with aux, out, prefix; nothing else may share memory";
}

// ---------------------------------------------------------------------------------------------------------- plans --

struct Metadata {  // what a tensor was, for telling whether another is alike
  DLDataType dtype;
  DLDevice device;
  int ndim;
  int64_t shape[3], strides[3];
};

struct Plan {  // launches of one kernel for one geometry of operands: all but addresses and stream is packed
  int count;
  bool idle;      // there are no rows: nothing is launched
  bool checks;    // overlap is checked
  Metadata metadata[kMaxOperands];
  View views[kMaxOperands];
  int16_t pointers[kMaxOperands];  // where the operands' addresses go
  int fixed_count;
  Fixed fixed[kMaxFixed];
  LaunchConfig config;
  LaunchAttribute attributes[2];
  Function function;
  size_t parameter_bytes;
  unsigned char parameters[kParameterRoom];
  const Layout* layout;
  Text what;
  Device* device;
  Plan* next;
};

bool alike(const Metadata& known, const DLTensor& tensor) {
  if (memcmp(&known.dtype, &tensor.dtype, sizeof known.dtype) != 0 || known.ndim != tensor.ndim ||
      memcmp(&known.device, &tensor.device, sizeof known.device) != 0)
    return false;
  for (int dim = 0; dim < known.ndim; ++dim)
    if (known.shape[dim] != tensor.shape[dim] || known.strides[dim] != stride_of(tensor, dim)) return false;
  return true;
}

bool accepts(const Plan& plan, const Value* values, int count) {
  if (plan.count != count) return false;
  for (int at = 0; at < count; ++at)
    if (!values[at].tensor || !alike(plan.metadata[at], *values[at].tensor)) return false;
  return true;
}

void remember(Plan& plan, const Value* values, const View* views, int count) {
  plan.count = count;
  for (int at = 0; at < count; ++at) {
    const DLTensor& tensor = *values[at].tensor;
    Metadata& kept = plan.metadata[at];
    kept = {tensor.dtype, tensor.device, tensor.ndim, {0, 0, 0}, {0, 0, 0}};
    for (int dim = 0; dim < tensor.ndim; ++dim) {
      kept.shape[dim] = tensor.shape[dim];
      kept.strides[dim] = stride_of(tensor, dim);
    }
    plan.views[at] = views[at];
  }
}

template <typename T>
void put(Plan& plan, Argument argument, T value) {
  int16_t offset = plan.layout->offsets[argument];
  if (offset >= 0) memcpy(plan.parameters + offset, &value, sizeof value);
}
void put_int(Plan& plan, Argument argument, int64_t value) { put(plan, argument, static_cast<int32_t>(value)); }

void take_kernel(Plan& plan, const Loaded& loaded, KernelKind kind, Device& device, int64_t rows, bool pdl) {
  const ImageRecord& image = *loaded.image;
  plan.device = &device;
  plan.function = loaded.function;
  plan.layout = &device.library->layouts[kind];
  plan.parameter_bytes = plan.layout->bytes;
  int64_t clusters = (rows + image.rows_per_cluster - 1) / image.rows_per_cluster;
  plan.config.grid[0] = static_cast<uint32_t>(image.cluster * clusters);
  plan.config.block[0] = image.block_threads;
  plan.config.grid[1] = plan.config.grid[2] = plan.config.block[1] = plan.config.block[2] = 1;
  plan.config.smem = image.smem_dynamic;
  plan.attributes[0].id = kClusterDimension;
  plan.attributes[0].value[0] = image.cluster;
  plan.attributes[0].value[1] = plan.attributes[0].value[2] = 1;
  plan.attributes[1].id = kProgrammaticSerialization;
  plan.attributes[1].value[0] = 1;
  plan.config.attribute_count = pdl ? 2 : 1;
  for (int at = 0; at < plan.count; ++at) plan.pointers[at] = plan.layout->offsets[plan.views[at].expected.pointer];
}

bool misplaced(const Plan& plan, const uint64_t* addresses, Failure& failure) {
  for (int at = 0; at < plan.count; ++at) {
    const char* name = plan.views[at].expected.name;
    if (!addresses[at])
      failure.words.line() << name << " has no memory";
    else if (addresses[at] % kAlignment)
      (failure.words.line() << name).format(" starts at %#llx", static_cast<unsigned long long>(addresses[at]))
          << "; it must be aligned to " << kAlignment << " bytes";
  }
  return failure.of(kOperand);
}

bool list_clashes(const Plan& plan, const uint64_t* addresses, Failure& failure) {
  for (int at = 0; at < plan.count; ++at)
    for (int other = at + 1; other < plan.count; ++other)
      if (clash(plan.views[at], addresses[at], plan.views[other], addresses[other]))
        add_overlap(plan.views[at].expected.name, addresses[at], plan.views[other].expected.name, addresses[other],
                    failure.words);
  for (int fixed = 0; fixed < plan.fixed_count; ++fixed)
    for (int at = 0; at < plan.count; ++at)
      if (clash_with_fixed(plan.views[at], addresses[at], plan.fixed[fixed]))
        add_overlap(plan.views[at].expected.name, addresses[at], plan.fixed[fixed].name, plan.fixed[fixed].address,
                    failure.words);
  return failure.words.empty() || failure.of(kOperand);
}

// Checks alignment, and memory that operands share. Intervals that do not touch are the rule, so that is tested first.
bool check_addresses(const Plan& plan, const uint64_t* addresses, Failure& failure) {
  uint64_t bits = 0, low = UINT64_MAX, high = 0;
  bool missing = false, apart = true;
  for (int at = 0; at < plan.count; ++at) {
    uint64_t start = addresses[at], end = start + static_cast<uint64_t>(plan.views[at].extent);
    bits |= start;
    missing = missing || !start;
    low = start < low ? start : low;
    high = end > high ? end : high;
    for (int other = 0; other < at; ++other)
      apart = apart && (end <= addresses[other] ||
                        addresses[other] + static_cast<uint64_t>(plan.views[other].extent) <= start);
  }
  if (missing || bits % kAlignment) return misplaced(plan, addresses, failure);
  if (!plan.checks) return true;
  for (int fixed = 0; fixed < plan.fixed_count; ++fixed)
    apart = apart && (high <= plan.fixed[fixed].address ||
                      plan.fixed[fixed].address + static_cast<uint64_t>(plan.fixed[fixed].size) <= low);
  return apart || list_clashes(plan, addresses, failure);
}

// Launches on the device's primary context, whichever is current on this thread; another library's stays so.
Status call_driver(const Plan& plan, const LaunchConfig& config, void** extra) {
  Context found = nullptr;
  if (driver.cuCtxGetCurrent(&found) || !found) driver.cuCtxSetCurrent(plan.device->context);
  else if (found != plan.device->context) {
    Current current(plan.device->context);
    return driver.cuLaunchKernelEx(&config, plan.function, nullptr, extra);
  }
  return driver.cuLaunchKernelEx(&config, plan.function, nullptr, extra);
}

bool launch(const Plan& plan, const uint64_t* addresses, Stream stream, Failure& failure) {
  if (plan.idle) return true;
  if (forked) {
    failure.words << kForked;
    return failure.of(kDriver);
  }
  if (!check_addresses(plan, addresses, failure)) return false;
  alignas(16) unsigned char parameters[kParameterRoom];
  memcpy(parameters, plan.parameters, plan.parameter_bytes);
  for (int at = 0; at < plan.count; ++at)
    if (plan.pointers[at] >= 0) memcpy(parameters + plan.pointers[at], &addresses[at], sizeof addresses[at]);
  LaunchConfig config = plan.config;
  config.stream = stream;
  config.attributes = const_cast<LaunchAttribute*>(plan.attributes);
  size_t size = plan.parameter_bytes;
  void* extra[] = {reinterpret_cast<void*>(1), parameters, reinterpret_cast<void*>(2), &size, nullptr};
  Status status = call_driver(plan, config, extra);
  if (!status) return true;
  Words what;
  what << "launch " << plan.what << " for " << plan.views[0].rows << " rows on " << *plan.device;
  refused(status, what.c_str(), failure);
  Words fault;
  if (read_fault(plan.device->ordinal, fault)) failure.words << ". What failed: " << fault;
  return false;
}

constexpr int kMaxPlans = 256;

class Route {  // plans of one way of launching an object; the last one used is tried first
 public:
  ~Route() { forget(); }

  const Plan* find(const Value* values, int count) {
    const Plan* last = __atomic_load_n(&last_, __ATOMIC_ACQUIRE);
    if (last && accepts(*last, values, count)) return last;
    Hold hold(mutex_);
    for (Plan* plan = plans_; plan; plan = plan->next)
      if (accepts(*plan, values, count)) {
        __atomic_store_n(&last_, plan, __ATOMIC_RELEASE);
        return plan;
      }
    return nullptr;
  }

  // Keeps a copy of a plan; beyond kMaxPlans geometries nothing more is kept, and those are planned for each launch.
  void keep(const Plan& plan) {
    Hold hold(mutex_);
    if (count_ == kMaxPlans) return;
    auto* kept = static_cast<Plan*>(malloc(sizeof(Plan)));
    if (!kept) return;
    *kept = plan;
    kept->next = plans_;
    plans_ = kept;
    ++count_;
    __atomic_store_n(&last_, kept, __ATOMIC_RELEASE);
  }

  void forget() {
    Hold hold(mutex_);
    __atomic_store_n(&last_, static_cast<Plan*>(nullptr), __ATOMIC_RELEASE);
    while (plans_) {
      Plan* next = plans_->next;
      free(plans_);
      plans_ = next;
    }
    count_ = 0;
  }

 private:
  Mutex mutex_;
  Plan* plans_ = nullptr;
  Plan* last_ = nullptr;
  int count_ = 0;
};

// ------------------------------------------------------------------------------------------------------- consumer --

enum PdlMode { kPdlOff, kPdlOn, kPdlEarly };

struct Key {
  int64_t nb;
  bool has_delta;
  int64_t write;  // -1: none
  bool last;
};

struct Wanted {  // a variant
  Key key;
  int64_t slots;
  bool aux, stats;
};

Words& operator<<(Words& words, const Wanted& wanted) {
  words << "nb" << wanted.key.nb << (wanted.key.has_delta ? "-delta" : "");
  if (wanted.key.write >= 0) words << "-write" << wanted.key.write;
  words << (wanted.key.last ? "-final" : "");
  if (wanted.slots) words << "-ring" << wanted.slots;
  return words << (wanted.aux ? "-aux" : "") << (wanted.stats ? "-stats" : "");
}

bool same_key(const VariantRecord& record, const Key& key) {
  return record.nb == key.nb && (record.has_delta != 0) == key.has_delta && record.write == key.write &&
         (record.last != 0) == key.last;
}

const VariantRecord* find_variant(const Device& device, const Wanted& wanted) {
  for (const VariantRecord& record : part<VariantRecord>(device.record().variants))
    if (same_key(record, wanted.key) && record.slots == wanted.slots && (record.aux != 0) == wanted.aux &&
        (record.stats != 0) == wanted.stats)
      return &record;
  return nullptr;
}

bool holds_key(const Device& device, const Key& key) {
  for (const VariantRecord& record : part<VariantRecord>(device.record().variants))
    if (same_key(record, key)) return true;
  return false;
}

constexpr int64_t kMaxBlocks = 16, kMaxSlots = 16;
constexpr int kShown = 5;

int64_t variant_distance(const Wanted& asked, const VariantRecord& other) {
  int64_t blocks = asked.key.nb > other.nb ? asked.key.nb - other.nb : other.nb - asked.key.nb;
  return smaller(8, 2 * blocks) + 8 * (asked.key.last != (other.last != 0)) +
         6 * (asked.key.has_delta != (other.has_delta != 0)) + 4 * (asked.key.write != other.write) +
         4 * ((asked.slots != 0) != (other.slots != 0)) + (asked.slots != other.slots) +
         2 * (asked.aux != (other.aux != 0)) + 2 * (asked.stats != (other.stats != 0));
}

bool beyond_kernels(int64_t nb, int64_t slots, Words& words) {
  if (nb > kMaxBlocks) words << "No bundle can hold it: there are at most " << kMaxBlocks << " saved blocks";
  else if (slots > kMaxSlots) words << "No bundle can hold it: a mailbox has at most " << kMaxSlots << " slots";
  return nb > kMaxBlocks || slots > kMaxSlots;
}

void statistics_remedy(int64_t nb, Words& words) {
  words << "variants.stats is true, in a deployment attn_stats_blocks has \"" << nb
        << ":1\" and attn_stats has the row counts, such as \"1:1\"";
}

void begin_next_step(Words& words) { words << "\nNext step: change the configuration so that "; }
void end_next_step(const Device& device, Words& words) {
  words << ", and build again:\n" << device.record().build_again;
}
void add_bundle(const Device& device, Words& words) {
  words << "\n  bundle: " << library_path() << " (" << device.record().name << " for " << device.record().arch << ")";
}

bool variant_miss(const Device& device, const Wanted& asked, Failure& failure) {
  Words& words = failure.words;
  words << "the bundle holds no variant '" << asked << "'\n  nearest present: ";
  Part<VariantRecord> all = part<VariantRecord>(device.record().variants);
  List<bool> taken;
  for (uint32_t at = 0; at < all.count; ++at) taken.push(false);
  for (int shown = 0; shown < kShown && shown < static_cast<int>(all.count); ++shown) {
    uint32_t best = UINT32_MAX;  // records are in the order that decides among equals
    for (uint32_t at = 0; at < all.count; ++at)
      if (!taken[at] && (best == UINT32_MAX || variant_distance(asked, all[at]) < variant_distance(asked, all[best])))
        best = at;
    taken[best] = true;
    words << (shown ? ", " : "") << all[best].name;
  }
  if (!all.count) words << "none, the bundle is empty";
  add_bundle(device, words);
  words << "\n  mailbox slots: ";
  bool some = false;
  for (int64_t slots = 1; slots <= kMaxSlots; ++slots)
    for (const VariantRecord& record : all)
      if (record.slots == slots) {
        words << (some ? ", " : "") << slots;
        some = true;
        break;
      }
  if (!some) words << "none";
  for (const StatisticsTable& table : part<StatisticsTable>(device.record().statistics))
    words << "\n  tp " << table.tp << ", dcp " << table.dcp << ": attn_stats '" << table.rows_text
          << "', attn_stats_blocks '" << table.blocks_text << "'";
  if (!device.record().statistics.count) words << "\n  (tp, dcp) tables: none";
  Words remedy;
  if (beyond_kernels(asked.key.nb, asked.slots, remedy)) {
    words << "\n" << remedy;
  } else if (asked.stats && asked.key.nb == 0) {
    words << "\nNo bundle can hold it: a consumer of no saved blocks has no statistics; bind none to it";
  } else {
    begin_next_step(words);
    words << "model (layers, block_size, leading_dense_layers) has this consumer";
    if (asked.slots) words << ", variants.ring is true, mailbox.slots has " << asked.slots;
    if (asked.aux) words << ", variants.aux is true";
    if (asked.stats) statistics_remedy(asked.key.nb, words << ", ");
    end_next_step(device, words);
  }
  return failure.of(kMiss);
}

bool producer_miss(const Device& device, KernelKind kind, int64_t nb, Failure& failure) {
  Words& words = failure.words;
  words << "the bundle holds no producer '" << kKernelNames[kind];
  if (kind == kStatistics) words << "-nb" << nb;
  words << "'\n  present: ";
  Part<ProducerRecord> all = part<ProducerRecord>(device.record().producers);
  for (uint32_t at = 0; at < all.count; ++at) words << (at ? ", " : "") << all[at].name;
  if (!all.count) words << "none";
  add_bundle(device, words);
  Words remedy;
  if (beyond_kernels(nb, 0, remedy)) {
    words << "\n" << remedy;
  } else {
    begin_next_step(words);
    if (kind == kStatistics && nb) statistics_remedy(nb, words);
    else words << "variants.ring is true";
    end_next_step(device, words);
  }
  return failure.of(kMiss);
}

const ProducerRecord* find_producer(const Device& device, KernelKind kind, int64_t nb) {
  Words name;
  name << kKernelNames[kind];
  if (kind == kStatistics) name << "-nb" << nb;
  for (const ProducerRecord& record : part<ProducerRecord>(device.record().producers))
    if (equal(record.name, name.c_str())) return &record;
  return nullptr;
}

struct Consumer {
  Device* device;
  Key key;
  double eps[2];  // under the logits, of the output norm
  PdlMode pdl;
  bool checks;
  Bound weights[3];
  Bound mailbox;  // no address: none is bound
  int64_t spin_budget, given_fault, given_tag;
  bool aux;
  Bound mixture, scal;
  List<int64_t> rows;  // whose launches take statistics
  Route routes[4];     // by 2 * ring + aux

  bool has_ring() const { return mailbox.address != 0; }
  bool has_statistics() const { return mixture.address != 0; }
  bool takes_statistics(int64_t count) const {
    for (int64_t each : rows)
      if (each == count) return has_statistics();
    return false;
  }
};

bool check_apart(const Consumer& consumer, const Bound* mailbox, const Bound* mixture, const Bound* scal,
                 Failure& failure) {
  Bound bound[kMaxFixed];
  int count = 0;
  for (const Bound& weight : consumer.weights) bound[count++] = weight;
  const Bound* others[] = {mailbox, mixture, scal};
  for (const Bound* each : others)
    if (each && each->address) bound[count++] = *each;
  return check_apart(bound, count, failure);
}

// Puts on the device all code that launches can need, what is bound and what is about to be.
bool load_variants(Consumer& consumer, int64_t slots, bool aux, bool stats, Failure& failure) {
  const int64_t sources[] = {0, slots};
  for (int64_t source : sources) {
    for (int option = 0; option < 4; ++option) {
      if ((option & 1 && !aux) || (option & 2 && !stats)) continue;
      const VariantRecord* record =
          find_variant(*consumer.device, {consumer.key, source, (option & 1) != 0, (option & 2) != 0});
      if (record && !load_choices(*consumer.device, record->choices, failure)) return false;
    }
    const ProducerRecord* publisher = source ? find_producer(*consumer.device, kPublish, 0) : nullptr;
    if (publisher && !load_choices(*consumer.device, publisher->choices, failure)) return false;
  }
  return true;
}

bool require_variant(const Consumer& consumer, const int64_t* slots, int slot_counts, const int* options,
                     int option_count, Failure& failure) {
  for (int at = 0; at < slot_counts; ++at)
    for (int option = 0; option < option_count; ++option)
      if (find_variant(*consumer.device,
                       {consumer.key, slots[at], (options[option] & 1) != 0, (options[option] & 2) != 0}))
        return true;
  return variant_miss(*consumer.device, {consumer.key, slots[0], (options[0] & 1) != 0, (options[0] & 2) != 0}, failure);
}

void forget_plans(Consumer& consumer) {
  for (Route& route : consumer.routes) route.forget();
}

bool whole(const TVMFFIAny& any) { return any.type_index == kTVMFFIInt; }

bool bind_ring(Consumer& consumer, const Value& value, const TVMFFIAny& budget, int64_t fault, int64_t tag,
               Failure& failure) {
  const int64_t shape[] = {-1, -1, consumer.device->record().hidden};
  Words& problems = failure.words;
  vector_problems("mailbox", value, 3, shape, false, kAlignment, problems);
  if (problems.empty() && elements_of(*value.tensor) == 0) {
    add_shape(problems << "mailbox is ", *value.tensor)
        << "; at least one slot and row, and H a multiple of 8, are wanted";
  } else if (problems.empty() &&
             value.tensor->shape[1] * value.tensor->shape[2] / kVectorElems > kMaxStride) {
    add_shape(problems << "mailbox is ", *value.tensor)
        << ", " << value.tensor->shape[1] * value.tensor->shape[2] << " elements between slots; at most "
        << kMaxStride * kVectorElems << " are allowed: bind one of fewer rows per slot";
  }
  if (!whole(budget) || budget.v_int64 < 0 || budget.v_int64 > INT32_MAX)
    problems.line() << "spin_budget is " << budget << "; a whole number, 0 to " << INT32_MAX << ", is allowed";
  if (!problems.empty()) return failure.of(kOperand);
  if (!check_device("mailbox", *value.tensor, *consumer.device, failure)) return false;
  Bound bound = bind("mailbox", value, true);
  const int64_t slots = bound.shape[0];
  const int options[] = {0, 1};
  bool fine = check_apart(consumer, &bound, &consumer.mixture, &consumer.scal, failure) &&
              require_variant(consumer, &slots, 1, options, 2, failure) &&
              load_variants(consumer, slots, consumer.aux, consumer.has_statistics() && consumer.rows.size(), failure) &&
              (!budget.v_int64 || fault || open_fault_record(*consumer.device, failure));
  if (!fine) {
    let_go(bound);
    return false;
  }
  let_go(consumer.mailbox);
  consumer.mailbox = bound;
  consumer.spin_budget = budget.v_int64;
  consumer.given_fault = fault;
  consumer.given_tag = tag;
  forget_plans(consumer);
  return true;
}

// The sources that a bundle's variants have: 0, then numbers of mailbox slots.
int source_counts(const Device& device, int64_t* out) {
  int count = 0;
  out[count++] = 0;
  for (int64_t slots = 1; slots <= kMaxSlots; ++slots)
    for (const VariantRecord& record : part<VariantRecord>(device.record().variants))
      if (record.slots == slots) {
        out[count++] = slots;
        break;
      }
  return count;
}

bool bind_aux(Consumer& consumer, Failure& failure) {
  int64_t slots[kMaxSlots + 1];
  const int option = 1;
  if (!require_variant(consumer, slots, source_counts(*consumer.device, slots), &option, 1, failure) ||
      !load_variants(consumer, consumer.has_ring() ? consumer.mailbox.shape[0] : 0, true,
                     consumer.has_statistics() && consumer.rows.size(), failure))
    return false;
  consumer.aux = true;
  forget_plans(consumer);
  return true;
}

void add_bad_rows(const List<TVMFFIAny>& asked, int64_t most, Words& words) {  // numbers first, ascending
  List<TVMFFIAny> bad;
  for (const TVMFFIAny& each : asked) {
    if (!whole(each) || (each.v_int64 >= 1 && each.v_int64 <= most)) continue;
    bad.push(each);
    for (size_t at = bad.size() - 1; at > 0 && bad[at - 1].v_int64 > each.v_int64; --at) {
      bad[at] = bad[at - 1];
      bad[at - 1] = each;
    }
  }
  for (const TVMFFIAny& each : asked)
    if (!whole(each)) bad.push(each);
  words.line() << "rows hold [";
  for (size_t at = 0; at < bad.size(); ++at) words << (at ? ", " : "") << bad[at];
  words << "]; 1 to " << most << ", the rows of mixture, are allowed";
}

bool items_of(const TVMFFIAny& any, List<TVMFFIAny>& out) {
  if (any.type_index == kTVMFFIArray || any.type_index == kTVMFFIList) {
    auto* cell = reinterpret_cast<const TVMFFISeqCell*>(any.v_obj + 1);
    for (int64_t at = 0; at < cell->size; ++at) out.push(static_cast<const TVMFFIAny*>(cell->data)[at]);
  } else if (any.type_index == kTVMFFIShape) {
    auto* cell = reinterpret_cast<const TVMFFIShapeCell*>(any.v_obj + 1);
    for (size_t at = 0; at < cell->size; ++at) {
      TVMFFIAny number = {};
      number.type_index = kTVMFFIInt;
      number.v_int64 = cell->data[at];
      out.push(number);
    }
  } else {
    return false;
  }
  return true;
}

// Checks statistics and binds them; `rows` is nullptr for a producer, which has no row counts.
bool make_statistics(const Device& device, const Value& mixture, const Value& scal, const TVMFFIAny* rows, Bound* out,
                     List<int64_t>* counts, Failure& failure) {
  const int64_t mixture_shape[] = {-1, device.record().hidden}, scal_shape[] = {-1, 2};
  Words& problems = failure.words;
  vector_problems("mixture", mixture, 2, mixture_shape, true, kAlignment, problems);
  vector_problems("scal", scal, 2, scal_shape, true, 8, problems);
  if (problems.empty() && mixture.tensor->shape[0] != scal.tensor->shape[0])
    problems << "mixture holds " << mixture.tensor->shape[0] << " rows, but scal " << scal.tensor->shape[0]
             << "; the same is wanted";
  List<TVMFFIAny> asked;
  if (rows && !items_of(*rows, asked)) {
    problems.line() << "rows is " << *rows << "; some row counts are wanted, as in [1, 2]";
  } else if (problems.empty()) {
    bool good = true;
    for (const TVMFFIAny& each : asked)
      good = good && whole(each) && each.v_int64 >= 1 && each.v_int64 <= mixture.tensor->shape[0];
    if (!good) add_bad_rows(asked, mixture.tensor->shape[0], problems);
  }
  if (!problems.empty()) return failure.of(kOperand);
  for (const TVMFFIAny& each : asked) counts->push(each.v_int64);
  if (!check_device("mixture", *mixture.tensor, device, failure) || !check_device("scal", *scal.tensor, device, failure))
    return false;
  out[0] = bind("mixture", mixture, true);
  out[1] = bind("scal", scal, true);
  return true;
}

bool bind_statistics(Consumer& consumer, const Value& mixture, const Value& scal, const TVMFFIAny& rows,
                     Failure& failure) {
  Bound bound[2] = {};
  List<int64_t> counts;
  if (!make_statistics(*consumer.device, mixture, scal, &rows, bound, &counts, failure)) return false;
  int64_t slots[kMaxSlots + 1];
  const int options[] = {2, 3};
  if (!check_apart(consumer, &consumer.mailbox, &bound[0], &bound[1], failure) ||
      !require_variant(consumer, slots, source_counts(*consumer.device, slots), options, 2, failure) ||
      !load_variants(consumer, consumer.has_ring() ? consumer.mailbox.shape[0] : 0, consumer.aux, counts.size() != 0,
                     failure)) {
    let_go(bound[0]);
    let_go(bound[1]);
    return false;
  }
  let_go(consumer.mixture);
  let_go(consumer.scal);
  consumer.mixture = bound[0];
  consumer.scal = bound[1];
  consumer.rows.clear();
  for (int64_t count : counts) consumer.rows.push(count);
  forget_plans(consumer);
  return true;
}

int expected_operands(const Consumer& consumer, bool ring, bool aux, Expected* out) {
  const Key& key = consumer.key;
  int count = 0, nb = static_cast<int>(key.nb), write = static_cast<int>(key.write);
  if (!ring) out[count++] = {kDelta, 1, -1, -1, kSource};
  out[count++] = {"prefix", key.has_delta ? 1 : 0, 0, -1, kPrefix};
  out[count++] = {"blocks", nb, write, nb > write ? nb : write + 1, kBlocks};
  out[count++] = {"out", 0, 0, -1, kOut};
  if (aux) out[count++] = {"aux", 0, 0, -1, kAux};
  return count;
}

void add_fixed(Plan& plan, const Bound& bound, const char* name, bool written) {
  if (bound.address && bound.bytes) plan.fixed[plan.fixed_count++] = {name, bound.address, bound.bytes, written};
}

int64_t stride_vectors(const Plan& plan, const char* name, bool blocks) {
  for (int at = 0; at < plan.count; ++at)
    if (strcmp(plan.views[at].expected.name, name) == 0)
      return (blocks ? plan.views[at].block_stride : plan.views[at].row_stride) / kVectorElems;
  return 0;
}

bool put_arguments(Plan& plan, const Consumer& consumer, const VariantRecord& variant, bool ring, Failure& failure) {
  const TableRecord& record = consumer.device->record();
  put(plan, kNorm, consumer.weights[0].address);
  put(plan, kQuery, consumer.weights[1].address);
  put(plan, kOutNorm, consumer.weights[2].address);
  put_int(plan, kPrefixRowStride, stride_vectors(plan, "prefix", false));
  put_int(plan, kBlocksRowStride, stride_vectors(plan, "blocks", false));
  put_int(plan, kBlocksBlockStride, stride_vectors(plan, "blocks", true));
  put_int(plan, kOutRowStride, stride_vectors(plan, "out", false));
  put_int(plan, kAuxRowStride, stride_vectors(plan, "aux", false));
  put_int(plan, kWrite, consumer.key.write);
  put_int(plan, kRows, plan.views[0].rows);
  put(plan, kEps, static_cast<float>(consumer.eps[0]));
  put(plan, kOutEps, static_cast<float>(consumer.eps[1]));
  if (variant.stats) {
    put(plan, kMixture, consumer.mixture.address);
    put(plan, kScal, consumer.scal.address);
  }
  if (!ring) {
    put_int(plan, kSourceRowStride, stride_vectors(plan, kDelta, false));
    return true;
  }
  int64_t row_vectors = record.hidden / kVectorElems;
  put_int(plan, kEarly, consumer.pdl == kPdlEarly);
  put(plan, kSource, consumer.mailbox.address);
  put_int(plan, kSourceRowStride, row_vectors);
  put_int(plan, kSourceSlotStride, consumer.mailbox.shape[1] * row_vectors);
  if (!consumer.spin_budget) return true;
  int32_t tag = static_cast<int32_t>(consumer.given_tag);
  uint64_t fault = static_cast<uint64_t>(consumer.given_fault);
  if (!fault) {
    if (!fault_tag({&variant, &record, static_cast<uint32_t>(consumer.spin_budget)}, &tag, failure)) return false;
    fault = reinterpret_cast<uint64_t>(fault_records[consumer.device->ordinal]);
  }
  put_int(plan, kSpinBudget, consumer.spin_budget);
  put(plan, kFault, fault);
  put_int(plan, kFaultTag, tag);
  return true;
}

bool make_plan(Consumer& consumer, bool ring, bool aux, const Value* values, int count, Plan& plan, Failure& failure) {
  memset(static_cast<void*>(&plan), 0, sizeof plan);
  Device& device = *consumer.device;
  Expected expected[kMaxOperands];
  View views[kMaxOperands];
  expected_operands(consumer, ring, aux, expected);
  if (!check_geometry(expected, values, count, device, views, failure)) return false;
  int64_t rows = views[0].rows;
  if (ring && rows > consumer.mailbox.shape[1]) {
    failure.words << "out has " << rows << " rows, but the bound mailbox holds " << consumer.mailbox.shape[1]
                  << " per slot; use an ordinary source for this many rows, or bind a larger mailbox";
    return failure.of(kOperand);
  }
  remember(plan, values, views, count);
  plan.checks = consumer.checks;
  plan.idle = rows == 0;
  if (plan.idle) return true;
  Wanted wanted = {consumer.key, ring ? consumer.mailbox.shape[0] : 0, aux, consumer.takes_statistics(rows)};
  const VariantRecord* variant = find_variant(device, wanted);
  if (!variant) return variant_miss(device, wanted, failure);
  Loaded loaded;
  if (!find_loaded(device, variant->choices, rows, variant->name, &loaded, failure)) return false;
  if (consumer.pdl && !loaded.image->pdl) {
    failure.words << "pdl was asked for, but the code of " << variant->name << " does not support it; leave pdl off";
    return failure.of(kOperand);
  }
  plan.what = variant->name;
  take_kernel(plan, loaded, kConsumer, device, rows, consumer.pdl != kPdlOff);
  const char* names[] = {"weights.norm", "weights.query", "weights.out_norm"};
  for (int at = 0; at < 3; ++at) add_fixed(plan, consumer.weights[at], names[at], false);
  add_fixed(plan, consumer.mailbox, "the mailbox", ring);
  add_fixed(plan, consumer.mixture, "mixture", false);
  add_fixed(plan, consumer.scal, "scal", false);
  return put_arguments(plan, consumer, *variant, ring, failure);
}

// ------------------------------------------------------------------------------------------------------ producers --

struct Producer {
  Device* device;
  KernelKind kind;
  const ProducerRecord* record;
  int64_t nb;
  double eps;
  bool pdl, checks;
  Bound norm, query, mixture, scal;  // statistics
  Bound mailbox;                     // publish
  int64_t slot;
  Route route;

  int64_t room() const { return kind == kStatistics ? mixture.shape[0] : mailbox.shape[1]; }
  uint64_t slot_address() const {
    return mailbox.address + static_cast<uint64_t>(slot * mailbox.shape[1] * mailbox.shape[2] * kElemBytes);
  }
};

bool make_plan(Producer& producer, const Value& value, Plan& plan, Failure& failure) {
  memset(static_cast<void*>(&plan), 0, sizeof plan);
  bool statistics = producer.kind == kStatistics;
  int nb = static_cast<int>(producer.nb);
  Expected expected = statistics ? Expected{"blocks", nb, -1, nb, kBlocks} : Expected{"rows", 1, -1, -1, kSource};
  View view;
  if (!check_geometry(&expected, &value, 1, *producer.device, &view, failure)) return false;
  if (view.rows > producer.room()) {
    if (statistics)
      failure.words << "blocks has " << view.rows << " rows, but mixture holds " << producer.room()
                    << "; bind a larger one";
    else
      failure.words << "rows has " << view.rows << " rows, but a slot of the mailbox holds " << producer.room();
    return failure.of(kOperand);
  }
  remember(plan, &value, &view, 1);
  plan.checks = producer.checks;
  plan.idle = view.rows == 0;
  if (plan.idle) return true;
  Loaded loaded;
  if (!find_loaded(*producer.device, producer.record->choices, view.rows, producer.record->name, &loaded, failure))
    return false;
  if (producer.pdl && !loaded.image->pdl) {
    failure.words << "pdl was asked for, but the code of " << producer.record->name
                  << " does not support it; leave pdl off";
    return failure.of(kOperand);
  }
  plan.what = producer.record->name;
  take_kernel(plan, loaded, producer.kind, *producer.device, view.rows, producer.pdl);
  put_int(plan, kRows, view.rows);
  if (statistics) {
    put(plan, kNorm, producer.norm.address);
    put(plan, kQuery, producer.query.address);
    put(plan, kMixture, producer.mixture.address);
    put(plan, kScal, producer.scal.address);
    put_int(plan, kBlocksRowStride, view.row_stride / kVectorElems);
    put_int(plan, kBlocksBlockStride, view.block_stride / kVectorElems);
    put(plan, kEps, static_cast<float>(producer.eps));
    plan.fixed[plan.fixed_count++] = {"mixture", producer.mixture.address, view.rows * producer.mixture.shape[1] * 4, true};
    plan.fixed[plan.fixed_count++] = {"scal", producer.scal.address, view.rows * producer.scal.shape[1] * 4, true};
  } else {
    put(plan, kMailbox, producer.slot_address());
    put_int(plan, kSourceRowStride, view.row_stride / kVectorElems);
    plan.fixed[plan.fixed_count++] = {"the mailbox", producer.slot_address(), view.rows * view.hidden * kElemBytes, true};
  }
  return true;
}

// Lets kernels on a device access a tensor that may be in the memory of another device of this process.
bool open_memory_of(const char* name, const DLTensor& tensor, Device& device, Failure& failure) {
  int other = tensor.device.device_id;
  if (tensor.device.device_type != kDLCUDA || other < 0 || other >= kMaxDevices)
    return check_device(name, tensor, device, failure);
  if (other == device.ordinal || __atomic_load_n(&peers_open[device.ordinal][other], __ATOMIC_ACQUIRE)) return true;
  int able = 0, here = 0, there = 0;
  driver.cuDeviceGet(&here, device.ordinal);
  if (!driver.cuDeviceCanAccessPeer || !driver.cuCtxEnablePeerAccess || driver.cuDeviceGet(&there, other) ||
      driver.cuDeviceCanAccessPeer(&able, here, there) || !able) {
    failure.words << name << ": on " << tensor.device << ", whose memory " << device << " cannot access; use two "
                  << "devices that NVLink or PCIe peer access connects ('nvidia-smi topo -p2p w' lists them)";
    return failure.of(kOperand);
  }
  Context context = nullptr;
  bool captured[2] = {false, false};
  if (!primary_context(other, &context, failure) ||
      !is_capturing(device.ordinal, device.context, &captured[0], failure) ||
      !is_capturing(other, context, &captured[1], failure))
    return false;
  if (captured[0] || captured[1]) {
    failure.words << name << ": on " << tensor.device << ", whose memory " << device << " has not accessed yet, and "
                  << "opening it is what a stream capture forbids; make one publisher into that device's memory before "
                  << "capturing";
    return failure.of(kDriver);
  }
  Status status;
  {
    Relaxed relaxed;
    Current current(device.context);
    status = driver.cuCtxEnablePeerAccess(context, 0);
  }
  if (status && status != kPeerEnabled) {
    Words what;
    what << "open the memory of " << tensor.device << " to " << device;
    return refused(status, what.c_str(), failure);
  }
  __atomic_store_n(&peers_open[device.ordinal][other], true, __ATOMIC_RELEASE);
  return true;
}

// -------------------------------------------------------------------------------------------------------- exports --

struct Arguments {
  const TVMFFIAny* items;
  int count;
  TVMFFIAny at(int index) const {  // None where it was left out
    TVMFFIAny none = {};
    return index < count ? items[index] : none;
  }
  bool given(int index) const { return index < count && items[index].type_index != kTVMFFINone; }
  Value tensor(int index) const {
    static const TVMFFIAny none = {};
    if (index >= count) return {&none, nullptr};
    const TVMFFIAny& any = items[index];
    if (any.type_index == kTVMFFIDLTensorPtr) return {&any, static_cast<const DLTensor*>(any.v_ptr)};
    if (any.type_index == kTVMFFITensor) return {&any, reinterpret_cast<const DLTensor*>(any.v_obj + 1)};
    return {&any, nullptr};
  }
};

enum ObjectKind { kTableObject, kConsumerObject, kStatisticsObject, kPublishObject, kObjectKinds };
constexpr const char* kObjectNames[kObjectKinds] = {"Table", "Consumer", "Statistics", "Publish"};

struct Object {  // what the ABI hands out
  TVMFFIObject head;
  ObjectKind kind;
  union {
    Device* device;
    Consumer* consumer;
    Producer* producer;
  };
};

int fail(const Failure& failure) {
  TVMFFIErrorSetRaisedFromCStr(failure.kind, failure.words.c_str());
  return -1;
}

using Call = bool (*)(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure);

struct Method {
  ObjectKind kind;
  const char* name;
  Call call;
  int least, most;  // arguments
  const char* takes;
};

bool counted(const char* name, const char* takes, int least, int most, int count, Failure& failure) {
  if (least <= count && count <= most) return true;
  failure.words << name << " takes " << takes << "; " << count << " arguments were given";
  return failure.of("TypeError");
}

void return_int(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
}

bool return_text(TVMFFIAny* result, const char* data, size_t size, Failure& failure) {
  TVMFFIByteArray bytes = {data, size};
  if (TVMFFIStringFromByteArray(&bytes, result) == 0) return true;
  failure.words << "no memory for a text";
  return failure.of("RuntimeError");
}

bool return_numbers(TVMFFIAny* result, Span span, Failure& failure) {
  List<TVMFFIAny> items;
  for (uint32_t number : part<uint32_t>(span)) {
    TVMFFIAny item = {};
    return_int(&item, number);
    items.push(item);
  }
  const char* name = "ffi.Array";
  TVMFFIByteArray bytes = {name, strlen(name)};
  TVMFFIObjectHandle function = nullptr;
  if (TVMFFIFunctionGetGlobal(&bytes, &function) == 0 && function) {
    int status = TVMFFIFunctionCall(function, items.begin(), static_cast<int32_t>(items.size()), result);
    TVMFFIObjectDecRef(function);
    if (status == 0) return true;
  }
  failure.words << "this TVM-FFI makes no arrays";
  return failure.of("RuntimeError");
}

void delete_object(void* handle, int flags) {
  auto* object = static_cast<Object*>(handle);
  if (flags & kTVMFFIObjectDeleterFlagBitMaskStrong) {
    if (object->kind == kConsumerObject) {
      Consumer& consumer = *object->consumer;
      for (Bound& weight : consumer.weights) let_go(weight);
      let_go(consumer.mailbox);
      let_go(consumer.mixture);
      let_go(consumer.scal);
      consumer.~Consumer();
      free(object->consumer);
    } else if (object->kind != kTableObject) {
      Producer& producer = *object->producer;
      Bound* bound[] = {&producer.norm, &producer.query, &producer.mixture, &producer.scal, &producer.mailbox};
      for (Bound* each : bound) let_go(*each);
      producer.~Producer();
      free(object->producer);
    }
  }
  if (flags & kTVMFFIObjectDeleterFlagBitMaskWeak) free(object);
}

template <typename T>
T* make_body() {
  void* place = calloc(1, sizeof(T));
  if (!place) abort();
  return new (place) T();
}

int32_t object_types[kObjectKinds];
bool types_ready;
void register_types();

Object* make_object(ObjectKind kind) {
  register_types();
  auto* object = static_cast<Object*>(calloc(1, sizeof(Object)));
  if (!object) abort();
  object->head.combined_ref_count = (static_cast<uint64_t>(1) << 32) | 1;  // one strong, one weak for all strong ones
  object->head.type_index = object_types[kind];
  object->head.deleter = delete_object;
  object->kind = kind;
  return object;
}

void return_object(TVMFFIAny* result, Object* object) {
  result->type_index = object->head.type_index;
  result->zero_padding = 0;
  result->v_obj = &object->head;
}

bool read_pdl(const TVMFFIAny& any, bool producer, PdlMode* out, Failure& failure) {
  const char* data;
  size_t size;
  *out = kPdlOff;
  if (any.type_index == kTVMFFIBool) {
    *out = any.v_int64 ? kPdlOn : kPdlOff;
    return true;
  }
  if (!producer && text_of(any, &data, &size) && size == 5 && memcmp(data, "early", 5) == 0) {
    *out = kPdlEarly;
    return true;
  }
  failure.words << "pdl is " << any << "; ";
  failure.words << (producer ? "a producer allows False and True: it always waits for the kernel before it"
                             : "allowed are False, True and 'early': see the tables of 'Launch order and PDL'");
  return failure.of(kUsage);
}

bool read_options(const Arguments& given, int pdl_at, bool producer, PdlMode* pdl, bool* checks, Failure& failure) {
  *pdl = kPdlOff;
  *checks = true;
  if (pdl_at + 1 < given.count) *checks = given.items[pdl_at + 1].v_int64 != 0;
  return pdl_at >= given.count || read_pdl(given.items[pdl_at], producer, pdl, failure);
}

bool is_epsilon(const TVMFFIAny& any, double* out) {
  if (any.type_index == kTVMFFIFloat) *out = any.v_float64;
  else if (any.type_index == kTVMFFIInt) *out = static_cast<double>(any.v_int64);
  else return false;
  return *out >= 1e-30 && *out - *out == 0;
}

bool bad_eps(const TVMFFIAny* pair, int count, Failure& failure) {
  failure.words << "eps is " << (count == 2 ? "(" : "") << pair[0];
  if (count == 2) failure.words << ", " << pair[1] << ")";
  failure.words << "; a finite number of at least 1e-30, or a pair (eps, out_eps) of them, is wanted: the kernels take "
                << "the square root of no less";
  return failure.of(kOperand);
}

bool read_key(const Arguments& given, int at, Key* out, Failure& failure) {
  TVMFFIAny nb = given.at(at), delta = given.at(at + 1), write = given.at(at + 2), last = given.at(at + 3);
  bool good = (whole(nb) || nb.type_index == kTVMFFIBool) && (whole(write) || write.type_index == kTVMFFINone) &&
              (whole(delta) || delta.type_index == kTVMFFIBool) && (whole(last) || last.type_index == kTVMFFIBool);
  if (!good) {
    failure.words << "(" << nb << ", " << delta << ", " << write << ", " << last << ") is not a consumer key; a "
                  << "ConsumerKey is wanted, or (nb, has_delta, write, final) with the number of saved blocks, and -1 "
                  << "or None for a consumer that writes none";
    return failure.of(kUsage);
  }
  bool writes = write.type_index == kTVMFFIInt && write.v_int64 >= 0;
  *out = {nb.v_int64, delta.v_int64 != 0, writes ? write.v_int64 : -1, last.v_int64 != 0};
  return true;
}

// The weight [1, H] of a projection is taken as [H].
void weight_problems(const char* name, const Value& value, bool may_be_matrix, int64_t hidden, Words& problems) {
  const int64_t shape[] = {1, hidden};
  bool matrix = may_be_matrix && value.tensor && value.tensor->ndim == 2 && value.tensor->shape[0] == 1 &&
                value.tensor->shape[1] == hidden;
  if (matrix) vector_problems(name, value, 2, shape, false, kAlignment, problems);
  else vector_problems(name, value, 1, shape + 1, false, kAlignment, problems);
}

bool prepare_consumer(Device& device, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  Key key;
  if (!read_key(given, 3, &key, failure)) return false;
  const char* names[] = {"weights.norm", "weights.query", "weights.out_norm"};
  Words& problems = failure.words;
  for (int at = 0; at < 3; ++at) weight_problems(names[at], given.tensor(at), at == 1, device.record().hidden, problems);
  if (problems.empty()) {
    bool one = true;
    for (int at = 1; at < 3; ++at)
      one = one && memcmp(&given.tensor(at).tensor->device, &given.tensor(0).tensor->device, sizeof(DLDevice)) == 0;
    if (!one) {
      problems << "the weights are on ";
      for (int at = 0; at < 3; ++at) problems << (at ? ", " : "") << given.tensor(at).tensor->device;
      problems << "; one device is wanted";
    }
  }
  if (!problems.empty()) return failure.of(kOperand);
  if (!check_device("weights", *given.tensor(0).tensor, device, failure)) return false;
  double eps[2];
  if (!is_epsilon(given.items[7], &eps[0]) || !is_epsilon(given.items[8], &eps[1]))
    return bad_eps(given.items + 7, 2, failure);
  PdlMode pdl;
  bool checks;
  if (!read_options(given, 9, false, &pdl, &checks, failure)) return false;
  if (!holds_key(device, key)) return variant_miss(device, {key, 0, false, false}, failure);
  Object* object = make_object(kConsumerObject);
  Consumer& consumer = *(object->consumer = make_body<Consumer>());
  consumer.device = &device;
  consumer.key = key;
  consumer.eps[0] = eps[0];
  consumer.eps[1] = eps[1];
  consumer.pdl = pdl;
  consumer.checks = checks;
  for (int at = 0; at < 3; ++at) consumer.weights[at] = bind(names[at], given.tensor(at), false);
  return_object(result, object);
  if (load_variants(consumer, 0, false, false, failure)) return true;
  result->type_index = kTVMFFINone;
  TVMFFIObjectDecRef(object);
  return false;
}

bool prepare_statistics(Device& device, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  TVMFFIAny nb = given.items[5];
  if (!whole(nb)) {
    failure.words << "nb is " << nb << "; a whole number of saved blocks is wanted, that of the consumer";
    return failure.of(kOperand);
  }
  const ProducerRecord* record = find_producer(device, kStatistics, nb.v_int64);
  if (!record) return producer_miss(device, kStatistics, nb.v_int64, failure);
  PdlMode pdl;
  bool checks;
  if (!read_options(given, 6, true, &pdl, &checks, failure)) return false;
  const char* names[] = {"norm", "query"};
  for (int at = 0; at < 2; ++at)
    weight_problems(names[at], given.tensor(at), true, device.record().hidden, failure.words);
  if (!failure.words.empty()) return failure.of(kOperand);
  double eps;
  if (!is_epsilon(given.items[2], &eps)) return bad_eps(given.items + 2, 1, failure);
  for (int at = 0; at < 2; ++at)
    if (!check_device(names[at], *given.tensor(at).tensor, device, failure)) return false;
  Bound bound[4] = {};
  if (!make_statistics(device, given.tensor(3), given.tensor(4), nullptr, &bound[2], nullptr, failure)) return false;
  for (int at = 0; at < 2; ++at) bound[at] = bind(names[at], given.tensor(at), false);
  Object* object = make_object(kStatisticsObject);
  Producer& producer = *(object->producer = make_body<Producer>());
  producer.device = &device;
  producer.kind = kStatistics;
  producer.record = record;
  producer.nb = nb.v_int64;
  producer.eps = eps;
  producer.pdl = pdl != kPdlOff;
  producer.checks = checks;
  producer.norm = bound[0];
  producer.query = bound[1];
  producer.mixture = bound[2];
  producer.scal = bound[3];
  return_object(result, object);
  if (check_apart(bound, 4, failure) && load_choices(device, record->choices, failure)) return true;
  result->type_index = kTVMFFINone;
  TVMFFIObjectDecRef(object);
  return false;
}

bool prepare_publish(Device& device, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  const ProducerRecord* record = find_producer(device, kPublish, 0);
  if (!record) return producer_miss(device, kPublish, 0, failure);
  PdlMode pdl;
  bool checks;
  if (!read_options(given, 2, true, &pdl, &checks, failure)) return false;
  Value value = given.tensor(0);
  const int64_t shape[] = {-1, -1, device.record().hidden};
  Words& problems = failure.words;
  vector_problems("mailbox", value, 3, shape, false, kAlignment, problems);
  if (problems.empty() && elements_of(*value.tensor) == 0)
    add_shape(problems << "mailbox is ", *value.tensor)
        << "; at least one slot and row, and H a multiple of 8, are wanted";
  TVMFFIAny slot = given.items[1];
  if (!whole(slot))
    problems.line() << "slot is " << slot << "; a whole number is wanted";
  else if (problems.empty() && (slot.v_int64 < 0 || slot.v_int64 >= value.tensor->shape[0]))
    problems << "slot is " << slot << "; 0 to " << value.tensor->shape[0] - 1 << " are the slots of the mailbox";
  if (!problems.empty()) return failure.of(kOperand);
  if (!open_memory_of("mailbox", *value.tensor, device, failure) || !load_choices(device, record->choices, failure))
    return false;
  Object* object = make_object(kPublishObject);
  Producer& producer = *(object->producer = make_body<Producer>());
  producer.device = &device;
  producer.kind = kPublish;
  producer.record = record;
  producer.pdl = pdl != kPdlOff;
  producer.checks = checks;
  producer.mailbox = bind("mailbox", value, true);
  producer.slot = slot.v_int64;
  return_object(result, object);
  return true;
}

bool unbound(const Consumer& consumer, bool ring, bool aux, Failure& failure) {
  if (ring && !consumer.has_ring())
    failure.words << "no mailbox is bound; call bind_ring(mailbox) before run_ring";
  else if (aux && !consumer.aux)
    failure.words << "aux was passed, but no aux copy is bound; call bind_aux() before";
  else
    return false;
  return !failure.of(kOperand);
}

int take_operands(const Arguments& given, bool ring, Value* values, bool* aux) {
  int least = ring ? 3 : 4;
  *aux = given.given(least);
  for (int at = 0; at < least + *aux; ++at) values[at] = given.tensor(at);
  return least + *aux;
}

bool run_consumer(Consumer& consumer, bool ring, const Arguments& given, Failure& failure) {
  Value values[kMaxOperands];
  bool aux;
  int count = take_operands(given, ring, values, &aux);
  Route& route = consumer.routes[2 * ring + aux];
  const Plan* plan = route.find(values, count);
  Plan made;
  if (!plan) {
    if (!open_driver(failure) || unbound(consumer, ring, aux, failure) ||
        !make_plan(consumer, ring, aux, values, count, made, failure))
      return false;
    route.keep(made);
    plan = &made;
  }
  uint64_t addresses[kMaxOperands];
  for (int at = 0; at < count; ++at) addresses[at] = address_of(*values[at].tensor);
  return launch(*plan, addresses, TVMFFIEnvGetStream(kDLCUDA, consumer.device->ordinal), failure);
}

bool run_producer(Producer& producer, const Arguments& given, Failure& failure) {
  Value value = given.tensor(0);
  const Plan* plan = producer.route.find(&value, 1);
  Plan made;
  if (!plan) {
    if (!open_driver(failure) || !make_plan(producer, value, made, failure)) return false;
    producer.route.keep(made);
    plan = &made;
  }
  uint64_t address = address_of(*value.tensor);
  return launch(*plan, &address, TVMFFIEnvGetStream(kDLCUDA, producer.device->ordinal), failure);
}

struct FixedLaunch {  // launches for operands of one geometry, by address
  Plan plan;
  Object* owner;
};

int call_fixed(void* handle, const TVMFFIAny* items, int32_t count, TVMFFIAny* result) {
  auto* fixed = static_cast<FixedLaunch*>(handle);
  Failure failure;
  if (count != fixed->plan.count + 1) {
    failure.words << "a planned launch takes a stream and " << fixed->plan.count << " addresses; " << count
                  << " arguments were given";
    failure.kind = "TypeError";
    return fail(failure);
  }
  uint64_t addresses[kMaxOperands];
  for (int at = 0; at <= fixed->plan.count; ++at) {
    bool number = items[at].type_index == kTVMFFIInt || items[at].type_index == kTVMFFIOpaquePtr;
    if (!number && (at || items[at].type_index != kTVMFFINone)) {
      failure.words << (at ? "an address" : "the stream") << " is " << items[at] << "; a number is wanted"
                    << (at ? "" : ", or None for the current stream");
      failure.kind = kOperand;
      return fail(failure);
    }
    if (at) addresses[at - 1] = items[at].v_uint64;
  }
  Stream stream = items[0].type_index == kTVMFFINone
                      ? (fixed->plan.idle ? nullptr : TVMFFIEnvGetStream(kDLCUDA, fixed->plan.device->ordinal))
                      : reinterpret_cast<Stream>(items[0].v_uint64);
  result->type_index = kTVMFFINone;
  return launch(fixed->plan, addresses, stream, failure) ? 0 : fail(failure);
}

void delete_fixed(void* handle) {
  auto* fixed = static_cast<FixedLaunch*>(handle);
  TVMFFIObjectDecRef(&fixed->owner->head);
  free(fixed);
}

bool return_function(TVMFFIAny* result, void* self, TVMFFISafeCallType call, void (*deleter)(void*), Failure& failure) {
  TVMFFIObjectHandle function = nullptr;
  if (TVMFFIFunctionCreate(self, call, deleter, &function) != 0) {
    deleter(self);
    failure.words << "this TVM-FFI makes no functions";
    return failure.of("RuntimeError");
  }
  result->type_index = kTVMFFIFunction;
  result->zero_padding = 0;
  result->v_obj = static_cast<TVMFFIObject*>(function);
  return true;
}

bool return_fixed(Object& owner, FixedLaunch* fixed, TVMFFIAny* result, Failure& failure) {
  fixed->owner = &owner;
  TVMFFIObjectIncRef(&owner.head);
  return return_function(result, fixed, call_fixed, delete_fixed, failure);
}

bool plan_consumer(Object& self, bool ring, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  Value values[kMaxOperands];
  bool aux;
  int count = take_operands(given, ring, values, &aux);
  auto* fixed = static_cast<FixedLaunch*>(calloc(1, sizeof(FixedLaunch)));
  if (open_driver(failure) && !unbound(*self.consumer, ring, aux, failure) &&
      make_plan(*self.consumer, ring, aux, values, count, fixed->plan, failure))
    return return_fixed(self, fixed, result, failure);
  free(fixed);
  return false;
}

bool method_prepare_consumer(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  return prepare_consumer(*self.device, given, result, failure);
}
bool method_prepare_statistics(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  return prepare_statistics(*self.device, given, result, failure);
}
bool method_prepare_publish(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  return prepare_publish(*self.device, given, result, failure);
}

bool no_deployment(const Device& device, const TVMFFIAny& tp, const TVMFFIAny& dcp, Failure& failure) {
  failure.words << "the bundle at " << library_path() << " serves no deployment with ";
  bool both = tp.type_index != kTVMFFINone && dcp.type_index != kTVMFFINone;
  if (tp.type_index != kTVMFFINone) failure.words << "tp " << tp << (both ? ", " : "");
  if (dcp.type_index != kTVMFFINone) failure.words << "dcp " << dcp;
  failure.words << "; it serves ";
  bool some = false;
  for (const StatisticsTable& table : part<StatisticsTable>(device.record().statistics)) {
    failure.words << (some ? ", " : "") << "(tp " << table.tp << ", dcp " << table.dcp << ")";
    some = true;
  }
  failure.words << (some ? "" : "none") << "\nNext step: add it to the list 'deployments' of the configuration, and "
                << "build again:\n" << device.record().build_again;
  return failure.of(kUsage);
}

bool is_number(const TVMFFIAny& any, uint32_t number) { return whole(any) && any.v_int64 == number; }

bool serves(Span deployments, const TVMFFIAny& tp, const TVMFFIAny& dcp) {
  for (const Pair& pair : part<Pair>(deployments))
    if ((tp.type_index == kTVMFFINone || is_number(tp, pair.tp)) &&
        (dcp.type_index == kTVMFFINone || is_number(dcp, pair.dcp)))
      return true;
  return false;
}

bool method_preload(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  Device& device = *self.device;
  TVMFFIAny tp = given.at(0), dcp = given.at(1);
  bool all = tp.type_index == kTVMFFINone && dcp.type_index == kTVMFFINone, known = all, rings = false;
  for (const StatisticsTable& table : part<StatisticsTable>(device.record().statistics))
    known = known || ((tp.type_index == kTVMFFINone || is_number(tp, table.tp)) &&
                      (dcp.type_index == kTVMFFINone || is_number(dcp, table.dcp)));
  if (!known) return no_deployment(device, tp, dcp, failure);
  List<bool> wanted;
  for (uint32_t at = 0; at < device.record().images.count; ++at) wanted.push(all);
  for (const VariantRecord& record : part<VariantRecord>(device.record().variants)) {
    rings = rings || record.slots;
    if (serves(record.deployments, tp, dcp))
      for (const Choice& choice : part<Choice>(record.choices)) wanted[choice.image] = true;
  }
  for (const ProducerRecord& record : part<ProducerRecord>(device.record().producers))
    if (serves(record.deployments, tp, dcp))
      for (const Choice& choice : part<Choice>(record.choices)) wanted[choice.image] = true;
  int64_t count = 0;
  for (uint32_t at = 0; at < wanted.size(); ++at) {
    if (!wanted[at]) continue;
    if (!load_image(device, at, failure)) return false;
    ++count;
  }
  if (rings && !open_fault_record(device, failure)) return false;
  return_int(result, count);
  return true;
}

bool switched_on(Object& self, const Arguments& given, bool blocks, TVMFFIAny* result, Failure& failure) {
  TVMFFIAny tp = given.at(0), dcp = given.at(1);
  for (const StatisticsTable& table : part<StatisticsTable>(self.device->record().statistics))
    if (is_number(tp, table.tp) && is_number(dcp, table.dcp))
      return return_numbers(result, blocks ? table.blocks : table.rows, failure);
  return no_deployment(*self.device, tp, dcp, failure);
}
bool method_statistics_rows(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  return switched_on(self, given, false, result, failure);
}
bool method_statistics_blocks(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  return switched_on(self, given, true, result, failure);
}

bool method_load_image(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  const char* data = "";
  size_t size = 0;
  text_of(given.items[0], &data, &size);
  Part<ImageRecord> images = part<ImageRecord>(self.device->record().images);
  for (uint32_t at = 0; at < images.count; ++at)
    if (images[at].name.size == size && memcmp(bytes_of(images[at].name), data, size) == 0) {
      if (!load_image(*self.device, at, failure)) return false;
      return_int(result, static_cast<int64_t>(reinterpret_cast<uintptr_t>(self.device->functions[at])));
      return true;
    }
  failure.words << "there is no image " << given.items[0] << " in " << library_path();
  return failure.of(kUsage);
}

bool method_description(Object& self, const Arguments&, TVMFFIAny* result, Failure& failure) {
  Words words;
  words << self.device->record().name << " for " << self.device->record().arch << " on " << *self.device;
  return return_text(result, words.c_str(), words.size(), failure);
}

bool method_bind_ring(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  TVMFFIAny budget = given.at(1);
  if (budget.type_index == kTVMFFINone && given.count < 2) return_int(&budget, 0);
  TVMFFIAny fault = given.at(2), tag = given.at(3);
  (void)result;
  return bind_ring(*self.consumer, given.tensor(0), budget, fault.v_int64, tag.v_int64, failure);
}
bool method_bind_aux(Object& self, const Arguments&, TVMFFIAny*, Failure& failure) {
  return bind_aux(*self.consumer, failure);
}
bool method_bind_statistics(Object& self, const Arguments& given, TVMFFIAny*, Failure& failure) {
  return bind_statistics(*self.consumer, given.tensor(0), given.tensor(1), given.items[2], failure);
}
bool method_run(Object& self, const Arguments& given, TVMFFIAny*, Failure& failure) {
  return run_consumer(*self.consumer, false, given, failure);
}
bool method_run_ring(Object& self, const Arguments& given, TVMFFIAny*, Failure& failure) {
  return run_consumer(*self.consumer, true, given, failure);
}
bool method_plan_run(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  return plan_consumer(self, false, given, result, failure);
}
bool method_plan_run_ring(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  return plan_consumer(self, true, given, result, failure);
}
bool method_produce(Object& self, const Arguments& given, TVMFFIAny*, Failure& failure) {
  return run_producer(*self.producer, given, failure);
}
bool method_plan_produce(Object& self, const Arguments& given, TVMFFIAny* result, Failure& failure) {
  auto* fixed = static_cast<FixedLaunch*>(calloc(1, sizeof(FixedLaunch)));
  if (open_driver(failure) && make_plan(*self.producer, given.tensor(0), fixed->plan, failure))
    return return_fixed(self, fixed, result, failure);
  free(fixed);
  return false;
}

const char* const kConsumerTakes =
    "(norm, query, out_norm, nb, has_delta, write, final, eps, out_eps, pdl=False, checks=True)";
const char* const kStatisticsTakes = "(norm, query, eps, mixture, scal, nb, pdl=False, checks=True)";
const char* const kPublishTakes = "(mailbox, slot, pdl=False, checks=True)";
const char* const kRunTakes = "(delta, prefix, blocks, out, aux=None)";
const char* const kRunRingTakes = "(prefix, blocks, out, aux=None)";

const Method kMethods[] = {
    {kTableObject, "prepare_consumer", method_prepare_consumer, 9, 11, kConsumerTakes},
    {kTableObject, "prepare_statistics", method_prepare_statistics, 6, 8, kStatisticsTakes},
    {kTableObject, "prepare_publish", method_prepare_publish, 2, 4, kPublishTakes},
    {kTableObject, "preload", method_preload, 0, 2, "(tp=None, dcp=None)"},
    {kTableObject, "statistics_rows", method_statistics_rows, 2, 2, "(tp, dcp)"},
    {kTableObject, "statistics_blocks", method_statistics_blocks, 2, 2, "(tp, dcp)"},
    {kTableObject, "load_image", method_load_image, 1, 1, "(name)"},
    {kTableObject, "description", method_description, 0, 0, "()"},
    {kConsumerObject, "bind_ring", method_bind_ring, 1, 4, "(mailbox, spin_budget=0, fault=0, fault_tag=0)"},
    {kConsumerObject, "bind_aux", method_bind_aux, 0, 0, "()"},
    {kConsumerObject, "bind_statistics", method_bind_statistics, 3, 3, "(mixture, scal, rows)"},
    {kConsumerObject, "run", method_run, 4, 5, kRunTakes},
    {kConsumerObject, "run_ring", method_run_ring, 3, 4, kRunRingTakes},
    {kConsumerObject, "plan_run", method_plan_run, 4, 5, kRunTakes},
    {kConsumerObject, "plan_run_ring", method_plan_run_ring, 3, 4, kRunRingTakes},
    {kStatisticsObject, "run", method_produce, 1, 1, "(blocks)"},
    {kStatisticsObject, "plan_run", method_plan_produce, 1, 1, "(blocks)"},
    {kPublishObject, "run", method_produce, 1, 1, "(rows)"},
    {kPublishObject, "plan_run", method_plan_produce, 1, 1, "(rows)"},
};

int invoke(const Method& method, Object& self, const TVMFFIAny* items, int count, TVMFFIAny* result) {
  Failure failure;
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  if (!counted(method.name, method.takes, method.least, method.most, count, failure) ||
      !method.call(self, {items, count}, result, failure))
    return fail(failure);
  return 0;
}

int call_method(void* handle, const TVMFFIAny* items, int32_t count, TVMFFIAny* result) {
  const Method& method = *static_cast<const Method*>(handle);
  if (count < 1 || items[0].type_index != object_types[method.kind]) {
    Failure failure;
    failure.words << method.name << " is a method of " << kObjectNames[method.kind] << "; its first argument is "
                  << (count ? type_of(items[0]) : "missing");
    failure.kind = "TypeError";
    return fail(failure);
  }
  return invoke(method, *reinterpret_cast<Object*>(items[0].v_obj), items + 1, count - 1, result);
}

struct BoundMethod {
  const Method* method;
  Object* self;
};

int call_bound(void* handle, const TVMFFIAny* items, int32_t count, TVMFFIAny* result) {
  auto* bound = static_cast<BoundMethod*>(handle);
  return invoke(*bound->method, *bound->self, items, count, result);
}

void delete_bound(void* handle) {
  auto* bound = static_cast<BoundMethod*>(handle);
  TVMFFIObjectDecRef(&bound->self->head);
  free(bound);
}

bool bind_method(Object& self, const TVMFFIAny& name, TVMFFIAny* result, Failure& failure) {
  const char* data = "";
  size_t size = 0;
  text_of(name, &data, &size);
  for (const Method& method : kMethods)
    if (method.kind == self.kind && strlen(method.name) == size && memcmp(method.name, data, size) == 0) {
      auto* bound = static_cast<BoundMethod*>(calloc(1, sizeof(BoundMethod)));
      *bound = {&method, &self};
      TVMFFIObjectIncRef(&self.head);
      return return_function(result, bound, call_bound, delete_bound, failure);
    }
  failure.words << "a " << kObjectNames[self.kind] << " has no method " << name;
  return failure.of(kUsage);
}

// Types are this library's alone: their names hold its address, as another copy of the file has other state.
void register_types() {
  static Mutex mutex;
  if (__atomic_load_n(&types_ready, __ATOMIC_ACQUIRE)) return;
  Hold hold(mutex);
  if (types_ready) return;
  for (int kind = 0; kind < kObjectKinds; ++kind) {
    Words name;
    name.format("attnres_aot.at%llx.", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(attnres_payload)))
        << kObjectNames[kind];
    TVMFFIByteArray key = {name.c_str(), name.size()};
    object_types[kind] = TVMFFITypeGetOrAllocIndex(&key, -1, 1, 0, 0, kTVMFFIObject);
    for (const Method& method : kMethods) {
      TVMFFIObjectHandle function = nullptr;
      if (method.kind != kind ||
          TVMFFIFunctionCreate(const_cast<Method*>(&method), call_method, nullptr, &function) != 0)
        continue;
      TVMFFIMethodInfo info = {};
      info.name = {method.name, strlen(method.name)};
      info.doc = {method.takes, strlen(method.takes)};
      info.method.type_index = kTVMFFIFunction;
      info.method.v_obj = static_cast<TVMFFIObject*>(function);
      TVMFFITypeRegisterMethod(object_types[kind], &info);
    }
  }
  __atomic_store_n(&types_ready, true, __ATOMIC_RELEASE);
}

// The device of the first tensor among `count` arguments; what is wrong with the others is for the checks to say.
bool device_of(const Arguments& given, int count, Device** out, Failure& failure) {
  int64_t ordinal = 0;
  for (int at = 0; at < count; ++at)
    if (const DLTensor* tensor = given.tensor(at).tensor) {
      if (tensor->device.device_type != kDLCUDA) {
        failure.words << "device '" << tensor->device << "' is a " << tensor->device
                      << " device; the kernels run on CUDA devices only";
        return failure.of(kUsage);
      }
      ordinal = tensor->device.device_id;
      break;
    }
  return open_device(ordinal, out, failure);
}

using Prepare = bool (*)(Device&, const Arguments&, TVMFFIAny*, Failure&);

int prepare(Prepare make, const char* name, const char* takes, int least, int most, int tensors, const TVMFFIAny* items,
            int32_t count, TVMFFIAny* result) {
  Failure failure;
  Device* device = nullptr;
  result->type_index = kTVMFFINone;
  Arguments given = {items, count};
  if (counted(name, takes, least, most, count, failure) && device_of(given, tensors, &device, failure) &&
      make(*device, given, result, failure))
    return 0;
  return fail(failure);
}

}  // namespace

#define EXPORT(name)                                                                                          \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name(void*, const TVMFFIAny* items, \
                                                                               int32_t count, TVMFFIAny* result)

EXPORT(load_table) {  // (device=0) -> Table: the code that fits a device
  Failure failure;
  Device* device = nullptr;
  result->type_index = kTVMFFINone;
  if (!counted("load_table", "(device=0)", 0, 1, count, failure)) return fail(failure);
  TVMFFIAny ordinal = Arguments{items, count}.at(0);
  if (ordinal.type_index != kTVMFFINone && !whole(ordinal)) {
    failure.words << "device is " << ordinal << "; a whole number is wanted, that of a CUDA device";
    failure.kind = kUsage;
    return fail(failure);
  }
  if (!open_device(ordinal.v_int64, &device, failure)) return fail(failure);
  Object* object = make_object(kTableObject);
  object->device = device;
  return_object(result, object);
  return 0;
}

EXPORT(prepare_consumer) {
  return prepare(prepare_consumer, "prepare_consumer", kConsumerTakes, 9, 11, 3, items, count, result);
}

EXPORT(prepare_statistics) {
  return prepare(prepare_statistics, "prepare_statistics", kStatisticsTakes, 6, 8, 2, items, count, result);
}

EXPORT(prepare_publish) {
  return prepare(prepare_publish, "prepare_publish", kPublishTakes, 2, 4, 1, items, count, result);
}

EXPORT(method) {  // (object, name) -> Function: a method, bound, for callers to whom objects have none
  Failure failure;
  result->type_index = kTVMFFINone;
  if (!counted("method", "(object, name)", 2, 2, count, failure)) return fail(failure);
  register_types();
  for (int32_t type : object_types)
    if (items[0].type_index == type)
      return bind_method(*reinterpret_cast<Object*>(items[0].v_obj), items[1], result, failure) ? 0 : fail(failure);
  failure.words << "object is " << type_of(items[0]) << "; what this library has made is wanted";
  failure.kind = kUsage;
  return fail(failure);
}

EXPORT(ring_fault) {  // (device=None) -> str or None: what a launch was waiting for when its spin budget ran out
  Failure failure;
  Words words;
  result->type_index = kTVMFFINone;
  if (!counted("ring_fault", "(device=None)", 0, 1, count, failure)) return fail(failure);
  TVMFFIAny asked = Arguments{items, count}.at(0);
  for (int ordinal = 0; ordinal < kMaxDevices; ++ordinal)
    if ((asked.type_index == kTVMFFINone || is_number(asked, static_cast<uint32_t>(ordinal))) &&
        read_fault(ordinal, words))
      return return_text(result, words.c_str(), words.size(), failure) ? 0 : fail(failure);
  return 0;
}

EXPORT(launch_problem) {  // () -> str or None: why nothing can be launched in this process
  Failure failure, telling;
  result->type_index = kTVMFFINone;
  if (!counted("launch_problem", "()", 0, 0, count, telling)) return fail(telling);
  (void)items;
  if (open_driver(failure)) return 0;
  return return_text(result, failure.words.c_str(), failure.words.size(), telling) ? 0 : fail(telling);
}

EXPORT(description) {  // () -> str: what is inside; needs no driver
  Failure failure;
  Words words;
  result->type_index = kTVMFFINone;
  if (!counted("description", "()", 0, 0, count, failure)) return fail(failure);
  (void)items;
  for (uint32_t index = 0; index < header().bundles; ++index) {
    const TableRecord& record = table_record(index);
    words.line() << record.name << " for " << record.arch << ", " << record.images.count << " images, "
                 << record.variants.count << " variants, " << record.producers.count << " producers";
  }
  return return_text(result, words.c_str(), words.size(), failure) ? 0 : fail(failure);
}
