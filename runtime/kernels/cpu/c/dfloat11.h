/* bfloat16 whose exponents are coded (runtime/formats/dfloat11.py). */
#define UNIT_COLUMNS 256

/* A weight of its exponent, and of what is beside it in the file: the mantissa, below it the sign. */
INLINE uint16_t joined(uint8_t exponent, uint8_t mantissa) {
    const uint16_t turned = (uint16_t)(exponent << 8 | mantissa);
    return (uint16_t)(turned >> 1 | turned << 15);
}

/* 32 weights from their mantissas, whose codes' bit b is bit `bit` of plane b; which of them are escapes. */
INLINE uint32_t expand_32(const uint8_t *mantissas, const uint8_t *const plane[4], const int bits, const int bit, const uint8_t table[16],
                          uint16_t *out) {
#if defined(__AVX2__)
    __m256i code = _mm256_setzero_si256();
    UNROLL for (int b = 0; b < bits; b++) {
        const __m256i v = _mm256_loadu_si256((const __m256i *)plane[b]), one = _mm256_set1_epi8((char)(1 << b));
        code = _mm256_or_si256(code, _mm256_and_si256(bit > b ? _mm256_srli_epi16(v, bit - b) : _mm256_slli_epi16(v, b - bit), one));
    }
    const __m256i e = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), code);
    const __m256i m = _mm256_loadu_si256((const __m256i *)mantissas);
    __m256i low = _mm256_unpacklo_epi8(m, e), high = _mm256_unpackhi_epi8(m, e);
    low = _mm256_or_si256(_mm256_srli_epi16(low, 1), _mm256_slli_epi16(low, 15));
    high = _mm256_or_si256(_mm256_srli_epi16(high, 1), _mm256_slli_epi16(high, 15));
    _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 16), _mm256_permute2x128_si256(low, high, 0x31));
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, _mm256_set1_epi8((char)((1 << bits) - 1))));
#else
    uint32_t others = 0;
    for (int j = 0; j < 32; j++) {
        int code = 0;
        for (int b = 0; b < bits; b++) code |= (plane[b][j] >> bit & 1) << b;
        out[j] = joined(table[code], mantissas[j]);
        others |= (uint32_t)(code == (1 << bits) - 1) << j;
    }
    return others;
#endif
}
/* Escapes get the next exponents of the list; returns where it goes on. */
INLINE const uint8_t *put_escapes(uint64_t others, const uint8_t *mantissas, const uint8_t *escape, uint16_t *out) {
    for (; others; others &= others - 1) {
        const int j = __builtin_ctzll(others);
        out[j] = joined(*escape++, mantissas[j]);
    }
    return escape;
}

/* Columns [k, k + count) of a row, whole units of 256 or up to its end; `escape` is where its escapes from k on begin; returns where they go on. */
INLINE const uint8_t *expand_row(const Linear *l, const int bits, int64_t row, int64_t k, int64_t count, const uint8_t *escape, uint16_t *out) {
    const int64_t apart = (l->columns + 7) / 8;
    const uint8_t *mantissas = l->weight + row * l->columns + k, *codes = l->codes + row * bits * apart + k / 8, *plane[4];
    const uint8_t *ahead = l->codes + row * bits * apart + (AHEAD + k) / 8 * bits; /* planes are short: other rows' are asked for in turn */
    uint8_t table[16] = {0};
    memcpy(table, l->exponents, (size_t)(1 << bits) - 1);
    for (; count >= UNIT_COLUMNS; count -= UNIT_COLUMNS, mantissas += UNIT_COLUMNS, codes += UNIT_COLUMNS / 8, out += UNIT_COLUMNS) {
        uint64_t others[8];
        UNROLL for (int b = 0; b < bits; b++) plane[b] = codes + b * apart;
        for (int i = 0; i < UNIT_COLUMNS; i += 64) __builtin_prefetch(mantissas + AHEAD + i, 0, 2);
        for (int i = 0; i < bits * UNIT_COLUMNS / 8; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        ahead += bits * UNIT_COLUMNS / 8;
        UNROLL for (int i = 0; i < 8; i++) others[i] = expand_32(mantissas + 32 * i, plane, bits, i, table, out + 32 * i);
        UNROLL for (int i = 0; i < 8; i += 2) escape = put_escapes(others[i] | others[i + 1] << 32, mantissas + 32 * i, escape, out + 32 * i);
    }
    const int64_t width = (count + 7) / 8;
    uint8_t rest[4][32] = {{0}}, given[32] = {0};
    uint16_t found[32];
    for (int b = 0; b < bits; b++) plane[b] = rest[b];
    for (int64_t i = 0; i < 8 && i * width < count; i++) {
        const int64_t there = count - i * width < width ? count - i * width : width;
        memcpy(given, mantissas + i * width, (size_t)there);
        for (int b = 0; b < bits; b++)
            for (int64_t j = 0; j < width; j++) rest[b][j] = (uint8_t)(codes[b * apart + j] >> i & 1);
        escape = put_escapes(expand_32(given, plane, bits, 0, table, found), given, escape, found);
        memcpy(out + i * width, found, (size_t)there * 2);
    }
    return escape;
}
