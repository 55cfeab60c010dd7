// The few driver functions that the programs here call, from libcuda.so.1 itself: no CUDA toolkit is needed.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

class CudaDriver {
 public:
  CudaDriver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library_) throw std::runtime_error(dlerror());
    check(find<int(unsigned)>("cuInit")(0), "cuInit");
    int device = 0;
    check(find<int(int*, int)>("cuDeviceGet")(&device, 0), "cuDeviceGet");
    check(find<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context_, device), "cuDevicePrimaryCtxRetain");
    make_current();
  }

  void make_current() const { check(find<int(void*)>("cuCtxSetCurrent")(context_), "cuCtxSetCurrent"); }

  void* allocate(size_t bytes) const {
    uint64_t address = 0;
    check(find<int(uint64_t*, size_t)>("cuMemAlloc_v2")(&address, bytes), "cuMemAlloc");
    return reinterpret_cast<void*>(address);
  }

  void upload(void* to, const void* from, size_t bytes) const {
    check(find<int(uint64_t, const void*, size_t)>("cuMemcpyHtoD_v2")(address(to), from, bytes), "cuMemcpyHtoD");
  }

  void download(void* to, const void* from, size_t bytes) const {
    check(find<int(void*, uint64_t, size_t)>("cuMemcpyDtoH_v2")(to, address(from), bytes), "cuMemcpyDtoH");
  }

  void* new_stream() const {
    void* stream = nullptr;
    check(find<int(void**, unsigned)>("cuStreamCreate")(&stream, 1), "cuStreamCreate");
    return stream;
  }

  void synchronize() const { check(find<int()>("cuCtxSynchronize")(), "cuCtxSynchronize"); }

  size_t free_memory() const {
    size_t free = 0, total = 0;
    check(find<int(size_t*, size_t*)>("cuMemGetInfo_v2")(&free, &total), "cuMemGetInfo");
    return free;
  }

  template <typename Signature>
  Signature* find(const char* name) const {
    auto* function = reinterpret_cast<Signature*>(dlsym(library_, name));
    if (!function) throw std::runtime_error(std::string("the driver has no ") + name);
    return function;
  }

  static void check(int status, const char* what) {
    if (status) throw std::runtime_error(std::string(what) + " failed with CUresult " + std::to_string(status));
  }

 private:
  static uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
  void* library_ = nullptr;
  void* context_ = nullptr;
};
