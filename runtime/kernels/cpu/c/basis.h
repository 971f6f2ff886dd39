/* Inputs in another basis (input_transform.py): each block of left * right columns, as a matrix X [left, right], becomes L^T X R, or
 * the columns take another order. */

/* Rows whose sums are in registers together, so that what they read of the matrix is loaded once. */
#if defined(__AVX512F__) || defined(COMPRESS_EMULATED)
#define SUMMED_ROWS 4
#else
#define SUMMED_ROWS 2
#endif

/* out [M, n]: row m = the sum over k of factor[m * step + k * apart] times row k of matrix [count, n], in the order of k, whatever the
 * vectors and M. */
INLINE void sum_rows(const float *factor, int64_t step, int64_t apart, int64_t count, const float *matrix, int64_t n, const int M, float *out) {
    int64_t j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES) {
        F sum[SUMMED_ROWS][4];
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < 4; v++) sum[m][v] = f_zero();
        for (int64_t k = 0; k < count; k++) {
            F row[4];
            UNROLL for (int v = 0; v < 4; v++) row[v] = f_load(matrix + k * n + j + v * LANES);
            UNROLL for (int m = 0; m < M; m++) {
                const F by = f_set1(factor[m * step + k * apart]);
                UNROLL for (int v = 0; v < 4; v++) sum[m][v] = f_fma(by, row[v], sum[m][v]);
            }
        }
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < 4; v++) f_store(out + m * n + j + v * LANES, sum[m][v]);
    }
    for (; j + LANES <= n; j += LANES) {
        F sum[SUMMED_ROWS];
        UNROLL for (int m = 0; m < M; m++) sum[m] = f_zero();
        for (int64_t k = 0; k < count; k++) {
            const F row = f_load(matrix + k * n + j);
            UNROLL for (int m = 0; m < M; m++) sum[m] = f_fma(f_set1(factor[m * step + k * apart]), row, sum[m]);
        }
        UNROLL for (int m = 0; m < M; m++) f_store(out + m * n + j, sum[m]);
    }
    for (; j < n; j++)
        for (int m = 0; m < M; m++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < count; k++) sum = fmaf(factor[m * step + k * apart], matrix[k * n + j], sum);
            out[m * n + j] = sum;
        }
}
static int sum_some(const float *factor, int64_t step, int64_t apart, int64_t count, const float *matrix, int64_t n, int64_t rows, float *out) {
    if (rows >= SUMMED_ROWS) sum_rows(factor, step, apart, count, matrix, n, SUMMED_ROWS, out);
    else sum_rows(factor, step, apart, count, matrix, n, 1, out);
    return rows >= SUMMED_ROWS ? SUMMED_ROWS : 1;
}

static int64_t basis_bytes(const Basis *b, int64_t rows, int64_t columns) { return has_basis(b) ? (b->left > 1 ? 2 : 1) * rows * columns * 4 : 0; }

/* This member's share of x [rows, columns], `stride` apart; all members come here. Returns where the result [rows, columns] is in `memory` of
 * basis_bytes(...), once all have come to the next barrier. */
static const float *transform_rows(const float *x, int64_t stride, int64_t rows, int64_t columns, const Basis *b, float *memory, const Team *team) {
    int64_t start, end;
    if (b->order) {
        team_part(team, rows, 1, &start, &end);
        for (int64_t row = start; row < end; row++)
            for (int64_t j = 0; j < columns; j++) memory[row * columns + j] = x[row * stride + b->order[j]];
        return memory;
    }
    const int64_t left = b->left, right = b->right, lines = columns / right; /* of all blocks of a row */
    team_part(team, rows * lines, 1, &start, &end);
    for (int64_t unit = start; unit < end;) { /* lines of one row share R */
        const int64_t line = unit % lines, there = lines - line < end - unit ? lines - line : end - unit;
        unit += sum_some(x + unit / lines * stride + line * right, right, 1, right, b->r, right, there, memory + unit * right);
    }
    if (left == 1) return memory;
    float *out = memory + rows * columns;
    team_barrier(team);
    for (int64_t unit = start; unit < end;) { /* lines of one block share what they are summed of */
        const int64_t line = unit % left, there = left - line < end - unit ? left - line : end - unit;
        unit += sum_some(b->l + line, 1, left, left, memory + (unit - line) * right, right, there, out + unit * right);
    }
    return out;
}
