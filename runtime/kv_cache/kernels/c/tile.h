/* Pages as floats: what the inner loops cannot take as it is stored, and scales and zeros of those they can. */

INLINE float code_of(const Side *side, const uint8_t *token, int64_t c) {
    const uint8_t *block;
    switch (side->kind) {
    case KIND_INT2: block = token + c / 32 * 8; return (float)(block[c % 8] >> c % 32 / 8 * 2 & 3);
    case KIND_INT4: block = token + c / 32 * 16; return (float)(block[c % 16] >> c % 32 / 16 * 4 & 15);
    case KIND_INT8: return (float)token[c];
    case KIND_FP8: return FP8_UNIT * f16_to_float((uint16_t)((token[c] & 0x80) << 8 | (token[c] & 0x7f) << 7));
    case KIND_BF16: return load_as(token, TYPE_BF16, c);
    case KIND_F16: return load_as(token, TYPE_F16, c);
    default: return load_as(token, TYPE_F32, c);
    }
}

static void decode_token(const Side *side, int64_t page, int slot, float *out) {
    const uint8_t *token = side->codes + (page * PAGE + slot) * side->stride;
    if (side->kind == KIND_FP8) {
        float scale = ((const float *)side->scale)[page * PAGE + slot];
        for (int64_t c = 0; c < side->size; c++) out[c] = code_of(side, token, c) * scale;
    } else if (side->grid == GRID_NONE) {
        for (int64_t c = 0; c < side->size; c++) out[c] = code_of(side, token, c);
    } else {
        const uint16_t *scale = side->scale, *zero = side->zero;
        int64_t start = side->grid == GRID_CHANNEL ? page * side->size : (page * PAGE + slot) * side->groups;
        for (int64_t c = 0; c < side->size; c++) {
            int64_t at = start + (side->grid == GRID_CHANNEL ? c : c / side->group);
            out[c] = code_of(side, token, c) * f16_to_float(scale[at]) + f16_to_float(zero[at]);
        }
    }
}

#ifdef __AVX2__
static uint8_t EXPAND[256][8]; /* of a byte of a mask: which code each channel takes */
void attention_prepare(void) { /* once, before anything else */
    for (int mask = 0; mask < 256; mask++)
        for (int bit = 0, next = 0; bit < 8; bit++) {
            EXPAND[mask][bit] = (uint8_t)next;
            next += mask >> bit & 1;
        }
}
#else
void attention_prepare(void) {}
#endif

INLINE void expand_token(const Side *side, const int type, int64_t page, int slot, float *out) {
    const uint8_t *mask = side->mask + (page * PAGE + slot) * side->mask_stride;
    const uint8_t *codes = side->codes + (page * PAGE + slot) * side->stride;
    int64_t next = 0, c = 0;
#ifdef __AVX2__
    int64_t kept = side->stride / (type == TYPE_F32 ? 4 : 2);
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (; kept >= 8 && c + 8 <= side->size; c += 8) {
        int byte = mask[c / 8];
        int64_t at = next < kept - 8 ? next : kept - 8; /* eight codes are read, however many the byte wants, and none past the last */
        V8 v = type == TYPE_F32    ? v8_load((const float *)codes + at)
               : type == TYPE_BF16 ? v8_from_bf16((const uint16_t *)codes + at)
                                   : v8_from_f16((const uint16_t *)codes + at);
        I8 order = i8_from_bytes(EXPAND[byte]) + (int32_t)(next - at);
        __m256i there = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(byte), bits), bits);
        v = (V8)_mm256_and_ps(_mm256_permutevar8x32_ps((__m256)v, (__m256i)order), _mm256_castsi256_ps(there));
        v8_store(out + c, v);
        next += __builtin_popcount((unsigned)byte);
    }
#endif
    for (; c < side->size; c++) {
        int there = mask[c / 8] >> c % 8 & 1;
        out[c] = there ? load_as(codes, type, next) : 0.0f;
        next += there;
    }
}

/* The tokens of a tile as floats [PAGE, wide], zeros in the padding (which is zero already). */
static void decode_tile(const Side *side, const Tile *tile, float *out) {
    for (int t = 0; t < tile->count; t++) {
        float *token = out + tile->slot[t] * side->wide;
        if (side->kind != KIND_BITMAP) decode_token(side, tile->page, tile->slot[t], token);
        else if (side->type == TYPE_F32) expand_token(side, TYPE_F32, tile->page, tile->slot[t], token);
        else if (side->type == TYPE_BF16) expand_token(side, TYPE_BF16, tile->page, tile->slot[t], token);
        else expand_token(side, TYPE_F16, tile->page, tile->slot[t], token);
    }
}

static void floats_of(const uint16_t *p, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) v8_store(out + i, v8_from_f16(p + i));
    for (; i < count; i++) out[i] = f16_to_float(p[i]);
}

/* Scales and zeros of a page as floats: [wide] of its channels, or [PAGE, groups] of all its tokens, those without one too. */
static void load_grid(const Side *side, int64_t page, float *scale, float *zero) {
    if (side->kind == KIND_FP8) {
        for (int t = 0; t < PAGE; t++) scale[t] = ((const float *)side->scale)[page * PAGE + t] * FP8_UNIT, zero[t] = 0.0f;
    } else if (side->grid != GRID_NONE) {
        int64_t count = side->grid == GRID_CHANNEL ? side->size : PAGE * side->groups;
        floats_of((const uint16_t *)side->scale + page * count, count, scale);
        floats_of((const uint16_t *)side->zero + page * count, count, zero);
    }
}

/* [groups, ROOM] of the tile's tokens from [PAGE, groups] of the page's. */
static void turn(const Tile *tile, int64_t groups, const float *from, float *to) {
#ifdef __SSE__
    for (int64_t first = 0; first < groups; first += 4)
        for (int t = 0; t < tile->count; t += 4) {
            __m128 row[4]; /* four grids, of which those past the last are numbers of other tokens, or none */
            for (int i = 0; i < 4; i++) row[i] = _mm_loadu_ps(from + tile->slot[t + i] * groups + first);
            _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
            EACH for (int i = 0; i < 4; i++)
                if (first + i < groups) _mm_storeu_ps(to + (first + i) * ROOM + t, row[i]);
        }
#else
    for (int64_t g = 0; g < groups; g++)
        for (int t = 0; t < tile->count; t++) to[g * ROOM + t] = from[tile->slot[t] * groups + g];
#endif
}

/* A tile in the form that tile_scores takes. */
static void open_keys(const Side *side, const Tile *tile, const Work *work) {
    if (side->tile) decode_tile(side, tile, work->key_tile);
    else load_grid(side, tile->page, work->key_scale, work->key_zero);
}

/* And for tile_values, which takes grids of tokens group by group. */
static void open_values(const Side *side, const Tile *tile, const Work *work) {
    if (side->tile) {
        decode_tile(side, tile, work->value_tile);
    } else if (side->grid == GRID_TOKEN) {
        load_grid(side, tile->page, work->page_scale, work->page_zero);
        turn(tile, side->groups, work->page_scale, work->value_scale), turn(tile, side->groups, work->page_zero, work->value_zero);
    } else {
        load_grid(side, tile->page, work->value_scale, work->value_zero);
    }
}
