/* Vectors of AVX2: 8 lanes of 32 bits.
 *
 * Products of bytes are added in 16 bits: a number of b bits times a digit (-128..127), two a lane, is at most 2^(b + 8) in size, so
 * MOST_DOTS(b) of them fit before they must be widened. Codes of 8 bits go as two halves of 4. */
#include <immintrin.h>
#define STAY(VECTOR) __asm__("" : "+x"(VECTOR)) /* compilers add in an order that needs more registers than there are */

#define LANES 8
#define WIDE_SUMS 0
#define MOST_DOTS(BITS) (1 << (7 - (BITS)))
#define ISA_NAME "avx2"

typedef __m256i W; /* 32 bytes: four weights of each of 8 rows */
typedef __m256i X; /* four digits of the activations, the same in every lane */
typedef __m256i P; /* partial sums, 16 bits each */
typedef __m256i I; /* 8 x int32 */
typedef __m256 F;  /* 8 x float */

static inline W w_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline void w_store(uint8_t *p, W w) { _mm256_storeu_si256((__m256i *)p, w); }
static inline W w_and(W w, int mask) { return _mm256_and_si256(w, _mm256_set1_epi8((char)mask)); }
static inline W w_shift(W w, int left) { return left < 0 ? _mm256_srli_epi16(w, -left) : _mm256_slli_epi16(w, left); }
static inline W w_select(int mask, W a, W b) { return _mm256_or_si256(w_and(a, mask), w_and(b, ~mask)); }
static inline W w_add(W a, W b) { return _mm256_add_epi8(a, b); }
/* The bits of every lane, rotated to the right. */
static inline W w_rotate(W w, int bits) { return _mm256_or_si256(_mm256_srli_epi32(w, bits), _mm256_slli_epi32(w, 32 - bits)); }
static inline W w_rotate_byte(W w) {
    const __m128i next = _mm_setr_epi8(1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12);
    return _mm256_shuffle_epi8(w, _mm256_broadcastsi128_si256(next));
}
/* Bytes of a table, by numbers below 16. */
static inline W w_lookup(const uint8_t table[16], W w) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), w);
}
/* Levels of rows: each lane's own table of 4, 8 or 16 bytes, four of them a piece, by the low bits of its bytes; others mean nothing. */
static inline W w_lookup_rows(const W *piece, const int bits, W codes) {
    const W lanes = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    const W at = _mm256_or_si256(w_and(codes, 3), lanes);
    W found = _mm256_shuffle_epi8(piece[0], at);
    if (bits == 2) return found;
    const W odd = w_shift(codes, 5); /* bit 2 where blends look for it */
    found = _mm256_blendv_epi8(found, _mm256_shuffle_epi8(piece[1], at), odd);
    if (bits == 3) return found;
    const W other = _mm256_blendv_epi8(_mm256_shuffle_epi8(piece[2], at), _mm256_shuffle_epi8(piece[3], at), odd);
    return _mm256_blendv_epi8(found, other, w_shift(codes, 4));
}
static inline X x_load(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
static inline P p_zero(void) { return _mm256_setzero_si256(); }
static inline P p_dot(P p, W w, X x) {
    p = _mm256_add_epi16(p, _mm256_maddubs_epi16(w, x));
    STAY(p);
    return p;
}
static inline I i_zero(void) { return _mm256_setzero_si256(); }
static inline I p_flush(I sum, P p, int times) { return _mm256_add_epi32(sum, _mm256_madd_epi16(p, _mm256_set1_epi16((short)times))); }

static inline I i_set1(int32_t v) { return _mm256_set1_epi32(v); }
static inline I i_sub(I a, I b) { return _mm256_sub_epi32(a, b); }
static inline I i_add(I a, I b) { return _mm256_add_epi32(a, b); }
static inline I i_shift(I a, int left) { return left < 0 ? _mm256_srai_epi32(a, -left) : _mm256_slli_epi32(a, left); }
static inline I i_mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
static inline I i_load_i8(const int8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline I i_load_i16(const int16_t *p) { return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)p)); }

/* Two numbers of 16 bits a lane. */
typedef __m256i Pair;
static inline Pair pair_load(const uint8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
static inline Pair pair_same(const uint8_t *p) { /* a byte a lane, twice */
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes));
}
static inline Pair pair_low(Pair v) { return _mm256_and_si256(v, _mm256_set1_epi16(15)); } /* nibbles of the bytes */
static inline Pair pair_high(Pair v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi16(15)); }
static inline Pair pair_times_16(Pair v) { return _mm256_slli_epi16(v, 4); }
/* Sums times one of a pair (0, 1; ALIKE: they are); pairs times two numbers. */
static inline I p_scaled(I sum, P p, Pair v, const int which) {
    const int low = which ? 0x03020302 : 0x01000100;
    const __m128i one = _mm_setr_epi32(low, low + 0x04040404, low + 0x08080808, low + 0x0c0c0c0c);
    if (which != ALIKE) v = _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(one));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(p, v));
}
static inline I i_pair_dot(I sum, Pair v, const int16_t *two) {
    int32_t both;
    memcpy(&both, two, 4);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(v, _mm256_set1_epi32(both)));
}

static inline F f_zero(void) { return _mm256_setzero_ps(); }
static inline F f_set1(float v) { return _mm256_set1_ps(v); }
static inline F f_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void f_store(float *p, F v) { _mm256_storeu_ps(p, v); }
static inline F f_from_i(I v) { return _mm256_cvtepi32_ps(v); }
static inline F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F f_mul(F a, F b) { return _mm256_mul_ps(a, b); }
static inline F f_add(F a, F b) { return _mm256_add_ps(a, b); }
static inline F f_max(F a, F b) { return _mm256_max_ps(a, b); } /* b where either is no number */
static inline float f_reduce_max(F v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline F f_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline F f_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline F f_load_f8(const uint8_t *p) {
    __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16((short)0xbfff)));
}
static inline F f_load_e8m0(const uint8_t *p) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(E8M0_LEAST)));
}
static inline float f_sum(F v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
/* 8 vectors as the rows of a matrix, transposed. */
static inline __attribute__((always_inline)) void f_transpose(F v[8]) {
    F a[8], b[8];
    _Pragma("GCC unroll 16") for (int i = 0; i < 8; i += 2) a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]), a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    _Pragma("GCC unroll 16") for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44), b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44), b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 4; i++)
        v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20), v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
}

/* 2:4: 16 digits in every 128-bit part, made unsigned (digit + 128); each lane picks its own four. */
typedef __m256i X16;
static inline X16 x16_load(const int8_t *p) {
    __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_xor_si256(x, _mm256_set1_epi8((char)0x80));
}
typedef struct { __m256i first[2], second[2], value; } Picker;
static inline Picker picker(const uint32_t first[2][16], const uint32_t second[2][16]) {
    Picker t;
    for (int half = 0; half < 2; half++) {
        t.first[half] = _mm256_loadu_si256((const __m256i *)first[half]);
        t.second[half] = _mm256_loadu_si256((const __m256i *)second[half]);
    }
    t.value = _mm256_broadcastsi128_si256(_mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
    return t;
}
static inline W pick_control(const Picker *t, W meta, int part) {
    __m256i a = _mm256_permutevar8x32_epi32(t->first[part & 1], _mm256_srli_epi32(meta, 8 * part));
    __m256i b = _mm256_permutevar8x32_epi32(t->second[part & 1], _mm256_srli_epi32(meta, 8 * part + 4));
    return _mm256_or_si256(a, b);
}
static inline W pick_value(const Picker *t, W nibbles) { return _mm256_shuffle_epi8(t->value, nibbles); }
static inline P p_pick_dot(P p, X16 x, W control, W value) {
    return p_dot(p, _mm256_shuffle_epi8(x, control), value);
}
