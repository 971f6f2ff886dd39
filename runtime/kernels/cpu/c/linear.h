/* y = x W^T + b with integer weights in panels of 16 rows, activations in digits (digits.h).
 *
 * Weights are read in pieces of 64 bytes, four a row:
 *   W4  [panel, wide/8, 16 rows, 4]: low nibble = column 8i+j, high nibble = column 8i+4+j, code + 8
 *   W8  [panel, wide/4, 16 rows, 4]: code + 128
 *   S24 [panel, wide/32, 3, 16 rows, 4]: kept codes + 8 of 16 columns, of the next 16, then the positions of both (sparse.h)
 * Scales are [panel, scale groups, 16]. Every output is the same whatever tile, vector width or thread computed it. */
enum { KIND_DENSE = 0, KIND_W4 = 1, KIND_W8 = 2, KIND_S24 = 3 };

typedef struct {
    int32_t kind, scale_type, group, share; /* `share` groups of the activations have one scale of the weight */
    int64_t rows, columns, groups;
    const uint8_t *weight; /* KIND_DENSE: [rows, columns] of scale_type */
    const void *scale;
    const int8_t *zero;   /* [panel, scale groups, 16] zero points, or NULL: symmetric */
    const int16_t *sums;  /* S24: [panel, groups, 16], sum of the kept codes */
    const float *bias;    /* [rows] or NULL */
} Linear;

#define MOST (2 * HALVES) /* vectors of a tile: of one panel or two */
#define STREAMS 9         /* of a tile, at most: rows of x times digits */

/* Lines of 64 bytes to fetch ahead from `at` on, every so many pieces (a tile's PIECES). */
typedef struct {
    const uint8_t *at;
    int lines;
} Ahead;
INLINE void fetch(Ahead *ahead) {
    for (int i = 0; i < ahead->lines; i++, ahead->at += 64) __builtin_prefetch(ahead->at, 0, 3);
}
/* For the t-th of `walks` through `panels` panels of `bytes` each, `lines` of each at a time, `runs` times: its share of what comes
 * next, in the order of memory. One panel walked through once fetches a little ahead of itself. */
INLINE Ahead fetch_ahead(const uint8_t *w, int64_t bytes, int panels, int lines, int64_t runs, int t, int walks) {
    int share = (panels * lines + walks - 1) / walks;
    if (walks == 1 && panels == 1) return (Ahead){w + 4096, lines};
    if (t * share >= panels * lines) return (Ahead){w, 0};
    return (Ahead){w + panels * bytes + t * share * runs * 64, share};
}

/* Rows in tiles of at most `most`, of sizes as even as can be. */
INLINE int64_t tiles_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }
INLINE int64_t tile_size(int64_t rows, int64_t tiles, int64_t t) { return rows * (t + 1) / tiles - rows * t / tiles; }

/* Where a panel's scales begin, and which of its groups use which: `share` groups one after the other have the same. */
typedef struct { int64_t at, panel; int within, share; } Scales; /* panel: from one to the next */
INLINE Scales first_scales(const Linear *l, int64_t panel, int64_t next) {
    int64_t sets = (l->groups + l->share - 1) / l->share;
    return (Scales){panel * sets * PANEL, next * sets * PANEL, 0, l->share};
}
INLINE void next_group(Scales *s) {
    if (++s->within == s->share) s->within = 0, s->at += PANEL;
}
/* Of the h-th vector; from HALVES on, of the next panel. */
INLINE int64_t scale_at(const Scales *s, int h) { return s->at + h / HALVES * s->panel + h % HALVES * LANES; }

/* For every vector of the weight and every stream of x. */
#define EACH_SUM(COUNT) UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < COUNT; s++)

/* Add a group's integer sums to the float results, most significant digit first. */
#define FINISH_GROUP(CORRECTION)                                                        \
    UNROLL for (int h = 0; h < H; h++) {                                                \
        F ws = f_load_as(l->scale, l->scale_type, scale_at(&scales, h0 + h));           \
        UNROLL for (int m = 0; m < M; m++)                                              \
            UNROLL for (int d = 0; d < D; d++) {                                        \
                int s = m * D + d;                                                      \
                int32_t xsum = x->sum[(row * D + s) * x->groups + g];                   \
                float xscale = x->scale[(row * D + s) * x->groups + g];                 \
                (void)xsum;                                                             \
                F value = f_from_i(i_sub(sum[h][s], CORRECTION));                       \
                result[h][m] = f_fma(value, f_mul(ws, f_set1(xscale)), result[h][m]);   \
            }                                                                           \
    }

#define STORE_RESULT                                                                    \
    UNROLL for (int h = 0; h < H; h++)                                                  \
        UNROLL for (int m = 0; m < M; m++) f_store(out + m * 2 * PANEL + (h0 + h) * LANES, result[h][m]);

/* Pieces of 64 bytes of a group, few enough that the partial sums hold them: H vectors, S streams of x `apart` bytes from each other.
 * Vectors of a second panel lie `stride` bytes on; two panels share what is loaded of x. */
#define VECTOR(C, V) w_load(w + (V) / HALVES * stride + (C) * 64 + (V) % HALVES * LANES * 4)

/* Few sums would wait for each other: then every second product has a sum of its own, from S on. */
#define SPLIT(H, S) (WIDE_SUMS && (H) * (S) <= 8 ? (S) : 0)

INLINE void w4_run(const uint8_t *w, int64_t stride, const int8_t *digit, int64_t apart, const int H, const int S, const int pieces,
                   P part[MOST][2 * STREAMS]) {
    const int other = SPLIT(H, S);
    UNROLL for (int c = 0; c < pieces; c++) {
        W low[MOST], high[MOST];
        UNROLL for (int h = 0; h < H; h++) {
            W both = VECTOR(c, h);
            low[h] = w_low(both), high[h] = w_high(both);
        }
        UNROLL for (int s = 0; s < S; s++) {
            X front = x_load(digit + s * apart + c * 8), back = x_load(digit + s * apart + c * 8 + 4);
            UNROLL for (int h = 0; h < H; h++) part[h][s] = p_dot(part[h][s], low[h], front);
            UNROLL for (int h = 0; h < H; h++) part[h][other + s] = p_dot(part[h][other + s], high[h], back);
        }
    }
}

INLINE void w8_run(const uint8_t *w, int64_t stride, const int8_t *digit, int64_t apart, const int H, const int S, const int pieces,
                   P8 part[MOST][2 * STREAMS]) {
    UNROLL for (int c = 0; c < pieces; c++) {
        const int from = c % 2 * SPLIT(H, S);
        W code[MOST];
        UNROLL for (int h = 0; h < H; h++) code[h] = VECTOR(c, h);
        UNROLL for (int s = 0; s < S; s++) {
            X four = x_load(digit + s * apart + c * 4);
            UNROLL for (int h = 0; h < H; h++) part[h][from + s] = p8_dot(part[h][from + s], code[h], four);
        }
    }
}

/* H vectors of a panel (of it and the next, if H is more than one has) from the h0-th on, M rows of x from `row` on, D digits:
 * out [M, 32]. `w` is the panel, pieces of COLUMNS columns; RUN adds up PIECES of them at a time in sums that ZERO and FLUSH; BASE is
 * what makes the codes unsigned. `next`: how many panels on the second one is (0: there is none, and the first is read twice). */
#define DENSE_TILE(NAME, RUN, TYPE, ZERO, FLUSH, COLUMNS, PIECES, BASE)                                                         \
    INLINE void NAME(const Linear *l, const uint8_t *w, int64_t panel, int64_t next, int h0, const int H, const Digits *x,      \
                     int64_t row, const int M, const int D, Ahead ahead, float *out) {                                          \
        const int S = M * D, sums = S + SPLIT(H, S);                                                                            \
        const int8_t *digit = x->digit + row * D * x->apart;                                                                    \
        const int64_t stride = x->wide / COLUMNS * 64 * next;                                                                   \
        Scales scales = first_scales(l, panel, next);                                                                           \
        F result[MOST][STREAMS];                                                                                                \
        UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) result[h][m] = f_zero();                          \
        w += h0 * LANES * 4;                                                                                                    \
        for (int64_t g = 0; g < x->groups; g++) {                                                                               \
            I sum[MOST][2 * STREAMS];                                                                                           \
            TYPE part[MOST][2 * STREAMS];                                                                                       \
            EACH_SUM(sums) sum[h][s] = i_zero(), part[h][s] = ZERO();                                                           \
            int left = l->group / COLUMNS;                                                                                      \
            for (; left >= PIECES; left -= PIECES, w += PIECES * 64, digit += PIECES * COLUMNS) {                               \
                fetch(&ahead);                                                                                                  \
                RUN(w, stride, digit, x->apart, H, S, PIECES, part);                                                            \
                if (!WIDE_SUMS) EACH_SUM(sums) sum[h][s] = FLUSH(sum[h][s], part[h][s]), part[h][s] = ZERO();                   \
            }                                                                                                                   \
            for (; left > 0; left--, w += 64, digit += COLUMNS) RUN(w, stride, digit, x->apart, H, S, 1, part);                 \
            if (WIDE_SUMS || l->group / COLUMNS % PIECES) EACH_SUM(sums) sum[h][s] = FLUSH(sum[h][s], part[h][s]);              \
            if (SPLIT(H, S)) EACH_SUM(S) sum[h][s] = i_add(sum[h][s], sum[h][S + s]);                                           \
            if (l->zero) {                                                                                                      \
                I offset[MOST];                                                                                                 \
                UNROLL for (int h = 0; h < H; h++)                                                                              \
                    offset[h] = i_add(i_load_i8(l->zero + scale_at(&scales, h0 + h)), i_set1(BASE));                            \
                FINISH_GROUP(i_mul(offset[h], i_set1(xsum)))                                                                    \
            } else {                                                                                                            \
                FINISH_GROUP(i_set1(BASE * xsum))                                                                               \
            }                                                                                                                   \
            next_group(&scales);                                                                                                \
        }                                                                                                                       \
        STORE_RESULT                                                                                                            \
    }
DENSE_TILE(tile_w4, w4_run, P, p_zero, p_flush, 8, (RUN_DOTS / 2), 8)
DENSE_TILE(tile_w8, w8_run, P8, p8_zero, p8_flush, 4, RUN_DOTS, 128)
