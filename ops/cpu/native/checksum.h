// A 64-bit checksum of memory that is known to be large, on the rank's threads: finds what a disk or a writer that died left
// wrong, not what someone forged. It depends on the bytes alone, not on the threads or the variant.
#pragma once

#include "ops.h"

namespace tokamak::cpu {

std::uint64_t checksum(Engine &engine, const unsigned char *bytes, i64 num_bytes);

}  // namespace tokamak::cpu
