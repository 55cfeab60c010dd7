// Tensors in the form that the library takes, and bfloat16 on the host.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <cstring>
#include <vector>

inline float widen(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline uint16_t narrow(double value) {  // to the nearest, ties to even; for finite values within range
  float single = static_cast<float>(value);
  uint32_t word;
  std::memcpy(&word, &single, sizeof word);
  return static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
}

// A contiguous bf16 tensor on CUDA device 0.
struct DeviceTensor {
  std::vector<int64_t> shape, strides;
  DLTensor view{};

  DeviceTensor(void* data, std::vector<int64_t> sizes) : shape(std::move(sizes)), strides(shape.size(), 1) {
    for (size_t dim = shape.size() - 1; dim > 0; --dim) strides[dim - 1] = strides[dim] * shape[dim];
    view.data = data;
    view.device = {kDLCUDA, 0};
    view.ndim = static_cast<int32_t>(shape.size());
    view.dtype = {kDLBfloat, 16, 1};
    view.shape = shape.data();
    view.strides = strides.data();
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DLTensor* operator*() { return &view; }
};
