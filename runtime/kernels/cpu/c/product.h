/* Which tile computes what, and the product as a whole. */

/* Streams (rows of x times digits) that a tile can hold in registers. */
#if LANES == 8
#define W4_STREAMS 4
#define W8_STREAMS 2
#define S24_STREAMS 2
#elif !defined(__AVX512F__) && !defined(COMPRESS_EMULATED)
#define W4_STREAMS 1 /* vectors of vectors: one at a time */
#define W8_STREAMS 1
#define S24_STREAMS 1
#else
#define W4_STREAMS 8
#define W8_STREAMS 8
#define S24_STREAMS 4
#endif

#define TILE(NAME, STREAMS, D)                                                                            \
    static void NAME##_##D(const Linear *l, const Digits *x, int64_t panel, int64_t row, int m, float *out) { \
        enum { M = STREAMS / D > 1 ? STREAMS / D : 1 };                                                   \
        if (m < M || M == 1) {                                                                            \
            for (int i = 0; i < m; i++) NAME(l, panel, 0, HALVES, x, row + i, 1, D, out + i * PANEL);     \
        } else                                                                                            \
            for (int h = 0; h < HALVES; h++) NAME(l, panel, h, 1, x, row, M, D, out);                     \
    }
TILE(tile_w4, W4_STREAMS, 1)
TILE(tile_w4, W4_STREAMS, 2)
TILE(tile_w4, W4_STREAMS, 3)
TILE(tile_w8, W8_STREAMS, 1)
TILE(tile_w8, W8_STREAMS, 2)
TILE(tile_w8, W8_STREAMS, 3)
TILE(tile_s24, S24_STREAMS, 1)
TILE(tile_s24, S24_STREAMS, 2)
TILE(tile_s24, S24_STREAMS, 3)

#if LANES == 8
#define CODE_STREAMS 4
#else
#define CODE_STREAMS W4_STREAMS
#endif
#define CODES(D)                                                                                                               \
    static void tile_codes_##D(const Linear *l, const uint8_t *codes, int64_t panel, const Digits *x, int64_t row, int m, float *out) { \
        enum { M = CODE_STREAMS / D > 1 ? CODE_STREAMS / D : 1 };                                                                                         \
        if (m == M)                                                                                                            \
            tile_codes(l, codes, panel, x, row, M, D, out);                                                                    \
        else                                                                                                                   \
            for (int i = 0; i < m; i++) tile_codes(l, codes, panel, x, row + i, 1, D, out + i * PANEL);                        \
    }
CODES(1)
CODES(2)
CODES(3)

typedef void (*tile_t)(const Linear *, const Digits *, int64_t, int64_t, int, float *);

static tile_t tile_of(int kind, int digits, int *rows) {
    static const tile_t tiles[3][3] = {{tile_w4_1, tile_w4_2, tile_w4_3},
                                       {tile_w8_1, tile_w8_2, tile_w8_3},
                                       {tile_s24_1, tile_s24_2, tile_s24_3}};
    static const int streams[3] = {W4_STREAMS, W8_STREAMS, S24_STREAMS};
    *rows = streams[kind - 1] / digits > 1 ? streams[kind - 1] / digits : 1;
    return tiles[kind - 1][digits - 1];
}

#define UNPACK_ROWS 8

/* This member's rows of the weight, all rows of x. */
static void integer_part(const Linear *l, const Digits *x, void *y, int out_type, int64_t out_stride, int add, const Team *team) {
    int64_t start, end;
    int tile_rows;
    float out[8 * PANEL];
    tile_t tile = tile_of(l->kind, x->digits, &tile_rows);
    uint8_t *codes = NULL; /* worth unpacking from some rows on; without memory the other tiles give the same */
    if (x->rows >= UNPACK_ROWS && l->kind != KIND_W8) codes = malloc((size_t)x->wide * PANEL);
    if (codes) tile_rows = CODE_STREAMS / x->digits > 1 ? CODE_STREAMS / x->digits : 1;
    team_part(team, l->rows, PANEL, &start, &end);
    for (int64_t n = start; n < end; n += PANEL) {
        if (codes) (l->kind == KIND_W4 ? unpack_w4 : unpack_s24)(l, n / PANEL, x->wide, codes);
        int valid = (int)(l->rows - n < PANEL ? l->rows - n : PANEL);
        for (int64_t row = 0; row < x->rows; row += tile_rows) {
            int m = (int)(x->rows - row < tile_rows ? x->rows - row : tile_rows);
            if (!codes) tile(l, x, n / PANEL, row, m, out);
            else if (x->digits == 1) tile_codes_1(l, codes, n / PANEL, x, row, m, out);
            else if (x->digits == 2) tile_codes_2(l, codes, n / PANEL, x, row, m, out);
            else tile_codes_3(l, codes, n / PANEL, x, row, m, out);
            for (int i = 0; i < m; i++)
                for (int j = 0; j < valid; j++)
                    put(y, out_type, (row + i) * out_stride + n + j, out[i * PANEL + j] + (l->bias ? l->bias[n + j] : 0.0f), add);
        }
    }
    free(codes);
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
