/* Inputs in another basis (input_transform.py): each block of left * right columns, as a matrix X [left, right], becomes L^T X R. */

/* out [n] = the sum over k of factor[k * apart] times row k of matrix [count, n]: every sum in the order of k, whatever the vectors. */
static void sum_rows(const float *factor, int64_t apart, int64_t count, const float *matrix, int64_t n, float *out) {
    int64_t j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES) {
        F sum[4];
        UNROLL for (int v = 0; v < 4; v++) sum[v] = f_zero();
        for (int64_t k = 0; k < count; k++) {
            const F by = f_set1(factor[k * apart]);
            UNROLL for (int v = 0; v < 4; v++) sum[v] = f_fma(by, f_load(matrix + k * n + j + v * LANES), sum[v]);
        }
        UNROLL for (int v = 0; v < 4; v++) f_store(out + j + v * LANES, sum[v]);
    }
    for (; j + LANES <= n; j += LANES) {
        F sum = f_zero();
        for (int64_t k = 0; k < count; k++) sum = f_fma(f_set1(factor[k * apart]), f_load(matrix + k * n + j), sum);
        f_store(out + j, sum);
    }
    for (; j < n; j++) {
        float sum = 0.0f;
        for (int64_t k = 0; k < count; k++) sum = fmaf(factor[k * apart], matrix[k * n + j], sum);
        out[j] = sum;
    }
}

static int64_t basis_bytes(const Basis *b, int64_t rows, int64_t columns) { return b->right ? (b->left > 1 ? 2 : 1) * rows * columns * 4 : 0; }

/* This member's share of x [rows, columns], `stride` apart; all members come here. Returns where the result [rows, columns] is in `memory` of
 * basis_bytes(...), once all have come to the next barrier. */
static const float *transform_rows(const float *x, int64_t stride, int64_t rows, int64_t columns, const Basis *b, float *memory, const Team *team) {
    const int64_t left = b->left, right = b->right, lines = columns / right; /* of all blocks of a row */
    int64_t start, end;
    team_part(team, rows * lines, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++)
        sum_rows(x + unit / lines * stride + unit % lines * right, 1, right, b->r, right, memory + unit * right);
    if (left == 1) return memory;
    float *out = memory + rows * columns;
    team_barrier(team);
    for (int64_t unit = start; unit < end; unit++)
        sum_rows(b->l + unit % left, left, left, memory + unit / left * left * right, right, out + unit * right);
    return out;
}
