// Compiles one family of operators for every instruction set. A family's .cpp file is
//
//     #define LK_FAMILY "basic.inc"
//     #define LK_FAMILY_NAME lk_family_basic
//     #include "each_isa.h"
//
// and its .inc file, which is included once per namespace, ends with `static const lk_op ops[] = {...};`. With LK_BYTES
// defined it is compiled for products of bytes too (AVX512-VNNI), with LK_TILES for tile registers (amx.inc); other
// families have there what they have one level below.
//
// Whatever a .inc file needs from the standard library must be included here, before the instruction set changes, and
// be used as plain functions on plain types: a template of the library that is instantiated under a wide instruction
// set can become the one copy that every processor runs. For the same reason all functions in .inc files are static.
#pragma once

#include "lk.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

template <typename A, typename B> struct same { enum { value = 0 }; };
template <typename A> struct same<A, A> { enum { value = 1 }; };

#define LK_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define LK_TARGET(features) LK_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define LK_TARGET_END _Pragma("clang attribute pop")
#define LK_WIDE
#else
#define LK_TARGET(features) _Pragma("GCC push_options") LK_PRAGMA(GCC target(features))
#define LK_TARGET_END _Pragma("GCC pop_options")
#define LK_WIDE ",prefer-vector-width=512"
#endif

#if !defined(LK_EMULATE_AMX)
#define LK_ISA 0
namespace portable {
#include "vec.inc"
#include LK_FAMILY
}
#undef LK_ISA

#if defined(__x86_64__)
#define LK_ISA 1
LK_TARGET("avx2,fma,f16c")
namespace avx2 {
#include "vec.inc"
#include LK_FAMILY
}
LK_TARGET_END
#undef LK_ISA

#if defined(LK_UP_TO_AVX2)  // for tests on processors that have no more: the rest takes most of the time
namespace avx512 = avx2;
namespace avx512_vnni = avx2;
namespace avx512_bf16 = avx2;
#else
#define LK_ISA 2
LK_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl" LK_WIDE)
namespace avx512 {
#include "vec.inc"
#include LK_FAMILY
}
LK_TARGET_END
#undef LK_ISA

#if defined(LK_BYTES)
#define LK_ISA 3
LK_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni" LK_WIDE)
namespace avx512_vnni {
#include "vec.inc"
#include LK_FAMILY
}
LK_TARGET_END
#undef LK_ISA
#else
namespace avx512_vnni = avx512;
#endif

#define LK_ISA 4
LK_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16" LK_WIDE)
namespace avx512_bf16 {
#include "vec.inc"
#include LK_FAMILY
}
LK_TARGET_END
#undef LK_ISA
#endif
#endif
#endif

#if defined(LK_BUILDS_AMX) && defined(LK_TILES) && !defined(LK_UP_TO_AVX2)
#define LK_ISA 5
LK_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16" LK_WIDE)
namespace amx {
#include "vec.inc"
#include LK_FAMILY
}
LK_TARGET_END
#undef LK_ISA
#elif defined(__x86_64__)
namespace amx = avx512_bf16;
#endif

extern const lk_family LK_FAMILY_NAME;
#if defined(LK_EMULATE_AMX)
const lk_family LK_FAMILY_NAME = {{0, 0, 0, 0, 0, amx::ops}, sizeof amx::ops / sizeof amx::ops[0]};
#elif defined(__x86_64__)
const lk_family LK_FAMILY_NAME = {
    {portable::ops, avx2::ops, avx512::ops, avx512_vnni::ops, avx512_bf16::ops, amx::ops},
    sizeof portable::ops / sizeof portable::ops[0],
};
#else
const lk_family LK_FAMILY_NAME = {{portable::ops}, sizeof portable::ops / sizeof portable::ops[0]};
#endif
