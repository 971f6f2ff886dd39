/* Dense weights [rows, columns] in float32, bfloat16, float16 or float8 with a scale a row, as they lie in the file, MX8 or BLOCK8; float32
 * activations.
 *
 * Products of SECTION columns are added up in 32 running sums (column modulo 32), those by halves; sections one after another, then the
 * columns beyond the last 32: whatever the vectors, the tile and the number of rows (gemm.h has another way to the same sums). */
#define RUNNING 32
#define RUNNING_VECTORS (RUNNING / LANES)
#define SECTION 2048 /* columns */
#define DENSE_BLOCK (1 << 18) /* bytes, as float32, of rows of a weight that stay in the cache while all rows of x pass by */

/* Most rows of x in a tile, and rows of the weight beside each other: sums for all registers. One row of x waits for memory, which is
 * faster as one row of the weight after another. */
#if LANES == 8
#define DENSE_ROWS 3
#define BESIDE(M) 1
#elif defined(__AVX512F__) || defined(COMPRESS_EMULATED)
#define DENSE_ROWS 6
#define BESIDE(M) ((M) == 1 ? 1 : 2)
#else
#define DENSE_ROWS 1
#define BESIDE(M) 1
#endif

/* Columns [k, k + RUNNING) of N rows of the weight times M of x. */
INLINE void dense_step(const void *w, const int type, const int64_t *at, const int N, const float *x, int64_t apart, const int M, int64_t k,
                       F sum[2][DENSE_ROWS][RUNNING_VECTORS]) {
    UNROLL for (int v = 0; v < RUNNING_VECTORS; v++) {
        F weight[2];
        UNROLL for (int n = 0; n < N; n++) weight[n] = f_load_in(w, type, at[n] + k, v * LANES);
        UNROLL for (int m = 0; m < M; m++) {
            F value = f_load(x + m * apart + k + v * LANES);
            UNROLL for (int n = 0; n < N; n++) sum[n][m][v] = f_fma(weight[n], value, sum[n][m][v]);
        }
    }
}

/* out [N, M] = rows at[0], ..., at[N - 1] of the weight, times M rows of x, `apart` numbers from each other; whole running sums. */
INLINE void dense_tile(const void *w, const int type, const int64_t *at, const int N, const float *x, int64_t apart, const int M,
                       int64_t columns, int cold, float *out) {
    const int line = 2 * RUNNING; /* columns: 64 bytes of the smallest type */
    F sum[2][DENSE_ROWS][RUNNING_VECTORS];
    int64_t k = 0;
    UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int v = 0; v < RUNNING_VECTORS; v++) sum[n][m][v] = f_zero();
    for (; k + line <= columns; k += line) {
        if (cold) UNROLL for (int n = 0; n < N; n++) fetch(address_of(w, type, at[n] + k), (int)(address_of(w, type, line) - (const uint8_t *)w));
        UNROLL for (int half = 0; half < line; half += RUNNING) dense_step(w, type, at, N, x, apart, M, k + half, sum);
    }
    if (k + RUNNING <= columns) dense_step(w, type, at, N, x, apart, M, k, sum);
    UNROLL for (int n = 0; n < N; n++)
        UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int half = RUNNING_VECTORS / 2; half; half /= 2)
                UNROLL for (int v = 0; v < half; v++) sum[n][m][v] = f_add(sum[n][m][v], sum[n][m][v + half]);
            out[n * M + m] = f_sum(sum[n][m][0]);
        }
}

DECLARED void dense_part(const Linear *l, const float *x, int64_t apart, int64_t rows, void *y, int out_type, int64_t out_stride, int add,
                         const Team *team);
#if IN_PART(PRODUCTS)
typedef void (*dense_t)(const void *, const int64_t *, const float *, int64_t, int64_t, int, float *);
#define DENSE(TYPE, M)                                                                                                            \
    static void dense_##TYPE##_##M(const void *w, const int64_t *at, const float *x, int64_t apart, int64_t columns, int cold, \
                                   float *out) {                                                                                  \
        if (M <= DENSE_ROWS) dense_tile(w, TYPE, at, BESIDE(M), x, apart, M, columns, cold, out);                                 \
    }
#define DENSES(TYPE) DENSE(TYPE, 1) DENSE(TYPE, 2) DENSE(TYPE, 3) DENSE(TYPE, 4) DENSE(TYPE, 5) DENSE(TYPE, 6)
DENSES(TYPE_F32)
DENSES(TYPE_BF16)
DENSES(TYPE_F16)
DENSES(TYPE_F8)
DENSES(TYPE_MX8)
DENSES(TYPE_BLOCK8)
#define DENSE_TABLE(TYPE) {dense_##TYPE##_1, dense_##TYPE##_2, dense_##TYPE##_3, dense_##TYPE##_4, dense_##TYPE##_5, dense_##TYPE##_6}
static const dense_t DENSE_OF[6][6] = { /* [type][rows - 1] */
    DENSE_TABLE(TYPE_F32), DENSE_TABLE(TYPE_BF16), DENSE_TABLE(TYPE_F16), DENSE_TABLE(TYPE_F8), DENSE_TABLE(TYPE_MX8),
    DENSE_TABLE(TYPE_BLOCK8)};

/* y (+)= x times rows [start, end) of the weight. `fresh`: they come from memory, and what follows them is wanted next. */
static void dense_rows(const Linear *l, int64_t start, int64_t end, int fresh, const float *x, int64_t apart, int64_t rows, void *y,
                       int out_type, int64_t out_stride, int add) {
    const int64_t columns = l->columns, whole = columns / RUNNING * RUNNING;
    int64_t tiles = tiles_of(rows, DENSE_ROWS), at[2] = {0, 0};
    float out[2 * DENSE_ROWS], totals[2 * DENSE_ROWS];
    const int type = l->weight_type, beside = rows == 1 ? BESIDE(1) : BESIDE(2);
    const int64_t kept = DENSE_BLOCK / (columns * 4 + 1) / beside * beside, block = kept > beside ? kept : beside;
    for (int64_t first = start; first < end; first += block) {
        const int64_t last = first + block < end ? first + block : end;
        for (int64_t t = 0, row = 0, count; t < tiles; t++, row += count) {
            count = tile_size(rows, tiles, t);
            const dense_t tile = DENSE_OF[type][count - 1];
            for (int64_t n = first; n < last; n += beside) {
                for (int i = 0; i < beside; i++) at[i] = (n + i < last ? n + i : last - 1) * columns;
                tile(l->weight, at, x + row * apart, apart, whole < SECTION ? whole : SECTION, fresh && t == 0, totals);
                for (int64_t k = SECTION; k < whole; k += SECTION) {
                    const int64_t from[2] = {at[0] + k, at[1] + k};
                    tile(l->weight, from, x + row * apart + k, apart, whole - k < SECTION ? whole - k : SECTION, fresh && t == 0, out);
                    for (int i = 0; i < beside * count; i++) totals[i] += out[i];
                }
                for (int64_t i = 0; i < beside && n + i < last; i++)
                    for (int64_t m = row; m < row + count; m++) {
                        float total = totals[i * count + m - row];
                        for (int64_t k = whole; k < columns; k++) total = fmaf(load_as(l->weight, type, at[i] + k), x[m * apart + k], total);
                        if (l->scale) total *= ((const float *)l->scale)[n + i];
                        put(y, out_type, m * out_stride + n + i, total + (l->bias ? l->bias[n + i] : 0.0f), add);
                    }
            }
        }
    }
}

/* y (+)= x times this member's rows of the weight. */
SHARED void dense_part(const Linear *l, const float *x, int64_t apart, int64_t rows, void *y, int out_type, int64_t out_stride,
                       int add, const Team *team) {
    int64_t start, end;
    team_part(team, l->rows, 16, &start, &end);
    if (!is_expanded(l->weight_type)) {
        dense_rows(l, start, end, 1, x, apart, rows, y, out_type, out_stride, add);
        return;
    }
    _Alignas(64) uint16_t weight[EXPANDED + WORD_ROOM];
    Linear some = *l;
    some.weight = (const uint8_t *)weight, some.weight_type = expanded_type(l);
    const int64_t fitting = EXPANDED_ROWS / (l->columns + 1), step = fitting > 2 ? fitting / 2 * 2 : 2;
    for (int64_t n = start; n < end; n += step) {
        const int64_t count = end - n < step ? end - n : step;
        for (int64_t i = 0; i < count; i++) expand_columns(l, n + i, 0, l->columns, first_code(l, n + i), weight + i * l->columns);
        some.rows = count, some.bias = l->bias ? l->bias + n : NULL;
        dense_rows(&some, 0, count, 0, x, apart, rows, (uint8_t *)y + n * type_bytes(out_type), out_type, out_stride, add);
    }
}
#endif
