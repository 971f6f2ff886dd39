/* Activations as integers: each group of columns gets one scale, each number becomes `digits` signed bytes to base 256.
 * Two digits next to each other make one part: their sums of products are added as integers, so a group has one part, or two of three digits.
 *
 * One digit ("fast") is int8 quantization a group. Two digits keep 15 bits: bfloat16 numbers within 2^-6 of the largest of their
 * group are held exactly (the scale is a power of two), smaller ones to 2^-15 of that largest. Three keep 23, for float32.
 * Sums of products are then exact integers, whatever the order, the vectors or the number of threads; only groups are added
 * in float, in one fixed order. */
typedef struct {
    int32_t digits, group;
    int64_t apart, groups, rows; /* apart: groups * group >= columns, and a line more, or powers of two share cache sets */
    int8_t *digit;                     /* [rows, digits, apart], most significant digit first */
    float *scale;                      /* [rows, parts, groups]: of that part */
    int32_t *sum;                      /* [rows, parts, groups]: of the activations themselves, in units of that scale */
    int16_t *half;                     /* [rows, digits, halves]: sums of the digits of 16 columns, half a unit of planes.h */
    int64_t halves;
} Digits;
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

/* One group of `count` numbers (zeros follow up to the group's end). */
static void quantize_group(const float *restrict x, int count, const Digits *out, int64_t row, int64_t g) {
    int group = out->group, digits = out->digits;
    int32_t largest = 0; /* of the bits: the order of non-negative floats, infinity and NaN above all */
    for (int i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = largest > bits ? largest : bits;
    }
    int8_t *restrict q = out->digit + row * digits * out->apart + g * group;
    const int parts = PARTS(digits);
    float *scale = out->scale + row * parts * out->groups + g;
    int32_t *sum = out->sum + row * parts * out->groups + g;
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
    if (digits == 1) {
        for (int i = 0; i < count; i++) {
            int32_t v = (int32_t)rintf(x[i] * inverse);
            v = v > 127 ? 127 : v < -127 ? -127 : v;
            q[i] = (int8_t)v;
        }
    } else if (digits == 2) {
        int8_t *restrict second = q + out->apart;
        for (int i = 0; i < count; i++) {
            int32_t v = (int32_t)rintf(x[i] * inverse);
            int32_t low = (int8_t)v, high = (v - low) >> 8;
            q[i] = (int8_t)high, second[i] = (int8_t)low;
        }
    } else {
        int8_t *restrict second = q + out->apart, *restrict third = second + out->apart;
        for (int i = 0; i < count; i++) {
            int32_t v = (int32_t)rintf(x[i] * inverse);
            int32_t low = (int8_t)v, rest = (v - low) >> 8, middle = (int8_t)rest, high = (rest - middle) >> 8;
            q[i] = (int8_t)high, second[i] = (int8_t)middle, third[i] = (int8_t)low;
        }
    }
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

/* This member's share of [rows, columns] numbers, `stride` apart. */
static void quantize_rows(const void *x, int type, int64_t stride, int64_t columns, const Digits *out, const Team *team) {
    int64_t start, end;
    float buffer[256];
    team_part(team, out->rows * out->groups, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        int64_t row = unit / out->groups, g = unit % out->groups, first = g * out->group;
        int count = (int)(columns - first < out->group ? columns - first : out->group);
        if (count < 0) count = 0;
        const float *source = (const float *)x + row * stride + first;
        if (type != TYPE_F32) {
            for (int i = 0; i < count; i++) buffer[i] = load_as(x, type, row * stride + first + i);
            source = buffer;
        }
        quantize_group(source, count, out, row, g);
    }
}

static int64_t digits_bytes(int64_t rows, int digits, int64_t wide, int64_t groups) {
    return rows * (digits * (wide + 64 + 2 * HALVES_OF(wide)) + PARTS(digits) * 8 * groups) + 64;
}
/* Lay the arrays out in `memory` of digits_bytes(...). */
static Digits digits_in(void *memory, int64_t rows, int digits, int group, int64_t groups) {
    Digits d = {.digits = digits, .group = group, .apart = group * groups + 64, .groups = groups, .rows = rows, .halves = HALVES_OF(group * groups)};
    char *p = memory;
    d.scale = (float *)p, p += rows * PARTS(digits) * groups * 4;
    d.sum = (int32_t *)p, p += rows * PARTS(digits) * groups * 4;
    d.half = (int16_t *)p, p += rows * digits * d.halves * 2;
    d.digit = (int8_t *)p;
    return d;
}
