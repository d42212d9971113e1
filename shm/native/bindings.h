// Binding functions, one for each part of the module.
#pragma once

#include <nanobind/nanobind.h>

namespace tokamak {

void bind_layout(nanobind::module_ &module);
void bind_words(nanobind::module_ &module);
void bind_mailbox(nanobind::module_ &module);
void bind_broadcast(nanobind::module_ &module);
void bind_slab(nanobind::module_ &module);
void bind_counters(nanobind::module_ &module);
void bind_trace(nanobind::module_ &module);
void bind_file_guard(nanobind::module_ &module);

}  // namespace tokamak
