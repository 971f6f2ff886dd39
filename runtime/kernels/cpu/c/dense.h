/* Dense weights [rows, columns] in float32, bfloat16 or float16, as they lie in the file; float32 activations. */
INLINE float dot_dense(const void *w, int type, int64_t at, const float *x, int64_t columns) {
    F sum[4] = {f_zero(), f_zero(), f_zero(), f_zero()};
    int64_t k = 0;
    for (; k + 4 * LANES <= columns; k += 4 * LANES) {
        __builtin_prefetch((const char *)w + (at + k) * (type == TYPE_F32 ? 4 : 2) + 4096, 0, 3);
        UNROLL for (int i = 0; i < 4; i++)
            sum[i] = f_fma(f_load_as(w, type, at + k + i * LANES), f_load(x + k + i * LANES), sum[i]);
    }
    float total = f_sum(f_add(f_add(sum[0], sum[1]), f_add(sum[2], sum[3])));
    for (; k < columns; k++) total = fmaf(load_as(w, type, at + k), x[k], total);
    return total;
}

/* Four rows of x share each load of the weight. Same order of additions as dot_dense. */
INLINE void dot_dense4(const void *w, int type, int64_t at, const float *x, int64_t stride, int64_t columns, float *out) {
    F sum[4][4];
    UNROLL for (int m = 0; m < 4; m++) UNROLL for (int i = 0; i < 4; i++) sum[m][i] = f_zero();
    int64_t k = 0;
    for (; k + 4 * LANES <= columns; k += 4 * LANES)
        UNROLL for (int i = 0; i < 4; i++) {
            F weight = f_load_as(w, type, at + k + i * LANES);
            UNROLL for (int m = 0; m < 4; m++) sum[m][i] = f_fma(weight, f_load(x + m * stride + k + i * LANES), sum[m][i]);
        }
    UNROLL for (int m = 0; m < 4; m++) {
        float total = f_sum(f_add(f_add(sum[m][0], sum[m][1]), f_add(sum[m][2], sum[m][3])));
        for (int64_t j = k; j < columns; j++) total = fmaf(load_as(w, type, at + j), x[m * stride + j], total);
        out[m] = total;
    }
}

INLINE void dense_rows(const Linear *l, const int type, const float *x, int64_t stride, int64_t rows, void *y, int out_type,
                       int64_t out_stride, int add, int64_t start, int64_t end) {
    for (int64_t n = start; n < end; n++) {
        float bias = l->bias ? l->bias[n] : 0.0f;
        int64_t m = 0;
        for (; m + 4 <= rows; m += 4) {
            float four[4];
            dot_dense4(l->weight, type, n * l->columns, x + m * stride, stride, l->columns, four);
            for (int i = 0; i < 4; i++) put(y, out_type, (m + i) * out_stride + n, four[i] + bias, add);
        }
        for (; m < rows; m++)
            put(y, out_type, m * out_stride + n, dot_dense(l->weight, type, n * l->columns, x + m * stride, l->columns) + bias, add);
    }
}

static void dense_part(const Linear *l, const float *x, int64_t stride, int64_t rows, void *y, int out_type, int64_t out_stride,
                       int add, const Team *team) {
    int64_t start, end;
    team_part(team, l->rows, 16, &start, &end);
    if (l->scale_type == TYPE_BF16) dense_rows(l, TYPE_BF16, x, stride, rows, y, out_type, out_stride, add, start, end);
    else if (l->scale_type == TYPE_F16) dense_rows(l, TYPE_F16, x, stride, rows, y, out_type, out_stride, add, start, end);
    else dense_rows(l, TYPE_F32, x, stride, rows, y, out_type, out_stride, add, start, end);
}
