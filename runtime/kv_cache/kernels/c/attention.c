/* Attention of a few queries a row over a compressed cache, which is read as it is stored: no copy of it is decoded but for one
 * page at a time where its storage is no grid of bytes. runtime/kv_cache/kernels/cpu.py compiles and calls it.
 *
 * Rows and their pages are one long list of which each thread takes an even part (flash-decoding); the parts of a row that
 * several threads hold are put together at the end, in one order, so that the same threads give the same bits. */
#include "../../../kernels/cpu/c/simd.h"
#include "../../../kernels/cpu/c/pool.h"
#define EACH _Pragma("GCC unroll 16")
#ifdef __SSE__
#include <immintrin.h>
#endif
#include "lanes.h"
#include "region.h"
#include "take.h"
#include "tile.h"
#include "scores.h"
#include "softmax.h"
#include "values.h"
#include "split.h"

/* One tile for queries `first` ...; scores and weights lie [count, lanes]. */
#define BLOCK_OF(queries, lanes)                                                                                          \
    static void block_##queries(const Request *request, const Work *work, const Tile *tile, int64_t row, int64_t first) { \
        float score[PAGE * QUERIES] = {0}, keep[QUERIES], sum[QUERIES];                                                   \
        tile_scores(request, work, tile, first, queries, lanes, DOTS_##queries, score);                                   \
        softmax(request, tile, row, first, queries, lanes, score, work->top, work->total, keep, sum);                     \
        tile_values(request, work, tile, first, queries, lanes, MIX_##queries, score, keep, sum);                         \
    }
BLOCK_OF(1, 1)
BLOCK_OF(2, 2)
BLOCK_OF(3, 4)
BLOCK_OF(4, 4)

static void attend_tile(const Request *request, const Work *work, const Tile *tile, int64_t row) {
    open_keys(&request->key, tile, work);
    open_values(&request->value, tile, work);
    int64_t first = 0;
    for (; first + QUERIES <= request->queries; first += QUERIES) block_4(request, work, tile, row, first);
    switch (request->queries - first) {
    case 1: block_1(request, work, tile, row, first); break;
    case 2: block_2(request, work, tile, row, first); break;
    case 3: block_3(request, work, tile, row, first); break;
    default: break;
    }
}

/* Units [from, until) of a row: sums that are not normalized, in `work`. */
static void attend_part(const Request *request, const Work *work, int64_t row, int64_t from, int64_t until) {
    begin_row(request, work, row);
    Tile tile, after;
    for (int64_t at = next_tile(request, row, from, until, &tile); tile.count;) {
        at = next_tile(request, row, at, until, &after);
        tile.next = after.count ? after.page : tile.page;
        attend_tile(request, work, &tile, row);
        tile = after;
    }
    const Side *value = &request->value;
    if (value->grid == GRID_TOKEN && !value->tile)
        for (int64_t q = 0; q < request->queries; q++)
            for (int64_t c = 0; c < value->size; c++)
                work->out[q * value->wide + c] += work->rest[q * value->groups + (value->groups > 1 ? c / value->group : 0)];
}

typedef struct {
    const Request *request;
    const int64_t *before; /* [rows + 1]: units of the rows before */
    int threads;           /* that were granted */
} Job;

static void part_units(const Job *job, int member, int64_t *start, int64_t *end) {
    Team team = {member, job->threads};
    team_part(&team, job->before[job->request->rows], 1, start, end);
}

static void attention_job(void *data, const Team *team) {
    Job *job = data;
    const Request *request = job->request;
    const int64_t *before = job->before;
    int64_t start, end, row = 0;
    Work work = work_of(request, team->index);
    if (team->index == 0) job->threads = team->count;
    team_part(team, before[request->rows], 1, &start, &end);
    while (row < request->rows && before[row + 1] <= start) row++;
    for (; row < request->rows && before[row] < end; row++) {
        int64_t from = before[row] < start ? start : before[row], until = before[row + 1] < end ? before[row + 1] : end;
        if (from == until) continue;
        attend_part(request, &work, row, from - before[row], until - before[row]);
        if (before[row] >= start && before[row + 1] <= end) finish(request, &work, row);
        else keep_part(request, &work, part_of(request, team->index, before[row] < start));
    }
}

/* Rows that several threads had, at most one fewer than threads; no thread waits for another one's barrier for so little. */
static void join_parts(const Job *job) {
    const Request *request = job->request;
    const int64_t *before = job->before;
    Work work = work_of(request, 0);
    int64_t start, end, row = 0;
    for (int member = 0; member + 1 < job->threads; member++) {
        part_units(job, member, &start, &end);
        while (row < request->rows && before[row + 1] <= end) row++;
        /* The row that the last unit before `end` is not the last of; the first thread that has some of it comes first. */
        if (start == end || row == request->rows || before[row] >= end || before[row] < start) continue;
        begin_row(request, &work, row);
        for (int other = member; other < job->threads; other++) {
            int64_t low, high;
            part_units(job, other, &low, &high);
            if (low >= before[row + 1]) break;
            if (low < high) add_part(request, &work, part_of(request, other, before[row] < low));
        }
        finish(request, &work, row);
    }
}

int64_t attention_memory(const Request *request, int32_t threads) {
    return align64((request->rows + 1) * 8) + threads * thread_bytes(request);
}

void attention_run(const Request *request, int32_t threads) {
    int64_t *before = (int64_t *)request->memory;
    before[0] = 0;
    for (int64_t row = 0; row < request->rows; row++) before[row + 1] = before[row] + units_of(request, row);
    for (int64_t row = 0; row < request->rows; row++)
        if (before[row + 1] == before[row]) {
            memset(request->out + row * request->queries * request->value.size, 0, (size_t)(request->queries * request->value.size) * 4);
            for (int64_t q = 0; q < request->queries; q++) request->lse[row * request->queries + q] = -INFINITY;
        }
    int64_t pages = before[request->rows] * request->unit / PAGE * ((request->queries + QUERIES - 1) / QUERIES);
    if (threads > 1 + pages / FEW_PAGES) threads = (int32_t)(1 + pages / FEW_PAGES);
    Job job = {request, before, 1};
    parallel(attention_job, &job, threads);
    join_parts(&job);
}
