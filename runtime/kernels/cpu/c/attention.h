/* Causal attention over keys and values in pages.
 *
 * A page holds, for each head of the cache, keys transposed [head_dim, PAGE] (so that a vector is several positions) and values
 * [PAGE, value_dim], all of one float type. Softmax runs page by page (Milakov and Gimelshein, arXiv 1805.02867), from the first
 * page on, so a query's result does not depend on the queries beside it.
 *
 * Tokens of a tree are written one after another, though a branch skips those of its siblings: a query in a tree says where the
 * positions of its branch lie. They are put in order before softmax sees them, so its result is that of its branch alone, bit for bit.
 *
 * Scores may be capped (softcap * tanh(score / softcap), Gemma 2, arXiv 2408.00118), and a head may have a sink: a learned logit that
 * joins its softmax without a value (gpt-oss, arXiv 2508.10925). */
#define PAGE 64
#define QUERIES 4 /* computed together: they share every load of keys and values */

typedef struct {
    const char *key, *value; /* of this layer: [pages, heads, head_dim, PAGE], [pages, heads, PAGE, value_dim] */
    int32_t type, heads, head_dim, value_dim;
} Cache;

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
} Attention;

/* Positions from `base` on are at slots[0], slots[1], ...; those before are at their own place. */
typedef struct {
    int64_t base;
    const int32_t *slots;
} Branch;

/* Of the queries that are computed together. */
typedef struct {
    const float *query[QUERIES];
    float *out[QUERIES];
    int64_t from[QUERIES], until[QUERIES]; /* query q sees positions [from[q], until[q]) */
    float sink[QUERIES];                   /* -INFINITY: none */
} Queries;

INLINE int64_t element_bytes(int type) { return type == TYPE_F32 ? 4 : 2; }

/* score [count, PAGE] = query . keys of a page */
INLINE void page_scores(const void *key, const int type, const int count, const float *const *query, int head_dim, float scale, float softcap,
                        float score[QUERIES][PAGE]) {
    for (int first = 0; first < PAGE; first += 2 * LANES) {
        F sum[QUERIES][2];
        UNROLL for (int q = 0; q < count; q++) sum[q][0] = sum[q][1] = f_zero();
        for (int d = 0; d < head_dim; d++) {
            F k0 = f_load_as(key, type, (int64_t)d * PAGE + first), k1 = f_load_as(key, type, (int64_t)d * PAGE + first + LANES);
            UNROLL for (int q = 0; q < count; q++) {
                F x = f_set1(query[q][d]);
                sum[q][0] = f_fma(x, k0, sum[q][0]);
                sum[q][1] = f_fma(x, k1, sum[q][1]);
            }
        }
        UNROLL for (int q = 0; q < count; q++) {
            f_store(score[q] + first, f_mul(sum[q][0], f_set1(scale)));
            f_store(score[q] + first + LANES, f_mul(sum[q][1], f_set1(scale)));
        }
    }
    if (softcap > 0.0f) /* tanh x = 1 - 2 / (e^2x + 1) */
        for (int q = 0; q < count; q++)
            for (int p = 0; p < PAGE; p++) score[q][p] = softcap * (1.0f - 2.0f / (exp_fast(score[q][p] * (2.0f / softcap)) + 1.0f));
}

/* out [count, value_dim] = out * keep + weight [count, PAGE] . values of a page, positions [first, last) */
INLINE void page_values(const void *value, const int type, const int count, float weight[QUERIES][PAGE], const float *keep, int first,
                        int last, int value_dim, float *const *out) {
    int d = 0;
    for (; d + 2 * LANES <= value_dim; d += 2 * LANES) {
        F sum[QUERIES][2];
        UNROLL for (int q = 0; q < count; q++) UNROLL for (int i = 0; i < 2; i++)
            sum[q][i] = f_mul(f_load(out[q] + d + i * LANES), f_set1(keep[q]));
        for (int p = first; p < last; p++) {
            F v0 = f_load_as(value, type, (int64_t)p * value_dim + d), v1 = f_load_as(value, type, (int64_t)p * value_dim + d + LANES);
            UNROLL for (int q = 0; q < count; q++) {
                F w = f_set1(weight[q][p]);
                sum[q][0] = f_fma(w, v0, sum[q][0]);
                sum[q][1] = f_fma(w, v1, sum[q][1]);
            }
        }
        UNROLL for (int q = 0; q < count; q++) UNROLL for (int i = 0; i < 2; i++) f_store(out[q] + d + i * LANES, sum[q][i]);
    }
    for (; d < value_dim; d++) /* heads that are no multiple of two vectors */
        for (int q = 0; q < count; q++) {
            float sum = out[q][d] * keep[q];
            for (int p = first; p < last; p++) sum = fmaf(weight[q][p], load_as(value, type, (int64_t)p * value_dim + d), sum);
            out[q][d] = sum;
        }
}

/* As page_scores, for positions [page * PAGE, end) of which the branch has some elsewhere. */
INLINE void branch_scores(const Attention *a, const int type, int head, const int32_t *pages, const Branch *branch, int64_t page, int64_t end,
                          const int count, const float *const *query, float score[QUERIES][PAGE]) {
    const Cache *cache = &a->cache;
    float there[QUERIES][PAGE];
    int64_t size = (int64_t)cache->head_dim * PAGE * element_bytes(type), base = branch->base;
    int64_t first = base > page * PAGE ? base : page * PAGE, last = end < (page + 1) * PAGE ? end : (page + 1) * PAGE;
    if (first > page * PAGE)
        page_scores(cache->key + ((int64_t)pages[page] * cache->heads + head) * size, type, count, query, cache->head_dim, a->scale, a->softcap, score);
    for (int64_t p = first, held = -1; p < last; p++) {
        int64_t slot = branch->slots[p - base];
        if (slot / PAGE != held) {
            held = slot / PAGE; /* a branch goes forward in memory: each page once */
            page_scores(cache->key + ((int64_t)pages[held] * cache->heads + head) * size, type, count, query, cache->head_dim, a->scale, a->softcap, there);
        }
        UNROLL for (int q = 0; q < count; q++) score[q][p - page * PAGE] = there[q][slot % PAGE];
    }
}

/* The values of positions [page * PAGE, end), in order. */
INLINE void branch_values(const Cache *cache, const int type, int head, const int32_t *pages, const Branch *branch, int64_t page, int64_t end,
                          char *out) {
    int64_t row = cache->value_dim * element_bytes(type);
    for (int64_t p = page * PAGE; p < end && p < (page + 1) * PAGE; p++) {
        int64_t slot = p < branch->base ? p : branch->slots[p - branch->base];
        memcpy(out + p % PAGE * row, cache->value + (((int64_t)pages[slot / PAGE] * cache->heads + head) * PAGE + slot % PAGE) * row, (size_t)row);
    }
}

/* `count` queries of one head of the cache. */
INLINE void attend_tile(const Attention *a, const int type, int head, const int32_t *pages, const int count, const Queries *t, const Branch *branch) {
    const Cache *cache = &a->cache;
    char ordered[branch ? PAGE * cache->value_dim * 4 : 1];
    float largest[QUERIES], total[QUERIES], keep[QUERIES], score[QUERIES][PAGE];
    int64_t begin = t->from[0], end = t->until[0], bytes = PAGE * element_bytes(type);
    for (int q = 0; q < count; q++) {
        largest[q] = t->sink[q], total[q] = t->sink[q] > -INFINITY ? 1.0f : 0.0f;
        memset(t->out[q], 0, (size_t)cache->value_dim * 4);
        begin = t->from[q] < begin ? t->from[q] : begin, end = t->until[q] > end ? t->until[q] : end;
    }
    for (int64_t page = begin / PAGE; page * PAGE < end; page++) {
        int64_t at = (int64_t)pages[page] * cache->heads + head;
        const char *value = cache->value + at * cache->value_dim * bytes;
        if (branch && branch->base < (page + 1) * PAGE) {
            branch_scores(a, type, head, pages, branch, page, end, count, t->query, score);
            branch_values(cache, type, head, pages, branch, page, end, ordered);
            value = ordered;
        } else
            page_scores(cache->key + at * cache->head_dim * bytes, type, count, t->query, cache->head_dim, a->scale, a->softcap, score);
        int first = (int)(begin > page * PAGE ? begin - page * PAGE : 0), last = (int)(end - page * PAGE < PAGE ? end - page * PAGE : PAGE);
        for (int q = 0; q < count; q++) {
            float top = largest[q], sum = 0.0f;
            for (int p = 0; p < PAGE; p++) { /* what a query does not see weighs nothing; stale memory may hold anything */
                int64_t position = page * PAGE + p;
                score[q][p] = position >= t->from[q] && position < t->until[q] ? score[q][p] : -INFINITY;
            }
            for (int p = 0; p < PAGE; p++) top = score[q][p] > top || score[q][p] != score[q][p] ? score[q][p] : top;
            if (top == -INFINITY) { /* nothing of this page */
                keep[q] = 1.0f;
                memset(score[q], 0, sizeof score[q]);
                continue;
            }
            keep[q] = exp_fast(largest[q] - top);
            float lane[16] = {0};
            for (int p = 0; p < PAGE; p += 16)
                for (int j = 0; j < 16; j++) {
                    score[q][p + j] = exp_fast(score[q][p + j] - top);
                    lane[j] += score[q][p + j];
                }
            for (int step = 8; step; step >>= 1)
                for (int j = 0; j < step; j++) lane[j] += lane[j + step];
            sum = lane[0];
            largest[q] = top, total[q] = total[q] * keep[q] + sum;
        }
        page_values(value, type, count, score, keep, first, last, cache->value_dim, t->out);
    }
    for (int q = 0; q < count; q++) {
        float inverse = 1.0f / total[q];
        for (int d = 0; d < cache->value_dim; d++) t->out[q][d] *= inverse;
    }
}

INLINE void attend_typed(const Attention *a, const int type, int head, const int32_t *pages, int count, const Queries *t, const Branch *branch) {
    if (count == QUERIES) attend_tile(a, type, head, pages, QUERIES, t, branch);
    else
        for (int q = 0; q < count; q++) {
            Queries one = {{t->query[q]}, {t->out[q]}, {t->from[q]}, {t->until[q]}, {t->sink[q]}};
            attend_tile(a, type, head, pages, 1, &one, branch);
        }
}

static void attend(const Attention *a, int head, const int32_t *pages, int count, const Queries *t, const Branch *branch) {
    if (a->cache.type == TYPE_BF16) attend_typed(a, TYPE_BF16, head, pages, count, t, branch);
    else if (a->cache.type == TYPE_F16) attend_typed(a, TYPE_F16, head, pages, count, t, branch);
    else attend_typed(a, TYPE_F32, head, pages, count, t, branch);
}

/* This member's share. Heads that share keys are computed together. */
static void attention_part(const Attention *a, const Team *team) {
    int64_t start, end, shared = a->heads / a->cache.heads;
    team_part(team, a->rows * a->cache.heads, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        int64_t head = unit / a->rows, r = unit % a->rows; /* neighbours in time share a head's pages */
        Branch branch;
        int branches = a->path && a->path[r] >= 0;
        if (branches) branch = (Branch){a->base[r], a->slots + a->path[r]};
        for (int64_t first = 0; first < shared; first += QUERIES) {
            int count = (int)(shared - first < QUERIES ? shared - first : QUERIES);
            Queries t;
            for (int q = 0; q < count; q++) {
                int64_t h = head * shared + first + q;
                t.query[q] = a->query + (r * a->heads + h) * a->cache.head_dim;
                t.out[q] = a->out + (r * a->heads + h) * a->cache.value_dim;
                t.until[q] = a->position[r] + 1;
                t.from[q] = a->window && t.until[q] > a->window ? t.until[q] - a->window : 0;
                t.sink[q] = a->sinks ? a->sinks[h] : -INFINITY;
            }
            attend(a, (int)head, a->pages + a->sequence[r] * a->pages_stride, count, &t, branches ? &branch : NULL);
        }
    }
}
static void attention_job(void *p, const Team *team) { attention_part(p, team); }
void attention(const Attention *a, int32_t threads) { parallel(attention_job, (void *)a, threads); }

static void cache_write(const Cache *cache, int head, int32_t page, int slot, const float *key, const float *value) {
    int64_t at = ((int64_t)page * cache->heads + head) * PAGE;
    for (int d = 0; d < cache->head_dim; d++) store_as((void *)cache->key, cache->type, at * cache->head_dim + (int64_t)d * PAGE + slot, key[d]);
    for (int d = 0; d < cache->value_dim; d++) store_as((void *)cache->value, cache->type, (at + slot) * cache->value_dim + d, value[d]);
}

/* The keys and values of slot `from` also to slot `to`. */
static void cache_copy(const Cache *cache, const int32_t *pages, int64_t from, int64_t to) {
    int64_t bytes = element_bytes(cache->type), row = cache->value_dim * bytes, size = PAGE * bytes;
    for (int head = 0; head < cache->heads; head++) {
        int64_t source = ((int64_t)pages[from / PAGE] * cache->heads + head) * size, target = ((int64_t)pages[to / PAGE] * cache->heads + head) * size;
        char *key = (char *)cache->key + target * cache->head_dim + to % PAGE * bytes;
        const char *old = cache->key + source * cache->head_dim + from % PAGE * bytes;
        for (int d = 0; d < cache->head_dim; d++) memcpy(key + d * size, old + d * size, (size_t)bytes);
        memcpy((char *)cache->value + target * cache->value_dim + to % PAGE * row, cache->value + source * cache->value_dim + from % PAGE * row, (size_t)row);
    }
}
