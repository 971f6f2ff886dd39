/* How many threads to use beside other processes. The members of a team wait for each other hundreds of times a step, so one that has to
 * share its core slows all of them down: without it they are faster. Linux says how long a thread was runnable and had no core; elsewhere
 * nothing is known, and all threads are always used. */
#include <stdatomic.h>
#ifndef CONTENTION_CLOCK /* the tests have a clock of their own */
#ifdef __linux__
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
static int64_t clock_now(void) { /* nanoseconds */
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}
static int64_t run_queue_delay(void) { /* nanoseconds, of this thread so far; -1: unknown */
    char text[64];
    long long delay = -1;
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ssize_t count = read(file, text, sizeof text - 1);
    close(file);
    text[count < 0 ? 0 : count] = 0;
    return sscanf(text, "%*d %lld", &delay) == 1 ? delay : -1;
}
#else
static int64_t clock_now(void) { return 0; }
static int64_t run_queue_delay(void) { return -1; }
#endif
#endif

#define MILLISECOND INT64_C(1000000)
#define SAMPLE_AFTER (20 * MILLISECOND)  /* several time slices; a sample takes microseconds */
#define TOO_LONG (100 * MILLISECOND)     /* the thread has slept meanwhile: its delay says nothing of now */
#define FIRST_BACKOFF (100 * MILLISECOND) /* with fewer threads, before all are tried again; each next one is twice as long */
#define LONGEST_BACKOFF (800 * MILLISECOND)
#define FORGET_AFTER (250 * MILLISECOND) /* since the last one, without a delayed thread: the next is a first one */

typedef struct { int64_t at, delay; } Sample; /* a thread's last */
static atomic_int threads_off;
static _Atomic int64_t backoff_end, backoff;

/* By every member of a team at its end; `delayed`: how many had no core for a quarter of the time. */
static void sample_delay(atomic_int *delayed, Sample *last) {
    const int64_t now = clock_now(), passed = now - last->at;
    if (passed < SAMPLE_AFTER) return;
    const int64_t delay = run_queue_delay();
    if (passed < TOO_LONG && delay >= 0 && delay - last->delay > passed / 4) atomic_fetch_add(delayed, 1);
    *last = (Sample){now, delay};
}
/* After a team's work: as many threads as were delayed are not used for a while. */
static void back_off(int delayed, int threads) {
    if (!delayed) return;
    const int64_t now = clock_now(), before = atomic_load(&backoff);
    const int again = before && now - atomic_load(&backoff_end) < FORGET_AFTER;
    const int64_t next = !again ? FIRST_BACKOFF : 2 * before < LONGEST_BACKOFF ? 2 * before : LONGEST_BACKOFF;
    atomic_store(&backoff, next);
    atomic_store(&backoff_end, now + next);
    atomic_fetch_add(&threads_off, delayed < threads ? delayed : threads - 1);
}
/* Of so many threads, how many to use now. */
static int threads_to_use(int threads) {
    const int off = atomic_load_explicit(&threads_off, memory_order_relaxed);
    if (!off) return threads;
    if (clock_now() >= atomic_load(&backoff_end)) {
        atomic_store(&threads_off, 0);
        return threads;
    }
    return off < threads ? threads - off : 1;
}

typedef struct { void (*job)(void *, const Team *); void *data; atomic_int delayed; } Sampled;
static void sampled_job(void *p, const Team *team) {
    static _Thread_local Sample last;
    Sampled *sampled = p;
    sampled->job(sampled->data, team);
    sample_delay(&sampled->delayed, &last);
}
/* As `parallel`, with fewer threads while other processes need the cores: for jobs whose results are the same with any number of threads. */
static void parallel_adaptive(void (*job)(void *, const Team *), void *data, int threads) {
    threads = threads > 1 && pool_parallel ? threads_to_use(threads) : 1;
    if (threads == 1) {
        parallel(job, data, 1);
        return;
    }
    Sampled sampled = {job, data, 0};
    parallel(sampled_job, &sampled, threads);
    back_off(atomic_load(&sampled.delayed), threads);
}
