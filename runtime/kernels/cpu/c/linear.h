/* y = x W^T + b with integer weights in panels of 32 rows, activations in digits (digits.h).
 *
 * Weights are panel after panel, group after group: planes of codes (planes.h), integers as code + 2^(bits - 1), or 2:4 (sparse.h). Scales
 * are [panel, scale groups, 32]; levels, which some kinds have, lie between the codes. Every output is the same whatever tile, vector width or thread computed it. */
typedef struct { /* the basis that an input is read in (basis.h) */
    int32_t left, right; /* right 0: the one it comes in */
    const float *l, *r;  /* [left, left], [right, right] */
    const int32_t *order; /* or NULL; [columns]: of the features */
} Basis;
static inline int has_basis(const Basis *b) { return b->right || b->order; }
typedef struct {
    int32_t kind, weight_type, scale_type; /* weight_type: of KIND_DENSE */
    int32_t group, share;                   /* `share` groups of the activations have one scale of the weight */
    int32_t code_bits;                      /* of DF11 */
    int32_t digits;                         /* of an activation; KIND_DENSE: unused */
    int64_t rows, columns, groups, singles; /* singles: weights of each row that are stored beside the codes (singles.h) */
    Rounding rounding;
    Basis basis; /* in programs only: what linear_run is given is in it already */
    double factor;         /* of all results: what scales have in common; KIND_DENSE: unused */
    const uint8_t *weight; /* KIND_DENSE: [rows, columns] of weight_type; TERNARY: uint16 words of all rows */
    const void *scale;     /* KIND_DENSE: NULL, or float32 [rows] */
    const void *least;     /* as scale, of minima; NULL: the kind has none */
    const int8_t *zero;   /* [panel, scale groups, 32] zero points, or NULL: symmetric */
    const int16_t *sums;  /* S24: [panel, groups, 32], sum of the kept codes */
    const float *bias;    /* [rows] or NULL */
    const int64_t *runs;      /* NULL: all groups are stored. Or [runs, 3]: groups [first, last) of a panel are, how many before; */
    const int64_t *first_run; /* [panels + 1]: where those of a panel begin. Weights of other groups are zero. */
    const uint8_t *codes, *exponents, *escapes; /* of DF11: [rows, code_bits, ceil(columns / 8)], [2^code_bits - 1], of all rows */
    const uint8_t *table;                       /* of row codebooks: levels + 128, [panel, 2^bits / 4, 32, 4]; of TERNARY: uint64 [65536] */
    const int32_t *single_columns;              /* [panel, singles, 32]: columns of those weights */
    const void *single_values;                  /* likewise, of scale_type; their codes are 0 */
    const int64_t *offsets;                     /* of DF11: [rows + 1], where the escapes of a row begin */
    const int32_t *row_offsets;                 /* of TERNARY: [rows + 1], where the words of a row begin */
    const void *row_scale;                      /* of TERNARY: [rows], 16-bit floats of scale_type */
} Linear;

static inline Input input_of(const Linear *l) { return (Input){l->kind == KIND_DENSE ? 0 : l->groups, l->group, l->digits, l->rounding}; }

#define STREAMS 9      /* of a tile, at most: rows of x times digits */
/* Rows of x whose results are held while a block of a panel's columns is in the cache. */
#define BLOCK_ROWS 128
#define BLOCK_COLUMNS 2048 /* at least MOST_GROUP */

/* Memory is slow to begin, so lines are asked for early: this many bytes ahead of where a product reads, and into L2. In an L1 of 32 KiB
 * they would take the place of x. */
#define AHEAD 8192
INLINE void fetch(const uint8_t *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + AHEAD + i, 0, 2);
}

/* Rows in tiles of at most `most`, of sizes as even as can be. */
INLINE int64_t tiles_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }
INLINE int64_t tile_size(int64_t rows, int64_t tiles, int64_t t) { return rows * (t + 1) / tiles - rows * t / tiles; }

/* Groups [first, last) of a panel, whose codes are at w. `cold`: they come from memory, and what follows them is wanted next. */
typedef struct {
    const uint8_t *w;
    int64_t panel, first, last, run; /* run: where they are in l->runs */
    int cold;
} Stretch;
INLINE Stretch before_panel(const Linear *l, int64_t panel) {
    return (Stretch){.panel = panel, .run = l->runs ? l->first_run[panel] - 1 : 0};
}

/* Where a group's scales are: `share` groups one after the other have the same. */
typedef struct { int64_t at; int within, share; } Scales;
INLINE Scales first_scales(const Linear *l, const Stretch *run) {
    int64_t sets = (l->groups + l->share - 1) / l->share;
    return (Scales){(run->panel * sets + run->first / l->share) * PANEL, (int)(run->first % l->share), l->share};
}
INLINE void next_group(Scales *s) {
    if (++s->within == s->share) s->within = 0, s->at += PANEL;
}

/* What lies beside the codes comes so slowly that the machine does not see what is next: scales and zero points this many groups ahead. */
#define GROUPS_AHEAD 8
INLINE void fetch_scales(const Linear *l, const Scales *s) {
    const int64_t at = s->at + GROUPS_AHEAD * PANEL;
    const int size = type_bytes(l->scale_type);
    for (int i = 0; i < PANEL * size; i += 64) __builtin_prefetch((const uint8_t *)l->scale + at * size + i, 0, 3);
    for (int i = 0; i < PANEL * size && l->least; i += 64) __builtin_prefetch((const uint8_t *)l->least + at * size + i, 0, 3);
    if (l->zero) __builtin_prefetch(l->zero + at, 0, 3);
}

/* For H vectors of the panel and every one of so many streams of x. */
#define EACH_SUM(COUNT) UNROLL for (int h = 0; h < H; h++) UNROLL for (int s = 0; s < COUNT; s++)

/* Add the integer sums of group g to the float results, most significant part first. They have too much of what was made unsigned: the
 * codes by `base`, times the sum of the activations, and by a zero point; or the digits (`offset`, for each vector, times OF_DIGITS). */
#define OF_DIGITS(DIGITS) ((DIGITS) == 1 ? 1 : 257)
INLINE void finish_group(const Linear *l, const Scales *scales, int h0, const int H, const Digits *x, int64_t row, const int M,
                         const int D, int64_t g, I sum[VECTORS][2 * STREAMS], const I *offset, int base, F result[VECTORS][STREAMS]) {
    const int parts = PARTS(D);
    F ws[VECTORS];
    UNROLL for (int h = 0; h < H; h++) ws[h] = f_load_as(l->scale, l->scale_type, scales->at + (h0 + h) * LANES);
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int part = 0; part < parts; part++) {
            int64_t at = ((row + m) * parts + part) * x->groups + g;
            const int digits = D == 3 ? part + 1 : D, s = m * D + (D == 3 ? part : 0); /* of this part, and its first stream */
            int32_t total = base * x->sum[at];
            F scale = f_set1(x->scale[at]);
            UNROLL for (int h = 0; h < H; h++) {
                I value = digits == 1 ? sum[h][s] : i_add(i_shift(sum[h][s], 8), sum[h][s + 1]);
                if (!base) value = i_sub(value, i_mul(offset[h], i_set1(OF_DIGITS(digits))));
                else value = i_sub(value, l->zero ? i_mul(offset[h], i_set1(x->sum[at])) : i_set1(total));
                result[h][m] = f_fma(f_from_i(value), f_mul(ws[h], scale), result[h][m]);
            }
        }
}

/* Of part `part` of row m: its integers, of which there are one or two for D digits, as floats. */
INLINE F part_value(const I *sum, int m, int part, const int D) {
    const int s = m * D + (D == 3 ? part : 0);
    return D == 1 || (D == 3 && part == 0) ? f_from_i(sum[s]) : f_fma(f_from_i(sum[s]), f_set1(256.0f), f_from_i(sum[s + 1]));
}

/* The same for sums that levels were multiplied into, of a group whose units, `unit` bytes each, are at w. Levels times sums of the
 * activations are what minima take off, or else what is too much for each of `base`. Digits have sums of their own, which together would be
 * too large for an integer. */
INLINE void finish_levels(const Linear *l, const Scales *scales, const uint8_t *w, int64_t unit, int h0, const int H, const Digits *x,
                          int64_t row, const int M, const int D, int64_t g, const int kind, I sum[VECTORS][2 * STREAMS],
                          F result[VECTORS][STREAMS]) {
    const int parts = PARTS(D);
    const int16_t *half = x->half + row * D * x->halves + g * l->group / 16;
    const float *units = x->scale + row * parts * x->groups + g; /* of row m and part p at (m * parts + p) * x->groups */
    UNROLL for (int h = 0; h < H; h++) {
        const int64_t at = scales->at + (h0 + h) * LANES;
        const F ws = f_load_as(l->scale, l->scale_type, at);
        const I base = i_set1(KIND[kind].base);
        I extra[STREAMS];
        UNROLL for (int s = 0; s < M * D; s++) extra[s] = i_zero();
        for (int u = 0; u < l->group / 32; u++) {
            const Pair level = levels_of(w + u * unit, kind, h0 + h).other;
            UNROLL for (int s = 0; s < M * D; s++) extra[s] = i_pair_dot(extra[s], level, half + s * x->halves + 2 * u);
        }
        UNROLL for (int s = 0; s < M * D; s++) sum[h][s] = i_sub(sum[h][s], i_mul(extra[s], base));
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int part = 0; part < parts; part++)
                result[h][m] = f_fma(part_value(sum[h], m, part, D), f_mul(ws, f_set1(units[(m * parts + part) * x->groups])), result[h][m]);
        if (!KIND[kind].minimum) continue;
        const F least = f_load_as(l->least, l->scale_type, at);
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int part = 0; part < parts; part++)
                result[h][m] = f_fma(part_value(extra, m, part, D), f_mul(least, f_set1(-units[(m * parts + part) * x->groups])), result[h][m]);
    }
}

/* With few streams a sum would wait for itself: codes of the high nibbles have sums of their own, from S on. */
#define APART(H, S) (WIDE_SUMS && (H) * (S) <= 8)

#if WIDE_SUMS
/* The sum of stream s, with that of its high nibbles, which integers of up to 4 bits have 4 bits up. */
INLINE I whole_sum(P part[2 * STREAMS], int s, const int own, const int kind) {
    return own ? i_add(part[s], i_shift(part[own + s], KIND[kind].bits <= 4 && !KIND[kind].table ? -4 : 0)) : part[s];
}
#endif

/* Eights of columns of a unit, times S streams of x, of codes of `reach` bits. With levels, which half the unit has (`width` 16) or all of it
 * has (32), sums are complete at its end; without, those that are 16 bits wide. */
INLINE void unit_run(const uint8_t *w, int cold, const RowTable *rows, const int8_t *digit, int64_t apart, const int H, const int S, const int kind,
                     const int reach, const int width, const Levels *level, const int eights, P part[VECTORS][2 * STREAMS],
                     I sum[VECTORS][2 * STREAMS]) {
    const int bits = KIND[kind].bits, own = APART(H, S) ? S : 0, lines = unit_pieces(bits, eights) * PIECE / 64;
    Small small[VECTORS];
    UNROLL for (int h = 0; h < H; h++) small[h] = small_planes(w + h * LANES * 4, bits, eights);
    UNROLL for (int k = 0; k < eights; k++) {
        Eight codes[VECTORS];
        const int line = lines * k / eights; /* asked for in turn with the dots: many at once would wait for each other */
        if (cold) fetch(w + 64 * line, 64 * (lines * (k + 1) / eights - line));
        UNROLL for (int h = 0; h < H; h++) codes[h] = eight_columns(w + h * LANES * 4, &small[h], &rows[h], kind, k, own > 0, reach == 8 && !WIDE_SUMS);
#if WIDE_SUMS
        UNROLL for (int s = 0; s < S; s++) {
            X front = x_load(digit + s * apart + k * 8), back = x_load(digit + s * apart + k * 8 + 4);
            UNROLL for (int h = 0; h < H; h++) part[h][s] = p_dot(part[h][s], codes[h].low, front);
            UNROLL for (int h = 0; h < H; h++) part[h][own + s] = p_dot(part[h][own + s], codes[h].high, back);
        }
        if (width && (k == eights - 1 || (width == 16 && k == eights / 2 - 1))) EACH_SUM(S) {
            sum[h][s] = p_scaled(sum[h][s], whole_sum(part[h], s, own, kind), level[h].scale, width == 32 ? ALIKE : k == eights - 1);
            part[h][s] = part[h][own + s] = p_zero();
        }
    }
#else
        UNROLL for (int half = 0; half < 2; half++) {
            const int dots = 2 * k + half + 1, wide = reach == 8, which = width == 32 ? ALIKE : dots > eights;
            UNROLL for (int s = 0; s < S; s++) {
                X four = x_load(digit + s * apart + k * 8 + half * 4);
                UNROLL for (int h = 0; h < H; h++) {
                    W code = half ? codes[h].high : codes[h].low;
                    part[h][s] = p_dot(part[h][s], wide ? nibbles_of(code, kind, 0) : code, four);
                    if (wide) part[h][S + s] = p_dot(part[h][S + s], nibbles_of(code, kind, 1), four);
                }
            }
            if (dots == 2 * eights || (width == 16 && dots == eights) || (!wide && reach > 4 && dots % MOST_DOTS(reach) == 0)) EACH_SUM(S) {
                sum[h][s] = width ? p_scaled(sum[h][s], part[h][s], level[h].scale, which) : p_flush(sum[h][s], part[h][s], 1);
                part[h][s] = p_zero();
                if (!wide) continue;
                sum[h][s] = width ? p_scaled(sum[h][s], part[h][S + s], pair_times_16(level[h].scale), which)
                                  : p_flush(sum[h][s], part[h][S + s], 16);
                part[h][S + s] = p_zero();
            }
        }
    }
#endif
}

/* H vectors of a panel from the h0-th on, M rows of x from `row` on, D digits: added to out [M, 32]. */
INLINE void tile_planes(const Linear *l, const Stretch *run, int h0, const int H, const Digits *x, int64_t row, const int M, const int D,
                        const int kind, const int reach, const int width, float *out) {
    const int bits = KIND[kind].bits, unit = unit_pieces(bits, EIGHTS) * PIECE, given = kind == 8 ? l->kind : kind;
    const int S = M * D, sums = APART(H, S) || (reach == 8 && !WIDE_SUMS) ? 2 * S : S, levels = width ? level_bytes(given) : 0;
    const int8_t *digit = x->digit + row * D * x->apart + run->first * l->group;
    const uint8_t *w = run->w;
    const int base = KIND[l->kind].base;
    Scales scales = first_scales(l, run);
    F result[VECTORS][STREAMS];
    RowTable rows[VECTORS];
    UNROLL for (int h = 0; h < H; h++) rows[h] = row_table(l->table + run->panel * table_bytes(kind), kind, h0 + h);
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) result[h][m] = f_load(out + m * PANEL + (h0 + h) * LANES);
    for (int64_t g = run->first; g < run->last; g++) {
        I sum[VECTORS][2 * STREAMS], offset[VECTORS];
        P part[VECTORS][2 * STREAMS];
        const uint8_t *const group = w;
        EACH_SUM(sums) sum[h][s] = i_zero(), part[h][s] = p_zero();
        if (run->cold) fetch_scales(l, &scales);
        int left = l->group;
        for (; left >= 32; left -= 32, w += unit, digit += 32) {
            Levels level[VECTORS];
            if (width) {
                if (run->cold) fetch(w, levels);
                UNROLL for (int h = 0; h < H; h++) level[h] = levels_of(w, given, h0 + h);
                w += levels;
            }
            unit_run(w + h0 * LANES * 4, run->cold, rows, digit, x->apart, H, S, kind, reach, width, level, EIGHTS, part, sum);
        }
        if (left) {
            unit_run(w + h0 * LANES * 4, run->cold, rows, digit, x->apart, H, S, kind, reach, 0, NULL, EIGHTS / 2, part, sum);
            w += unit_pieces(bits, EIGHTS / 2) * PIECE, digit += 16;
        }
#if WIDE_SUMS
        if (!width) EACH_SUM(S) sum[h][s] = whole_sum(part[h], s, APART(H, S) ? S : 0, kind);
#endif
        UNROLL for (int h = 0; h < H; h++)
            if (l->zero) offset[h] = i_add(i_load_i8(l->zero + scales.at + (h0 + h) * LANES), i_set1(base));
        if (width) finish_levels(l, &scales, group, levels + unit, h0, H, x, row, M, D, g, given, sum, result);
        else finish_group(l, &scales, h0, H, x, row, M, D, g, sum, offset, base, result);
        next_group(&scales);
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int m = 0; m < M; m++) f_store(out + m * PANEL + (h0 + h) * LANES, result[h][m]);
}

/* out (+)= values + bias */
INLINE void put_typed(void *y, const int type, int64_t at, const float *values, const float *bias, int count, int add) {
    for (int j = 0; j < count; j++) put(y, type, at + j, values[j] + (bias ? bias[j] : 0.0f), add);
}
static void put_row(void *y, int type, int64_t at, const float *values, const float *bias, int count, int add) {
    if (type == TYPE_F32) put_typed(y, TYPE_F32, at, values, bias, count, add);
    else if (type == TYPE_BF16) put_typed(y, TYPE_BF16, at, values, bias, count, add);
    else put_typed(y, TYPE_F16, at, values, bias, count, add);
}
