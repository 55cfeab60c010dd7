// Loads a bundle's shared object, prepares the consumer before the attention of Kimi K3's layer 5, launches it, and
// compares with an fp64 reference.
//
//   layer5 attnres_kimi_k3_sm_90.x86_64.so
//
// Layer 5 lies in the first block of 12 layers: one saved block, a delta, nothing written, so its key is (1, true, -1,
// false). Everything below that calls the library would be the same from any language with TVM-FFI.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda_driver.h"
#include "tensors.h"

namespace {

using tvm::ffi::Any;
using tvm::ffi::Function;
using tvm::ffi::Module;

constexpr int64_t kHidden = 7168, kRows = 5, kBlocks = 8;
constexpr double kEps = 1e-5;

using Row = std::vector<uint16_t>;

Row random_values(std::mt19937& random, int64_t count, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  Row values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = narrow(normal(random));
  return values;
}

struct Expected {
  Row prefix;
  std::vector<double> out;
};

// What docs/loader.md calls right, in fp64: P = prefix + delta, rounded once; the softmax over the saved block and P of
// (v . w) * rsqrt(mean(v^2) + eps), w = norm * query; its mixture, through the output norm.
Expected reference(const Row& delta, const Row& prefix, const Row& block, const Row* weights) {
  Expected found{Row(kHidden), std::vector<double>(kHidden)};
  for (int64_t i = 0; i < kHidden; ++i) found.prefix[i] = narrow(widen(prefix[i]) + widen(delta[i]));
  const Row* sources[] = {&block, &found.prefix};
  double logits[2];
  for (int s = 0; s < 2; ++s) {
    double dot = 0, squares = 0;
    for (int64_t i = 0; i < kHidden; ++i) {
      double value = widen((*sources[s])[i]);
      dot += value * (static_cast<double>(widen(weights[0][i])) * widen(weights[1][i]));
      squares += value * value;
    }
    logits[s] = dot / std::sqrt(squares / kHidden + kEps);
  }
  double top = std::max(logits[0], logits[1]);
  double shares[] = {std::exp(logits[0] - top), std::exp(logits[1] - top)};
  double squares = 0;
  for (int64_t i = 0; i < kHidden; ++i) {
    found.out[i] = (shares[0] * widen(block[i]) + shares[1] * widen(found.prefix[i])) / (shares[0] + shares[1]);
    squares += found.out[i] * found.out[i];
  }
  for (int64_t i = 0; i < kHidden; ++i) found.out[i] *= widen(weights[2][i]) / std::sqrt(squares / kHidden + kEps);
  return found;
}

double ulp(double value) {  // of bf16
  return std::ldexp(1.0, std::max(std::ilogb(value == 0 ? 1e-38 : value), -126) - 7);
}

int run(const char* path) {
  Module library = Module::LoadFromFile(path);
  auto function = [&](const char* name) { return library->GetFunction(name).value(); };
  Any problem = function("launch_problem")();
  if (problem != nullptr) {
    std::printf("%s\n", problem.cast<std::string>().c_str());
    return 2;
  }
  CudaDriver cuda;
  std::mt19937 random(7);
  Row weights[] = {random_values(random, kHidden, 1.0f), random_values(random, kHidden, 0.02f),
                   random_values(random, kHidden, 1.0f)};
  Row delta = random_values(random, kRows * kHidden, 1.0f), prefix = random_values(random, kRows * kHidden, 1.0f);
  Row blocks = random_values(random, kRows * kBlocks * kHidden, 1.0f);
  auto on_device = [&](const Row& values) {
    void* memory = cuda.allocate(values.size() * 2);
    cuda.upload(memory, values.data(), values.size() * 2);
    return memory;
  };
  DeviceTensor norm(on_device(weights[0]), {kHidden}), query(on_device(weights[1]), {kHidden});
  DeviceTensor out_norm(on_device(weights[2]), {kHidden});
  DeviceTensor source(on_device(delta), {kRows, kHidden}), target(on_device(prefix), {kRows, kHidden});
  DeviceTensor saved(on_device(blocks), {kRows, kBlocks, kHidden}), out(on_device(prefix), {kRows, kHidden});

  Any consumer = function("prepare_consumer")(*norm, *query, *out_norm, 1, true, -1, false, kEps, kEps);
  Function launch = function("method")(consumer, "run").cast<Function>();
  void* stream = cuda.new_stream();
  TVMFFIEnvSetStream(kDLCUDA, 0, stream, nullptr);
  launch(*source, *target, *saved, *out);
  cuda.synchronize();

  Row got_prefix(kRows * kHidden), got_out(kRows * kHidden);
  cuda.download(got_prefix.data(), target.view.data, got_prefix.size() * 2);
  cuda.download(got_out.data(), out.view.data, got_out.size() * 2);
  int64_t wrong = 0;
  double worst = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    auto part = [&](const Row& all, int64_t at) { return Row(all.begin() + at * kHidden, all.begin() + (at + 1) * kHidden); };
    Expected right = reference(part(delta, row), part(prefix, row), part(blocks, row * kBlocks), weights);
    for (int64_t i = 0; i < kHidden; ++i) {
      double rounded = widen(narrow(right.out[i])), off = std::abs(widen(got_out[row * kHidden + i]) - rounded);
      worst = std::max(worst, off / ulp(rounded));
      wrong += got_prefix[row * kHidden + i] != right.prefix[i];
    }
  }
  std::printf("layer 5, %d rows: the prefix differs in %d places, the output by at most %.2f ulp\n",
              static_cast<int>(kRows), static_cast<int>(wrong), worst);
  return wrong == 0 && worst <= 1 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::printf("usage: layer5 LIBRARY.so\n");
    return 2;
  }
  try {
    return run(arguments[1]);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
