/* Many rows of x: a panel's codes are unpacked once, to one byte each, and then read by every tile.
 *
 * Unpacked [wide/4, 16 rows, 4]: code + 8 (of four bits), zero codes where 2:4 pruned. The results are those of the other tiles. */
static void unpack_w4(const uint8_t *w, int64_t wide, uint8_t *out) {
    for (int64_t c = 0; c < wide / 8; c++, w += 64, out += 128)
        for (int h = 0; h < HALVES; h++) {
            W both = w_load(w + h * LANES * 4);
            w_store(out + h * LANES * 4, w_low(both));
            w_store(out + 64 + h * LANES * 4, w_high(both));
        }
}

static void unpack_s24(const uint8_t *w, int64_t wide, uint8_t *out) {
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
