/* Activations as integers: each group of columns gets one scale, each number becomes `digits` signed bytes to base 256.
 * Two digits next to each other make one part: their sums of products are added as integers, so a group has one part, or two of three digits.
 *
 * One digit ("fast") is int8 quantization a group. Two digits keep 15 bits: bfloat16 numbers within 2^-6 of the largest of their
 * group are held exactly (the scale is a power of two), smaller ones to 2^-15 of that largest. Three keep 23, for float32.
 * Sums of products are then exact integers, whatever the order, the vectors or the number of threads; only groups are added
 * in float, in one fixed order. */

/* How a layer quantizes its activations (activation_scheme.py). ROUND_NOT: it does not; digits alone limit their precision. Otherwise they become
 * codes: integers of `bits`, the same with a zero point, float8 or float4. Digits hold codes exactly, as integers: float8 in units
 * of 2^-9, float4 in halves, integers less their zero point. */
enum { ROUND_NOT, ROUND_INTEGER, ROUND_ASYMMETRIC, ROUND_E4M3, ROUND_E2M1 };
enum { SCALES_PLAIN, SCALES_E8M0, SCALES_E4M3 }; /* of scales: the input's dtype; a power of two; float8 over `global` */
typedef struct {
    int32_t kind, bits, scales, span; /* span: columns that share a scale, a multiple of the group; a row or more: one scale a token */
    int32_t tail, tail_bits;   /* columns at the end, whole spans, and the bits of their codes */
    float threshold;           /* what is larger stays as it is, an outlier (outliers.h); INFINITY: nothing does */
    float scale, zero, global; /* static; scale 0: dynamic */
} Rounding;

/* How layers read their input. */
typedef struct {
    int64_t groups; /* 0: as numbers */
    int32_t group, digits;
    Rounding rounding;
} Input;
static inline int has_outliers(const Rounding *r) { return r->kind && r->threshold < INFINITY; }

typedef struct {
    int32_t digits, group;
    int64_t apart, groups, rows; /* apart: groups * group >= columns, and a line more, or powers of two share cache sets */
    int8_t *digit;                     /* [rows, digits, apart], most significant digit first */
    float *scale;                      /* [rows, parts, groups]: of that part */
    int32_t *sum;                      /* [rows, parts, groups]: of the activations themselves, in units of that scale */
    int16_t *half;                     /* [rows, digits, halves]: sums of the digits of 16 columns, half a unit of planes.h */
    int64_t halves;
    Rounding rounding;
    float *value;                      /* [rows, groups, group]: outliers of a group, one after another; NULL: there are none */
    int32_t *outliers;                 /* [rows, groups]: how many there are */
    uint8_t *place;                    /* as `value`: their columns within the group */
} Digits;
#define MOST_GROUP 256 /* columns */
#define PARTS(DIGITS) (((DIGITS) + 1) / 2)
#define HALVES_OF(WIDE) (((WIDE) / 16 + 1) / 2 * 2) /* whole pairs */

static inline float power_of_two(int exponent) { /* exact; clamped to normal numbers */
    if (exponent < -126) exponent = -126;
    if (exponent > 127) exponent = 127;
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Digits of a group are there, `count` of each: zeros up to its end, their sums, and the scale of the last part. */
static void finish_digits(const Digits *out, int64_t row, int64_t g, int count, float unit) {
    const int group = out->group, digits = out->digits, parts = PARTS(digits);
    int8_t *q = out->digit + row * digits * out->apart + g * group;
    float *scale = out->scale + row * parts * out->groups + g;
    int32_t *sum = out->sum + row * parts * out->groups + g;
    int32_t total[2] = {0, 0}; /* of the first part, of the second */
    for (int d = 0; d < digits; d++) {
        int8_t *restrict own = q + d * out->apart;
        int16_t *restrict half = out->half + (row * digits + d) * out->halves + g * group / 16;
        int32_t all = 0;
        memset(own + count, 0, (size_t)(group - count));
        for (int i = 0; i < group / 16; i++) {
            int16_t sum = 0;
            for (int j = 0; j < 16; j++) sum = (int16_t)(sum + own[16 * i + j]);
            half[i] = sum, all += sum;
        }
        const int part = digits == 3 && d > 0;
        total[part] = total[part] * 256 + all;
    }
    for (int part = parts - 1; part >= 0; part--) {
        scale[part * out->groups] = unit;
        sum[part * out->groups] = total[part];
        unit *= 65536.0f;
    }
}

static void put_digits(const int32_t *restrict integer, int count, const Digits *out, int64_t row, int64_t g) {
    int8_t *restrict q = out->digit + row * out->digits * out->apart + g * out->group, *restrict second = q + out->apart,
           *restrict third = second + out->apart;
    if (out->digits == 1)
        for (int i = 0; i < count; i++) q[i] = (int8_t)integer[i];
    else if (out->digits == 2)
        for (int i = 0; i < count; i++) {
            const int32_t v = integer[i], low = (int8_t)v;
            q[i] = (int8_t)((v - low) >> 8), second[i] = (int8_t)low;
        }
    else
        for (int i = 0; i < count; i++) {
            const int32_t v = integer[i], low = (int8_t)v, rest = (v - low) >> 8, middle = (int8_t)rest;
            q[i] = (int8_t)((rest - middle) >> 8), second[i] = (int8_t)middle, third[i] = (int8_t)low;
        }
}

/* One group of `count` numbers (zeros follow up to the group's end). */
static void quantize_group(const float *restrict x, int count, const Digits *out, int64_t row, int64_t g) {
    const int digits = out->digits;
    int32_t largest = 0; /* of the bits: the order of non-negative floats, infinity and NaN above all */
    for (int i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = largest > bits ? largest : bits;
    }
    float unit = 0.0f, inverse = 0.0f;
    if (largest >= 0x7f800000) { /* not finite: neither is the result */
        unit = NAN, count = 0; /* no number is to be made an integer */
    } else if (largest > 0) {
        float amax;
        memcpy(&amax, &largest, 4);
        if (digits == 1) {
            unit = amax / 127.0f;
            if (unit < 0x1p-126f) unit = 0x1p-126f;
            inverse = 1.0f / unit;
        } else {
            int exponent = (largest >> 23) - 127; /* amax < 2^(exponent + 1) */
            int shift = digits == 2 ? 14 : 22;
            float limit = digits == 2 ? 32639.0f : 8355711.0f;
            exponent -= shift;
            if (exponent < -126) exponent = -126; /* numbers below 2^-112 lose digits, not the result its size */
            if (amax * power_of_two(-exponent) > limit) exponent++;
            unit = power_of_two(exponent), inverse = power_of_two(-exponent);
        }
    }
    int32_t integer[MOST_GROUP];
    const int32_t most = digits == 1 ? 127 : INT32_MAX;
    for (int i = 0; i < count; i++) {
        const int32_t v = (int32_t)rintf(x[i] * inverse);
        integer[i] = v > most ? most : v < -most ? -most : v;
    }
    put_digits(integer, count, out, row, g);
    finish_digits(out, row, g, count, unit);
}
