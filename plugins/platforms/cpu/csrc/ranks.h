// What processes wait for one another with: a flag of each rank in memory that all of them see. No vectors here.
#pragma once

#include <stdint.h>

enum { LK_FLAG_BYTES = 64 };  // a cache line for each flag

// Says that `rank` has come to `round`, then waits until all of `size` ranks have. `flags` is the beginning of the
// shared memory: [size] lines, zero at first.
void lk_meet(char* flags, int64_t rank, int64_t size, uint32_t round);

// Says that flag `index` has come to `round`; waits until it has.
void lk_tell(char* flags, int64_t index, uint32_t round);
void lk_await(char* flags, int64_t index, uint32_t round);
