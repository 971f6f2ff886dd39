/* Repeats the calls that recorded_calls.py recorded, in memory of exactly their size, on threads of its own (a library's pool would hide
 * from the sanitizers who waits for whom). Every call must leave the bytes that it left there. Prints how many there were. */
#define _GNU_SOURCE
#include KERNELS
#include CALLS
#include <pthread.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static char doing[256];
/* What is said first when a sanitizer has found something. */
void __asan_on_error(void);
void __asan_on_error(void) { fprintf(stderr, "in %s\n", doing); }

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

typedef struct { int64_t at, block, offset; } Pointer; /* a pointer, and what it points to */
typedef struct {
    char *memory;
    const void *after; /* what the call must leave; NULL: anything */
    Pointer *links;
    int64_t size, count;
} Held;

static void take(void *into, int64_t bytes, FILE *file) {
    if (bytes && fread(into, (size_t)bytes, 1, file) != 1) exit(fprintf(stderr, "the recording ends early\n"));
}

/* Contents of so many bytes: those of a number, which come with it the first time. */
static const void *contents(int64_t bytes, FILE *file) {
    static void *known[1 << 16];
    static int64_t count;
    int64_t number;
    take(&number, sizeof number, file);
    if (number == count && count < 1 << 16) take(known[count++] = malloc((size_t)bytes), bytes, file);
    return known[number];
}

/* The next call; 0: there is none. */
static int repeat(FILE *file) {
    int64_t head[4], argument[16][3], given[16]; /* head: function, bytes of its label, arguments, blocks */
    if (fread(head, sizeof head, 1, file) != 1) return 0;
    char *label = calloc((size_t)head[1] + 1, 1);
    Held *blocks = calloc((size_t)head[3] + 1, sizeof *blocks);
    take(label, head[1], file);
    take(argument, head[2] * (int64_t)sizeof *argument, file);
    for (Held *b = blocks; b < blocks + head[3]; b++) {
        int64_t about[3]; /* bytes, whether they are scratch memory, pointers among them */
        take(about, sizeof about, file);
        b->size = about[0], b->count = about[2], b->links = malloc((size_t)b->count * sizeof(Pointer) + 1);
        if (posix_memalign((void **)&b->memory, 64, (size_t)b->size)) abort();
        take(b->links, b->count * (int64_t)sizeof(Pointer), file);
        if (about[1]) memset(b->memory, 0x5a, (size_t)b->size); /* other garbage than when it was recorded */
        else memcpy(b->memory, contents(b->size, file), (size_t)b->size);
        if (!about[1] && !b->count) b->after = contents(b->size, file);
    }
    for (Held *b = blocks; b < blocks + head[3]; b++)
        for (Pointer *l = b->links; l < b->links + b->count; l++) {
            char *to = blocks[l->block].memory + l->offset;
            memcpy(b->memory + l->at, &to, sizeof to);
        }
    for (int64_t i = 0; i < head[2]; i++)
        given[i] = argument[i][1] < 0 ? argument[i][0] : (int64_t)(intptr_t)(blocks[argument[i][1]].memory + argument[i][2]);
    snprintf(doing, sizeof doing, "%s", label);
    call(head[0], given);
    for (Held *b = blocks; b < blocks + head[3]; b++) {
        if (b->after && memcmp(b->after, b->memory, (size_t)b->size))
            fprintf(stderr, "%s: another result in %lld bytes\n", label, (long long)b->size), exit(1);
        free(b->memory), free(b->links);
    }
    free(label), free(blocks);
    return 1;
}

/* Linux lets no process use AMX's tiles that has not asked, as runtime/system/processes.py does. */
static int ask_for_tiles(void) {
#ifdef __AMX_TILE__
    const int request_permission = 0x1023, tile_data = 18;
    return (int)syscall(SYS_arch_prctl, request_permission, tile_data);
#else
    return 0;
#endif
}

int main(int count, char **arguments) {
    if (ask_for_tiles()) return fprintf(stderr, "AMX's tiles may not be used\n"), 1;
    set_pool(on_threads, meet, thread_number, thread_count);
    int64_t wrong[16] = {0};
    for (int threads = 1; threads <= 5; threads++) parallel(meet_often, wrong, threads);
    for (int i = 0; i < 16; i++)
        if (wrong[i]) return fprintf(stderr, "a member went on before all had met\n"), 1;
    FILE *file = count > 1 ? fopen(arguments[1], "rb") : NULL;
    if (!file) return fprintf(stderr, "there is no recording\n"), 1;
    int done = 0;
    while (repeat(file)) done++;
    fclose(file);
    return printf("%d calls\n", done), 0;
}
