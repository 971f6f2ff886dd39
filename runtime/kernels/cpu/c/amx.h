/* Integer products of many rows with AMX: tiles of up to 16 rows of 64 bytes, and a unit that multiplies them.
 *
 * The streams of x, a row's digits one after the other, are rows of A (signed). Of codes that are bytes, half a piece (planes.h: four
 * columns of 16 rows of the weight) is a row of B (unsigned): nothing is repacked. The sums of a group leave the tiles as exact integers,
 * and finish_group adds them to the result: the same bits as with vectors. 2:4 weights, those with levels and few streams stay with those. */
#ifdef __AMX_INT8__
/* Taken from so many streams on, by the kind of codes. W4 and W8 were measured on a Xeon with AMX: where codes are made bytes first (up to
 * four streams read them at their own width instead) tiles are 1.7 to 2.1 times as fast as vectors from 6 streams on; where they are bytes
 * already, 1.3 times from 12 on, and slower for 8. */
#define AMX_STREAMS(CODES) ((CODES) == 8 ? 12 : 5)
#define AMX_COLUMNS 512 /* of codes made bytes at a time: 16 KiB, which the first cache holds while rows pass; twice or half as many made no difference. */
#define TILE_ROWS 16
/* What was written at AT, and elsewhere, is in memory now: GCC is not told what tile instructions read. */
#define WRITTEN(AT) __asm__ volatile("" ::"r"(AT) : "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Tiles 0 to 3: the sums of two blocks of streams and two vectors of the panel; 4 and 5: the streams; 6 and 7: the codes. */
typedef struct {
    int64_t rows, first; /* of x, in both blocks and in the first; 0: AMX is not used */
    int depth;           /* columns that are multiplied at once, of which a group has a whole multiple */
} Amx;

/* Configures this thread's tiles for all rows of x, in blocks as even as can be. amx_end releases them. */
static Amx amx_begin(const Linear *l, const Digits *x) {
    if (l->kind == KIND_S24 || KIND[l->kind].width || x->rows * x->digits < AMX_STREAMS(l->kind)) return (Amx){0};
    const int64_t block = TILE_ROWS / x->digits, rows = x->rows < BLOCK_ROWS ? x->rows : BLOCK_ROWS, pairs = tiles_of(rows, 2 * block);
    Amx amx = {.rows = (rows + pairs - 1) / pairs};
    amx.first = amx.rows > block ? (amx.rows + 1) / 2 : amx.rows;
    int steps = 1;
    while (l->group % (4 * steps) || l->group > 64 * steps) steps++;
    amx.depth = l->group / steps;
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        const int64_t streams = (tile < 2 || tile == 4 ? amx.first : amx.rows - amx.first) * x->digits;
        config.rows[tile] = (uint8_t)(tile < 6 ? streams : amx.depth / 4);
        config.row_bytes[tile] = (uint16_t)(!config.rows[tile] ? 0 : tile == 4 || tile == 5 ? amx.depth : 64);
    }
    WRITTEN(&config);
    _tile_loadconfig(&config);
    return amx;
}
static void amx_end(const Amx *amx) {
    if (amx->rows) _tile_release();
}

/* Sums of a group: streams from `digit` on, times codes of a panel -> sums [streams, 32]. */
INLINE void amx_group(const Amx *amx, const uint8_t *w, int cold, const int8_t *digit, int64_t apart, int group, const int D,
                      int32_t *sums) {
    const int64_t second = amx->first * D;
    const int two = amx->rows > amx->first;
    WRITTEN(w);
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (const int8_t *end = digit + group; digit < end; digit += amx->depth, w += amx->depth / 4 * PIECE) {
        if (cold) fetch(w, amx->depth / 4 * PIECE);
        _tile_loadd(6, w, PIECE);
        _tile_loadd(7, w + PIECE / 2, PIECE);
        _tile_loadd(4, digit, apart);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        if (!two) continue;
        _tile_loadd(5, digit + second * apart, apart);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + LANES, PANEL * 4);
    if (!two) return;
    _tile_stored(2, sums + second * PANEL, PANEL * 4);
    _tile_stored(3, sums + second * PANEL + LANES, PANEL * 4);
}

/* The sums of group g of M rows from `row` on, added to out [M, 32]. */
INLINE void amx_finish(const Linear *l, const Scales *scales, const Digits *x, int64_t row, const int M, const int D, int64_t g,
                       const int32_t *sums, float *out) {
    const int H = VECTORS, base = KIND[l->kind].base;
    I sum[VECTORS][2 * STREAMS], offset[VECTORS];
    F result[VECTORS][STREAMS];
    EACH_SUM(M * D) sum[h][s] = i_load(sums + s * PANEL + h * LANES);
    EACH_SUM(M) result[h][s] = f_load(out + s * PANEL + h * LANES);
    UNROLL for (int h = 0; h < H; h++)
        if (l->zero) offset[h] = i_add(i_load_i8(l->zero + scales->at + h * LANES), i_set1(base));
    finish_group(l, scales, 0, H, x, row, M, D, g, sum, offset, base, result);
    EACH_SUM(M) f_store(out + s * PANEL + h * LANES, result[h][s]);
}

/* Groups of the run times the rows of one pair of blocks, which begin at `start`; of `count` from `row` on the results are added to out. */
INLINE void amx_tile(const Linear *l, const Amx *amx, const Stretch *run, const Digits *x, int64_t start, int64_t row, int64_t count,
                     const int D, float *out) {
    _Alignas(64) int32_t sums[2][2 * TILE_ROWS * PANEL]; /* the next group's are multiplied while this one's are finished */
    const int64_t few = D == 1 ? 4 : 2; /* rows at once, whose numbers registers hold */
    const int8_t *digit = x->digit + start * D * x->apart;
    Scales scales = first_scales(l, run);
    for (int64_t g = run->first; g <= run->last; g++) {
        if (g < run->last)
            amx_group(amx, run->w + (g - run->first) * l->group / 4 * PIECE, run->cold, digit + g * l->group, x->apart, l->group, D,
                      sums[g & 1]);
        if (g == run->first) continue;
        const int32_t *sum = sums[(g - 1) & 1] + (row - start) * D * PANEL;
        if (run->cold) fetch_scales(l, &scales);
        int64_t m = 0;
        for (; m + few <= count; m += few) amx_finish(l, &scales, x, row + m, few, D, g - 1, sum + m * D * PANEL, out + m * PANEL);
        for (; m < count; m++) amx_finish(l, &scales, x, row + m, 1, D, g - 1, sum + m * D * PANEL, out + m * PANEL);
        next_group(&scales);
    }
}

/* As run_tiles, for codes that are bytes. The last rows are tiles of as many as the others, some of which came before. */
static void amx_run(const Linear *l, const Amx *amx, Stretch *run, const Digits *x, int64_t row, int64_t count, float *out) {
    for (int64_t end = row + count; row < end; row += amx->rows, out += amx->rows * PANEL, run->cold = 0) {
        const int64_t start = row + amx->rows <= x->rows ? row : x->rows - amx->rows, here = end - row < amx->rows ? end - row : amx->rows;
        if (x->digits == 1) amx_tile(l, amx, run, x, start, row, here, 1, out);
        else if (x->digits == 2) amx_tile(l, amx, run, x, start, row, here, 2, out);
        else amx_tile(l, amx, run, x, start, row, here, 3, out);
    }
}
#else
#define AMX_COLUMNS 0
typedef struct { int64_t rows; } Amx;
static Amx amx_begin(const Linear *l, const Digits *x) { return (void)l, (void)x, (Amx){0}; }
static void amx_end(const Amx *amx) { (void)amx; }
static void amx_run(const Linear *l, const Amx *amx, Stretch *run, const Digits *x, int64_t row, int64_t count, float *out) {
    (void)l, (void)amx, (void)run, (void)x, (void)row, (void)count, (void)out;
}
#endif
