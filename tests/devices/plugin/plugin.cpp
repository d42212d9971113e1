// The device as Paddle asks for it (`device_ext.h`): memory, copies, streams, events, graphs and collectives, without kernels.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "board.h"
#include "collectives.h"
#include "memory.h"
#include "paddle/phi/backends/device_ext.h"
#include "stream.h"

using tokasim::Communicator;
using tokasim::Counter;
using tokasim::Event;
using tokasim::Kind;
using tokasim::Memory;
using tokasim::Stream;

static thread_local int current = 0;

static Stream *stream_of(C_Stream stream) { return reinterpret_cast<Stream *>(stream); }
static Event *event_of(C_Event event) { return reinterpret_cast<Event *>(event); }
static Communicator *communicator_of(C_CCLComm comm) { return reinterpret_cast<Communicator *>(comm); }

// Waiting within a capture is an error on every device that has graphs.
static C_Status refused_in_capture(int device, const char *what) {
    if (!Stream::is_any_capturing(device)) return C_SUCCESS;
    fprintf(stderr, "tokasim: %s while a stream captures\n", what);
    return C_FAILED;
}

// ------------------------------------------------------------------------------------------------------------- devices

static C_Status succeed() { return C_SUCCESS; }
static C_Status accept_device(const C_Device) { return C_SUCCESS; }

static C_Status set_device(const C_Device device) {
    current = device->id;
    return C_SUCCESS;
}

static C_Status get_device(const C_Device device) {
    device->id = current;
    return C_SUCCESS;
}

static C_Status count_devices(size_t *count) {
    *count = tokasim::NUM_DEVICES;
    return C_SUCCESS;
}

static C_Status list_devices(size_t *devices) {
    for (int device = 0; device < tokasim::NUM_DEVICES; device++) devices[device] = device;
    return C_SUCCESS;
}

static C_Status show_memory(const C_Device device, size_t *total, size_t *free) {
    *total = Memory::limit();
    *free = *total - Memory::of(device->id).num_used();
    return C_SUCCESS;
}

static C_Status smallest_chunk(const C_Device, size_t *size) {
    *size = 256;
    return C_SUCCESS;
}

static C_Status no_padding(const C_Device, size_t *size) {
    *size = 0;
    return C_SUCCESS;
}

static C_Status is_supported(const C_Device, bool *answer) {
    *answer = true;
    return C_SUCCESS;
}

// ------------------------------------------------------------------------------------------------- streams and events

static C_Status create_stream(const C_Device device, C_Stream *stream) {
    *stream = reinterpret_cast<C_Stream>(new Stream(device->id));
    return C_SUCCESS;
}

static C_Status destroy_stream(const C_Device, C_Stream stream) {
    delete stream_of(stream);
    return C_SUCCESS;
}

static C_Status query_stream(const C_Device, C_Stream stream) { return stream_of(stream)->is_idle() ? C_SUCCESS : C_FAILED; }

static C_Status add_callback(const C_Device device, C_Stream stream, C_Callback callback, void *user_data) {
    stream_of(stream)->enqueue(Kind::ORDER, [=, copy = *device] {
        C_Device_st own = copy;
        C_Status status = C_SUCCESS;
        callback(&own, stream, user_data, &status);
    });
    return C_SUCCESS;
}

static C_Status synchronize_stream(const C_Device device, C_Stream stream) {
    if (refused_in_capture(device->id, "waiting for a stream") != C_SUCCESS) return C_FAILED;
    tokasim::count(device->id, Counter::stream_waits);
    stream_of(stream)->wait();
    return C_SUCCESS;
}

static C_Status synchronize_device(const C_Device device) {
    if (refused_in_capture(device->id, "waiting for the device") != C_SUCCESS) return C_FAILED;
    tokasim::count(device->id, Counter::device_waits);
    Stream::wait_for_all(device->id);
    return C_SUCCESS;
}

static C_Status create_event(const C_Device, C_Event *event) {
    *event = reinterpret_cast<C_Event>(new Event());
    return C_SUCCESS;
}

static C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
    event_of(event)->record(*stream_of(stream));
    return C_SUCCESS;
}

static C_Status destroy_event(const C_Device, C_Event event) {
    delete event_of(event);
    return C_SUCCESS;
}

static C_Status query_event(const C_Device, C_Event event) { return event_of(event)->is_complete() ? C_SUCCESS : C_FAILED; }

static C_Status synchronize_event(const C_Device device, C_Event event) {
    tokasim::count(device->id, Counter::event_waits);
    if (event_of(event)->has_work_behind()) tokasim::count(device->id, Counter::waits_ahead);
    event_of(event)->wait();
    return C_SUCCESS;
}

static C_Status wait_in_stream(const C_Device, C_Stream stream, C_Event event) {
    event_of(event)->wait(*stream_of(stream));
    return C_SUCCESS;
}

// -------------------------------------------------------------------------------------------------------------- memory

static C_Status allocate(const C_Device device, void **address, size_t size) {
    *address = Memory::of(device->id).allocate(size, Stream::is_any_capturing(device->id));
    return C_SUCCESS;  // no address: that is how Paddle is told that there is no memory
}

static C_Status deallocate(const C_Device device, void *address, size_t) {
    Stream::wait_for_all(device->id);
    Memory::of(device->id).free(address);
    return C_SUCCESS;
}

static C_Status allocate_on_host(const C_Device, void **address, size_t size) {
    return posix_memalign(address, 256, size ? size : 1) ? C_FAILED : C_SUCCESS;
}

static C_Status deallocate_on_host(const C_Device, void *address, size_t) {
    free(address);
    return C_SUCCESS;
}

// A copy for which the host waits comes after all that it has enqueued.
static C_Status copy_now(int device, void *target, const void *source, size_t size) {
    if (refused_in_capture(device, "a copy that waits") != C_SUCCESS) return C_FAILED;
    tokasim::count(device, Counter::blocking_copies);
    Stream::wait_for_all(device);
    memmove(Memory::own(target), Memory::own(source), size);
    return C_SUCCESS;
}

static C_Status enqueue_copy(C_Stream stream, void *target, const void *source, size_t size) {
    stream_of(stream)->enqueue(Kind::COPY,
                               [to = Memory::own(target), from = Memory::own(source), size] { memmove(to, from, size); });
    return C_SUCCESS;
}

static void count_copy(int device, Counter copies, Counter bytes, size_t size) {
    tokasim::count(device, copies);
    tokasim::count(device, bytes, size);
}

static C_Status set_memory(const C_Device device, void *address, unsigned char value, size_t size) {
    Stream::wait_for_all(device->id);
    memset(Memory::own(address), value, size);
    return C_SUCCESS;
}

static C_Status copy_to_device(const C_Device device, void *target, const void *source, size_t size) {
    count_copy(device->id, Counter::copies_to_device, Counter::bytes_to_device, size);
    return copy_now(device->id, target, source, size);
}

static C_Status copy_to_host(const C_Device device, void *target, const void *source, size_t size) {
    count_copy(device->id, Counter::copies_to_host, Counter::bytes_to_host, size);
    return copy_now(device->id, target, source, size);
}

static C_Status copy_within(const C_Device device, void *target, const void *source, size_t size) {
    tokasim::count(device->id, Counter::copies_within);
    return copy_now(device->id, target, source, size);
}

static C_Status enqueue_copy_to_device(const C_Device device, C_Stream stream, void *target, const void *source, size_t size) {
    count_copy(device->id, Counter::copies_to_device, Counter::bytes_to_device, size);
    return enqueue_copy(stream, target, source, size);
}

static C_Status enqueue_copy_to_host(const C_Device device, C_Stream stream, void *target, const void *source, size_t size) {
    count_copy(device->id, Counter::copies_to_host, Counter::bytes_to_host, size);
    return enqueue_copy(stream, target, source, size);
}

static C_Status enqueue_copy_within(const C_Device device, C_Stream stream, void *target, const void *source, size_t size) {
    tokasim::count(device->id, Counter::copies_within);
    return enqueue_copy(stream, target, source, size);
}

// -------------------------------------------------------------------------------------------------------- collectives

static size_t size_of(C_DataType type) {
    switch (type) {
        case BOOL:
        case UINT8:
        case INT8: return 1;
        case INT16:
        case UINT16:
        case FLOAT16:
        case BFLOAT16: return 2;
        case INT64:
        case UINT64:
        case FLOAT64: return 8;
        default: return 4;
    }
}

static constexpr size_t PATH = 256;

static C_Status name_communicator(C_CCLComm, char *name) {
    strcpy(name, "tokasim");
    return C_SUCCESS;
}

static C_Status size_of_id(size_t *size) {
    *size = PATH;
    return C_SUCCESS;
}

static C_Status make_id(C_CCLRootId *id) {
    static int number = 0;
    const char *board = getenv("TOKASIM_BOARD");
    id->sz = PATH;
    snprintf(static_cast<char *>(id->data), PATH, "%s.%d.%d", board ? board : "/tmp/tokasim", getpid(), number++);
    return C_SUCCESS;
}

static C_Status join(size_t count, C_CCLRootId *id, size_t rank, C_CCLComm *comm) {
    *comm = reinterpret_cast<C_CCLComm>(new Communicator(static_cast<char *>(id->data), rank, count));
    return C_SUCCESS;
}

static C_Status leave(C_CCLComm comm) {
    delete communicator_of(comm);
    return C_SUCCESS;
}

static C_Status all_gather(void *sent, void *received, size_t num, C_DataType type, C_CCLComm comm, C_Stream stream) {
    tokasim::count(stream_of(stream)->device, Counter::collectives);
    stream_of(stream)->enqueue(Kind::COPY, [=, from = Memory::own(sent), to = Memory::own(received)] {
        communicator_of(comm)->all_gather(from, to, num * size_of(type));
    });
    return C_SUCCESS;
}

static C_Status broadcast(void *data, size_t num, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
    tokasim::count(stream_of(stream)->device, Counter::collectives);
    stream_of(stream)->enqueue(
        Kind::COPY, [=, own = Memory::own(data)] { communicator_of(comm)->broadcast(own, num * size_of(type), root); });
    return C_SUCCESS;
}

// -------------------------------------------------------------------------------------------------------------- graphs

static C_Status begin_capture(const C_Device, C_Stream stream, C_StreamCaptureMode) {
    stream_of(stream)->begin_capture();
    return C_SUCCESS;
}

static C_Status end_capture(const C_Device, C_Stream stream, C_CudaGraph *graph) {
    *graph = reinterpret_cast<C_CudaGraph>(stream_of(stream)->end_capture().release());
    return C_SUCCESS;
}

static tokasim::Captured *captured_of(const void *graph) { return static_cast<tokasim::Captured *>(const_cast<void *>(graph)); }

using Instance = std::shared_ptr<const tokasim::Captured>;  // streams may still be at it when it is destroyed

static C_Status launch_graph(const C_Device, C_GraphExec exec, C_Stream stream) {
    stream_of(stream)->launch(*reinterpret_cast<Instance *>(exec));
    return C_SUCCESS;
}

static C_Status destroy_graph(C_CudaGraph graph) {
    delete captured_of(graph);
    return C_SUCCESS;
}

static C_Status destroy_exec(C_GraphExec exec) {
    delete reinterpret_cast<Instance *>(exec);
    return C_SUCCESS;
}

static C_Status instantiate(C_GraphExec *exec, C_CudaGraph *graph, void **, char *, size_t) {
    *exec = reinterpret_cast<C_GraphExec>(new Instance(std::make_shared<tokasim::Captured>(*captured_of(*graph))));
    return C_SUCCESS;
}

// Paddle launches nothing of a graph without nodes, and looks at none of them.
static C_Status list_nodes(C_CudaGraph graph, C_CudaGraphNode *nodes, size_t *count) {
    *count = captured_of(graph)->empty() ? 0 : 1;
    if (nodes && *count) *nodes = reinterpret_cast<C_CudaGraphNode>(graph);
    return C_SUCCESS;
}

static C_Status show_capture(const C_Device, C_Stream stream, C_StreamCaptureStatus *status, unsigned long long *id,
                             C_CudaGraph *, C_CudaGraphNode *, void **, size_t *) {
    const bool is_capturing = stream && stream_of(stream)->is_capturing();
    *status = is_capturing ? C_StreamCaptureStatusActive : C_StreamCaptureStatusNone;
    if (id) *id = 1;
    return C_SUCCESS;
}

static C_Status set_no_parameters(C_CudaGraph, C_GraphHookManager *hooks) {
    *hooks = {0, nullptr, nullptr};
    return C_SUCCESS;
}

static C_Status print_nothing(C_CudaGraph, const char *, unsigned int) { return C_SUCCESS; }
static C_Status keep_mode(C_StreamCaptureMode *) { return C_SUCCESS; }

// Graphs are asked for where there are handles of a BLAS alone.
static char handle;
static C_Status make_blas(const C_Device, C_BLASHandle *found, C_Stream) {
    *found = reinterpret_cast<C_BLASHandle>(&handle);
    return C_SUCCESS;
}
static C_Status make_blaslt(const C_Device, C_BLASLtHandle *found) {
    *found = reinterpret_cast<C_BLASLtHandle>(&handle);
    return C_SUCCESS;
}
static C_Status set_math(const C_Device, C_BLASHandle, int) { return C_SUCCESS; }
static C_Status keep_blas(const C_Device, C_BLASHandle) { return C_SUCCESS; }
static C_Status keep_blaslt(const C_Device, C_BLASLtHandle) { return C_SUCCESS; }

// -------------------------------------------------------------------------------------------------------------- plugin

namespace tokasim {
void forget_kernels();  // kernels.cpp
}

extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams *params) {
    PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
    static std::vector<std::string> passes;
    static char type[] = "tokasim", sub_type[] = "1";
    params->device_type = type;
    params->sub_device_type = sub_type;
    params->pir_default_passes = &passes;
    C_DeviceInterface &it = *params->interface;
    it = {};
    it.size = sizeof it;
    it.initialize = it.finalize = succeed;
    it.init_device = it.deinit_device = accept_device;
    it.set_device = set_device;
    it.get_device = get_device;
    it.get_device_count = count_devices;
    it.get_device_list = list_devices;
    it.device_memory_stats = show_memory;
    it.device_min_chunk_size = smallest_chunk;
    it.device_extra_padding_size = no_padding;
    it.is_float16_supported = it.is_bfloat16_supported = is_supported;

    it.create_stream = create_stream;
    it.destroy_stream = destroy_stream;
    it.query_stream = query_stream;
    it.stream_add_callback = add_callback;
    it.synchronize_stream = synchronize_stream;
    it.synchronize_device = synchronize_device;
    it.create_event = create_event;
    it.record_event = record_event;
    it.destroy_event = destroy_event;
    it.query_event = query_event;
    it.synchronize_event = synchronize_event;
    it.stream_wait_event = wait_in_stream;

    it.device_memory_allocate = allocate;
    it.device_memory_deallocate = deallocate;
    it.device_memory_set = set_memory;
    it.host_memory_allocate = it.unified_memory_allocate = allocate_on_host;
    it.host_memory_deallocate = it.unified_memory_deallocate = deallocate_on_host;
    it.memory_copy_h2d = copy_to_device;
    it.memory_copy_d2h = copy_to_host;
    it.memory_copy_d2d = copy_within;
    it.async_memory_copy_h2d = enqueue_copy_to_device;
    it.async_memory_copy_d2h = enqueue_copy_to_host;
    it.async_memory_copy_d2d = enqueue_copy_within;

    it.xccl_get_comm_name = name_communicator;
    it.xccl_get_unique_id_size = size_of_id;
    it.xccl_get_unique_id = make_id;
    it.xccl_comm_init_rank = join;
    it.xccl_destroy_comm = leave;
    it.xccl_all_gather = all_gather;
    it.xccl_broadcast = broadcast;
    it.xccl_group_start = it.xccl_group_end = succeed;

    it.cuda_stream_begin_capture = begin_capture;
    it.cuda_stream_end_captrue = end_capture;
    it.cuda_graph_launch = launch_graph;
    it.cuda_graph_destroy = destroy_graph;
    it.cuda_graph_exec_destroy = destroy_exec;
    it.cuda_graph_instantiate = instantiate;
    it.cuda_graph_get_nodes = list_nodes;
    it.cuda_stream_capture_info = show_capture;
    it.get_parameter_setter_for_exec_graph = set_no_parameters;
    it.cuda_graph_debug_dot_print = print_nothing;
    it.cuda_thread_exchange_stream_capthure_mode = keep_mode;
    it.init_blas_handle = make_blas;
    it.init_blaslt_handle = make_blaslt;
    it.blas_set_math_mode = set_math;
    it.destroy_blas_handle = keep_blas;
    it.destroy_blaslt_handle = keep_blaslt;
    tokasim::forget_kernels();
}
