/* Causal attention over keys and values in pages.
 *
 * Queries that share a head of the cache, of several rows of a sequence too, read a page together. Softmax runs page by page (Milakov
 * and Gimelshein, arXiv 1805.02867) through a span of pages; spans begin at fixed positions, whoever computes them, and are put together
 * in their order. So a query's result does not depend on the queries beside it, nor on the number of threads.
 *
 * Tokens of a tree are written one after another, though a branch skips those of its siblings: a query in a tree says where the
 * positions of its branch lie. They are put in order before softmax sees them, so its result is that of its branch alone, bit for bit.
 *
 * Scores may be capped (softcap * tanh(score / softcap), Gemma 2, arXiv 2408.00118), and a head may have a sink: a learned logit that
 * joins its softmax without a value (gpt-oss, arXiv 2508.10925). */
#define SPAN 8         /* pages that are computed in one go */
#define MOST_BLOCK 32  /* queries that read a page together, of one row at least */
#define PARTIALS 4096  /* spans of queries, all together, that wait to be put together */

/* Attention of one layer: every row and head of a step. */
typedef struct {
    Cache cache;
    int64_t rows, heads, window; /* heads: of queries, a multiple of the cache's. window: positions a query sees; 0: all before it */
    int64_t pages_stride;
    const int32_t *sequence;    /* [rows] */
    const int64_t *position;    /* [rows] */
    const int64_t *base, *path; /* [rows]: positions from base[r] on are at slots[path[r]], ...; path NULL or path[r] < 0: in order */
    const int32_t *slots;
    const int32_t *pages;       /* [sequences, pages_stride] */
    const float *query;         /* [rows, heads, head_dim] */
    float *out;                 /* [rows, heads, value_dim] */
    const float *sinks;         /* [heads], or NULL */
    float scale, softcap;       /* of scores; softcap 0: none */
    char *memory;               /* attention_memory bytes, in which spans of one query may be divided among threads; NULL: they are not */
    const Ragged *const *ragged; /* [sequences], each NULL where all heads see the same pages; or NULL */
    int64_t layer;
    const uint8_t *chosen;      /* [rows, heads of the cache, pages_stride]: grids of each page that a row reads, in bits; NULL: all */
} Attention;

int64_t attention_memory(int64_t value_dim) { return PARTIALS * (value_dim + 2) * 4; }

/* Softmax so far of one query: its largest score, the sum of weights beside it, and weighted values. */
typedef struct { float *largest, *total, *out; } Partial;

static void merge_partial(Partial into, float largest, float total, const float *out, int64_t n) {
    float top = largest > *into.largest ? largest : *into.largest;
    if (top == -INFINITY) return; /* nothing was seen */
    float a = exp_fast(*into.largest - top), b = exp_fast(largest - top);
    *into.largest = top, *into.total = *into.total * a + total * b;
    for (int64_t d = 0; d < n; d++) into.out[d] = into.out[d] * a + out[d] * b;
}

/* Rows that are computed together: of one sequence, and all or none of one tree. Queries are row by row. */
typedef struct {
    int64_t first, rows, shared; /* shared: queries of a row */
    HeadPages pages;
} Rows;

static HeadPages pages_of_row(const Attention *a, int64_t r, int head) {
    const int32_t sequence = a->sequence[r];
    return head_pages(a->pages + sequence * a->pages_stride, a->ragged ? a->ragged[sequence] : NULL, a->layer, a->cache.heads, head);
}
/* The positions [row_from, row_at] that a query sees, as its head counts them. */
INLINE int64_t row_at(const Attention *a, const HeadPages *h, int64_t r) { return a->position[r] + h->shift; }
INLINE int64_t row_from(const Attention *a, const HeadPages *h, int64_t r) {
    int64_t at = row_at(a, h, r), from = a->window && at >= a->window ? at + 1 - a->window : 0;
    return h->lead || from > h->from ? from : h->from;
}
INLINE int reads_grids(const Attention *a, int64_t r, int head, int64_t page) { /* in bits */
    return a->chosen ? a->chosen[(r * a->cache.heads + head) * a->pages_stride + page] : (1 << GRIDS) - 1;
}
INLINE int in_tree(const Attention *a, int64_t r) { return a->path && a->path[r] >= 0; }

/* A few queries and one page: what they are and what they become. */
typedef struct {
    const float *query[QUERIES];
    Partial partial[QUERIES];
    int64_t row[QUERIES];
    int count;
} Visit;

/* e^x of x that are not above 0, to 1 ulp; below -87 it is 0. */
INLINE F weights_of(F x) {
    const F most = f_set1(12582912.0f); /* 1.5 * 2^23: the lowest bits of a sum are an integer */
    const Bits given = {.floats = x};
    x = f_max(f_set1(-87.0f), x);
    Bits n = {.floats = f_fma(x, f_set1(1.44269504f), most)}, p;
    F whole = f_add(n.floats, f_set1(-12582912.0f)), f = f_fma(whole, f_set1(2.12194440e-4f), f_fma(whole, f_set1(-0.693359375f), x));
    p.floats = f_fma(f_set1(1.9875691500e-4f), f, f_set1(1.3981999507e-3f));
    p.floats = f_fma(p.floats, f, f_set1(8.3334519073e-3f));
    p.floats = f_fma(p.floats, f, f_set1(4.1665795894e-2f));
    p.floats = f_fma(p.floats, f, f_set1(1.6666665459e-1f));
    p.floats = f_fma(p.floats, f, f_set1(5.0000001201e-1f));
    p.floats = f_fma(p.floats, f_mul(f, f), f_add(f, f_set1(1.0f)));
    p.words += n.words << 23;
    p.words &= ~(Words)(given.values < -87.0f); /* what is no number stays so */
    return p.floats;
}

/* Weights of a page's scores, in place of them: [first, last) are positions that the query sees, one at least. Returns what is kept of sums
 * so far. What is no number makes the weights none. */
static float page_softmax(const Attention *a, float *score, int first, int last, Partial partial) {
    enum { SIZE = PAGE / LANES };
    F x[SIZE], sum[16 / LANES], most = f_set1(*partial.largest), scale = f_set1(a->scale);
    if (a->softcap > 0.0f)
        for (int p = 0; p < PAGE; p++) score[p] = a->softcap * tanh_fast(score[p] * a->scale / a->softcap);
    if (first > 0 || last < PAGE) /* what a query does not see weighs nothing; stale memory may hold anything */
        for (int p = 0; p < PAGE; p++) score[p] = p >= first && p < last ? score[p] : -INFINITY;
    UNROLL for (int i = 0; i < SIZE; i++) {
        x[i] = f_load(score + i * LANES);
        if (!(a->softcap > 0.0f)) x[i] = f_mul(x[i], scale);
        most = f_max(x[i], most);
    }
    float top = f_reduce_max(most), before = *partial.largest;
    if (top == -INFINITY) top = 0.0f;
    UNROLL for (int v = 0; v < 16 / LANES; v++) sum[v] = f_zero();
    UNROLL for (int i = 0; i < SIZE; i++) {
        x[i] = weights_of(f_add(x[i], f_set1(-top)));
        sum[i % (16 / LANES)] = f_add(sum[i % (16 / LANES)], x[i]);
        f_store(score + i * LANES, x[i]);
    }
    float keep = before == top ? 1.0f : exp_fast(before - top);
    *partial.largest = top;
    *partial.total = *partial.total * keep + f_sum(LANES == 16 ? sum[0] : f_add(sum[0], sum[16 / LANES - 1]));
    return keep;
}

/* Scores of positions [page * PAGE, end), of which the branch of the row has some elsewhere; and their values, in order. */
static void branch_scores(const Attention *a, const Rows *b, int64_t page, int64_t end, const Visit *t, const Factors *query, Factors *score, char *values) {
    const Cache *cache = &a->cache;
    int64_t r = t->row[0], base = a->base[r] + b->pages.shift, row = cache->value_dim * element_bytes(cache->type);
    const int32_t *slots = a->slots + a->path[r];
    float there[QUERIES][PAGE], *into[QUERIES];
    for (int q = 0; q < t->count; q++) into[q] = there[q];
    for (int64_t p = page * PAGE, held = -1; p < end && p < (page + 1) * PAGE; p++) {
        int64_t slot = p < base ? p : slots[p - base] + b->pages.shift, block = block_of(cache, &b->pages, slot / PAGE, 0);
        if (block != held) { /* a branch goes forward in memory: each page once */
            held = block;
            Matrix keys = plain_keys(cache, block, block);
            page_product(&keys, 0, PAGE, 0, cache->head_dim, t->count, query, NULL, into);
        }
        for (int q = 0; q < t->count; q++) score[q][p % PAGE] = there[q][slot % PAGE];
        memcpy(values + p % PAGE * row, plain_values(cache, block, block).data + slot % PAGE * row, (size_t)row);
    }
}

/* One page: as it is stored or plain, or of a branch. */
static void attend_page(const Attention *a, const Rows *b, int64_t page, int stored, int branch, const Visit *t) {
    const Cache *cache = &a->cache;
    const HeadPages *h = &b->pages;
    const int64_t at = row_at(a, h, t->row[0]), pages = at / PAGE + 1;
    int64_t following = page + 1;
    while (following < pages && !reads_grids(a, t->row[0], h->head, following)) following++;
    const int64_t here = block_of(cache, h, page, stored), next = following < pages ? block_of(cache, h, following, stored) : here;
    char ordered[branch ? PAGE * cache->value_dim * 4 : 1];
    Factors factors[QUERIES], score[QUERIES];
    const Factors *query = (const Factors *)factors;
    float keep[QUERIES], *scores[QUERIES], *out[QUERIES];
    int first = PAGE, last = 0, begin[QUERIES], end[QUERIES]; /* positions that a query sees */
    int64_t seen_from, seen_until;
    seen_of_page(h, page, &seen_from, &seen_until);
    for (int q = 0; q < t->count; q++) {
        int64_t from = row_from(a, h, t->row[q]) - page * PAGE, until = row_at(a, h, t->row[q]) + 1 - page * PAGE;
        int grids = reads_grids(a, t->row[q], h->head, page);
        begin[q] = !(grids & 1) ? GRID : (int)(from > seen_from ? from : seen_from);
        end[q] = !(grids & 2) ? GRID : (int)(until < seen_until ? until : seen_until);
        first = begin[q] < first ? begin[q] : first, last = end[q] > last ? end[q] : last;
        scores[q] = score[q], out[q] = t->partial[q].out;
        memcpy(factors[q], t->query[q], (size_t)cache->head_dim * 4);
    }
    const int shift = following < pages ? (reads_grids(a, t->row[0], h->head, following) & 1 ? 0 : GRID) - first / GRID * GRID : 0;
    if (branch) branch_scores(a, b, page, at + 1, t, query, score, ordered);
    else if (stored) stored_scores(cache, here, next, first / GRID, (last + GRID - 1) / GRID, shift, t->count, query, scores);
    else {
        Matrix keys = plain_keys(cache, here, next);
        shift_next(&keys, shift);
        page_product(&keys, first / GRID * GRID, (last + GRID - 1) / GRID * GRID, 0, cache->head_dim, t->count, query, NULL, scores);
    }
    for (int q = 0; q < t->count; q++) keep[q] = page_softmax(a, score[q], begin[q], end[q], t->partial[q]);
    if (stored) stored_values(cache, here, next, first, last, shift, t->count, (const Factors *)score, keep, out);
    else {
        Matrix values = plain_values(cache, here, next);
        shift_next(&values, shift * cache->value_dim);
        if (branch) values.data = ordered;
        page_product(&values, 0, cache->value_dim, first, last, t->count, (const Factors *)score, keep, out);
    }
}

/* One span of a block's queries; `partial` [queries] are as before any page. */
static void attend_span(const Attention *a, const Rows *b, int64_t span, const Partial *partial) {
    const HeadPages *h = &b->pages;
    int64_t end = 0, width = a->cache.head_dim;
    for (int64_t r = b->first; r < b->first + b->rows; r++) end = row_at(a, h, r) + 1 > end ? row_at(a, h, r) + 1 : end;
    for (int64_t page = span * SPAN; page < (span + 1) * SPAN && page * PAGE < end; page++) {
        if (!sees_page(h, page)) continue;
        Visit visit[2] = {{.count = 0}, {.count = 0}}; /* of the page as it is stored, and plain */
        for (int64_t r = b->first; r < b->first + b->rows; r++) {
            int64_t at = row_at(a, h, r);
            if (at < page * PAGE || row_from(a, h, r) >= (page + 1) * PAGE || !reads_grids(a, r, h->head, page)) continue;
            int stored = sees_stored(&a->cache, page, at), branch = in_tree(a, r) && a->base[r] + h->shift < (page + 1) * PAGE;
            Visit own = {.count = 0}, *t = branch ? &own : &visit[stored];
            for (int64_t q = 0; q < b->shared; q++) {
                t->query[t->count] = a->query + (r * a->heads + h->head * b->shared + q) * width;
                t->partial[t->count] = partial[(r - b->first) * b->shared + q];
                t->row[t->count++] = r;
                if (t->count == QUERIES || (branch && q + 1 == b->shared)) {
                    attend_page(a, b, page, branch ? 0 : stored, branch, t);
                    t->count = 0;
                }
            }
        }
        for (int stored = 0; stored < 2; stored++)
            if (visit[stored].count) attend_page(a, b, page, stored, 0, &visit[stored]);
    }
}

/* Where blocks begin, [blocks + 1]; returns how many they are. */
static int64_t find_blocks(const Attention *a, int64_t most, int32_t *start) {
    int64_t count = 0;
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t own = count ? start[count - 1] : 0;
        int same = count && r - own < most && a->sequence[r] == a->sequence[own] && in_tree(a, r) == in_tree(a, own);
        if (!same) start[count++] = (int32_t)r;
    }
    start[count] = (int32_t)a->rows;
    return count;
}

static void start_partial(Partial p, float sink, int64_t n) {
    *p.largest = sink, *p.total = sink > -INFINITY ? 1.0f : 0.0f;
    memset(p.out, 0, (size_t)n * 4);
}

static void finish_partial(const Attention *a, int64_t at, Partial p) {
    float inverse = 1.0f / *p.total;
    for (int64_t d = 0; d < a->cache.value_dim; d++) a->out[at * a->cache.value_dim + d] = p.out[d] * inverse;
}

/* All spans of a block, one after another. */
static void attend_block(const Attention *a, const Rows *b) {
    const HeadPages *h = &b->pages;
    int64_t n = a->cache.value_dim, count = b->rows * b->shared, first = row_at(a, h, b->first), last = 0;
    float numbers[2][count][2], outs[2][count][n];
    Partial partial[2][count];
    for (int64_t r = b->first; r < b->first + b->rows; r++) {
        first = row_from(a, h, r) < first ? row_from(a, h, r) : first;
        last = row_at(a, h, r) > last ? row_at(a, h, r) : last;
    }
    for (int64_t q = 0; q < count; q++) {
        for (int i = 0; i < 2; i++) partial[i][q] = (Partial){&numbers[i][q][0], &numbers[i][q][1], outs[i][q]};
        start_partial(partial[0][q], a->sinks ? a->sinks[h->head * b->shared + q % b->shared] : -INFINITY, n);
    }
    for (int64_t span = first / (SPAN * PAGE); span * SPAN * PAGE <= last; span++) {
        for (int64_t q = 0; q < count; q++) start_partial(partial[1][q], -INFINITY, n);
        attend_span(a, b, span, partial[1]);
        for (int64_t q = 0; q < count; q++) merge_partial(partial[0][q], *partial[1][q].largest, *partial[1][q].total, partial[1][q].out, n);
    }
    for (int64_t q = 0; q < count; q++) finish_partial(a, (b->first + q / b->shared) * a->heads + h->head * b->shared + q % b->shared, partial[0][q]);
}

INLINE Partial waiting(const Attention *a, int64_t index) { /* a partial in a->memory */
    float *at = (float *)a->memory + index * (a->cache.value_dim + 2);
    return (Partial){at, at + 1, at + 2};
}

/* Pages that a unit of work reads: of a block one span, or with `whole` all. */
static int64_t unit_pages(const Attention *a, const Rows *b, int64_t span, int whole) {
    const HeadPages *h = &b->pages;
    int64_t first = row_at(a, h, b->first), last = 0;
    for (int64_t r = b->first; r < b->first + b->rows; r++) {
        first = row_from(a, h, r) < first ? row_from(a, h, r) : first;
        last = row_at(a, h, r) > last ? row_at(a, h, r) : last;
    }
    int64_t begin = first / PAGE, end = last / PAGE + 1;
    if (!whole) begin = begin > span * SPAN ? begin : span * SPAN, end = end < (span + 1) * SPAN ? end : (span + 1) * SPAN;
    return end > begin ? end - begin : 0;
}

/* This member's share, by pages that are read; all rows are whole when all members have left, and a barrier passed. */
static void attention_part(const Attention *a, const Team *team) {
    int64_t shared = a->heads / a->cache.heads, spans = 0, pages = 0, before = 0;
    int32_t first[a->rows + 1];
    int64_t blocks = find_blocks(a, MOST_BLOCK > shared ? MOST_BLOCK / shared : 1, first);
    for (int64_t r = 0; r < a->rows; r++)
        for (int head = 0; head < (a->ragged && a->ragged[a->sequence[r]] ? a->cache.heads : 1); head++) {
            const HeadPages h = pages_of_row(a, r, head);
            spans = row_at(a, &h, r) / (SPAN * PAGE) >= spans ? row_at(a, &h, r) / (SPAN * PAGE) + 1 : spans;
        }
    const int divided = a->memory && team->count > 1 && spans > 1 && a->rows * a->heads * spans <= PARTIALS;
    const int64_t pieces = divided ? spans : 1, units = blocks * a->cache.heads * pieces;
    for (int adds = team->count > 1; adds >= 0; adds--) /* how many there are; then those of this member */
        for (int64_t unit = 0; unit < units; unit++) {    /* neighbours in time share a head's pages */
            int64_t head = unit / (blocks * pieces), at = unit / pieces % blocks, span = unit % pieces, r = first[at];
            Rows b = {r, first[at + 1] - r, shared, pages_of_row(a, r, (int)head)};
            int64_t own = team->count > 1 ? unit_pages(a, &b, span, !divided) : 0;
            if (adds) {
                pages += own;
                continue;
            }
            const int64_t middle = 2 * before + own;
            before += own;
            if (team->count > 1 && (own ? middle * team->count / (2 * pages) : 0) != team->index) continue;
            if (!divided) {
                attend_block(a, &b);
                continue;
            }
            Partial partial[b.rows * shared];
            for (int64_t q = 0; q < b.rows * shared; q++) {
                partial[q] = waiting(a, ((r + q / shared) * a->heads + head * shared + q % shared) * spans + span);
                start_partial(partial[q], -INFINITY, a->cache.value_dim);
            }
            attend_span(a, &b, span, partial);
        }
    if (!divided) return;
    team_barrier(team);
    int64_t start, end;
    team_part(team, a->rows * a->heads, 1, &start, &end);
    for (int64_t at = start; at < end; at++) {
        float numbers[2], out[a->cache.value_dim];
        Partial whole = {numbers, numbers + 1, out};
        start_partial(whole, a->sinks ? a->sinks[at % a->heads] : -INFINITY, a->cache.value_dim);
        int64_t r = at / a->heads;
        const HeadPages h = pages_of_row(a, r, (int)(at % a->heads / shared));
        for (int64_t span = row_from(a, &h, r) / (SPAN * PAGE); span * SPAN * PAGE <= row_at(a, &h, r); span++) {
            Partial part = waiting(a, at * spans + span);
            merge_partial(whole, *part.largest, *part.total, part.out, a->cache.value_dim);
        }
        finish_partial(a, at, whole);
    }
}
/* Adds to `sums` [slots] the weights that all rows, of one sequence in order, give to its tokens in a head of the cache, one query after
 * another: their sum does not depend on what comes together. All see pages as the last of them does, from position `hidden` on.
 * `score`: [MOST_BLOCK, slots]. */
static void attention_received(const Attention *a, const HeadPages *h, int64_t hidden, int64_t slots, float *score, float *sums) {
    const int64_t shared = a->heads / a->cache.heads, all = a->rows * shared, width = a->cache.head_dim;
    for (int64_t first = 0; first < all; first += MOST_BLOCK) {
        const int64_t count = all - first < MOST_BLOCK ? all - first : MOST_BLOCK, end = row_at(a, h, (first + count - 1) / shared) + 1;
        for (int64_t page = 0; page * PAGE < end; page++) {
            if (!sees_page(h, page) || (page + 1) * PAGE <= hidden) {
                for (int64_t q = 0; q < count; q++)
                    for (int p = 0; p < PAGE; p++) score[q * slots + page * PAGE + p] = -INFINITY;
                continue;
            }
            const int stored = sees_stored(&a->cache, page, row_at(a, h, a->rows - 1));
            const int64_t here = block_of(&a->cache, h, page, stored);
            const int64_t next = (page + 1) * PAGE < end ? block_of(&a->cache, h, page + 1, stored) : here;
            for (int64_t q = 0, n; q < count; q += n) {
                Factors query[QUERIES];
                float *into[QUERIES];
                for (n = 0; n < QUERIES && q + n < count; n++) {
                    int64_t at = first + q + n;
                    memcpy(query[n], a->query + (at / shared * a->heads + h->head * shared + at % shared) * width, (size_t)width * 4);
                    into[n] = score + (q + n) * slots + page * PAGE;
                }
                if (stored) stored_scores(&a->cache, here, next, 0, GRIDS, 0, (int)n, (const Factors *)query, into);
                else {
                    Matrix keys = plain_keys(&a->cache, here, next);
                    page_product(&keys, 0, PAGE, 0, (int)width, (int)n, (const Factors *)query, NULL, into);
                }
                int64_t begin, until;
                seen_of_page(h, page, &begin, &until);
                begin = hidden - page * PAGE > begin ? hidden - page * PAGE : begin;
                for (int64_t i = 0; i < n && until - begin < PAGE; i++)
                    for (int64_t p = 0; p < PAGE; p++) into[i][p] = p >= begin && p < until ? into[i][p] : -INFINITY;
            }
        }
        for (int64_t q = 0; q < count; q++) {
            const int64_t seen = row_at(a, h, (first + q) / shared) + 1, pages = (seen + PAGE - 1) / PAGE;
            if (seen <= 0) continue; /* all that it could look at is gone */
            float *weight = score + q * slots, sink = a->sinks ? a->sinks[h->head * shared + (first + q) % shared] : -INFINITY;
            F sum[16 / LANES], most = f_set1(sink), scale = f_set1(a->softcap > 0.0f ? 1.0f : a->scale);
            for (int64_t p = 0; a->softcap > 0.0f && p < seen; p++)
                if (weight[p] > -INFINITY) weight[p] = a->softcap * tanh_fast(weight[p] * a->scale / a->softcap);
            for (int64_t p = seen; p < pages * PAGE; p++) weight[p] = -INFINITY;
            for (int64_t p = 0; p < pages * PAGE; p += LANES) {
                F x = f_mul(f_load(weight + p), scale);
                most = f_max(x, most);
                f_store(weight + p, x);
            }
            const float top = f_reduce_max(most);
            if (top == -INFINITY) continue; /* it sees nothing */
            UNROLL for (int v = 0; v < 16 / LANES; v++) sum[v] = f_zero();
            for (int64_t p = 0; p < pages * PAGE; p += LANES) {
                F x = weights_of(f_add(f_load(weight + p), f_set1(-top)));
                sum[p / LANES % (16 / LANES)] = f_add(sum[p / LANES % (16 / LANES)], x);
                f_store(weight + p, x);
            }
            float total = f_sum(LANES == 16 ? sum[0] : f_add(sum[0], sum[16 / LANES - 1]));
            if (a->sinks) total += exp_fast(sink - top);
            const F inverse = f_set1(1.0f / total);
            for (int64_t p = 0; p < pages * PAGE; p += LANES) f_store(sums + p, f_fma(f_load(weight + p), inverse, f_load(sums + p)));
        }
    }
}

static void attention_job(void *p, const Team *team) { attention_part(p, team); }
void attention(const Attention *a, int32_t threads) { parallel(attention_job, (void *)a, threads); }
