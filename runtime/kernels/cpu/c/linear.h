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

#define AHEAD 4096 /* bytes of weight fetched ahead of use by a matrix-vector product */

#define MOST (2 * HALVES) /* vectors of a tile: a panel, or two for one row of x */

/* Where a panel's scales begin, and which of its groups use which: `share` groups one after the other have the same. */
typedef struct { int64_t at, panel; int within, share; } Scales;
INLINE Scales first_scales(const Linear *l, int64_t panel) {
    int64_t sets = (l->groups + l->share - 1) / l->share;
    return (Scales){panel * sets * PANEL, sets * PANEL, 0, l->share};
}
INLINE void next_group(Scales *s) {
    if (++s->within == s->share) s->within = 0, s->at += PANEL;
}
/* Of the h-th vector; from HALVES on, of the next panel. */
INLINE int64_t scale_at(const Scales *s, int h) { return s->at + h / HALVES * s->panel + h % HALVES * LANES; }
INLINE I offset_of(const Linear *l, const Scales *s, int h, int base) {
    if (!l->zero) return i_set1(base);
    return i_add(i_load_i8(l->zero + scale_at(s, h)), i_set1(base));
}

/* Add a group's integer sums to the float results, most significant digit first. */
#define FINISH_GROUP(CORRECTION)                                                                     \
    UNROLL for (int h = 0; h < H; h++) {                                                             \
        F ws = f_load_as(l->scale, l->scale_type, scale_at(&scales, h0 + h));                     \
        UNROLL for (int m = 0; m < M; m++)                                                           \
            UNROLL for (int d = 0; d < D; d++) {                                                     \
                int s = m * D + d;                                                                   \
                int32_t xsum = x->sum[(row * D + s) * x->groups + g];                                \
                float xscale = x->scale[(row * D + s) * x->groups + g];                              \
                (void)xsum;                                                                          \
                F value = f_from_i(i_sub(sum[h][s], CORRECTION));                                    \
                result[h][m] = f_fma(value, f_mul(ws, f_set1(xscale)), result[h][m]);                \
            }                                                                                        \
    }

#define STORE_RESULT                                                                                 \
    UNROLL for (int h = 0; h < H; h++)                                                               \
        UNROLL for (int m = 0; m < M; m++) f_store(out + m * PANEL + (h0 + h) * LANES, result[h][m]);

/* Pieces of 64 bytes of a group, few enough that the partial sums hold them: H vectors, M rows of x in D digits each.
 * Vectors of a second panel lie `stride` bytes on; two panels share what is loaded of x, and are two streams of memory. */
#define VECTOR(C, V) w_load(w + (V) / HALVES * stride + (C) * 64 + (V) % HALVES * LANES * 4)
#define FETCH_AHEAD(C)                                                                               \
    if (M == 1) UNROLL for (int p = 0; p < H; p += HALVES)                                           \
        __builtin_prefetch(w + p / HALVES * stride + (C) * 64 + ahead, 0, 3);

INLINE void w4_run(const uint8_t *w, int64_t stride, int64_t ahead, const int8_t *digit, int64_t wide, const int H, const int M, const int D,
                   const int pieces, I sum[MOST][8]) {
    const int S = M * D;
    P part[MOST][8];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < S; s++) part[h][s] = p_zero();
    UNROLL for (int c = 0; c < pieces; c++) {
        FETCH_AHEAD(c)
        if (H > HALVES) { /* what is loaded of x stays, the weights come and go */
            X front[8], back[8];
            UNROLL for (int s = 0; s < S; s++)
                front[s] = x_load(digit + s * wide + c * 8), back[s] = x_load(digit + s * wide + c * 8 + 4);
            UNROLL for (int h = 0; h < H; h++) {
                W both = VECTOR(c, h), low = w_low(both), high = w_high(both);
                UNROLL for (int s = 0; s < S; s++) {
                    part[h][s] = p_dot(part[h][s], low, front[s]);
                    part[h][s] = p_dot(part[h][s], high, back[s]);
                }
            }
        } else {
            W low[HALVES], high[HALVES];
            UNROLL for (int h = 0; h < H; h++) {
                W both = VECTOR(c, h);
                low[h] = w_low(both), high[h] = w_high(both);
            }
            UNROLL for (int s = 0; s < S; s++) {
                X front = x_load(digit + s * wide + c * 8), back = x_load(digit + s * wide + c * 8 + 4);
                UNROLL for (int h = 0; h < H; h++) {
                    part[h][s] = p_dot(part[h][s], low[h], front);
                    part[h][s] = p_dot(part[h][s], high[h], back);
                }
            }
        }
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < S; s++) sum[h][s] = p_flush(sum[h][s], part[h][s]);
}

INLINE void w8_run(const uint8_t *w, int64_t stride, int64_t ahead, const int8_t *digit, int64_t wide, const int H, const int M, const int D,
                   const int pieces, I sum[MOST][8]) {
    const int S = M * D;
    P8 part[MOST][8];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < S; s++) part[h][s] = p8_zero();
    UNROLL for (int c = 0; c < pieces; c++) {
        W both[MOST];
        UNROLL for (int h = 0; h < H; h++) both[h] = VECTOR(c, h);
        FETCH_AHEAD(c)
        UNROLL for (int s = 0; s < S; s++) {
            X four = x_load(digit + s * wide + c * 4);
            UNROLL for (int h = 0; h < H; h++) part[h][s] = p8_dot(part[h][s], both[h], four);
        }
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < S; s++) sum[h][s] = p8_flush(sum[h][s], part[h][s]);
}

/* Codes of four bits, a byte each, in the cache (codes.h). */
INLINE void codes_run(const uint8_t *w, int64_t stride, int64_t ahead, const int8_t *digit, int64_t wide, const int H, const int M, const int D,
                      const int pieces, I sum[MOST][8]) {
    const int S = M * D;
    (void)ahead;
    P part[MOST][8];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < S; s++) part[h][s] = p_zero();
    UNROLL for (int c = 0; c < pieces; c++) {
        W code[MOST];
        UNROLL for (int h = 0; h < H; h++) code[h] = VECTOR(c, h);
        UNROLL for (int s = 0; s < S; s++) {
            X four = x_load(digit + s * wide + c * 4);
            UNROLL for (int h = 0; h < H; h++) part[h][s] = p_dot(part[h][s], code[h], four);
        }
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < S; s++) sum[h][s] = p_flush(sum[h][s], part[h][s]);
}

/* H vectors of a panel (of two panels, if H is more than one has) from the h0-th on, M rows of x from `row` on, D digits:
 * out [M, 16], or [32] of two panels. `w` is the panel, pieces of COLUMNS columns; RUN adds up PIECES of them at a time; BASE is what
 * makes the codes unsigned. */
#define DENSE_TILE(NAME, RUN, COLUMNS, PIECES, BASE)                                                                      \
    INLINE void NAME(const Linear *l, const uint8_t *w, int64_t panel, int h0, const int H, const Digits *x, int64_t row, \
                     const int M, const int D, float *out) {                                                              \
        const int8_t *digit = x->digit + row * D * x->wide;                                                               \
        const int64_t stride = x->wide / COLUMNS * 64;                                                                    \
        const uint8_t *after = w + stride;                                                                                \
        Scales scales = first_scales(l, panel);                                                                           \
        F result[MOST][8];                                                                                                \
        UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) result[h][m] = f_zero();                    \
        w += h0 * LANES * 4;                                                                                              \
        for (int64_t g = 0; g < x->groups; g++) {                                                                         \
            I sum[MOST][8];                                                                                               \
            UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < M * D; s++) sum[h][s] = i_zero();               \
            int left = l->group / COLUMNS;                                                                                \
            /* Of two panels each stream goes on after the other's panel. */                                              \
            int64_t ahead = AHEAD + (H > HALVES && w + AHEAD >= after ? stride : 0);                                      \
            for (; left >= PIECES; left -= PIECES, w += PIECES * 64, digit += PIECES * COLUMNS)                           \
                RUN(w, stride, ahead, digit, x->wide, H, M, D, PIECES, sum);                                              \
            for (; left > 0; left--, w += 64, digit += COLUMNS) RUN(w, stride, ahead, digit, x->wide, H, M, D, 1, sum);   \
            I offset[MOST];                                                                                               \
            UNROLL for (int h = 0; h < H; h++) offset[h] = offset_of(l, &scales, h0 + h, BASE);                           \
            if (l->zero) {                                                                                                \
                FINISH_GROUP(i_mul(offset[h], i_set1(xsum)))                                                              \
            } else {                                                                                                      \
                FINISH_GROUP(i_set1(BASE * xsum))                                                                         \
            }                                                                                                             \
            next_group(&scales);                                                                                          \
        }                                                                                                                 \
        STORE_RESULT                                                                                                      \
    }
DENSE_TILE(tile_w4, w4_run, 8, (RUN_DOTS / 2), 8)
DENSE_TILE(tile_w8, w8_run, 4, RUN_DOTS, 128)
DENSE_TILE(tile_codes, codes_run, 4, RUN_DOTS, 8)
