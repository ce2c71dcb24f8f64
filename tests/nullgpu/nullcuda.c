// A CUDA runtime and cuBLAS without a GPU, for tests of torch's CUDA host code.
//
// Device memory is host memory, copies copy, kernels and matrix products do nothing. Every launch, copy, allocation and
// synchronization is counted, and a hook attributes it to the Python line that caused it. Real with it: the dispatcher,
// autocast, autograd, the caching allocator, the choice of attention kernels, device checks, DDP, FSDP2, checkpoints. Not
// real: values, cuDNN, cuSOLVER and NCCL. Time is simulated, so that tests can see what runs at the same time: see clocks.
//
// generate_stubs.py appends a stub that returns success for every other symbol that torch imports.
#define _GNU_SOURCE
#include <driver_types.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector_types.h>

// The order is that of COUNTERS in nullgpu.py.
enum { LAUNCH, GEMM, H2D_PAGEABLE, H2D_PINNED, D2H, D2D, STREAM_SYNC, EVENT_SYNC, DEVICE_SYNC, MALLOC, MALLOC_BYTES,
       H2D_BYTES, MEMSET, SIDE_COPY, SIDE_LAUNCH, EVENT_RECORD, COUNTERS };
static unsigned long long counts[32];
#define COUNT(kind) __atomic_add_fetch(&counts[kind], 1, __ATOMIC_RELAXED)
#define ADD(kind, n) __atomic_add_fetch(&counts[kind], (n), __ATOMIC_RELAXED)
#define OK return cudaSuccess

typedef void (*hook_t)(int kind, unsigned long long bytes);
static hook_t hook;
void null_counts(unsigned long long *out) { memcpy(out, counts, sizeof counts); }
void null_hook(hook_t function) { hook = function; }
static void event(int kind, unsigned long long bytes) { COUNT(kind); if (hook) hook(kind, bytes); }
static int unknown(const char *name) { if (getenv("NULL_CUDA_VERBOSE")) fprintf(stderr, "null cuda: %s\n", name); return 0; }
static int environment(const char *name, int fallback) { const char *text = getenv(name); return text ? atoi(text) : fallback; }

static __thread int current_device;

// Clocks: when a stream has done its work, when an event happens, and how long the host has waited. A kernel or a matrix
// product takes one unit of time on its stream; copies, memsets and the host's own work take none. Work starts when the
// work before it on the stream is done, and not before the host queues it. Handles of streams and events point to clocks.
typedef unsigned long long clock_type;
static clock_type host_clock, latest, default_streams[64];
static pthread_mutex_t clock_lock = PTHREAD_MUTEX_INITIALIZER;
static void *new_clock(void) { return calloc(1, sizeof(clock_type)); }
// The first values are no pointers: they mean the default stream of the current device.
static clock_type *clock_of(cudaStream_t stream) { return stream <= cudaStreamPerThread ? &default_streams[current_device] : (clock_type *)stream; }
// Move a clock on to the time of another one, and add some units.
static void advance(clock_type *clock, const clock_type *other, int units) {
    pthread_mutex_lock(&clock_lock);
    *clock = (*clock > *other ? *clock : *other) + units;
    if (*clock > latest) latest = *clock;
    pthread_mutex_unlock(&clock_lock);
}
static void computed(cudaStream_t stream) { advance(clock_of(stream), &host_clock, 1); }
// Let the host wait for all devices; return the time.
clock_type null_clock(void) { advance(&host_clock, &latest, 0); return host_clock; }

// Which addresses are device memory and which are pinned host memory: torch asks for this with every copy.
enum { PAGEABLE, PINNED, DEVICE };
#define MAX_REGIONS 65536
static struct { char *start; size_t size; int kind, device; } regions[MAX_REGIONS];
static int region_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add_region(void *start, size_t size, int kind) {
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < region_count && regions[at].start) at++;
    if (at < MAX_REGIONS) {
        regions[at].start = start, regions[at].size = size, regions[at].kind = kind, regions[at].device = current_device;
        if (at == region_count) region_count++;
    }
    pthread_mutex_unlock(&lock);
}

static size_t remove_region(void *start) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < region_count && start; at++)
        if (regions[at].start == start) { size = regions[at].size, regions[at].start = 0; break; }
    pthread_mutex_unlock(&lock);
    return size;
}

static int kind_of(const void *address, int *device) {
    int kind = PAGEABLE;
    const char *byte = address;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < region_count; at++)
        if (regions[at].start && byte >= regions[at].start && byte < regions[at].start + regions[at].size) {
            kind = regions[at].kind;
            if (device) *device = regions[at].device;
            break;
        }
    pthread_mutex_unlock(&lock);
    return kind;
}

// Devices: FAKE_CUDA_DEVICES of them, each with the properties of an H100.
cudaError_t cudaGetDeviceCount(int *n) { *n = environment("FAKE_CUDA_DEVICES", 2); OK; }
cudaError_t cudaGetDevice(int *device) { *device = current_device; OK; }
cudaError_t cudaSetDevice(int device) { current_device = device; OK; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13020; OK; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13020; OK; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 (null)");
    p->major = environment("FAKE_CUDA_MAJOR", 9), p->minor = environment("FAKE_CUDA_MINOR", 0);
    p->totalGlobalMem = 80ull << 30, p->totalConstMem = 65536, p->l2CacheSize = 52428800;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->warpSize = 32, p->multiProcessorCount = 132;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->textureAlignment = 512, p->unifiedAddressing = 1;
    OK;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY: *value = 65535; break;
        default: *value = 1;
    }
    OK;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; OK; }
cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) { OK; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device); OK; }
cudaError_t cudaGetLastError(void) { OK; }
cudaError_t cudaPeekAtLastError(void) { OK; }

// Streams and events: everything is done at once, so queries succeed; waiting counts, and moves clocks on.
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; OK; }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = new_clock(); OK; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { *stream = new_clock(); OK; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { *stream = new_clock(); OK; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; OK; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, void *graph, void *nodes, void *edges, size_t *count) {
    if (status) *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (count) *count = 0;
    OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(void *mode) { OK; }
cudaError_t cudaEventCreate(cudaEvent_t *made) { *made = new_clock(); OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { *made = new_clock(); OK; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); OK; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) { COUNT(EVENT_RECORD); *(clock_type *)e = *clock_of(stream); OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t stream, unsigned flags) { return cudaEventRecord(e, stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned flags) { advance(clock_of(stream), (clock_type *)e, 0); OK; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; OK; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { event(EVENT_SYNC, 0); advance(&host_clock, (clock_type *)e, 0); OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { event(STREAM_SYNC, 0); advance(&host_clock, clock_of(stream), 0); OK; }
cudaError_t cudaDeviceSynchronize(void) { event(DEVICE_SYNC, 0); null_clock(); OK; }

// Memory. Small allocations are filled with ones, so that an index read from "computed" memory is seldom out of range.
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) { *total = 80ull << 30; *free_bytes = *total - counts[MALLOC_BYTES]; OK; }
cudaError_t cudaMalloc(void **p, size_t n) {
    *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*p == MAP_FAILED) { *p = 0; return cudaErrorMemoryAllocation; }
    COUNT(MALLOC), ADD(MALLOC_BYTES, n);
    if (n <= (64u << 20)) memset(*p, 1, n);
    add_region(*p, n, DEVICE);
    OK;
}
cudaError_t cudaFree(void *p) { size_t n = remove_region(p); if (n) { munmap(p, n); ADD(MALLOC_BYTES, -(unsigned long long)n); } OK; }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
    *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    add_region(*p, n, PINNED);
    OK;
}
cudaError_t cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
cudaError_t cudaFreeHost(void *p) { size_t n = remove_region(p); if (n) munmap(p, n); OK; }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) { add_region(p, n, PINNED); OK; }
cudaError_t cudaHostUnregister(void *p) { remove_region(p); OK; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    int device = 0, kind = kind_of(p, &device);
    memset(a, 0, sizeof *a);
    a->type = kind == DEVICE ? cudaMemoryTypeDevice : kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    a->device = device, a->devicePointer = a->hostPointer = (void *)p;
    OK;
}

static void copied(const void *to, const void *from, size_t n, cudaStream_t stream) {
    int target = kind_of(to, 0), source = kind_of(from, 0);
    int kind = target != DEVICE ? D2H : source == DEVICE ? D2D : source == PINNED ? H2D_PINNED : H2D_PAGEABLE;
    if (target == DEVICE && source != DEVICE) ADD(H2D_BYTES, n);
    if (stream) COUNT(SIDE_COPY);
    event(kind, n);
}
// NULL_CUDA_READ_ZEROS=1: what the host reads from a device is zero. Otherwise it is whatever the memory held, because
// kernels compute nothing, and code that checks its results for NaN stops.
static void move(void *to, const void *from, size_t n) {
    if (environment("NULL_CUDA_READ_ZEROS", 0) && kind_of(to, 0) != DEVICE && kind_of(from, 0) == DEVICE) memset(to, 0, n);
    else memmove(to, from, n);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) { copied(to, from, n, stream); move(to, from, n); OK; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) { copied(to, from, n, 0); event(DEVICE_SYNC, 0); move(to, from, n); OK; }
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t n, cudaStream_t stream) { copied(to, from, n, stream); memmove(to, from, n); OK; }
cudaError_t cudaMemset(void *p, int value, size_t n) { COUNT(MEMSET); if (n < (1 << 20)) memset(p, value, n); OK; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t stream) { return cudaMemset(p, value, n); }

// Kernels.
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90;
    OK;
}
cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value) { OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *function, int block, size_t memory) { *n = 2; OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *function, int block, size_t memory, unsigned flags) { *n = 2; OK; }
static cudaError_t launched(cudaStream_t stream) { COUNT(LAUNCH); computed(stream); if (stream) COUNT(SIDE_LAUNCH); OK; }
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t memory, cudaStream_t stream) { return launched(stream); }
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t memory, cudaStream_t stream) { return launched(stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) { return launched(config->stream); }
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; OK; }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { static char area[1 << 16]; *p = area; OK; }
static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **p, unsigned version, unsigned long long flags, void *result) { *p = (void *)nothing; if (result) *(int *)result = 0; OK; }

// cuBLAS.
static char handle_[4096];
static __thread cudaStream_t cublas_stream;  // torch sets it before every call
int cublasSetStream_v2(void *handle, cudaStream_t stream) { cublas_stream = stream; return 0; }
static int multiplied(cudaStream_t stream) { COUNT(GEMM); computed(stream); return 0; }
int cublasCreate_v2(void **handle) { *handle = handle_; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = malloc(256); return 0; }
int cublasLtMatmulDescDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = malloc(256); return 0; }
int cublasLtMatmulPreferenceDestroy(void *made) { free(made); return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long long rows, unsigned long long columns, long long stride) { *made = malloc(256); return 0; }
int cublasLtMatrixLayoutDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, void *result, int *found) { memset(result, 0, 128); *found = 1; return 0; }
int cublasLtMatmulAlgoCheck(void *h, void *o, void *a, void *b, void *c, void *d, void *algorithm, void *result) { memset(result, 0, 128); return 0; }
int cublasLtMatmulAlgoInit(void) { return 0; }
int cublasLtMatmul(void *h, void *o, void *alpha, void *a, void *la, void *b, void *lb, void *beta, void *c, void *lc, void *d, void *ld, void *algorithm, void *workspace, size_t size, cudaStream_t stream) { return multiplied(stream); }
size_t cublasLtGetVersion(void) { return 130401; }
