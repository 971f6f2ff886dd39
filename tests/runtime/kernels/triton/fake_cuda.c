/* A CUDA driver without a GPU: it writes down what it is asked. As much of it as triton's launcher and ours call.
   Arguments of a launch are copied by the sizes that the test has set, as the real driver does by those in the cubin. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int sizes[64], count;
static void *context;
static char module_data[16];
static long room = -1, prefers = -1;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attrs;
  unsigned attr_count;
} Config; /* CUlaunchConfig */

void fake_sizes(int n, const int *given) {
  count = n;
  memcpy(sizes, given, n * sizeof(int));
}

static void say(const char *who, void *f, const unsigned *grid, const unsigned *block, unsigned shared, void *stream, void **params) {
  printf("{\"by\": \"%s\", \"function\": %lu, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"stream\": %lu, "
         "\"room\": %ld, \"prefers_shared\": %ld, \"arguments\": [",
         who, (unsigned long)f, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, (unsigned long)stream, room, prefers);
  for (int i = 0; i < count; i++) {
    printf("%s\"", i ? ", " : "");
    for (int b = 0; b < sizes[i]; b++) printf("%02x", ((uint8_t *)params[i])[b]);
    printf("\"");
  }
  printf("]}\n");
  fflush(stdout);
  room = prefers = -1;
}

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **found, int device) { *found = (void *)0xc0; return 0; }
int cuCtxGetCurrent(void **found) { *found = context; return 0; }
int cuCtxSetCurrent(void *given) { context = given; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 97 ? 232448 : which == 81 ? 233472 : 1; return 0; }
int cuModuleLoadData(void **module, const void *data) {
  if (!context) return 201;
  if (memcmp(data, "\x7f" "ELF", 4)) return 200;
  memcpy(module_data, data, 16);
  *module = (void *)0xd0;
  return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  if (strstr(name, "absent")) return 500;
  *function = (void *)0xf0;
  return 0;
}
int cuFuncGetAttribute(int *value, int which, void *function) { *value = which == 1 ? 1024 : which == 0 ? 1024 : 0; return 0; }
int cuFuncSetAttribute(void *function, int which, int value) {
  if (which > 15) return 1; /* no more shared memory than GPUs had before it could be asked for */
  if (which == 8) room = value;
  return 0;
}
int cuFuncSetCacheConfig(void *function, int which) { prefers = which; return 0; }
int cuPointerGetAttribute(void *value, int which, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
int cuGetErrorString(int status, const char **text) { *text = status == 200 ? "invalid image" : "not found"; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                   void **params, void **extra) {
  unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  if (!context) return 201;
  say("ours", f, grid, block, shared, stream, params);
  return 0;
}
int cuLaunchKernelEx(const Config *c, void *f, void **params, void **extra) {
  say("triton", f, c->grid, c->block, c->shared, c->stream, params);
  return c->attr_count ? 1 : 0;
}
/* The rest of what triton's driver links with. */
int cuOccupancyMaxActiveClusters(void) { return 1; }
int cuCtxGetLimit(void) { return 1; }
int cuCtxSetLimit(void) { return 1; }
int cuTensorMapEncodeTiled(void) { return 1; }
int cuDriverGetVersion(void) { return 1; }
int cuStreamIsCapturing(void) { return 1; }
int cuModuleUnload(void) { return 1; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
