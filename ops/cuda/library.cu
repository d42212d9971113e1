// Description of the library.
#include "operands.h"

#define SIZE_OF(row) \
    extern "C" int tokamak_size_of_##row() { return sizeof(row); }
SIZE_OF(Begin)
SIZE_OF(Derive)
SIZE_OF(RotateAndStore)
SIZE_OF(StoreLatent)
SIZE_OF(Attention)
SIZE_OF(Linear)
SIZE_OF(Route)
SIZE_OF(Dispatch)
SIZE_OF(ExpertLinear)
SIZE_OF(Combine)
SIZE_OF(Sample)
SIZE_OF(Peak)

#ifdef __CUDACC__
extern "C" const char *tokamak_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
extern "C" void tokamak_seed(unsigned) {}
#else
extern "C" const char *tokamak_error(int) { return emulation::error(); }
extern "C" void tokamak_seed(unsigned value) { emulation::seed(value); }

// From now on launches go to a card's driver.
extern "C" void tokamak_use_driver(decltype(emulation::Driver::resolve) resolve, decltype(emulation::Driver::launch) launch) {
    emulation::driver() = {resolve, launch};
}

// What the emulated driver of a card runs: a kernel that was launched before, by its name.
extern "C" int tokamak_emulate(const char *name, const void *operands, unsigned x, unsigned y, unsigned z, unsigned num_threads,
                               unsigned num_shared_bytes) {
    return emulation::kernels().at(name)(operands, dim3(x, y, z), num_threads, num_shared_bytes);
}
#endif
