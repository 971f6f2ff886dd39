/* Quantizes activations, operation by operation as runtime/kernels/activations.py does: each result is rounded to the input's dtype. A token's
 * codes do not depend on the tokens beside it. */
INLINE float in_type(float value, const int type) {
    return type == TYPE_BF16 ? bf16_to_float(float_to_bf16(value)) : type == TYPE_F16 ? f16_to_float(float_to_f16(value)) : value;
}
INLINE float clamped(float value, float lowest, float highest) { return value < lowest ? lowest : value > highest ? highest : value; }

INLINE float lowest_code(int kind, int bits) { return kind == ROUND_E4M3 ? -448.0f : kind == ROUND_E2M1 ? -6.0f : -(float)(1 << (bits - 1)); }
INLINE float highest_code(int kind, int bits) { return -lowest_code(kind, bits) - (kind == ROUND_E4M3 || kind == ROUND_E2M1 ? 0.0f : 1.0f); }

/* To nearest, ties to even, of numbers of up to 448: steps are an eighth of a power of two, at least 2^-9. */
INLINE float round_e4m3(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits &= 0x7f800000;
    bits = bits < 0x3c800000 ? 0x3c800000 : bits; /* 2^-6 */
    const uint32_t steps[2] = {bits - 0x01800000, 0x7f000000 - (bits - 0x01800000)};
    float step[2]; /* and one over it */
    memcpy(step, steps, 8);
    return rintf(value * step[1]) * step[0];
}
INLINE float round_e2m1(float value) { /* of up to 6 */
    const float size = fabsf(value), step = size > 4.0f ? 2.0f : size > 2.0f ? 1.0f : 0.5f;
    return rintf(value / step) * step;
}

/* Bits of a code, scale and zero point of the numbers that begin at `at`; NaN where one of them is not finite, or the scale would not be. */
typedef struct {
    int64_t at;
    int32_t bits;
    float scale, zero;
} Grid;

INLINE Grid grid_of(const void *x, const int type, int64_t at, int64_t count, const Rounding *r, const int bits) {
    const float lowest = lowest_code(r->kind, bits), highest = highest_code(r->kind, bits);
    float low = 0.0f, high = 0.0f, scale;
    int wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        float value = load_as(x, type, at + i);
        wrong |= !(fabsf(value) < INFINITY); /* an infinite outlier too: it may meet groups of zeros that are not stored */
        value = fabsf(value) > r->threshold ? 0.0f : value;
        low = value < low ? value : low, high = value > high ? value : high;
    }
    const float extreme = -low > high ? -low : high;
    if (wrong) return (Grid){at, bits, NAN, 0.0f};
    if (r->scales == SCALES_E8M0) { /* the largest number becomes 7/8 to 7/4 of the power of two in the largest code */
        int exponent, own;
        const float mantissa = frexpf(extreme, &exponent);
        frexpf(highest, &own);
        exponent += (mantissa >= 0.875f) - own;
        scale = in_type(ldexpf(1.0f, exponent < -127 ? -127 : exponent > 127 ? 127 : exponent), type);
        return (Grid){at, bits, scale == 0.0f ? 1.0f : scale, 0.0f};
    }
    if (r->kind == ROUND_ASYMMETRIC) scale = in_type(in_type(high - low, type) / (highest - lowest), type);
    else scale = in_type(extreme / ((highest - lowest) / 2.0f), type);
    if (r->scales == SCALES_E4M3) {
        scale = round_e4m3(clamped(r->global * scale, -448.0f, 448.0f));
        return (Grid){at, bits, (scale == 0.0f ? 0.125f : scale) / r->global, 0.0f};
    }
    if (scale == 0.0f) scale = type == TYPE_F32 ? 0x1p-23f : type == TYPE_BF16 ? 0x1p-7f : 0x1p-10f;
    if (!(scale < INFINITY)) return (Grid){at, bits, NAN, 0.0f};
    if (r->kind != ROUND_ASYMMETRIC) return (Grid){at, bits, scale, 0.0f};
    return (Grid){at, bits, scale, rintf(clamped(in_type(lowest - in_type(low / scale, type), type), lowest, highest))};
}

/* Grid of column `first` of the row that begins at x[at]. `cached`: the last that this thread made (at -1: none). */
INLINE const Grid *grid_at(const void *x, const int type, int64_t at, int64_t columns, int64_t first, const Rounding *r, Grid *cached) {
    const int64_t begin = r->span < columns ? first / r->span * r->span : 0, size = columns - begin < r->span ? columns - begin : r->span;
    const int bits = first < columns - r->tail ? r->bits : r->tail_bits;
    if (r->scale != 0.0f) *cached = (Grid){-1, bits, r->scale, r->zero};
    else if (cached->at != at + begin) *cached = grid_of(x, type, at + begin, size, r, bits);
    return cached;
}

INLINE float code_of(float x, const int type, const int kind, float lowest, float highest, const Grid *grid) {
    float code = in_type(x / grid->scale, type);
    if (kind == ROUND_ASYMMETRIC) code = in_type(code + grid->zero, type);
    code = clamped(code, lowest, highest);
    return kind == ROUND_E4M3 ? round_e4m3(code) : kind == ROUND_E2M1 ? round_e2m1(code) : rintf(code) - grid->zero;
}
/* Codes of `count` numbers, less the zero point. Returns whether none is NaN. */
INLINE int codes_of(const float *restrict x, const int type, int count, const Rounding *r, const Grid *grid, float *restrict code) {
    const float lowest = lowest_code(r->kind, grid->bits), highest = highest_code(r->kind, grid->bits);
    int wrong = grid->scale != grid->scale;
    for (int i = 0; i < count; i++) wrong |= x[i] != x[i];
    if (r->kind == ROUND_INTEGER) for (int i = 0; i < count; i++) code[i] = code_of(x[i], type, ROUND_INTEGER, lowest, highest, grid);
    else if (r->kind == ROUND_ASYMMETRIC) for (int i = 0; i < count; i++) code[i] = code_of(x[i], type, ROUND_ASYMMETRIC, lowest, highest, grid);
    else if (r->kind == ROUND_E4M3) for (int i = 0; i < count; i++) code[i] = code_of(x[i], type, ROUND_E4M3, lowest, highest, grid);
    else for (int i = 0; i < count; i++) code[i] = code_of(x[i], type, ROUND_E2M1, lowest, highest, grid);
    return !wrong;
}

/* Group g of a row, `count` numbers, whose codes are there. */
static void put_codes(const float *restrict x, const float *restrict code, int count, float scale, const Digits *out, int64_t row, int64_t g) {
    const float factor = out->rounding.kind == ROUND_E4M3 ? 512.0f : out->rounding.kind == ROUND_E2M1 ? 2.0f : 1.0f;
    int32_t integer[MOST_GROUP];
    for (int i = 0; i < count; i++) integer[i] = (int32_t)(code[i] * factor);
    if (out->outliers) {
        const int64_t at = row * out->groups + g;
        int found = 0;
        for (int i = 0; i < count; i++) {
            if (!(fabsf(x[i]) > out->rounding.threshold)) continue;
            integer[i] = 0;
            out->value[at * out->group + found] = x[i], out->place[at * out->group + found++] = (uint8_t)i;
        }
        out->outliers[at] = found;
    }
    put_digits(integer, count, out, row, g);
    finish_digits(out, row, g, count, scale / factor);
}

/* At most MOST_GROUP numbers from x[at] on as float32: in `buffer`, unless they are float32 already. */
INLINE const float *numbers_at(const void *x, const int type, int64_t at, int count, float *buffer) {
    if (type == TYPE_F32) return (const float *)x + at;
    for (int i = 0; i < count; i++) buffer[i] = load_as(x, type, at + i);
    return buffer;
}
#define ARITHMETIC(TYPE, R) ((R)->scales == SCALES_E4M3 ? TYPE_F32 : (TYPE)) /* float32 scales make float32 quotients */

/* Group g of row `row` of the digits, out of the row that begins at x[at]. */
INLINE void quantize_typed(const void *x, const int type, int64_t at, int64_t columns, const Digits *out, int64_t row, int64_t g, Grid *cached) {
    const Rounding *r = &out->rounding;
    const int64_t first = g * out->group;
    const int count = (int)(columns - first < 0 ? 0 : columns - first < out->group ? columns - first : out->group);
    float buffer[MOST_GROUP], code[MOST_GROUP];
    const float *source = numbers_at(x, type, at + first, count, buffer);
    if (r->kind == ROUND_NOT) {
        quantize_group(source, count, out, row, g);
        return;
    }
    const Grid *grid = grid_at(x, type, at, columns, first, r, cached);
    if (codes_of(source, ARITHMETIC(type, r), count, r, grid, code)) {
        put_codes(source, code, count, grid->scale, out, row, g);
        return;
    }
    if (out->outliers) out->outliers[row * out->groups + g] = 0;
    finish_digits(out, row, g, 0, NAN);
}
static void quantize(const void *x, int type, int64_t at, int64_t columns, const Digits *out, int64_t row, int64_t g, Grid *cached) {
    if (type == TYPE_F32) quantize_typed(x, TYPE_F32, at, columns, out, row, g, cached);
    else if (type == TYPE_BF16) quantize_typed(x, TYPE_BF16, at, columns, out, row, g, cached);
    else quantize_typed(x, TYPE_F16, at, columns, out, row, g, cached);
}

/* Columns [first, end) of the row that begins at x[at] as numbers, rounded where dense layers want that, at out[first]; out may be that row. */
INLINE void round_typed(const void *x, const int type, int64_t at, int64_t columns, int64_t first, int64_t end, const Rounding *r, Grid *cached,
                        float *out) {
    float buffer[MOST_GROUP], code[MOST_GROUP];
    const int64_t span = r->kind && r->span < columns ? r->span : columns;
    for (int64_t next; first < end; first = next) {
        next = (first / span + 1) * span;
        next = next > first + MOST_GROUP ? first + MOST_GROUP : next;
        next = next > end ? end : next;
        const int count = (int)(next - first);
        const float *source = numbers_at(x, type, at + first, count, buffer);
        if (r->kind == ROUND_NOT) {
            memmove(out + first, source, (size_t)count * 4);
            continue;
        }
        const Grid *grid = grid_at(x, type, at, columns, first, r, cached);
        const float scale = codes_of(source, ARITHMETIC(type, r), count, r, grid, code) ? grid->scale : NAN;
        for (int i = 0; i < count; i++) out[first + i] = fabsf(source[i]) > r->threshold ? source[i] : code[i] * scale;
    }
}
static void round_numbers(const void *x, int type, int64_t at, int64_t columns, int64_t first, int64_t end, const Rounding *r, Grid *cached,
                          float *out) {
    if (type == TYPE_F32) round_typed(x, TYPE_F32, at, columns, first, end, r, cached, out);
    else if (type == TYPE_BF16) round_typed(x, TYPE_BF16, at, columns, first, end, r, cached, out);
    else round_typed(x, TYPE_F16, at, columns, first, end, r, cached, out);
}
/* This member's share of [rows, columns] numbers, `stride` apart: out [rows, columns]. */
static void round_rows(const void *x, int type, int64_t stride, int64_t rows, int64_t columns, const Rounding *r, float *out, const Team *team) {
    const int64_t steps = (columns + MOST_GROUP - 1) / MOST_GROUP;
    int64_t start, end;
    Grid cached = {.at = -1};
    team_part(team, rows * steps, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        const int64_t row = unit / steps, first = unit % steps * MOST_GROUP, till = first + MOST_GROUP;
        round_numbers(x, type, row * stride, columns, first, till < columns ? till : columns, r, &cached, out + row * columns);
    }
}

/* This member's share of [rows, columns] numbers, `stride` apart. */
static void quantize_rows(const void *x, int type, int64_t stride, int64_t columns, const Digits *out, const Team *team) {
    int64_t start, end;
    Grid cached = {.at = -1};
    team_part(team, out->rows * out->groups, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        const int64_t row = unit / out->groups;
        quantize(x, type, row * stride, columns, out, row, unit % out->groups, &cached);
    }
}

static int64_t digits_bytes(int64_t rows, const Input *in) {
    const int64_t wide = in->group * in->groups, outliers = has_outliers(&in->rounding) ? 4 * in->groups + 5 * wide : 0;
    return rows * (in->digits * (wide + 64 + 2 * HALVES_OF(wide)) + PARTS(in->digits) * 8 * in->groups + outliers) + 64;
}
/* Lay the arrays out in `memory` of digits_bytes(...). */
static Digits digits_in(void *memory, int64_t rows, const Input *in) {
    const int64_t wide = in->group * in->groups;
    Digits d = {.digits = in->digits, .group = in->group, .apart = wide + 64, .groups = in->groups, .rows = rows, .halves = HALVES_OF(wide),
                .rounding = in->rounding};
    char *p = memory;
    d.scale = (float *)p, p += rows * PARTS(d.digits) * d.groups * 4;
    d.sum = (int32_t *)p, p += rows * PARTS(d.digits) * d.groups * 4;
    if (has_outliers(&in->rounding)) {
        d.value = (float *)p, p += rows * wide * 4;
        d.outliers = (int32_t *)p, p += rows * d.groups * 4;
    }
    d.half = (int16_t *)p, p += rows * d.digits * d.halves * 2;
    d.digit = (int8_t *)p, p += rows * d.digits * d.apart;
    d.place = (uint8_t *)p;
    return d;
}
