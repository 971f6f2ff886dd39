/* Which tile computes what, and the product as a whole. */

/* Most streams (rows of x times digits) of a tile, and the vectors of a panel that a tile of S streams walks at once: no more sums than
 * registers hold, with more results spill. DIRECT: most streams that read codes at their own width; for more of them codes are made
 * bytes first. */
#if defined(__AVX512F__) || defined(COMPRESS_EMULATED)
#define MOST_STREAMS STREAMS
#define VECTORS_OF(BITS, S) VECTORS
#define DIRECT 4
#elif LANES == 8
#define MOST_STREAMS 4
#define VECTORS_OF(BITS, S) ((S) == 1 || ((S) == 2 && (BITS) <= 4) ? VECTORS : (S) == 2 || (BITS) <= 4 ? 2 : 1)
#define DIRECT 4
#else
#define MOST_STREAMS 1 /* vectors of vectors: one row at a time */
#define VECTORS_OF(BITS, S) 1
#define DIRECT 0
#endif
#if defined(SANITIZED) && DIRECT /* small tiles alone: compilers take minutes over all of them with checks in */
#undef MOST_STREAMS
#undef DIRECT
#define MOST_STREAMS 2
#define DIRECT 2
#endif
#define MOST_ROWS 8 /* of x in a tile */
/* Instead of a kind: codes that are bytes, of any size; NARROW, MIDDLE: of up to 4 bits, of up to 5; BYTES_16, BYTES_32: with levels, of up to
 * 6 bits and of up to 5; WIDE_32: with levels, of any size. */
#define BYTES 9
#define BYTES_16 20
#define BYTES_32 21
#if WIDE_SUMS
#define NARROW BYTES /* no difference */
#define MIDDLE BYTES
#define WIDE_32 BYTES_32
#else
#define NARROW 8
#define MIDDLE 11
#define WIDE_32 22
#endif
INLINE int are_bytes(const int kind) { return kind == NARROW || kind == MIDDLE || kind == BYTES || (kind >= BYTES_16 && kind < KIND_CODEBOOK_2); }
INLINE int reach_of(const int kind) {
    if (!are_bytes(kind)) return KIND[kind].reach;
    return kind == BYTES || kind == WIDE_32 ? 8 : kind == NARROW ? 4 : kind == BYTES_16 ? 6 : 5;
}
INLINE int width_of(const int kind) { return !are_bytes(kind) ? KIND[kind].width : kind == BYTES_16 ? 16 : kind > BYTES_16 ? 32 : 0; }
/* As many bits as codes would have that need as many registers. */
INLINE int room_of(const int kind) {
    if (are_bytes(kind)) return kind == BYTES || kind == WIDE_32 ? 8 : 4;
    return KIND[kind].width == 16 || KIND[kind].reach == 8 ? 8 : KIND[kind].bits;
}
/* Which of them a kind becomes. */
static int bytes_kind(int kind) {
    if (kind == KIND_S24) return kind;
    if (KIND[kind].width) return KIND[kind].width == 16 ? BYTES_16 : KIND[kind].reach > 5 ? WIDE_32 : BYTES_32;
    return KIND[kind].reach <= 4 ? NARROW : KIND[kind].reach == 5 ? MIDDLE : BYTES;
}

/* Bytes of so many groups of a panel. */
static int64_t run_bytes(const Linear *l, int64_t groups) {
    return groups * (l->kind == KIND_S24 ? l->group / 32 * 3 * PIECE : group_bytes(l->kind, KIND[l->kind].bits, l->group));
}

/* The groups of a panel that follow, as many as are next to each other, but at most so many; whether there are any. */
static int next_stretch(const Linear *l, Stretch *s, int64_t most) {
    int64_t end = l->groups, before = s->panel * l->groups, begin = 0;
    s->first = s->last;
    if (l->runs) {
        if (s->run < l->first_run[s->panel] || s->last == l->runs[3 * s->run + 1]) {
            if (++s->run == l->first_run[s->panel + 1]) return 0;
            s->first = l->runs[3 * s->run];
        }
        begin = l->runs[3 * s->run], end = l->runs[3 * s->run + 1], before = l->runs[3 * s->run + 2];
    }
    if (s->first == end) return 0;
    s->last = s->first + most < end ? s->first + most : end;
    s->w = l->weight + run_bytes(l, before + s->first - begin);
    return 1;
}

/* M rows of x in D digits and a run of a panel, V vectors of it at once: added to out [M, 32]. If those are not all, the others follow
 * group by group: after a whole panel nothing would be left in the first cache, and nothing asked for meanwhile. */
INLINE void tile(const Linear *l, const Stretch *run, const int kind, const int V, const Digits *x, int64_t row, const int M, const int D,
                 float *out) {
    const int codes = are_bytes(kind) ? 8 : kind;
    const int64_t step = V == VECTORS ? run->last - run->first : 1;
    const int64_t size = kind == KIND_S24 ? run_bytes(l, 1) : group_bytes(width_of(kind) ? l->kind : 0, KIND[codes].bits, l->group);
    Stretch part = *run;
    for (; part.first < run->last; part.first = part.last, part.w += step * size) {
        part.last = part.first + step;
        for (int h = 0; h < VECTORS; h += V) {
            part.cold = run->cold && h == 0;
            if (kind == KIND_S24) tile_s24(l, &part, h, V, x, row, M, D, out);
            else tile_planes(l, &part, h, V, x, row, M, D, codes, reach_of(kind), width_of(kind), out);
        }
    }
}

/* There are tiles of so many streams, and of one row. */
#define TILE(BITS, D, M, MOST)                                                                                       \
    static void tile_##BITS##_##D##_##M(const Linear *l, const Stretch *run, const Digits *x, int64_t row, float *out) { \
        const int V = VECTORS_OF(room_of(BITS), D * M);                                                                \
        if (M == 1 || D * M <= MOST) tile(l, run, BITS, V, x, row, M, D, out);                                       \
    }
#define FEW_TILES(B, MOST)                                                                    \
    TILE(B, 1, 1, MOST) TILE(B, 1, 2, MOST) TILE(B, 1, 3, MOST) TILE(B, 1, 4, MOST)           \
    TILE(B, 2, 1, MOST) TILE(B, 2, 2, MOST) TILE(B, 3, 1, MOST)
#define ALL_TILES(B, MOST)                                                                                        \
    FEW_TILES(B, MOST) TILE(B, 1, 5, MOST) TILE(B, 1, 6, MOST) TILE(B, 1, 7, MOST) TILE(B, 1, 8, MOST)            \
    TILE(B, 2, 3, MOST) TILE(B, 2, 4, MOST) TILE(B, 3, 2, MOST) TILE(B, 3, 3, MOST)
typedef void (*tile_t)(const Linear *, const Stretch *, const Digits *, int64_t, float *);
typedef tile_t Tiles[3][MOST_ROWS]; /* [digits - 1][rows - 1] */
#if DIRECT
#define FEW(B) {{tile_##B##_1_1, tile_##B##_1_2, tile_##B##_1_3, tile_##B##_1_4}, {tile_##B##_2_1, tile_##B##_2_2}, {tile_##B##_3_1}}
#else
#define FEW(B) {{NULL}}
#endif
#define ALL(B)                                                                                                                  \
    {{tile_##B##_1_1, tile_##B##_1_2, tile_##B##_1_3, tile_##B##_1_4, tile_##B##_1_5, tile_##B##_1_6, tile_##B##_1_7, tile_##B##_1_8}, \
     {tile_##B##_2_1, tile_##B##_2_2, tile_##B##_2_3, tile_##B##_2_4},                                                          \
     {tile_##B##_3_1, tile_##B##_3_2, tile_##B##_3_3}}
DECLARED const Tiles TILES_2, TILES_3, TILES_4, TILES_5, TILES_6, TILES_7, TILES_9, TILES_10;
DECLARED const Tiles TILES_12, TILES_13, TILES_14, TILES_15, TILES_16, TILES_17, TILES_18, TILES_19, TILES_20, TILES_21;
DECLARED const Tiles TILES_23, TILES_24, TILES_25;
#if IN_PART(TILES)
#if DIRECT
FEW_TILES(2, DIRECT)
FEW_TILES(3, DIRECT)
FEW_TILES(4, DIRECT)
FEW_TILES(5, DIRECT)
FEW_TILES(10, DIRECT) /* KIND_E2M1 */
FEW_TILES(12, DIRECT) /* KIND_IQ4_NL */
FEW_TILES(19, DIRECT) /* KIND_TRELLIS */
#endif
SHARED const Tiles TILES_2 = FEW(2), TILES_3 = FEW(3), TILES_4 = FEW(4), TILES_5 = FEW(5), TILES_10 = FEW(10), TILES_12 = FEW(12), TILES_19 = FEW(19);
#endif
#if IN_PART(MORE_TILES)
#if DIRECT
FEW_TILES(6, DIRECT)
FEW_TILES(7, DIRECT)
FEW_TILES(23, DIRECT) /* KIND_CODEBOOK_2, ... */
FEW_TILES(24, DIRECT)
FEW_TILES(25, DIRECT)
#endif
ALL_TILES(9, MOST_STREAMS)
SHARED const Tiles TILES_6 = FEW(6), TILES_7 = FEW(7), TILES_9 = ALL(9), TILES_23 = FEW(23), TILES_24 = FEW(24), TILES_25 = FEW(25);
#endif
#if IN_PART(LEVEL_TILES)
#if DIRECT
FEW_TILES(13, DIRECT) /* KIND_Q2_K, ... */
FEW_TILES(14, DIRECT)
FEW_TILES(15, DIRECT)
FEW_TILES(16, DIRECT)
FEW_TILES(17, DIRECT)
FEW_TILES(18, DIRECT)
#endif
SHARED const Tiles TILES_13 = FEW(13), TILES_14 = FEW(14), TILES_15 = FEW(15), TILES_16 = FEW(16), TILES_17 = FEW(17), TILES_18 = FEW(18);
#endif
#if IN_PART(LEVEL_BYTES)
ALL_TILES(20, MOST_STREAMS) /* BYTES_16, BYTES_32 */
ALL_TILES(21, MOST_STREAMS)
SHARED const Tiles TILES_20 = ALL(20), TILES_21 = ALL(21);
#endif
#if WIDE_SUMS
#define TILES_8 TILES_9
#define TILES_11 TILES_9
#define TILES_22 TILES_21
#else
DECLARED const Tiles TILES_8, TILES_11, TILES_22;
#if IN_PART(TILES)
ALL_TILES(11, MOST_STREAMS) /* MIDDLE */
SHARED const Tiles TILES_11 = ALL(11);
#endif
#if IN_PART(MORE_TILES)
ALL_TILES(8, MOST_STREAMS)
SHARED const Tiles TILES_8 = ALL(8);
#endif
#if IN_PART(LEVEL_BYTES)
ALL_TILES(22, MOST_STREAMS) /* WIDE_32 */
SHARED const Tiles TILES_22 = ALL(22);
#endif
#endif

#if IN_PART(PRODUCTS)
ALL_TILES(1, MOST_STREAMS)
static const Tiles TILES_1 = ALL(1);
static const Tiles *const TILES_OF[] = {
    NULL,      &TILES_1,  &TILES_2,  &TILES_3,  &TILES_4,  &TILES_5,  &TILES_6,  &TILES_7,  &TILES_8,  &TILES_9,  &TILES_10,
    &TILES_11, &TILES_12, &TILES_13, &TILES_14, &TILES_15, &TILES_16, &TILES_17, &TILES_18, &TILES_19, &TILES_20, &TILES_21, &TILES_22,
    &TILES_23, &TILES_24, &TILES_25}; /* [kind] */
#endif

/* Codes of groups [first, last) of a panel as bytes, four columns a piece; levels as they are. */
#define EXPAND(KIND_)                                                                                                            \
    static void expand_##KIND_(const Linear *l, int64_t panel, const uint8_t *w, int64_t groups, uint8_t *out) {                 \
        const int bits = KIND[KIND_].bits, levels = level_bytes(KIND_);                                                          \
        const uint8_t *table = l->table + panel * table_bytes(KIND_);                                                           \
        for (; groups; groups--)                                                                                                \
            for (int left = l->group; left > 0; left -= 32) {                                                                   \
                const int eights = left >= 32 ? EIGHTS : EIGHTS / 2;                                                            \
                fetch(w, levels + unit_pieces(bits, EIGHTS) * PIECE);                                                           \
                memcpy(out, w, (size_t)levels);                                                                                 \
                w += levels, out += levels;                                                                                     \
                if (left >= 32) expand_unit(w, table, KIND_, EIGHTS, out);                                                       \
                else expand_unit(w, table, KIND_, EIGHTS / 2, out);                                                                    \
                w += unit_pieces(bits, eights) * PIECE, out += 2 * eights * PIECE;                                              \
            }                                                                                                                   \
    }
INLINE void expand_unit(const uint8_t *w, const uint8_t *table, const int kind, const int eights, uint8_t *out) {
    UNROLL for (int h = 0; h < VECTORS; h++) {
        const Small small = small_planes(w + h * LANES * 4, KIND[kind].bits, eights);
        const RowTable rows = row_table(table, kind, h);
        UNROLL for (int k = 0; k < eights; k++) {
            Eight codes = eight_columns(w + h * LANES * 4, &small, &rows, kind, k, 0, 0);
            w_store(out + 2 * k * PIECE + h * LANES * 4, codes.low);
            w_store(out + (2 * k + 1) * PIECE + h * LANES * 4, codes.high);
        }
    }
}
EXPAND(2) EXPAND(3) EXPAND(4) EXPAND(5) EXPAND(6) EXPAND(7) EXPAND(10)
EXPAND(12) EXPAND(13) EXPAND(14) EXPAND(15) EXPAND(16) EXPAND(17) EXPAND(18) EXPAND(19)
EXPAND(23) EXPAND(24) EXPAND(25)
static void (*const EXPAND_OF[])(const Linear *, int64_t, const uint8_t *, int64_t, uint8_t *) = {
    NULL,     NULL,      expand_2,  expand_3,  expand_4,  expand_5,  expand_6,  expand_7,  NULL,     NULL,
    expand_10, NULL, expand_12, expand_13, expand_14, expand_15, expand_16, expand_17, expand_18, expand_19,
    NULL, NULL, NULL, expand_23, expand_24, expand_25}; /* [kind] */

/* Codes of so many groups of a panel as bytes, in `out` if they are not; 2:4 as they are. */
static const uint8_t *as_bytes(const Linear *l, int64_t panel, const uint8_t *w, int64_t groups, uint8_t *out) {
    if (l->kind == KIND_S24 || l->kind == 8) return w;
    EXPAND_OF[l->kind](l, panel, w, groups, out);
    return out;
}
#define BYTES_ROOM(COLUMNS) ((COLUMNS) * PANEL + (COLUMNS) / 32 * MOST_LEVELS)

DECLARED void integer_part(const Linear *l, const Digits *x, void *y, int out_type, int64_t out_stride, int add, const Team *team);
#if IN_PART(PRODUCTS)
/* All rows of x from `row` on, `count` of them, with groups of the run, in tiles. */
static void run_tiles(const Linear *l, Stretch *run, int kind, const Digits *x, int64_t row, int64_t count, float *out) {
    int most = MOST_STREAMS / x->digits;
    int64_t tiles = tiles_of(count, most < 1 ? 1 : most > MOST_ROWS ? MOST_ROWS : most);
    for (int64_t t = 0, m, done = 0; t < tiles; t++, done += m, run->cold = 0) {
        m = tile_size(count, tiles, t);
        (*TILES_OF[kind])[x->digits - 1][m - 1](l, run, x, row + done, out + done * PANEL);
    }
}

/* Results before the first group: 0, or NaN for a row that is not all finite, of which a group may meet no weights. */
static void begin_rows(const Linear *l, const Digits *x, int64_t row, int64_t count, float *out) {
    memset(out, 0, (size_t)count * PANEL * 4);
    for (int64_t i = 0; i < count && l->runs; i++) {
        const float *scale = x->scale + (row + i) * PARTS(x->digits) * x->groups;
        int wrong = 0;
        for (int64_t g = 0; g < x->groups; g++) wrong |= scale[g] != scale[g];
        for (int j = 0; j < PANEL && wrong; j++) out[i * PANEL + j] = NAN;
    }
}

static int any_outliers(const Digits *x, int64_t g) {
    for (int64_t m = 0; m < x->rows; m++)
        if (x->outliers[m * x->groups + g]) return 1;
    return 0;
}

/* This member's rows of the weight, all rows of x. */
SHARED void integer_part(const Linear *l, const Digits *x, void *y, int out_type, int64_t out_stride, int add, const Team *team) {
    _Alignas(64) uint8_t codes[BYTES_ROOM(BLOCK_COLUMNS)];
    _Alignas(64) float out[BLOCK_ROWS * PANEL], extra[BLOCK_ROWS * PANEL]; /* extra: products of outliers */
    const int kind = l->kind, direct = kind != KIND_S24 && kind != 8 && DIRECT && (x->rows == 1 || x->rows * x->digits <= DIRECT);
    const int bytes = bytes_kind(kind);
    int64_t start, end;
    team_part(team, l->rows, PANEL, &start, &end);
    const Amx amx = start < end && !direct ? amx_begin(l, x) : (Amx){0};
    const int64_t columns = amx.rows ? AMX_COLUMNS : BLOCK_COLUMNS;
    const int64_t block = direct || kind == KIND_S24 ? x->groups : columns / l->group;
    for (int64_t n = start; n < end; n += PANEL) {
        int valid = (int)(l->rows - n < PANEL ? l->rows - n : PANEL);
        for (int64_t row = 0; row < x->rows; row += BLOCK_ROWS) {
            int64_t count = x->rows - row < BLOCK_ROWS ? x->rows - row : BLOCK_ROWS;
            begin_rows(l, x, row, count, out);
            if (x->outliers) memset(extra, 0, (size_t)count * PANEL * 4);
            for (Stretch run = before_panel(l, n / PANEL); next_stretch(l, &run, block);) {
                run.cold = 1;
                if (direct) {
                    (*TILES_OF[kind])[x->digits - 1][x->rows - 1](l, &run, x, 0, out);
                    for (int64_t g = run.first; x->outliers && g < run.last; g++)
                        if (any_outliers(x, g))
                            add_outliers(l, run.panel, g, g + 1, as_bytes(l, run.panel, run.w + run_bytes(l, g - run.first), 1, codes), x, 0, count, extra);
                    continue;
                }
                const uint8_t *w = as_bytes(l, run.panel, run.w, run.last - run.first, codes);
                if (x->outliers) add_outliers(l, run.panel, run.first, run.last, w, x, row, count, extra);
                run.cold = w == run.w, run.w = w;
                if (amx.rows) amx_run(l, &amx, &run, x, row, count, out);
                else run_tiles(l, &run, bytes, x, row, count, out);
            }
            for (int64_t i = 0; i < count * PANEL && x->outliers; i++) out[i] += extra[i];
            if (l->singles) add_singles(l, n / PANEL, x, row, count, out);
            for (int64_t i = 0; i < count * PANEL && l->factor != 1; i++) out[i] = (float)(out[i] * l->factor);
            for (int64_t i = 0; i < count; i++)
                put_row(y, out_type, (row + i) * out_stride + n, out + i * PANEL, l->bias ? l->bias + n : NULL, valid, add);
        }
    }
    amx_end(&amx);
}
#endif

#if IN_PART(STEPS)
/* Where the rounded input of a dense layer lies: after the room that gemm_input takes. */
static float *rounded_input(const Linear *l, void *memory, int64_t rows) {
    return (float *)((char *)memory + (l->rounding.kind ? gemm_bytes(rows, l->columns) : 0));
}

typedef struct {
    const Linear *linear;
    const void *x;
    void *y, *memory;
    int64_t rows;
    int32_t x_type, y_type;
} Product;

static void product_job(void *p, const Team *team) {
    Product *job = p;
    const Linear *l = job->linear;
    if (l->kind == KIND_DENSE) {
        const int many = job->rows > FEW_ROWS;
        const void *x = job->x;
        int type = job->x_type;
        if (l->rounding.kind || (type != TYPE_F32 && !many)) {
            float *wide = rounded_input(l, job->memory, job->rows);
            round_rows(x, type, l->columns, job->rows, l->columns, &l->rounding, wide, team);
            team_barrier(team);
            x = wide, type = TYPE_F32;
        }
        if (!many) {
            dense_part(l, x, l->columns, job->rows, job->y, job->y_type, l->rows, 0, team);
            return;
        }
        gemm_input(x, type, l->columns, job->rows, l->columns, job->memory, team);
        team_barrier(team);
        gemm_part(l, job->memory, job->rows, job->y, job->y_type, l->rows, 0, team);
        return;
    }
    const Input in = input_of(l);
    Digits x = digits_in(job->memory, job->rows, &in);
    quantize_rows(job->x, job->x_type, l->columns, l->columns, &x, team);
    team_barrier(team);
    integer_part(l, &x, job->y, job->y_type, l->rows, 0, team);
}

/* Bytes of working memory that linear_run wants for so many rows. */
int64_t linear_memory(const Linear *l, int64_t rows) {
    const Input in = input_of(l);
    if (l->kind != KIND_DENSE) return digits_bytes(rows, &in);
    return (l->rounding.kind ? 2 : 1) * gemm_bytes(rows, l->columns);
}
/* x [rows, columns] -> y [rows, l->rows], both contiguous. */
void linear_run(const Linear *l, const void *x, int32_t x_type, int64_t rows, void *y, int32_t y_type, void *memory, int32_t threads) {
    Product job = {l, x, y, memory, rows, x_type, y_type};
    parallel_adaptive(product_job, &job, threads);
}
#endif
