// The C interface of the library: one pool of threads, and operators that run on it. No torch, no Python.
//
// An operator is one to LK_MAX_PHASES phases over one block of arguments. A phase is a function and a number of
// chunks; its chunks run in any order on any thread, the phases of a tape strictly one after another. A result never
// depends on which thread ran a chunk.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define LK_API extern "C" __declspec(dllexport)
#else
#define LK_API extern "C" __attribute__((visibility("default")))
#endif

enum { LK_MAX_PHASES = 6 };

enum lk_isa { LK_PORTABLE, LK_AVX2, LK_AVX512, LK_AVX512_VNNI, LK_AVX512_BF16, LK_AMX, LK_NUM_ISAS };

// Whether the compiler has the last of them. LK_EMULATE_AMX (tests): it alone is built, its tile instructions in plain C.
#if defined(__x86_64__) && (defined(LK_EMULATE_AMX) || __clang_major__ >= 12 || (!defined(__clang__) && __GNUC__ >= 11))
#define LK_BUILDS_AMX
#endif

// `thread` is in [0, lk_threads()), and no two running chunks share it: an index into scratch memory.
typedef void (*lk_kernel)(const void* args, int64_t chunk, int thread);

struct lk_phase {
    lk_kernel run;
    const void* args;
    const int64_t* chunks;  // read when the phase begins: an earlier phase, or the planner of a step, may write it
};

// Arguments of every operator begin with this header; `chunks[i]` belongs to phase i.
struct lk_header {
    int64_t chunks[LK_MAX_PHASES];
};

struct lk_op {
    const char* name;
    int64_t args_size;  // sizeof of the arguments: Python's mirror of the struct is checked against it
    int64_t num_phases;
    lk_kernel run[LK_MAX_PHASES];
};

// The operators of one source file, compiled once for each instruction set.
struct lk_family {
    const lk_op* ops[LK_NUM_ISAS];
    int64_t num_ops;
};

LK_API const char* lk_isa_name(int isa);
LK_API int lk_has_isa(int isa);      // 1 when this library and this processor have it
LK_API int lk_set_isa(int isa);      // for operators found from now on; -1 when it is not available
LK_API int lk_isa(void);

LK_API const lk_op* lk_find(const char* name);  // for the current instruction set; NULL when there is none

// `threads` includes the caller's. Workers may run on `cpus` only (none given: anywhere).
LK_API int lk_start(int threads, const int* cpus, int num_cpus);
LK_API int lk_threads(void);

// Runs the phases, the caller taking part; returns when all are done. One tape at a time: a second caller waits.
LK_API void lk_run(const lk_phase* phases, int64_t num_phases);
LK_API void lk_run_op(const lk_op* op, const void* args, const int64_t* chunks);
