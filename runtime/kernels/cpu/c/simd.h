/* The vectors of this machine. A panel is 32 rows of a weight, VECTORS of LANES lanes. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

/* Working memory is laid out in parts that begin at cache lines. */
static inline int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }
/* Where a part of so many bytes begins, and in *at where the next does; NULL memory: only sizes are asked for. */
static inline void *memory_part(char *memory, int64_t *at, int64_t bytes) {
    char *found = memory ? memory + *at : NULL;
    *at += align64(bytes);
#ifdef __SANITIZE_ADDRESS__ /* what lies between two parts is nobody's */
    if (found) __asan_unpoison_memory_region(found, (size_t)bytes), __asan_poison_memory_region(found + bytes, (size_t)(align64(bytes) - bytes));
#endif
    return found;
}

static inline float bf16_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t float_to_bf16(float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float f16_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = (rest + 0x1c000) << 13;
    else { /* subnormal: rest * 2^-24, which float holds */
        float small = (float)rest * 0x1p-24f;
        memcpy(&bits, &small, 4);
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t float_to_f16(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00; /* rounds beyond 65504 */
    if (bits < 0x38800000) {                      /* subnormal: the unit is 2^-24 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        return sign | (uint16_t)rintf(magnitude * 0x1p24f);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* float8 e4m3, 2^8 times smaller: shifted by seven bits its exponent and mantissa are those of a float16. (NaN has no such neighbour.) */
static inline float f8_to_float(uint8_t byte) { return f16_to_float((uint16_t)((byte & 0x80) << 8 | (byte & 0x7f) << 7)); }

/* e8m0, 2^(byte - 127); 255, which is no number, as infinity. */
#define E8M0_LEAST 0x00400000 /* the bits of 2^-127, which is subnormal */
static inline float e8m0_to_float(uint8_t byte) {
    uint32_t bits = byte ? (uint32_t)byte << 23 : E8M0_LEAST;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

enum { ALIKE = 2 };
#if defined(COMPRESS_EMULATED) || defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#define PANEL 32
#define VECTORS (PANEL / LANES)
#define INLINE static inline __attribute__((always_inline))
#if defined(__AVX2__) || defined(COMPRESS_EMULATED)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL /* each step is many instructions already */
#endif

/* F8, MX8, BLOCK8, DF11, TERNARY: of weights only; E8M0: of scales only, as F8 may be. MX8: float8 in blocks of 32, before each its scale, e8m0: 33
 * bytes; BLOCK8: in blocks of 128, before each its scale, float32: 132 bytes.
 * DF11: bfloat16 whose exponents are coded (dfloat11.h); TERNARY: zero or one scale of the row (ternary.h). */
enum { TYPE_F32 = 0, TYPE_BF16 = 1, TYPE_F16 = 2, TYPE_F8 = 3, TYPE_MX8 = 4, TYPE_BLOCK8 = 5, TYPE_E8M0 = 6, TYPE_DF11 = 7,
       TYPE_TERNARY = 8 };
INLINE int type_bytes(const int type) { return type == TYPE_F32 ? 4 : type == TYPE_BF16 || type == TYPE_F16 ? 2 : 1; }

/* Where a number is, or the block of 32 that begins with it: then index is a multiple of 32. */
INLINE const uint8_t *address_of(const void *p, const int type, int64_t index) {
    if (type == TYPE_BLOCK8) return (const uint8_t *)p + index + ((index >> 7) + 1) * 4;
    return (const uint8_t *)p + (type == TYPE_MX8 ? index + (index >> 5) : index * type_bytes(type));
}

INLINE F f_load_as(const void *p, int type, int64_t index) {
    if (type == TYPE_BF16) return f_load_bf16((const uint16_t *)p + index);
    if (type == TYPE_F16) return f_load_f16((const uint16_t *)p + index);
    if (type == TYPE_F8) return f_load_f8((const uint8_t *)p + index);
    if (type == TYPE_E8M0) return f_load_e8m0((const uint8_t *)p + index);
    return f_load((const float *)p + index);
}
/* The same of numbers [index + more, ...), in blocks too, of which `more` is a place. */
INLINE F f_load_in(const void *p, int type, int64_t index, int more) {
    if (type == TYPE_BLOCK8) {
        float scale;
        memcpy(&scale, (const uint8_t *)p + (index >> 7) * 132, 4);
        return f_mul(f_load_f8(address_of(p, type, index) + more), f_set1(scale));
    }
    if (type != TYPE_MX8) return f_load_as(p, type, index + more);
    const uint8_t *block = address_of(p, type, index);
    return f_mul(f_load_f8(block + 1 + more), f_set1(e8m0_to_float(*block)));
}
INLINE float load_as(const void *p, int type, int64_t index) {
    if (type == TYPE_BF16) return bf16_to_float(((const uint16_t *)p)[index]);
    if (type == TYPE_F16) return f16_to_float(((const uint16_t *)p)[index]);
    if (type == TYPE_F8) return f8_to_float(((const uint8_t *)p)[index]);
    if (type == TYPE_E8M0) return e8m0_to_float(((const uint8_t *)p)[index]);
    return ((const float *)p)[index];
}
INLINE void store_as(void *p, int type, int64_t index, float value) {
    if (type == TYPE_BF16) ((uint16_t *)p)[index] = float_to_bf16(value);
    else if (type == TYPE_F16) ((uint16_t *)p)[index] = float_to_f16(value);
    else ((float *)p)[index] = value;
}
INLINE void put(void *p, int type, int64_t index, float value, int add) { /* add: to what is there */
    store_as(p, type, index, add ? load_as(p, type, index) + value : value);
}
