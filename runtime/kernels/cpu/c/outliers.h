/* Outliers of LLM.int8(): inputs that are not rounded, each times its column of the weight, in float32.
 *
 * Every row adds its own, in the order of columns: its sums do not depend on the rows beside it, the threads or the vectors. */

/* Adds the outliers' products of groups [first, last) of a panel to out [count, 32]; w: the panel's codes, a byte each (planes.h). */
static void add_outliers(const Linear *l, int64_t panel, int64_t first, int64_t last, const uint8_t *w, const Digits *x, int64_t row,
                         int64_t count, float *out) {
    const int base = KIND[l->kind].base;
    const Stretch run = {.panel = panel, .first = first};
    Scales scales = first_scales(l, &run);
    for (int64_t g = first; g < last; g++, next_group(&scales), w += l->group * PANEL) {
        float scale[PANEL], zero[PANEL];
        int ready = 0;
        for (int64_t m = 0; m < count; m++) {
            const int64_t at = (row + m) * x->groups + g;
            if (!x->outliers[at]) continue;
            for (int i = 0; i < PANEL && !ready; i++) {
                scale[i] = load_as(l->scale, l->scale_type, scales.at + i);
                zero[i] = (float)(base + (l->zero ? l->zero[scales.at + i] : 0));
            }
            ready = 1;
            for (int k = 0; k < x->outliers[at]; k++) {
                const int column = x->place[at * x->group + k];
                const float value = x->value[at * x->group + k];
                const uint8_t *code = w + column / 4 * PIECE + column % 4;
                for (int i = 0; i < PANEL; i++) out[m * PANEL + i] += value * (((float)code[4 * i] - zero[i]) * scale[i]);
            }
        }
    }
}
