#pragma once

#include <cstdint>

namespace tokamak::cpu {

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): random numbers as a function of key and
// counter. The random number of a token is a function of its request, so it is the same in any batch and after any crash, and
// needs no state.
void philox4x32(std::uint32_t counter[4], std::uint32_t key[2]);

// In [0, 1) with 53 random bits: a function of the request's seed, the token's position, the sample's index, and its purpose
// (0: sampling).
double uniform(std::uint64_t seed, std::uint32_t position, std::uint32_t sample_index, std::uint32_t purpose = 0);

}  // namespace tokamak::cpu
