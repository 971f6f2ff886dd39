/* Outliers of LLM.int8(): inputs that are not rounded, each times its column of an int8 weight [outputs, columns], in float32.
 *
 * The columns that any row of x has an outlier in are dequantized a panel at a time, and every row adds its own of them in column order: its
 * sums do not depend on the rows beside it, the threads or the vectors. */
typedef struct {
    const int8_t *weight;  /* [outputs, columns] */
    const int8_t *zero;    /* [outputs]; NULL: zeros */
    const float *scale;    /* [outputs] */
    const int64_t *column; /* [used] */
    const int64_t *first;  /* [rows + 1] of x: where its outliers begin */
    const int64_t *place;  /* of an outlier's column among the used ones */
    const float *value;    /* of an outlier */
    float *y;              /* [rows, outputs] that is added to */
    float *memory;         /* [threads, used, 32] */
    int64_t rows, outputs, columns, used;
} OutlierOrder;

static void outlier_job(void *p, const Team *team) {
    const OutlierOrder *o = p;
    float *tile = o->memory + team->index * o->used * PANEL;
    int64_t start, end;
    team_part(team, o->outputs, PANEL, &start, &end);
    for (int64_t n = start; n < end; n += PANEL) {
        const int64_t valid = end - n < PANEL ? end - n : PANEL;
        if (valid < PANEL) memset(tile, 0, (size_t)(o->used * PANEL) * sizeof *tile);
        for (int64_t i = 0; i < valid; i++) {
            const int8_t *row = o->weight + (n + i) * o->columns;
            const int zero = o->zero ? o->zero[n + i] : 0;
            for (int64_t u = 0; u < o->used; u++) tile[u * PANEL + i] = (float)(row[o->column[u]] - zero) * o->scale[n + i];
        }
        for (int64_t m = 0; m < o->rows; m++) {
            if (o->first[m] == o->first[m + 1]) continue;
            F sum[VECTORS];
            float sums[PANEL];
            UNROLL for (int v = 0; v < VECTORS; v++) sum[v] = f_zero();
            for (int64_t k = o->first[m]; k < o->first[m + 1]; k++) {
                const float *weight = tile + o->place[k] * PANEL;
                const F x = f_set1(o->value[k]);
                UNROLL for (int v = 0; v < VECTORS; v++) sum[v] = f_add(sum[v], f_mul(x, f_load(weight + v * LANES)));
            }
            UNROLL for (int v = 0; v < VECTORS; v++) f_store(sums + v * LANES, sum[v]);
            for (int64_t i = 0; i < valid; i++) o->y[m * o->outputs + n + i] += sums[i];
        }
    }
}
void outliers_add(const OutlierOrder *order, int32_t threads) { parallel(outlier_job, (void *)order, threads); }
