// Which operators there are, and for which instruction sets. A new family is one line here.

#include "lk.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef FAMILIES  // tests build some alone
#define FAMILIES(X) \
    X(basic)        \
    X(attention)    \
    X(linear)       \
    X(experts)      \
    X(route)        \
    X(rowops)       \
    X(recurrent)    \
    X(sample)       \
    X(integer)      \
    X(ranks)
#endif

#define DECLARE(name) extern const lk_family lk_family_##name;
FAMILIES(DECLARE)

namespace {

#define ADDRESS(name) &lk_family_##name,
const lk_family* const families[] = {FAMILIES(ADDRESS)};
const char* const names[LK_NUM_ISAS] = {"portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"};

#if defined(__x86_64__)
// Whether the processor has tile registers with products of bfloat16 and of bytes, and the system lets us use them. Asked
// after the other instruction sets, so XGETBV is there.
bool tiles() {
#if defined(LK_EMULATE_AMX)
    return true;
#elif defined(LK_BUILDS_AMX) && defined(__linux__)
    unsigned a, b, c, d, saved, high;
    const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, wanted = bf16 | tile | int8;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted) return false;
    asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    const unsigned config = 1u << 17, data = 1u << 18;
    if ((saved & (config | data)) != (config | data)) return false;
    const long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;  // given to the process: to threads of before and after
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
#else
    return false;
#endif
}
#endif

bool supported(int isa) {
#if defined(LK_EMULATE_AMX)
    if (isa != LK_AMX) return false;
#endif
    if (isa == LK_PORTABLE) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();  // libgcc asks the processor, and the system (xgetbv) whether it saves the registers
    bool ok = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa >= LK_AVX512)
        ok = ok && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (isa >= LK_AVX512_VNNI) ok = ok && __builtin_cpu_supports("avx512vnni");
    if (isa >= LK_AVX512_BF16) ok = ok && __builtin_cpu_supports("avx512bf16");
    if (ok && isa >= LK_AMX) {
        static const bool has_tiles = tiles();
        ok = has_tiles;
    }
    return ok;
#else
    return false;
#endif
}

int best() {
    int isa = LK_NUM_ISAS - 1;
    while (!supported(isa)) isa--;
    return isa;
}

int current = -1;

}  // namespace

LK_API const char* lk_isa_name(int isa) { return isa >= 0 && isa < LK_NUM_ISAS ? names[isa] : nullptr; }

LK_API int lk_has_isa(int isa) { return isa >= 0 && isa < LK_NUM_ISAS && supported(isa); }

LK_API int lk_isa(void) {
    if (current < 0) current = best();
    return current;
}

LK_API int lk_set_isa(int isa) {
    if (!lk_has_isa(isa)) return -1;
    current = isa;
    return 0;
}

LK_API const lk_op* lk_find(const char* name) {
    const int isa = lk_isa();
    for (const lk_family* family : families)
        for (int64_t i = 0; i < family->num_ops; i++)
            if (!strcmp(family->ops[isa][i].name, name)) return &family->ops[isa][i];
    return nullptr;
}
