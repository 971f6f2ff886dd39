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

#define AHEAD 6144 /* bytes of weight fetched ahead of use by a matrix-vector product */

/* Where a panel's scales begin, and which of its groups use which: `share` groups one after the other have the same. */
typedef struct { int64_t at; int within, share; } Scales;
INLINE Scales first_scales(const Linear *l, int64_t panel) {
    int64_t sets = (l->groups + l->share - 1) / l->share;
    return (Scales){panel * sets * PANEL, 0, l->share};
}
INLINE void next_group(Scales *s) {
    if (++s->within == s->share) s->within = 0, s->at += PANEL;
}
INLINE I offset_of(const Linear *l, const Scales *s, int h, int base) {
    if (!l->zero) return i_set1(base);
    return i_add(i_load_i8(l->zero + s->at + h * LANES), i_set1(base));
}

/* Add a group's integer sums to the float results, most significant digit first. */
#define FINISH_GROUP(CORRECTION)                                                                     \
    UNROLL for (int h = 0; h < H; h++) {                                                             \
        F ws = f_load_as(l->scale, l->scale_type, scales.at + (h0 + h) * LANES);                                                       \
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

/* `chunks` pieces of a group, few enough that the partial sums hold them. */
INLINE void w4_run(const uint8_t *w, const int8_t *digit, int64_t wide, const int H, const int M, const int D, const int chunks,
                   I sum[HALVES][8]) {
    P part[HALVES][8];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < M * D; s++) part[h][s] = p_zero();
    UNROLL for (int c = 0; c < chunks; c++) {
        W low[HALVES], high[HALVES];
        UNROLL for (int h = 0; h < H; h++) {
            W both = w_load(w + c * 64 + h * LANES * 4);
            low[h] = w_low(both), high[h] = w_high(both);
        }
        if (M == 1) __builtin_prefetch(w + c * 64 + AHEAD, 0, 3);
        UNROLL for (int s = 0; s < M * D; s++) {
            X front = x_load(digit + s * wide + c * 8), back = x_load(digit + s * wide + c * 8 + 4);
            UNROLL for (int h = 0; h < H; h++) {
                part[h][s] = p_dot(part[h][s], low[h], front);
                part[h][s] = p_dot(part[h][s], high[h], back);
            }
        }
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < M * D; s++) sum[h][s] = p_flush(sum[h][s], part[h][s]);
}

INLINE void w8_run(const uint8_t *w, const int8_t *digit, int64_t wide, const int H, const int M, const int D, const int chunks,
                   I sum[HALVES][8]) {
    P8 part[HALVES][8];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < M * D; s++) part[h][s] = p8_zero();
    UNROLL for (int c = 0; c < chunks; c++) {
        W both[HALVES];
        UNROLL for (int h = 0; h < H; h++) both[h] = w_load(w + c * 64 + h * LANES * 4);
        if (M == 1) __builtin_prefetch(w + c * 64 + AHEAD, 0, 3);
        UNROLL for (int s = 0; s < M * D; s++) {
            X four = x_load(digit + s * wide + c * 4);
            UNROLL for (int h = 0; h < H; h++) part[h][s] = p8_dot(part[h][s], both[h], four);
        }
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < M * D; s++) sum[h][s] = p8_flush(sum[h][s], part[h][s]);
}

/* H vectors of a panel from the h0-th on, M rows of x from `row` on, D digits: out [M, 16]. */
INLINE void tile_w4(const Linear *l, int64_t panel, int h0, const int H, const Digits *x, int64_t row, const int M,
                    const int D, float *out) {
    const int8_t *digit = x->digit + row * D * x->wide;
    const uint8_t *w = l->weight + panel * (x->wide / 8) * 64 + h0 * LANES * 4;
    Scales scales = first_scales(l, panel);
    const int chunks = l->group / 8;
    F result[HALVES][8];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) result[h][m] = f_zero();
    for (int64_t g = 0; g < x->groups; g++) {
        I sum[HALVES][8];
        UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < M * D; s++) sum[h][s] = i_zero();
        int left = chunks;
        for (; left >= RUN_DOTS / 2; left -= RUN_DOTS / 2, w += RUN_DOTS * 32, digit += RUN_DOTS * 4)
            w4_run(w, digit, x->wide, H, M, D, RUN_DOTS / 2, sum);
        for (; left > 0; left--, w += 64, digit += 8) w4_run(w, digit, x->wide, H, M, D, 1, sum);
        I offset[HALVES];
        UNROLL for (int h = 0; h < H; h++) offset[h] = offset_of(l, &scales, h0 + h, 8);
        if (l->zero) {
            FINISH_GROUP(i_mul(offset[h], i_set1(xsum)))
        } else {
            FINISH_GROUP(i_set1(8 * xsum))
        }
        next_group(&scales);
    }
    STORE_RESULT
}

INLINE void tile_w8(const Linear *l, int64_t panel, int h0, const int H, const Digits *x, int64_t row, const int M,
                    const int D, float *out) {
    const int8_t *digit = x->digit + row * D * x->wide;
    const uint8_t *w = l->weight + panel * (x->wide / 4) * 64 + h0 * LANES * 4;
    Scales scales = first_scales(l, panel);
    const int chunks = l->group / 4;
    F result[HALVES][8];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) result[h][m] = f_zero();
    for (int64_t g = 0; g < x->groups; g++) {
        I sum[HALVES][8];
        UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < M * D; s++) sum[h][s] = i_zero();
        int left = chunks;
        for (; left >= RUN_DOTS; left -= RUN_DOTS, w += RUN_DOTS * 64, digit += RUN_DOTS * 4)
            w8_run(w, digit, x->wide, H, M, D, RUN_DOTS, sum);
        for (; left > 0; left--, w += 64, digit += 4) w8_run(w, digit, x->wide, H, M, D, 1, sum);
        I offset[HALVES];
        UNROLL for (int h = 0; h < H; h++) offset[h] = offset_of(l, &scales, h0 + h, 128);
        if (l->zero) {
            FINISH_GROUP(i_mul(offset[h], i_set1(xsum)))
        } else {
            FINISH_GROUP(i_set1(128 * xsum))
        }
        next_group(&scales);
    }
    STORE_RESULT
}
