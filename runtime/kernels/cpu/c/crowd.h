/* How many threads are worth their while beside other processes. Members of a team meet many times a step, so one that shares its core
 * with somebody makes all of them wait: without it they are faster. Linux says how long a thread was ready to run and had no core;
 * elsewhere nothing is known, and all threads are always used. */
#include <stdatomic.h>
#ifndef CROWD_CLOCK /* the tests have a clock of their own */
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
static int64_t time_without_core(void) { /* nanoseconds, of this thread; -1: unknown */
    char text[64];
    long long waited = -1;
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ssize_t count = read(file, text, sizeof text - 1);
    close(file);
    text[count < 0 ? 0 : count] = 0;
    return sscanf(text, "%*d %lld", &waited) == 1 ? waited : -1;
}
#else
static int64_t clock_now(void) { return 0; }
static int64_t time_without_core(void) { return -1; }
#endif
#endif

#define MILLISECOND INT64_C(1000000)
#define LOOK_AFTER (20 * MILLISECOND)    /* several turns of a scheduler; looking takes microseconds */
#define TOO_LONG (100 * MILLISECOND)     /* it has slept, so nothing is known of it */
#define FIRST_REST (100 * MILLISECOND)   /* with fewer threads, before all are tried again; every next one is twice as long */
#define LONGEST_REST (800 * MILLISECOND)
#define FORGET_AFTER (250 * MILLISECOND) /* since a rest without anybody late */

typedef struct { int64_t at, waited; } Look; /* a thread's last */
static atomic_int crowd_fewer;               /* threads that rest */
static _Atomic int64_t crowd_until, crowd_rest;

/* By every member of a team at its end; `late`: those that had no core for a quarter of the time. */
static void crowd_look(atomic_int *late, Look *last) {
    const int64_t now = clock_now(), passed = now - last->at;
    if (passed < LOOK_AFTER) return;
    const int64_t waited = time_without_core();
    if (passed < TOO_LONG && waited >= 0 && waited - last->waited > passed / 4) atomic_fetch_add(late, 1);
    *last = (Look){now, waited};
}
/* After a team's work. */
static void crowd_learn(int late, int threads) {
    if (!late) return;
    const int64_t now = clock_now(), before = atomic_load(&crowd_rest);
    const int again = before && now - atomic_load(&crowd_until) < FORGET_AFTER;
    const int64_t rest = !again ? FIRST_REST : 2 * before < LONGEST_REST ? 2 * before : LONGEST_REST;
    atomic_store(&crowd_rest, rest);
    atomic_store(&crowd_until, now + rest);
    atomic_fetch_add(&crowd_fewer, late < threads ? late : threads - 1);
}
/* Of so many threads, those that shall work. */
static int crowd_threads(int threads) {
    const int fewer = atomic_load_explicit(&crowd_fewer, memory_order_relaxed);
    if (!fewer) return threads;
    if (clock_now() >= atomic_load(&crowd_until)) {
        atomic_store(&crowd_fewer, 0);
        return threads;
    }
    return fewer < threads ? threads - fewer : 1;
}

typedef struct { void (*job)(void *, const Team *); void *data; atomic_int late; } Watched;
static void watched_job(void *p, const Team *team) {
    static _Thread_local Look last;
    Watched *watched = p;
    watched->job(watched->data, team);
    crowd_look(&watched->late, &last);
}
/* As `parallel`, for jobs whose results do not depend on the number of threads: by fewer of them while other processes keep the cores. */
static void parallel_fair(void (*job)(void *, const Team *), void *data, int threads) {
    threads = threads > 1 && pool_parallel ? crowd_threads(threads) : 1;
    if (threads == 1) {
        parallel(job, data, 1);
        return;
    }
    Watched watched = {job, data, 0};
    parallel(watched_job, &watched, threads);
    crowd_learn(atomic_load(&watched.late), threads);
}
