/* Pages of keys and values, whatever they are stored as, as matrices that queries are multiplied with.
 *
 * A page holds for each head a matrix of keys and one of values: vectors of lanes, one for each index. Of keys lanes are positions and
 * indices channels, of values lanes are channels and indices positions. Floats lie as [indices, lanes]. Codes of 2, 4 or 8 bits lie as
 * [lanes / 16, words, 16] words of 32 bits. Byte b of a word belongs to the b-th quarter of the indices: its lowest bits are the code of
 * the first index that no word before it has. So four bytes of a vector are multiplied at once, and the numbers that they are
 * multiplied with are made bytes by vectors too, none of which need be moved to another lane. */
#define PAGE 64
#define CODE_LANES 16
#define MOST_CHANNELS 1024 /* of a head */
#define QUERIES (LANES == 16 ? 8 : 4) /* multiplied together: they share every load */

enum { PAGES_INT8 = 4, PAGES_INT4, PAGES_INT2, PAGES_FP8 }; /* beside the types of simd.h */
INLINE int code_bits(int kind) { return kind == PAGES_INT2 ? 2 : kind == PAGES_INT4 ? 4 : 8; }
INLINE int holds_codes(int kind) { return kind >= PAGES_INT8; }
INLINE int holds_integers(int kind) { return holds_codes(kind) && kind != PAGES_FP8; }
INLINE int64_t element_bytes(int type) { return type == TYPE_F32 ? 4 : 2; }

INLINE float lane_sum(float lane[16]) { /* in one order everywhere */
    for (int j = 0; j < 8; j++) lane[j] += lane[j + 8];
    for (int j = 0; j < 4; j++) lane[j] += lane[j + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

typedef struct {
    const char *data;
    const char *next; /* the matrix that is wanted next, of the same kind: pages are scattered, so it is asked for in time */
    int32_t kind, lanes, indices;
} Matrix;

INLINE int64_t matrix_bytes(int kind, int64_t lanes, int64_t indices) {
    return holds_codes(kind) ? lanes * indices * code_bits(kind) / 8 : lanes * indices * element_bytes(kind);
}
/* What is wanted of the next matrix begins so many lanes later than what is read of this one. */
INLINE void shift_next(Matrix *m, int lanes) {
    m->next += lanes * (holds_codes(m->kind) ? m->indices * code_bits(m->kind) / 8 : element_bytes(m->kind));
}
/* Where a vector of words of codes begins: lanes and indices of such matrices are multiples of 16. */
INLINE int64_t words_at(const Matrix *m, int lane, int word) {
    int64_t words = m->indices * code_bits(m->kind) / 32;
    return ((lane / CODE_LANES * words + word) * CODE_LANES + lane % CODE_LANES) * 4;
}

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef union { Words words; Floats values; F floats; } Bits;

/* What a matrix is multiplied with: a row for each query, of channels or of positions. */
typedef float Factors[MOST_CHANNELS + 16]; /* rows a power of two apart would share few cache lines */

/* y[q][lane] = keep[q] * y[q][lane] + sum of x[q][i] * matrix[i][lane], lanes [begin, end) and indices [first, last); keep NULL: 0. Of
 * floats of 8 bits all indices count. */
INLINE void page_product_vectors(const Matrix *m, const int kind, int lane, int first, int last, const int count, const int vectors,
                                 const Factors *x, const float *keep, float *const *y) {
    F sum[QUERIES][2];
    UNROLL for (int q = 0; q < count; q++) UNROLL for (int v = 0; v < vectors; v++)
        sum[q][v] = keep ? f_mul(f_load(y[q] + lane + v * LANES), f_set1(keep[q])) : f_zero();
    const int codes = kind == PAGES_FP8, quarter = m->indices / 4;
    for (int i = codes ? 0 : first; i < (codes ? quarter : last); i++) {
        Words word[2];
        UNROLL for (int v = 0; v < vectors; v++) {
            int64_t at = codes ? words_at(m, lane + v * LANES, i) : ((int64_t)i * m->lanes + lane + v * LANES) * element_bytes(kind);
            if (codes) memcpy(&word[v], m->data + at, sizeof *word);
            if (codes || v == 0 || kind == TYPE_F32) __builtin_prefetch(m->next + at);
        }
        for (int byte = 0; byte < (codes ? 4 : 1); byte++) {
            F k[2];
            UNROLL for (int v = 0; v < vectors; v++) {
                if (codes) { /* e4m3: sign, and exponent and mantissa where float has them; then the bias of exponents */
                    Bits bits = {(Words)((Integers)(word[v] << (uint32_t)(24 - 8 * byte)) >> 4) & 0x87f00000u};
                    k[v] = f_mul(bits.floats, f_set1(0x1p120f));
                } else k[v] = f_load_as(m->data, kind, (int64_t)i * m->lanes + lane + v * LANES);
            }
            UNROLL for (int q = 0; q < count; q++) {
                F each = f_set1(x[q][i + byte * quarter]);
                UNROLL for (int v = 0; v < vectors; v++) sum[q][v] = f_fma(each, k[v], sum[q][v]);
            }
        }
    }
    UNROLL for (int q = 0; q < count; q++) UNROLL for (int v = 0; v < vectors; v++) f_store(y[q] + lane + v * LANES, sum[q][v]);
}
INLINE void page_product_of(const Matrix *m, const int kind, int begin, int end, int first, int last, const int count,
                            const Factors *x, const float *keep, float *const *y) {
    int lane = begin;
    for (; lane + 2 * LANES <= end; lane += 2 * LANES) page_product_vectors(m, kind, lane, first, last, count, 2, x, keep, y);
    for (; lane + LANES <= end; lane += LANES) page_product_vectors(m, kind, lane, first, last, count, 1, x, keep, y);
    if (holds_codes(kind)) return;
    for (; lane < end; lane++) /* heads that are no multiple of a vector */
        for (int q = 0; q < count; q++) {
            float sum = keep ? y[q][lane] * keep[q] : 0.0f;
            for (int i = first; i < last; i++) sum = fmaf(x[q][i], load_as(m->data, kind, (int64_t)i * m->lanes + lane), sum);
            y[q][lane] = sum;
        }
}
#define PAGE_PRODUCT(NAME, KIND)                                                                                                        \
    static void NAME(const Matrix *m, int begin, int end, int first, int last, int count, const Factors *x, const float *keep,    \
                     float *const *y) {                                                                                                \
        if (count == QUERIES) page_product_of(m, KIND, begin, end, first, last, QUERIES, x, keep, y);                                  \
        else                                                                                                                           \
            for (int q = 0; q < count;) {                                                                                              \
                const float *kept = keep ? keep + q : NULL;                                                                            \
                int most = count - q >= 4 ? 4 : 1;                                                                                     \
                if (most == 4) page_product_of(m, KIND, begin, end, first, last, 4, x + q, kept, y + q);                               \
                else page_product_of(m, KIND, begin, end, first, last, 1, x + q, kept, y + q);                                         \
                q += most;                                                                                                             \
            }                                                                                                                          \
    }
PAGE_PRODUCT(page_product_f32, TYPE_F32)
PAGE_PRODUCT(page_product_bf16, TYPE_BF16)
PAGE_PRODUCT(page_product_f16, TYPE_F16)
PAGE_PRODUCT(page_product_fp8, PAGES_FP8)
static void page_product(const Matrix *m, int begin, int end, int first, int last, int count, const Factors *x, const float *keep,
                         float *const *y) {
    static void (*const products[])(const Matrix *, int, int, int, int, int, const Factors *, const float *, float *const *) = {
        [TYPE_F32] = page_product_f32, [TYPE_BF16] = page_product_bf16, [TYPE_F16] = page_product_f16, [PAGES_FP8] = page_product_fp8};
    products[m->kind](m, begin, end, first, last, count, x, keep, y);
}
