// A stand-in for the CUDA driver on machines without one: what cuda.core calls to load PTX and to launch it.
//
// Every launch is handed to a callback (bridge.py runs it in a PTX interpreter); device pointers are host pointers. Calls that
// set, load, launch, copy or wait are recorded by name. FAKE_CUDA_CAPABILITY ("80") and FAKE_CUDA_DRIVER ("13000") choose the
// device. Functions that are not here are reported as missing, so that cuda.core fails loudly when it needs them.
//
// For tests only: never put it on the library path of a machine with a GPU.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
};

typedef int Result;
typedef void *Handle;
typedef unsigned long long DevicePointer;

typedef struct {
    char *ptx;
} Library;

typedef struct {
    char name[256];
    Library *library;
} Kernel;

// CUlaunchConfig
typedef struct {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Handle stream;
    Handle attributes;
    unsigned num_attributes;
} LaunchConfig;

// 0, or any other number where the launch failed. dims: grid x, y, z, block x, y, z.
typedef int (*LaunchCallback)(const char *ptx, const char *kernel, const unsigned *dims, unsigned shared_bytes,
                              Handle stream, void **params);

enum { MOST_THREADS = 1024 };

static LaunchCallback launch_callback;
static char context;  // its address is the one context's handle
static __thread Handle current_context;

// ---- what was called ------------------------------------------------------------------------------------------------------

static char *calls;  // names, each followed by a newline
static size_t calls_end, calls_room;
static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;

static void record(const char *name) {
    pthread_mutex_lock(&calls_lock);
    size_t length = strlen(name);
    if (calls_end + length + 2 > calls_room) {
        calls_room = 2 * calls_room + 4096;
        calls = realloc(calls, calls_room);
    }
    memcpy(calls + calls_end, name, length);
    calls_end += length;
    calls[calls_end++] = '\n';
    calls[calls_end] = 0;
    pthread_mutex_unlock(&calls_lock);
}

#define RECORD() record(__func__)

EXPORT const char *fake_cuda_calls(void) { return calls ? calls : ""; }

EXPORT void fake_cuda_forget_calls(void) {
    pthread_mutex_lock(&calls_lock);
    calls_end = 0;
    if (calls) calls[0] = 0;
    pthread_mutex_unlock(&calls_lock);
}

EXPORT void fake_cuda_on_launch(LaunchCallback callback) { launch_callback = callback; }

static int setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

// ---- driver and device ----------------------------------------------------------------------------------------------------

EXPORT Result cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

EXPORT Result cuDriverGetVersion(int *version) {
    *version = setting("FAKE_CUDA_DRIVER", 13000);
    return SUCCESS;
}

EXPORT Result cuDeviceGetCount(int *count) {
    *count = 1;
    return SUCCESS;
}

EXPORT Result cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}

EXPORT Result cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, "PTX interpreter");
    return SUCCESS;
}

EXPORT Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    int capability = setting("FAKE_CUDA_CAPABILITY", 80);
    switch (attribute) {
        case 1: *value = MOST_THREADS; break;      // MAX_THREADS_PER_BLOCK
        case 10: *value = 32; break;               // WARP_SIZE
        case 16: *value = 108; break;              // MULTIPROCESSOR_COUNT
        case 75: *value = capability / 10; break;  // COMPUTE_CAPABILITY_MAJOR
        case 76: *value = capability % 10; break;  // COMPUTE_CAPABILITY_MINOR
        default: *value = 0;
    }
    return SUCCESS;
}

EXPORT Result cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 7, 16);
    return SUCCESS;
}

// ---- context --------------------------------------------------------------------------------------------------------------

EXPORT Result cuDevicePrimaryCtxRetain(Handle *out, int device) {
    *out = &context;
    return SUCCESS;
}

EXPORT Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }

EXPORT Result cuCtxGetCurrent(Handle *out) {
    *out = current_context;
    return SUCCESS;
}

EXPORT Result cuCtxSetCurrent(Handle handle) {
    RECORD();
    current_context = handle;
    return SUCCESS;
}

EXPORT Result cuCtxGetDevice(int *device) {
    *device = 0;
    return current_context ? SUCCESS : INVALID_CONTEXT;
}

EXPORT Result cuCtxGetDevice_v2(int *device, Handle handle) {
    *device = 0;
    return SUCCESS;
}

EXPORT Result cuCtxGetId(Handle handle, DevicePointer *id) {
    *id = 1;
    return SUCCESS;
}

EXPORT Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

// ---- streams: handles of the caller, never looked into ----------------------------------------------------------------------

EXPORT Result cuStreamGetCtx(Handle stream, Handle *out) {
    *out = &context;
    return SUCCESS;
}

EXPORT Result cuStreamGetCtx_v2(Handle stream, Handle *out, Handle *green_context) {
    *out = &context;
    *green_context = NULL;
    return SUCCESS;
}

EXPORT Result cuStreamGetDevice(Handle stream, int *device) {
    *device = 0;
    return SUCCESS;
}

EXPORT Result cuStreamGetFlags(Handle stream, unsigned *flags) {
    *flags = 0;
    return SUCCESS;
}

// ---- everything that waits or copies: recorded, refused ---------------------------------------------------------------------

#define REFUSE(name)            \
    EXPORT Result name(void) {  \
        RECORD();               \
        return NOT_PERMITTED;   \
    }

REFUSE(cuCtxSynchronize)
REFUSE(cuCtxSynchronize_v2)
REFUSE(cuStreamSynchronize)
REFUSE(cuStreamQuery)
REFUSE(cuStreamWaitEvent)
REFUSE(cuEventSynchronize)
REFUSE(cuEventRecord)
REFUSE(cuMemAlloc_v2)
REFUSE(cuMemAllocAsync)
REFUSE(cuMemcpy)
REFUSE(cuMemcpyAsync)
REFUSE(cuMemcpyHtoD_v2)
REFUSE(cuMemcpyDtoH_v2)
REFUSE(cuMemcpyHtoDAsync_v2)
REFUSE(cuMemcpyDtoHAsync_v2)
REFUSE(cuMemcpyDtoDAsync_v2)

// ---- errors ---------------------------------------------------------------------------------------------------------------

EXPORT Result cuGetErrorName(int error, const char **name) {
    *name = error == SUCCESS         ? "CUDA_SUCCESS"
            : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
            : error == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                     : "CUDA_ERROR_FAKE";
    return SUCCESS;
}

EXPORT Result cuGetErrorString(int error, const char **text) {
    *text = "the stand-in driver refuses";
    return SUCCESS;
}

// ---- code -----------------------------------------------------------------------------------------------------------------

EXPORT Result cuLibraryLoadData(Handle *out, const char *code, Handle jit_options, Handle jit_values, unsigned num_jit,
                                Handle options, Handle values, unsigned num_options) {
    RECORD();
    if (memcmp(code, "\x7f" "ELF", 4) == 0) return NO_BINARY_FOR_GPU;  // only PTX can be interpreted
    Library *library = calloc(1, sizeof *library);
    library->ptx = strdup(code);
    *out = library;
    return SUCCESS;
}

EXPORT Result cuLibraryUnload(Handle library) { return SUCCESS; }  // kept: kernels point to it

EXPORT Result cuLibraryGetKernel(Kernel **out, Library *library, const char *name) {
    RECORD();
    char pattern[300];
    snprintf(pattern, sizeof pattern, ".entry %s(", name);
    if (!strstr(library->ptx, pattern)) return NOT_FOUND;
    Kernel *kernel = calloc(1, sizeof *kernel);
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    kernel->library = library;
    *out = kernel;
    return SUCCESS;
}

EXPORT Result cuKernelGetLibrary(Library **out, Kernel *kernel) {
    *out = kernel->library;
    return SUCCESS;
}

EXPORT Result cuKernelGetFunction(Kernel **out, Kernel *kernel) {
    RECORD();
    *out = kernel;
    return current_context ? SUCCESS : INVALID_CONTEXT;
}

EXPORT Result cuFuncGetAttribute(int *value, int attribute, Kernel *kernel) {
    *value = attribute == 0 ? MOST_THREADS : 0;  // MAX_THREADS_PER_BLOCK
    return SUCCESS;
}

// ---- launches -------------------------------------------------------------------------------------------------------------

EXPORT Result cuLaunchKernelEx(const LaunchConfig *config, Kernel *kernel, void **params, void **extra) {
    RECORD();
    if (!current_context) return INVALID_CONTEXT;
    unsigned dims[6];
    memcpy(dims, config->grid, sizeof config->grid);
    memcpy(dims + 3, config->block, sizeof config->block);
    for (int i = 0; i < 6; i++)
        if (!dims[i]) return INVALID_VALUE;
    if ((size_t)dims[3] * dims[4] * dims[5] > MOST_THREADS) return INVALID_VALUE;
    if (!launch_callback) return LAUNCH_FAILED;
    int failed = launch_callback(kernel->library->ptx, kernel->name, dims, config->shared_bytes, config->stream, params);
    return failed ? LAUNCH_FAILED : SUCCESS;
}

EXPORT Result cuLaunchKernel(Kernel *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void **params,
                             void **extra) {
    LaunchConfig config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, NULL, 0};
    return cuLaunchKernelEx(&config, kernel, params, extra);
}

// ---- how cuda-bindings finds all of these -------------------------------------------------------------------------------------

EXPORT Result cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long long flags, int *found) {
    static const char *const suffixes[] = {"_v4", "_v3", "_v2", ""};
    Dl_info self;
    dladdr((void *)cuInit, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; i < 4; i++) {
        char name[200];
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        if ((*function = dlsym(library, name))) {
            if (found) *found = 0;
            return SUCCESS;
        }
    }
    if (found) *found = 1;
    return NOT_FOUND;
}
