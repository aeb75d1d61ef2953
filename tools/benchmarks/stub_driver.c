/* A stand-in for libcuda.so.1: it accepts what cuda.core asks and launches nothing.
 *
 * Two uses: what a launch costs in Python, with a driver that costs nothing; and what arrives at the
 * driver (image, grid, stream, arguments), for tests. It says nothing about a real GPU.
 *
 *     cc -O2 -shared -fPIC -o libcuda.so.1 stub_driver.c
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MAX_ARGUMENTS = 64 };

typedef struct { /* CUlaunchConfig, its first members */
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
} Config;

static void *current, *last_stream, *last_kernel;
static const void *image;
static unsigned last_grid[3], last_block[3];
static long launches;
static int num_arguments;
static uint64_t arguments[MAX_ARGUMENTS];
static uintptr_t next_handle = 0x10000;

/* What tests read. */
long stub_launches(void) { return launches; }
void stub_expect(int count) { num_arguments = count; }
const void *stub_image(void) { return image; }
void *stub_stream(void) { return last_stream; }
void *stub_kernel(void) { return last_kernel; }
unsigned stub_grid(int axis) { return last_grid[axis]; }
unsigned stub_block(int axis) { return last_block[axis]; }
uint64_t stub_argument(int i) { return arguments[i]; }

static int success(void) { return 0; }
static int version(int *v) { *v = 13000; return 0; }
static int count(int *n) { *n = 1; return 0; }
static int device_get(int *device, int ordinal) { *device = ordinal; return 0; }
static int device_name(char *name, int length, int device) {
    (void)device;
    strncpy(name, "stub", (size_t)length);
    return 0;
}
static int uuid(char *bytes, int device) { (void)device; memset(bytes, 1, 16); return 0; }
static int attribute(int *value, int which, int device) {
    (void)device;
    switch (which) {
    case 75: *value = 9; break;   /* compute capability, major */
    case 76: *value = 0; break;   /* and minor */
    case 10: *value = 32; break;  /* warp size */
    case 16: *value = 132; break; /* multiprocessors */
    case 8: *value = 49152; break;
    case 1: case 2: case 3: *value = 1024; break;
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;
    case 6: case 7: *value = 65535; break;
    default: *value = 1;
    }
    return 0;
}
static int retain(void **context, int device) {
    (void)device;
    *context = (void *)0x1000;
    return 0;
}
static int get_current(void **context) { *context = current; return 0; }
static int set_current(void *context) { current = context; return 0; }
static int pop_current(void **context) {
    if (context) *context = current;
    return 0;
}
static int current_device(int *device) { *device = 0; return 0; }
static int make_handle(void **handle) {
    *handle = (void *)(next_handle += 16);
    return 0;
}
static int load(void **library, const void *code) {
    image = code;
    return make_handle(library);
}
static int function_attribute(int *value) { *value = 64; return 0; }
static int stream_device(void *stream, int *device) { (void)stream; *device = 0; return 0; }
static int name_of(int error, const char **text) { (void)error; *text = "STUB"; return 0; }
static int stream_context(void *stream, void **context) {
    (void)stream;
    *context = (void *)0x1000;
    return 0;
}

static int launch_with(const Config *config, void *kernel, void **parameters, void **extra) {
    (void)extra;
    launches++;
    last_kernel = kernel;
    last_stream = config->stream;
    memcpy(last_grid, config->grid, sizeof last_grid);
    memcpy(last_block, config->block, sizeof last_block);
    for (int i = 0; i < num_arguments && i < MAX_ARGUMENTS; i++)
        memcpy(&arguments[i], parameters[i], 8);
    return 0;
}
static int launch(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared_bytes, void *stream, void **parameters,
                  void **extra) {
    Config config = {{gx, gy, gz}, {bx, by, bz}, shared_bytes, stream};
    return launch_with(&config, kernel, parameters, extra);
}

static const struct {
    const char *name;
    void *function;
} FUNCTIONS[] = {
    {"cuDriverGetVersion", version},
    {"cuDeviceGetCount", count},
    {"cuDeviceGet", device_get},
    {"cuDeviceGetName", device_name},
    {"cuDeviceGetUuid", uuid},
    {"cuDeviceGetAttribute", attribute},
    {"cuDevicePrimaryCtxRetain", retain},
    {"cuCtxGetCurrent", get_current},
    {"cuCtxSetCurrent", set_current},
    {"cuCtxPushCurrent", set_current},
    {"cuCtxPopCurrent", pop_current},
    {"cuCtxGetDevice", current_device},
    {"cuStreamGetCtx", stream_context},
    {"cuStreamGetDevice", stream_device},
    {"cuStreamCreate", make_handle},
    {"cuStreamCreateWithPriority", make_handle},
    {"cuEventCreate", make_handle},
    {"cuLibraryLoadData", load},
    {"cuModuleLoadData", load},
    {"cuModuleLoadDataEx", load},
    {"cuLibraryGetKernel", make_handle},
    {"cuLibraryGetModule", make_handle},
    {"cuKernelGetFunction", make_handle},
    {"cuModuleGetFunction", make_handle},
    {"cuKernelGetAttribute", function_attribute},
    {"cuFuncGetAttribute", function_attribute},
    {"cuLaunchKernel", launch},
    {"cuLaunchKernelEx", launch_with},
    {"cuGetErrorName", name_of},
    {"cuGetErrorString", name_of},
};
static const char *const VERSIONS[] = {"", "_v2", "_v3", "_v4", "_ptsz", "_v2_ptds"};

/* All functions are found by name here; those not in the table succeed and do nothing. */
int cuGetProcAddress_v2(const char *name, void **function, int api, uint64_t flags, int *status) {
    (void)api;
    (void)flags;
    if (status) *status = 0;
    *function = name[0] ? (void *)success : NULL;
    if (!strncmp(name, "cuGetProcAddress", 16)) {
        *function = (void *)cuGetProcAddress_v2;
        return 0;
    }
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++) {
        size_t length = strlen(FUNCTIONS[i].name);
        if (strncmp(name, FUNCTIONS[i].name, length)) continue;
        for (size_t v = 0; v < sizeof VERSIONS / sizeof *VERSIONS; v++)
            if (!strcmp(name + length, VERSIONS[v])) *function = FUNCTIONS[i].function;
    }
    return 0;
}
int cuGetProcAddress(const char *name, void **function, int api, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, api, flags, NULL);
}
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *v) { return version(v); }
int cuDeviceGetCount(int *n) { return count(n); }
