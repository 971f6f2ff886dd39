/* Products of dense weights with many rows: the sums of dense.h, one running sum after another.
 *
 * Lanes are rows of the weight, of which a panel is made float32 and transposed, SECTION columns at a time: [running sum][step][row], where
 * running sum c has the columns c, c + 32, ... It stays in the second cache while tiles of x pass by, [running sum][step][row of x].
 * Running sums come in the order of their bits reversed, so that each is added to the one it is paired with as soon as both are there.
 *
 * GEMM_ROWS: of x in a tile, with GEMM_VECTORS sums for all registers. FEW_ROWS: so many dense_part multiplies faster, because transposing a
 * weight takes as long as several rows (measured on Zen 4: level at 24 to 28, with AVX2 at 14); at least GEMM_ROWS. */
#if LANES == 8
#define GEMM_ROWS 6
#define GEMM_VECTORS 2
#define FEW_ROWS 12
#elif defined(__AVX512F__) || defined(COMPRESS_EMULATED)
#define GEMM_ROWS 14
#define GEMM_VECTORS 2
#define FEW_ROWS 24
#else
#define GEMM_ROWS 2
#define GEMM_VECTORS 1
#define FEW_ROWS 12
#endif
#define GEMM_PANEL (GEMM_VECTORS * LANES)
#define LEVELS 5    /* of pairs: RUNNING = 2^LEVELS */
#define EXPANDED_APART (SECTION + RUNNING + 16) /* from row to row of what is expanded; not a power of two */
#define SUM_APART(STEPS) ((STEPS) * GEMM_PANEL + 16) /* from a running sum's columns to the next one's; not a power of two, whose lines share a set */
#define BLOCK_TILES 64 /* whose sums wait for the next section */

static const uint8_t REVERSED[RUNNING] = {0, 16, 8, 24, 4, 20, 12, 28, 2, 18, 10, 26, 6, 22, 14, 30,
                                          1, 17, 9, 25, 5, 21, 13, 29, 3, 19, 11, 27, 7, 23, 15, 31};

static int64_t gemm_bytes(int64_t rows, int64_t columns) { return rows * columns * 4 + 64; }

/* Columns of x from k on, `size` of them, of M rows; those beyond the last 32 as they come. */
INLINE void transpose_input(const void *x, const int type, int64_t at, int64_t apart, int64_t M, int64_t k, int64_t size, float *out) {
    const int64_t steps = size / RUNNING;
    at += k;
    for (int64_t j = 0; j < steps; j++, at += RUNNING)
        for (int c = 0; c < RUNNING; c++)
            for (int64_t m = 0; m < M; m++) out[(REVERSED[c] * steps + j) * M + m] = load_as(x, type, at + m * apart + c);
    for (int64_t c = 0; c < size && !steps; c++)
        for (int64_t m = 0; m < M; m++) out[c * M + m] = load_as(x, type, at + m * apart + c);
}
/* This member's share of x [rows, columns], `apart` numbers from row to row, for all products with it: rows * columns numbers. */
static void gemm_input(const void *x, int type, int64_t apart, int64_t rows, int64_t columns, float *out, const Team *team) {
    const int64_t tiles = tiles_of(rows, GEMM_ROWS), whole = columns / RUNNING * RUNNING, sections = (whole + SECTION - 1) / SECTION;
    int64_t start, end;
    team_part(team, tiles * (sections + 1), 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        const int64_t t = unit / (sections + 1), k = unit % (sections + 1) * SECTION, row = rows * t / tiles, M = tile_size(rows, tiles, t);
        const int64_t from = k < whole ? k : whole, next = k < whole ? (whole - k < SECTION ? whole : k + SECTION) : columns;
        float *to = out + row * columns + from * M;
        if (type == TYPE_F32) transpose_input(x, TYPE_F32, row * apart, apart, M, from, next - from, to);
        else if (type == TYPE_BF16) transpose_input(x, TYPE_BF16, row * apart, apart, M, from, next - from, to);
        else transpose_input(x, TYPE_F16, row * apart, apart, M, from, next - from, to);
    }
}

/* Rows [n, n + GEMM_PANEL) of the weight, as far as there are; columns [k, k + size), whole running sums. */
INLINE void transpose_weight(const Linear *l, const int type, int64_t n, int64_t k, int64_t size, float *out) {
    const int64_t steps = size / RUNNING;
    for (int64_t j = 0; j < steps; j++, k += RUNNING)
        for (int v = 0; v < GEMM_VECTORS; v++) {
            int64_t at[LANES];
            for (int i = 0; i < LANES; i++) {
                int64_t row = n + v * LANES + i;
                at[i] = (row < l->rows ? row : l->rows - 1) * l->columns + k;
                __builtin_prefetch(address_of(l->weight, type, at[i] + 8 * RUNNING));
            }
            for (int c = 0; c < RUNNING; c += LANES) {
                F block[LANES];
                UNROLL for (int i = 0; i < LANES; i++) block[i] = f_load_in(l->weight, type, at[i], c);
                f_transpose(block);
                UNROLL for (int i = 0; i < LANES; i++)
                    f_store(out + REVERSED[c + i] * SUM_APART(steps) + j * GEMM_PANEL + v * LANES, block[i]);
            }
        }
}

/* A section of a panel times one of a tile, added to out [M, GEMM_PANEL] or written there. */
INLINE void gemm_tile(const float *w, const float *x, const int M, int64_t steps, int add, float *out) {
    _Alignas(64) float held[LEVELS][GEMM_ROWS * GEMM_PANEL];
    for (int i = 0; i < RUNNING; i++, w += SUM_APART(steps) - steps * GEMM_PANEL) {
        F sum[GEMM_ROWS][GEMM_VECTORS];
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < GEMM_VECTORS; v++) sum[m][v] = f_zero();
        for (int64_t j = 0; j < steps; j++, w += GEMM_PANEL, x += M) {
            F weight[GEMM_VECTORS];
            __builtin_prefetch((const uint8_t *)x + 1024); /* the machine does not look into the next page */
            UNROLL for (int v = 0; v < GEMM_VECTORS; v++) weight[v] = f_load(w + v * LANES);
            UNROLL for (int m = 0; m < M; m++) {
                F value = f_set1(x[m]);
                UNROLL for (int v = 0; v < GEMM_VECTORS; v++) sum[m][v] = f_fma(weight[v], value, sum[m][v]);
            }
        }
        int level = 0;
        for (;; level++) { /* up to the first pair whose other half is not there yet */
            const float *other = level < LEVELS ? held[level] : out;
            if (level < LEVELS ? !(i >> level & 1) : !add) break;
            UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int v = 0; v < GEMM_VECTORS; v++) {
                    const int at = m * GEMM_PANEL + v * LANES;
                    sum[m][v] = f_add(f_load(other + at), sum[m][v]);
                }
            if (level == LEVELS) break;
        }
        float *to = level < LEVELS ? held[level] : out;
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < GEMM_VECTORS; v++) f_store(to + m * GEMM_PANEL + v * LANES, sum[m][v]);
    }
}
DECLARED void gemm_part(const Linear *l, const float *x, int64_t rows, void *y, int out_type, int64_t out_stride, int add, const Team *team);
#if IN_PART(PRODUCTS)
#define GEMM(M)                                                                                          \
    static void gemm_##M(const float *w, const float *x, int64_t steps, int add, float *out) {           \
        if (M <= GEMM_ROWS && 2 * M >= GEMM_ROWS) gemm_tile(w, x, M, steps, add, out);                   \
    }
GEMM(1) GEMM(2) GEMM(3) GEMM(4) GEMM(5) GEMM(6) GEMM(7) GEMM(8) GEMM(9) GEMM(10) GEMM(11) GEMM(12) GEMM(13) GEMM(14)
static void (*const GEMM_OF[14])(const float *, const float *, int64_t, int, float *) = { /* [rows - 1]; there are more than half a tile */
    gemm_1, gemm_2, gemm_3, gemm_4, gemm_5, gemm_6, gemm_7, gemm_8, gemm_9, gemm_10, gemm_11, gemm_12, gemm_13, gemm_14};

/* This member's rows of the weight times more than FEW_ROWS rows, as gemm_input has them. */
SHARED void gemm_part(const Linear *l, const float *x, int64_t rows, void *y, int out_type, int64_t out_stride, int add, const Team *team) {
    _Alignas(64) float weight[RUNNING * SUM_APART(SECTION / RUNNING)], sums[BLOCK_TILES * GEMM_ROWS * GEMM_PANEL];
    float tail[RUNNING][GEMM_PANEL];
    const int64_t columns = l->columns, whole = columns / RUNNING * RUNNING, tiles = tiles_of(rows, GEMM_ROWS);
    const int expands = is_expanded(l->weight_type);
    _Alignas(64) uint16_t expanded[GEMM_PANEL * EXPANDED_APART + WORD_ROOM]; /* a section, the last one with the columns beyond the last 32 */
    Code at[GEMM_PANEL];
    Linear some = *l;
    if (expands) some.weight = (const uint8_t *)expanded, some.weight_type = expanded_type(l), some.columns = EXPANDED_APART;
    const int type = some.weight_type;
    const int64_t last_section = whole ? (whole - 1) / SECTION * SECTION : 0;
    int64_t start, end;
    team_part(team, l->rows, GEMM_PANEL, &start, &end);
    for (int64_t first = 0; first < tiles; first += BLOCK_TILES)
        for (int64_t n = start; n < end; n += GEMM_PANEL) {
            const int64_t last = first + BLOCK_TILES < tiles ? first + BLOCK_TILES : tiles, from = rows * first / tiles;
            const int valid = (int)(l->rows - n < GEMM_PANEL ? l->rows - n : GEMM_PANEL);
            if (!whole) memset(sums, 0, sizeof sums);
            if (expands) some.rows = valid;
            for (int i = 0; i < valid && expands; i++) {
                at[i] = first_code(l, n + i);
                if (!whole) expand_columns(l, n + i, 0, columns, at[i], expanded + i * EXPANDED_APART);
            }
            for (int64_t k = 0; k < whole; k += SECTION) {
                const int64_t size = whole - k < SECTION ? whole - k : SECTION, there = k == last_section ? columns - k : size;
                for (int i = 0; i < valid && expands; i++) at[i] = expand_columns(l, n + i, k, there, at[i], expanded + i * EXPANDED_APART);
                const int64_t top = expands ? 0 : n, left = expands ? 0 : k; /* where that is in `some` */
                if (type == TYPE_BF16) transpose_weight(&some, TYPE_BF16, top, left, size, weight);
                else if (type == TYPE_F16) transpose_weight(&some, TYPE_F16, top, left, size, weight);
                else if (type == TYPE_F8) transpose_weight(l, TYPE_F8, n, k, size, weight);
                else if (type == TYPE_MX8) transpose_weight(l, TYPE_MX8, n, k, size, weight);
                else if (type == TYPE_BLOCK8) transpose_weight(l, TYPE_BLOCK8, n, k, size, weight);
                else transpose_weight(l, TYPE_F32, n, k, size, weight);
                for (int64_t t = first; t < last; t++) {
                    const int64_t row = rows * t / tiles, M = tile_size(rows, tiles, t);
                    GEMM_OF[M - 1](weight, x + row * columns + k * M, size / RUNNING, k > 0, sums + (row - from) * GEMM_PANEL);
                }
            }
            for (int i = 0; i < GEMM_PANEL; i++)
                for (int64_t k = whole; k < columns; k++) {
                    const int64_t place = expands ? i * EXPANDED_APART + k - last_section : (n + i) * columns + k;
                    tail[k - whole][i] = i < valid ? load_as(some.weight, type, place) : 0.0f;
                }
            for (int64_t t = first; t < last; t++) {
                const int64_t row = rows * t / tiles, M = tile_size(rows, tiles, t);
                for (int64_t m = 0; m < M; m++) {
                    float *total = sums + (row - from + m) * GEMM_PANEL;
                    for (int64_t k = whole; k < columns; k++) {
                        const float value = x[row * columns + k * M + m];
                        for (int i = 0; i < GEMM_PANEL; i++) total[i] = fmaf(tail[k - whole][i], value, total[i]);
                    }
                    for (int i = 0; i < valid && l->scale; i++) total[i] *= ((const float *)l->scale)[n + i];
                    put_row(y, out_type, (row + m) * out_stride + n, total, l->bias ? l->bias + n : NULL, valid, add);
                }
            }
        }
}
#endif
