/* Eight floats at once, in the vector extension of GCC and Clang: one AVX2 register, two of SSE or NEON. */
#define EIGHT 8
typedef float V8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));
typedef uint8_t B8 __attribute__((vector_size(8)));
typedef uint16_t H8 __attribute__((vector_size(16)));
typedef uint32_t U8 __attribute__((vector_size(32)));

#ifdef __AVX__ /* in a register: as an operand of every product it would be loaded as often */
#define KEEP(v) __asm__("" : "+x"(v))
#else
#define KEEP(v)
#endif

INLINE V8 v8_all(float x) { return x - (V8){0}; }
INLINE V8 v8_load(const float *p) { V8 v; memcpy(&v, p, sizeof v); return v; }
INLINE void v8_store(float *p, V8 v) { memcpy(p, &v, sizeof v); }
INLINE V8 v8_pick(I8 where, V8 a, V8 b) { return (V8)(((I8)a & where) | ((I8)b & ~where)); }

INLINE V8 v8_from_bf16(const uint16_t *p) {
#ifdef __AVX2__
    return (V8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    H8 half;
    memcpy(&half, p, sizeof half);
    return (V8)(__builtin_convertvector(half, U8) << 16);
#endif
}
#ifdef __F16C__
INLINE V8 v8_from_f16(const uint16_t *p) { return (V8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
#else /* one copy of it: it is long, and unrolled everywhere it would be compiled for minutes */
static __attribute__((noinline)) void floats_from_f16(const uint16_t *p, float *out) {
    for (int i = 0; i < EIGHT; i++) out[i] = f16_to_float(p[i]);
}
INLINE V8 v8_from_f16(const uint16_t *p) {
    float eight[EIGHT];
    floats_from_f16(p, eight);
    return v8_load(eight);
}
#endif
INLINE I8 i8_from_bytes(const uint8_t *p) {
#ifdef __AVX2__ /* compilers take a detour for this conversion */
    return (I8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    B8 bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, I8);
#endif
}
INLINE V8 v8_from_bytes(const uint8_t *p) { return __builtin_convertvector(i8_from_bytes(p), V8); }

/* Each of 8 / times numbers so many times. */
INLINE V8 v8_repeat(const float *p, const int times) {
    if (times == 1) return v8_load(p);
    if (times == 2) return (V8){p[0], p[0], p[1], p[1], p[2], p[2], p[3], p[3]};
    return (V8){p[0], p[0], p[0], p[0], p[1], p[1], p[1], p[1]};
}

/* The sums of four vectors. */
INLINE V4 v8_sums(V8 a, V8 b, V8 c, V8 d) {
#ifdef __AVX__
    __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
    __m256 all = _mm256_hadd_ps(ab, cd);
    return (V4)_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
    V4 sum = {0};
    for (int i = 0; i < EIGHT; i++) sum += (V4){a[i], b[i], c[i], d[i]};
    return sum;
#endif
}
INLINE float v8_sum(V8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

/* e^x to about 2 ulp for x <= 88; below -87 it is 0, NaN stays NaN. */
INLINE V8 v8_exp(V8 x) {
    const float whole = 12582912.0f; /* 1.5 * 2^23: sums with it have no fraction left, and their lowest bits are an integer */
    I8 none = x < -87.0f;
    V8 clamped = v8_pick(none, v8_all(-87.0f), x);
    V8 shifted = clamped * 1.44269504f + whole, n = shifted - whole;
    V8 f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts (Cody and Waite) */
    V8 p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    V8 power = (V8)(((I8)shifted << 23) + (127 << 23));
    return (V8)((I8)(p * power) & ~none);
}

/* tanh to about 3 ulp: a polynomial around 0 (Cephes), where 1 - 2 / (e^2x + 1) would cancel. */
INLINE V8 v8_tanh(V8 x) {
    V8 size = (V8)((I8)x & 0x7fffffff), z = x * x;
    V8 p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    V8 doubled = v8_pick(size > 20.0f, v8_all(40.0f), size * 2.0f); /* it is 1 from 9 on; z may overflow, which is not taken */
    V8 far = 1.0f - 2.0f / (v8_exp(doubled) + 1.0f);
    far = (V8)((I8)far | ((I8)x & (int32_t)0x80000000));
    return v8_pick(x == x, v8_pick(size < 0.625f, p * z * x + x, far), x);
}
