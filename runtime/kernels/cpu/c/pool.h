/* Threads: those that torch already has. Its OpenMP library exports GOMP_parallel (GNU's name; LLVM's and Intel's libraries
 * have it too); the loader finds the functions and hands them over. One pool serves both, so nothing fights for the cores.
 * Without them everything runs on the calling thread. */
typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
typedef void (*barrier_t)(void);
typedef int (*number_t)(void);
static parallel_t pool_parallel;
static barrier_t pool_barrier;
static number_t pool_thread, pool_size;

#if !PART /* STEPS, or one unit, also of sources without parts: other parts start no threads */
void set_pool(parallel_t parallel, barrier_t barrier, number_t thread, number_t size) {
    pool_parallel = parallel, pool_barrier = barrier, pool_thread = thread, pool_size = size;
}
#endif

typedef struct { int index, count; } Team; /* who am I, of how many */

static inline void team_barrier(const Team *team) {
    if (team->count > 1) pool_barrier();
}
/* This member's part [*start, *end) of `total`, in whole multiples of `step`. */
static inline void team_part(const Team *team, int64_t total, int64_t step, int64_t *start, int64_t *end) {
    int64_t pieces = (total + step - 1) / step;
    *start = pieces * team->index / team->count * step;
    *end = pieces * (team->index + 1) / team->count * step;
    if (*end > total) *end = total;
    if (*start > total) *start = total;
}
typedef struct { void (*job)(void *, const Team *); void *data; } Order;
static void team_run(void *p) {
    Order *order = p;
    Team team = {pool_thread(), pool_size()}; /* a library may grant fewer threads than were asked for */
    order->job(order->data, &team);
}
static void parallel(void (*job)(void *, const Team *), void *data, int threads) {
    if (threads > 1 && pool_parallel) {
        Order order = {job, data};
        pool_parallel(team_run, &order, (unsigned)threads, 0);
    } else {
        Team alone = {0, 1};
        job(data, &alone);
    }
}
