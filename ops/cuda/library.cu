// Description of the library, and what Python calls besides the rows.
#ifndef __CUDACC__
#include "operands.h"

#define SIZE_OF(row) \
    extern "C" int tokamak_size_of_##row() { return sizeof(row); }
SIZE_OF(Begin)
SIZE_OF(Derive)
SIZE_OF(RotateAndStore)
SIZE_OF(StoreLatent)
SIZE_OF(Attention)
SIZE_OF(Linear)
SIZE_OF(HeadLinear)
SIZE_OF(Adapt)
SIZE_OF(Embed)
SIZE_OF(TakeRows)
SIZE_OF(CopyColumns)
SIZE_OF(Convert)
SIZE_OF(Norm)
SIZE_OF(GateAndNorm)
SIZE_OF(Convolve)
SIZE_OF(Recur)
SIZE_OF(Activate)
SIZE_OF(ScaleAndAdd)
SIZE_OF(Multiply)
SIZE_OF(MeanRows)
SIZE_OF(AdjustColumns)
SIZE_OF(TakeFeatures)
SIZE_OF(Scatter)
SIZE_OF(Choose)
SIZE_OF(Route)
SIZE_OF(Dispatch)
SIZE_OF(ExpertLinear)
SIZE_OF(Combine)
SIZE_OF(Sample)
SIZE_OF(WriteSent)
SIZE_OF(DraftRows)
SIZE_OF(PutDraft)
SIZE_OF(EntryRows)
SIZE_OF(KeepStates)
SIZE_OF(ReadTokens)
SIZE_OF(DraftTokens)
SIZE_OF(Gather)
SIZE_OF(ShareRows)
SIZE_OF(ReturnResults)
SIZE_OF(Peak)

extern "C" const char *tokamak_error() { return emulation::error(); }
extern "C" void tokamak_seed(unsigned value) { emulation::seed(value); }

// From now on launches go to a card's driver; without `launch`, to the emulation.
extern "C" void tokamak_use_driver(decltype(emulation::Driver::resolve) resolve, decltype(emulation::Driver::launch) launch) {
    emulation::driver() = {resolve, launch};
}

// The names of all kernels, a line each.
extern "C" const char *tokamak_kernels() {
    static std::string names;
    names.clear();
    for (const auto &[name, _] : emulation::kernels()) names += name + "\n";
    return names.c_str();
}

// What an emulated driver runs: a kernel by its name. 0: it has no operands of any size, so there is none with this name.
extern "C" int tokamak_operand_bytes(const char *name) {
    auto found = emulation::kernels().find(name);
    return found == emulation::kernels().end() ? 0 : found->second.num_operand_bytes;
}
extern "C" int tokamak_emulate(const char *name, const void *operands, unsigned x, unsigned y, unsigned z, unsigned num_threads,
                               unsigned num_shared_bytes) {
    return emulation::kernels().at(name).run(operands, dim3(x, y, z), num_threads, num_shared_bytes);
}
#endif
