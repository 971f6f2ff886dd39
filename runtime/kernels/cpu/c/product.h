/* Which tile computes what, and the product as a whole. */

/* For each kind: the most streams (rows of x times digits) of a tile, and the vectors that a tile of S streams walks at once. There are
 * no more sums than registers hold (half of 32 do: with more, results spill), and two panels share what is loaded of x where that leaves
 * room. Few streams take little time: they wait for memory, which is faster as one panel after the other. */
#if LANES == 8
#define W4_STREAMS 8
#define W4_VECTORS(S) ((S) <= 4 ? HALVES : 1)
#define W8_STREAMS 4
#define W8_VECTORS(S) ((S) <= 2 ? HALVES : 1)
#define S24_STREAMS 8
#define S24_VECTORS(S) 1
#else
#if defined(__AVX512F__) || defined(COMPRESS_EMULATED)
#define W4_STREAMS STREAMS
#define W4_VECTORS(S) ((S) <= 2 ? HALVES : MOST)
#else
#define W4_STREAMS 1 /* vectors of vectors: one at a time */
#define W4_VECTORS(S) HALVES
#endif
#define W8_STREAMS W4_STREAMS
#define W8_VECTORS W4_VECTORS
#define S24_STREAMS W4_STREAMS
#define S24_VECTORS W4_VECTORS
#endif

/* M rows of x in D digits and the panel at w, with the next one `bytes` on if `next` is 1: out [M, 32]. The t-th of `walks` through
 * them. */
#define TILE(NAME, KIND, LINES, D, M)                                                                                                \
    static void NAME##_##D##_##M(const Linear *l, const uint8_t *w, int64_t bytes, int64_t panel, int64_t next, const Digits *x,      \
                                 int64_t row, int t, int walks, float *out) {                                                        \
        const int V = KIND##_VECTORS(D * M);                                                                                         \
        int64_t runs = bytes / (64 * LINES);                                                                                         \
        if (D * M > KIND##_STREAMS && M > 1) return; /* there is none */                                                             \
        if (V > HALVES) NAME(l, w, panel, next, 0, V, x, row, M, D, fetch_ahead(w, bytes, 2, LINES, runs, t, walks), out);           \
        else                                                                                                                         \
            for (int64_t p = 0; p <= next; p++, w += bytes)                                                                          \
                for (int h = 0; h < HALVES; h += V)                                                                                  \
                    NAME(l, w, panel + p, 0, h, V, x, row, M, D,                                                                     \
                         fetch_ahead(w, bytes, 1, LINES, runs, t * (HALVES / V) + h / V, walks * (HALVES / V)), out + p * PANEL);    \
    }
#define TILES(NAME, KIND, L)                                                                                                         \
    TILE(NAME, KIND, L, 1, 1) TILE(NAME, KIND, L, 1, 2) TILE(NAME, KIND, L, 1, 3) TILE(NAME, KIND, L, 1, 4)                           \
    TILE(NAME, KIND, L, 1, 5) TILE(NAME, KIND, L, 1, 6) TILE(NAME, KIND, L, 1, 7) TILE(NAME, KIND, L, 1, 8)                           \
    TILE(NAME, KIND, L, 2, 1) TILE(NAME, KIND, L, 2, 2) TILE(NAME, KIND, L, 2, 3) TILE(NAME, KIND, L, 2, 4)                           \
    TILE(NAME, KIND, L, 3, 1) TILE(NAME, KIND, L, 3, 2) TILE(NAME, KIND, L, 3, 3)
TILES(tile_w4, W4, (RUN_DOTS / 2))
TILES(tile_w8, W8, RUN_DOTS)
TILES(tile_s24, S24, 3)

typedef void (*tile_t)(const Linear *, const uint8_t *, int64_t, int64_t, int64_t, const Digits *, int64_t, int, int, float *);
#define TABLE(NAME)                                                                                       \
    {                                                                                                     \
        {NAME##_1_1, NAME##_1_2, NAME##_1_3, NAME##_1_4, NAME##_1_5, NAME##_1_6, NAME##_1_7, NAME##_1_8}, \
        {NAME##_2_1, NAME##_2_2, NAME##_2_3, NAME##_2_4},                                                 \
        {NAME##_3_1, NAME##_3_2, NAME##_3_3},                                                             \
    }
#define MOST_ROWS 8 /* of x in a tile */
static const tile_t TILE_OF[3][3][MOST_ROWS] = {TABLE(tile_w4), TABLE(tile_w8), TABLE(tile_s24)}; /* [kind - 1][digits - 1][rows - 1] */

/* out (+)= values + bias */
INLINE void put_typed(void *y, const int type, int64_t at, const float *values, const float *bias, int count, int add) {
    for (int j = 0; j < count; j++) put(y, type, at + j, values[j] + (bias ? bias[j] : 0.0f), add);
}
static void put_row(void *y, int type, int64_t at, const float *values, const float *bias, int count, int add) {
    if (type == TYPE_F32) put_typed(y, TYPE_F32, at, values, bias, count, add);
    else if (type == TYPE_BF16) put_typed(y, TYPE_BF16, at, values, bias, count, add);
    else put_typed(y, TYPE_F16, at, values, bias, count, add);
}

/* This member's rows of the weight, all rows of x. */
static void integer_part(const Linear *l, const Digits *x, void *y, int out_type, int64_t out_stride, int add, const Team *team) {
    static const int most_streams[3] = {W4_STREAMS, W8_STREAMS, S24_STREAMS}, columns[3] = {8, 4, 32}, size[3] = {64, 64, 192};
    const int kind = l->kind - 1;
    int64_t start, end, bytes = x->wide / columns[kind] * size[kind]; /* of a panel */
    float out[MOST_ROWS * 2 * PANEL];
    if (!x->rows) return;
    int most = most_streams[kind] / x->digits < MOST_ROWS ? most_streams[kind] / x->digits : MOST_ROWS;
    int64_t tiles = tiles_of(x->rows, most ? most : 1), streams = tile_size(x->rows, tiles, 0) * x->digits;
    int vectors = kind == KIND_W4 - 1 ? W4_VECTORS(streams) : kind == KIND_W8 - 1 ? W8_VECTORS(streams) : S24_VECTORS(streams);
    team_part(team, l->rows, PANEL, &start, &end);
    for (int64_t n = start, step; n < end; n += step) {
        const uint8_t *w = l->weight + n / PANEL * bytes;
        step = vectors > HALVES && n + PANEL < end ? 2 * PANEL : PANEL;
        int valid = (int)(l->rows - n < step ? l->rows - n : step);
        for (int64_t t = 0, row = 0, m; t < tiles; t++, row += m) {
            m = tile_size(x->rows, tiles, t);
            TILE_OF[kind][x->digits - 1][m - 1](l, w, bytes, n / PANEL, step > PANEL, x, row, (int)t, (int)tiles, out);
            for (int64_t i = 0; i < m; i++)
                put_row(y, out_type, (row + i) * out_stride + n, out + i * 2 * PANEL, l->bias ? l->bias + n : NULL, valid, add);
        }
    }
}

typedef struct {
    const Linear *linear;
    const void *x;
    void *y, *memory;
    int64_t rows;
    int32_t x_type, y_type, digits;
} Product;

static void product_job(void *p, const Team *team) {
    Product *job = p;
    const Linear *l = job->linear;
    if (l->kind == KIND_DENSE) {
        const float *x = job->x;
        if (job->x_type != TYPE_F32) {
            float *wide = job->memory;
            int64_t start, end;
            team_part(team, job->rows * l->columns, 64, &start, &end);
            for (int64_t i = start; i < end; i++) wide[i] = load_as(job->x, job->x_type, i);
            team_barrier(team);
            x = wide;
        }
        dense_part(l, x, l->columns, job->rows, job->y, job->y_type, l->rows, 0, team);
        return;
    }
    Digits x = digits_in(job->memory, job->rows, job->digits, l->group, l->groups);
    quantize_rows(job->x, job->x_type, l->columns, l->columns, &x, team);
    team_barrier(team);
    integer_part(l, &x, job->y, job->y_type, l->rows, 0, team);
}

/* Bytes of working memory that linear_run wants for so many rows. */
int64_t linear_memory(const Linear *l, int64_t rows, int32_t digits) {
    if (l->kind == KIND_DENSE) return rows * l->columns * 4 + 64;
    return digits_bytes(rows, digits, l->group * l->groups, l->groups);
}
/* x [rows, columns] -> y [rows, l->rows], both contiguous. */
void linear_run(const Linear *l, const void *x, int32_t x_type, int64_t rows, void *y, int32_t y_type, int32_t digits,
                void *memory, int32_t threads) {
    Product job = {l, x, y, memory, rows, x_type, y_type, digits};
    parallel(product_job, &job, threads);
}
