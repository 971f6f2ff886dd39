/* Which tile computes what, and the product as a whole. */

/* Streams (rows of x times digits) that a tile can hold in registers. */
#if LANES == 8
#define W4_STREAMS 4
#define W8_STREAMS 2
#define S24_STREAMS 2
#define PAIRS 1
#elif !defined(__AVX512F__) && !defined(COMPRESS_EMULATED)
#define W4_STREAMS 1 /* vectors of vectors: one at a time */
#define W8_STREAMS 1
#define S24_STREAMS 1
#define PAIRS 0
#else
#define W4_STREAMS 8
#define W8_STREAMS 8
#define S24_STREAMS 4
#define PAIRS 1
#endif

#if LANES == 8
#define CODE_STREAMS 4
#else
#define CODE_STREAMS W4_STREAMS
#endif

/* `m` rows of x, at most as many as the tile holds; fewer go one by one. STEP vectors of the panel at a time: codes unpacked
 * beforehand leave registers for the whole panel. */
#define TILE(NAME, STREAMS, D, STEP)                                                                                              \
    static void NAME##_##D(const Linear *l, const uint8_t *w, const Digits *x, int64_t panel, int64_t row, int m, float *out) {   \
        enum { M = STREAMS / D > 1 ? STREAMS / D : 1 };                                                                           \
        if (m < M || M == 1) {                                                                                                    \
            for (int i = 0; i < m; i++) NAME(l, w, panel, 0, HALVES, x, row + i, 1, D, out + i * PANEL);                          \
        } else                                                                                                                    \
            for (int h = 0; h < HALVES; h += STEP) NAME(l, w, panel, h, STEP, x, row, M, D, out);                                 \
    }
#define TILES(NAME, STREAMS, STEP) \
    TILE(NAME, STREAMS, 1, STEP)   \
    TILE(NAME, STREAMS, 2, STEP)   \
    TILE(NAME, STREAMS, 3, STEP)
TILES(tile_w4, W4_STREAMS, 1)
TILES(tile_w8, W8_STREAMS, 1)
TILES(tile_s24, S24_STREAMS, 1)
TILES(tile_codes, CODE_STREAMS, HALVES)

/* One row of one digit: two panels at a time. With more digits AVX2 has too few registers (AVX-512 has them: unmeasured). */
#define PAIR_TILE(NAME)                                                                                                             \
    static void NAME##_pair(const Linear *l, const uint8_t *w, const Digits *x, int64_t panel, int64_t row, int m, float *out) { \
        (void)m;                                                                                                                    \
        NAME(l, w, panel, 0, MOST, x, row, 1, 1, out);                                                                              \
    }
PAIR_TILE(tile_w4)
PAIR_TILE(tile_w8)

typedef void (*tile_t)(const Linear *, const uint8_t *, const Digits *, int64_t, int64_t, int, float *);
typedef struct {
    tile_t digits[3], pair; /* pair: of two panels, or NULL */
    int streams, bytes, columns; /* of a piece */
} Kind;
static const Kind KINDS[4] = {{{tile_w4_1, tile_w4_2, tile_w4_3}, PAIRS ? tile_w4_pair : NULL, W4_STREAMS, 64, 8},
                              {{tile_w8_1, tile_w8_2, tile_w8_3}, PAIRS ? tile_w8_pair : NULL, W8_STREAMS, 64, 4},
                              {{tile_s24_1, tile_s24_2, tile_s24_3}, NULL, S24_STREAMS, 192, 32},
                              {{tile_codes_1, tile_codes_2, tile_codes_3}, NULL, CODE_STREAMS, 0, 4}};
enum { CODES = 3 };

#define UNPACK_ROWS 8

/* This member's rows of the weight, all rows of x. */
static void integer_part(const Linear *l, const Digits *x, void *y, int out_type, int64_t out_stride, int add, const Team *team) {
    int64_t start, end;
    float out[8 * PANEL];
    uint8_t *codes = NULL; /* worth unpacking from some rows on; without memory the other tiles give the same */
    if (x->rows >= UNPACK_ROWS && l->kind != KIND_W8) codes = malloc((size_t)x->wide * PANEL);
    const Kind *stored = &KINDS[l->kind - 1], *kind = codes ? &KINDS[CODES] : stored;
    int tile_rows = kind->streams / x->digits > 1 ? kind->streams / x->digits : 1;
    int64_t panel_bytes = x->wide / stored->columns * stored->bytes;
    team_part(team, l->rows, PANEL, &start, &end);
    for (int64_t n = start, step; n < end; n += step) {
        const uint8_t *w = l->weight + n / PANEL * panel_bytes;
        tile_t tile = kind->digits[x->digits - 1];
        step = PANEL;
        if (kind->pair && x->rows == 1 && x->digits == 1 && n + PANEL < end) tile = kind->pair, step = 2 * PANEL;
        if (codes) (l->kind == KIND_W4 ? unpack_w4 : unpack_s24)(w, x->wide, codes);
        int valid = (int)(l->rows - n < step ? l->rows - n : step);
        for (int64_t row = 0; row < x->rows; row += tile_rows) {
            int m = (int)(x->rows - row < tile_rows ? x->rows - row : tile_rows);
            tile(l, codes ? codes : w, x, n / PANEL, row, m, out);
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
