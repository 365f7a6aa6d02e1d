/* fake_hip.c - the fake HIP runtime: its state, devices, modules, launches and graphs. */
#include <pthread.h>

#include "fake_hip_impl.h"

struct fake_hip fake;
_Thread_local int fake_bound;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void configure(void)
{
    const char *devices = getenv("FAKE_HIP_DEVICES"), *arch = getenv("FAKE_HIP_ARCH");

    fake.n_devices = devices == NULL ? 1 : atoi(devices);
    snprintf(fake.arch, sizeof(fake.arch), "%s", arch == NULL ? "gfx942:sramecc+:xnack-" : arch);
    fake.wave = 64;
}

struct fake_hip *fake_hip_get(void)
{
    return &fake;
}

/* ---- calls ---------------------------------------------------------------------------------- */

void fake_die(const char *what)
{
    fprintf(stderr, "fake HIP runtime: %s\n", what);
    abort();
}

/* Whatever the runtime has is in one list: what a lost device never gives back is no leak of the test's. */
struct kept {
    struct kept *next, **from;
};
static struct kept *everything;

void *fake_new(size_t bytes)
{
    struct kept *k = calloc(1, sizeof(*k) + bytes);

    if (k == NULL)
        fake_die("no memory");
    k->next = everything;
    k->from = &everything;
    if (everything != NULL)
        everything->from = &k->next;
    everything = k;
    return k + 1;
}

void fake_delete(void *p)
{
    struct kept *k;

    if (p == NULL)
        return;
    k = (struct kept *)p - 1;
    *k->from = k->next;
    if (k->next != NULL)
        k->next->from = k->from;
    free(k);
}

static bool is_sticky(int result)
{
    return result == LAUNCH_FAILURE || result == 700;
}

/* Begins a call. What it returns, unless 0, is what the call returns through fake_leave. */
int fake_enter(const char *call)
{
    pthread_mutex_lock(&lock);
    if (fake.lost != 0)
        return fake.lost;
    if (fake.fail_call != NULL && strcmp(fake.fail_call, call) == 0 && fake.fail_after-- == 0) {
        fake.lost = is_sticky(fake.fail_result) ? fake.fail_result : 0;
        return fake.fail_result;
    }
    return 0;
}

int fake_leave(int result)
{
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- devices -------------------------------------------------------------------------------------- */

FAKE_HIP_API const char *hipGetErrorString(int result);
const char *hipGetErrorString(int result)
{
    switch (result) {
    case 0:
        return "no error";
    case INVALID_VALUE:
        return "invalid argument";
    case NO_MEMORY:
        return "out of memory";
    case NO_DEVICE:
        return "no ROCm-capable device is detected";
    case NO_BINARY:
        return "no kernel image is available for execution on the device";
    case NOT_FOUND:
        return "named symbol not found";
    case LAUNCH_FAILURE:
        return "unspecified launch failure";
    default:
        return "unknown error";
    }
}

CALL(hipInit, (unsigned flags))
{
    ENTER();
    return fake_leave(flags != 0 ? INVALID_VALUE : fake.n_devices == 0 ? NO_DEVICE : 0);
}

CALL(hipGetDeviceCount, (int *n_p))
{
    ENTER();
    *n_p = fake.n_devices;
    return fake_leave(0);
}

CALL(hipSetDevice, (int device))
{
    ENTER();
    if (device < 0 || device >= fake.n_devices)
        return fake_leave(INVALID_DEVICE);
    fake_bound = device;
    return fake_leave(0);
}

CALL(hipSetDeviceFlags, (unsigned flags))
{
    ENTER();
    return fake_leave(flags == 4 ? 0 : INVALID_VALUE);
}

CALL(hipDeviceGetName, (char *name, int size, int device))
{
    ENTER();
    snprintf(name, (size_t)size, "Fake Instinct %d", device);
    return fake_leave(0);
}

CALL(hipDeviceGetPCIBusId, (char *text, int size, int device))
{
    ENTER();
    snprintf(text, (size_t)size, "0000:%02x:00.0", device + 3);
    return fake_leave(0);
}

#if FAKE_HIP_RELEASE >= 6
CALL(hipGetDevicePropertiesR0600, (void *props, int device))
{
    ENTER();
    fake_props_r0600(props, &fake, device);
    return fake_leave(0);
}
#endif

/* Programs of release 5 find it under this name in every library. */
CALL(hipGetDeviceProperties, (void *props, int device))
{
    ENTER();
    fake_props_r0000(props, &fake, device);
    return fake_leave(0);
}

/* ---- modules and launches ------------------------------------------------------------------------ */

CALL(hipModuleLoadData, (void **module_p, const void *image))
{
    struct fake_object object;
    struct module *m;
    const char *why;

    ENTER();
    if (!fake_object_read(&object, image, &why)) {
        fprintf(stderr, "fake HIP runtime: module refused: %s\n", why);
        return fake_leave(INVALID_IMAGE);
    }
    if (object.arch == NULL || strlen(object.arch) != strcspn(fake.arch, ":")
        || strncmp(object.arch, fake.arch, strlen(object.arch)) != 0)
        return fake_leave(NO_BINARY);
    m = fake_new(sizeof(*m));
    m->magic = MODULE;
    m->object = object;
    fake.n_modules++;
    *module_p = m;
    return fake_leave(0);
}

CALL(hipModuleUnload, (void *module))
{
    struct module *m = module;

    ENTER();
    ALIVE(m, MODULE);
    while (m->functions != NULL) {
        struct function *f = m->functions;

        m->functions = f->next;
        f->magic = 0;
        fake_delete(f);
    }
    m->magic = 0;
    fake_delete(m);
    fake.n_modules--;
    return fake_leave(0);
}

/* The descriptor's arguments and the emulated kernel's are those of the same source: the same, and implicit ones behind. */
CALL(hipModuleGetFunction, (void **function_p, void *module, const char *name))
{
    struct module *m = module;
    struct function *f;
    int64_t described, emulated;

    ENTER();
    ALIVE(m, MODULE);
    described = fake_object_kernel(&m->object, name);
    emulated = fake_run_param_bytes(m->object.arch, name);
    if (described < 0)
        return fake_leave(NOT_FOUND);
    if (emulated < 0 || described < emulated || described > (emulated + 7) / 8 * 8 + 256)
        fake_die("a code object and the emulator differ over a kernel's arguments");
    f = fake_new(sizeof(*f));
    f->magic = FUNCTION;
    snprintf(f->name, sizeof(f->name), "%s", name);
    f->arch = m->object.arch;
    f->param_bytes = (size_t)emulated;
    f->next = m->functions;
    m->functions = f;
    *function_p = f;
    return fake_leave(0);
}

CALL(hipModuleLaunchKernel, (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared_bytes, void *stream, void **params, void **extra))
{
    struct function *f = function;
    struct stream *s = stream;
    struct node node;

    ENTER();
    ALIVE(f, FUNCTION);
    ALIVE(s, STREAM);
    if (gx == 0 || gy == 0 || gz == 0 || bx == 0 || bx > 1024 || by != 1 || bz != 1 || params == NULL
        || extra != NULL || (uint64_t)gx * bx > UINT32_MAX) /* threads of a dimension are 32 bits here */
        return fake_leave(INVALID_VALUE);
    if (s->device != fake_bound)
        return fake_leave(INVALID_HANDLE);
    node = (struct node){f, {gx, gy, gz}, bx, shared_bytes, params[0], NULL};
    node = fake_copy_node(&node);
    if (s->capture == NULL) {
        fake_add_work(s, (struct work){.kind = RUN, .node = node});
        return fake_leave(0);
    }
    struct node **end = &s->capture->nodes, *kept = fake_new(sizeof(*kept));
    while (*end != NULL)
        end = &(*end)->next;
    *kept = node;
    *end = kept;
    s->capture->n_nodes++;
    fake.n_recorded++;
    return fake_leave(0);
}

/* ---- graphs ------------------------------------------------------------------------------------ */

static struct graph *new_graph(int magic)
{
    struct graph *graph = fake_new(sizeof(*graph));

    graph->magic = magic;
    *(magic == GRAPH ? &fake.n_graphs : &fake.n_execs) += 1;
    return graph;
}

static void free_graph(struct graph *graph)
{
    *(graph->magic == GRAPH ? &fake.n_graphs : &fake.n_execs) -= 1;
    while (graph->nodes != NULL) {
        struct node *node = graph->nodes;

        graph->nodes = node->next;
        fake_delete(node->param);
        fake_delete(node);
    }
    graph->magic = 0;
    fake_delete(graph);
}

#ifndef FAKE_HIP_WITHOUT_GRAPHS
CALL(hipStreamBeginCapture, (void *stream, int mode))
{
    struct stream *s = stream;

    ENTER();
    ALIVE(s, STREAM);
    if (mode != 1 || s->capture != NULL)
        return fake_leave(INVALID_VALUE);
    s->capture = new_graph(GRAPH);
    fake_is_capturing = true;
    return fake_leave(0);
}

CALL(hipStreamEndCapture, (void *stream, void **graph_p))
{
    struct stream *s = stream;

    ENTER();
    ALIVE(s, STREAM);
    if (s->capture == NULL)
        return fake_leave(CAPTURE_UNMATCHED);
    *graph_p = s->capture;
    s->capture = NULL;
    fake_is_capturing = false;
    return fake_leave(0);
}
#endif

CALL(hipGraphInstantiate, (void **exec_p, void *graph, void **node_p, char *log, size_t log_bytes))
{
    struct graph *from = graph, *exec;
    struct node **end;

    ENTER();
    ALIVE(from, GRAPH);
    if (node_p != NULL || log != NULL || log_bytes != 0 || from->n_nodes > 64)
        return fake_leave(INVALID_VALUE);
    exec = new_graph(EXEC);
    end = &exec->nodes;
    for (struct node *n = from->nodes; n != NULL; n = n->next) {
        *end = fake_new(sizeof(**end));
        **end = fake_copy_node(n);
        end = &(*end)->next;
        exec->ids[exec->n_nodes++] = n;
    }
    *exec_p = exec;
    return fake_leave(0);
}

CALL(hipGraphGetRootNodes, (void *graph, void **nodes, size_t *n_p))
{
    struct graph *from = graph;

    ENTER();
    ALIVE(from, GRAPH);
    if (*n_p > 0 && from->nodes != NULL)
        nodes[0] = from->nodes; /* what one stream recorded is one chain */
    *n_p = from->nodes != NULL;
    return fake_leave(0);
}

struct node_params { /* hipKernelNodeParams */
    uint32_t block[3];
    void **extra;
    void *function;
    uint32_t grid[3];
    void **params;
    uint32_t shared_bytes;
};

CALL(hipGraphExecKernelNodeSetParams, (void *exec, void *id, const struct node_params *params))
{
    struct graph *to = exec;
    struct function *f = params->function;
    struct node *node;
    int i = 0;

    ENTER();
    ALIVE(to, EXEC);
    ALIVE(f, FUNCTION);
    node = to->nodes;
    while (i < to->n_nodes && to->ids[i] != id) {
        node = node->next;
        i++;
    }
    if (i == to->n_nodes || params->extra != NULL || params->params == NULL || params->block[1] != 1
        || params->block[2] != 1)
        return fake_leave(INVALID_VALUE);
    struct node changed = {f,
                           {params->grid[0], params->grid[1], params->grid[2]},
                           params->block[0],
                           params->shared_bytes,
                           params->params[0],
                           NULL};
    struct node *next = node->next;
    changed = fake_copy_node(&changed);
    fake_delete(node->param);
    *node = changed;
    node->next = next;
    return fake_leave(0);
}

CALL(hipGraphLaunch, (void *exec, void *stream))
{
    struct graph *from = exec;
    struct stream *s = stream;

    ENTER();
    ALIVE(from, EXEC);
    ALIVE(s, STREAM);
    if (s->capture != NULL || s->device != fake_bound)
        return fake_leave(INVALID_VALUE);
    for (struct node *n = from->nodes; n != NULL; n = n->next)
        fake_add_work(s, (struct work){.kind = RUN, .node = fake_copy_node(n)});
    fake.n_replays++;
    return fake_leave(0);
}

CALL(hipGraphExecDestroy, (void *exec))
{
    struct graph *graph = exec;

    ENTER();
    ALIVE(graph, EXEC);
    free_graph(graph);
    return fake_leave(0);
}

CALL(hipGraphDestroy, (void *graph))
{
    struct graph *from = graph;

    ENTER();
    ALIVE(from, GRAPH);
    free_graph(from);
    return fake_leave(0);
}
