// The pool. Chunks are claimed one by one; who finishes the last chunk of a phase begins the next phase. So a thread
// that the system has put aside while it holds no chunk never holds anybody up.

#include "lk.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSpinNanoseconds = 100000;  // how long a thread without work looks for some before it sleeps
constexpr int kQuietNanoseconds = 5000;   // how long it does so without offering its core to others

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

unsigned float_mode() {
#if defined(__x86_64__)
    return _mm_getcsr();
#else
    return 0;
#endif
}

void set_float_mode(unsigned mode) {
#if defined(__x86_64__)
    if (_mm_getcsr() != mode) _mm_setcsr(mode);
#else
    (void)mode;
#endif
}

class Pool {
public:
    Pool(int threads, std::vector<int> cpus) : size_(threads), cpus_(std::move(cpus)) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    int size() const { return size_; }

    void run(const lk_phase* phases, int64_t num_phases) {
        std::lock_guard<std::mutex> one_tape(tapes_);
        mode_ = float_mode();
        end_ = phases + num_phases;
        done_.store(false, std::memory_order_relaxed);
        begin(phases);
        while (true) {
            work(0);
            if (done_.load(std::memory_order_acquire)) return;
            await(done_, caller_asleep_, caller_);
        }
    }

private:
    // Claims and runs chunks until none is left to claim.
    void work(int thread) {
        uint64_t seen = cursor_.load(std::memory_order_acquire);
        while (uint32_t(seen)) {
            if (!cursor_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            // The phase cannot end before this chunk has: what describes it stands still.
            if (thread) set_float_mode(mode_);
            phase_->run(phase_->args, count_ - int64_t(uint32_t(seen)), thread);
            if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) begin(phase_ + 1);
            seen = cursor_.load(std::memory_order_acquire);
        }
    }

    // Begins the first phase from `phase` on that has chunks, or ends the tape. Called with no chunk running.
    void begin(const lk_phase* phase) {
        for (phase_ = phase; phase_ != end_; ++phase_) {
            count_ = *phase_->chunks;
            if (count_ <= 0) continue;
            unfinished_.store(count_, std::memory_order_relaxed);
            cursor_.store(uint64_t(++number_) << 32 | uint64_t(count_), std::memory_order_seq_cst);
            if (count_ > 1 && asleep_.load(std::memory_order_seq_cst)) notify(wake_);
            if (caller_asleep_.load(std::memory_order_seq_cst)) notify(caller_);
            return;
        }
        done_.store(true, std::memory_order_seq_cst);
        if (caller_asleep_.load(std::memory_order_seq_cst)) notify(caller_);
    }

    void notify(std::condition_variable& who) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        who.notify_all();
    }

    bool claimable() const { return uint32_t(cursor_.load(std::memory_order_seq_cst)) != 0; }

    // Until there is a chunk to claim or `over`: spins, then sleeps.
    void await(const std::atomic<bool>& over, std::atomic<int>& asleep, std::condition_variable& here) {
        using clock = std::chrono::steady_clock;
        const auto since = clock::now();
        for (int64_t waited = 0; waited < kSpinNanoseconds;) {
            for (int i = 0; i < 16; i++) {
                if (uint32_t(cursor_.load(std::memory_order_relaxed)) || over.load(std::memory_order_relaxed)) return;
                relax();
            }
            waited = std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now() - since).count();
            if (waited > kQuietNanoseconds) std::this_thread::yield();
        }
        asleep.fetch_add(1, std::memory_order_seq_cst);
        {
            std::unique_lock<std::mutex> lock(mutex_);
            here.wait(lock, [&] { return claimable() || over.load(std::memory_order_seq_cst); });
        }
        asleep.fetch_sub(1, std::memory_order_seq_cst);
    }

    void serve(int thread) {
#if defined(__linux__)
        if (!cpus_.empty()) {  // one logical processor of each core; among these the system may move threads
            cpu_set_t set;
            CPU_ZERO(&set);
            for (int cpu : cpus_)
                if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
            pthread_setaffinity_np(pthread_self(), sizeof set, &set);
        }
#endif
        while (!stop_.load(std::memory_order_acquire)) {
            work(thread);
            await(stop_, asleep_, wake_);
        }
    }

    const int size_;
    const std::vector<int> cpus_;
    std::vector<std::thread> workers_;
    std::mutex tapes_;  // held by the caller whose tape runs

    // The running phase: written between phases only.
    const lk_phase* phase_ = nullptr;
    const lk_phase* end_ = nullptr;
    int64_t count_ = 0;
    uint32_t number_ = 0;
    unsigned mode_ = 0;

    alignas(64) std::atomic<uint64_t> cursor_{0};  // number of the phase << 32 | chunks left to claim
    alignas(64) std::atomic<int64_t> unfinished_{0};
    alignas(64) std::atomic<bool> done_{true};
    std::atomic<bool> stop_{false};
    std::atomic<int> asleep_{0}, caller_asleep_{0};
    std::mutex mutex_;
    std::condition_variable wake_, caller_;
};

std::mutex guard;
Pool* pool = nullptr;  // never destroyed at exit: its threads may be asleep in it
int threads = 1;
std::vector<int>* cpus = new std::vector<int>;

Pool& ensure() {
    std::lock_guard<std::mutex> lock(guard);
    if (!pool) pool = new Pool(threads, *cpus);
    return *pool;
}

#if defined(__linux__)
// Threads do not survive a fork: the child gets a pool of its own when it runs something.
void forget() { pool = nullptr; }
const int registered = pthread_atfork([] { guard.lock(); }, [] { guard.unlock(); }, [] { guard.unlock(); forget(); });
#endif

}  // namespace

LK_API int lk_start(int number, const int* allowed, int num_cpus) {
    if (number < 1 || num_cpus < 0 || (num_cpus && !allowed)) return -1;
    std::lock_guard<std::mutex> lock(guard);
    std::vector<int> wanted(allowed, allowed + num_cpus);
    if (pool && pool->size() == number && *cpus == wanted) return 0;
    delete pool;
    pool = nullptr;
    threads = number;
    *cpus = wanted;
    return 0;
}

LK_API int lk_threads(void) {
    std::lock_guard<std::mutex> lock(guard);
    return threads;
}

LK_API void lk_run(const lk_phase* phases, int64_t num_phases) { ensure().run(phases, num_phases); }

LK_API void lk_run_op(const lk_op* op, const void* args, const int64_t* chunks) {
    lk_phase phases[LK_MAX_PHASES];
    for (int64_t i = 0; i < op->num_phases; i++) phases[i] = {op->run[i], args, chunks + i};
    ensure().run(phases, op->num_phases);
}
