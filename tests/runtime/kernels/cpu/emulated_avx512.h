/* The AVX-512 intrinsics of runtime/kernels/cpu/c/simd_avx512.h in plain C, after Intel's descriptions of them, so that the path
 * for such CPUs can be checked on any machine. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef union { uint8_t u8[16]; int8_t i8[16]; } __m128i;
typedef union { uint16_t u16[16]; int16_t i16[16]; } __m256i;
typedef union { uint8_t u8[64]; int8_t i8[64]; uint16_t u16[32]; uint32_t u32[16]; int32_t i32[16]; } __m512i;
typedef uint64_t __mmask64;
typedef union { float f[16]; uint32_t u32[16]; } __m512;

#define MAKE static inline
#define LANE for (int i = 0; i < 16; i++)
#define BYTE for (int i = 0; i < 64; i++)
#define BINARY(NAME, EXPRESSION)                 \
    MAKE __m512i NAME(__m512i a, __m512i b) {    \
        __m512i r;                               \
        LANE r.u32[i] = EXPRESSION;              \
        return r;                                \
    }
BINARY(_mm512_and_si512, a.u32[i] & b.u32[i])
BINARY(_mm512_or_si512, a.u32[i] | b.u32[i])
BINARY(_mm512_xor_si512, a.u32[i] ^ b.u32[i])
BINARY(_mm512_add_epi32, a.u32[i] + b.u32[i])
BINARY(_mm512_sub_epi32, a.u32[i] - b.u32[i])
BINARY(_mm512_mullo_epi32, a.u32[i] * b.u32[i])
BINARY(_mm512_max_epu32, a.u32[i] > b.u32[i] ? a.u32[i] : b.u32[i])
BINARY(_mm512_permutexvar_epi32, b.u32[a.u32[i] & 15])

#define FLOATS(NAME, EXPRESSION)               \
    MAKE __m512 NAME(__m512 a, __m512 b) {     \
        __m512 r;                              \
        LANE r.f[i] = EXPRESSION;              \
        return r;                              \
    }
FLOATS(_mm512_add_ps, a.f[i] + b.f[i])
FLOATS(_mm512_mul_ps, a.f[i] * b.f[i])
FLOATS(_mm512_max_ps, a.f[i] > b.f[i] ? a.f[i] : b.f[i])

MAKE __m128i _mm_loadu_si128(const __m128i *p) { __m128i r; memcpy(&r, p, sizeof r); return r; }
MAKE __m256i _mm256_loadu_si256(const __m256i *p) { __m256i r; memcpy(&r, p, sizeof r); return r; }
MAKE __m512i _mm512_loadu_si512(const void *p) { __m512i r; memcpy(&r, p, sizeof r); return r; }
MAKE __m512 _mm512_loadu_ps(const void *p) { __m512 r; memcpy(&r, p, sizeof r); return r; }
MAKE void _mm512_storeu_si512(void *p, __m512i v) { memcpy(p, &v, sizeof v); }
MAKE void _mm512_storeu_ps(void *p, __m512 v) { memcpy(p, &v, sizeof v); }
MAKE __m512i _mm512_set1_epi32(int v) { __m512i r; LANE r.i32[i] = v; return r; }
MAKE __m512i _mm512_set1_epi8(char v) { __m512i r; BYTE r.i8[i] = v; return r; }
MAKE __m512i _mm512_setzero_si512(void) { return _mm512_set1_epi32(0); }
MAKE __m512 _mm512_set1_ps(float v) { __m512 r; LANE r.f[i] = v; return r; }
MAKE __m512 _mm512_setzero_ps(void) { return _mm512_set1_ps(0.0f); }
MAKE __m512i _mm512_srli_epi16(__m512i a, unsigned n) {
    for (int i = 0; i < 32; i++) a.u16[i] = n > 15 ? 0 : (uint16_t)(a.u16[i] >> n);
    return a;
}
MAKE __m512i _mm512_slli_epi16(__m512i a, unsigned n) {
    for (int i = 0; i < 32; i++) a.u16[i] = n > 15 ? 0 : (uint16_t)(a.u16[i] << n);
    return a;
}
MAKE __m512i _mm512_srai_epi32(__m512i a, unsigned n) { LANE a.i32[i] >>= n > 31 ? 31 : n; return a; }
MAKE __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) { /* bit i of the table: what bits abc = i give */
    __m512i r = {{0}};
    LANE for (int bit = 0; bit < 32; bit++) {
        unsigned index = (a.u32[i] >> bit & 1) << 2 | (b.u32[i] >> bit & 1) << 1 | (c.u32[i] >> bit & 1);
        r.u32[i] |= (uint32_t)(table >> index & 1) << bit;
    }
    return r;
}
MAKE __m512i _mm512_srli_epi32(__m512i a, unsigned n) { LANE a.u32[i] = n > 31 ? 0 : a.u32[i] >> n; return a; }
MAKE __m512i _mm512_ror_epi32(__m512i a, int n) { LANE a.u32[i] = a.u32[i] >> (n & 31) | a.u32[i] << (-n & 31); return a; }
MAKE __m512i _mm512_add_epi8(__m512i a, __m512i b) { BYTE a.u8[i] = (uint8_t)(a.u8[i] + b.u8[i]); return a; }
MAKE __m512i _mm512_slli_epi32(__m512i a, unsigned n) { LANE a.u32[i] = n > 31 ? 0 : a.u32[i] << n; return a; }
MAKE __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) { /* unsigned bytes of a, signed bytes of b, no saturation */
    LANE for (int j = 0; j < 4; j++) sum.u32[i] += (uint32_t)((int32_t)a.u8[4 * i + j] * b.i8[4 * i + j]);
    return sum;
}
MAKE __m512i _mm512_shuffle_epi8(__m512i a, __m512i b) {
    __m512i r;
    BYTE r.u8[i] = b.u8[i] & 0x80 ? 0 : a.u8[i / 16 * 16 + (b.u8[i] & 15)];
    return r;
}
MAKE __mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b) {
    __mmask64 r = 0;
    BYTE r |= (__mmask64)((a.u8[i] & b.u8[i]) != 0) << i;
    return r;
}
MAKE __m512i _mm512_mask_mov_epi8(__m512i a, __mmask64 m, __m512i b) { BYTE a.u8[i] = m >> i & 1 ? b.u8[i] : a.u8[i]; return a; }
MAKE __m512i _mm512_mask_shuffle_epi8(__m512i src, __mmask64 m, __m512i a, __m512i b) {
    return _mm512_mask_mov_epi8(src, m, _mm512_shuffle_epi8(a, b));
}
MAKE __m512i _mm512_broadcast_i32x4(__m128i a) { __m512i r; BYTE r.u8[i] = a.u8[i % 16]; return r; }
MAKE __m512i _mm512_cvtepi8_epi32(__m128i a) { __m512i r; LANE r.i32[i] = a.i8[i]; return r; }
MAKE __m512i _mm512_cvtepu8_epi32(__m128i a) { __m512i r; LANE r.i32[i] = a.u8[i]; return r; }
MAKE __m512i _mm512_cvtepi16_epi32(__m256i a) { __m512i r; LANE r.i32[i] = a.i16[i]; return r; }
MAKE __m512i _mm512_cvtepu16_epi32(__m256i a) { __m512i r; LANE r.i32[i] = a.u16[i]; return r; }
MAKE __m512 _mm512_cvtepi32_ps(__m512i a) { __m512 r; LANE r.f[i] = (float)a.i32[i]; return r; }
MAKE __m256i _mm256_cvtepi8_epi16(__m128i a) { __m256i r; LANE r.i16[i] = a.i8[i]; return r; }
MAKE __m256i _mm256_slli_epi16(__m256i a, unsigned n) { LANE a.u16[i] = n > 15 ? 0 : (uint16_t)(a.u16[i] << n); return a; }
MAKE __m256i _mm256_and_si256(__m256i a, __m256i b) { LANE a.u16[i] &= b.u16[i]; return a; }
MAKE __m256i _mm256_set1_epi16(short v) { __m256i r; LANE r.i16[i] = v; return r; }
MAKE __m512 _mm512_castsi512_ps(__m512i a) { __m512 r; memcpy(&r, &a, sizeof r); return r; }
MAKE __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { LANE c.f[i] = fmaf(a.f[i], b.f[i], c.f[i]); return c; }
MAKE __m512 _mm512_cvtph_ps(__m256i a) {
    __m512 r;
    LANE {
        int exponent = a.u16[i] >> 10 & 31, fraction = a.u16[i] & 1023;
        float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? ldexpf((float)(fraction + 1024), exponent - 25)
                                    : ldexpf((float)fraction, -24);
        r.f[i] = a.u16[i] & 0x8000 ? -size : size;
    }
    return r;
}
/* Of each 128 bits two floats of a, two of b: which is in `table`, two bits each. */
MAKE __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int table) {
    __m512 r;
    LANE r.f[i] = (i % 4 < 2 ? a : b).f[i / 4 * 4 + (table >> 2 * (i % 4) & 3)];
    return r;
}
/* Two of a's four 128 bits, two of b's. */
MAKE __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int table) {
    __m512 r;
    LANE r.f[i] = (i < 8 ? a : b).f[4 * (table >> 2 * (i / 4) & 3) + i % 4];
    return r;
}
MAKE __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) { __m512 r; LANE r.f[i] = (i & 1 ? b : a).f[i / 4 * 4 + i % 4 / 2]; return r; }
MAKE __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) { __m512 r; LANE r.f[i] = (i & 1 ? b : a).f[i / 4 * 4 + 2 + i % 4 / 2]; return r; }
MAKE float _mm512_reduce_add_ps(__m512 a) {
    for (int step = 8; step; step >>= 1)
        for (int i = 0; i < step; i++) a.f[i] += a.f[i + step];
    return a.f[0];
}
MAKE float _mm512_reduce_max_ps(__m512 a) {
    for (int i = 1; i < 16; i++) a.f[0] = a.f[0] > a.f[i] ? a.f[0] : a.f[i];
    return a.f[0];
}
#undef MAKE
#undef LANE
#undef BYTE
#undef BINARY
#undef FLOATS
