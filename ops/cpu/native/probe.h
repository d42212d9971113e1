// Peak memory bandwidth and multiply rate of all threads on this machine, for profiles.
#pragma once

#include "ops.h"

namespace tokamak::cpu {

// Reads [memory, memory + num_bytes) once, except for less than 128 bytes at the end of a piece; returns the exclusive or of
// its words.
std::uint64_t read_memory(Engine &engine, const void *memory, i64 num_bytes);

// Runs a unit of this variant, several times so many turns on each thread; returns the total operations.
i64 run_unit(Engine &engine, const Kernels &kernels, Unit unit, i64 turns);

}  // namespace tokamak::cpu
