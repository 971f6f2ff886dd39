/* Weights back from panels: w = (number - zero) * scale - minimum, for products with many rows that a library's matrix product does.
 *
 * A tile is written transposed, [columns, rows of the tile]: the rows of a panel are neighbours in memory then, one vector a
 * column. A number times a scale of up to 16 bits is exact in float32, unless scales have a factor that is no power of two; in a 16-bit
 * type it is rounded once. */
typedef struct {
    const Linear *linear;
    void *out;
    int64_t first, last; /* panels */
    int32_t type;
} Tile;

/* Weights of a panel, of one column, from `row` of the tile on, of which `valid` exist. */
INLINE void tile_put(const Tile *t, int64_t stride, int64_t column, int64_t row, const int32_t *code, const int32_t *zero,
                     const float *scale, const float *least, int valid) {
    float value[PANEL];
    for (int i = 0; i < PANEL; i++) value[i] = (float)(code[i] - zero[i]) * scale[i] - least[i];
    int64_t at = column * stride + row;
    if (t->type == TYPE_F32 && valid == PANEL) memcpy((float *)t->out + at, value, sizeof value);
    else if (t->type == TYPE_BF16 && valid == PANEL)
        for (int i = 0; i < PANEL; i++) ((uint16_t *)t->out)[at + i] = float_to_bf16(value[i]);
    else
        for (int i = 0; i < valid; i++) store_as(t->out, t->type, at + i, value[i]);
}

static void tile_job(void *p, const Team *team) {
    const Tile *t = p;
    const Linear *l = t->linear;
    int64_t start, end, sets = (l->groups + l->share - 1) / l->share;
    int64_t total = (t->last * PANEL < l->rows ? t->last * PANEL : l->rows) - t->first * PANEL; /* rows of the tile */
    uint32_t firsts = 0, seconds = 0; /* PAIR as two words of 2-bit places: lanes shift, no table */
    for (int i = 0; i < 8; i++) firsts |= (uint32_t)PAIR[i][0] << (2 * i), seconds |= (uint32_t)PAIR[i][1] << (2 * i);
    uint8_t bytes[BYTES_ROOM(MOST_GROUP)];
    const int base = KIND[l->kind].base, levels = level_bytes(l->kind);
    team_part(team, t->last - t->first, 1, &start, &end);
    for (int64_t panel = t->first + start; panel < t->first + end; panel++) {
        Stretch run = before_panel(l, panel);
        int more = next_stretch(l, &run, 1);
        int64_t row = (panel - t->first) * PANEL;
        int valid = (int)(total - row < PANEL ? total - row : PANEL);
        for (int64_t g = 0; g < l->groups; g++) {
            float scale[PANEL], least[PANEL] = {0}, own[PANEL], minimum[PANEL] = {0};
            int32_t zero[PANEL], code[PANEL];
            int64_t set = (panel * sets + g / l->share) * PANEL;
            for (int i = 0; i < PANEL; i++) {
                scale[i] = (float)(load_as(l->scale, l->scale_type, set + i) * l->factor);
                if (l->least) minimum[i] = load_as(l->least, l->scale_type, set + i);
                zero[i] = base + (l->zero ? l->zero[set + i] : 0);
            }
            const int stored = more && run.first == g;
            const uint8_t *codes = stored ? as_bytes(l, panel, run.w, 1, bytes) : NULL;
            if (stored) more = next_stretch(l, &run, 1);
            if (l->kind != KIND_S24) {
                for (int64_t k = g * l->group, c = 0; c < l->group && k + c < l->columns; c++) {
                    const int half = c % 32 / 16;
                    for (int i = 0; i < PANEL && c % 16 == 0; i++) {
                        own[i] = levels ? scale[i] * (float)level_of_row(codes, l->kind, i, half, 0) : scale[i];
                        if (l->least) least[i] = minimum[i] * (float)level_of_row(codes, l->kind, i, half, 1);
                    }
                    for (int i = 0; i < PANEL; i++) code[i] = stored ? codes[levels + c % 32 / 4 * PIECE + 4 * i + c % 4] : zero[i];
                    tile_put(t, total, k + c, row, code, zero, own, least, valid);
                    if (c % 32 == 31 && stored) codes += levels + 8 * PIECE;
                }
                continue;
            }
            for (int64_t k = g * l->group; k < (g + 1) * l->group; k += 32, codes += 3 * PIECE) {
                uint32_t word[3][PANEL];
                memcpy(word, codes, sizeof word);
                for (int c = 0; c < 32 && k + c < l->columns; c++) { /* quad c / 4: two codes at places that its pair names */
                    int quad = c / 4, inside = quad % 4, shift = 16 * (inside & 1) + 4 * (inside >> 1);
                    for (int i = 0; i < PANEL; i++) {
                        uint32_t two = word[quad / 4][i] >> shift, pair = word[2][i] >> (4 * quad) & 7;
                        uint32_t place = (uint32_t)c % 4;
                        uint32_t first = firsts >> (2 * pair) & 3, second = seconds >> (2 * pair) & 3;
                        code[i] = first == place ? (int32_t)(two & 15) : second == place ? (int32_t)(two >> 8 & 15) : zero[i];
                    }
                    tile_put(t, total, k + c, row, code, zero, scale, least, valid);
                }
            }
        }
        for (int64_t j = 0; j < l->singles; j++)
            for (int i = 0; i < valid; i++) {
                const int64_t at = (panel * l->singles + j) * PANEL + i;
                store_as(t->out, t->type, l->single_columns[at] * total + row + i, load_as(l->single_values, l->scale_type, at));
            }
    }
}

/* Panels [first, last) of an integer weight -> out [columns, their rows] of `type`. */
void linear_dequantize(const Linear *l, int64_t first, int64_t last, void *out, int32_t type, int32_t threads) {
    Tile tile = {l, out, first, last, type};
    parallel(tile_job, &tile, threads);
}
