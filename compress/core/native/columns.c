/* The inner loops of the solvers. Matrices are [columns][rows], rows contiguous, `stride` elements from one column to the next; rows do
 * not depend on each other, so a call handles the rows [from, to) and calls for different rows may run at the same time. Rows are
 * taken LANES at a time: one strip of a block of columns stays in the first-level cache while every column is rounded and its
 * error carried to the later ones. The torch versions in solver/loop.py, solver/refine.py and quantize/grid.py say what is computed. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 32
#define WIDTH 8  /* floats of a vector; the compiler splits or joins them as the CPU has them */
#define VECTORS (LANES / WIDTH)
#define MOST 512 /* columns of a block */
#define CANDIDATES 64

/* How codes are found, see runtime/formats/grid.py: Rounding. */
enum { INTEGER, E2M1, MINIMUM, IQ4 };

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4)));
typedef union {
    Vector vector[VECTORS];
    float lane[LANES];
} Strip;

typedef struct {
    const float *scale, *zero; /* [groups][stride]; zero may be NULL; a minimum where the rounding has one */
    const int64_t *group;      /* of every column of the block */
    float low, high;
    int64_t rounding;
    int64_t stride;
} Grid;

static inline void load(Strip *to, const float *from, int count) {
    if (count == LANES) {
        memcpy(to->lane, from, sizeof(Strip));
        return;
    }
    for (int r = 0; r < count; r++) to->lane[r] = from[r];
    for (int r = count; r < LANES; r++) to->lane[r] = 0.0f;
}

/* to += factor * from */
static inline void add_scaled(Strip *to, float factor, const Strip *from) {
    for (int v = 0; v < VECTORS; v++) to->vector[v] += factor * from->vector[v];
}

/* The nearest code of a 4-bit float, in halves. Such grids have no zero point. */
static inline float round_e2m1(float steps) {
    float size = fabsf(steps), unit = size > 8.0f ? 4.0f : size > 4.0f ? 2.0f : 1.0f;
    float inverse = size > 8.0f ? 0.25f : size > 4.0f ? 0.5f : 1.0f;
    return rintf(steps * inverse) * unit;
}

/* The nearest value of IQ4's table; no grid with it has a zero point. */
static inline float round_iq4(float steps) {
    static const float between[15] = {-115.5f, -93.5f, -74.0f, -57.0f, -42.0f, -28.5f, -16.0f, -4.5f,
                                      7.0f,    19.0f,  31.5f,  45.5f,  61.0f,  79.0f,  101.0f};
    static const float apart[15] = {23, 21, 18, 16, 14, 13, 12, 11, 12, 12, 13, 15, 16, 20, 24};
    float value = -127.0f;
    for (int i = 0; i < 15; i++) value += steps > between[i] ? apart[i] : 0.0f;
    return value;
}

/* Codes and grid values of one column of a strip. */
static inline void round_column(const Grid *grid, int64_t column, int64_t row, int count, const Strip *wanted,
                                Strip *code, Strip *value) {
    Strip scale, zero;
    int64_t at = grid->group[column] * grid->stride + row;
    load(&scale, grid->scale + at, count);
    for (int r = count; r < LANES; r++) scale.lane[r] = 1.0f;
    if (grid->zero)
        load(&zero, grid->zero + at, count);
    else
        memset(&zero, 0, sizeof zero);
    if (grid->rounding == MINIMUM) {
        for (int r = 0; r < LANES; r++) {
            float q = rintf((wanted->lane[r] + zero.lane[r]) / scale.lane[r]);
            q = q < grid->low ? grid->low : q;
            q = q > grid->high ? grid->high : q;
            code->lane[r] = q;
            value->lane[r] = q * scale.lane[r] - zero.lane[r];
        }
        return;
    }
    Strip steps;
    for (int r = 0; r < LANES; r++) steps.lane[r] = wanted->lane[r] / scale.lane[r];
    if (grid->rounding == E2M1)
        for (int r = 0; r < LANES; r++) steps.lane[r] = round_e2m1(steps.lane[r]);
    else if (grid->rounding == IQ4)
        for (int r = 0; r < LANES; r++) steps.lane[r] = round_iq4(steps.lane[r]);
    else
        for (int r = 0; r < LANES; r++) steps.lane[r] = rintf(steps.lane[r]);
    for (int r = 0; r < LANES; r++) {
        float q = steps.lane[r] + zero.lane[r];
        q = q < grid->low ? grid->low : q;
        q = q > grid->high ? grid->high : q;
        code->lane[r] = q;
        value->lane[r] = (q - zero.lane[r]) * scale.lane[r];
    }
}

/* Zero where the mask says removed. */
static inline void remove_masked(Strip *value, const uint8_t *mask, int count) {
    for (int r = 0; r < count; r++)
        if (!mask[r]) value->lane[r] = 0.0f;
}

/* GPTQ over the columns [first, last) of a block of `width`: work becomes the values of these columns, and the later columns of the
 * block take their share of the error. upper [width][width] is the corner of U, inverse[j] = 1 / U_jj. mask (may be NULL) and codes are
 * [width][stride] like work and error. */
void round_block(float *work, float *error, int8_t *codes, const uint8_t *mask, int64_t stride, int64_t first, int64_t last,
                 int64_t width, const float *upper, const float *inverse, const float *scale, const float *zero,
                 const int64_t *group, int64_t grid_stride, float low, float high, int64_t rounding, int64_t from, int64_t to) {
    Grid grid = {scale, zero, group, low, high, rounding, grid_stride};
    Strip strip[MOST], code, value, owed;
    for (int64_t row = from; row < to; row += LANES) {
        int count = to - row < LANES ? (int)(to - row) : LANES;
        for (int64_t j = first; j < width; j++) load(&strip[j], work + j * stride + row, count);
        for (int64_t j = first; j < last; j++) {
            round_column(&grid, j, row, count, &strip[j], &code, &value);
            if (mask) remove_masked(&value, mask + j * stride + row, count);
            for (int v = 0; v < VECTORS; v++) owed.vector[v] = (strip[j].vector[v] - value.vector[v]) * inverse[j];
            for (int64_t k = j + 1; k < width; k++) add_scaled(&strip[k], -upper[j * width + k], &owed);
            memcpy(error + j * stride + row, owed.lane, count * sizeof(float));
            memcpy(work + j * stride + row, value.lane, count * sizeof(float));
            for (int r = 0; r < count; r++) codes[j * stride + row + r] = (int8_t)code.lane[r];
        }
        for (int64_t j = last; j < width; j++) memcpy(work + j * stride + row, strip[j].lane, count * sizeof(float));
    }
}

/* Coordinate descent over a block of `width` columns whose gradient H e is known: codes move to the best grid value given all others.
 * old are the present values; moved becomes old - new; the gradient of all columns of the block is kept true. inverse[j] = 1 / H_jj. */
void descend_block(float *gradient, const float *old, float *codes, float *moved, const uint8_t *mask, int64_t stride,
                   int64_t width, const float *hessian, const float *inverse, const float *scale, const float *zero,
                   const int64_t *group, int64_t grid_stride, float low, float high, int64_t rounding, int64_t from, int64_t to) {
    Grid grid = {scale, zero, group, low, high, rounding, grid_stride};
    Strip strip[MOST], wanted, code, value, delta, before;
    for (int64_t row = from; row < to; row += LANES) {
        int count = to - row < LANES ? (int)(to - row) : LANES;
        for (int64_t j = 0; j < width; j++) load(&strip[j], gradient + j * stride + row, count);
        for (int64_t j = 0; j < width; j++) {
            load(&before, old + j * stride + row, count);
            wanted = before;
            add_scaled(&wanted, inverse[j], &strip[j]);
            round_column(&grid, j, row, count, &wanted, &code, &value);
            if (mask) remove_masked(&value, mask + j * stride + row, count);
            int any = 0;
            for (int r = 0; r < LANES; r++) {
                delta.lane[r] = before.lane[r] - value.lane[r];
                any |= delta.lane[r] != 0.0f;
            }
            memcpy(codes + j * stride + row, code.lane, count * sizeof(float));
            memcpy(moved + j * stride + row, delta.lane, count * sizeof(float));
            if (!any) continue;
            for (int64_t k = 0; k < width; k++) add_scaled(&strip[k], hessian[j * width + k], &delta);
        }
        for (int64_t j = 0; j < width; j++) memcpy(gradient + j * stride + row, strip[j].lane, count * sizeof(float));
    }
}

/* error[r] += sum over columns of cost (x - nearest grid value)^2 for 16 rows; x is a part of consecutive strips. */
static inline __attribute__((always_inline)) void add_errors(float *error, const float *scale, const float *zero, float low, float high,
                                                             int rounding, const float *x, const float *cost, int64_t width) {
    float s[16], m[16], lo[16], hi[16], sum[16];
    for (int r = 0; r < 16; r++) {
        s[r] = scale[r];
        m[r] = zero[r];
        lo[r] = rounding == MINIMUM ? low : low - zero[r];
        hi[r] = rounding == MINIMUM ? high : high - zero[r];
        sum[r] = error[r];
    }
    for (int64_t j = 0; j < width; j++) {
        const float *column = x + j * LANES;
        float weight = cost ? cost[j] : 1.0f;
        for (int r = 0; r < 16; r++) {
            float wanted = rounding == MINIMUM ? column[r] + m[r] : column[r], steps = wanted / s[r];
            float q = rounding == E2M1 ? round_e2m1(steps) : rounding == IQ4 ? round_iq4(steps) : rintf(steps);
            q = q < lo[r] ? lo[r] : q;
            q = q > hi[r] ? hi[r] : q;
            float d = q * s[r] - wanted;
            sum[r] += weight * (d * d);
        }
    }
    for (int r = 0; r < 16; r++) error[r] = sum[r];
}

/* For every row the candidate grid with the smallest squared error (weighted by cost[column], or NULL) over `width` columns.
 * scale and zero (may be NULL) are [candidates][candidate_stride], at most CANDIDATES; the first of equals wins. */
void search_grid(const float *columns, int64_t stride, int64_t width, const float *cost, const float *scale, const float *zero,
                 int64_t candidates, int64_t candidate_stride, float low, float high, int64_t rounding, int64_t *best, int64_t from,
                 int64_t to) {
    Strip strip[MOST], error[CANDIDATES];
    for (int64_t row = from; row < to; row += LANES) {
        int count = to - row < LANES ? (int)(to - row) : LANES;
        for (int64_t c = 0; c < candidates; c++) memset(&error[c], 0, sizeof(Strip));
        for (int64_t first = 0; first < width; first += MOST) {
            int64_t last = first + MOST < width ? first + MOST : width;
            for (int64_t j = first; j < last; j++) load(&strip[j - first], columns + j * stride + row, count);
            for (int64_t c = 0; c < candidates; c++) {
                Strip s, zeros;
                load(&s, scale + c * candidate_stride + row, count);
                for (int r = count; r < LANES; r++) s.lane[r] = 1.0f;
                if (zero)
                    load(&zeros, zero + c * candidate_stride + row, count);
                else
                    memset(&zeros, 0, sizeof zeros);
                for (int part = 0; part < LANES; part += 16) {
                    float *sum = error[c].lane + part;
                    const float *x = (const float *)strip + part, *weights = cost ? cost + first : NULL;
                    float *at = s.lane + part, *shift = zeros.lane + part;
                    if (rounding == E2M1)
                        add_errors(sum, at, shift, low, high, E2M1, x, weights, last - first);
                    else if (rounding == MINIMUM)
                        add_errors(sum, at, shift, low, high, MINIMUM, x, weights, last - first);
                    else if (rounding == IQ4)
                        add_errors(sum, at, shift, low, high, IQ4, x, weights, last - first);
                    else
                        add_errors(sum, at, shift, low, high, INTEGER, x, weights, last - first);
                }
            }
        }
        for (int r = 0; r < count; r++) {
            int64_t chosen = 0;
            for (int64_t c = 1; c < candidates; c++)
                if (error[c].lane[r] < error[chosen].lane[r]) chosen = c;
            best[row + r] = chosen;
        }
    }
}
