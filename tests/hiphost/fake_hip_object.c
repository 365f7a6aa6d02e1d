/* fake_hip_object.c - what a HIP runtime looks at in a code object: header, architecture, symbols, kernel descriptors.
 * Formats: ELF-64; the AMDGPU parts as LLVM's "User Guide for AMDGPU Backend" has them for code object version 5. */
#include "fake_hip.h"

#include <elf.h>
#include <stdio.h>
#include <string.h>

#define EM_AMDGPU_     224
#define OSABI_HSA      64
#define ABI_VERSION_5  3
#define MACH_MASK      0xffu
#define KERNARG_OFFSET 8 /* of a kernel descriptor */

static const struct {
    uint32_t mach;
    const char *arch;
} MACHINES[] = {{0x03f, "gfx90a"}, {0x04c, "gfx942"}, {0x04f, "gfx950"}};

bool fake_object_read(struct fake_object *object, const void *bytes, const char **why_p)
{
    Elf64_Ehdr h;

    memcpy(&h, bytes, sizeof(h));
    *why_p = memcmp(h.e_ident, ELFMAG, SELFMAG) != 0                 ? "no ELF"
             : h.e_ident[EI_CLASS] != ELFCLASS64                     ? "not 64 bits"
             : h.e_machine != EM_AMDGPU_ || h.e_type != ET_DYN       ? "not a linked object for AMD GPUs"
             : h.e_ident[EI_OSABI] != OSABI_HSA                      ? "not for the HSA runtime"
             : h.e_ident[EI_ABIVERSION] != ABI_VERSION_5             ? "not code object version 5"
             : h.e_shnum == 0 || h.e_shentsize != sizeof(Elf64_Shdr) ? "no sections"
                                                                     : NULL;
    object->bytes = bytes;
    object->arch = NULL;
    for (size_t i = 0; i < sizeof(MACHINES) / sizeof(MACHINES[0]); i++) {
        if ((h.e_flags & MACH_MASK) == MACHINES[i].mach)
            object->arch = MACHINES[i].arch;
    }
    return *why_p == NULL;
}

static Elf64_Shdr section(const struct fake_object *object, int i)
{
    Elf64_Ehdr h;
    Elf64_Shdr s;

    memcpy(&h, object->bytes, sizeof(h));
    memcpy(&s, object->bytes + h.e_shoff + (size_t)i * sizeof(s), sizeof(s));
    return s;
}

static int n_sections(const struct fake_object *object)
{
    Elf64_Ehdr h;

    memcpy(&h, object->bytes, sizeof(h));
    return h.e_shnum;
}

/* Where the bytes at an address of the object's lie in the file. */
static const uint8_t *at_address(const struct fake_object *object, uint64_t addr)
{
    for (int i = 0; i < n_sections(object); i++) {
        const Elf64_Shdr s = section(object, i);

        if (s.sh_type != SHT_NOBITS && s.sh_addr != 0 && addr >= s.sh_addr && addr < s.sh_addr + s.sh_size)
            return object->bytes + s.sh_offset + (addr - s.sh_addr);
    }
    return NULL;
}

/* A kernel NAME is described by the data at the dynamic symbol NAME.kd. */
int64_t fake_object_kernel(const struct fake_object *object, const char *name)
{
    char wanted[80];

    snprintf(wanted, sizeof(wanted), "%s.kd", name);
    for (int i = 0; i < n_sections(object); i++) {
        const Elf64_Shdr symbols = section(object, i);

        if (symbols.sh_type != SHT_DYNSYM)
            continue;
        const char *names = (const char *)object->bytes + section(object, (int)symbols.sh_link).sh_offset;
        for (size_t k = 0; k < symbols.sh_size / sizeof(Elf64_Sym); k++) {
            const uint8_t *descriptor;
            uint32_t bytes;
            Elf64_Sym sym;

            memcpy(&sym, object->bytes + symbols.sh_offset + k * sizeof(sym), sizeof(sym));
            if (strcmp(names + sym.st_name, wanted) != 0)
                continue;
            descriptor = at_address(object, sym.st_value);
            if (descriptor == NULL)
                return -1;
            memcpy(&bytes, descriptor + KERNARG_OFFSET, sizeof(bytes));
            return bytes;
        }
    }
    return -1;
}
