/* Codes of 2 to 8 bits at their own width.
 *
 * A kind of weights is the bits of its integers, or another representation: KIND_E2M1, floats of 4 bits, which are looked up as numbers
 * of halves. What is multiplied has no sign: a number plus `kind_base`, of `kind_reach` bits. */
enum { KIND_DENSE = 0, KIND_S24 = 1, KIND_E2M1 = 10 };
INLINE int kind_bits(const int kind) { return kind == KIND_E2M1 ? 4 : kind; }
INLINE int kind_reach(const int kind) { return kind == KIND_E2M1 ? 5 : kind; }
INLINE int kind_base(const int kind) { return kind == KIND_E2M1 ? 12 : kind == KIND_S24 ? 8 : 1 << (kind - 1); }
/* Sign, two bits of exponent and one of mantissa: 0, 1, 2, 3, 4, 6, 8, 12 halves, and their negatives. */
static const uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/*
 * A code of b bits is cut into planes of 4, 2 and 1 bits, those that b is the sum of, low bits first; one of 8 is a plane of its own. 32
 * columns of a panel are a unit: for each plane as many pieces as it has bits. A piece is a word of 32 bits a row. Byte j of word i has
 *   8 bits: column 4i + j
 *   4 bits: low nibble = column 8i + j, high nibble = column 8i + 4 + j
 *   2 bits: the nibbles of two such words, bits 0 and 1, of the second shifted left by two
 *   1 bit:  the nibbles of four, bit 0, of the k-th shifted left by k
 * A group of an odd multiple of 16 columns ends with half a unit (EIGHTS of 2): half the pieces, but a whole one of single bits. */
#define PIECE (4 * PANEL)   /* bytes */
#define EIGHTS 4            /* of columns, in a unit */
INLINE int unit_pieces(const int bits, int eights) {
    return (bits >> 3) * 2 * eights + (bits >> 2 & 1) * eights + (bits >> 1 & 1) * eights / 2 + (bits & 1);
}
INLINE int64_t group_bytes(int bits, int group) {
    return (int64_t)PIECE * (group / 32 * unit_pieces(bits, EIGHTS) + (group % 32 ? unit_pieces(bits, EIGHTS / 2) : 0));
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

/* Codes of the k-th eight columns of the unit at w: four in `low`, four in `high`. `apart`: integers of up to 4 bits stay 4 bits up in
 * `high`. Shifts bring bits of neighbours along, which masks take away. */
typedef struct { W low, high; } Eight;
INLINE Eight eight_columns(const uint8_t *w, const Small *small, const int kind, const int k, const int apart) {
    const int bits = kind_bits(kind), mask = (1 << bits) - 1, place = 2 * (k % 2);
    W v;
    if (bits == 8) return (Eight){w_load(w + 2 * k * PIECE), w_load(w + (2 * k + 1) * PIECE)};
    if (bits & 4) v = w_load(w + k * PIECE);
    else v = place ? w_shift(small->two[k / 2], -place) : small->two[k / 2];
    if (bits <= 4) {
        if (bits == 3) v = w_select(0x33, v, w_shift(small->one, 2 - k));
        if (kind == KIND_E2M1) return (Eight){w_lookup(E2M1, w_and(v, mask)), w_lookup(E2M1, w_and(w_shift(v, -4), mask))};
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
