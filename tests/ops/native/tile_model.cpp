// The model of tiles alone: cases are read from a file, and each one's sums are written over in it. A case:
//
//   i32: kind (0: bfloat16, 1: bytes), rows of sums, rows of A, steps, columns | sums [rows][columns] | A [rows][steps] |
//   B [steps][columns], four bytes each
#include <immintrin.h>

#include <cstdio>
#include <vector>

#define VECTOR_BYTES 64
#define TOKAMAK_EMULATED_TILES
#include "../../../ops/cpu/native/kernels.h"

namespace tokamak::cpu {
namespace {

// clang-format off: each builds on those above
#include "../../../ops/cpu/native/vector.inc"
#include "../../../ops/cpu/native/bytes.inc"
#include "../../../ops/cpu/native/tiles.inc"
// clang-format on

struct Case {
    i32 kind, rows, a_rows, steps, columns;
};

void run(const Case &of, i32 *sums, const i32 *a, const i32 *b) {
    TileConfig config = {};
    config.palette = 1;
    const i32 rows[] = {of.rows, of.a_rows, of.steps}, columns[] = {of.columns, of.steps, of.columns};
    for (int t = 0; t < 3; ++t) {
        config.rows[t] = static_cast<std::uint8_t>(rows[t]);
        config.row_bytes[t] = static_cast<std::uint16_t>(columns[t] * 4);
    }
    const TileScope scope(config);
    load_tile<0>(sums, of.columns * 4);
    load_tile<1>(a, of.steps * 4);
    load_tile<2>(b, of.columns * 4);
    of.kind == 0 ? dot_bf16<0, 1, 2>() : dot_int8<0, 1, 2>();
    store_tile<0>(sums, of.columns * 4);
}

}  // namespace
}  // namespace tokamak::cpu

int main(int, char **arguments) {
    using namespace tokamak::cpu;
    std::FILE *file = std::fopen(arguments[1], "r+b");
    int count = 0;
    for (Case of; std::fread(&of, sizeof of, 1, file) == 1; ++count) {
        std::vector<i32> sums(of.rows * of.columns), a(of.a_rows * of.steps), b(of.steps * of.columns);
        const long place = std::ftell(file);
        for (auto *values : {&sums, &a, &b}) {
            if (std::fread(values->data(), 4, values->size(), file) != values->size()) return 1;
        }
        run(of, sums.data(), a.data(), b.data());
        const long next = std::ftell(file);
        std::fseek(file, place, SEEK_SET);
        std::fwrite(sums.data(), 4, sums.size(), file);
        std::fseek(file, next, SEEK_SET);
    }
    std::fclose(file);
    std::printf("%d cases\n", count);
}
