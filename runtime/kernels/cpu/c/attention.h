/* Causal attention over keys and values in pages.
 *
 * A page holds, for each head of the cache, keys transposed [head_dim, PAGE] (so that a vector is several positions) and values
 * [PAGE, head_dim], all of one float type. Softmax runs page by page (Milakov and Gimelshein, arXiv 1805.02867), from the first
 * page on, so a query's result does not depend on the queries beside it.
 *
 * Tokens of a tree are written one after another, though a branch skips those of its siblings: a query in a tree says where the
 * positions of its branch lie. They are put in order before softmax sees them, so its result is that of its branch alone, bit for bit. */
#define PAGE 64
#define QUERIES 4 /* computed together: they share every load of keys and values */

typedef struct {
    const char *key, *value; /* of this layer: [pages, heads, head_dim, PAGE], [pages, heads, PAGE, head_dim] */
    int32_t type, heads, head_dim;
} Cache;

/* Positions from `base` on are at slots[0], slots[1], ...; those before are at their own place. */
typedef struct {
    int64_t base;
    const int32_t *slots;
} Branch;

INLINE int64_t element_bytes(int type) { return type == TYPE_F32 ? 4 : 2; }

/* score [count, PAGE] = query . keys of a page */
INLINE void page_scores(const void *key, const int type, const int count, const float *const *query, int head_dim, float scale,
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
}

/* out [count, head_dim] = out * keep + weight [count, PAGE] . values of a page, positions [first, last) */
INLINE void page_values(const void *value, const int type, const int count, float weight[QUERIES][PAGE], const float *keep, int first,
                        int last, int head_dim, float *const *out) {
    int d = 0;
    for (; d + 2 * LANES <= head_dim; d += 2 * LANES) {
        F sum[QUERIES][2];
        UNROLL for (int q = 0; q < count; q++) UNROLL for (int i = 0; i < 2; i++)
            sum[q][i] = f_mul(f_load(out[q] + d + i * LANES), f_set1(keep[q]));
        for (int p = first; p < last; p++) {
            F v0 = f_load_as(value, type, (int64_t)p * head_dim + d), v1 = f_load_as(value, type, (int64_t)p * head_dim + d + LANES);
            UNROLL for (int q = 0; q < count; q++) {
                F w = f_set1(weight[q][p]);
                sum[q][0] = f_fma(w, v0, sum[q][0]);
                sum[q][1] = f_fma(w, v1, sum[q][1]);
            }
        }
        UNROLL for (int q = 0; q < count; q++) UNROLL for (int i = 0; i < 2; i++) f_store(out[q] + d + i * LANES, sum[q][i]);
    }
    for (; d < head_dim; d++) /* heads that are no multiple of two vectors */
        for (int q = 0; q < count; q++) {
            float sum = out[q][d] * keep[q];
            for (int p = first; p < last; p++) sum = fmaf(weight[q][p], load_as(value, type, (int64_t)p * head_dim + d), sum);
            out[q][d] = sum;
        }
}

/* As page_scores, for positions [page * PAGE, end) of which the branch has some elsewhere. */
INLINE void branch_scores(const Cache *cache, const int type, int head, const int32_t *pages, const Branch *branch, int64_t page, int64_t end,
                          const int count, const float *const *query, float scale, float score[QUERIES][PAGE]) {
    float there[QUERIES][PAGE];
    int64_t size = (int64_t)cache->head_dim * PAGE * element_bytes(type), base = branch->base;
    int64_t first = base > page * PAGE ? base : page * PAGE, last = end < (page + 1) * PAGE ? end : (page + 1) * PAGE;
    if (first > page * PAGE) page_scores(cache->key + ((int64_t)pages[page] * cache->heads + head) * size, type, count, query, cache->head_dim, scale, score);
    for (int64_t p = first, held = -1; p < last; p++) {
        int64_t slot = branch->slots[p - base];
        if (slot / PAGE != held) {
            held = slot / PAGE; /* a branch goes forward in memory: each page once */
            page_scores(cache->key + ((int64_t)pages[held] * cache->heads + head) * size, type, count, query, cache->head_dim, scale, there);
        }
        UNROLL for (int q = 0; q < count; q++) score[q][p - page * PAGE] = there[q][slot % PAGE];
    }
}

/* The values of positions [page * PAGE, end), in order. */
INLINE void branch_values(const Cache *cache, const int type, int head, const int32_t *pages, const Branch *branch, int64_t page, int64_t end,
                          char *out) {
    int64_t row = cache->head_dim * element_bytes(type);
    for (int64_t p = page * PAGE; p < end && p < (page + 1) * PAGE; p++) {
        int64_t slot = p < branch->base ? p : branch->slots[p - branch->base];
        memcpy(out + p % PAGE * row, cache->value + (((int64_t)pages[slot / PAGE] * cache->heads + head) * PAGE + slot % PAGE) * row, (size_t)row);
    }
}

/* `count` queries of one head of the cache. Query q sees positions [from[q], until[q]); out[q] gets head_dim numbers. */
INLINE void attend_tile(const Cache *cache, const int type, int head, const int32_t *pages, const int count, const float *const *query,
                        const int64_t *from, const int64_t *until, const Branch *branch, float scale, float *const *out) {
    char ordered[branch ? PAGE * cache->head_dim * 4 : 1];
    float largest[QUERIES], total[QUERIES], keep[QUERIES], score[QUERIES][PAGE];
    int64_t begin = from[0], end = until[0], size = (int64_t)cache->head_dim * PAGE * element_bytes(type);
    for (int q = 0; q < count; q++) {
        largest[q] = -INFINITY, total[q] = 0.0f;
        memset(out[q], 0, (size_t)cache->head_dim * 4);
        begin = from[q] < begin ? from[q] : begin, end = until[q] > end ? until[q] : end;
    }
    for (int64_t page = begin / PAGE; page * PAGE < end; page++) {
        int64_t at = ((int64_t)pages[page] * cache->heads + head) * size;
        const char *value = cache->value + at;
        if (branch && branch->base < (page + 1) * PAGE) {
            branch_scores(cache, type, head, pages, branch, page, end, count, query, scale, score);
            branch_values(cache, type, head, pages, branch, page, end, ordered);
            value = ordered;
        } else
            page_scores(cache->key + at, type, count, query, cache->head_dim, scale, score);
        int first = (int)(begin > page * PAGE ? begin - page * PAGE : 0), last = (int)(end - page * PAGE < PAGE ? end - page * PAGE : PAGE);
        for (int q = 0; q < count; q++) {
            float top = largest[q], sum = 0.0f;
            for (int p = 0; p < PAGE; p++) { /* what a query does not see weighs nothing; stale memory may hold anything */
                int64_t position = page * PAGE + p;
                score[q][p] = position >= from[q] && position < until[q] ? score[q][p] : -INFINITY;
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
        page_values(value, type, count, score, keep, first, last, cache->head_dim, out);
    }
    for (int q = 0; q < count; q++) {
        float inverse = 1.0f / total[q];
        for (int d = 0; d < cache->head_dim; d++) out[q][d] *= inverse;
    }
}

INLINE void attend_typed(const Cache *cache, const int type, int head, const int32_t *pages, int count, const float *const *query,
                         const int64_t *from, const int64_t *until, const Branch *branch, float scale, float *const *out) {
    if (count == QUERIES)
        attend_tile(cache, type, head, pages, QUERIES, query, from, until, branch, scale, out);
    else
        for (int q = 0; q < count; q++) attend_tile(cache, type, head, pages, 1, query + q, from + q, until + q, branch, scale, out + q);
}

static void attend(const Cache *cache, int head, const int32_t *pages, int count, const float *const *query, const int64_t *from,
                   const int64_t *until, const Branch *branch, float scale, float *const *out) {
    if (cache->type == TYPE_BF16) attend_typed(cache, TYPE_BF16, head, pages, count, query, from, until, branch, scale, out);
    else if (cache->type == TYPE_F16) attend_typed(cache, TYPE_F16, head, pages, count, query, from, until, branch, scale, out);
    else attend_typed(cache, TYPE_F32, head, pages, count, query, from, until, branch, scale, out);
}

static void cache_write(const Cache *cache, int head, int32_t page, int slot, const float *key, const float *value) {
    int64_t size = (int64_t)cache->head_dim * PAGE, at = ((int64_t)page * cache->heads + head) * size;
    for (int d = 0; d < cache->head_dim; d++) {
        store_as((void *)cache->key, cache->type, at + (int64_t)d * PAGE + slot, key[d]);
        store_as((void *)cache->value, cache->type, at + (int64_t)slot * cache->head_dim + d, value[d]);
    }
}

/* The keys and values of slot `from` also to slot `to`. */
static void cache_copy(const Cache *cache, const int32_t *pages, int64_t from, int64_t to) {
    int64_t bytes = element_bytes(cache->type), row = cache->head_dim * bytes, size = row * PAGE;
    for (int head = 0; head < cache->heads; head++) {
        int64_t source = ((int64_t)pages[from / PAGE] * cache->heads + head) * size, target = ((int64_t)pages[to / PAGE] * cache->heads + head) * size;
        char *key = (char *)cache->key + target + to % PAGE * bytes;
        const char *old = cache->key + source + from % PAGE * bytes;
        for (int d = 0; d < cache->head_dim; d++) memcpy(key + d * PAGE * bytes, old + d * PAGE * bytes, (size_t)bytes);
        memcpy((char *)cache->value + target + to % PAGE * row, cache->value + source + from % PAGE * row, (size_t)row);
    }
}
