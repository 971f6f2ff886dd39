/* Many rows of x: a panel's codes are unpacked once, to one byte each, and then read by every tile.
 *
 * Unpacked [wide/4, 16 rows, 4]: code + 8 (of four bits), zero codes where 2:4 pruned. The results are those of the other tiles. */
static void unpack_w4(const Linear *l, int64_t panel, int64_t wide, uint8_t *out) {
    const uint8_t *w = l->weight + panel * (wide / 8) * 64;
    for (int64_t c = 0; c < wide / 8; c++, w += 64, out += 128)
        for (int h = 0; h < HALVES; h++) {
            W both = w_load(w + h * LANES * 4);
            w_store(out + h * LANES * 4, w_low(both));
            w_store(out + 64 + h * LANES * 4, w_high(both));
        }
}

static void unpack_s24(const Linear *l, int64_t panel, int64_t wide, uint8_t *out) {
    const uint8_t *w = l->weight + panel * (wide / 32) * 192;
    memset(out, 8, (size_t)wide * PANEL);
    for (int64_t c = 0; c < wide / 32; c++, w += 192)
        for (int r = 0; r < PANEL; r++)
            for (int quad = 0; quad < 8; quad++) {
                const uint8_t *value = w + 64 * (quad / 4) + 4 * r + 2 * (quad % 2), *pair = PAIR[w[128 + 4 * r + quad / 2] >> 4 * (quad % 2) & 7];
                uint8_t *four = out + ((c * 8 + quad) * PANEL + r) * 4;
                int shift = quad % 4 / 2 * 4;
                four[pair[0]] = value[0] >> shift & 15, four[pair[1]] = value[1] >> shift & 15;
            }
}

INLINE void codes_run(const uint8_t *w, const int8_t *digit, int64_t wide, const int S, const int steps, I sum[HALVES][8]) {
    P part[HALVES][8];
    UNROLL for (int h = 0; h < HALVES; h++) UNROLL for (int s = 0; s < S; s++) part[h][s] = p_zero();
    UNROLL for (int c = 0; c < steps; c++) {
        W code[HALVES];
        UNROLL for (int h = 0; h < HALVES; h++) code[h] = w_load(w + c * 64 + h * LANES * 4);
        UNROLL for (int s = 0; s < S; s++) {
            X four = x_load(digit + s * wide + c * 4);
            UNROLL for (int h = 0; h < HALVES; h++) part[h][s] = p_dot(part[h][s], code[h], four);
        }
    }
    UNROLL for (int h = 0; h < HALVES; h++) UNROLL for (int s = 0; s < S; s++) sum[h][s] = p_flush(sum[h][s], part[h][s]);
}

INLINE void tile_codes(const Linear *l, const uint8_t *codes, int64_t panel, const Digits *x, int64_t row, const int M, const int D,
                       float *out) {
    enum { h0 = 0, H = HALVES };
    const int8_t *digit = x->digit + row * D * x->wide;
    const uint8_t *w = codes;
    Scales scales = first_scales(l, panel);
    F result[HALVES][8];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) result[h][m] = f_zero();
    for (int64_t g = 0; g < x->groups; g++) {
        I sum[HALVES][8];
        UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < M * D; s++) sum[h][s] = i_zero();
        int left = l->group / 4;
        for (; left >= RUN_DOTS; left -= RUN_DOTS, w += RUN_DOTS * 64, digit += RUN_DOTS * 4)
            codes_run(w, digit, x->wide, M * D, RUN_DOTS, sum);
        for (; left > 0; left--, w += 64, digit += 4) codes_run(w, digit, x->wide, M * D, 1, sum);
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
