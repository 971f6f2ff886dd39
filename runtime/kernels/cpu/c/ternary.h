/* Ternary weights in dictionary codes (runtime/formats/ternary_dictionary.py). A word of the dictionary has 2 to 28 weights of two bits, from
 * the lowest on, and how many in its highest byte; all are written at once, and what is too much is overwritten by those of the next word. */
#define WORD_ROOM 32 /* weights written at a time */

/* 32 weights out of `word`, of which those behind its own are anything; `level`: of 0, 1, 2 and 3. */
INLINE void put_word(uint64_t word, const uint16_t level[4], uint16_t *out) {
#if defined(__AVX512BW__)
    const __m512i every = _mm512_set_epi64(0x0706070607060706, 0x0706070607060706, 0x0504050405040504, 0x0504050405040504, 0x0302030203020302,
                                           0x0302030203020302, 0x0100010001000100, 0x0100010001000100); /* an eighth of the bits a lane */
    const __m512i shift = _mm512_broadcast_i32x4(_mm_set_epi16(14, 12, 10, 8, 6, 4, 2, 0));
    uint64_t four;
    memcpy(&four, level, 8);
    const __m512i place = _mm512_srlv_epi16(_mm512_shuffle_epi8(_mm512_set1_epi64((long long)word), every), shift);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(place, _mm512_set1_epi64((long long)four))); /* of places the lowest two bits count */
#elif defined(__AVX2__)
    const __m256i up = _mm256_broadcastsi128_si256(_mm_set_epi16(1, 4, 16, 64, 256, 1024, 4096, 16384)), all = _mm256_set1_epi64x((long long)word);
    const __m256i four = _mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *)level));
    const __m256i every[2] = {
        _mm256_set_epi64x(0x0302030203020302, 0x0302030203020302, 0x0100010001000100, 0x0100010001000100),
        _mm256_set_epi64x(0x0706070607060706, 0x0706070607060706, 0x0504050405040504, 0x0504050405040504),
    };
    UNROLL for (int half = 0; half < 2; half++) {
        const __m256i place = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(all, every[half]), up), 14);
        const __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(place, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
        _mm256_storeu_si256((__m256i *)(out + 16 * half), _mm256_shuffle_epi8(four, bytes));
    }
#else
    for (int i = 0; i < WORD_ROOM; i++) out[i] = level[word >> 2 * i & 3];
#endif
}

/* `count` weights of a row from `at` on, as 16-bit floats; up to WORD_ROOM - 1 more are written. */
INLINE Code expand_words(const Linear *l, int64_t row, int64_t count, Code at, uint16_t *out) {
    const uint16_t *own = (const uint16_t *)l->levels + 2 * row, level[4] = {0, own[1], own[0], 0};
    for (int64_t k = 0; k < count;) {
        uint16_t number;
        uint64_t word;
        memcpy(&number, at.code, 2);
        memcpy(&word, l->table + 8 * (int64_t)number, 8);
        const int64_t left = (int64_t)(word >> 56) - at.weight;
        put_word(word >> 2 * at.weight, level, out + k);
        if (left > count - k) {
            at.weight += (int)(count - k);
            break;
        }
        at.code += 2, at.weight = 0;
        k += left;
    }
    return at;
}
