/* The operations of a program, each the work of one thread of a team. */
static void norm_row(const float *x, const float *weight, const float *bias, int layer, float eps, int64_t n, int add, float *out) {
    float mean = layer ? plain_sum(x, n) / (float)n : 0.0f;
    float scale = 1.0f / sqrtf((layer ? deviation_sum(x, mean, n) : square_sum(x, n)) / (float)n + eps);
    if (!layer && !bias && weight && !add) {
        for (int64_t i = 0; i < n; i++) out[i] = weight[i] * (x[i] * scale);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float value = ((x[i] - mean) * scale) * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f);
        out[i] = add ? out[i] + value : value;
    }
}

static void run_norm(Run *run, const Op *op, const Team *team) {
    const NormOp *norm = &op->norm;
    int64_t start, end;
    settle(run, BIT(op->from), BIT(op->to), team);
    team_part(team, run->rows, 1, &start, &end);
    for (int64_t r = start; r < end; r++)
        norm_row(row_of(run, op->from, op->from_at, r), norm->weight, norm->bias, norm->layer, norm->eps, op->count, op->add,
                 row_of(run, op->to, op->to_at, r));
}

static void run_linear(Run *run, const Op *op, const Team *team) {
    const Linear *l = &op->linear;
    float *y = row_of(run, op->to, op->to_at, 0);
    int64_t apart = run->width[op->to];
    if (l->kind == KIND_DENSE && run->rows <= FEW_ROWS && !l->rounding.kind && !has_basis(&l->basis)) {
        settle(run, BIT(op->from), BIT(op->to), team);
        dense_part(l, row_of(run, op->from, op->from_at, 0), run->width[op->from], run->rows, y, TYPE_F32, apart, op->add, team);
        return;
    }
    prepare_input(run, op, team);
    settle(run, INPUT_BIT, BIT(op->to), team);
    if (l->kind == KIND_DENSE && run->rows <= FEW_ROWS)
        dense_part(l, run->numbers, run->apart, run->rows, y, TYPE_F32, apart, op->add, team);
    else if (l->kind == KIND_DENSE) gemm_part(l, (const float *)run->memory, run->rows, y, TYPE_F32, apart, op->add, team);
    else integer_part(l, &run->digits, y, TYPE_F32, apart, op->add, team);
}

/* A head of a query in place, or the key that is to be written, normed and rotated. */
static void turn_head(const Run *run, const HeadsOp *heads, const float *norm, int64_t apart, int64_t head, int64_t at, float *x) {
    int64_t half = heads->rotary / 2;
    if (norm) norm_row(x, norm + head * apart, NULL, heads->layer, heads->eps, run->decoder->head_dim, 0, x);
    if (!half) return;
    const float *const *tables = run->step->tables + 2 * heads->rotation;
    (heads->pairs ? rotate_pairs : rotate)(x + heads->rotary_at, tables[0] + at * half, tables[1] + at * half, (int)half);
}

static Cache cache_of(const Decoder *d, const Block *b) {
    Cache c = {b->keys, b->values, b->stored, d->cache_type, (int32_t)d->kv_heads, (int32_t)d->head_dim, (int32_t)d->value_dim, d->storage, b->bounds};
    if (!b->stored) c.storage.plain_at = NULL; /* beside others that are, this layer has all its pages plain */
    return c;
}

static void run_heads(Run *run, const Op *op, const Team *team) {
    const HeadsOp *heads = &op->heads;
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    Cache cache = cache_of(d, run->block);
    int64_t start, end, all = d->heads + d->kv_heads, size = d->head_dim, own = heads->rest.buffer < 0 ? size : heads->rotary_at;
    float key[size];
    settle(run, BIT(heads->query.buffer) | BIT(heads->key.buffer) | BIT(heads->value.buffer) | (own < size ? BIT(heads->rest.buffer) : 0),
           BIT(op->to) | CACHE_BIT, team);
    team_part(team, run->rows * all, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        int64_t r = unit / all, head = unit % all, at = step->rotary[r];
        if (head < d->heads) {
            float *query = row_of(run, op->to, op->to_at + head * size, r);
            memcpy(query, head_of(run, &heads->query, r, head), (size_t)size * 4);
            turn_head(run, heads, heads->query_norm, heads->query_apart, head, at, query);
            continue;
        }
        head -= d->heads;
        memcpy(key, head_of(run, &heads->key, r, head), (size_t)own * 4);
        if (own < size) memcpy(key + own, head_of(run, &heads->rest, r, head), (size_t)(size - own) * 4);
        turn_head(run, heads, heads->key_norm, heads->key_apart, head, at, key);
        int64_t slot = step->slot ? step->slot[r] : step->position[r];
        int32_t page = step->pages[step->sequence[r] * step->pages_stride + slot / PAGE];
        cache_write(&cache, plain_block(&cache, (int)head, page), (int)(slot % PAGE), key, head_of(run, &heads->value, r, head));
    }
}

/* The layer before this one, which all threads have left, has read its stored pages. */
static void forget_records(const Decoder *d, const Block *b) {
    while (d->storage.advise && b-- > d->blocks) {
        if (!b->stored) continue;
        d->storage.advise(b->stored, (size_t)d->storage.mapped, ADVICE_FORGET);
        return;
    }
}

static Attention attention_of(const Run *run, const Op *op) {
    const Step *step = run->step;
    return (Attention){
        .cache = cache_of(run->decoder, run->block), .rows = run->rows, .heads = run->decoder->heads, .window = op->attend.window,
        .pages_stride = step->pages_stride, .sequence = run->sequence, .position = run->position, .base = run->base,
        .path = step->slot ? run->path : NULL, .slots = step->slots, .pages = step->pages, .query = row_of(run, op->from, 0, 0),
        .out = row_of(run, op->to, 0, 0), .sinks = op->attend.sinks, .scale = op->attend.scale, .softcap = op->attend.softcap,
        .memory = run->partials, .ragged = step->ragged, .layer = run->block - run->decoder->blocks,
    };
}

static void run_attend(Run *run, const Op *op, const Team *team) {
    const Step *step = run->step;
    Attention a = attention_of(run, op);
    settle(run, CACHE_BIT | BIT(op->from), BIT(op->to), team);
    if (team->index == 0) forget_records(run->decoder, run->block);
    int64_t start, end, width = run->width[op->from];
    team_part(team, step->observed_count, 1, &start, &end);
    for (int64_t i = start; i < end; i++)
        memcpy(step->queries + (a.layer * step->observed_count + i) * width, row_of(run, op->from, 0, step->observed[i]), (size_t)width * 4);
    int written = a.cache.stored && step->stored_count;
    if (written) store_pages(&a.cache, step->stored, step->stored_count, step->broken, team);
    if (a.cache.bounds) written |= bounds_part(&a, step->slot ? step->slot : step->position, step->stored, step->stored_count, team);
    if (written) team_barrier(team);
    if (step->narrow && a.layer + 1 == run->decoder->layers && step->outputs < run->rows) {
        narrow_rows(run, team);
        a = attention_of(run, op);
    }
    if (a.cache.bounds && run->budget) {
        choose_part(&a, run->budget, step->newest, step->chosen, team);
        a.chosen = step->chosen;
        team_barrier(team);
    }
    attention_part(&a, team);
}

/* Of `count` numbers in every row, this member's, row by row. */
#define EACH_PART(RUN, COUNT)                                                                                \
    int64_t start, end;                                                                                      \
    team_part(team, (RUN)->rows * (COUNT), 64, &start, &end);                                                \
    for (int64_t r = start / (COUNT), first = start % (COUNT), last; start < end; start += last - first, r++, first = 0) \
        if (last = (COUNT) - first < end - start ? (COUNT) : first + end - start, last > first)

static void run_gate(Run *run, const Op *op, const Team *team) {
    const GateOp *gate = &op->gate;
    settle(run, gate->other < 0 ? 0 : BIT(gate->other), BIT(op->from), team);
    EACH_PART(run, op->count) {
        float *x = row_of(run, op->from, op->from_at + first, r);
        activate(gate->activation, x, gate->other < 0 ? NULL : row_of(run, gate->other, gate->other_at + first, r), last - first);
    }
}

static void run_add(Run *run, const Op *op, const Team *team) {
    settle(run, BIT(op->from), BIT(op->to), team);
    EACH_PART(run, op->count) {
        const float *x = row_of(run, op->from, op->from_at + first, r);
        float *y = row_of(run, op->to, op->to_at + first, r);
        for (int64_t i = 0; i < last - first; i++) y[i] += op->scale * x[i];
    }
}

static void run_cap(Run *run, const Op *op, const Team *team) {
    settle(run, 0, BIT(op->to), team);
    EACH_PART(run, op->count) {
        float *y = row_of(run, op->to, op->to_at + first, r);
        for (int64_t i = 0; i < last - first; i++) y[i] *= op->scale;
        if (op->cap > 0.0f)
            for (int64_t i = 0; i < last - first; i++) y[i] = op->cap * tanh_fast(y[i] / op->cap);
    }
}

static void run_mixture(Run *run, const Op *op, const Team *team) {
    const MixtureOp *mixture = &op->mixture;
    settle(run, BIT(op->from), EXPERTS_BIT | BIT(op->to), team);
    mixture_part(mixture->router, mixture->experts, row_of(run, op->from, op->from_at, 0), run->width[op->from], run->rows,
                 row_of(run, op->to, op->to_at, 0), run->width[op->to], op->add, run->experts, team);
    run->read = EXPERTS_BIT, run->written = BIT(op->to); /* since its last barrier */
}

static void run_weigh(Run *run, const Op *op, const Team *team) {
    settle(run, BIT(op->from), BIT(op->to), team);
    EACH_PART(run, op->count) {
        float *y = row_of(run, op->to, op->to_at + first, r), weight = 1.0f / (1.0f + exp_fast(-*row_of(run, op->from, op->from_at, r)));
        for (int64_t i = 0; i < last - first; i++) y[i] *= weight;
    }
}
