/* Weights that are stored singly at full precision, as many in every row: SqueezeLLM's dense-and-sparse split.
 *
 * Their codes are 0, so the product of codes has level 0 in their place: what is added is the value less that level. Columns ascend, and are
 * added in this order in float32: sums do not depend on the rows beside them, the threads or the vectors. */

/* The activation of row m in a column, as its digits represent it. */
static inline float digit_value(const Digits *x, int64_t m, int64_t column) {
    const int digits = x->digits, parts = PARTS(digits);
    const int8_t *q = x->digit + m * digits * x->apart + column;
    const float *scale = x->scale + m * parts * x->groups + column / x->group;
    if (digits == 1) return (float)q[0] * scale[0];
    const float low = (float)(256 * q[(digits - 2) * x->apart] + q[(digits - 1) * x->apart]) * scale[(parts - 1) * x->groups];
    return digits == 2 ? low : (float)q[0] * scale[0] + low;
}

/* Adds their products in a panel to out [count, 32]. */
static void add_singles(const Linear *l, int64_t panel, const Digits *x, int64_t row, int64_t count, float *out) {
    const int64_t sets = (l->groups + l->share - 1) / l->share;
    for (int64_t j = 0; j < l->singles; j++) {
        const int64_t at = (panel * l->singles + j) * PANEL;
        const int32_t *column = l->single_columns + at;
        float missing[PANEL];
        for (int i = 0; i < PANEL; i++) {
            const int64_t set = panel * sets + column[i] / (l->group * l->share);
            const float level = (float)(l->table[panel * table_bytes(l->kind) + 4 * i] - KIND[l->kind].base);
            missing[i] = load_as(l->single_values, l->scale_type, at + i) - level * load_as(l->scale, l->scale_type, set * PANEL + i);
        }
        for (int64_t m = 0; m < count; m++)
            for (int i = 0; i < PANEL; i++) out[m * PANEL + i] += missing[i] * digit_value(x, row + m, column[i]);
    }
}
