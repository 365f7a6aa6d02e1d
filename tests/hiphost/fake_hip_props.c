/* fake_hip_props.c - the two device properties structures of the HIP runtime, member for member as hip_runtime_api.h has
 * them: hipDeviceProp_tR0600 of ROCm 6.0 and later, and hipDeviceProp_t of ROCm 5.2. Written out here, so that the offsets
 * which driver_hip.c takes are held against another account of them. */
#include "fake_hip.h"

#include <stdio.h>
#include <string.h>

struct props_r0600 {
    char name[256];
    char uuid[16];
    char luid[8];
    unsigned luid_mask;
    size_t total_global_mem, shared_per_block;
    int regs_per_block, warp_size;
    size_t mem_pitch;
    int max_threads_per_block, max_threads_dim[3], max_grid_size[3], clock_rate;
    size_t total_const_mem;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int device_overlap, multi_processor_count, kernel_exec_timeout, integrated, can_map_host, compute_mode;
    int texture_1d, texture_1d_mipmap, texture_1d_linear, texture_2d[2], texture_2d_mipmap[2];
    int texture_2d_linear[3], texture_2d_gather[2], texture_3d[3], texture_3d_alt[3], texture_cubemap;
    int texture_1d_layered[2], texture_2d_layered[3], texture_cubemap_layered[2];
    int surface_1d, surface_2d[2], surface_3d[3], surface_1d_layered[2], surface_2d_layered[3],
        surface_cubemap;
    int surface_cubemap_layered[2];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc_driver, async_engines,
        unified_addressing;
    int memory_clock, memory_bus_width, l2_cache_size, persisting_l2, max_threads_per_mp, stream_priorities;
    int global_l1, local_l1;
    size_t shared_per_mp;
    int regs_per_mp, managed_memory, is_multi_board, board_group, host_atomics, double_ratio, pageable_access;
    int concurrent_managed, preemption, host_pointer_registered, cooperative, cooperative_multi;
    size_t shared_optin;
    int pageable_tables, direct_managed, max_blocks_per_mp, access_policy;
    size_t reserved_shared;
    int host_register, sparse_arrays, host_register_read_only, timeline, memory_pools, rdma;
    unsigned rdma_flush;
    int rdma_ordering;
    unsigned pool_handles;
    int deferred_arrays, ipc_events, cluster_launch, unified_functions, reserved[63], hip_reserved[32];
    char gcn_arch_name[256];
    size_t max_shared_per_mp;
    int clock_instruction_rate;
    unsigned arch_flags;
    unsigned *hdp_mem, *hdp_reg;
    int cooperative_unmatched[4], is_large_bar, asic_revision;
};

struct props_r0000 {
    char name[256];
    size_t total_global_mem, shared_per_block;
    int regs_per_block, warp_size, max_threads_per_block, max_threads_dim[3], max_grid_size[3], clock_rate;
    int memory_clock, memory_bus_width;
    size_t total_const_mem;
    int major, minor, multi_processor_count, l2_cache_size, max_threads_per_mp, compute_mode;
    int clock_instruction_rate;
    unsigned arch_flags;
    int concurrent_kernels, pci_domain, pci_bus, pci_device;
    size_t max_shared_per_mp;
    int is_multi_board, can_map_host, gcn_arch;
    char gcn_arch_name[256];
    int integrated, cooperative, cooperative_multi, texture_1d_linear, texture_1d, texture_2d[2],
        texture_3d[3];
    unsigned *hdp_mem, *hdp_reg;
    size_t mem_pitch, texture_alignment, texture_pitch_alignment;
    int kernel_exec_timeout, ecc, tcc_driver, cooperative_unmatched[4], is_large_bar, asic_revision;
    int managed_memory, direct_managed, concurrent_managed, pageable_access, pageable_tables;
};

_Static_assert(sizeof(struct props_r0600) == 1472, "hipDeviceProp_tR0600");
_Static_assert(sizeof(struct props_r0000) == 792, "hipDeviceProp_t of ROCm 5");

static size_t lds_bytes(const struct fake_hip *state)
{
    return strncmp(state->arch, "gfx950", 6) == 0 ? 160 << 10 : 64 << 10;
}

#define FILL(p, state, ordinal)                                                                              \
    do {                                                                                                     \
        memset(p, 0xa5, sizeof(*(p))); /* what is not filled below must not be read as something */          \
        snprintf((p)->name, sizeof((p)->name), "Fake Instinct %d", ordinal);                                 \
        snprintf((p)->gcn_arch_name, sizeof((p)->gcn_arch_name), "%s", (state)->arch);                       \
        (p)->total_global_mem = (size_t)192 << 30;                                                           \
        (p)->shared_per_block = lds_bytes(state);                                                            \
        (p)->warp_size = (state)->wave;                                                                      \
        (p)->multi_processor_count = 304;                                                                    \
        (p)->l2_cache_size = 4 << 20;                                                                        \
        (p)->major = 9;                                                                                      \
        (p)->minor = 4;                                                                                      \
    } while (0)

void fake_props_r0600(void *props, const struct fake_hip *state, int ordinal)
{
    struct props_r0600 *p = props;

    FILL(p, state, ordinal);
    for (int i = 0; i < 16; i++) /* the runtime has sixteen characters here */
        p->uuid[i] = "0123456789abcdef"[(i * 7 + ordinal) % 16];
}

void fake_props_r0000(void *props, const struct fake_hip *state, int ordinal)
{
    struct props_r0000 *p = props;

    FILL(p, state, ordinal);
}
