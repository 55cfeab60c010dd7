// What `run` of a shared object costs the host in C++, beside the bare cuLaunchKernelEx; scripts/shared_object_cost.py
// builds and runs it, and says the same for Python.
//
//   shared_object_cost LIBRARY.so IMAGE ROUNDS LAUNCHES THREADS TOTAL CTA
//
// Prints one line of JSON. IMAGE names the image that serves one row of the consumer (8, true, none, false); CTA are its
// threads per CTA.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "../examples/cpp/cuda_driver.h"
#include "../examples/cpp/tensors.h"

namespace {

using tvm::ffi::Any;
using tvm::ffi::Function;
using tvm::ffi::Module;
using Clock = std::chrono::steady_clock;

constexpr int64_t kHidden = 7168, kBlocks = 8;

struct Config {  // CUlaunchConfig
  uint32_t grid[3], block[3], smem;
  void* stream;
  void* attributes;
  uint32_t count;
};
struct Attribute {  // CUlaunchAttribute
  uint32_t id, pad, value[16];
};

struct Parameters {  // of a consumer, as docs/bundle_format.md lists them
  uint64_t source, prefix, blocks, norm, query, out_norm, out, aux = 0, mixture = 0, scal = 0, fault = 0;
  int32_t source_row = kHidden / 8, source_slot = 0, prefix_row = kHidden / 8, blocks_row = kBlocks * kHidden / 8,
          blocks_block = kHidden / 8, out_row = kHidden / 8, aux_row = 0, write = -1, rows = 1, spin_budget = 0,
          fault_tag = 0, early = 0;
  float eps = 1e-5f, out_eps = 1e-5f;
};

template <typename Call>
double microseconds(int launches, Call call) {
  auto start = Clock::now();
  for (int at = 0; at < launches; ++at) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / launches;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

long resident_kilobytes() {
  std::ifstream status("/proc/self/statm");
  long pages = 0, resident = 0;
  status >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE) / 1024;
}

int measure(char** given) {
  Module library = Module::LoadFromFile(given[1]);
  const int rounds = std::atoi(given[3]), launches = std::atoi(given[4]), threads = std::atoi(given[5]);
  const long total = std::atol(given[6]);
  auto function = [&](const char* name) { return library->GetFunction(name).value(); };
  CudaDriver cuda;
  auto memory = [&](int64_t elements) {
    std::vector<uint16_t> ones(static_cast<size_t>(elements), 0x3F80);
    void* place = cuda.allocate(ones.size() * 2);
    cuda.upload(place, ones.data(), ones.size() * 2);
    return place;
  };
  DeviceTensor norm(memory(kHidden), {kHidden}), query(memory(kHidden), {kHidden}), out_norm(memory(kHidden), {kHidden});
  DeviceTensor delta(memory(kHidden), {1, kHidden}), prefix(memory(kHidden), {1, kHidden}), out(memory(kHidden), {1, kHidden});
  DeviceTensor blocks(memory(kBlocks * kHidden), {1, kBlocks, kHidden});
  Any table = function("load_table")(0);
  Any consumer = function("prepare_consumer")(*norm, *query, *out_norm, 8, true, -1, false, 1e-5, 1e-5);
  Function run = function("method")(consumer, "run").cast<Function>();
  Function fixed = function("method")(consumer, "plan_run").cast<Function>()(*delta, *prefix, *blocks, *out).cast<Function>();
  Function load_image = function("method")(table, "load_image").cast<Function>();
  auto image = reinterpret_cast<void*>(load_image(tvm::ffi::String(given[2])).cast<int64_t>());

  void* stream = cuda.new_stream();
  TVMFFIEnvSetStream(kDLCUDA, 0, stream, nullptr);
  auto number = [](DeviceTensor& tensor) { return reinterpret_cast<uint64_t>(tensor.view.data); };
  Parameters parameters{number(delta), number(prefix), number(blocks), number(norm), number(query), number(out_norm), number(out)};
  size_t size = offsetof(Parameters, out_eps) + sizeof(float);
  Attribute cluster{4, 0, {7, 1, 1}};
  Config config{{7, 1, 1}, {static_cast<uint32_t>(std::atoi(given[7])), 1, 1}, 0, stream, &cluster, 1};
  void* extra[] = {reinterpret_cast<void*>(1), &parameters, reinterpret_cast<void*>(2), &size, nullptr};
  auto* launch = cuda.find<int(const Config*, void*, void**, void**)>("cuLaunchKernelEx");
  auto bare = [&] { CudaDriver::check(launch(&config, image, nullptr, extra), "cuLaunchKernelEx"); };
  auto through = [&] { run(*delta, *prefix, *blocks, *out); };
  auto planned = [&] { fixed(reinterpret_cast<int64_t>(stream), static_cast<int64_t>(number(delta)), static_cast<int64_t>(number(prefix)),
                             static_cast<int64_t>(number(blocks)), static_cast<int64_t>(number(out))); };

  std::vector<double> times[3];
  for (int round = 0; round < rounds; ++round) {
    times[0].push_back(microseconds(launches, bare));
    cuda.synchronize();
    times[1].push_back(microseconds(launches, through));
    cuda.synchronize();
    times[2].push_back(microseconds(launches, planned));
    cuda.synchronize();
  }

  auto work = [&](int thread) {
    cuda.make_current();
    void* own = thread % 2 ? stream : nullptr;
    TVMFFIEnvSetStream(kDLCUDA, 0, own, nullptr);
    for (long at = 0; at < total / threads; ++at) through();
  };
  auto all = [&] {
    std::vector<std::thread> workers;
    for (int thread = 0; thread < threads; ++thread) workers.emplace_back(work, thread);
    for (std::thread& worker : workers) worker.join();
    cuda.synchronize();
  };
  all();  // once, so that what the driver and malloc keep per thread is there
  long before = resident_kilobytes();
  size_t free_before = cuda.free_memory();
  auto start = Clock::now();
  all();
  double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  std::printf("{\"bare_us\": %.3f, \"run_us\": %.3f, \"planned_us\": %.3f, \"threads\": %d, \"launches\": %ld, \"seconds\": %.2f, "
              "\"host_growth_kb\": %ld, \"device_growth_bytes\": %lld}\n",
              median(times[0]), median(times[1]), median(times[2]), threads, total, seconds, resident_kilobytes() - before,
              static_cast<long long>(free_before) - static_cast<long long>(cuda.free_memory()));
  return 0;
}

}  // namespace

int main(int count, char** given) {
  if (count != 8) return 2;
  try {
    return measure(given);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
