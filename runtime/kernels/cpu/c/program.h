/* The program of a decoder: operations over buffers of float32 rows, and what one step of it needs.
 *
 * Buffer 0 is the residual stream [rows, hidden], buffer 1 the logits; the others are scratch memory. Row r of a buffer begins at
 * r * width of that buffer; operations read and write at a place within the row.
 *
 * A step takes `rows` tokens of any sequences at any positions. Row r belongs to sequence sequence[r], whose pages are
 * pages[sequence[r] * pages_stride ...]; rows of one sequence are consecutive and in order. Rows of a tree (parents before children)
 * have positions of their own and slots one after another; what a row sees of its tree is its path. What eviction leaves of a sequence lies
 * in its first slots, in order, or where `ragged` says: positions go on from there. */
enum { OP_NORM, OP_LINEAR, OP_HEADS, OP_ATTEND, OP_GATE, OP_ADD, OP_CAP, OP_MIXTURE, OP_WEIGH };
enum { SKIP_ATTENTION = 1, SKIP_MLP = 2 };
enum { STREAM, LOGITS, MOST_BUFFERS = 32 };
#define EXPERTS_BIT (UINT64_C(1) << 61) /* scratch memory of mixtures */
#define CACHE_BIT (UINT64_C(1) << 62) /* of the sets of what is read and written: keys and values */
#define INPUT_BIT (UINT64_C(1) << 63) /* the input of linear layers, as their products read it */
#define BIT(B) (UINT64_C(1) << (B))

/* Heads in the rows of a buffer: head h is at `at` + h / group * group_step + h % group * step. */
typedef struct {
    int32_t buffer, group;
    int64_t at, step, group_step;
} Span;

/* to (+)= norm(from) * weight + bias; `layer`: the mean is taken off first. */
typedef struct {
    const float *weight, *bias; /* NULL: none */
    float eps;
    int32_t layer;
} NormOp;

/* to [heads, head_dim] = the queries, normed (NULL: not) and `rotary` numbers of them rotated, from `rotary_at` on; so the keys, which go
 * into the cache with the values. */
typedef struct {
    Span query, key, value, rest; /* rest: where the keys' numbers from `rotary_at` on are; of no buffer (-1): with the others */
    const float *query_norm, *key_norm;
    int64_t query_apart, key_apart; /* from one head's weights to the next; 0: all have the same */
    float eps;
    int32_t layer; /* as of NormOp */
    int32_t rotary, rotation, pairs, rotary_at; /* rotation: which tables; pairs: neighbours are rotated, not halves */
} HeadsOp;

/* to [heads, value_dim] = attention of the queries in from. */
typedef struct {
    int64_t window; /* positions a query sees; 0: all before it */
    const float *sinks; /* [heads], or NULL */
    float scale, softcap; /* 0: none */
} AttendOp;

/* from = activation(from) * other, or activation(from) where `other` is negative. */
typedef struct {
    int32_t activation, other;
    int64_t other_at;
} GateOp;

/* to (+)= what the experts that the router chooses of from make of it. */
typedef struct {
    const Router *router;
    const Experts *experts;
} MixtureOp;

typedef struct {
    int32_t kind, half; /* half: of SKIP_ATTENTION and SKIP_MLP, what it is left out with */
    int32_t from, to, add; /* add: to what is in `to` */
    float scale; /* OP_ADD: of what is added; OP_CAP: of all */
    int64_t from_at, to_at, count; /* count: numbers of a row */
    union {
        Linear linear;
        NormOp norm;
        HeadsOp heads;
        AttendOp attend;
        GateOp gate;
        MixtureOp mixture;
        float cap; /* to = cap * tanh(to / cap); 0: none */
    };
} Op;

typedef struct {
    const Op *ops;
    int64_t count;
    char *keys, *values; /* this layer's pages */
    char *stored;        /* those that are stored in fewer bits; NULL: none */
    char *bounds;        /* of its keys (selection.h); NULL: queries read all pages */
    int64_t skip;        /* of SKIP_ATTENTION and SKIP_MLP: what is left out */
} Block;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, value_dim, buffers, tail_count;
    int32_t cache_type;
    Storage storage; /* of pages */
    const int64_t *widths; /* [buffers]: of each buffer's rows */
    const Block *blocks;
    const Op *tail; /* from the residual stream to the logits */
} Decoder;

typedef struct {
    int64_t rows, outputs, pages_stride;
    int64_t first, last; /* layers to run; the tail follows when `outputs` > 0 */
    int64_t narrow; /* only logits are wanted: once its keys and values are in the cache, the last layer goes on with the rows of `output` */
    float *x;                   /* [rows, hidden]: embeddings; overwritten, unless `narrow` by what the last layer leaves */
    const int32_t *sequence;    /* [rows] */
    const int64_t *rotary;      /* [rows]: place in its sequence, by which a row is rotated */
    const int64_t *position;    /* [rows]: the same, but that tokens that were evicted do not count */
    const int64_t *slot;        /* [rows]: where its keys and values are put; NULL: at its position */
    const int64_t *base, *path; /* [rows]: positions from base[r] on are at slots[path[r]], slots[path[r] + 1], ...; path[r] < 0: in order */
    const int32_t *slots;
    const int32_t *pages;       /* [sequences, pages_stride] */
    const float *const *tables; /* cosines and sines [positions, rotary / 2] of the first rotation, of the second, ... */
    const int32_t *output;      /* [outputs]: rows whose logits are wanted, in order */
    float *logits;              /* [outputs, vocabulary] */
    float *record;              /* [layers, rows, hidden]: the residual stream after each layer that is run; NULL: nobody wants it */
    char *memory;               /* decoder_memory(...) bytes */
    const int32_t *stored;      /* [stored_count]: pages that are stored in fewer bits once their tokens are written */
    int32_t *broken;            /* set to 1 where that cannot hold a number */
    int64_t stored_count;
    const int32_t *observed;    /* [observed_count]: rows whose queries are wanted */
    float *queries;             /* [layers, observed_count, heads, head_dim]: rotated */
    int64_t observed_count;
    const Ragged *const *ragged; /* [sequences], each NULL where all heads see the same pages; or NULL */
    const int64_t *budget;      /* [rows]: tokens that each reads in layers with bounds, < 0: all; NULL: all read all */
    uint8_t *chosen;            /* as of attention.h: what they read, of the last layer that has computed it */
    int64_t newest;             /* tokens that are read in any case */
    const Decoder *decoder;
} Step;

/* One thread's view of a step: all threads go the same way through it. */
typedef struct {
    const Step *step;
    const Decoder *decoder;
    const Block *block;
    float *buffer[MOST_BUFFERS];
    int64_t width[MOST_BUFFERS], rows;
    const int32_t *sequence; /* of each row, as in Step */
    const int64_t *position, *base, *path, *budget;
    char *memory, *experts, *partials, *kept; /* of inputs of linear layers, of mixtures, of attention, of rows that stay */
    Digits digits;   /* in `memory`, or numbers of dense layers (gemm.h) */
    const float *numbers; /* of a dense layer and few rows, `apart` from row to row */
    int64_t apart;
    const Op *input; /* whose input is there; NULL: of no buffer as it is now */
    uint64_t read, written; /* since the last barrier, by any thread */
} Run;

INLINE float *row_of(const Run *run, int buffer, int64_t at, int64_t r) { return run->buffer[buffer] + r * run->width[buffer] + at; }
INLINE int64_t span_at(const Span *s, int64_t h) { return s->at + h / s->group * s->group_step + h % s->group * s->step; }
INLINE float *head_of(const Run *run, const Span *s, int64_t r, int64_t h) { return row_of(run, s->buffer, span_at(s, h), r); }

/* Before an operation reads and writes such buffers: a barrier where another thread may still be at one of them. */
static void settle(Run *run, uint64_t reads, uint64_t writes, const Team *team) {
    if ((run->written & (reads | writes)) | (run->read & writes)) {
        team_barrier(team);
        run->read = run->written = 0;
    }
    run->read |= reads, run->written |= writes;
    if (run->input && writes & BIT(run->input->from)) run->input = NULL;
}

static int64_t narrow_memory(int64_t rows) { return align64(rows * 4) + 4 * align64(rows * 8); }
/* From here on there are only the rows of `output`. None comes later than it was, so each thread moves some columns, row by row. */
static void narrow_rows(Run *run, const Team *team) {
    const Step *step = run->step;
    const int64_t count = step->outputs;
    int64_t at = 0, start, end;
    int32_t *sequence = memory_part(run->kept, &at, count * 4);
    int64_t *numbers[4];
    const int64_t *from[4] = {step->position, step->base, step->slot ? step->path : NULL, step->budget};
    team_barrier(team);
    for (int i = STREAM; i < run->decoder->buffers; i++) {
        if (i == LOGITS) continue;
        team_part(team, run->width[i], 16, &start, &end);
        for (int64_t r = 0; r < count; r++)
            if (step->output[r] > r) memcpy(row_of(run, i, start, r), row_of(run, i, start, step->output[r]), (size_t)(end - start) * 4);
    }
    for (int i = 0; i < 4; i++) {
        numbers[i] = memory_part(run->kept, &at, count * 8);
        for (int64_t r = 0; r < count && from[i] && !team->index; r++) numbers[i][r] = from[i][step->output[r]];
    }
    for (int64_t r = 0; r < count && !team->index; r++) sequence[r] = step->sequence[step->output[r]];
    team_barrier(team);
    run->rows = count, run->sequence = sequence, run->position = numbers[0], run->base = numbers[1], run->path = numbers[2];
    run->budget = step->budget ? numbers[3] : NULL;
    run->input = NULL;
}

static int64_t input_memory(const Linear *l, int64_t rows) { return align64(linear_memory(l, rows)) + basis_bytes(&l->basis, rows, l->columns); }

/* The input of an integer layer, or of a dense one that is transformed, rounded or of many rows, into run->memory, where the last layer's does not serve: layers of one
 * input come one after another. */
static void prepare_input(Run *run, const Op *op, const Team *team) {
    const Linear *l = &op->linear, *last = run->input ? &run->input->linear : NULL;
    const Input in = input_of(l), before = last ? input_of(last) : in;
    const float *x = row_of(run, op->from, op->from_at, 0);
    int64_t apart = run->width[op->from];
    if (last && run->input->from == op->from && run->input->from_at == op->from_at && last->columns == l->columns &&
        !memcmp(&in, &before, sizeof in) && !memcmp(&l->basis, &last->basis, sizeof l->basis))
        return;
    settle(run, BIT(op->from), INPUT_BIT, team);
    if (has_basis(&l->basis)) {
        float *memory = (float *)(run->memory + align64(linear_memory(l, run->rows)));
        x = transform_rows(x, apart, run->rows, l->columns, &l->basis, memory, team), apart = l->columns;
        team_barrier(team);
    }
    if (l->kind == KIND_DENSE) {
        if (l->rounding.kind) {
            float *rounded = rounded_input(l, run->memory, run->rows);
            round_rows(x, TYPE_F32, apart, run->rows, l->columns, &l->rounding, rounded, team);
            if (run->rows > FEW_ROWS) team_barrier(team);
            x = rounded, apart = l->columns;
        }
        if (run->rows > FEW_ROWS) gemm_input(x, TYPE_F32, apart, run->rows, l->columns, (float *)run->memory, team);
        run->numbers = x, run->apart = apart;
    } else {
        run->digits = digits_in(run->memory, run->rows, &in);
        quantize_rows(x, TYPE_F32, apart, l->columns, &run->digits, team);
    }
    run->input = op;
}
