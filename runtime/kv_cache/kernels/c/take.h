/* Sixteen channels of a token's codes as floats, without scale and zero. `half`: which half of a block of 32, a constant. */
#define FP8_UNIT 256.0f /* what the codes of take_fp8 must be multiplied by: float16's exponent is biased by 8 more */

INLINE void take_fp8(const uint8_t *p, V8 v[2]) {
#ifdef __AVX2__ /* as float16, whose subnormals are converted at full speed */
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
    wide = _mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16((short)0xbfff));
    v[0] = (V8)_mm256_cvtph_ps(_mm256_castsi256_si128(wide));
    v[1] = (V8)_mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1));
#else
    uint16_t half[16];
    for (int i = 0; i < 16; i++) half[i] = (uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
    v[0] = v8_from_f16(half), v[1] = v8_from_f16(half + 8);
#endif
}

INLINE void take_int4(const uint8_t *p, const int half, V8 v[2]) { /* byte b: code b low, code b + 16 high */
#ifdef __AVX2__
    const __m256i first = _mm256_setr_epi32(~0xff, ~0xff | 1, ~0xff | 2, ~0xff | 3, ~0xff | 4, ~0xff | 5, ~0xff | 6, ~0xff | 7);
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    if (half) both = _mm256_srli_epi16(both, 4);
    both = _mm256_and_si256(both, _mm256_set1_epi8(15));
    v[0] = (V8)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(both, first)); /* a byte to each lane, zeros above it */
    v[1] = (V8)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(both, _mm256_or_si256(first, _mm256_set1_epi32(8))));
#else
    for (int i = 0; i < 16; i++) v[i / 8][i % 8] = (float)(half ? p[i] >> 4 : p[i] & 15);
#endif
}

INLINE void take_int2(const uint8_t *p, const int half, V8 v[2]) { /* byte b: codes b, b + 8, b + 16, b + 24 */
    I8 four = i8_from_bytes(p);
    v[0] = __builtin_convertvector((four >> (4 * half)) & 3, V8);
    v[1] = __builtin_convertvector((four >> (4 * half + 2)) & 3, V8);
}

INLINE void take(const int kind, const uint8_t *token, int64_t chunk, const int half, V8 v[2]) {
    if (kind == KIND_F32) {
        v[0] = v8_load((const float *)token + chunk * 16), v[1] = v8_load((const float *)token + chunk * 16 + 8);
    } else if (kind == KIND_BF16) {
        const uint16_t *p = (const uint16_t *)token + chunk * 16;
        v[0] = v8_from_bf16(p), v[1] = v8_from_bf16(p + 8);
    } else if (kind == KIND_F16) {
        const uint16_t *p = (const uint16_t *)token + chunk * 16;
        v[0] = v8_from_f16(p), v[1] = v8_from_f16(p + 8);
    } else if (kind == KIND_FP8) {
        take_fp8(token + chunk * 16, v);
    } else if (kind == KIND_INT2) {
        take_int2(token + chunk / 2 * 8, half, v);
    } else if (kind == KIND_INT4) {
        take_int4(token + chunk / 2 * 16, half, v);
    } else {
        v[0] = v8_from_bytes(token + chunk * 16), v[1] = v8_from_bytes(token + chunk * 16 + 8);
    }
}

/* Codes of a tile's page, or the floats they were decoded to. */
typedef struct {
    const uint8_t *codes, *next; /* [PAGE, stride]; the page that is fetched meanwhile */
    int64_t stride, chunks;
} Read;

INLINE Read read_of(const Side *side, const Tile *tile, const float *decoded) {
    if (side->tile) return (Read){(const uint8_t *)decoded, (const uint8_t *)decoded, side->wide * 4, side->wide / 16};
    return (Read){side->codes + tile->page * PAGE * side->stride, side->codes + tile->next * PAGE * side->stride, side->stride,
                  side->chunks};
}
