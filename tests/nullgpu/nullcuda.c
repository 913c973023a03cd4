// A CUDA runtime, cuBLAS and NCCL that compute nothing and record every call. Preloaded before torch's own libraries, so
// that the CUDA build of torch runs on a machine without a GPU. `setup.sh` builds it, `trace.py` reads its records.
//
// It claims to be NVIDIA H200s. Device memory is address space that is never touched, and reads as zeros. Errors that
// CUDA raises for a wrong use of streams and captures are raised here too.

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define OK cudaSuccess

// ---------------------------------------------------------------------------------------------------------- records

// In the order of KINDS in trace.py.
enum { KERNEL = 1, MEMCPY, MEMSET, EVENT, WAIT, SYNC, GEMM, NCCL, MALLOC, FREE, GRAPH, MARK, MODULE };

typedef struct {
    int kind, thread;
    const char *name;
    uint64_t a, b;
    void *stream;
    uint64_t capture;
    double seconds;
} Record;

static const long CAPACITY = 8000000;
static Record *records;
static atomic_long recorded;
static atomic_int recording;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static uint64_t capture_of(void *stream);

static void record(int kind, const char *name, uint64_t a, uint64_t b, void *stream) {
    if (!recording) return;
    long index = atomic_fetch_add(&recorded, 1);
    if (index >= CAPACITY) return;
    int thread = (int)syscall(SYS_gettid);
    records[index] = (Record){kind, thread, name, a, b, stream, capture_of(stream), now()};
}

EXPORT void nullcuda_start(void) {
    // pages that are never written cost nothing
    if (!records) records = calloc(CAPACITY, sizeof(Record));
    recorded = 0;
    recording = 1;
}

EXPORT void nullcuda_stop(void) { recording = 0; }

// Write all records, one per line; return their number, also of those for which there was no room.
EXPORT long nullcuda_dump(const char *path) {
    FILE *file = fopen(path, "w");
    long count = recorded < CAPACITY ? recorded : CAPACITY;
    for (long i = 0; i < count; i++) {
        Record *r = &records[i];
        fprintf(file, "%d\t%s\t%lu\t%lu\t%p\t%d\t%.9f\t%lu\n", r->kind, r->name, r->a, r->b, r->stream, r->thread,
                r->seconds, r->capture);
    }
    fclose(file);
    return recorded;
}

// Return a copy of a name that lives for ever, the same for equal names.
static const char *intern(const char *name) {
    enum { SLOTS = 65536 };
    static const char *known[SLOTS];
    uint64_t hash = 1469598103934665603ull;
    for (const char *c = name; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ull;
    pthread_mutex_lock(&mutex);
    uint64_t at = hash % SLOTS;
    while (known[at] && strcmp(known[at], name)) at = (at + 1) % SLOTS;
    if (!known[at]) known[at] = strdup(name);
    const char *found = known[at];
    pthread_mutex_unlock(&mutex);
    return found;
}

// Record a point in the program, such as the begin of a step.
EXPORT void nullcuda_mark(const char *name, uint64_t a, uint64_t b) { record(MARK, intern(name), a, b, 0); }

// Record a kernel or a module that the driver launches or loads.
EXPORT void nullcuda_record(int module, const char *name, uint64_t a, uint64_t b, void *stream) {
    record(module ? MODULE : KERNEL, intern(name), a, b, stream);
}

// ------------------------------------------------------------------------------------- streams, events and captures

typedef struct {
    int device, priority;
    // Number of the capture that the stream is part of, 0 outside.
    uint64_t capture;
    // Operations since the capture began.
    uint64_t nodes;
} Stream;

typedef struct {
    double seconds;
    void *stream;
    uint64_t capture;
} Event;

static __thread int device;
static atomic_ulong captures;
// The capture that this thread has begun, and the mode, which decides what else the thread may call meanwhile.
static __thread uint64_t thread_capture;
static __thread Stream *origin;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
// Streams that have joined a capture leave it when it ends.
static Stream *streams[4096];
static int stream_count;

// The legacy and the per-thread stream are small numbers.
static Stream *stream_at(void *stream) { return (uintptr_t)stream > 2 ? stream : 0; }

static uint64_t capture_of(void *stream) {
    Stream *s = stream_at(stream);
    return s ? s->capture : 0;
}

// True where CUDA refuses calls that could depend on uncaptured work.
static int unsafe(void) { return thread_capture && thread_mode != cudaStreamCaptureModeRelaxed; }

static void count_node(void *stream) {
    Stream *s = stream_at(stream);
    if (s && s->capture && origin && origin->capture == s->capture) origin->nodes++;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    Stream *stream = calloc(1, sizeof(Stream));
    stream->device = device;
    stream->priority = priority;
    pthread_mutex_lock(&mutex);
    if (stream_count < 4096) streams[stream_count++] = stream;
    pthread_mutex_unlock(&mutex);
    *out = (cudaStream_t)stream;
    record(EVENT, "streamCreate", (uint64_t)(priority < 0 ? -priority : priority), 0, stream);
    return OK;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    return cudaStreamCreateWithPriority(out, flags, 0);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) { return OK; }

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_at(stream) ? stream_at(stream)->priority : 0;
    return OK;
}

static cudaError_t synchronize(const char *name, void *stream) {
    record(SYNC, name, unsafe(), 0, stream);
    return unsafe() || capture_of(stream) ? cudaErrorStreamCaptureUnsupported : OK;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return OK; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return synchronize("streamSynchronize", stream); }
EXPORT cudaError_t cudaDeviceSynchronize(void) { return synchronize("deviceSynchronize", 0); }

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    *out = (cudaEvent_t)calloc(1, sizeof(Event));
    return OK;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return OK;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    *(Event *)event = (Event){now(), stream, capture_of(stream)};
    record(EVENT, "eventRecord", (uint64_t)event, 0, stream);
    return OK;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    return ((Event *)event)->capture && unsafe() ? cudaErrorCapturedEvent : OK;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    record(SYNC, "eventSynchronize", unsafe(), (uint64_t)event, ((Event *)event)->stream);
    return unsafe() ? cudaErrorStreamCaptureUnsupported : OK;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
    *milliseconds = 1e3 * (((Event *)last)->seconds - ((Event *)first)->seconds);
    return OK;
}

// A stream that waits for a captured event joins that capture.
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    Event *awaited = (Event *)event;
    Stream *joining = stream_at(stream);
    if (awaited->capture && capture_of(awaited->stream) == awaited->capture) {
        if (!joining) return cudaErrorStreamCaptureImplicit;
        joining->capture = awaited->capture;
    } else if (joining && joining->capture && joining->capture != awaited->capture && awaited->stream) {
        return cudaErrorStreamCaptureIsolation;
    }
    record(WAIT, "streamWaitEvent", (uint64_t)event, (uint64_t)awaited->stream, stream);
    return OK;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (!stream_at(stream)) return cudaErrorStreamCaptureUnsupported;
    origin = stream_at(stream);
    origin->capture = thread_capture = atomic_fetch_add(&captures, 1) + 1;
    origin->nodes = 0;
    thread_mode = mode;
    record(GRAPH, "beginCapture", mode, 0, stream);
    return OK;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    Stream *ending = stream_at(stream);
    record(GRAPH, "endCapture", ending->nodes, 0, stream);
    uint64_t *nodes = malloc(sizeof(*nodes));
    *nodes = ending->nodes;
    *graph = (cudaGraph_t)nodes;
    uint64_t capture = ending->capture;
    for (int i = 0; i < stream_count; i++) {
        if (streams[i]->capture == capture) streams[i]->capture = 0;
    }
    thread_capture = 0;
    origin = 0;
    thread_mode = cudaStreamCaptureModeGlobal;
    return OK;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return OK;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                            size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = capture_of(stream);
    if (graph) *graph = 0;
    if (dependencies) *dependencies = 0;
    if (edges) *edges = 0;
    if (count) *count = 0;
    return OK;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    uint64_t *nodes = malloc(sizeof(*nodes));
    *nodes = *(uint64_t *)graph;
    *out = (cudaGraphExec_t)nodes;
    return OK;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(out, graph, flags);
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = *(uint64_t *)graph;
    return OK;
}

EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *dependencies,
                                                cudaGraphEdgeData *edges, size_t *count) {
    *count = 0;
    return OK;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    record(GRAPH, "graphLaunch", *(uint64_t *)graph, 0, stream);
    return OK;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return OK;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    free(graph);
    return OK;
}

EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) { return OK; }

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return OK;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data,
                                         unsigned flags) {
    callback(stream, OK, data);
    return OK;
}

// ---------------------------------------------------------------------------------------------------------- kernels

// Names of the kernels of torch's own libraries, by the address of their host stub.
enum { STUBS = 131072 };
static struct {
    const void *stub;
    const char *name;
} stubs[STUBS];

static uint64_t slot_of(const void *stub) {
    uint64_t at = (((uint64_t)stub >> 4) * 0x9E3779B97F4A7C15ull >> 47) % STUBS;
    while (stubs[at].stub && stubs[at].stub != stub) at = (at + 1) % STUBS;
    return at;
}

EXPORT void __cudaRegisterFunction(void **module, const char *stub, char *in_device, const char *name, int limit,
                                   void *thread, void *block, void *block_size, void *grid, int *warp) {
    pthread_mutex_lock(&mutex);
    uint64_t at = slot_of(stub);
    stubs[at].stub = stub;
    stubs[at].name = name;
    pthread_mutex_unlock(&mutex);
}

EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *module;
    return &module;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **module) {}
EXPORT void __cudaUnregisterFatBinary(void **module) {}
EXPORT void __cudaRegisterVar(void **module, char *host, char *in_device, const char *name, int external, size_t size,
                              int constant, int global) {}
EXPORT char __cudaInitModule(void **module) { return 1; }

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} pushed;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(cudaStream_t *)stream = pushed.stream;
    return OK;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
    *kernel = (cudaKernel_t)stub;
    return OK;
}

static cudaError_t launch(const void *stub, dim3 grid, dim3 block, cudaStream_t stream) {
    Stream *s = stream_at(stream);
    if (s && s->device != device) return cudaErrorInvalidResourceHandle;
    const char *name = stubs[slot_of(stub)].name;
    record(KERNEL, name ? name : "unknown", (uint64_t)grid.x * grid.y * grid.z, (uint64_t)block.x * block.y * block.z,
           stream);
    count_node(stream);
    return OK;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    return launch((void *)kernel, grid, block, stream);
}

EXPORT cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    return launch(stub, grid, block, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    return launch(stub, grid, block, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub, void **arguments) {
    return launch(stub, config->gridDim, config->blockDim, config->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *stub) {
    memset(attributes, 0, sizeof(*attributes));
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 64;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 232448;
    return OK;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *stub, enum cudaFuncAttribute attribute, int value) { return OK; }

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *stub, int block,
                                                                          size_t shared, unsigned flags) {
    *count = 2;
    return OK;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *stub, int block,
                                                                 size_t shared) {
    *count = 2;
    return OK;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = (void *)symbol;
    return OK;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t count, size_t offset,
                                      enum cudaMemcpyKind kind) {
    return OK;
}

// ---------------------------------------------------------------------------------------------------------- devices

static const size_t TOTAL_MEMORY = 150754820096ull;

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    const char *given = getenv("NULLCUDA_DEVICES");
    *count = given ? atoi(given) : 1;
    return OK;
}

EXPORT cudaError_t cudaGetDevice(int *current) {
    *current = device;
    return OK;
}

EXPORT cudaError_t cudaSetDevice(int chosen) {
    int count;
    cudaGetDeviceCount(&count);
    if (chosen < 0 || chosen >= count) return cudaErrorInvalidDevice;
    device = chosen;
    return OK;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return OK;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return OK;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int index) {
    *properties = (struct cudaDeviceProp){
        .name = "NVIDIA H200",
        .totalGlobalMem = TOTAL_MEMORY,
        .sharedMemPerBlock = 49152,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .major = 9,
        .minor = 0,
        .multiProcessorCount = 132,
        .l2CacheSize = 62914560,
        .maxThreadsPerMultiProcessor = 2048,
        .sharedMemPerMultiprocessor = 233472,
        .regsPerMultiprocessor = 65536,
        .sharedMemPerBlockOptin = 232448,
        .totalConstMem = 65536,
        .memoryBusWidth = 6144,
        .maxBlocksPerMultiProcessor = 32,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .managedMemory = 1,
        .concurrentKernels = 1,
        .textureAlignment = 512,
        .pciBusID = index + 1,
    };
    return OK;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int index) {
    static const int values[][2] = {
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxGridDimX, 2147483647},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMultiProcessorCount, 132},
        {cudaDevAttrL2CacheSize, 62914560},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    };
    *value = 0;
    for (size_t i = 0; i < sizeof(values) / sizeof(*values); i++) {
        if (values[i][0] == (int)attribute) *value = values[i][1];
    }
    return OK;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int index) {
    snprintf(id, length, "0000:%02x:00.0", index + 1);
    return OK;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return OK;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int first, int second) {
    *can = 1;
    return OK;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return OK; }
EXPORT cudaError_t cudaProfilerStart(void) { return OK; }
EXPORT cudaError_t cudaProfilerStop(void) { return OK; }
EXPORT cudaError_t cudaGetLastError(void) { return OK; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return OK; }

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    switch ((int)error) {
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    default: return "cudaError";
    }
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    switch ((int)error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorNotSupported: return "operation not supported";
    default: return "error of the null GPU";
    }
}

// ----------------------------------------------------------------------------------------------------------- memory

// RESERVED addresses are those of device memory that is allocated apart from them.
enum { PINNED = 1, DEVICE, RESERVED };

typedef struct {
    char *start;
    size_t bytes;
    int kind, device;
} Block;

static Block blocks[200000];
static int block_count;
static size_t used[64];
// Device memory holds no bytes, with one exception: the few bytes of flags and counters that ranks exchange, which the
// host writes and reads as a whole. A single number is not kept: its memory may soon belong to a tensor of that size.
enum { NOTES = 4096, NOTE_BYTES = 2048, MIN_NOTED_BYTES = 24, MAX_NOTED_BYTES = 128 };
typedef struct {
    const void *address;
    size_t bytes;
    char content[NOTE_BYTES];
} Note;
static Note notes[NOTES];
static const size_t ZEROED_ON_HOST = 1 << 20;

static Note *note_at(const void *address) { return &notes[((uintptr_t)address >> 4) * 0x9E3779B1u % NOTES]; }

static void move(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    pthread_mutex_lock(&mutex);
    if (kind == cudaMemcpyHostToDevice) {
        Note *note = note_at(target);
        note->address = target;
        note->bytes = bytes >= MIN_NOTED_BYTES && bytes <= MAX_NOTED_BYTES ? bytes : 0;
        memcpy(note->content, source, note->bytes);
    } else if (kind == cudaMemcpyDeviceToHost) {
        Note *note = note_at(source);
        if (note->address == source && bytes && note->bytes == bytes) memcpy(target, note->content, bytes);
        else if (bytes <= ZEROED_ON_HOST) memset(target, 0, bytes);
    } else if (kind == cudaMemcpyHostToHost) memcpy(target, source, bytes);
    pthread_mutex_unlock(&mutex);
}

// All ranks have the values of this one.
static void gather_note(void *target, const void *source, size_t bytes, int ranks) {
    pthread_mutex_lock(&mutex);
    Note *from = note_at(source), *to = note_at(target);
    if (from->address == source && from->bytes == bytes && bytes && bytes * ranks <= NOTE_BYTES) {
        char content[NOTE_BYTES];
        for (int rank = 0; rank < ranks; rank++) memcpy(content + rank * bytes, from->content, bytes);
        memcpy(to->content, content, bytes * ranks);
        to->address = target;
        to->bytes = bytes * ranks;
    }
    pthread_mutex_unlock(&mutex);
}

static Block *block_at(const void *pointer) {
    for (int i = 0; i < block_count; i++) {
        if (blocks[i].start && (char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].bytes)
            return &blocks[i];
    }
    return 0;
}

static void add_block(void *start, size_t bytes, int kind) {
    pthread_mutex_lock(&mutex);
    int at = 0;
    while (at < block_count && blocks[at].start) at++;
    if (at == block_count) block_count++;
    blocks[at] = (Block){start, bytes, kind, device};
    if (kind == DEVICE) used[device] += bytes;
    pthread_mutex_unlock(&mutex);
}

static Block remove_block(void *start) {
    pthread_mutex_lock(&mutex);
    Block removed = {0}, *found = block_at(start);
    if (found && found->start == start) {
        removed = *found;
        found->start = 0;
        if (removed.kind == DEVICE) used[removed.device] -= removed.bytes;
    }
    pthread_mutex_unlock(&mutex);
    return removed;
}

// Return 0 for unknown, thus pageable, memory.
EXPORT int nullcuda_kind_of(const void *pointer) {
    pthread_mutex_lock(&mutex);
    Block *found = block_at(pointer);
    int kind = found ? found->kind : 0;
    pthread_mutex_unlock(&mutex);
    return kind;
}

static void *map(size_t bytes) {
    void *start = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? 0 : start;
}

EXPORT cudaError_t cudaMalloc(void **out, size_t bytes) {
    record(MALLOC, "cudaMalloc", bytes, unsafe(), 0);
    *out = 0;
    if (unsafe()) return cudaErrorStreamCaptureUnsupported;
    if (used[device] + bytes > TOTAL_MEMORY || !(*out = map(bytes))) return cudaErrorMemoryAllocation;
    add_block(*out, bytes, DEVICE);
    return OK;
}

EXPORT cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) { return cudaMalloc(out, bytes); }

EXPORT cudaError_t cudaFree(void *pointer) {
    if (!pointer) return OK;
    record(FREE, "cudaFree", 0, unsafe(), 0);
    Block block = remove_block(pointer);
    if (block.start) munmap(pointer, block.bytes);
    return OK;
}

EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

EXPORT cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    record(MALLOC, "cudaHostAlloc", bytes, unsafe(), 0);
    if (!(*out = map(bytes))) return cudaErrorMemoryAllocation;
    add_block(*out, bytes, PINNED);
    return OK;
}

EXPORT cudaError_t cudaFreeHost(void *pointer) {
    Block block = remove_block(pointer);
    if (block.start) munmap(pointer, block.bytes);
    return OK;
}

EXPORT cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    add_block(pointer, bytes, PINNED);
    return OK;
}

EXPORT cudaError_t cudaHostUnregister(void *pointer) {
    remove_block(pointer);
    return OK;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = TOTAL_MEMORY;
    *available = TOTAL_MEMORY - used[device];
    return OK;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof(*attributes));
    pthread_mutex_lock(&mutex);
    Block *block = block_at(pointer);
    attributes->type = !block ? cudaMemoryTypeUnregistered : block->kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = block ? block->device : 0;
    attributes->hostPointer = block && block->kind == PINNED ? (void *)pointer : 0;
    pthread_mutex_unlock(&mutex);
    attributes->devicePointer = (void *)pointer;
    return OK;
}

static cudaError_t copy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind, void *stream,
                        int async) {
    static const char *names[5][2] = {{"H2H sync", "H2H async"},
                                      {"H2D sync", "H2D async pinned"},
                                      {"D2H sync", "D2H async pinned"},
                                      {"D2D sync", "D2D async"},
                                      {"default sync", "default async"}};
    static const char *pageable[3][2] = {
        {0, 0}, {"H2D sync pageable", "H2D async pageable"}, {"D2H sync pageable", "D2H async pageable"}};
    const void *host = kind == cudaMemcpyHostToDevice ? source : kind == cudaMemcpyDeviceToHost ? target : 0;
    int is_pageable = host && nullcuda_kind_of(host) != PINNED;
    record(MEMCPY, is_pageable ? pageable[kind][async] : names[kind][async], bytes, unsafe(), stream);
    count_node(stream);
    if (!async && unsafe()) return cudaErrorStreamCaptureUnsupported;
    move(target, source, bytes, kind);
    return OK;
}

EXPORT cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    return copy(target, source, bytes, kind, 0, 0);
}

EXPORT cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    return copy(target, source, bytes, kind, stream, 1);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t bytes,
                                       cudaStream_t stream) {
    return copy(target, source, bytes, cudaMemcpyDeviceToDevice, stream, 1);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                                     size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    record(MEMCPY, "2D", width * height, 0, stream);
    count_node(stream);
    return OK;
}

EXPORT cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    record(MEMSET, "memset", bytes, 0, stream);
    count_node(stream);
    return OK;
}

EXPORT cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    return cudaMemsetAsync(pointer, value, bytes, 0);
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int index) {
    *pool = (cudaMemPool_t)1;
    return OK;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = 0;
    return OK;
}

EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    return OK;
}

EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    return OK;
}

EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return OK; }
EXPORT cudaError_t cudaIpcCloseMemHandle(void *pointer) { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *out, cudaEvent_t event) { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *pointer) { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *out, cudaIpcEventHandle_t handle) {
    return cudaErrorNotSupported;
}
EXPORT cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
    return cudaErrorNotSupported;
}

// Functions of the driver that torch asks the runtime for by name.
static int succeed(void) { return 0; }

static int primary_context_state(int index, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

static int describe_error(int error, const char **text) {
    *text = "error of the null GPU";
    return 0;
}

// Virtual memory, of expandable segments and of memory that GPUs share. A handle of memory is its number of bytes. Ranks
// exchange file descriptors, which stand for nothing, and map addresses of their own.
static int allocation_granularity(size_t *bytes, const void *properties, int option) {
    *bytes = 2 << 20;
    return 0;
}

static int create_memory(unsigned long long *memory, size_t bytes, const void *properties, unsigned long long flags) {
    record(MALLOC, "cuMemCreate", bytes, 0, 0);
    if (used[device] + bytes > TOTAL_MEMORY) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&mutex);
    used[device] += bytes;
    pthread_mutex_unlock(&mutex);
    *memory = bytes;
    return 0;
}

static int release_memory(unsigned long long memory) {
    pthread_mutex_lock(&mutex);
    used[device] -= memory;
    pthread_mutex_unlock(&mutex);
    return 0;
}

static int export_memory(void *handle, unsigned long long memory, int type, unsigned long long flags) {
    *(int *)handle = memfd_create("nullcuda", 0);
    return 0;
}

static int import_memory(unsigned long long *memory, void *handle, int type) {
    *memory = 0;
    return 0;
}

static int reserve_addresses(void **start, size_t bytes, size_t alignment, void *wanted, unsigned long long flags) {
    if (!(*start = map(bytes))) return cudaErrorMemoryAllocation;
    add_block(*start, bytes, RESERVED);
    return 0;
}

static int free_addresses(void *start, size_t bytes) {
    Block block = remove_block(start);
    if (block.start) munmap(start, block.bytes);
    return 0;
}

static int launch_by_driver(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    record(KERNEL, function ? function : "driver kernel", (uint64_t)gx * gy * gz, (uint64_t)bx * by * bz, stream);
    count_node(stream);
    return 0;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
    if (result) *result = cudaDriverEntryPointSuccess;
    if (strstr(symbol, "PrimaryCtxGetState")) *out = primary_context_state;
    else if (strstr(symbol, "ErrorString") || strstr(symbol, "ErrorName")) *out = describe_error;
    else if (!strcmp(symbol, "cuLaunchKernel")) *out = launch_by_driver;
    else if (!strcmp(symbol, "cuDeviceGetAttribute")) *out = cudaDeviceGetAttribute;
    else if (!strcmp(symbol, "cuMemGetAllocationGranularity")) *out = allocation_granularity;
    else if (!strcmp(symbol, "cuMemCreate")) *out = create_memory;
    else if (!strcmp(symbol, "cuMemExportToShareableHandle")) *out = export_memory;
    else if (!strcmp(symbol, "cuMemImportFromShareableHandle")) *out = import_memory;
    else if (!strcmp(symbol, "cuMemAddressReserve")) *out = reserve_addresses;
    else if (!strcmp(symbol, "cuMemAddressFree")) *out = free_addresses;
    else if (!strcmp(symbol, "cuMemRelease")) *out = release_memory;
    else *out = succeed;
    return OK;
}

// ----------------------------------------------------------------------------------------------------------- cuBLAS

typedef struct {
    void *stream;
} Blas;

static void product(void *stream, uint64_t operations, const char *name) {
    record(GEMM, intern(name), operations, 0, stream);
    count_node(stream);
}

EXPORT int cublasCreate_v2(Blas **out) {
    *out = calloc(1, sizeof(Blas));
    return 0;
}

EXPORT int cublasDestroy_v2(Blas *blas) {
    free(blas);
    return 0;
}

EXPORT int cublasSetStream_v2(Blas *blas, void *stream) {
    blas->stream = stream;
    return 0;
}

EXPORT int cublasSetWorkspace_v2(Blas *blas, void *workspace, size_t bytes) { return 0; }
EXPORT int cublasSetMathMode(Blas *blas, int mode) { return 0; }
EXPORT int cublasSetPointerMode_v2(Blas *blas, int mode) { return 0; }

EXPORT int cublasGetMathMode(Blas *blas, int *mode) {
    *mode = 0;
    return 0;
}

EXPORT int cublasGetPointerMode_v2(Blas *blas, int *mode) {
    *mode = 0;
    return 0;
}

EXPORT int cublasGemmEx(Blas *blas, int ta, int tb, int m, int n, int k, const void *alpha, const void *A, int a_type,
                        int lda, const void *B, int b_type, int ldb, const void *beta, void *C, int c_type, int ldc,
                        int compute, int algorithm) {
    char name[96];
    snprintf(name, sizeof(name), "gemmEx %c%c %dx%dx%d in%d out%d beta%g", ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k,
             a_type, c_type, beta ? *(float *)beta : -1);
    product(blas->stream, 2ull * m * n * k, name);
    return 0;
}

EXPORT int cublasSgemm_v2(Blas *blas, int ta, int tb, int m, int n, int k, const float *alpha, const void *A, int lda,
                          const void *B, int ldb, const float *beta, void *C, int ldc) {
    char name[64];
    snprintf(name, sizeof(name), "sgemm %dx%dx%d", m, n, k);
    product(blas->stream, 2ull * m * n * k, name);
    return 0;
}

EXPORT int cublasGemmStridedBatchedEx(Blas *blas, int ta, int tb, int m, int n, int k, const void *alpha,
                                      const void *A, int a_type, int lda, long long sa, const void *B, int b_type,
                                      int ldb, long long sb, const void *beta, void *C, int c_type, int ldc,
                                      long long sc, int count, int compute, int algorithm) {
    char name[96];
    snprintf(name, sizeof(name), "gemmStridedBatchedEx %dx %dx%dx%d in%d out%d", count, m, n, k, a_type, c_type);
    product(blas->stream, 2ull * m * n * k * count, name);
    return 0;
}

EXPORT int cublasSgemmStridedBatched(Blas *blas, int ta, int tb, int m, int n, int k, const void *alpha, const void *A,
                                     int lda, long long sa, const void *B, int ldb, long long sb, const void *beta,
                                     void *C, int ldc, long long sc, int count) {
    char name[64];
    snprintf(name, sizeof(name), "sgemmStridedBatched %dx %dx%dx%d", count, m, n, k);
    product(blas->stream, 2ull * m * n * k * count, name);
    return 0;
}

// Rarely called; their sizes are not recorded.
#define PRODUCT(name)           \
    EXPORT int name(Blas *blas) { \
        product(blas->stream, 0, #name); \
        return 0;               \
    }
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasSgemmEx)

typedef struct {
    int type;
    uint64_t rows, columns;
} MatrixLayout;

EXPORT int cublasLtMatrixLayoutCreate(MatrixLayout **out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    *out = malloc(sizeof(MatrixLayout));
    **out = (MatrixLayout){type, rows, columns};
    return 0;
}

EXPORT int cublasLtMatrixLayoutDestroy(MatrixLayout *layout) {
    free(layout);
    return 0;
}

EXPORT int cublasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, size_t bytes) { return 0; }

EXPORT int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    *out = malloc(64);
    return 0;
}

EXPORT int cublasLtMatmulDescDestroy(void *description) {
    free(description);
    return 0;
}

EXPORT int cublasLtMatmulDescSetAttribute(void *description, int attribute, const void *value, size_t bytes) {
    return 0;
}

EXPORT int cublasLtMatmulPreferenceCreate(void **out) {
    *out = malloc(64);
    return 0;
}

EXPORT int cublasLtMatmulPreferenceDestroy(void *preference) {
    free(preference);
    return 0;
}

EXPORT int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t bytes) {
    return 0;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *blas, void *description, void *A, void *B, void *C, void *D,
                                          void *preference, int requested, void *results, int *count) {
    enum { RESULT_BYTES = 96 };
    memset(results, 0, RESULT_BYTES);
    *count = 1;
    return 0;
}

EXPORT int cublasLtMatmul(void *blas, void *description, const void *alpha, const void *a, MatrixLayout *A,
                          const void *b, MatrixLayout *B, const void *beta, const void *c, void *C, void *d,
                          MatrixLayout *D, const void *algorithm, void *workspace, size_t bytes, void *stream) {
    uint64_t k = A->rows == D->rows ? A->columns : A->rows;
    char name[96];
    snprintf(name, sizeof(name), "ltMatmul %lux%lux%lu in%d out%d", D->rows, D->columns, k, A->type, D->type);
    product(stream, 2ull * D->rows * D->columns * k, name);
    return 0;
}

// ------------------------------------------------------------------------------------------------------------- NCCL

struct ncclComm {
    int size, rank, splits;
    uint64_t id;
};

static __thread int group_depth;
static __thread uint64_t group_number;

// `argument` is the reduction, the root or the peer. A group number of 0 is a call outside of ncclGroupStart and End.
static ncclResult_t communicate(const char *operation, size_t count, int type, int argument, ncclComm_t comm,
                                cudaStream_t stream) {
    char name[96];
    snprintf(name, sizeof(name), "%s comm%016lx/%d dt%d x%d g%lu", operation, comm->id, comm->size, type, argument,
             group_depth ? group_number : 0);
    record(NCCL, intern(name), count, (uint64_t)comm->rank, stream);
    count_node(stream);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupStart(void) {
    if (!group_depth++) group_number++;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
    group_depth--;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclAllReduce(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
    return communicate("allReduce", count, type, op, comm, stream);
}

EXPORT ncclResult_t ncclAllGather(const void *source, void *target, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
    static const int type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    gather_note(target, source, count * type_bytes[type], comm->size);
    return communicate("allGather", count, type, 0, comm, stream);
}

EXPORT ncclResult_t ncclReduceScatter(const void *source, void *target, size_t count, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return communicate("reduceScatter", count, type, op, comm, stream);
}

EXPORT ncclResult_t ncclBroadcast(const void *source, void *target, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    return communicate("broadcast", count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclBcast(void *target, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                              cudaStream_t stream) {
    return communicate("broadcast", count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclReduce(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               int root, ncclComm_t comm, cudaStream_t stream) {
    return communicate("reduce", count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclSend(const void *source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return communicate("send", count, type, peer, comm, stream);
}

EXPORT ncclResult_t ncclRecv(void *target, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return communicate("recv", count, type, peer, comm, stream);
}

EXPORT ncclResult_t ncclAlltoAll(const void *source, void *target, size_t count, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
    return communicate("allToAll", count, type, 0, comm, stream);
}

EXPORT ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof(*id));
    FILE *file = fopen("/dev/urandom", "r");
    int complete = fread(id, sizeof(uint64_t), 1, file) == 1;
    fclose(file);
    return complete ? ncclSuccess : ncclSystemError;
}

static ncclResult_t join(ncclComm_t *out, int size, uint64_t id, int rank) {
    *out = calloc(1, sizeof(**out));
    **out = (struct ncclComm){size, rank, 0, id};
    char name[64];
    snprintf(name, sizeof(name), "init comm%016lx/%d", id, size);
    record(NCCL, intern(name), 0, rank, 0);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return join(out, size, *(uint64_t *)&id, rank);
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank) {
    return join(out, size, *(uint64_t *)&id, rank);
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int size, int rank, int count, ncclUniqueId *ids,
                                             ncclConfig_t *config) {
    return join(out, size, *(uint64_t *)ids, rank);
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
    *out = 0;
    if (color < 0) return ncclSuccess;
    return join(out, comm->size, comm->id * 31 + color + ++comm->splits, key);
}

EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *out, int count, const int *devices) { return ncclInvalidUsage; }
EXPORT ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *out, ncclConfig_t *config,
                                   int flags) {
    return ncclInvalidUsage;
}
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    *count = comm->size;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t error) { return "error of the null GPU"; }
EXPORT const char *ncclGetLastError(ncclComm_t comm) { return "error of the null GPU"; }
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle) {
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) { return ncclSuccess; }

EXPORT ncclResult_t ncclMemAlloc(void **out, size_t bytes) {
    return cudaMalloc(out, bytes) == OK ? ncclSuccess : ncclUnhandledCudaError;
}

EXPORT ncclResult_t ncclMemFree(void *pointer) {
    cudaFree(pointer);
    return ncclSuccess;
}
