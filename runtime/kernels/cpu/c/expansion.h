/* Weights whose codes are of different lengths, or lie apart: rows become 16-bit floats, some at a time, in a buffer that stays in the cache,
 * where the dense products read them. */
#define EXPANDED (1 << 16)      /* weights that dense.h has room for: two rows of as many columns as Python lets through */
#define EXPANDED_ROWS (1 << 13) /* that it expands together, where rows are short */

/* Where decoding a row goes on: its next escape (DF11), or its next word and how many of the word's weights are done. */
typedef struct {
    const uint8_t *code;
    int weight;
} Code;

#include "dfloat11.h"
#include "ternary.h"

INLINE int is_expanded(const int type) { return type == TYPE_DF11 || type == TYPE_TERNARY; }
/* What the weights become. */
INLINE int expanded_type(const Linear *l) { return l->weight_type == TYPE_TERNARY ? l->scale_type : TYPE_BF16; }
INLINE Code first_code(const Linear *l, int64_t row) {
    if (l->weight_type == TYPE_TERNARY) return (Code){l->weight + 2 * (int64_t)l->row_offsets[row], 0};
    return (Code){l->escapes + l->offsets[row], 0};
}
DECLARED Code expand_columns(const Linear *l, int64_t row, int64_t k, int64_t count, Code at, uint16_t *out);
#if IN_PART(PRODUCTS)
/* Columns [k, k + count) of a row, from k = 0 on in whole units of 256 or up to its end; `at` is where those from k on begin. Returns where
 * they go on. Up to WORD_ROOM - 1 weights more are written. */
SHARED Code expand_columns(const Linear *l, int64_t row, int64_t k, int64_t count, Code at, uint16_t *out) {
    if (l->weight_type == TYPE_TERNARY) return expand_words(l, row, count, at, out);
    if (l->code_bits == 2) return (Code){expand_row(l, 2, row, k, count, at.code, out), 0};
    if (l->code_bits == 3) return (Code){expand_row(l, 3, row, k, count, at.code, out), 0};
    return (Code){expand_row(l, 4, row, k, count, at.code, out), 0};
}
#endif
