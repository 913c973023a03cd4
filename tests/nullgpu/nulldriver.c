// A CUDA driver (libcuda.so.1) for Triton and Inductor: modules load, kernels launch, nothing is computed. Launches and
// loaded modules are recorded by nullcuda.c. It is also NVML (libnvidia-ml.so.1), which shows torch how GPUs are connected.

#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#undef cuLinkAddData
#undef cuLinkCreate
#undef cuDevicePrimaryCtxRelease

#define OK CUDA_SUCCESS
#define CONTEXT ((CUcontext)0x10)
#define MODULE ((CUmodule)0x20)

enum { PINNED = 1, DEVICE };

// The preloaded library is loaded first, so that its functions can be looked up.
static void report(int module, const char *name, uint64_t a, uint64_t b, void *stream) {
    static void (*record)(int, const char *, uint64_t, uint64_t, void *);
    if (!record) *(void **)&record = dlsym(RTLD_DEFAULT, "nullcuda_record");
    if (record) record(module, name, a, b, stream);
}

CUresult cuInit(unsigned flags) { return OK; }

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return OK;
}

// ---------------------------------------------------------------------------------------------- devices and contexts

CUresult cuDeviceGetCount(int *count) {
    const char *given = getenv("NULLCUDA_DEVICES");
    *count = given ? atoi(given) : 1;
    return OK;
}

CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return OK;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    static int (*get)(int *, int, int);
    if (!get) *(void **)&get = dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute");
    *value = 0;
    return get ? get(value, (int)attribute, device) : OK;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = CONTEXT;
    return OK;
}

CUresult cuCtxSetCurrent(CUcontext context) { return OK; }

CUresult cuCtxGetDevice(CUdevice *device) {
    static int (*get)(int *);
    if (!get) *(void **)&get = dlsym(RTLD_DEFAULT, "cudaGetDevice");
    *device = 0;
    return get ? get(device) : OK;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 0;
    return OK;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return OK; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return OK;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = CONTEXT;
    return OK;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
    static int (*kind_of)(const void *);
    if (!kind_of) *(void **)&kind_of = dlsym(RTLD_DEFAULT, "nullcuda_kind_of");
    *(uint64_t *)out = pointer;
    return kind_of && !kind_of((void *)pointer) ? CUDA_ERROR_INVALID_VALUE : OK;
}

// ----------------------------------------------------------------------------------------------- modules and kernels

static CUresult load(CUmodule *module) {
    report(1, "loadModule", 0, 0, 0);
    *module = MODULE;
    return OK;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) { return load(module); }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return load(module); }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return load(module);
}
CUresult cuModuleUnload(CUmodule module) { return OK; }

// A function is its name.
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    return OK;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? 64
             : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                                    : 0;
    return OK;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return OK; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return OK; }

static CUresult launch(CUfunction function, uint64_t blocks, uint64_t threads, CUstream stream) {
    report(0, (const char *)function, blocks, threads, stream);
    return OK;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra) {
    return launch(function, (uint64_t)gx * gy * gz, (uint64_t)bx * by * bz, stream);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream stream, void **arguments) {
    return launch(function, (uint64_t)gx * gy * gz, (uint64_t)bx * by * bz, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    uint64_t blocks = (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ;
    return launch(function, blocks, (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ,
                  config->hStream);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int block, size_t shared) {
    *count = 2;
    return OK;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    *count = 8;
    return OK;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    return OK;
}

CUresult cuLinkCreate_v2(unsigned count, CUjit_option *options, void **values, CUlinkState *state) {
    *state = 0;
    return OK;
}

CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
                          unsigned count, CUjit_option *options, void **values) {
    return OK;
}

CUresult cuLinkComplete(CUlinkState state, void **binary, size_t *size) {
    *size = 0;
    return OK;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "error of the null GPU";
    return OK;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = "CUDA_ERROR";
    return OK;
}

// -------------------------------------------------------------------------------------------------------------- NVML

enum { NVML_SUCCESS, NVML_NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return NVML_SUCCESS; }
// the fabric's state stays 0: there is none
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return NVML_SUCCESS; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NVML_NOT_SUPPORTED; }
// What torch lists when memory is missing.
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) {
    *count = 0;
    return NVML_SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return NVML_SUCCESS;
}
