// Which operators there are, and for which instruction sets. A new family is one line here.

#include "lk.h"

#include <string.h>

#define FAMILIES(X) \
    X(basic)        \
    X(attention)    \
    X(linear)       \
    X(experts)      \
    X(route)        \
    X(rowops)       \
    X(sample)       \
    X(integer)

#define DECLARE(name) extern const lk_family lk_family_##name;
FAMILIES(DECLARE)

namespace {

#define ADDRESS(name) &lk_family_##name,
const lk_family* const families[] = {FAMILIES(ADDRESS)};
const char* const names[LK_NUM_ISAS] = {"portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"};

bool supported(int isa) {
    if (isa == LK_PORTABLE) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();  // libgcc asks the processor, and the system (xgetbv) whether it saves the registers
    bool ok = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa >= LK_AVX512)
        ok = ok && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (isa >= LK_AVX512_VNNI) ok = ok && __builtin_cpu_supports("avx512vnni");
    if (isa >= LK_AVX512_BF16) ok = ok && __builtin_cpu_supports("avx512bf16");
    return ok && isa < LK_NUM_ISAS;
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
