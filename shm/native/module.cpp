// shm._native: shared-memory words, rings, slabs and counter cells, used by the thin classes of the package `shm`.
#include "bindings.h"
#include "buffer.h"

namespace tokamak {

// {"Struct": {"field": (offset, num_bytes), "": (0, sizeof)}}
void bind_layout(nb::module_ &module) {
    nb::dict layout;
    for (const LayoutField &field : LAYOUT) {
        if (!layout.contains(field.struct_name)) layout[field.struct_name] = nb::dict();
        nb::borrow<nb::dict>(layout[field.struct_name])[field.field_name] = nb::make_tuple(field.offset, field.num_bytes);
    }
    module.attr("LAYOUT") = layout;
    module.attr("LAYOUT_HASH") = LAYOUT_HASH;
    module.attr("LAYOUT_VERSION") = LAYOUT_VERSION;
    module.attr("MAGIC") = MAGIC;
    module.attr("ENCODER_MAGIC") = ENCODER_MAGIC;
    module.attr("LINE") = LINE;
}

}  // namespace tokamak

NB_MODULE(_native, module) {
    using namespace tokamak;
    nb::set_leak_warnings(false);  // a stopping actor may end with rings still in use
    nb::register_exception_translator(
        [](const std::exception_ptr &pointer, void *error_type) {
            try {
                std::rethrow_exception(pointer);
            } catch (const Fault &fault) {
                PyErr_SetString(static_cast<PyObject *>(error_type), fault.what());
            }
        },
        nb::object(nb::module_::import_("shm.errors").attr("SharedMemoryError")).release().ptr());
    bind_layout(module);
    bind_words(module);
    bind_mailbox(module);
    bind_broadcast(module);
    bind_slab(module);
    bind_counters(module);
    bind_trace(module);
    bind_file_guard(module);
}
