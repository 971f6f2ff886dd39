/* Weighted sums of the values of a tile. */

typedef struct {
    const float *weights;      /* [groups, PAGE * QUERIES], of which [count, lanes] are used */
    int64_t group;             /* channels of a group */
    const float *keep, *sum;   /* [queries]: what `out` is multiplied by; sum of the weights */
    const float *scale, *zero; /* [wide]: grids of channels, or NULL */
} Weights;

/* out [queries, wide] = out * keep + weights . codes, `halves` chunks of 16 channels at a time: as many sums as there are
 * registers for. Channels with a grid of their own: the sums are multiplied by its scale, and zero * sum of weights is added. */
INLINE void mix(const int kind, const int queries, const int lanes, const int halves, const Read *read, const Tile *tile,
                int64_t from, int64_t until, const Weights *by, int64_t wide, float *out) {
    const float *scale = by->scale, *zero = by->zero;
    const int64_t stride = read->stride;
    int64_t share = until > from ? tile->count * stride / until : 0; /* of the next page, fetched with each chunk */
#define PASS(half)                                                                                           \
    {                                                                                                        \
        const float *w = by->weights + (chunk + half) * 16 / by->group * (PAGE * QUERIES);                   \
        V8 total[QUERIES][4] = {{{0}}};                                                                      \
        for (int t = 0; t < tile->count; t++) {                                                              \
            V8 v[4];                                                                                         \
            const uint8_t *token = read->codes + tile->slot[t] * stride;                                     \
            take(kind, token, chunk + half, half, v);                                                        \
            if (halves == 2) take(kind, token, chunk + 1, 1, v + 2);                                         \
            EACH for (int q = 0; q < queries; q++) {                                                         \
                V8 x = v8_all(w[t * lanes + q]);                                                             \
                EACH for (int j = 0; j < 2 * halves; j++) total[q][j] += x * v[j];                           \
            }                                                                                                \
        }                                                                                                    \
        EACH for (int q = 0; q < queries; q++) EACH for (int j = 0; j < 2 * halves; j++) {                   \
            int64_t channel = (chunk + half) * 16 + j * 8;                                                   \
            float *target = out + q * wide + channel;                                                        \
            V8 now = v8_load(target) * by->keep[q];                                                          \
            if (scale) now += total[q][j] * v8_load(scale + channel) + v8_load(zero + channel) * by->sum[q]; \
            else now += total[q][j];                                                                         \
            v8_store(target, now);                                                                           \
        }                                                                                                    \
    }
    for (int64_t chunk = from; chunk < until; chunk += 2) {
        for (int64_t ahead = chunk * share; ahead < (chunk + 2) * share; ahead += 64) __builtin_prefetch(read->next + ahead);
        PASS(0)
        if (halves == 1 && chunk + 1 < until) PASS(1)
    }
#undef PASS
}

typedef void (*Mix)(const Read *, const Tile *, const Weights *, int64_t, float *);

/* Few queries: whole blocks where a grid has them, or sums would wait for each other. */
#define MIX(kind, queries, lanes)                                                                                          \
    static void mix_##kind##_##queries(const Read *read, const Tile *tile, const Weights *by, int64_t wide, float *out) {  \
        int64_t even = queries <= 2 && by->group % 32 == 0 ? read->chunks / 2 * 2 : 0;                                     \
        if (queries <= 2) mix(kind, queries, lanes, 2, read, tile, 0, even, by, wide, out);                                \
        mix(kind, queries, lanes, 1, read, tile, even, read->chunks, by, wide, out);                                       \
    }
#define MIX_OF(queries, lanes)                                                                                             \
    MIX(KIND_F32, queries, lanes) MIX(KIND_BF16, queries, lanes) MIX(KIND_F16, queries, lanes)                             \
    MIX(KIND_FP8, queries, lanes) MIX(KIND_INT2, queries, lanes) MIX(KIND_INT4, queries, lanes)                            \
    MIX(KIND_INT8, queries, lanes)                                                                                         \
    static const Mix MIX_##queries[] = {                                                                                   \
        [KIND_F32] = mix_KIND_F32_##queries, [KIND_BF16] = mix_KIND_BF16_##queries, [KIND_F16] = mix_KIND_F16_##queries,   \
        [KIND_FP8] = mix_KIND_FP8_##queries, [KIND_INT2] = mix_KIND_INT2_##queries, [KIND_INT4] = mix_KIND_INT4_##queries, \
        [KIND_INT8] = mix_KIND_INT8_##queries};
MIX_OF(1, 1)
MIX_OF(2, 2)
MIX_OF(3, 4)
MIX_OF(4, 4)

/* Adds the tile's values, weighted, to the sums of queries `first` ...; weight [count, lanes]. */
INLINE void tile_values(const Request *request, const Work *work, const Tile *tile, int64_t first, const int queries, const int lanes,
                        const Mix *with, const float *weight, const float *keep, const float *sum) {
    const Side *value = &request->value;
    int64_t groups = value->groups;
    float *out = work->out + first * value->wide;
    Read read = read_of(value, tile, work->value_tile);
    Weights by = {weight, value->wide, keep, sum, NULL, NULL};
    if (value->tile) {
        with[KIND_F32](&read, tile, &by, value->wide, out);
        return;
    }
    if (value->grid == GRID_CHANNEL) by.scale = work->value_scale, by.zero = work->value_zero;
    if (value->grid == GRID_TOKEN) { /* scales go into the weights, zeros into one sum a group */
        by.weights = work->weights, by.group = groups > 1 ? value->group : value->wide;
        for (int64_t g = 0; g < groups; g++) {
            float rest[EIGHT], *target = work->weights + g * PAGE * QUERIES;
            V8 sums = {0};
            for (int i = 0; i < tile->count * lanes; i += EIGHT) {
                V8 w = v8_load(weight + i);
                v8_store(target + i, w * v8_repeat(work->value_scale + g * ROOM + i / lanes, lanes));
                sums += w * v8_repeat(work->value_zero + g * ROOM + i / lanes, lanes);
            }
            v8_store(rest, sums);
            for (int i = lanes; i < EIGHT; i++) rest[i % lanes] += rest[i];
            for (int q = 0; q < queries; q++) {
                float *before = work->rest + (first + q) * groups + g;
                *before = *before * keep[q] + rest[q];
            }
        }
    }
    with[value->kind](&read, tile, &by, value->wide, out);
}
