/* rpc_process.c - what gRPC core needs once per process: its log, its lock-order detector. */
#include <dlfcn.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <stdlib.h>
#include <string.h>

#include "server/log.h"
#include "server/rpc.h"

/* Debian's core is a debug build in which abseil aborts the process when it suspects a lock-order inversion among
 * gRPC's own mutexes; a service must not die of a suspicion. The switch is one C++ function with a versioned name, looked
 * up at run time so that a library without it is fine too. Debug builds leave the detector on. */
static void ignore_suspected_deadlocks(void)
{
#if defined(NDEBUG)
    static const char *const names[] = {
        "_ZN4absl7debian329SetMutexDeadlockDetectionModeENS0_15OnDeadlockCycleE",
        "_ZN4absl12lts_2022062329SetMutexDeadlockDetectionModeENS0_15OnDeadlockCycleE",
        "_ZN4absl29SetMutexDeadlockDetectionModeENS_15OnDeadlockCycleE",
    };

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        void *symbol = dlsym(RTLD_DEFAULT, names[i]);
        void (*set_mode)(int);

        if (!symbol)
            continue;
        memcpy(&set_mode, &symbol, sizeof(symbol));
        set_mode(0);
        return;
    }
#endif
}

#if DSA_GRPC_HAS_LOG_FUNCTION
static void log_from_grpc(gpr_log_func_args *args)
{
    /* Peers can cause these lines, so none of them is an error of ours. */
    srv_log(args->severity == GPR_LOG_SEVERITY_ERROR ? SRV_LOG_WARN : SRV_LOG_DEBUG, "gRPC says text=\"%s\"",
            args->message);
}

static void take_log(void)
{
    gpr_set_log_function(log_from_grpc);
}
#else
/* Newer cores write through abseil, straight to stderr and in a form of their own: only when asked to. */
static void take_log(void)
{
    setenv("GRPC_VERBOSITY", "none", 0);
}
#endif

void rpc_init(void)
{
    ignore_suspected_deadlocks();
    take_log();
    grpc_init();
}

void rpc_fini(void)
{
    grpc_shutdown_blocking();
}
