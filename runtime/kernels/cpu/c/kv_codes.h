/* Products of floats with matrices of integer codes.
 *
 * A row of floats, times the scale of each index, becomes integers of two digits to base 256, or of three: to 2^-16 of the largest, or
 * 2^-23. Digits are signed bytes and codes unsigned ones, so sums are exact integers, and the same whatever computes them. What zeros of
 * grids add is computed in floats. */
typedef struct {
    uint32_t digit[3][MOST_CHANNELS / 4 + 16]; /* lowest first: a word has bytes of four indices, a quarter of them apart */
    float unit, shift;                         /* of the integers; is added to every product */
} DigitRow;

/* For integers of so many digits. What is no number, or too large to be one, stays so. */
INLINE float digit_unit(float largest, int digits) {
    const float most = digits == 2 ? 32639.0f : 4161407.0f; /* 127 * 257, and what rounding in digits_of_row leaves of 2^22 */
    return largest < INFINITY ? (largest > 0x1p-100f ? largest : 0x1p-100f) / most : NAN;
}

/* The largest |x * by| of n numbers, a multiple of 16 (where one is no number it may be any). */
INLINE float largest_product(const float *x, const float *by, int n) {
    F most = f_zero();
    for (int i = 0; i < n; i += LANES) {
        Bits product = {.floats = f_mul(f_load(x + i), f_load(by + i))};
        product.words &= 0x7fffffffu;
        most = f_max(most, product.floats);
    }
    return f_reduce_max(most);
}

/* n is a multiple of 16; in 16 sums, which are put together in one order everywhere. */
INLINE float dot(const float *x, const float *y, int n) {
    F sum[16 / LANES];
    UNROLL for (int v = 0; v < 16 / LANES; v++) sum[v] = f_zero();
    for (int i = 0; i < n; i += 16)
        UNROLL for (int v = 0; v < 16 / LANES; v++) sum[v] = f_fma(f_load(x + i + v * LANES), f_load(y + i + v * LANES), sum[v]);
    return f_sum(LANES == 16 ? sum[0] : f_add(sum[0], sum[16 / LANES - 1]));
}

/* The grids of the indices of a matrix: x = zero + scale * code, and n of them, a multiple of 16. */
typedef struct {
    float scale[MOST_CHANNELS + 16], middle[MOST_CHANNELS]; /* the number in the middle of a grid */
    float code; /* in the middle */
    int n;
} Grids;
INLINE void load_grids(const char *scale, const char *zero, int n, int bits, Grids *out) {
    out->code = (float)((1 << bits) - 1) / 2.0f, out->n = n;
    for (int i = 0; i < n; i += LANES) {
        F wide = f_load_f16((const uint16_t *)scale + i);
        f_store(out->scale + i, wide);
        f_store(out->middle + i, f_fma(wide, f_set1(out->code), f_load_f16((const uint16_t *)zero + i)));
    }
    for (int i = n; i < n + 16; i++) out->scale[i] = 0.0f; /* of a vector that goes beyond them */
}

/* x times the scales. What rounding takes from it is added for codes in the middle of a grid. */
INLINE void digits_of_row(const float *x, const Grids *grids, float unit, int digits, DigitRow *out) {
    /* 1.5 * 2^23: the lowest bits of a sum are an integer. Every digit but the highest is 128 too large, which rounds those above it. */
    const float round = 12582912.0f + (digits == 2 ? 128.0f : 32896.0f);
    const int quarter = grids->n / 4;
    const F inverse = f_set1(1.0f / unit);
    Bits total = {.floats = f_zero()};
    for (int i = 0; i < quarter; i += LANES) {
        Bits t[4], seen, constant = {.floats = f_set1(round)};
        UNROLL for (int b = 0; b < 4; b++)
            t[b].floats = f_fma(f_mul(f_load(x + b * quarter + i), f_load(grids->scale + b * quarter + i)), inverse, constant.floats);
        Words even = (t[0].words & 0xffffu) | t[2].words << 16, odd = (t[1].words & 0xffffu) | t[3].words << 16;
        Words low = ((even & 0x00ff00ffu) | (odd & 0x00ff00ffu) << 8) ^ 0x80808080u, next = (even >> 8 & 0x00ff00ffu) | (odd & 0xff00ff00u);
        if (digits == 3) {
            Words third = {0};
            next ^= 0x80808080u;
            UNROLL for (int b = 0; b < 4; b++) third |= ((t[b].words - 0x400000u) >> 16 & 0xffu) << (uint32_t)(8 * b);
            memcpy(out->digit[2] + i, &third, sizeof third);
        }
        memcpy(out->digit[0] + i, &low, sizeof low), memcpy(out->digit[1] + i, &next, sizeof next);
        seen.words = (t[0].words + t[1].words) + (t[2].words + t[3].words) - constant.words * 4u;
        if (i + LANES > quarter)
            for (int j = quarter - i; j < LANES; j++) seen.words[j] = 0;
        total.words += seen.words;
    }
    I sum;
    memcpy(&sum, &total, sizeof sum);
    out->unit = unit, out->shift = dot(x, grids->middle, grids->n) - grids->code * unit * f_sum(f_from_i(sum));
}

/* y[q][lane] = keep[q] * y[q][lane] + x[q] . codes of the lane, all indices; keep NULL: 0. */
INLINE void codes_product_vectors(const Matrix *m, const int bits, int lane, const int count, const int digits, const int vectors,
                                  const DigitRow *x, const float *keep, float *const *y) {
    const int fields = 8 / bits, words = m->indices * bits / 32;
    const int halves = WIDE_SUMS || bits < 8 ? 1 : 2; /* narrow sums hold products of 4 bits */
    P part[2][4][3][2];
    I sum[4][3][2];
    UNROLL for (int h = 0; h < halves; h++) UNROLL for (int q = 0; q < count; q++) UNROLL for (int d = 0; d < digits; d++)
        UNROLL for (int v = 0; v < vectors; v++) part[h][q][d][v] = p_zero(), sum[q][d][v] = i_zero();
    for (int i = 0; i < words; i++) {
        W word[2];
        UNROLL for (int v = 0; v < vectors; v++) {
            int64_t at = words_at(m, lane + v * LANES, i);
            word[v] = w_load((const uint8_t *)m->data + at);
            __builtin_prefetch(m->next + at);
        }
        UNROLL for (int field = 0; field < fields; field++) UNROLL for (int h = 0; h < halves; h++) {
            const int shift = field * bits + 4 * h, own = bits < 8 ? bits : 8 / halves;
            W code[2];
            UNROLL for (int v = 0; v < vectors; v++) {
                code[v] = shift ? w_shift(word[v], -shift) : word[v];
                if (own < 8) code[v] = w_and(code[v], (1 << own) - 1);
            }
            UNROLL for (int q = 0; q < count; q++) UNROLL for (int d = 0; d < digits; d++) {
                X four = x_load((const int8_t *)(x[q].digit[d] + i * fields + field));
                UNROLL for (int v = 0; v < vectors; v++) part[h][q][d][v] = p_dot(part[h][q][d][v], code[v], four);
            }
        }
#if !WIDE_SUMS
        if ((i + 1) * fields % MOST_DOTS(bits < 8 ? bits : 4) && i + 1 < words) continue;
        UNROLL for (int h = 0; h < halves; h++) UNROLL for (int q = 0; q < count; q++) UNROLL for (int d = 0; d < digits; d++)
            UNROLL for (int v = 0; v < vectors; v++)
                sum[q][d][v] = p_flush(sum[q][d][v], part[h][q][d][v], h ? 16 : 1), part[h][q][d][v] = p_zero();
#endif
    }
    UNROLL for (int q = 0; q < count; q++) UNROLL for (int v = 0; v < vectors; v++) {
        float *at = y[q] + lane + v * LANES;
        if (WIDE_SUMS) UNROLL for (int d = 0; d < digits; d++) sum[q][d][v] = p_flush(sum[q][d][v], part[0][q][d][v], 1);
        F total = f_from_i(sum[q][digits - 1][v]), shift = f_set1(x[q].shift);
        UNROLL for (int d = digits - 2; d >= 0; d--) total = f_fma(total, f_set1(256.0f), f_from_i(sum[q][d][v]));
        f_store(at, f_fma(total, f_set1(x[q].unit), keep ? f_fma(f_load(at), f_set1(keep[q]), shift) : shift));
    }
}
INLINE void codes_product_of(const Matrix *m, const int bits, int begin, int end, const int count, const int digits, const DigitRow *x,
                             const float *keep, float *const *y) {
    int lane = begin;
    for (; lane + 2 * LANES <= end; lane += 2 * LANES) codes_product_vectors(m, bits, lane, count, digits, 2, x, keep, y);
    for (; lane < end; lane += LANES) codes_product_vectors(m, bits, lane, count, digits, 1, x, keep, y);
}
#define TOGETHER (LANES == 16 ? 4 : 2) /* queries whose sums registers hold */
#define CODES_PRODUCT(BITS, DIGITS)                                                                                                  \
    static void codes_product_##BITS##_##DIGITS(const Matrix *m, int begin, int end, int count, const DigitRow *x, const float *keep,  \
                                                float *const *y) {                                                                  \
        for (; count >= TOGETHER; count -= TOGETHER, x += TOGETHER, y += TOGETHER, keep = keep ? keep + TOGETHER : NULL)             \
            codes_product_of(m, BITS, begin, end, TOGETHER, DIGITS, x, keep, y);                                                     \
        for (; count; count--, x++, y++, keep = keep ? keep + 1 : NULL) codes_product_of(m, BITS, begin, end, 1, DIGITS, x, keep, y); \
    }
CODES_PRODUCT(8, 2) CODES_PRODUCT(4, 2) CODES_PRODUCT(2, 2)
CODES_PRODUCT(8, 3) CODES_PRODUCT(4, 3) CODES_PRODUCT(2, 3)
/* Lanes [begin, end), multiples of 16. */
static void codes_product(const Matrix *m, int begin, int end, int count, int digits, const DigitRow *x, const float *keep, float *const *y) {
    static void (*const products[][2])(const Matrix *, int, int, int, const DigitRow *, const float *, float *const *) = {
        [PAGES_INT8] = {codes_product_8_2, codes_product_8_3}, [PAGES_INT4] = {codes_product_4_2, codes_product_4_3},
        [PAGES_INT2] = {codes_product_2_2, codes_product_2_3}};
    products[m->kind][digits - 2](m, begin, end, count, x, keep, y);
}
