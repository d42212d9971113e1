// ops._cpu: the ops of a step on this machine's cores. Python passes addresses (see ops/cpu/table.py); everything runs without
// the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <iterator>
#include <stdexcept>

#include "checksum.h"
#include "comm.h"
#include "define.h"
#include "draft_lengths.h"
#include "drafts.h"
#include "layer_drafts.h"
#include "logit_edits.h"
#include "ops.h"
#include "packing.h"
#include "philox.h"
#include "probe.h"
#include "processor.h"
#include "progress.h"
#include "sampling.h"
#include "suffix_drafts.h"
#include "variants.h"

namespace nb = nanobind;

namespace tokamak::cpu {
namespace {

using Address = std::uintptr_t;

float *floats(Address address) { return reinterpret_cast<float *>(address); }
Scales scales_of(Address address, i32 kind) { return {floats(address), static_cast<ScaleKind>(kind)}; }
std::uint8_t *bytes(Address address) { return reinterpret_cast<std::uint8_t *>(address); }
bool *truths(Address address) { return reinterpret_cast<bool *>(address); }
std::int8_t *integers(Address address) { return reinterpret_cast<std::int8_t *>(address); }
char *cache(Address address) { return reinterpret_cast<char *>(address); }
i32 *ints(Address address) { return reinterpret_cast<i32 *>(address); }
Rows rows_of(Address address, i64 count) { return {ints(address), count}; }
Comm *comm_at(Address address) { return reinterpret_cast<Comm *>(address); }

// Pairs of begin and end; none: all panels.
std::vector<PanelRange> ranges_of(const std::vector<i64> &panels, i64 outputs) {
    if (panels.empty()) return {{0, (outputs + PANEL - 1) / PANEL}};
    std::vector<PanelRange> ranges;
    for (std::size_t index = 0; index + 1 < panels.size(); index += 2) ranges.push_back({panels[index], panels[index + 1]});
    return ranges;
}

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

// Seven numbers each, as in AdaptedPart.
std::vector<AdaptedPart> adapted_parts_of(const std::vector<i64> &numbers) {
    std::vector<AdaptedPart> parts;
    for (std::size_t i = 0; i + 7 <= numbers.size(); i += 7) {
        const i64 *at = numbers.data() + i;
        parts.push_back({at[0], at[1], at[2], at[3], at[4], at[5], at[6]});
    }
    return parts;
}

template <bool IS_GATED>
Op activate(Address y, Address x, i32 activation, float alpha, float limit, i64 width, i64 begin, i64 end, Address rows,
            i64 count) {
    const Gate gate{static_cast<Activation>(activation), IS_GATED, alpha, limit};
    return Op{Activate{floats(y), floats(x), gate, width, begin, end, rows_of(rows, count)}};
}

void bind_row_ops(nb::module_ &module) {
    define(
        module, "embedding",
        [](Address y, Address weight, Address scales, Address multipliers, Address offsets, i32 scale_kind, Address token_ids,
           i64 num_rows, i64 width, i64 group_size, i32 kind, bool is_in_panels, Address rows, i64 count) {
            return Op{Embed{floats(y), floats(weight), scales_of(scales, scale_kind), integers(multipliers),
                            scales_of(offsets, scale_kind), ints(token_ids), num_rows, width, group_size,
                            static_cast<WeightKind>(kind), is_in_panels, rows_of(rows, count)}};
        });
    define(
        module, "linear",
        [](Address y, Address x, i32 kind, Address weight, Address scales, Address multipliers, Address offsets, i32 scale_kind,
           Address bias, i64 inputs, i64 outputs, i64 group_size, const std::vector<i64> &panels, Address rows, i64 count) {
            return Op{
                LinearOp{static_cast<WeightKind>(kind),
                         {floats(y), floats(x), nullptr, floats(weight), scales_of(scales, scale_kind), integers(multipliers),
                          scales_of(offsets, scale_kind), floats(bias), inputs, outputs, group_size, 0},
                         ranges_of(panels, outputs),
                         rows_of(rows, count)}};
        });
    define(module, "adapt",
           [](Address y, Address x, Address adapter_slots, Address slots, Address ranks, i64 num_slots, i64 slot_floats,
              i64 modules, i64 inputs, i64 outputs, const std::vector<i64> &parts, Address rows, i64 count) {
               return Op{Adapt{{floats(y), floats(x), nullptr, ints(adapter_slots), floats(slots), ints(ranks), slot_floats,
                                modules, inputs, outputs, nullptr, 0},
                               adapted_parts_of(parts),
                               num_slots,
                               rows_of(rows, count)}};
           });
    define(module, "take_features",
           [](Address y, Address features, Address feature_rows, i64 num_rows, i64 feature_bytes, i64 at, i64 width,
              bool is_bfloat16, bool is_added, Address rows, i64 count) {
               return Op{TakeFeatures{floats(y), cache(features), ints(feature_rows), num_rows, feature_bytes, at, width,
                                      is_bfloat16, is_added, rows_of(rows, count)}};
           });
    define(module, "rms_norm",
           [](Address y, Address total, Address x, Address residual, Address weight, float epsilon, i64 width, Address rows,
              i64 count) {
               return Op{RmsNorm{floats(y), floats(total), floats(x), floats(residual), floats(weight), epsilon, width,
                                 rows_of(rows, count)}};
           });
    define(module, "layer_norm",
           [](Address y, Address total, Address x, Address residual, Address weight, Address bias, float epsilon, i64 width,
              Address rows, i64 count) {
               return Op{LayerNorm{floats(y), floats(total), floats(x), floats(residual), floats(weight), floats(bias), epsilon,
                                   width, rows_of(rows, count)}};
           });
    define(module, "normalize_wide",
           [](Address y, Address x, Address query_weight, Address key_weight, float epsilon, i64 head_dim, i64 queries,
              i64 keys, i64 values, Address rows, i64 count) {
               return Op{NormalizeWide{floats(y), floats(x), floats(query_weight), floats(key_weight), epsilon, head_dim,
                                       queries, keys, values, rows_of(rows, count)}};
           });
    define(module, "scale_and_add", [](Address y, Address x, Address other, float factor, i64 width, Address rows, i64 count) {
        return Op{ScaleAndAdd{floats(y), floats(x), floats(other), factor, width, rows_of(rows, count)}};
    });
    define(module, "mean_rows", [](Address y, Address x, i64 joined, i64 width, Address rows, i64 count) {
        return Op{MeanRows{floats(y), floats(x), joined, width, rows_of(rows, count)}};
    });
    define(module, "adjust_columns",
           [](Address y, Address x, Address rules, i64 width, i64 at, i64 y_width, Address rows, i64 count) {
               return Op{AdjustColumns{floats(y), floats(x), floats(rules), width, at, y_width, rows_of(rows, count)}};
           });
    define(module, "multiply",
           [](Address y, Address x, Address factors, i64 row_factors, i64 first, i64 width, i64 begin, i64 end, Address rows,
              i64 count) {
               return Op{Multiply{floats(y), floats(x), floats(factors), row_factors, first, width, begin, end,
                                  rows_of(rows, count)}};
           });
    define(module, "activate_and_multiply", activate<true>);
    define(module, "activate", activate<false>);
}

void bind_attention_ops(nb::module_ &module) {
    define(module, "map_slots",
           [](Address slots, Address positions, Address row_slots, Address block_tables, i64 table_width, i64 block_size,
              Address rows, i64 count) {
               return Op{MapSlots{ints(slots), ints(positions), ints(row_slots), ints(block_tables), table_width, block_size,
                                  rows_of(rows, count)}};
           });
    define(module, "rotate_and_store",
           [](Address queries, Address qkv, i64 row_floats, i64 queries_at, i64 keys_at, i64 values_at, Address keys,
              Address values, Address positions, Address slots, Address cosines, Address sines, Address partners,
              Address query_weight, Address key_weight, Address value_weight, float epsilon, bool is_normalized_after,
              i64 heads, i64 kv_heads, i64 head_dim, i32 kv_type, i64 block_size, i64 first_cached, i64 block_bytes,
              Address rows, i64 count) {
               const CacheLayout layout = make_layout(static_cast<KvType>(kv_type), block_size, block_bytes, head_dim);
               const i64 at = first_cached * layout.head_bytes;
               return Op{RotateAndStore{{floats(queries),
                                         floats(qkv) + queries_at,
                                         row_floats,
                                         keys_at - queries_at,
                                         values_at - queries_at,
                                         cache(keys) + at,
                                         cache(values) + at,
                                         ints(positions),
                                         ints(slots),
                                         floats(cosines),
                                         floats(sines),
                                         ints(partners),
                                         floats(query_weight),
                                         floats(key_weight),
                                         floats(value_weight),
                                         epsilon,
                                         is_normalized_after,
                                         heads,
                                         kv_heads,
                                         head_dim,
                                         layout},
                                        rows_of(rows, count)}};
           });
    define(module, "attention",
           [](Address y, Address queries, Address keys, Address values, Address slots, Address offsets, Address starts,
              Address block_tables, i64 table_width, Address has_bounds, Address first_keys, Address last_keys, i64 heads,
              i64 kv_heads, i64 head_dim, i64 window, bool has_chunks, bool is_two_sided, float scale, float softcap,
              Address sinks, i64 first_sink, i32 kv_type, i64 block_size, i64 first_cached, i64 block_bytes, Address sequences,
              i64 count) {
               const CacheLayout layout = make_layout(static_cast<KvType>(kv_type), block_size, block_bytes, head_dim);
               const i64 at = first_cached * layout.head_bytes;
               return Op{Attend{floats(y),
                                floats(queries),
                                cache(keys) + at,
                                cache(values) + at,
                                ints(slots),
                                ints(offsets),
                                ints(starts),
                                ints(block_tables),
                                table_width,
                                heads,
                                kv_heads,
                                head_dim,
                                window,
                                has_chunks,
                                is_two_sided,
                                scale,
                                softcap,
                                sinks == 0 ? nullptr : floats(sinks) + first_sink,
                                layout,
                                {ints(has_bounds), ints(first_keys), ints(last_keys)},
                                rows_of(sequences, count)}};
           });
}

void bind_latent_ops(nb::module_ &module) {
    define(
        module, "store_latent",
        [](Address y, Address queries, i64 row_floats, i64 queries_at, Address compressed, Address keys, Address latents,
           Address positions, Address slots, Address cosines, Address sines, Address partners, Address weight, float epsilon,
           i64 heads, i64 plain_dim, i64 rotary_dim, i64 latent_dim, i32 kv_type, i64 block_size, Address rows, i64 count) {
            const KvType type = static_cast<KvType>(kv_type);
            return Op{StoreLatent{
                {floats(y), floats(queries) + queries_at, row_floats, floats(compressed), cache(keys), cache(latents),
                 ints(positions), ints(slots), floats(cosines), floats(sines), ints(partners), floats(weight), epsilon, heads,
                 plain_dim, make_slot_layout(type, block_size, rotary_dim), make_slot_layout(type, block_size, latent_dim)},
                rows_of(rows, count)}};
        });
    define(module, "latent_attention",
           [](Address y, Address absorbed, Address queries, Address keys, Address latents, Address slots, Address offsets,
              Address starts, Address block_tables, i64 table_width, Address has_bounds, Address first_keys, Address last_keys,
              i64 heads, i64 plain_dim, i64 rotary_dim, i64 latent_dim, float scale, i32 kv_type, i64 block_size,
              Address sequences, i64 count) {
               const KvType type = static_cast<KvType>(kv_type);
               return Op{AttendLatents{floats(y),
                                       floats(absorbed),
                                       floats(queries),
                                       cache(keys),
                                       cache(latents),
                                       ints(slots),
                                       ints(offsets),
                                       ints(starts),
                                       ints(block_tables),
                                       table_width,
                                       heads,
                                       plain_dim,
                                       scale,
                                       make_slot_layout(type, block_size, rotary_dim),
                                       make_slot_layout(type, block_size, latent_dim),
                                       {ints(has_bounds), ints(first_keys), ints(last_keys)},
                                       rows_of(sequences, count)}};
           });
    define(module, "head_linear",
           [](Address y, Address x, i32 kind, Address weight, i64 weight_bytes, i64 inputs, i64 outputs, i64 first_head,
              i64 heads, i64 stride, Address rows, i64 count) {
               return Op{HeadLinear{static_cast<WeightKind>(kind),
                                    {floats(y),
                                     floats(x),
                                     nullptr,
                                     cache(weight) + first_head * weight_bytes,
                                     {},
                                     nullptr,
                                     {},
                                     nullptr,
                                     inputs,
                                     outputs,
                                     0,
                                     0},
                                    heads,
                                    stride,
                                    weight_bytes,
                                    rows_of(rows, count)}};
           });
}

// The states of a step's sequences, as the last arguments of an op.
States states_of(Address memory, i64 num_slots, i64 slot_bytes, i64 num_logged, Address offsets, Address starts,
                 Address sequences, Rows num_sequences) {
    return {cache(memory), num_slots, slot_bytes, num_logged, ints(offsets), ints(starts), ints(sequences), num_sequences};
}

void bind_recurrent_ops(nb::module_ &module) {
    define(module, "convolve",
           [](Address y, Address x, i64 x_floats, i64 x_at, Address weight, Address bias, i64 channels, i64 taps,
              bool is_activated, bool is_gated, const std::vector<i64> &columns, i64 window_at, i64 log_at, Address memory,
              i64 num_slots, i64 slot_bytes, i64 num_logged, Address offsets, Address starts, Address sequences,
              Address num_sequences, i64 count) {
               if (taps < 1 || taps > MAX_TAPS) throw std::invalid_argument("convolution of " + std::to_string(taps) + " taps");
               std::vector<PanelRange> ranges;
               for (std::size_t i = 0; i + 1 < columns.size(); i += 2) ranges.push_back({columns[i], columns[i + 1]});
               return Op{Convolve{{floats(y), channels, taps, floats(weight), floats(bias), is_activated, nullptr, 0},
                                  floats(x) + x_at,
                                  x_floats,
                                  is_gated,
                                  window_at,
                                  log_at,
                                  ranges,
                                  states_of(memory, num_slots, slot_bytes, num_logged, offsets, starts, sequences,
                                            rows_of(num_sequences, count))}};
           });
    define(module, "delta_rule",
           [](Address y, Address x, Address decays, Address betas, i64 y_floats, i64 x_floats, i64 decay_floats,
              i64 beta_floats, i64 x_at, i64 decays_at, i64 betas_at, Address rates, Address biases, bool is_by_key,
              float epsilon, i64 heads, i64 key_heads, i64 key_dim, i64 value_dim, i64 first_head, i64 own_heads, i64 matrix_at,
              i64 log_at, i64 log_bytes, Address memory, i64 num_slots, i64 slot_bytes, i64 num_logged, Address offsets,
              Address starts, Address sequences, Address num_sequences, i64 count) {
               const i64 keys = key_heads * key_dim;
               const RecurrenceShape shape{true,
                                           is_by_key,
                                           floats(y),
                                           floats(x) + x_at,
                                           floats(decays) + decays_at,
                                           floats(betas) + betas_at,
                                           y_floats,
                                           x_floats,
                                           decay_floats,
                                           beta_floats,
                                           0,
                                           keys,
                                           2 * keys,
                                           floats(rates),
                                           floats(biases),
                                           nullptr,
                                           epsilon,
                                           0,
                                           0,
                                           heads,
                                           key_heads,
                                           key_dim,
                                           value_dim,
                                           first_head,
                                           matrix_at,
                                           log_at,
                                           log_bytes};
               return Op{Recur{shape, own_heads,
                               states_of(memory, num_slots, slot_bytes, num_logged, offsets, starts, sequences,
                                         rows_of(num_sequences, count))}};
           });
    define(module, "state_space",
           [](Address y, Address x, Address decays, i64 y_floats, i64 x_floats, i64 decay_floats, i64 x_at, i64 decays_at,
              Address rates, Address biases, Address skips, float least, float most, i64 heads, i64 groups, i64 state_dim,
              i64 head_dim, i64 first_head, i64 own_heads, i64 matrix_at, i64 log_at, i64 log_bytes, Address memory,
              i64 num_slots, i64 slot_bytes, i64 num_logged, Address offsets, Address starts, Address sequences,
              Address num_sequences, i64 count) {
               const i64 inner = heads * head_dim;
               const RecurrenceShape shape{false,
                                           false,
                                           floats(y),
                                           floats(x) + x_at,
                                           floats(decays) + decays_at,
                                           nullptr,
                                           y_floats,
                                           x_floats,
                                           decay_floats,
                                           0,
                                           inner + groups * state_dim,
                                           inner,
                                           0,
                                           floats(rates),
                                           floats(biases),
                                           floats(skips),
                                           0,
                                           least,
                                           most,
                                           heads,
                                           groups,
                                           state_dim,
                                           head_dim,
                                           first_head,
                                           matrix_at,
                                           log_at,
                                           log_bytes};
               return Op{Recur{shape, own_heads,
                               states_of(memory, num_slots, slot_bytes, num_logged, offsets, starts, sequences,
                                         rows_of(num_sequences, count))}};
           });
    define(module, "gated_norm",
           [](Address y, Address x, Address gate, Address weight, i64 y_floats, i64 x_floats, i64 gate_floats, i64 x_at,
              i64 gate_at, i64 weight_at, i64 groups, i64 group, i64 weight_step, float epsilon, bool is_gated_first,
              bool is_sigmoid, Address rows, i64 count) {
               return Op{GatedNorm{{floats(y) + x_at, floats(x) + x_at, gate == 0 ? nullptr : floats(gate) + gate_at,
                                    weight == 0 ? nullptr : floats(weight) + weight_at, y_floats, x_floats, gate_floats, groups,
                                    group, weight_step, epsilon, is_gated_first, is_sigmoid},
                                   rows_of(rows, count)}};
           });
}

void bind_rank_ops(nb::module_ &module) {
    define(module, "gather",
           [](Address y, Address x, Address comm, i64 y_width, i64 x_width, i64 begin, i64 from, i64 columns, Address rows,
              i64 count) {
               return Op{
                   Gather{comm_at(comm), floats(y), floats(x), y_width, x_width, begin, from, columns, rows_of(rows, count)}};
           });
    define(
        module, "collective",
        [](Address y, Address x, Address comm, i32 kind, i64 row_bytes, int root, Address received, Address sent, Address rows,
           i64 count) {
            return Op{Collective{comm_at(comm), static_cast<CommKind>(kind), bytes(y), bytes(x), row_bytes, root,
                                 reinterpret_cast<i64 *>(received), reinterpret_cast<const i64 *>(sent), rows_of(rows, count)}};
        });
}

void bind_expert_ops(nb::module_ &module) {
    define(module, "route",
           [](Address ids, Address weights, Address logits, Address correction, Address scales, i64 experts, i64 chosen,
              i64 groups, i64 chosen_groups, i64 num_best, bool is_softmax, bool is_normalized, float added_to_sum,
              float smallest_sum, float factor, Address sets, i32 set, Address num_tokens, Address rows, i64 count) {
               return Op{Route{ints(ids), floats(weights), floats(logits), floats(correction), floats(scales), experts, chosen,
                               groups, chosen_groups, num_best, is_softmax, is_normalized, added_to_sum, smallest_sum, factor,
                               ints(sets), set, ints(num_tokens), rows_of(rows, count)}};
           });
    define(module, "choose",
           [](Address ids, Address weights, Address factors, Address all_ids, Address all_weights, i64 chosen, i64 index,
              Address rows, i64 count) {
               return Op{Choose{ints(ids), floats(weights), floats(factors), ints(all_ids), floats(all_weights), chosen, index,
                                rows_of(rows, count)}};
           });
    define(module, "experts",
           [](Address y, Address results, Address x, Address ids, Address weights, Address shared, Address slots,
              i32 gate_up_kind, Address gate_up, Address gate_up_scales, Address gate_up_multipliers, Address gate_up_offsets,
              i32 gate_up_scale_kind, i64 gate_up_group_size, Address gate_up_bias, i32 down_kind, Address down,
              Address down_scales, Address down_multipliers, Address down_offsets, i32 down_scale_kind, i64 down_group_size,
              Address down_bias, i32 activation, float alpha, float limit, bool is_gated, i64 hidden, i64 inner, i64 experts,
              i64 chosen, Address comm, Address windows, i64 max_rows, int first_rank, int num_ranks, Address owners,
              Address counts, Address tensor_comm, Address activated, const std::vector<i64> &gate_up_panels,
              const std::vector<i64> &down_panels, i64 begin, i64 end, i64 y_begin, i64 y_end, Address adapter_slots,
              Address adapters, Address ranks, i64 num_adapters, i64 slot_floats, i64 modules, i64 index_step, i64 float_step,
              const std::vector<i64> &gate_up_parts, const std::vector<i64> &down_parts, Address rows, i64 count) {
               const i64 width = is_gated ? 2 * inner : inner;
               const ExpertMatrices first{
                   static_cast<WeightKind>(gate_up_kind),
                   {nullptr, nullptr, nullptr, floats(gate_up), scales_of(gate_up_scales, gate_up_scale_kind),
                    integers(gate_up_multipliers), scales_of(gate_up_offsets, gate_up_scale_kind), floats(gate_up_bias), hidden,
                    width, gate_up_group_size, 0}};
               const ExpertMatrices second{static_cast<WeightKind>(down_kind),
                                           {nullptr, nullptr, nullptr, floats(down), scales_of(down_scales, down_scale_kind),
                                            integers(down_multipliers), scales_of(down_offsets, down_scale_kind),
                                            floats(down_bias), inner, hidden, down_group_size, 0}};
               return Op{ApplyExperts{floats(y),
                                      floats(results),
                                      floats(x),
                                      ints(ids),
                                      floats(weights),
                                      floats(shared),
                                      ints(slots),
                                      first,
                                      second,
                                      {static_cast<Activation>(activation), is_gated, alpha, limit},
                                      experts,
                                      chosen,
                                      {comm_at(comm), cache(windows), max_rows, first_rank, num_ranks, ints(owners),
                                       reinterpret_cast<std::uint64_t *>(counts)},
                                      {comm_at(tensor_comm), floats(activated), ranges_of(gate_up_panels, width),
                                       ranges_of(down_panels, hidden), begin, end, y_begin, y_end},
                                      {ints(adapter_slots), floats(adapters), ints(ranks), num_adapters, slot_floats, modules,
                                       index_step, float_step, adapted_parts_of(gate_up_parts), adapted_parts_of(down_parts)},
                                      rows_of(rows, count)}};
           });
}

void bind_ops(nb::module_ &module) {
    nb::class_<Op>(module, "Op");
    bind_row_ops(module);
    bind_attention_ops(module);
    bind_latent_ops(module);
    bind_recurrent_ops(module);
    bind_rank_ops(module);
    bind_expert_ops(module);
    module.def("run", [](const Op &op) { run(Engine::get(), op); }, nb::call_guard<nb::gil_scoped_release>());
}

void bind_engine(nb::module_ &module) {
    module.def(
        "set_num_threads", [](int count, const std::vector<int> &cores) { Engine::get().set_num_threads(count, cores); },
        nb::arg("count"), nb::arg("cores") = std::vector<int>(), nb::call_guard<nb::gil_scoped_release>());
    define(module, "set_heartbeat", [](Address word) { heartbeat_word.store(reinterpret_cast<std::uint64_t *>(word)); });
    define(module, "num_threads", [] { return Engine::get().pool().num_threads(); });
    define(
        module, "read_memory",
        [](Address memory, i64 num_bytes) {
            return read_memory(Engine::get(), reinterpret_cast<const void *>(memory), num_bytes);
        },
        Gil::RELEASED);
    define(module, "variants", [] {
        std::vector<std::string> names;
        for (const Kernels &kernels : variants()) names.emplace_back(kernels.name);
        return names;
    });
    define(module, "known_variants", [] {
        nb::list all;
        for (const Variant &variant : VARIANTS) {
            bool is_built = false;
            for (const char *name : built_variants()) is_built |= std::strcmp(name, variant.name) == 0;
            all.append(nb::make_tuple(variant.name, is_built, variant.is_runnable()));
        }
        return all;
    });
    define(module, "candidates", [] {
        std::vector<std::string> names;
        for (const Variant &variant : VARIANTS) {
            if (!variant.is_for_tests && find_variant(variant.name) != nullptr) names.emplace_back(variant.name);
        }
        return names;
    });
    define(module, "families", [](const std::string &variant) {
        nb::dict found;
        const Kernels &kernels = variant_named(variant);
        for (int part = 0; part < NUM_PARTS; ++part) found[PART_NAMES[part]] = kernels.families[part];
        return found;
    });
    define(module, "variant", [] { return std::string(Engine::get().kernels().name); });
    define(module, "variant_of",
           [](const std::string &part) { return std::string(Engine::get().variant_of(part_named(part))); });
    define(module, "has_paired_products", [] { return Engine::get().kernels().has_paired_products; });
    define(module, "select", [](const std::string &name) { return Engine::get().select(name.c_str()); });
    define(module, "select_part", [](const std::string &part, const std::string &name) {
        return Engine::get().select_part(part_named(part), name.c_str());
    });
    define(module, "units", [](const std::string &variant) {
        const Kernels &kernels = variant_named(variant);
        std::vector<std::string> names;
        for (int unit = 0; unit < NUM_UNITS; ++unit) {
            if (kernels.units[unit] != nullptr) names.emplace_back(UNIT_NAMES[unit]);
        }
        return names;
    });
    define(
        module, "run_unit",
        [](const std::string &variant, const std::string &unit, i64 turns) {
            return run_unit(Engine::get(), variant_named(variant), unit_named(unit), turns);
        },
        Gil::RELEASED);
}

// Calls function(begin, end, thread) over [0, count), in parts of about `at_once`.
template <class Function>
void in_parallel(i64 count, i64 at_once, const Function &function) {
    const i64 num_tasks = (count + at_once - 1) / at_once;
    Engine::get().pool().run(
        num_tasks, [&](i64 task, int thread) { function(count * task / num_tasks, count * (task + 1) / num_tasks, thread); });
}

void bind_packing(nb::module_ &module) {
    define(
        module, "pack_panels",
        [](Address packed, i32 kind, Address weight, bool is_bfloat16, i64 output_stride, i64 input_stride, i64 outputs,
           i64 inputs) {
            const Matrix matrix{floats(weight), is_bfloat16, output_stride, input_stride, outputs, inputs};
            in_parallel((outputs + PANEL - 1) / PANEL, 16, [&](i64 begin, i64 end, int) {
                pack_panels(floats(packed), static_cast<WeightKind>(kind), matrix, begin, end);
            });
        },
        Gil::RELEASED);
    define(
        module, "quantize_weight",
        [](Address packed, Address scales, Address multipliers, i32 kind, Address weight, bool is_bfloat16, i64 output_stride,
           i64 input_stride, i64 outputs, i64 inputs, i64 group_size, bool has_narrow_scales, Address importances) {
            const Matrix matrix{floats(weight), is_bfloat16, output_stride, input_stride, outputs, inputs};
            const PackedIntegers to{bytes(packed), floats(scales),    integers(multipliers), static_cast<WeightKind>(kind),
                                    group_size,    has_narrow_scales, floats(importances)};
            in_parallel((outputs + PANEL - 1) / PANEL, 4, [&](i64 begin, i64 end, int thread) {
                quantize_panels(Engine::get(), to, matrix, begin, end, thread);
            });
        },
        Gil::RELEASED);
    define(
        module, "lay_integers",
        [](Address packed, i32 kind, Address weight, i64 output_stride, i64 input_stride, i64 outputs, i64 inputs, int zero) {
            const IntMatrix matrix{bytes(weight), output_stride, input_stride, outputs, inputs};
            in_parallel((outputs + PANEL - 1) / PANEL, 16, [&](i64 begin, i64 end, int) {
                lay_integers(bytes(packed), static_cast<WeightKind>(kind), matrix, static_cast<std::uint8_t>(zero), begin, end);
            });
        },
        Gil::RELEASED);
    define(
        module, "pack_rows",
        [](Address packed, i32 kind, Address weight, bool is_bfloat16, i64 row_stride, i64 column_stride, i64 rows,
           i64 columns) {
            const Matrix matrix{floats(weight), is_bfloat16, row_stride, column_stride, rows, columns};
            in_parallel(rows, 256, [&](i64 begin, i64 end, int) {
                pack_rows(floats(packed), static_cast<WeightKind>(kind), matrix, begin, end);
            });
        },
        Gil::RELEASED);
    define(
        module, "are_finite",
        [](Address values, i64 count, i32 num_bytes, std::uint32_t exponent) {
            std::atomic<bool> found{true};
            in_parallel(count, 1 << 18, [&](i64 begin, i64 end, int) {
                if (!are_finite(bytes(values) + begin * num_bytes, end - begin, num_bytes, exponent)) found = false;
            });
            return found.load();
        },
        Gil::RELEASED);
    define(
        module, "checksum",
        [](Address bytes, i64 num_bytes) {
            return checksum(Engine::get(), reinterpret_cast<const unsigned char *>(bytes), num_bytes);
        },
        Gil::RELEASED);
    define(
        module, "checksums",
        [](Address sums, Address bytes, i64 num_bytes, i64 piece_bytes) {
            checksums(Engine::get(), reinterpret_cast<std::uint64_t *>(sums), reinterpret_cast<const unsigned char *>(bytes),
                      num_bytes, piece_bytes);
        },
        Gil::RELEASED);
}

void bind_sampling(nb::module_ &module) {
    define(
        module, "sample",
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
        Gil::RELEASED);
    define(
        module, "score",
        [](Address logits, i64 vocab, i64 rows, Address token_ids, Address logprobs, Address ranks, i64 num_top,
           Address top_token_ids, Address top_logprobs) {
            score(Engine::get(), {floats(logits), vocab, rows, ints(token_ids), floats(logprobs), ints(ranks), num_top,
                                  ints(top_token_ids), floats(top_logprobs)});
        },
        Gil::RELEASED);
    define(module, "philox4x32", [](std::vector<std::uint32_t> counter, std::vector<std::uint32_t> key) {
        if (counter.size() != 4 || key.size() != 2) throw nb::value_error("philox4x32 takes four words and two");
        philox4x32(counter.data(), key.data());
        return counter;
    });
    module.def("uniform", &uniform, nb::arg(), nb::arg(), nb::arg(), nb::arg() = 0);
}

// known(slots, n) and propose(slots, n, limits, k, drafts, counts, classes).
template <typename Drafter>
void bind_drafter(nb::class_<Drafter> &drafter) {
    drafter.def_prop_ro("num_bytes", &Drafter::num_bytes);
    drafter.def(
        "known", [](Drafter &self, Address slots, i64 count) { self.known(ints(slots), count); },
        nb::call_guard<nb::gil_scoped_release>());
    drafter.def(
        "propose",
        [](Drafter &self, Address slots, i64 count, Address limits, i64 k, Address drafts, Address counts, Address classes) {
            self.propose({ints(slots), count, ints(limits), k, ints(drafts), ints(counts), ints(classes)});
        },
        nb::call_guard<nb::gil_scoped_release>());
}

void bind_drafts(nb::module_ &module) {
    nb::class_<DraftSlots>(module, "DraftSlots")
        .def("__init__", [](DraftSlots *self, Address token_ids, i64 width, Address num_tokens, Address states) {
            new (self) DraftSlots{ints(token_ids), width, ints(num_tokens), ints(states)};
        });
    nb::class_<NgramDrafts> ngram(module, "NgramDrafts");
    ngram.def(nb::init<i64, i64, i64, DraftSlots>());
    ngram.attr("NUM_CLASSES") = NgramDrafts::CLASSES;
    ngram.def("start", [](NgramDrafts &self, i64 state, i64 num_prompt_tokens, Address prediction, i64 num_predicted) {
        self.start(state, num_prompt_tokens, ints(prediction), num_predicted);
    });
    bind_drafter(ngram);
    nb::class_<SuffixDrafts> suffix(module, "SuffixDrafts");
    suffix.def("__init__", [](SuffixDrafts *self, i64 num_states, i64 depth, i64 max_texts, i64 max_bytes, double max_factor,
                              double min_chance, DraftSlots slots) {
        new (self) SuffixDrafts(num_states, {depth, max_texts, max_bytes, max_factor, min_chance}, slots);
    });
    nb::class_<StepTimes>(module, "StepTimes")
        .def(nb::init<>())
        .def("learn", [](StepTimes &self, bool has_prompts, bool has_drafts, i64 num_rows,
                         double step_ns) { self.learn(kind_of(has_prompts, has_drafts), num_rows, step_ns); })
        .def("of", [](const StepTimes &self, bool has_prompts, bool has_drafts,
                      i64 num_rows) { return self.of(kind_of(has_prompts, has_drafts), num_rows); })
        .def("num_plain_since", &StepTimes::num_plain_since);
    nb::class_<DraftLengths>(module, "DraftLengths")
        .def("__init__",
             [](DraftLengths *self, std::vector<double> priors, std::vector<i64> first_classes, std::vector<i64> are_layers,
                bool is_adaptive, i64 k, Address drafts, Address classes, Address chances, Address num_drafts, Address trusts,
                i64 num_methods, Address num_rested, Address pauses, Address is_drafted_by_layers, Address is_ended) {
                 const auto doubles = [](Address address) { return reinterpret_cast<double *>(address); };
                 const LengthSlots slots{k,
                                         ints(drafts),
                                         ints(classes),
                                         doubles(chances),
                                         ints(num_drafts),
                                         doubles(trusts),
                                         num_methods,
                                         ints(num_rested),
                                         ints(pauses),
                                         truths(is_drafted_by_layers),
                                         truths(is_ended)};
                 new (self)
                     DraftLengths(std::move(priors), std::move(first_classes), std::move(are_layers), slots, is_adaptive);
             })
        .def("clear", [](DraftLengths &self, Address slots, i64 count) { self.clear(ints(slots), count); })
        .def(
            "offer",
            [](DraftLengths &self, Address slots, i64 count, Address drafts, Address counts, Address classes, i64 first_class) {
                self.offer({ints(slots), count, nullptr, 0, ints(drafts), ints(counts), ints(classes)}, first_class);
            })
        .def("choose",
             [](DraftLengths &self, Address slots, i64 count, Address granted, i64 num_rows, i64 num_sampled, Address chosen) {
                 self.choose(ints(slots), count, ints(granted), num_rows, num_sampled, ints(chosen));
             })
        .def("learn", [](DraftLengths &self, Address slots, i64 count, Address num_drafts,
                         Address counts) { self.learn(ints(slots), count, ints(num_drafts), ints(counts)); })
        .def("wanted", [](DraftLengths &self, Address slots, i64 count,
                          Address wanted) { self.wanted(ints(slots), count, ints(wanted)); })
        .def("num_idle", [](const DraftLengths &self, Address slots, i64 count) { return self.num_idle(ints(slots), count); })
        .def("tell_layers", [](DraftLengths &self, Address slots, i64 count) { self.tell_layers(ints(slots), count); })
        .def_prop_ro("num_verified", &DraftLengths::num_verified)
        .def("wanted_by_new_requests", &DraftLengths::wanted_by_new_requests)
        .def_prop_ro("least_chance", &DraftLengths::least_chance)
        .def("took", [](DraftLengths &self, bool has_prompts, bool has_drafts, i64 num_rows, double step_ns, i64 num_steps) {
            self.took(kind_of(has_prompts, has_drafts), num_rows, step_ns, num_steps);
        });
    module.def("find_ends", [](Address slots, Address positions, Address token_ids, i64 count, Address samplings,
                               Address num_prompt_tokens, Address is_ended) {
        find_ends(ints(slots), reinterpret_cast<const i64 *>(positions), ints(token_ids), count,
                  reinterpret_cast<const SlotSampling *>(samplings), ints(num_prompt_tokens), truths(is_ended));
    });
    module.def("follow", [](Address slots, i64 count, Address are_following, Address starts, Address counts,
                            Address num_sampled, Address granted, Address num_tokens, Address max_total_tokens) {
        follow({ints(slots), count, truths(are_following), ints(starts), ints(counts), ints(num_sampled), ints(granted)},
               ints(num_tokens), ints(max_total_tokens));
    });
    module.def("put_drafts", [](Address slots, i64 count, Address num_drafts, Address counts, Address num_sampled,
                                Address num_tokens, Address drafts, i64 k, Address token_ids, i64 width) {
        put_drafts(ints(slots), count, ints(num_drafts), ints(counts), ints(num_sampled), ints(num_tokens), ints(drafts), k,
                   ints(token_ids), width);
    });
    module.def("accept", [](Address slots, i64 count, Address num_sampled, Address num_drafts, Address ends, Address drawn,
                            Address token_ids, i64 width, Address accepted, Address counts) {
        accept(ints(slots), count, ints(num_sampled), ints(num_drafts), ints(ends), ints(drawn), ints(token_ids), width,
               truths(accepted), ints(counts));
    });
    suffix.attr("NUM_CLASSES") = SuffixDrafts::CLASSES;
    suffix.def("start", &SuffixDrafts::start);
    suffix.def("stop", [](SuffixDrafts &self, i64 state, Address tokens, i64 num_tokens) {
        self.stop(state, ints(tokens), num_tokens);
    });
    suffix.def("forget", &SuffixDrafts::forget);
    suffix.def_prop_ro("num_texts", &SuffixDrafts::num_texts);
    bind_drafter(suffix);
}

LayerStep layer_step(Address slots, Address starts, Address counts, Address num_sampled, Address num_drafts, i64 count) {
    return {ints(slots), ints(starts), ints(counts), ints(num_sampled), ints(num_drafts), count};
}

// With the names of workers/extensions/drafts/draft_inputs.py.
LayerInputs layer_inputs(const nb::dict &arrays, i64 max_logit_rows) {
    const auto of = [&](const char *name) { return nb::cast<Address>(arrays[name]); };
    return {ints(of("token_ids")),        ints(of("row_slots")),       ints(of("positions")),  ints(of("sequence_slots")),
            ints(of("sequence_offsets")), ints(of("sequence_starts")), ints(of("first_keys")), ints(of("last_keys")),
            ints(of("logit_row_ids")),    ints(of("counts")),          floats(of("hidden")),   max_logit_rows};
}

void bind_layer_drafts(nb::module_ &module) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    module.def("choose_draft_tokens", [](Address logits, i64 num_rows, i64 vocab) {
        std::vector<DraftToken> draft_tokens(num_rows);
        choose_draft_tokens(Engine::get(), floats(logits), num_rows, vocab, true, draft_tokens.data());
        nb::list found;
        for (const DraftToken &draft_token : draft_tokens)
            found.append(nb::make_tuple(draft_token.token_id, draft_token.probability));
        return found;
    });
    nb::class_<DraftChances> chances(module, "DraftChances");
    chances.attr("NUM_CLASSES") = DraftChances::CLASSES;
    chances
        .def("__init__", [](DraftChances *self, i64 num_places,
                            Address chances) { new (self) DraftChances(num_places, reinterpret_cast<double *>(chances)); })
        .def_static("class_of", &DraftChances::class_of)
        .def("learn", &DraftChances::learn)
        .def("tell", &DraftChances::tell);
    nb::class_<LayerDrafts>(module, "LayerDrafts")
        .def("__init__",
             [](LayerDrafts *self, const nb::dict &slots, i64 width, i64 table_width, i64 block_size, i64 hidden_size,
                const nb::dict &standing, const nb::dict &single, i64 max_logit_rows, i64 k, Address chances,
                Address least_chance) {
                 const auto of = [&](const char *name) { return nb::cast<Address>(slots[name]); };
                 const LayerSlots of_slots{ints(of("token_ids")),
                                           width,
                                           ints(of("num_tokens")),
                                           ints(of("max_total_tokens")),
                                           ints(of("num_prompt_tokens")),
                                           ints(of("block_tables")),
                                           table_width,
                                           block_size,
                                           truths(of("marks")),
                                           floats(of("hidden")),
                                           hidden_size,
                                           ints(of("hidden_positions")),
                                           ints(of("first_entries")),
                                           ints(of("entry_ends")),
                                           truths(of("is_drafted_by_layers")),
                                           truths(of("is_ended")),
                                           ints(of("draft_certainties")),
                                           k};
                 new (self) LayerDrafts(of_slots, layer_inputs(standing, max_logit_rows), layer_inputs(single, max_logit_rows),
                                        reinterpret_cast<double *>(chances), reinterpret_cast<double *>(least_chance));
             })
        .def(
            "set_tapes",
            [](LayerDrafts &self, Tape &store, const std::vector<nb::tuple> &modules) {
                std::vector<LayerTapes> tapes;
                for (const nb::tuple &each : modules)
                    tapes.push_back({&nb::cast<Tape &>(each[0]), &nb::cast<Tape &>(each[1]), floats(nb::cast<Address>(each[2])),
                                     floats(nb::cast<Address>(each[3])), nb::cast<i64>(each[4])});
                self.set_tapes(&store, std::move(tapes));
            })
        .def("clear_tapes", [](LayerDrafts &self) { self.set_tapes(nullptr, {}); })
        .def("begin",
             [](LayerDrafts &self, Address slots, Address starts, Address counts, Address num_sampled, Address num_drafts,
                i64 count) { self.begin(layer_step(slots, starts, counts, num_sampled, num_drafts, count)); })
        .def("empty",
             [](LayerDrafts &self, Address slots, Address blocks, i64 count) { self.empty(ints(slots), ints(blocks), count); })
        .def("choose",
             [](const LayerDrafts &self, Address slots, Address starts, Address counts, Address num_sampled, Address num_drafts,
                i64 count, Address is_wanted, Address is_drafting) {
                 self.choose(layer_step(slots, starts, counts, num_sampled, num_drafts, count), truths(is_wanted),
                             truths(is_drafting));
             })
        .def("propose", [](const LayerDrafts &self, Address slots, i64 count, Address limits, i64 k, Address counts,
                           Address classes) { self.propose(ints(slots), count, ints(limits), k, ints(counts), ints(classes)); })
        .def("enter",
             [](LayerDrafts &self, Address slots, i64 count, Address begins, Address ends, Address first_entries) {
                 self.enter(ints(slots), count, ints(begins), ints(ends), ints(first_entries));
             })
        .def("mark", [](LayerDrafts &self, Address slots, i64 count, Address begins,
                        Address ends) { self.mark(ints(slots), count, ints(begins), ints(ends)); })
        .def(
            "draft",
            [](LayerDrafts &self, Address slots, Address starts, Address counts, Address num_sampled, Address num_drafts,
               i64 count) { self.draft(layer_step(slots, starts, counts, num_sampled, num_drafts, count)); },
            Release())
        .def("keep",
             [](LayerDrafts &self, Address slots, Address starts, Address counts, Address num_sampled, Address num_drafts,
                i64 count, Address num_tokens, Address is_drafting, Address kept_ends, Address hidden) {
                 const auto left = [&]() -> const LayerRows & {
                     nb::gil_scoped_release released;
                     return self.keep(layer_step(slots, starts, counts, num_sampled, num_drafts, count), ints(num_tokens),
                                      truths(is_drafting), reinterpret_cast<const i64 *>(kept_ends), floats(hidden));
                 };
                 const LayerRows &rows = left();
                 return nb::make_tuple(rows.slots, rows.starts, rows.counts, rows.first_keys);
             });
}

// RankGroupBroken(text, rank, epoch) in Python.
void bind_rank_group_broken(nb::module_ &module) {
    static PyObject *type = PyErr_NewException("ops._cpu.RankGroupBroken", PyExc_RuntimeError, nullptr);
    module.attr("RankGroupBroken") = nb::borrow(type);
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const RankGroupBroken &error) {
            PyErr_SetObject(type, nb::make_tuple(error.what(), error.rank, error.epoch).ptr());
        }
    });
}

void bind_comm(nb::module_ &module) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    bind_rank_group_broken(module);
    nb::dict layout;
    layout["line"] = COMM_LINE;
    layout["ranks"] = MAX_RANKS;
    layout["line_bytes"] = sizeof(CommLine);
    layout["bell"] = offsetof(CommLine, bell);
    layout["window"] = COMM_WINDOW;
    layout["groups"] = COMM_GROUPS;
    layout["windows_at"] = COMM_WINDOWS_AT;
    module.attr("COMM_LAYOUT") = layout;
    module.attr("COMM_KINDS") = nb::cast(std::vector<std::string>(std::begin(COMM_NAMES), std::end(COMM_NAMES)));
    nb::class_<Comm>(module, "Comm")
        .def(nb::init<Address, int, int, int, i64, i64, int>())
        .def("join", &Comm::join)
        .def("begin_step", &Comm::begin_step)
        .def("check_epoch", &Comm::check_epoch)
        .def_prop_ro("address", [](const Comm &comm) { return reinterpret_cast<Address>(&comm); })
        .def_prop_ro("epoch", &Comm::epoch)
        .def_prop_ro("waited_ns", &Comm::waited_ns)
        .def_prop_ro("num_calls", &Comm::num_calls)
        .def(
            "barrier", [](Comm &comm) { comm.meet(CommKind::BARRIER, 0); }, Release())
        .def(
            "all_gather", [](Comm &comm, Address y, Address x, i64 size) { comm.all_gather(bytes(y), bytes(x), size); },
            Release())
        .def(
            "all_reduce", [](Comm &comm, Address y, Address x, i64 count) { comm.all_reduce(floats(y), floats(x), count); },
            Release())
        .def(
            "reduce_scatter",
            [](Comm &comm, Address y, Address x, i64 count) { comm.reduce_scatter(floats(y), floats(x), count); }, Release())
        .def(
            "broadcast", [](Comm &comm, Address values, i64 size, int root) { comm.broadcast(bytes(values), size, root); },
            Release())
        .def(
            "all_to_all",
            [](Comm &comm, Address y, i64 most, Address received, Address x, Address sent) {
                comm.all_to_all(bytes(y), most, reinterpret_cast<i64 *>(received), bytes(x),
                                reinterpret_cast<const i64 *>(sent));
            },
            Release());
}

}  // namespace
}  // namespace tokamak::cpu

NB_MODULE(_cpu, module) {
    using namespace tokamak::cpu;
    // Address of an array's contiguous values; a tenth of the time of array.ctypes.data.
    module.def("address", [](nb::handle array) {
        Py_buffer view;
        if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        const auto address = reinterpret_cast<Address>(view.buf);
        PyBuffer_Release(&view);
        return address;
    });
    module.attr("PANEL") = PANEL;
    module.attr("FOLDED_GROUPS") = nb::make_tuple(LEAST_FOLDED_GROUP, 2 * LEAST_FOLDED_GROUP, FOLDED_BLOCK);
    module.attr("KEY_PANEL") = KEY_PANEL;
    module.attr("KEY_SPLIT") = KEY_SPLIT;
    module.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
    module.attr("MAX_GROUP") = MAX_GROUP;
    module.attr("SLOT_SAMPLING_BYTES") = sizeof(SlotSampling);
    bind_ops(module);
    bind_comm(module);
    bind_engine(module);
    bind_packing(module);
    bind_sampling(module);
    bind_drafts(module);
    bind_layer_drafts(module);
    nb::class_<Tape>(module, "Tape")
        .def(nb::init<std::vector<Op>, const std::vector<i64> &>())
        .def("replay", &Tape::replay, nb::call_guard<nb::gil_scoped_release>())
        .def("replay_range", &Tape::replay_range, nb::call_guard<nb::gil_scoped_release>())
        .def("replay_timed", &Tape::replay_timed, nb::call_guard<nb::gil_scoped_release>())
        .def("replay_alone", &Tape::replay_alone, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("times_ns", &Tape::times_ns);
}
