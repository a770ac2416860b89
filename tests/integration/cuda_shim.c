/* The CUDA driver calls that LibCuda makes, with the C interface of the driver, on a "GPU" that does
 * everything at once. It shows that arguments arrive as the driver expects them; it is not CUDA. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

enum { SUCCESS = 0, INVALID = 1, NOT_READY = 600 };

struct object { int kind; int flags; int priority; int pending; };
static struct object objects[16];
static int used, primary_refs;
static void *current;
int shim_not_ready, shim_old_driver, shim_access_order, shim_flags;
size_t shim_batch_count;

static struct object *make(int kind) {
    struct object *o = &objects[used++ % 16];
    memset(o, 0, sizeof *o);
    o->kind = kind;
    return o;
}
static int is(const void *o, int kind) { return o && ((const struct object *)o)->kind == kind; }

CUresult cuInit(unsigned int flags) { return flags ? INVALID : SUCCESS; }
CUresult cuDeviceGet(int *device, int ordinal) {
    if (ordinal != 0) return 101;
    *device = 7; /* a handle, not the ordinal */
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device != 7) return INVALID;
    primary_refs++;
    *context = &primary_refs;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    if (device != 7) return INVALID;
    primary_refs--;
    return SUCCESS;
}
int shim_primary_refs(void) { return primary_refs; }
CUresult cuCtxGetCurrent(void **context) { *context = current; return SUCCESS; }
CUresult cuCtxSetCurrent(void *context) { current = context; return SUCCESS; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}
CUresult cuStreamCreateWithPriority(void **stream, unsigned int flags, int priority) {
    struct object *o = make(1);
    if (flags != 1) return INVALID;
    o->priority = priority;
    *stream = o;
    return SUCCESS;
}
int shim_priority(const struct object *stream) { return stream->priority; }
CUresult cuStreamDestroy_v2(void *stream) { return is(stream, 1) ? SUCCESS : INVALID; }
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned int flags) {
    return is(stream, 1) && is(event, 2) && !flags ? SUCCESS : INVALID;
}
CUresult cuEventCreate(void **event, unsigned int flags) {
    if (flags != 2) return INVALID;
    *event = make(2);
    return SUCCESS;
}
CUresult cuEventDestroy_v2(void *event) { return is(event, 2) ? SUCCESS : INVALID; }
CUresult cuEventRecord(void *event, void *stream) {
    return is(event, 2) && is(stream, 1) ? SUCCESS : INVALID;
}
CUresult cuEventQuery(void *event) {
    if (!is(event, 2)) return INVALID;
    return shim_not_ready-- > 0 ? NOT_READY : SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, void *stream) {
    if (!is(stream, 1)) return INVALID;
    memcpy((void *)dst, (void *)src, n);
    return SUCCESS;
}
static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                      CUmemcpyAttributes *attrs, size_t *first, size_t attr_count,
                      size_t *failed, void *stream) {
    if (!is(stream, 1) || attr_count != 1 || first[0] != 0 || !failed) return INVALID;
    if (attrs[0].srcLocHint.type || attrs[0].dstLocHint.type) return INVALID;
    for (size_t i = 0; i < count; i++) memcpy((void *)dsts[i], (void *)srcs[i], sizes[i]);
    shim_batch_count = count;
    shim_access_order = attrs[0].srcAccessOrder;
    shim_flags = (int)attrs[0].flags;
    return SUCCESS;
}
CUresult cuGetProcAddress_v2(const char *name, void **entry, int version, uint64_t flags,
                             int *status) {
    *entry = NULL;
    if (flags) return INVALID;
    *status = 2; /* the driver is too old */
    if (shim_old_driver || strcmp(name, "cuMemcpyBatchAsync") || version != 12080) return 500;
    *entry = (void *)batch;
    *status = 0;
    return SUCCESS;
}
CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned int flags) {
    return p && n && flags == 1 ? SUCCESS : INVALID;
}
CUresult cuMemHostUnregister(void *p) { return p ? SUCCESS : INVALID; }
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == 101 ? "invalid device ordinal" : "invalid argument";
    return SUCCESS;
}
