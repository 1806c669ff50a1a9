// Processes wait for one another: first they look, then they offer their core to others, then they sleep (futex).

#include "ranks.h"

#include <atomic>
#include <chrono>
#include <thread>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSpinNanoseconds = 100000, kQuietNanoseconds = 5000;  // as in pool.cpp

struct Flag {
    std::atomic<uint32_t> round, sleepers;
};
static_assert(sizeof(Flag) <= LK_FLAG_BYTES && std::atomic<uint32_t>::is_always_lock_free, "plain words in memory");

Flag& flag_of(char* flags, int64_t rank) { return *(Flag*)(flags + rank * LK_FLAG_BYTES); }

bool is_there(const Flag& flag, uint32_t round) {
    return int32_t(flag.round.load(std::memory_order_seq_cst) - round) >= 0;
}

// Not the private kind: the word is shared between processes.
void sleep_on(Flag& flag, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, &flag.round, FUTEX_WAIT, seen, nullptr, nullptr, 0);
#else
    (void)flag, (void)seen;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(Flag& flag) {
#if defined(__linux__)
    syscall(SYS_futex, &flag.round, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)flag;
#endif
}

void await(Flag& flag, uint32_t round) {
    using clock = std::chrono::steady_clock;
    const auto since = clock::now();
    for (int64_t waited = 0; waited < kSpinNanoseconds;) {
        for (int i = 0; i < 16; i++) {
            if (is_there(flag, round)) return;
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        waited = std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now() - since).count();
        if (waited > kQuietNanoseconds) std::this_thread::yield();
    }
    flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (!is_there(flag, round)) {
        const uint32_t seen = flag.round.load(std::memory_order_seq_cst);
        if (int32_t(seen - round) < 0) sleep_on(flag, seen);
    }
    flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace

void lk_tell(char* flags, int64_t index, uint32_t round) {
    Flag& own = flag_of(flags, index);
    own.round.store(round, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst)) wake_all(own);
}

void lk_await(char* flags, int64_t index, uint32_t round) { await(flag_of(flags, index), round); }

void lk_meet(char* flags, int64_t rank, int64_t size, uint32_t round) {
    lk_tell(flags, rank, round);
    for (int64_t i = 0; i < size; i++)
        if (i != rank) await(flag_of(flags, i), round);
}
