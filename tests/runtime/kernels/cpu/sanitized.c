/* The kernels of kernels.c on threads of its own (a library's pool would hide from the sanitizers who waits for whom): teams that meet
 * often, and products of every kind of weight with one thread and several, which must be the same bits. Prints how many. */
#define _GNU_SOURCE
#include KERNELS
#include <pthread.h>
#include <stdio.h>
#include <time.h>

static _Thread_local int self, team_size = 1;
typedef struct { void (*run)(void *); void *data; int index, count; } Start;
static void *begin(void *p) {
    Start *start = p;
    self = start->index, team_size = start->count;
    start->run(start->data);
    return NULL;
}
static pthread_barrier_t meeting;
static void on_threads(void (*run)(void *), void *data, unsigned count, unsigned flags) {
    pthread_t thread[16];
    Start start[16];
    (void)flags;
    pthread_barrier_init(&meeting, NULL, count);
    for (unsigned i = 0; i < count; i++) start[i] = (Start){run, data, (int)i, (int)count};
    for (unsigned i = 1; i < count; i++) pthread_create(thread + i, NULL, begin, start + i);
    begin(start);
    for (unsigned i = 1; i < count; i++) pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&meeting);
    self = 0, team_size = 1;
}
static void meet(void) { pthread_barrier_wait(&meeting); }
static int thread_number(void) { return self; }
static int thread_count(void) { return team_size; }

#define MEETINGS 200
static int64_t sums[16][8]; /* a member writes its own, the others read it after they have met; not atomic on purpose */
static void meet_often(void *data, const Team *team) {
    int64_t *wrong = data;
    for (int64_t round = 1; round <= MEETINGS; round++) {
        if (round % 50 == team->index) { /* late */
            struct timespec pause = {0, 2000000};
            nanosleep(&pause, NULL);
        }
        sums[team->index][0] = round;
        team_barrier(team);
        for (int i = 0; i < team->count; i++) wrong[team->index] += sums[i][0] != round;
        team_barrier(team);
    }
}

static uint32_t state = 1;
static uint32_t draw(void) { return state = state * 1664525u + 1013904223u, state >> 8; }
static void *made(int64_t bytes) { /* exactly so long: what is read beyond is found */
    uint8_t *p = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) p[i] = (uint8_t)draw();
    return p;
}
static float *floats(int64_t count) {
    float *p = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) p[i] = ((int32_t)(draw() % 2001) - 1000) * 1e-3f;
    return p;
}

static int product(int kind, int64_t rows, int64_t columns, int group, int zeros, int digits, int64_t batch) {
    int64_t groups = (columns + group - 1) / group, panels = (rows + PANEL - 1) / PANEL, each = panels * groups * PANEL;
    Linear l = {.kind = kind, .weight_type = TYPE_F32, .scale_type = TYPE_F32, .group = group, .share = 1, .rows = rows, .columns = columns, .groups = groups};
    float *bias = floats(rows), *x = floats(batch * columns), *scale = NULL;
    void *weight, *zero = NULL, *sum = NULL;
    if (kind == KIND_DENSE) weight = floats(rows * columns);
    else {
        weight = made(panels * run_bytes(&l, groups)), scale = floats(each);
        if (zeros) zero = made(each);
        if (kind == KIND_S24) sum = calloc((size_t)each, 2);
    }
    l.weight = weight, l.scale = scale, l.zero = zero, l.sums = sum, l.bias = bias;
    float *one = malloc((size_t)(batch * rows) * 4), *many = malloc((size_t)(batch * rows) * 4);
    int64_t room = linear_memory(&l, batch, digits);
    int different = 0;
    for (int threads = 1; threads <= 4; threads++) {
        void *memory = malloc((size_t)room);
        linear_run(&l, x, TYPE_F32, batch, threads == 1 ? one : many, TYPE_F32, digits, memory, threads);
        free(memory);
        if (threads > 1) different += memcmp(one, many, (size_t)(batch * rows) * 4) != 0;
    }
    free(bias), free(x), free(scale), free(weight), free(zero), free(sum), free(one), free(many);
    return different;
}

int main(void) {
    set_pool(on_threads, meet, thread_number, thread_count);
    int64_t wrong[16] = {0};
    for (int threads = 1; threads <= 5; threads++) parallel(meet_often, wrong, threads);
    for (int i = 0; i < 16; i++)
        if (wrong[i]) return fprintf(stderr, "a member went on before all had met\n"), 1;
    int done = 0;
    const int kinds[] = {KIND_DENSE, KIND_S24, 2, 3, 4, 5, 6, 7, 8};
    const int count = sizeof kinds / sizeof *kinds;
    const int64_t shapes[][2] = {{1, 32}, {16, 64}, {37, 215}, {83, 96}};
    for (int k = 0; k < count; k++)
        for (int s = 0; s < 4; s++)
            for (int digits = 1; digits <= 3; digits++)
                for (int64_t batch = 1; batch <= 9; batch += 4, done++)
                    if (product(kinds[k], shapes[s][0], shapes[s][1], 32, done % 2 && kinds[k] > KIND_S24, digits, batch))
                        return fprintf(stderr, "kind %d, shape %d: another result with threads\n", kinds[k], s), 1;
    for (int64_t batch = 25; batch <= 41; batch += 16, done++) /* in tiles, more than a section of sums */
        if (product(KIND_DENSE, 83, 2215, 1, 0, 1, batch)) return fprintf(stderr, "%d rows: another result with threads\n", (int)batch), 1;
    return printf("%d products\n", done), 0;
}
