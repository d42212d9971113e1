// Pieces of PIECE bytes are hashed separately, then their hashes in order. In a piece, each of eight lanes takes every eighth
// word, with the round of XXH64 (Collet): lane = rotate(lane + word * P2) * P1.
#include "checksum.h"

#include <algorithm>
#include <cstring>

namespace tokamak::cpu {
namespace {

using u64 = std::uint64_t;

constexpr i64 PIECE = 1 << 20;
constexpr int LANES = 8;
constexpr u64 P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9;

u64 rotate(u64 value, int count) { return value << count | value >> (64 - count); }
u64 mix(u64 lane, u64 word) { return rotate(lane + word * P2, 31) * P1; }

u64 avalanche(u64 hash) {
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
}

u64 hash_piece(const unsigned char *bytes, i64 num_bytes) {
    constexpr i64 BLOCK = LANES * sizeof(u64);
    u64 lanes[LANES];
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = P3 * (lane + 1);
    u64 words[LANES];
    i64 begin = 0;
    for (; begin + BLOCK <= num_bytes; begin += BLOCK) {
        std::memcpy(words, bytes + begin, BLOCK);
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
    }
    if (begin < num_bytes) {
        std::memset(words, 0, BLOCK);
        std::memcpy(words, bytes + begin, num_bytes - begin);
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
    }
    u64 hash = static_cast<u64>(num_bytes);
    for (const u64 lane : lanes) hash = mix(hash, avalanche(lane));
    return avalanche(hash);
}

// for_all(number, function) calls function(piece) for each piece.
template <class ForAll>
u64 hash_of_pieces(const unsigned char *bytes, i64 num_bytes, const ForAll &for_all) {
    std::vector<u64> hashes((num_bytes + PIECE - 1) / PIECE);
    for_all(static_cast<i64>(hashes.size()), [&](i64 piece) {
        const i64 begin = piece * PIECE;
        hashes[piece] = hash_piece(bytes + begin, std::min(PIECE, num_bytes - begin));
    });
    return hash_piece(reinterpret_cast<const unsigned char *>(hashes.data()), hashes.size() * sizeof(u64));
}

}  // namespace

u64 checksum(Engine &engine, const unsigned char *bytes, i64 num_bytes) {
    return hash_of_pieces(bytes, num_bytes, [&](i64 num_pieces, const auto &hash) {
        engine.pool().run(num_pieces, [&](i64 piece, int) { hash(piece); });
    });
}

void checksums(Engine &engine, u64 *sums, const unsigned char *bytes, i64 num_bytes, i64 piece_bytes) {
    engine.pool().run((num_bytes + piece_bytes - 1) / piece_bytes, [&](i64 number, int) {
        const i64 begin = number * piece_bytes;
        const auto one_by_one = [](i64 num_pieces, const auto &hash) {
            for (i64 piece = 0; piece < num_pieces; ++piece) hash(piece);
        };
        sums[number] = hash_of_pieces(bytes + begin, std::min(piece_bytes, num_bytes - begin), one_by_one);
    });
}

}  // namespace tokamak::cpu
