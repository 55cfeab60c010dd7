// A driver library that serves one CUDA version (-DSERVES=12040 for 12.4), has no device, and tells when it is loaded.
//
// A build must neither load it nor give other bytes because it is there: see tests/unit/build/test_driverless.py.

#include <cstdio>
#include <cstdlib>

namespace {

const bool told = [] {
    if (const char* path = std::getenv("STAND_IN_DRIVER_LOADED")) {
        if (std::FILE* file = std::fopen(path, "a")) {
            std::fputs("loaded\n", file);
            std::fclose(file);
        }
    }
    return true;
}();

}  // namespace

extern "C" int cuDriverGetVersion(int* version) {
    *version = SERVES;
    return told ? 0 : 999;
}

extern "C" int cuInit(unsigned) { return 100; }  // CUDA_ERROR_NO_DEVICE
