/* exp, tanh, erf, activations, sums for norms, and rotary embedding, in loops that compilers turn into vectors; sums in one order on every machine. */

/* e^x to about 2 ulp, for x <= 88; below -87 it is 0. */
INLINE float exp_fast(float x) {
    float clamped = x > -87.0f ? x : -87.0f; /* NaN becomes a number too, which an integer can be */
    clamped = clamped < 88.0f ? clamped : 88.0f;
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

/* Sums in 16 running sums, added up pairwise: of numbers, of squared deviations from their mean, of squares. */
#define LANE_SUM(TERM)                                             \
    float lane[16] = {0};                                          \
    int64_t i = 0;                                                 \
    for (; i + 16 <= n; i += 16)                                   \
        for (int j = 0; j < 16; j++) lane[j] += TERM(x[i + j]);    \
    for (int j = 0; i < n; i++, j++) lane[j] += TERM(x[i]);        \
    for (int step = 8; step; step >>= 1)                           \
        for (int j = 0; j < step; j++) lane[j] += lane[j + step];  \
    return lane[0];
#define ITSELF(X) (X)
#define DEVIATION(X) (((X) - mean) * ((X) - mean))
#define SQUARE(X) ((X) * (X))
static float plain_sum(const float *x, int64_t n) { LANE_SUM(ITSELF) }
static float deviation_sum(const float *x, float mean, int64_t n) { LANE_SUM(DEVIATION) }
static float square_sum(const float *x, int64_t n) { LANE_SUM(SQUARE) }

INLINE float tanh_fast(float x) { /* (1 - e) / (1 + e) with e = exp(-2 |x|), and the beginning of its series near zero, where that cancels */
    float positive = fabsf(x), e = exp_fast(-2.0f * positive), far = (1.0f - e) / (1.0f + e), s = x * x;
    float near = positive * (1.0f + s * (-1.0f / 3.0f + s * (2.0f / 15.0f + s * (-17.0f / 315.0f))));
    return copysignf(positive < 0.1f ? near : far, x);
}

/* Rational approximation on [-4, 4] (as of Eigen and XLA), to 1e-7. */
INLINE float erf_fast(float x) {
    float c = x < -4.0f ? -4.0f : x > 4.0f ? 4.0f : x, s = c * c;
    float p = -2.72614225801306e-10f;
    p = p * s + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    float q = -1.45660718464996e-05f;
    q = q * s - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    return x == x ? c * p / q : x;
}

enum { ACT_SILU, ACT_GELU, ACT_GELU_TANH, ACT_GELU_QUICK, ACT_RELU, ACT_RELU2 };
#define SILU(X) ((X) / (1.0f + exp_fast(-(X))))
#define GELU(X) (0.5f * (X) * (1.0f + erf_fast((X) * 0.70710678f)))
#define GELU_TANH(X) ((X) / (1.0f + exp_fast(-1.5957691216f * ((X) + 0.044715f * (X) * (X) * (X)))))
#define GELU_QUICK(X) ((X) / (1.0f + exp_fast(-1.702f * (X))))
#define RELU(X) ((X) < 0.0f ? 0.0f : (X)) /* NaN goes through */
#define RELU2(X) (RELU(X) * RELU(X))
#define ACTIVATE(F)                                                          \
    if (up)                                                                  \
        for (int64_t i = 0; i < n; i++) gate[i] = F(gate[i]) * up[i];        \
    else                                                                     \
        for (int64_t i = 0; i < n; i++) gate[i] = F(gate[i]);                \
    break;
/* gate = activation(gate) * up; `up` may be NULL. */
static void activate(int activation, float *restrict gate, const float *restrict up, int64_t n) {
    switch (activation) {
    case ACT_SILU: ACTIVATE(SILU)
    case ACT_GELU: ACTIVATE(GELU)
    case ACT_GELU_TANH: ACTIVATE(GELU_TANH)
    case ACT_GELU_QUICK: ACTIVATE(GELU_QUICK)
    case ACT_RELU: ACTIVATE(RELU)
    case ACT_RELU2: ACTIVATE(RELU2)
    }
}

/* The first 2 * half numbers of a head, halves rotated against each other (the convention of transformers). */
static void rotate(float *restrict x, const float *restrict cosine, const float *restrict sine, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

/* As `rotate`, but neighbours against each other. */
static void rotate_pairs(float *restrict x, const float *restrict cosine, const float *restrict sine, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosine[i] - b * sine[i];
        x[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
}
