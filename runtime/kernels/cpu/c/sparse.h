/* 2:4 weights: of each quad of columns two codes and one of six pairs of positions, 3 bits a weight.
 *
 * 32 columns of 16 rows are three pieces of 64 bytes. In a row's four bytes of the first: low nibbles = the kept codes of quads
 * 0 and 1, high nibbles = of quads 2 and 3; the second: quads 4 to 7. The third is a word of eight nibbles, the pair of each quad.
 * A lane turns a pair into byte positions by a table and picks its own digits out of 16 (made unsigned: digit + 128, which
 * `sums` takes back). */
/* 6 and 7 are no pairs; they read as 0 and 1, so that no byte can lead outside. */
static const uint8_t PAIR[8][2] = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}, {0, 1}, {0, 2}};

/* Control words: `first` places a quad's picks in bytes 0 and 1, `second` the next quad's in bytes 2 and 3. [half of 16 columns] */
static void pair_tables(uint32_t first[2][16], uint32_t second[2][16]) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 16; i++) {
            uint32_t a = PAIR[i % 8][0] + 8 * half, b = PAIR[i % 8][1] + 8 * half;
            first[half][i] = a | b << 8;
            second[half][i] = (a + 4) << 16 | (b + 4) << 24;
        }
}

INLINE void tile_s24(const Linear *l, const uint8_t *w, int64_t panel, int64_t next, int h0, const int H, const Digits *x, int64_t row,
                     const int M, const int D, Ahead ahead, float *out) {
    uint32_t first[2][16], second[2][16];
    pair_tables(first, second);
    const Picker table = picker((const uint32_t(*)[16])first, (const uint32_t(*)[16])second);
    const int8_t *digit = x->digit + row * D * x->apart;
    const int64_t stride = x->wide / 32 * 192 * next;
    w += h0 * LANES * 4;
    Scales scales = first_scales(l, panel, next);
    const int chunks = l->group / 32, S = M * D;
    F result[MOST][STREAMS];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) result[h][m] = f_zero();
    for (int64_t g = 0; g < x->groups; g++) {
        I sum[MOST][STREAMS];
        P part[MOST][STREAMS]; /* of 32 columns at a time, if they hold no more: four products of at most 4080 each */
        EACH_SUM(S) sum[h][s] = i_zero(), part[h][s] = p_zero();
        for (int c = 0; c < chunks; c++, w += 192, digit += 32) {
            fetch(&ahead);
            UNROLL for (int t = 0; t < 2; t++) {
                W low[MOST], high[MOST], front[MOST], back[MOST];
                UNROLL for (int h = 0; h < H; h++) {
                    W meta = VECTOR(2, h), both = VECTOR(t, h);
                    low[h] = pick_value(&table, w_low(both)), high[h] = pick_value(&table, w_high(both));
                    front[h] = pick_control(&table, meta, 2 * t), back[h] = pick_control(&table, meta, 2 * t + 1);
                }
                UNROLL for (int s = 0; s < S; s++) {
                    X16 near = x16_load(digit + s * x->apart + 16 * t);
                    UNROLL for (int h = 0; h < H; h++) part[h][s] = p_pick_dot(part[h][s], near, front[h], low[h]);
                    UNROLL for (int h = 0; h < H; h++) part[h][s] = p_pick_dot(part[h][s], near, back[h], high[h]);
                }
            }
            if (!WIDE_SUMS) EACH_SUM(S) sum[h][s] = p_flush(sum[h][s], part[h][s]), part[h][s] = p_zero();
        }
        if (WIDE_SUMS) EACH_SUM(S) sum[h][s] = p_flush(sum[h][s], part[h][s]);
        I offset[MOST];
        UNROLL for (int h = 0; h < H; h++) {
            const int16_t *sums = l->sums + ((panel + h / HALVES * next) * x->groups + g) * PANEL;
            offset[h] = i_mul(i_load_i16(sums + (h0 + h % HALVES) * LANES), i_set1(128));
        }
        FINISH_GROUP(offset[h])
        next_group(&scales);
    }
    STORE_RESULT
}
