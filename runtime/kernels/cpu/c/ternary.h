/* Ternary weights in dictionary codes (runtime/formats/ternary_dictionary.py). A word of the dictionary has 2 to 28 weights of two bits, from
 * the lowest on, and how many in its highest byte; all are written at once, and what is too much is overwritten by those of the next word. */
#define MOST_WEIGHTS 28 /* of a word */
#define WORD_ROOM 32    /* weights written at a time */

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

INLINE uint64_t word_at(const uint8_t *table, const uint8_t *code) {
    uint16_t number;
    uint64_t word;
    memcpy(&number, code, 2);
    memcpy(&word, table + 8 * (int64_t)number, 8);
    return word;
}

/* `count` weights of a row from `at` on, as 16-bit floats; up to WORD_ROOM - 1 more are written. */
INLINE Code expand_words(const Linear *l, int64_t row, int64_t count, Code at, uint16_t *out) {
    const uint16_t scale = ((const uint16_t *)l->row_scale)[row], level[4] = {0, scale, scale ^ 0x8000, 0};
    const uint8_t *const table = l->table, *code = at.code; /* what is stored could be these, as far as a compiler knows */
    int done = at.weight;                                   /* of the word */
    for (int64_t k = 0; k < count;) {
        const uint64_t word = word_at(table, code);
        const int64_t left = (int64_t)(word >> 56) - done;
        put_word(word >> 2 * done, level, out + k);
        if (left > count - k) return (Code){code, done + (int)(count - k)};
        code += 2, done = 0;
        for (k += left; count - k >= MOST_WEIGHTS; code += 2) {
            const uint64_t whole = word_at(table, code);
            put_word(whole, level, out + k);
            k += (int64_t)(whole >> 56);
        }
    }
    return (Code){code, 0};
}
