/* Pages of keys and values, whatever they are stored as, as matrices that queries are multiplied with.
 *
 * A page holds for each head a matrix of keys and one of values: vectors of lanes, one for each index. Of keys lanes are positions and
 * indices channels, of values lanes are channels and indices positions. Floats lie as [indices, lanes]. Codes of 2, 4 or 8 bits lie as
 * [lanes / 16, indices / per, 16] words of 32 bits, of which one holds, from its lowest bits up, `per` indices of a lane: a vector of
 * codes is then a shift away. */
#define PAGE 64
#define CODE_LANES 16
#define MOST_CHANNELS 1024 /* of a head */
#define QUERIES (LANES == 16 ? 8 : 4) /* multiplied together: they share every load */

enum { KIND_INT8 = 3, KIND_INT4 = 4, KIND_INT2 = 5, KIND_FP8 = 6 }; /* after TYPE_F32, TYPE_BF16, TYPE_F16 */
INLINE int kind_bits(int kind) {
    static const int bits[] = {32, 16, 16, 8, 4, 2, 8};
    return bits[kind];
}
INLINE int kind_packed(int kind) { return kind >= KIND_INT8; }
INLINE int64_t element_bytes(int type) { return type == TYPE_F32 ? 4 : 2; }

INLINE float lane_sum(float lane[16]) { /* in one order everywhere */
    for (int j = 0; j < 8; j++) lane[j] += lane[j + 8];
    for (int j = 0; j < 4; j++) lane[j] += lane[j + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

typedef struct {
    const char *data;
    int32_t kind, lanes, indices;
} Matrix;

INLINE int64_t matrix_bytes(int kind, int64_t lanes, int64_t indices) {
    if (!kind_packed(kind)) return lanes * indices * element_bytes(kind);
    int64_t per = 32 / kind_bits(kind);
    return (lanes + CODE_LANES - 1) / CODE_LANES * ((indices + per - 1) / per) * CODE_LANES * 4;
}

typedef uint32_t CodeWords __attribute__((vector_size(4 * LANES)));
typedef union { CodeWords words; F floats; } CodeUnion;
typedef int32_t CodeIntegers __attribute__((vector_size(4 * LANES)));
typedef float CodeFloats __attribute__((vector_size(4 * LANES)));
#if LANES == 16 && !defined(COMPRESS_EMULATED) && defined(__AVX512F__)
#define CODES_LOOKED_UP 1 /* a permutation takes the lowest 4 bits of its indices as they are */
#endif

/* Codes of index `field` of words, as floats. */
INLINE F codes_as_floats(CodeWords words, const int kind, const int field) {
    const int bits = kind_bits(kind);
    CodeUnion result;
    if (kind == KIND_FP8) { /* e4m3: sign, and exponent and mantissa where float has them; then the bias of exponents */
        CodeWords byte = words >> (uint32_t)(8 * field);
        result.words = (byte & 0x80u) << 24 | (byte & 0x7fu) << 20;
        return f_mul(result.floats, f_set1(0x1p120f));
    }
#ifdef CODES_LOOKED_UP
    if (bits <= 4) {
        const __m512 table = bits == 4 ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                                       : _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
        return _mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, (unsigned)(bits * field)), table);
    }
#endif
    CodeIntegers codes = (CodeIntegers)(words >> (uint32_t)(bits * field) & (uint32_t)((1 << bits) - 1));
    CodeFloats floats = __builtin_convertvector(codes, CodeFloats);
    memcpy(&result.floats, &floats, sizeof floats);
    return result.floats;
}

/* What a matrix is multiplied with: a row for each query, of channels or of positions. */
typedef float Factors[MOST_CHANNELS + 16]; /* rows a power of two apart would share few cache lines */

/* y[q][lane] = keep[q] * y[q][lane] + sum of x[q][i] * matrix[i][lane], lanes [begin, end) and indices [first, last); keep NULL: 0.
 * Of packed matrices lanes and indices begin and end at whole words. */
INLINE void page_product_vectors(const Matrix *m, const int kind, int lane, int first, int last, const int count, const int vectors,
                                 const Factors *x, const float *keep, float *const *y) {
    F sum[QUERIES][2];
    UNROLL for (int q = 0; q < count; q++) UNROLL for (int v = 0; v < vectors; v++)
        sum[q][v] = keep ? f_mul(f_load(y[q] + lane + v * LANES), f_set1(keep[q])) : f_zero();
    if (kind_packed(kind)) {
        const int per = 32 / kind_bits(kind);
        const char *row[2];
        int64_t words = (m->indices + per - 1) / per;
        for (int v = 0; v < vectors; v++) {
            int at = lane + v * LANES;
            row[v] = m->data + (at / CODE_LANES * words * CODE_LANES + at % CODE_LANES) * 4;
        }
        for (int i = first; i < last; i += per) {
            CodeWords w[2];
            UNROLL for (int v = 0; v < vectors; v++) memcpy(&w[v], row[v] + (int64_t)(i / per) * CODE_LANES * 4, sizeof w[v]);
            UNROLL for (int field = 0; field < per; field++) {
                F k[2];
                UNROLL for (int v = 0; v < vectors; v++) k[v] = codes_as_floats(w[v], kind, field);
                UNROLL for (int q = 0; q < count; q++) {
                    F each = f_set1(x[q][i + field]);
                    UNROLL for (int v = 0; v < vectors; v++) sum[q][v] = f_fma(each, k[v], sum[q][v]);
                }
            }
        }
    } else
        for (int i = first; i < last; i++) {
            F k[2];
            UNROLL for (int v = 0; v < vectors; v++) k[v] = f_load_as(m->data, kind, (int64_t)i * m->lanes + lane + v * LANES);
            UNROLL for (int q = 0; q < count; q++) {
                F each = f_set1(x[q][i]);
                UNROLL for (int v = 0; v < vectors; v++) sum[q][v] = f_fma(each, k[v], sum[q][v]);
            }
        }
    UNROLL for (int q = 0; q < count; q++) UNROLL for (int v = 0; v < vectors; v++) f_store(y[q] + lane + v * LANES, sum[q][v]);
}
INLINE void page_product_of(const Matrix *m, const int kind, int begin, int end, int first, int last, const int count,
                            const Factors *x, const float *keep, float *const *y) {
    int lane = begin;
    for (; lane + 2 * LANES <= end; lane += 2 * LANES) page_product_vectors(m, kind, lane, first, last, count, 2, x, keep, y);
    for (; lane + LANES <= end; lane += LANES) page_product_vectors(m, kind, lane, first, last, count, 1, x, keep, y);
    if (kind_packed(kind)) return;
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
PAGE_PRODUCT(page_product_int8, KIND_INT8)
PAGE_PRODUCT(page_product_int4, KIND_INT4)
PAGE_PRODUCT(page_product_int2, KIND_INT2)
PAGE_PRODUCT(page_product_fp8, KIND_FP8)
static void page_product(const Matrix *m, int begin, int end, int first, int last, int count, const Factors *x, const float *keep,
                         float *const *y) {
    static void (*const products[])(const Matrix *, int, int, int, int, int, const Factors *, const float *, float *const *) = {
        page_product_f32, page_product_bf16, page_product_f16, page_product_int8, page_product_int4, page_product_int2, page_product_fp8};
    products[m->kind](m, begin, end, first, last, count, x, keep, y);
}
