// ops._cpu: the ops of a step on this machine's cores. Python gives addresses (ops/cpu/table.py knows what lies there);
// everything is run without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "checksum.h"
#include "ops.h"
#include "packing.h"
#include "philox.h"
#include "probe.h"
#include "processor.h"
#include "progress.h"
#include "sampling.h"

namespace nb = nanobind;

namespace tokamak::cpu {
namespace {

using Address = std::uintptr_t;

float *floats(Address address) { return reinterpret_cast<float *>(address); }
std::uint8_t *bytes(Address address) { return reinterpret_cast<std::uint8_t *>(address); }
std::int8_t *integers(Address address) { return reinterpret_cast<std::int8_t *>(address); }
char *cache(Address address) { return reinterpret_cast<char *>(address); }
i32 *ints(Address address) { return reinterpret_cast<i32 *>(address); }
Rows rows_of(Address address, i64 count) { return {ints(address), count}; }

template <class Name, int N>
Name named(const char *const (&names)[N], const std::string &name) {
    for (int index = 0; index < N; ++index) {
        if (name == names[index]) return static_cast<Name>(index);
    }
    throw std::invalid_argument("there is no " + name);
}

Part part_named(const std::string &name) { return named<Part>(PART_NAMES, name); }
Unit unit_named(const std::string &name) { return named<Unit>(UNIT_NAMES, name); }

const Kernels &variant_named(const std::string &name) {
    if (const Kernels *found = find_variant(name.c_str())) return *found;
    throw std::invalid_argument("there is no variant " + name + " here");
}

void bind_ops(nb::module_ &module) {
    nb::class_<Op>(module, "Op");
    module.def(
        "embedding", [](Address y, Address weight, Address scales, Address multipliers, Address offsets, Address token_ids,
                        i64 num_rows, i64 width, i64 group_size, i32 kind, bool is_in_panels, Address rows, i64 count) {
            return Op{Embed{floats(y), floats(weight), floats(scales), integers(multipliers), floats(offsets), ints(token_ids),
                            num_rows, width, group_size, static_cast<WeightKind>(kind), is_in_panels, rows_of(rows, count)}};
        });
    module.def("linear", [](Address y, Address x, i32 kind, Address weight, Address scales, Address multipliers,
                            Address offsets, Address bias, i64 inputs, i64 outputs, i64 group_size, Address rows, i64 count) {
        return Op{LinearOp{static_cast<WeightKind>(kind),
                           {floats(y), floats(x), nullptr, floats(weight), floats(scales), integers(multipliers),
                            floats(offsets), floats(bias), inputs, outputs, group_size, 0},
                           rows_of(rows, count)}};
    });
    module.def("rms_norm", [](Address y, Address total, Address x, Address residual, Address weight, float epsilon, i64 width,
                              Address rows, i64 count) {
        return Op{RmsNorm{floats(y), floats(total), floats(x), floats(residual), floats(weight), epsilon, width,
                          rows_of(rows, count)}};
    });
    module.def("map_slots", [](Address slots, Address positions, Address row_slots, Address block_tables, i64 table_width,
                               i64 block_size, Address rows, i64 count) {
        return Op{MapSlots{ints(slots), ints(positions), ints(row_slots), ints(block_tables), table_width, block_size,
                           rows_of(rows, count)}};
    });
    module.def("rotate_and_store",
               [](Address queries, Address qkv, Address keys, Address values, Address positions, Address slots, Address cosines,
                  Address sines, Address partners, Address query_weight, Address key_weight, float epsilon, i64 heads,
                  i64 kv_heads, i64 head_dim, i32 kv_type, i64 block_size, Address rows, i64 count) {
                   return Op{RotateAndStore{
                       {floats(queries), floats(qkv), cache(keys), cache(values), ints(positions), ints(slots), floats(cosines),
                        floats(sines), ints(partners), floats(query_weight), floats(key_weight), epsilon, heads, kv_heads,
                        head_dim, make_layout(static_cast<KvType>(kv_type), block_size, kv_heads, head_dim)},
                       rows_of(rows, count)}};
               });
    module.def("attention", [](Address y, Address queries, Address keys, Address values, Address slots, Address offsets,
                               Address starts, Address block_tables, i64 table_width, i64 heads, i64 kv_heads, i64 head_dim,
                               i64 window, i32 kv_type, i64 block_size, Address sequences, i64 count) {
        return Op{Attend{floats(y), floats(queries), cache(keys), cache(values), ints(slots), ints(offsets), ints(starts),
                         ints(block_tables), table_width, heads, kv_heads, head_dim, window,
                         make_layout(static_cast<KvType>(kv_type), block_size, kv_heads, head_dim), rows_of(sequences, count)}};
    });
    module.def("activate_and_multiply", [](Address y, Address x, i32 activation, i64 width, Address rows, i64 count) {
        return Op{Activate{floats(y), floats(x), static_cast<Activation>(activation), width, rows_of(rows, count)}};
    });
    module.def("run", [](const Op &op) { run(Engine::get(), op); }, nb::call_guard<nb::gil_scoped_release>());
}

void bind_engine(nb::module_ &module) {
    module.def(
        "set_num_threads", [](int count, const std::vector<int> &cores) { Engine::get().set_num_threads(count, cores); },
        nb::arg("count"), nb::arg("cores") = std::vector<int>(), nb::call_guard<nb::gil_scoped_release>());
    module.def("set_heartbeat", [](Address word) { heartbeat_word.store(reinterpret_cast<std::uint64_t *>(word)); });
    module.def("num_threads", [] { return Engine::get().pool().num_threads(); });
    module.def(
        "read_memory",
        [](Address memory, i64 num_bytes) {
            return read_memory(Engine::get(), reinterpret_cast<const void *>(memory), num_bytes);
        },
        nb::call_guard<nb::gil_scoped_release>());
    module.def("variants", [] {
        std::vector<std::string> names;
        for (const Kernels *kernels : variants()) names.emplace_back(kernels->name);
        return names;
    });
    module.def("known_variants", [] {
        nb::list all;
        for (const Variant &variant : VARIANTS) {
            bool is_built = false;
            for (const Kernels *kernels : built_variants()) is_built |= std::strcmp(kernels->name, variant.name) == 0;
            all.append(nb::make_tuple(variant.name, is_built, variant.is_runnable()));
        }
        return all;
    });
    module.def("candidates", [] {
        std::vector<std::string> names;
        for (const Variant &variant : VARIANTS) {
            if (!variant.is_for_tests && find_variant(variant.name) != nullptr) names.emplace_back(variant.name);
        }
        return names;
    });
    module.def("families", [](const std::string &variant) {
        nb::dict found;
        const Kernels &kernels = variant_named(variant);
        for (int part = 0; part < NUM_PARTS; ++part) found[PART_NAMES[part]] = kernels.families[part];
        return found;
    });
    module.def("variant", [] { return std::string(Engine::get().kernels().name); });
    module.def("variant_of", [](const std::string &part) { return std::string(Engine::get().variant_of(part_named(part))); });
    module.def("has_paired_products", [] { return Engine::get().kernels().has_paired_products; });
    module.def("select", [](const std::string &name) { return Engine::get().select(name.c_str()); });
    module.def("select_part", [](const std::string &part, const std::string &name) {
        return Engine::get().select_part(part_named(part), name.c_str());
    });
    module.def("units", [](const std::string &variant) {
        const Kernels &kernels = variant_named(variant);
        std::vector<std::string> names;
        for (int unit = 0; unit < NUM_UNITS; ++unit) {
            if (kernels.units[unit] != nullptr) names.emplace_back(UNIT_NAMES[unit]);
        }
        return names;
    });
    module.def(
        "run_unit",
        [](const std::string &variant, const std::string &unit, i64 turns) {
            return run_unit(Engine::get(), variant_named(variant), unit_named(unit), turns);
        },
        nb::call_guard<nb::gil_scoped_release>());
}

void bind_packing(nb::module_ &module) {
    const auto in_parallel = [](i64 count, i64 at_once, auto function) {
        const i64 num_tasks = (count + at_once - 1) / at_once;
        Engine::get().pool().run(num_tasks, [&](i64 task, int thread) {
            function(count * task / num_tasks, count * (task + 1) / num_tasks, thread);
        });
    };
    module.def(
        "pack_panels",
        [in_parallel](Address packed, i32 kind, Address weight, bool is_bfloat16, i64 output_stride, i64 input_stride,
                      i64 outputs, i64 inputs) {
            const Matrix matrix{floats(weight), is_bfloat16, output_stride, input_stride, outputs, inputs};
            in_parallel((outputs + PANEL - 1) / PANEL, 16, [&](i64 begin, i64 end, int) {
                pack_panels(floats(packed), static_cast<WeightKind>(kind), matrix, begin, end);
            });
        },
        nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "quantize_weight",
        [in_parallel](Address packed, Address scales, Address multipliers, i32 kind, Address weight, bool is_bfloat16,
                      i64 output_stride, i64 input_stride, i64 outputs, i64 inputs, i64 group_size) {
            const Matrix matrix{floats(weight), is_bfloat16, output_stride, input_stride, outputs, inputs};
            const PackedIntegers to{bytes(packed), floats(scales), integers(multipliers), static_cast<WeightKind>(kind),
                                    group_size};
            in_parallel((outputs + PANEL - 1) / PANEL, 4, [&](i64 begin, i64 end, int thread) {
                quantize_panels(Engine::get(), to, matrix, begin, end, thread);
            });
        },
        nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "lay_integers",
        [in_parallel](Address packed, i32 kind, Address weight, i64 output_stride, i64 input_stride, i64 outputs, i64 inputs,
                      int zero) {
            const IntMatrix matrix{bytes(weight), output_stride, input_stride, outputs, inputs};
            in_parallel((outputs + PANEL - 1) / PANEL, 16, [&](i64 begin, i64 end, int) {
                lay_integers(bytes(packed), static_cast<WeightKind>(kind), matrix, static_cast<std::uint8_t>(zero), begin, end);
            });
        },
        nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "pack_rows",
        [in_parallel](Address packed, i32 kind, Address weight, bool is_bfloat16, i64 row_stride, i64 column_stride, i64 rows,
                      i64 columns) {
            const Matrix matrix{floats(weight), is_bfloat16, row_stride, column_stride, rows, columns};
            in_parallel(rows, 256, [&](i64 begin, i64 end, int) {
                pack_rows(floats(packed), static_cast<WeightKind>(kind), matrix, begin, end);
            });
        },
        nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "are_finite",
        [in_parallel](Address values, i64 count, i32 num_bytes, std::uint32_t exponent) {
            std::atomic<bool> found{true};
            in_parallel(count, 1 << 18, [&](i64 begin, i64 end, int) {
                if (!are_finite(bytes(values) + begin * num_bytes, end - begin, num_bytes, exponent)) found = false;
            });
            return found.load();
        },
        nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "checksum",
        [](Address bytes, i64 num_bytes) {
            return checksum(Engine::get(), reinterpret_cast<const unsigned char *>(bytes), num_bytes);
        },
        nb::call_guard<nb::gil_scoped_release>());
}

void bind_sampling(nb::module_ &module) {
    module.def(
        "sample",
        [](Address logits, i64 vocab, i64 rows, Address token_ids, Address logprobs, Address ranks, i64 num_top,
           Address top_token_ids, Address top_logprobs, Address samplings, Address histories, i64 width,
           Address num_prompt_tokens, Address slots, Address positions) {
            const SampledRows sampled{floats(logits),      vocab,       rows,    ints(token_ids),
                                      floats(logprobs),    ints(ranks), num_top, ints(top_token_ids),
                                      floats(top_logprobs)};
            const SlotTable table{reinterpret_cast<const SlotSampling *>(samplings), ints(histories), width,
                                  ints(num_prompt_tokens)};
            sample(Engine::get(), sampled, table, ints(slots), ints(positions));
        },
        nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "score",
        [](Address logits, i64 vocab, i64 rows, Address token_ids, Address logprobs, Address ranks, i64 num_top,
           Address top_token_ids, Address top_logprobs) {
            score(Engine::get(), {floats(logits), vocab, rows, ints(token_ids), floats(logprobs), ints(ranks), num_top,
                                  ints(top_token_ids), floats(top_logprobs)});
        },
        nb::call_guard<nb::gil_scoped_release>());
    module.def("philox4x32", [](std::vector<std::uint32_t> counter, std::vector<std::uint32_t> key) {
        if (counter.size() != 4 || key.size() != 2) throw nb::value_error("philox4x32 takes four words and two");
        philox4x32(counter.data(), key.data());
        return counter;
    });
    module.def("uniform", &uniform);
}

}  // namespace
}  // namespace tokamak::cpu

NB_MODULE(_cpu, module) {
    using namespace tokamak::cpu;
    module.attr("PANEL") = PANEL;
    module.attr("FOLDED_GROUPS") = nb::make_tuple(LEAST_FOLDED_GROUP, 2 * LEAST_FOLDED_GROUP, FOLDED_BLOCK);
    module.attr("KEY_PANEL") = KEY_PANEL;
    module.attr("KEY_SPLIT") = KEY_SPLIT;
    module.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
    module.attr("MAX_GROUP") = MAX_GROUP;
    module.attr("SLOT_SAMPLING_BYTES") = sizeof(SlotSampling);
    bind_ops(module);
    bind_engine(module);
    bind_packing(module);
    bind_sampling(module);
    nb::class_<Tape>(module, "Tape")
        .def(nb::init<std::vector<Op>>())
        .def("replay", &Tape::replay, nb::call_guard<nb::gil_scoped_release>())
        .def("replay_timed", &Tape::replay_timed, nb::call_guard<nb::gil_scoped_release>())
        .def("replay_alone", &Tape::replay_alone, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("times_ns", &Tape::times_ns);
}
