/* Scores of the queries of a row against the tokens of a tile. */

/* score [count, lanes] = query . codes. `tokens` of them run side by side, so that sums do not wait for each other and every
 * load of the query serves several. grids: each chunk is multiplied by its grid's scale (several grids a token). */
INLINE void dots(const int kind, const int queries, const int grids, const Read *read, const Tile *tile, const float *query,
                 int64_t wide, const float *scale, int64_t groups, int64_t group, float *score) {
    enum { MOST = 4 };
    const int64_t stride = read->stride, chunks = read->chunks;
    const int tokens = queries > 2 ? 2 : MOST;
    for (int t = 0; t < tile->count; t += tokens) {
        V8 sum[MOST][QUERIES] = {{{0}}};
        const uint8_t *token[MOST];
        for (int i = 0; i < tokens; i++) token[i] = read->codes + tile->slot[t + i] * stride;
        for (int64_t ahead = 0; ahead < tokens * stride; ahead += 64) __builtin_prefetch(read->next + t * stride + ahead);
        for (int64_t chunk = 0; chunk < chunks; chunk += 2) {
#define HALF(half)                                                                                          \
    {                                                                                                       \
        V8 v[MOST][2];                                                                                      \
        EACH for (int i = 0; i < tokens; i++) {                                                             \
            take(kind, token[i], chunk + half, half, v[i]);                                                 \
            if (grids) {                                                                                    \
                V8 s = v8_all(scale[tile->slot[t + i] * groups + (chunk + half) * 16 / group]);             \
                v[i][0] *= s, v[i][1] *= s;                                                                 \
            }                                                                                               \
        }                                                                                                   \
        EACH for (int j = 0; j < 2; j++) EACH for (int q = 0; q < queries; q++) {                           \
            V8 x = v8_load(query + q * wide + (chunk + half) * 16 + j * 8);                                 \
            KEEP(x);                                                                                        \
            EACH for (int i = 0; i < tokens; i++) sum[i][q] += x * v[i][j];                                 \
        }                                                                                                   \
    }
            HALF(0)
            if (chunk + 1 < chunks) HALF(1)
#undef HALF
        }
        if (queries == 1) {
            V4 four = v8_sums(sum[0][0], sum[1][0], sum[2][0], sum[3][0]);
            memcpy(score + t, &four, sizeof four);
        } else if (queries == 2) {
            EACH for (int i = 0; i < 4; i += 2) {
                V4 four = v8_sums(sum[i][0], sum[i][1], sum[i + 1][0], sum[i + 1][1]);
                memcpy(score + (t + i) * 2, &four, sizeof four);
            }
        } else {
            EACH for (int i = 0; i < 2; i++) {
                V4 four = v8_sums(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
                memcpy(score + (t + i) * 4, &four, sizeof four);
            }
        }
    }
}

typedef void (*Dots)(const Read *, const Tile *, const float *, int64_t, const float *, int64_t, int64_t, float *);

#define DOTS(kind, queries, grids)                                                                                               \
    static void dots_##kind##_##queries##_##grids(const Read *read, const Tile *tile, const float *query, int64_t wide,          \
                                                  const float *scale, int64_t groups, int64_t group, float *score) {             \
        dots(kind, queries, grids, read, tile, query, wide, scale, groups, group, score);                                        \
    }
#define DOTS_OF(queries)                                                                                                         \
    DOTS(KIND_F32, queries, 0) DOTS(KIND_BF16, queries, 0) DOTS(KIND_F16, queries, 0) DOTS(KIND_FP8, queries, 0)                 \
    DOTS(KIND_INT2, queries, 0) DOTS(KIND_INT4, queries, 0) DOTS(KIND_INT8, queries, 0)                                          \
    DOTS(KIND_INT2, queries, 1) DOTS(KIND_INT4, queries, 1) DOTS(KIND_INT8, queries, 1)                                          \
    static const Dots DOTS_##queries[2 * KIND_GROUPED] = {                                                                       \
        [KIND_F32] = dots_KIND_F32_##queries##_0, [KIND_BF16] = dots_KIND_BF16_##queries##_0,                                    \
        [KIND_F16] = dots_KIND_F16_##queries##_0, [KIND_FP8] = dots_KIND_FP8_##queries##_0,                                      \
        [KIND_INT2] = dots_KIND_INT2_##queries##_0, [KIND_INT4] = dots_KIND_INT4_##queries##_0,                                  \
        [KIND_INT8] = dots_KIND_INT8_##queries##_0, [KIND_GROUPED + KIND_INT2] = dots_KIND_INT2_##queries##_1,                   \
        [KIND_GROUPED + KIND_INT4] = dots_KIND_INT4_##queries##_1, [KIND_GROUPED + KIND_INT8] = dots_KIND_INT8_##queries##_1};
DOTS_OF(1)
DOTS_OF(2)
DOTS_OF(3)
DOTS_OF(4)

/* The query a page's codes are multiplied with (scale of a channel folded in), and what its zeros add to every score. */
INLINE void fold_channels(const Request *request, const Work *work, const float *query, const int queries, float *add) {
    const Side *key = &request->key;
    for (int q = 0; q < queries; q++) {
        V8 sum = {0};
        for (int64_t c = 0; c < key->wide; c += 8) {
            V8 x = v8_load(query + q * key->wide + c);
            sum += x * v8_load(work->key_zero + c);
            v8_store(work->scaled + q * key->wide + c, x * v8_load(work->key_scale + c));
        }
        add[q] = v8_sum(sum);
    }
}

/* score [count, lanes] of queries `first` ..., times Request.scale, before softcap and bias. */
INLINE void tile_scores(const Request *request, const Work *work, const Tile *tile, int64_t first, const int queries, const int lanes,
                        const Dots *with, float *score) {
    const Side *key = &request->key;
    const float *query = work->query + first * key->wide;
    int64_t groups = key->groups;
    Read read = read_of(key, tile, work->key_tile);
    if (key->tile) {
        with[KIND_F32](&read, tile, query, key->wide, NULL, 1, 1, score);
    } else if (key->grid == GRID_CHANNEL) {
        float add[QUERIES] = {0};
        fold_channels(request, work, query, queries, add);
        with[key->kind](&read, tile, work->scaled, key->wide, NULL, 1, 1, score);
        for (int t = 0; t < tile->count; t++)
            EACH for (int q = 0; q < queries; q++) score[t * lanes + q] += add[q];
    } else if (key->grid == GRID_TOKEN && groups > 1) {
        with[KIND_GROUPED + key->kind](&read, tile, query, key->wide, work->key_scale, groups, key->group, score);
        for (int t = 0; t < tile->count; t++)
            for (int64_t g = 0; g < groups; g++) {
                float zero = work->key_zero[tile->slot[t] * groups + g];
                EACH for (int q = 0; q < queries; q++) score[t * lanes + q] += zero * work->sums[(first + q) * groups + g];
            }
    } else {
        with[key->kind](&read, tile, query, key->wide, NULL, 1, 1, score);
        if (key->grid == GRID_TOKEN)
            for (int t = 0; t < tile->count; t++) {
                float scale = work->key_scale[tile->slot[t]], zero = work->key_zero[tile->slot[t]];
                EACH for (int q = 0; q < queries; q++)
                    score[t * lanes + q] = score[t * lanes + q] * scale + zero * work->sums[first + q];
            }
    }
}
