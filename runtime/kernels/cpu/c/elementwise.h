/* exp, SiLU, RMS norm and rotary embedding, in loops that compilers turn into vectors; sums in one order on every machine. */

/* e^x to about 2 ulp, for x <= 88; below -87 it is 0. */
INLINE float exp_fast(float x) {
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(clamped * 1.44269504f);
    float f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts (Cody and Waite) */
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    float result = p * power;
    return x < -87.0f ? 0.0f : x == x ? result : x;
}

/* Sum of squares in 16 running sums, added up pairwise. */
static float square_sum(const float *x, int64_t n) {
    float lane[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] += x[i + j] * x[i + j];
    for (int j = 0; i < n; i++, j++) lane[j] += x[i] * x[i];
    for (int step = 8; step; step >>= 1)
        for (int j = 0; j < step; j++) lane[j] += lane[j + step];
    return lane[0];
}

/* out = x / sqrt(mean(x^2) + eps) * weight; `out` may be `x`. */
static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *out) {
    float scale = 1.0f / sqrtf(square_sum(x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = weight[i] * (x[i] * scale);
}

/* gate * sigmoid(gate) * up, in place of gate. */
static void swiglu(float *restrict gate, const float *restrict up, int64_t n) {
    for (int64_t i = 0; i < n; i++) gate[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
}

/* The first 2 * half numbers of a head, halves rotated against each other (the convention of transformers). */
static void rotate(float *restrict x, const float *restrict cosine, const float *restrict sine, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}
