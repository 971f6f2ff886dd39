/* Vectors of AVX-512 with VNNI: 16 lanes of 32 bits, a whole panel. Four products of bytes are added in 32 bits at once. */
#ifndef COMPRESS_EMULATED /* the tests bring these intrinsics in plain C for machines without them */
#include <immintrin.h>
#define STAY(VECTOR) __asm__("" : "+v"(VECTOR)) /* compilers copy sums about, and load a vector again for each use */
#else
#define STAY(VECTOR)
#endif

#define LANES 16
#define WIDE_SUMS 1 /* partial sums hold a whole group */
#ifdef __AMX_INT8__
#define ISA_NAME "amx"
#else
#define ISA_NAME "avx512-vnni"
#endif

typedef __m512i W;
typedef __m512i X;
typedef __m512i P;
typedef __m512i I;
typedef __m512 F;

static inline W w_load(const uint8_t *p) {
    W w = _mm512_loadu_si512((const void *)p);
    STAY(w);
    return w;
}
static inline void w_store(uint8_t *p, W w) { _mm512_storeu_si512((void *)p, w); }
static inline W w_and(W w, int mask) { return _mm512_and_si512(w, _mm512_set1_epi8((char)mask)); }
static inline W w_shift(W w, int left) { return left < 0 ? _mm512_srli_epi16(w, (unsigned)-left) : _mm512_slli_epi16(w, (unsigned)left); }
static inline W w_select(int mask, W a, W b) { return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), a, b, 0xca); }
static inline W w_add(W a, W b) { return _mm512_add_epi8(a, b); }
/* The bits of every lane, rotated to the right. */
#define w_rotate(WORDS, BITS) _mm512_ror_epi32(WORDS, BITS) /* by a constant */
static inline W w_rotate_byte(W w) { return w_rotate(w, 8); }
/* Bytes of a table, by numbers below 16. */
static inline W w_lookup(const uint8_t table[16], W w) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), w);
}
/* Levels of rows: each lane's own table of 4, 8 or 16 bytes, four of them a piece, by the low bits of its bytes; others mean nothing. */
static inline W w_lookup_rows(const W *piece, const int bits, W codes) {
    static const uint8_t first[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    const W lanes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)first));
    const W at = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(3), lanes, 0xea); /* codes & 3 | lanes */
    W found = _mm512_shuffle_epi8(piece[0], at);
    if (bits == 2) return found;
    const __mmask64 odd = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(4));
    found = _mm512_mask_shuffle_epi8(found, odd, piece[1], at);
    if (bits == 3) return found;
    const W other = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(piece[2], at), odd, piece[3], at);
    return _mm512_mask_mov_epi8(found, _mm512_test_epi8_mask(codes, _mm512_set1_epi8(8)), other);
}
static inline X x_load(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
static inline P p_zero(void) { return _mm512_setzero_si512(); }
static inline P p_dot(P p, W w, X x) {
    p = _mm512_dpbusd_epi32(p, w, x);
    STAY(p);
    return p;
}
static inline I i_zero(void) { return _mm512_setzero_si512(); }
static inline I p_flush(I sum, P p, int times) { return (void)times, _mm512_add_epi32(sum, p); }

static inline I i_set1(int32_t v) { return _mm512_set1_epi32(v); }
static inline I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
static inline I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I i_shift(I a, int left) { return left < 0 ? _mm512_srai_epi32(a, (unsigned)-left) : _mm512_slli_epi32(a, (unsigned)left); }
static inline I i_mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
static inline I i_load(const int32_t *p) { return _mm512_loadu_si512((const void *)p); }
static inline I i_load_i8(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline I i_load_i16(const int16_t *p) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p)); }

/* Two numbers a lane. */
typedef struct { I first, second; } Pair;
static inline Pair pair_load(const uint8_t *p) {
    I both = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return (Pair){_mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24), _mm512_srai_epi32(both, 8)};
}
static inline Pair pair_same(const uint8_t *p) { /* a byte a lane, twice */
    I one = i_load_i8((const int8_t *)p);
    return (Pair){one, one};
}
static inline I i_nibble(I v) { return _mm512_and_si512(v, i_set1(15)); }
static inline Pair pair_low(Pair v) { return (Pair){i_nibble(v.first), i_nibble(v.second)}; } /* nibbles of the bytes */
static inline Pair pair_high(Pair v) { return (Pair){i_nibble(i_shift(v.first, -4)), i_nibble(i_shift(v.second, -4))}; }
/* Sums times one of a pair (0, 1; ALIKE: they are); pairs times two numbers. */
static inline I p_scaled(I sum, P p, Pair v, const int which) { return i_add(sum, i_mul(p, which == 1 ? v.second : v.first)); }
static inline I i_pair_dot(I sum, Pair v, const int16_t *two) {
    return i_add(sum, i_add(i_mul(v.first, i_set1(two[0])), i_mul(v.second, i_set1(two[1]))));
}

static inline F f_zero(void) { return _mm512_setzero_ps(); }
static inline F f_set1(float v) { return _mm512_set1_ps(v); }
static inline F f_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void f_store(float *p, F v) { _mm512_storeu_ps(p, v); }
static inline F f_from_i(I v) { return _mm512_cvtepi32_ps(v); }
static inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F f_max(F a, F b) { return _mm512_max_ps(a, b); } /* b where either is no number */
static inline float f_reduce_max(F v) { return _mm512_reduce_max_ps(v); }
static inline F f_load_bf16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline F f_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline F f_load_f8(const uint8_t *p) {
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xbfff)));
}
static inline F f_load_e8m0(const uint8_t *p) {
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(E8M0_LEAST)));
}
static inline float f_sum(F v) { return _mm512_reduce_add_ps(v); }
/* 16 vectors as the rows of a matrix, transposed. */
static inline __attribute__((always_inline)) void f_transpose(F v[16]) {
    F a[16], b[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2) a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44), b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44), b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 4; i++) {
        F even = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), odd = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        F even2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88), odd2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        v[i] = _mm512_shuffle_f32x4(even, even2, 0x88), v[i + 8] = _mm512_shuffle_f32x4(even, even2, 0xdd);
        v[i + 4] = _mm512_shuffle_f32x4(odd, odd2, 0x88), v[i + 12] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
}

typedef __m512i X16;
static inline X16 x16_load(const int8_t *p) {
    __m512i x = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80));
}
typedef struct { __m512i first[2], second[2], value; } Picker;
static inline Picker picker(const uint32_t first[2][16], const uint32_t second[2][16]) {
    static const int8_t codes[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    Picker t;
    for (int half = 0; half < 2; half++) {
        t.first[half] = _mm512_loadu_si512(first[half]);
        t.second[half] = _mm512_loadu_si512(second[half]);
    }
    t.value = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes));
    return t;
}
static inline W pick_control(const Picker *t, W meta, int part) {
    __m512i a = _mm512_permutexvar_epi32(_mm512_srli_epi32(meta, 8 * part), t->first[part & 1]);
    __m512i b = _mm512_permutexvar_epi32(_mm512_srli_epi32(meta, 8 * part + 4), t->second[part & 1]);
    return _mm512_or_si512(a, b);
}
static inline W pick_value(const Picker *t, W nibbles) { return _mm512_shuffle_epi8(t->value, nibbles); }
static inline P p_pick_dot(P p, X16 x, W control, W value) {
    return p_dot(p, _mm512_shuffle_epi8(x, control), value);
}
