/* 2:4 weights: of each quad of columns two codes and one of six pairs of positions, 3 bits a weight.
 *
 * 32 columns of a panel are three pieces (planes.h). In a row's four bytes of the first: low nibbles = the kept codes of quads
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

/* As tile_planes. */
INLINE void tile_s24(const Linear *l, const Stretch *run, int h0, const int H, const Digits *x, int64_t row, const int M, const int D,
                     float *out) {
    uint32_t first[2][16], second[2][16];
    pair_tables(first, second);
    const Picker table = picker((const uint32_t(*)[16])first, (const uint32_t(*)[16])second);
    const int8_t *digit = x->digit + row * D * x->apart + run->first * l->group;
    const uint8_t *w = run->w + h0 * LANES * 4;
    Scales scales = first_scales(l, run);
    const int S = M * D;
    F result[VECTORS][STREAMS];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) result[h][m] = f_load(out + m * PANEL + (h0 + h) * LANES);
    for (int64_t g = run->first; g < run->last; g++) {
        I sum[VECTORS][2 * STREAMS], offset[VECTORS];
        P part[VECTORS][STREAMS]; /* of 32 columns at a time, if they hold no more: four products of at most 4080 each */
        EACH_SUM(S) sum[h][s] = i_zero(), part[h][s] = p_zero();
        if (run->cold) fetch_scales(l, &scales);
        for (int left = l->group; left; left -= 32, w += 3 * PIECE, digit += 32) {
            if (run->cold) fetch(w, 3 * PIECE);
            UNROLL for (int t = 0; t < 2; t++) {
                W low[VECTORS], high[VECTORS], front[VECTORS], back[VECTORS];
                UNROLL for (int h = 0; h < H; h++) {
                    W meta = w_load(w + 2 * PIECE + h * LANES * 4), both = w_load(w + t * PIECE + h * LANES * 4);
                    low[h] = pick_value(&table, w_and(both, 15)), high[h] = pick_value(&table, w_and(w_shift(both, -4), 15));
                    front[h] = pick_control(&table, meta, 2 * t), back[h] = pick_control(&table, meta, 2 * t + 1);
                }
                UNROLL for (int s = 0; s < S; s++) {
                    X16 near = x16_load(digit + s * x->apart + 16 * t);
                    UNROLL for (int h = 0; h < H; h++) part[h][s] = p_pick_dot(part[h][s], near, front[h], low[h]);
                    UNROLL for (int h = 0; h < H; h++) part[h][s] = p_pick_dot(part[h][s], near, back[h], high[h]);
                }
            }
            if (!WIDE_SUMS) EACH_SUM(S) sum[h][s] = p_flush(sum[h][s], part[h][s], 1), part[h][s] = p_zero();
        }
        if (WIDE_SUMS) EACH_SUM(S) sum[h][s] = p_flush(sum[h][s], part[h][s], 1);
        UNROLL for (int h = 0; h < H; h++)
            offset[h] = i_mul(i_load_i16(l->sums + (run->panel * x->groups + g) * PANEL + (h0 + h) * LANES), i_set1(128));
        finish_group(l, &scales, h0, H, x, row, M, D, g, sum, offset, 0, result);
        next_group(&scales);
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) f_store(out + m * PANEL + (h0 + h) * LANES, result[h][m]);
}
