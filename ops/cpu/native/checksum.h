// 64-bit checksum of a large memory range, on the rank's threads. Detects errors of a disk or of a writer that died, not
// forgery. It depends only on the bytes, not on the threads or the variant.
#pragma once

#include "ops.h"

namespace tokamak::cpu {

std::uint64_t checksum(Engine &engine, const unsigned char *bytes, i64 num_bytes);

// Checksums of pieces of `piece_bytes`; the last may be shorter.
void checksums(Engine &engine, std::uint64_t *sums, const unsigned char *bytes, i64 num_bytes, i64 piece_bytes);

}  // namespace tokamak::cpu
