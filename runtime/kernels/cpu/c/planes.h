/* Codes of 2 to 8 bits at their own width.
 *
 * A kind of weights is the bits of its integers, or another representation. Floats of 4 bits (KIND_E2M1, as numbers of halves) and IQ4 are
 * looked up in a table; a trellis code is an 8-bit window into a word of 16
 * weights, and its value is a sum of two table entries (runtime/formats/trellis.py). Row codebooks have a table for every row, of levels of
 * 8 bits (runtime/formats/row_codebook.py).
 * Of the block types of GGUF, a group has a float scale, and every `width` columns of it an integer that the scale is
 * multiplied by, its level; some have a minimum as well, a level of a second scale, which is taken off. */
enum {
    KIND_DENSE = 0, KIND_S24 = 1, KIND_E2M1 = 10, KIND_IQ4_NL = 12, KIND_Q2_K, KIND_Q3_K, KIND_Q4_K, KIND_Q5_K, KIND_Q6_K, KIND_IQ4_XS, KIND_TRELLIS,
    KIND_CODEBOOK_2 = 23, KIND_CODEBOOK_3, KIND_CODEBOOK_4
};
/* Sign, two bits of exponent and one of mantissa: 0, 1, 2, 3, 4, 6, 8, 12 halves, and their negatives. */
static const uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
static const uint8_t IQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t IQ4_LOW[16] = {1, 8, 13, 15, 15, 13, 10, 6, 1, 13, 9, 6, 5, 5, 9, 1}; /* nibbles of IQ4 */
static const uint8_t IQ4_HIGH[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13, 15};
/* LOW and HIGH of trellis.py. */
static const uint8_t TRELLIS_LOW[16] = {9, 33, 16, 21, 21, 12, 0, 28, 7, 13, 22, 30, 21, 21, 9, 0};
static const uint8_t TRELLIS_HIGH[16] = {30, 10, 17, 13, 21, 10, 22, 25, 4, 18, 2, 14, 11, 26, 9, 10};
enum { NO_TABLE, TABLE_E2M1, TABLE_IQ4, TABLE_TRELLIS, TABLE_ROWS };
enum { NO_MINIMUM, MINIMUM, NIBBLES }; /* a byte of its own; scale and minimum in one, the scale in the low nibble */
typedef struct {
    uint8_t bits;        /* of a code */
    uint8_t reach, base; /* what is multiplied has no sign: it is `base` too much, and has `reach` bits */
    uint8_t table, width, minimum;
} Kind;
static const Kind KIND[] = {
    [KIND_S24] = {.base = 8}, {2, 2, 2}, {3, 3, 4}, {4, 4, 8}, {5, 5, 16}, {6, 6, 32}, {7, 7, 64}, {8, 8, 128},
    [KIND_E2M1] = {4, 5, 12, TABLE_E2M1},
    [KIND_IQ4_NL] = {4, 8, 128, TABLE_IQ4},
    [KIND_Q2_K] = {2, 2, 0, NO_TABLE, 16, NIBBLES},
    [KIND_Q3_K] = {3, 3, 4, NO_TABLE, 16},
    [KIND_Q4_K] = {4, 4, 0, NO_TABLE, 32, MINIMUM},
    [KIND_Q5_K] = {5, 5, 0, NO_TABLE, 32, MINIMUM},
    [KIND_Q6_K] = {6, 6, 32, NO_TABLE, 16},
    [KIND_IQ4_XS] = {4, 8, 128, TABLE_IQ4, 32},
    [KIND_TRELLIS] = {2, 6, 32, TABLE_TRELLIS},
    [KIND_CODEBOOK_2] = {2, 8, 128, TABLE_ROWS},
    [KIND_CODEBOOK_3] = {3, 8, 128, TABLE_ROWS},
    [KIND_CODEBOOK_4] = {4, 8, 128, TABLE_ROWS},
};

/*
 * A code of b bits is cut into planes of 4, 2 and 1 bits, those that b is the sum of, low bits first; one of 8 is a plane of its own. 32
 * columns of a panel are a unit: for each plane as many pieces as it has bits. A piece is a word of 32 bits a row. Byte j of word i has
 *   8 bits: column 4i + j
 *   4 bits: low nibble = column 8i + j, high nibble = column 8i + 4 + j
 *   2 bits: the nibbles of two such words, bits 0 and 1, of the second shifted left by two
 *   1 bit:  the nibbles of four, bit 0, of the k-th shifted left by k
 * Of a trellis a piece has the words of 16 columns, as they are.
 * A group of an odd multiple of 16 columns ends with half a unit (EIGHTS of 2): half the pieces, but a whole one of single bits. */
#define PIECE (4 * PANEL)   /* bytes */
#define EIGHTS 4            /* of columns, in a unit */
INLINE int unit_pieces(const int bits, int eights) {
    return (bits >> 3) * 2 * eights + (bits >> 2 & 1) * eights + (bits >> 1 & 1) * eights / 2 + (bits & 1);
}
/* Before the pieces of a unit are its levels, bytes: of each row for both halves of the unit, or one for all of it, then minima likewise. */
#define MOST_LEVELS (2 * PANEL) /* bytes */
INLINE int level_bytes(int kind) {
    return KIND[kind].width ? 32 / KIND[kind].width * PANEL * (KIND[kind].minimum == MINIMUM ? 2 : 1) : 0;
}
/* Of a group whose codes have so many bits, with levels of the kind. */
INLINE int64_t group_bytes(int kind, int bits, int group) {
    return group / 32 * (level_bytes(kind) + (int64_t)PIECE * unit_pieces(bits, EIGHTS)) + (group % 32 ? PIECE * unit_pieces(bits, EIGHTS / 2) : 0);
}

/* Levels of the rows of a vector, the h-th of a panel, in the unit whose levels are at w. `other`: minima, or else the scales again. */
typedef struct { Pair scale, other; } Levels;
INLINE Levels levels_of(const uint8_t *w, const int kind, const int h) {
    if (KIND[kind].minimum == NIBBLES) {
        Pair both = pair_load(w + h * LANES * 2);
        return (Levels){pair_low(both), pair_high(both)};
    }
    Pair scale = KIND[kind].width == 16 ? pair_load(w + h * LANES * 2) : pair_same(w + h * LANES);
    return (Levels){scale, KIND[kind].minimum ? pair_same(w + PANEL + h * LANES) : scale};
}
/* Of a row, in a half of the unit. */
static int level_of_row(const uint8_t *w, int kind, int row, int half, int minimum) {
    const Kind *k = &KIND[kind];
    const int at = k->width == 16 ? 2 * row + half : row;
    if (k->minimum == NIBBLES) return minimum ? w[at] >> 4 : w[at] & 15;
    return minimum ? !k->minimum ? 0 : (int8_t)w[PANEL + at] : (int8_t)w[at];
}

/* Planes of 2 bits and of one, where the codes have them. */
typedef struct { W two[EIGHTS / 2], one; } Small;
INLINE Small small_planes(const uint8_t *w, const int bits, const int eights) {
    Small small;
    if (bits & 4) w += eights * PIECE;
    if (bits & 2) UNROLL for (int i = 0; i < eights / 2; i++, w += PIECE) small.two[i] = w_load(w);
    if (bits & 1) small.one = w_load(w);
    return small;
}

typedef struct { W low, high; } Eight;

/* Levels + 128 of the rows of a vector, the h-th of the panel whose levels are at `table`: a piece has four of each row. */
typedef struct { W piece[4]; } RowTable;
INLINE RowTable row_table(const uint8_t *table, const int kind, const int h) {
    RowTable found;
    if (KIND[kind].table == TABLE_ROWS)
        UNROLL for (int i = 0; i < 1 << (KIND[kind].bits - 2); i++) found.piece[i] = w_load(table + i * PIECE + h * LANES * 4);
    return found;
}
INLINE int64_t table_bytes(const int kind) { return KIND[kind].table == TABLE_ROWS ? (int64_t)PIECE << (KIND[kind].bits - 2) : 0; } /* of a panel */

/* Values + 32 of eight columns of each word: `low` from the windows that are its bytes, `high` from those 4 bits further on, which have the
 * same nibbles. */
INLINE Eight trellis_columns(const W words) {
    const W first = w_and(words, 15), second = w_and(w_shift(words, -4), 15);
    return (Eight){w_add(w_lookup(TRELLIS_LOW, first), w_lookup(TRELLIS_HIGH, second)),
                   w_add(w_lookup(TRELLIS_LOW, second), w_rotate_byte(w_lookup(TRELLIS_HIGH, first)))};
}

/* Codes of the k-th eight columns of the unit at w: four in `low`, four in `high`. `apart`: integers of up to 4 bits stay 4 bits up in
 * `high`. `raw`: what would be looked up is not yet, except in tables of rows. Shifts bring bits of neighbours along, which masks take away. */
INLINE Eight eight_columns(const uint8_t *w, const Small *small, const RowTable *rows, const int kind, const int k, const int apart,
                           const int raw) {
    const int bits = KIND[kind].bits, table = KIND[kind].table, mask = (1 << bits) - 1, place = 2 * (k % 2);
    W v;
    if (bits == 8) return (Eight){w_load(w + 2 * k * PIECE), w_load(w + (2 * k + 1) * PIECE)};
    if (table == TABLE_TRELLIS) return trellis_columns(place ? w_rotate(small->two[k / 2], 2) : small->two[k / 2]);
    if (bits & 4) v = w_load(w + k * PIECE);
    else v = place ? w_shift(small->two[k / 2], -place) : small->two[k / 2];
    if (bits <= 4) {
        if (bits == 3) v = w_select(0x33, v, w_shift(small->one, 2 - k));
        if (table == TABLE_ROWS) return (Eight){w_lookup_rows(rows->piece, bits, v), w_lookup_rows(rows->piece, bits, w_shift(v, -4))};
        if (table && !raw) {
            const uint8_t *numbers = table == TABLE_IQ4 ? IQ4 : E2M1;
            return (Eight){w_lookup(numbers, w_and(v, mask)), w_lookup(numbers, w_and(w_shift(v, -4), mask))};
        }
        return (Eight){w_and(v, mask), apart ? w_and(v, mask << 4) : w_and(w_shift(v, -4), mask)};
    }
    W low = v, high = w_shift(v, -4);
    if (bits & 2) {
        low = w_select(15, low, w_shift(small->two[k / 2], 4 - place));
        high = w_select(15, high, w_shift(small->two[k / 2], -place));
    }
    if (bits == 5) low = w_select(15, low, w_shift(small->one, 4 - k)), high = w_select(15, high, w_shift(small->one, -k));
    if (bits == 7) low = w_select(63, low, w_shift(small->one, 6 - k)), high = w_select(63, high, w_shift(small->one, 2 - k));
    return (Eight){w_and(low, mask), w_and(high, mask)};
}

/* The low or the high nibbles of codes of up to 8 bits, which are `raw` still. */
INLINE W nibbles_of(W code, const int kind, const int high) {
    if (KIND[kind].table == TABLE_IQ4) return w_lookup(high ? IQ4_HIGH : IQ4_LOW, code);
    return w_and(high ? w_shift(code, -4) : code, 15);
}
