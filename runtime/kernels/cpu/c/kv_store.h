/* The pages of a cache: plain ones, which new tokens are written to, and pages that are stored in fewer bits once they are no longer recent.
 *
 * A stored page holds for each head one record: keys, their grids, values, their grids. Integers are x = zero + scale * code (KIVI, arXiv
 * 2402.02750): keys on a grid for 32 tokens of a channel, values on grids a token, of `group` channels each; fp8 is x = scale * code, one scale a token.
 * The codes and scales are those of runtime/kv_cache/storage. Queries meet codes, not numbers: scale and zero of a channel are folded into
 * the query, those of a token into its weight. */
#define GRID 32 /* tokens of a channel that share a grid: a page of runtime/kv_cache */
#define GRIDS (PAGE / GRID)

typedef struct {
    const int32_t *plain_at; /* [pages]: where a page lies among the plain ones; NULL: at its number */
    int32_t key_kind, value_kind, group; /* group 0: all channels */
    int32_t first;           /* pages of a sequence that stay plain */
    int64_t recent;          /* newest tokens before a query that it sees plain */
    int (*advise)(void *, size_t, int); /* madvise, where stored pages lie in a mapped file: a layer's are forgotten once it has read them */
    int64_t mapped;          /* bytes of a layer's stored pages in that file */
} Storage;
enum { ADVICE_FORGET = 4 }; /* of madvise: nothing is lost of a file */

typedef struct {
    const char *key, *value; /* of this layer: plain pages, [pages, heads, head_dim, PAGE] and [pages, heads, PAGE, value_dim] */
    const char *stored;      /* [pages, heads, record]; NULL: all pages are plain */
    int32_t type, heads, head_dim, value_dim;
    Storage storage;
    const char *bounds;      /* of keys, by which selection.h chooses; NULL: all pages are read */
} Cache;

/* What eviction has left of a sequence where layers and heads keep different numbers of tokens. Its first `lead` pages are those of all
 * heads, and so are the last ones, which new tokens go to. Between them each head has `counts` blocks of its own, anywhere in the pages
 * [lead, lead + packed) of any layer. A head counts pages and positions through its own ones; it sees those below `first` and from `from`
 * on. */
typedef struct {
    const int32_t *blocks; /* [layers, kv_heads, apart]: as of `block_of`, counted from the layer's own first one */
    const int32_t *counts; /* [layers, kv_heads] */
    const int64_t *first, *from; /* [layers, kv_heads] */
    int64_t apart, lead, packed;
} Ragged;

/* The pages of a sequence as one head of a layer counts them: positions are `shift` more than in the pages of the sequence. */
typedef struct {
    const int32_t *pages, *blocks; /* of the sequence; its own */
    int64_t lead, count, packed, first, from, shift;
    int head;
} HeadPages;
static HeadPages head_pages(const int32_t *pages, const Ragged *r, int64_t layer, int64_t heads, int head) {
    if (!r) return (HeadPages){.pages = pages, .head = head};
    const int64_t at = layer * heads + head, count = r->counts[at];
    const int64_t shift = (count - r->packed) * PAGE;
    return (HeadPages){pages, r->blocks + at * r->apart, r->lead, count, r->packed, r->first[at], r->from[at], shift, head};
}

/* Where a head of a page begins, in heads of pages: plain or stored ones. */
INLINE int64_t plain_block(const Cache *c, int head, int32_t page) {
    return (int64_t)(c->storage.plain_at ? c->storage.plain_at[page] : page) * c->heads + head;
}
INLINE int64_t stored_block(const Cache *c, int head, int32_t page) { return (int64_t)page * c->heads + head; }
INLINE int64_t block_of(const Cache *c, const HeadPages *h, int64_t page, int stored) {
    if (page >= h->lead && page < h->lead + h->count) return h->blocks[page - h->lead];
    int32_t at = h->pages[page < h->lead ? page : page - h->count + h->packed];
    return stored ? stored_block(c, h->head, at) : plain_block(c, h->head, at);
}
/* Of a page, the positions [*begin, *end) that a head sees, whatever the query: none, where it begins behind its end. */
INLINE void seen_of_page(const HeadPages *h, int64_t page, int64_t *begin, int64_t *end) {
    *begin = page < h->lead || h->from < page * PAGE ? 0 : h->from - page * PAGE;
    *end = page < h->lead && h->first < (page + 1) * PAGE ? h->first - page * PAGE : PAGE;
}
INLINE int sees_page(const HeadPages *h, int64_t page) {
    int64_t begin, end;
    seen_of_page(h, page, &begin, &end);
    return begin < end && begin < PAGE;
}

/* `next`: the block that is wanted after this one, or the same. */
INLINE Matrix plain_keys(const Cache *c, int64_t block, int64_t next) {
    int64_t bytes = (int64_t)PAGE * c->head_dim * element_bytes(c->type);
    return (Matrix){c->key + block * bytes, c->key + next * bytes, c->type, PAGE, c->head_dim};
}
INLINE Matrix plain_values(const Cache *c, int64_t block, int64_t next) {
    int64_t bytes = (int64_t)PAGE * c->value_dim * element_bytes(c->type);
    return (Matrix){c->value + block * bytes, c->value + next * bytes, c->type, c->value_dim, PAGE};
}

/* Whether a query at this position sees a page of its sequence as it is stored. */
INLINE int sees_stored(const Cache *c, int64_t page, int64_t position) {
    return c->stored && page >= c->storage.first && (page + 1) * PAGE + c->storage.recent <= position;
}

typedef struct { Matrix keys, values; char *key_grid, *value_grid, *end; } Record;

typedef struct { int64_t key_grid, values, value_grid, end; } RecordPlan; /* bytes from the beginning of a record */
static RecordPlan record_plan(const Cache *c) {
    const Storage *s = &c->storage;
    int64_t width = s->group ? s->group : c->value_dim, groups = (c->value_dim + width - 1) / width;
    RecordPlan p = {.key_grid = matrix_bytes(s->key_kind, PAGE, c->head_dim)};
    p.values = p.key_grid + (s->key_kind == PAGES_FP8 ? PAGE * 4 : holds_codes(s->key_kind) ? GRIDS * c->head_dim * 4 : 0);
    p.value_grid = p.values + matrix_bytes(s->value_kind, c->value_dim, PAGE);
    p.end = p.value_grid + (s->value_kind == PAGES_FP8 ? PAGE * 4 : holds_codes(s->value_kind) ? groups * PAGE * 4 : 0);
    return p;
}
int64_t cache_record(const Cache *c) { return record_plan(c).end; } /* bytes */

static Record record_of(const Cache *c, int64_t block, int64_t next) {
    const RecordPlan p = record_plan(c);
    char *at = (char *)c->stored + block * p.end, *then = (char *)c->stored + next * p.end;
    return (Record){{at, then, c->storage.key_kind, PAGE, c->head_dim}, {at + p.values, then + p.values, c->storage.value_kind, c->value_dim, PAGE},
                    at + p.key_grid, at + p.value_grid, at + p.end};
}
INLINE void fetch_grid(const char *grid, const char *end, const Matrix *m) {
    for (; grid < end; grid += 64) __builtin_prefetch(grid + (m->next - m->data));
}

INLINE int digit_count(const Cache *c) { return c->type == TYPE_F32 ? 3 : 2; } /* digits as exact as plain pages are */

/* score [count, PAGE] = query . keys of a stored page, of grids [first, last) of its tokens; `shift` as of shift_next */
static void stored_scores(const Cache *c, int64_t block, int64_t next, int first, int last, int shift, int count, const Factors *query,
                          float *const *score) {
    Record r = record_of(c, block, next);
    int n = c->head_dim;
    fetch_grid(r.key_grid, r.values.data, &r.keys);
    shift_next(&r.keys, shift);
    if (!holds_integers(r.keys.kind)) {
        page_product(&r.keys, first * GRID, last * GRID, 0, n, count, query, NULL, score);
        const float *scale = (const float *)r.key_grid;
        for (int q = 0; r.keys.kind == PAGES_FP8 && q < count; q++)
            for (int p = first * GRID; p < last * GRID; p++) score[q][p] *= scale[p];
        return;
    }
    Grids grids;
    DigitRow rows[QUERIES];
    const int digits = digit_count(c);
    for (int grid = first; grid < last; grid++) {
        load_grids(r.key_grid + grid * n * 2, r.key_grid + (GRIDS + grid) * n * 2, n, code_bits(r.keys.kind), &grids);
        for (int q = 0; q < count; q++)
            digits_of_row(query[q], &grids, digit_unit(largest_product(query[q], grids.scale, n), digits), digits, rows + q);
        codes_product(&r.keys, grid * GRID, (grid + 1) * GRID, count, digits, rows, NULL, score);
    }
}

/* out [count, value_dim] = out * keep + weight [count, PAGE] . values of a stored page; weights are 0 but for tokens [first, last) */
static void stored_values(const Cache *c, int64_t block, int64_t next, int first, int last, int shift, int count, const Factors *weight,
                          const float *keep, float *const *out) {
    Record r = record_of(c, block, next);
    int kind = r.values.kind, n = c->value_dim, width = c->storage.group ? c->storage.group : n, groups = (n + width - 1) / width;
    fetch_grid(r.value_grid, r.end, &r.values);
    if (kind == PAGES_FP8) {
        Factors folded[QUERIES];
        for (int q = 0; q < count; q++)
            for (int p = 0; p < PAGE; p++) folded[q][p] = weight[q][p] * ((const float *)r.value_grid)[p];
        page_product(&r.values, 0, n, 0, PAGE, count, (const Factors *)folded, keep, out);
        return;
    }
    if (!holds_integers(kind)) {
        shift_next(&r.values, shift * n);
        page_product(&r.values, 0, n, first, last, count, weight, keep, out);
        return;
    }
    Grids grids;
    DigitRow rows[QUERIES];
    const int digits = digit_count(c);
    float one[PAGE];
    for (int p = 0; p < PAGE; p++) one[p] = 1.0f;
    for (int g = 0; g < groups; g++) {
        int begin = g * width, end = begin + width < n ? begin + width : n;
        load_grids(r.value_grid + g * PAGE * 2, r.value_grid + (groups + g) * PAGE * 2, PAGE, code_bits(kind), &grids);
        float unit = digit_unit(largest_product(grids.scale, one, PAGE), digits); /* no weight is above 1 */
        for (int q = 0; q < count; q++) digits_of_row(weight[q], &grids, unit, digits, rows + q);
        codes_product(&r.values, begin, end, count, digits, rows, keep, out);
    }
}

/* ---- writing */

/* The grid of n numbers with the least squared error among ranges that clip a little, and their codes (storage/integer.py). */
static void find_grid(const float *x, int n, int bits, uint16_t *scale, uint16_t *zero, uint8_t *codes) {
    static const float share[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.65f, 0.6f};
    static const double cut[] = {0.0, 1 - 0.95, 1 - 0.9, 1 - 0.85, 1 - 0.8, 1 - 0.75, 1 - 0.7, 1 - 0.65, 1 - 0.6};
    int shares = bits == 8 ? 1 : bits == 4 ? 4 : 9;
    float low = x[0], high = x[0], most = (float)((1 << bits) - 1), best = INFINITY, place[n];
    for (int i = 1; i < n; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    *scale = *zero = float_to_f16(low);
    for (int s = 0; s < shares; s++) {
        uint16_t z = float_to_f16(low + (high - low) * (float)cut[s] / 2.0f), step = float_to_f16((high - low) * share[s] / most);
        float wide = f16_to_float(step), from = f16_to_float(z), by = wide == 0.0f ? 1.0f : wide, lane[16] = {0};
        for (int i = 0; i < n; i++) {
            float p = rintf((x[i] - from) / by);
            place[i] = p < 0.0f ? 0.0f : p > most ? most : p;
        }
        for (int i = 0; i < n; i++) {
            float off = place[i] * wide + from - x[i];
            lane[i % 16] += off * off;
        }
        float error = lane_sum(lane);
        if (error < best) {
            best = error, *scale = step, *zero = z;
            for (int i = 0; i < n; i++) codes[i] = (uint8_t)place[i];
        }
    }
}

static uint8_t float_to_e4m3(float x) { /* to nearest, ties to even; |x| <= 448 */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    if (magnitude < 0x1p-6f) return (uint8_t)(sign | (uint32_t)rintf(magnitude * 512.0f));
    return (uint8_t)(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)));
}
/* Codes of n numbers, and their scale (storage/fp8.py). */
static float find_scale(const float *x, int n, uint8_t *codes) {
    float largest = 0.0f;
    for (int i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    float scale = largest / 448.0f;
    if (scale < 0x1p-126f) scale = 0x1p-126f;
    for (int i = 0; i < n; i++) {
        float code = x[i] / scale;
        codes[i] = float_to_e4m3(code < -448.0f ? -448.0f : code > 448.0f ? 448.0f : code);
    }
    return scale;
}

/* A code of a packed matrix of zeros. */
INLINE void put_code(const Matrix *m, int lane, int index, uint8_t code) {
    int bits = code_bits(m->kind), fields = 8 / bits, quarter = m->indices / 4, place = index % quarter;
    uint32_t *word = (uint32_t *)(m->data + words_at(m, lane, place / fields));
    *word |= (uint32_t)code << (index / quarter * 8 + place % fields * bits);
}

/* How one side of a page lies plain: number of a token and channel at token * by_token + channel * by_channel. */
typedef struct { Matrix plain; int by_token, by_channel, size; } Side;

static void store_floats8(const Side *s, const Matrix *m, float *scales, int tokens_are_lanes) {
    float x[MOST_CHANNELS];
    uint8_t codes[MOST_CHANNELS];
    for (int p = 0; p < PAGE; p++) {
        for (int d = 0; d < s->size; d++) x[d] = load_as(s->plain.data, s->plain.kind, p * s->by_token + d * s->by_channel);
        scales[p] = find_scale(x, s->size, codes);
        for (int d = 0; d < s->size; d++) tokens_are_lanes ? put_code(m, p, d, codes[d]) : put_code(m, d, p, codes[d]);
    }
}

static int holds(const Matrix *plain, int kind) { /* whether all numbers can be stored so */
    float most = kind == PAGES_FP8 ? 3.4028235e38f : 65504.0f;
    int good = 1;
    for (int64_t i = 0; holds_codes(kind) && i < (int64_t)plain->lanes * plain->indices; i++) good &= fabsf(load_as(plain->data, plain->kind, i)) <= most;
    return good;
}

static void store_keys(const Cache *c, const Record *r, const Matrix *plain) {
    int bits = code_bits(r->keys.kind), n = c->head_dim;
    float x[GRID];
    uint8_t codes[GRID];
    uint16_t *scale = (uint16_t *)r->key_grid, *zero = scale + GRIDS * n;
    for (int d = 0; d < n; d++)
        for (int grid = 0; grid < GRIDS; grid++) {
            for (int p = 0; p < GRID; p++) x[p] = load_as(plain->data, plain->kind, (int64_t)d * PAGE + grid * GRID + p);
            find_grid(x, GRID, bits, scale + grid * n + d, zero + grid * n + d, codes);
            for (int p = 0; p < GRID; p++) put_code(&r->keys, grid * GRID + p, d, codes[p]);
        }
}
static void store_values(const Cache *c, const Record *r, const Matrix *plain) {
    int bits = code_bits(r->values.kind), n = c->value_dim, width = c->storage.group ? c->storage.group : n, groups = (n + width - 1) / width;
    float x[width];
    uint8_t codes[width];
    for (int p = 0; p < PAGE; p++)
        for (int g = 0; g < groups; g++) {
            for (int i = 0; i < width; i++) { /* the last number fills the last group up */
                int d = g * width + i < n ? g * width + i : n - 1;
                x[i] = load_as(plain->data, plain->kind, (int64_t)p * n + d);
            }
            int at = g * PAGE + p;
            find_grid(x, width, bits, (uint16_t *)r->value_grid + at, (uint16_t *)r->value_grid + groups * PAGE + at, codes);
            for (int i = 0; i < width && g * width + i < n; i++) put_code(&r->values, g * width + i, p, codes[i]);
        }
}

/* One head of a page; false where the storage cannot hold a number of it. */
static int store_numbers(const Cache *c, int64_t block, const Matrix *keys, const Matrix *values) {
    Record r = record_of(c, block, block);
    if (!holds(keys, r.keys.kind) || !holds(values, r.values.kind)) return 0;
    memset((char *)r.keys.data, 0, (size_t)(r.end - (char *)r.keys.data));
    if (r.keys.kind == PAGES_FP8) store_floats8(&(Side){*keys, 1, PAGE, c->head_dim}, &r.keys, (float *)r.key_grid, 1);
    else if (holds_codes(r.keys.kind)) store_keys(c, &r, keys);
    else memcpy((char *)r.keys.data, keys->data, (size_t)matrix_bytes(c->type, PAGE, c->head_dim));
    if (r.values.kind == PAGES_FP8) store_floats8(&(Side){*values, c->value_dim, 1, c->value_dim}, &r.values, (float *)r.value_grid, 0);
    else if (holds_codes(r.values.kind)) store_values(c, &r, values);
    else memcpy((char *)r.values.data, values->data, (size_t)matrix_bytes(c->type, c->value_dim, PAGE));
    return 1;
}
/* From the plain page. */
static int store_page(const Cache *c, int head, int32_t page) {
    const int64_t from = plain_block(c, head, page);
    Matrix keys = plain_keys(c, from, from), values = plain_values(c, from, from);
    return store_numbers(c, stored_block(c, head, page), &keys, &values);
}

/* Of these pages this member's share; `broken` is set to 1 where one cannot be stored. */
static void store_pages(const Cache *c, const int32_t *pages, int64_t count, int32_t *broken, const Team *team) {
    int64_t start, end;
    team_part(team, count * c->heads, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++)
        if (!store_page(c, (int)(unit % c->heads), pages[unit / c->heads])) *broken = 1;
}

/* As attention, for tests: `pages` [count] are stored. */
typedef struct { const Cache *cache; const int32_t *pages; int64_t count; int32_t *broken; } StoreOrder;
static void store_job(void *p, const Team *team) {
    StoreOrder *order = p;
    store_pages(order->cache, order->pages, order->count, order->broken, team);
}
void cache_store(const Cache *c, const int32_t *pages, int64_t count, int32_t *broken, int32_t threads) {
    StoreOrder order = {c, pages, count, broken};
    parallel(store_job, &order, threads);
}

static void cache_write(const Cache *c, int64_t block, int slot, const float *key, const float *value) {
    Matrix keys = plain_keys(c, block, block), values = plain_values(c, block, block);
    for (int d = 0; d < c->head_dim; d++) store_as((void *)keys.data, c->type, (int64_t)d * PAGE + slot, key[d]);
    for (int d = 0; d < c->value_dim; d++) store_as((void *)values.data, c->type, (int64_t)slot * c->value_dim + d, value[d]);
}

/* ---- reading a token */
INLINE float code_at(const Matrix *m, int lane, int index) {
    int bits = code_bits(m->kind), fields = 8 / bits, quarter = m->indices / 4, place = index % quarter;
    uint32_t word = *(const uint32_t *)(m->data + words_at(m, lane, place / fields)) >> (index / quarter * 8 + place % fields * bits);
    return m->kind == PAGES_FP8 ? 256.0f * f8_to_float((uint8_t)word) : (float)(word & ((1u << bits) - 1));
}

/* A head's part of a page, as it is stored or plain. */
static Record page_record(const Cache *c, int64_t block, int stored) {
    return stored ? record_of(c, block, block) : (Record){plain_keys(c, block, block), plain_values(c, block, block), NULL, NULL, NULL};
}
/* A head's key at a slot of a page, as it is stored or plain. */
static void cache_read_key(const Cache *c, int64_t block, int slot, int stored, float *key) {
    const Record r = page_record(c, block, stored);
    const int n = c->head_dim;
    for (int d = 0; d < n; d++) {
        if (!holds_codes(r.keys.kind)) {
            key[d] = load_as(r.keys.data, r.keys.kind, (int64_t)d * PAGE + slot);
            continue;
        }
        const uint16_t *scale = (const uint16_t *)r.key_grid + slot / GRID * n + d;
        key[d] = code_at(&r.keys, slot, d);
        key[d] = r.keys.kind == PAGES_FP8 ? key[d] * ((const float *)r.key_grid)[slot] : key[d] * f16_to_float(*scale) + f16_to_float(scale[GRIDS * n]);
    }
}
static void cache_read_value(const Cache *c, int64_t block, int slot, int stored, float *value) {
    const Record r = page_record(c, block, stored);
    const int size = c->value_dim, width = c->storage.group ? c->storage.group : size, groups = (size + width - 1) / width;
    for (int d = 0; d < size; d++) {
        if (!holds_codes(r.values.kind)) {
            value[d] = load_as(r.values.data, r.values.kind, (int64_t)slot * size + d);
            continue;
        }
        const uint16_t *scale = (const uint16_t *)r.value_grid + d / width * PAGE + slot;
        value[d] = code_at(&r.values, d, slot);
        value[d] = r.values.kind == PAGES_FP8 ? value[d] * ((const float *)r.value_grid)[slot]
                                              : value[d] * f16_to_float(*scale) + f16_to_float(scale[groups * PAGE]);
    }
}

/* A head's key and value at a position, of which a query at `before` sees what is stored. */
static void cache_read(const Cache *c, const HeadPages *h, int64_t position, int64_t before, float *key, float *value) {
    const int stored = sees_stored(c, position / PAGE, before), slot = (int)(position % PAGE);
    const int64_t block = block_of(c, h, position / PAGE, stored);
    cache_read_key(c, block, slot, stored, key);
    cache_read_value(c, block, slot, stored, value);
}

/* One token at a position that queries at `after` see; those that they see stored come in order, and are put together in `page`. False where
 * the storage cannot hold a number. */
static int put_token(const Cache *c, const Cache *page, const HeadPages *h, int64_t position, int64_t after, const float *key, const float *value) {
    const int stored = sees_stored(c, position / PAGE, after), slot = (int)(position % PAGE);
    const int64_t block = block_of(c, h, position / PAGE, stored);
    cache_write(stored ? page : c, stored ? 0 : block, slot, key, value);
    if (!stored || slot + 1 < PAGE) return 1;
    Matrix keys = plain_keys(page, 0, 0), values = plain_values(page, 0, 0);
    return store_numbers(c, block, &keys, &values);
}

/* Of one head: what is at position from[i] of `old` also at position to[i] of `new`, one after another. Queries at `before` see `old`, and
 * those at `after` see `new`. What nobody sees before `from` of `new` is filled with a token beside it, which grids then do not notice.
 * False where the storage cannot hold a number. */
static int cache_copy(const Cache *c, const HeadPages *old, const HeadPages *new, int64_t count, const int64_t *from, const int64_t *to,
                      int64_t before, int64_t after) {
    int64_t bytes = element_bytes(c->type), p = new->lead * PAGE;
    int good = 1;
    float key[c->head_dim], value[c->value_dim];
    char keys[c->stored ? PAGE * c->head_dim * bytes : 1], values[c->stored ? PAGE * c->value_dim * bytes : 1];
    Cache page = *c; /* what is being put together */
    page.key = keys, page.value = values;
    for (int64_t i = 0; i < count; i++) {
        cache_read(c, old, from[i], before, key, value);
        for (; to[i] == new->from && p < to[i]; p++) good &= put_token(c, &page, new, p, after, key, value);
        good &= put_token(c, &page, new, to[i], after, key, value);
    }
    for (; count && to[count - 1] < new->from && p < new->from; p++) good &= put_token(c, &page, new, p, after, key, value);
    return good;
}
