/* Selection of what a query reads of its sequence (Quest, arXiv 2406.10774): halves of pages whose keys could score highest.
 *
 * Beside its pages a cache has bounds: of each channel the least and the largest key of a half page. No product of a query with a key of that
 * half is above the sum over channels of the larger of q * least and q * largest. Bounds are those of what a query sees: of plain keys in
 * layers whose pages stay plain, and of decoded ones where pages are stored; of pages that are still plain there, and of a branch's own
 * tokens, they are found when they are asked for. So what a query reads does not depend on the queries beside it. */
#define HALF GRID /* tokens: a page of runtime/kv_cache */
#define HALVES (PAGE / HALF)

INLINE char *bounds_of(const Cache *c, int head, int32_t page, int half) { /* [2, head_dim], as plain numbers are */
    return (char *)c->bounds + (((int64_t)page * c->heads + head) * HALVES + half) * 2 * c->head_dim * element_bytes(c->type);
}

static void find_plain_bounds(const Cache *c, int head, int32_t page, int half, float *low, float *high) {
    const int64_t block = plain_block(c, head, page);
    Matrix keys = plain_keys(c, block, block);
    for (int d = 0; d < c->head_dim; d++) {
        F most = f_set1(-INFINITY), least = most;
        for (int p = half * HALF; p < (half + 1) * HALF; p += LANES) {
            F x = f_load_as(keys.data, c->type, (int64_t)d * PAGE + p);
            most = f_max(x, most), least = f_max(f_mul(x, f_set1(-1.0f)), least);
        }
        low[d] = -f_reduce_max(least), high[d] = f_reduce_max(most);
    }
}

INLINE void widen_bounds(const float *key, int n, float *low, float *high) {
    for (int d = 0; d < n; d++) low[d] = key[d] < low[d] ? key[d] : low[d], high[d] = key[d] > high[d] ? key[d] : high[d];
}
static void start_bounds(int n, float *low, float *high) {
    for (int d = 0; d < n; d++) low[d] = INFINITY, high[d] = -INFINITY;
}

static void keep_bounds(const Cache *c, int head, int32_t page, int half, const float *low, const float *high) {
    char *at = bounds_of(c, head, page, half);
    for (int d = 0; d < c->head_dim; d++) store_as(at, c->type, d, low[d]), store_as(at, c->type, c->head_dim + d, high[d]);
}
/* Bounds of a half page that is full, as it is stored or plain. */
static void bound_half(const Cache *c, int head, int32_t page, int half, int stored) {
    float low[c->head_dim], high[c->head_dim], key[c->head_dim];
    if (stored) {
        start_bounds(c->head_dim, low, high);
        for (int slot = half * HALF; slot < (half + 1) * HALF; slot++) {
            cache_read_key(c, stored_block(c, head, page), slot, 1, key);
            widen_bounds(key, c->head_dim, low, high);
        }
    } else find_plain_bounds(c, head, page, half, low, high);
    keep_bounds(c, head, page, half, low, high);
}

/* Of one head: of the halves that slots `to` [count] of `into`, in order, lie in; queries to come are at `after` or later. */
static void bound_copied(const Cache *c, int head, const int32_t *into, int64_t count, const int64_t *to, int64_t after) {
    for (int64_t i = 0; i < count; i++) {
        if (i + 1 < count && to[i + 1] / HALF == to[i] / HALF) continue;
        int stored = sees_stored(c, to[i] / PAGE, after);
        if (stored || !c->stored) bound_half(c, head, into[to[i] / PAGE], (int)(to[i] % PAGE / HALF), stored);
    }
}

/* This member's share of the halves that a step has filled: those that rows end, or those of pages `stored` [count] that it has just stored,
 * of which the member has the same share as of storing. False where nobody has any. */
static int bounds_part(const Attention *a, const int64_t *slot, const int32_t *stored, int64_t count, const Team *team) {
    const Cache *c = &a->cache;
    int64_t start, end, filled = c->stored ? count : 0;
    for (int64_t r = 0; !c->stored && r < a->rows; r++) filled += slot[r] % HALF == HALF - 1;
    team_part(team, (c->stored ? count : a->rows) * c->heads, 1, &start, &end);
    for (int64_t unit = start; filled && unit < end; unit++) {
        int64_t i = unit / c->heads;
        int head = (int)(unit % c->heads);
        if (c->stored)
            for (int half = 0; half < HALVES; half++) bound_half(c, head, stored[i], half, 1);
        else if (slot[i] % HALF == HALF - 1)
            bound_half(c, head, a->pages[a->sequence[i] * a->pages_stride + slot[i] / PAGE], (int)(slot[i] % PAGE / HALF), 0);
    }
    return filled > 0;
}

/* The largest bound that any of `count` queries has: query [count, 2, n], what is positive of each and what is negative. */
INLINE float largest_bound(const float *query, const int count, const float *low, const float *high, int n, float best) {
    F sum[4];
    UNROLL for (int q = 0; q < count; q++) sum[q] = f_zero();
    int d = 0;
    for (; d + LANES <= n; d += LANES) {
        F least = f_load(low + d), most = f_load(high + d);
        UNROLL for (int q = 0; q < count; q++)
            sum[q] = f_fma(f_load(query + 2 * q * n + d), most, f_fma(f_load(query + (2 * q + 1) * n + d), least, sum[q]));
    }
    UNROLL for (int q = 0; q < count; q++) {
        float score = f_sum(sum[q]);
        for (int i = d; i < n; i++) score += query[2 * q * n + i] * high[i] + query[(2 * q + 1) * n + i] * low[i];
        best = score > best ? score : best;
    }
    return best;
}
static float bound_score(const float *query, int64_t count, const float *low, const float *high, int n) {
    float best = -INFINITY;
    for (; count >= 4; count -= 4, query += 8 * n) best = largest_bound(query, 4, low, high, n, best);
    for (; count; count--, query += 2 * n) best = largest_bound(query, 1, low, high, n, best);
    return best;
}
static void load_floats(const void *from, int type, int n, float *to) {
    int i = 0;
    if (type == TYPE_BF16) for (; i + LANES <= n; i += LANES) f_store(to + i, f_load_bf16((const uint16_t *)from + i));
    if (type == TYPE_F16) for (; i + LANES <= n; i += LANES) f_store(to + i, f_load_f16((const uint16_t *)from + i));
    for (; i < n; i++) to[i] = load_as(from, type, i);
}

/* Numbers in the order of floats. */
INLINE uint32_t rank_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
/* The k-th largest of n numbers, 0 < k <= n. */
static uint32_t kth_largest(const uint32_t *rank, int64_t n, int64_t k) {
    uint32_t found = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        int64_t above = 0;
        for (int64_t i = 0; i < n; i++) above += rank[i] >= (found | bit);
        if (above >= k) found |= bit;
    }
    return found;
}

/* Scores of halves [1, end) of what row r sees, which are full. */
static void score_halves(const Attention *a, int64_t r, int head, int64_t end, uint32_t *rank) {
    const Cache *c = &a->cache;
    const int32_t *pages = a->pages + a->sequence[r] * a->pages_stride;
    const int64_t shared = a->heads / c->heads, bytes = c->head_dim * element_bytes(c->type);
    const int n = c->head_dim;
    float range[2][n], *low = range[0], *high = range[1], key[n], query[shared][2][n];
    for (int64_t q = 0; q < shared; q++) {
        const float *x = a->query + (r * a->heads + head * shared + q) * n;
        for (int d = 0; d < n; d++) query[q][0][d] = x[d] > 0.0f ? x[d] : 0.0f, query[q][1][d] = x[d] < 0.0f ? x[d] : 0.0f;
    }
    for (int64_t i = 1; i < end; i++) {
        const int64_t page = i / HALVES;
        const int half = (int)(i % HALVES);
        if (in_tree(a, r) && (i + 1) * HALF > a->base[r]) {
            start_bounds(n, low, high);
            for (int64_t p = i * HALF; p < (i + 1) * HALF; p++) {
                int64_t slot = p < a->base[r] ? p : a->slots[a->path[r] + p - a->base[r]];
                cache_read_key(c, plain_block(c, head, pages[slot / PAGE]), (int)(slot % PAGE), 0, key);
                widen_bounds(key, n, low, high);
            }
        } else if (c->stored && !sees_stored(c, page, a->position[r])) find_plain_bounds(c, head, pages[page], half, low, high);
        else {
            const char *at = bounds_of(c, head, pages[page], half), *next = bounds_of(c, head, pages[(i + 2) / HALVES], half);
            for (int64_t line = 0; line < 2 * bytes; line += 64) __builtin_prefetch(next + line); /* row r lies in a later page */
            load_floats(at, c->type, 2 * n, low);
        }
        rank[i] = rank_of(bound_score(query[0][0], shared, low, high, n));
    }
}

/* Which halves of each page row r reads, in bits: the first, those that the newest tokens lie in, and as many others as the budget of tokens
 * has room for. budget < 0: all. */
static void choose_halves(const Attention *a, int64_t budget, int64_t newest, int64_t r, int head, uint8_t *chosen) {
    const int64_t tokens = a->position[r] + 1, older = tokens - newest, end = older > 0 ? older / HALF : 0; /* candidates: [1, end) */
    const int64_t room = budget - HALF - (tokens - end * HALF), count = room > 0 ? room / HALF : 0;
    const int all = (1 << HALVES) - 1;
    memset(chosen, all, (size_t)((tokens + PAGE - 1) / PAGE));
    if (budget < 0 || budget >= tokens || count >= end - 1) return;
    uint32_t rank[end], least = UINT32_MAX;
    int64_t equal = 0; /* of those that are as good as the last one, how many are read */
    if (count) {
        score_halves(a, r, head, end, rank);
        least = kth_largest(rank + 1, end - 1, count);
        equal = count;
        for (int64_t i = 1; i < end; i++) equal -= rank[i] > least;
    }
    for (int64_t i = 1; i < end; i++)
        if (!count || !(rank[i] > least || (rank[i] == least && equal-- > 0))) chosen[i / HALVES] &= (uint8_t)~(1 << i % HALVES);
}

/* This member's share; `budget` [rows]: tokens that each row reads, `chosen` as of Attention. */
static void choose_part(const Attention *a, const int64_t *budget, int64_t newest, uint8_t *chosen, const Team *team) {
    int64_t start, end;
    team_part(team, a->rows * a->cache.heads, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++)
        choose_halves(a, budget[unit / a->cache.heads], newest, unit / a->cache.heads, (int)(unit % a->cache.heads),
                      chosen + unit * a->pages_stride);
}
