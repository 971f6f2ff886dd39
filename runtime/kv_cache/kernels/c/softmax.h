/* Softmax as it goes (Milakov and Gimelshein, arXiv 1805.02867). Scores lie [count, lanes], so a vector has 8 / lanes tokens. */

/* score becomes weights: exponentials below the largest score so far; keep: what earlier sums are multiplied by; sum: of the
 * weights. No score above minus infinity: all of them are 0. A NaN stays one and is not lost. */
INLINE void softmax(const Request *request, const Tile *tile, int64_t row, int64_t first, const int queries, const int lanes,
                    float *score, float *top, float *total, float *keep, float *sum) {
    int used = tile->count * lanes, end = (used + 7) / 8 * 8;
    if (request->softcap != 0.0f)
        for (int i = 0; i < end; i += 8) v8_store(score + i, request->softcap * v8_tanh(v8_load(score + i) / request->softcap));
    for (int i = used; i < end; i++) score[i] = -INFINITY;
    if (request->bias)
        for (int t = 0; t < tile->count; t++) {
            float bias = request->bias[tile->page * PAGE + tile->slot[t]];
            EACH for (int q = 0; q < lanes; q++) score[t * lanes + q] += bias;
        }
    if (request->visible) {
        const int64_t *visible = request->visible + row * request->queries + first;
        for (int q = 0; q < queries; q++)
            if (tile->position[tile->count - 1] >= visible[q])
                for (int t = 0; t < tile->count; t++)
                    if (tile->position[t] >= visible[q]) score[t * lanes + q] = -INFINITY;
    }
    V8 high = v8_load(score);
    for (int i = 8; i < end; i += 8) {
        V8 x = v8_load(score + i);
        high = v8_pick(x > high, x, high);
    }
    float largest[QUERIES], base[8];
    for (int q = 0; q < lanes; q++) largest[q] = q < queries ? top[first + q] : 0.0f;
    for (int i = 0; i < 8; i++) largest[i % lanes] = high[i] > largest[i % lanes] ? high[i] : largest[i % lanes];
    for (int i = 0; i < 8; i++) base[i] = largest[i % lanes] == -INFINITY ? 0.0f : largest[i % lanes];
    V8 below = v8_load(base), sums = {0};
    for (int i = 0; i < end; i += 8) {
        V8 weight = v8_exp(v8_load(score + i) - below);
        v8_store(score + i, weight);
        sums += weight;
    }
    V8 before = {0};
    for (int q = 0; q < queries; q++) before[q] = top[first + q] - base[q];
    before = v8_exp(before);
    for (int q = 0; q < lanes; q++) sum[q] = 0.0f;
    for (int i = 0; i < 8; i++) sum[i % lanes] += sums[i];
    for (int q = 0; q < queries; q++) {
        keep[q] = before[q];
        top[first + q] = largest[q], total[first + q] = total[first + q] * keep[q] + sum[q];
    }
}
