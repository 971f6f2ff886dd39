/* A step of a decoder: the programs of all layers (or some: weights may be streamed) in one parallel region, then the tail. */

/* Bytes of what operations of a kind want, which all layers and the tail share. */
static int64_t bytes_of(const Decoder *d, int kind, int64_t rows) {
    int64_t most = 0;
    for (int64_t i = 0; i <= d->layers; i++) {
        const Op *ops = i < d->layers ? d->blocks[i].ops : d->tail;
        for (int64_t j = 0; j < (i < d->layers ? d->blocks[i].count : d->tail_count); j++) {
            if (ops[j].kind != kind) continue;
            int64_t bytes = kind == OP_MIXTURE ? mixture_memory(ops[j].mixture.router, ops[j].mixture.experts, rows)
                                               : input_memory(&ops[j].linear, rows);
            most = bytes > most ? bytes : most;
        }
    }
    return most;
}

static int64_t lay_out(const Decoder *d, int64_t rows, char *memory, Run *run) {
    int64_t at = 0;
    for (int64_t i = LOGITS + 1; i < d->buffers; i++) {
        run->width[i] = d->widths[i];
        run->buffer[i] = memory_part(memory, &at, rows * d->widths[i] * 4);
    }
    run->memory = memory_part(memory, &at, bytes_of(d, OP_LINEAR, rows));
    run->partials = memory_part(memory, &at, attention_memory(d->value_dim));
    run->experts = memory_part(memory, &at, bytes_of(d, OP_MIXTURE, rows));
    run->kept = memory_part(memory, &at, narrow_memory(rows));
    return at;
}
int64_t decoder_memory(const Decoder *d, int64_t rows) {
    Run run;
    return lay_out(d, rows, NULL, &run);
}

static void run_ops(Run *run, const Op *ops, int64_t count, int64_t skip, const Team *team) {
    static void (*const of[])(Run *, const Op *, const Team *) = {run_norm, run_linear, run_heads, run_attend, run_gate, run_add, run_cap,
                                                                         run_mixture, run_weigh};
    for (int64_t i = 0; i < count; i++)
        if (!(ops[i].half & skip)) of[ops[i].kind](run, ops + i, team);
}

static void step_job(void *p, const Team *team) {
    Step *step = p;
    const Decoder *d = step->decoder;
    Run run = {.step = step, .decoder = d, .rows = step->rows, .sequence = step->sequence, .position = step->position, .base = step->base,
               .path = step->path, .budget = step->budget};
    lay_out(d, step->rows, step->memory, &run);
    run.buffer[STREAM] = step->x, run.width[STREAM] = d->hidden;
    run.buffer[LOGITS] = step->logits, run.width[LOGITS] = d->widths[LOGITS];
    int64_t start, end, numbers = step->rows * d->hidden;
    for (int64_t i = step->first; i < step->last; i++) {
        run.block = d->blocks + i;
        run_ops(&run, run.block->ops, run.block->count, run.block->skip, team);
        if (!step->record) continue;
        settle(&run, BIT(STREAM), 0, team);
        team_part(team, numbers, 64, &start, &end);
        memcpy(step->record + i * numbers + start, step->x + start, (size_t)(end - start) * 4);
    }
    if (!step->outputs) return;
    if (run.rows > step->outputs || !step->narrow) { /* the rows whose logits are wanted, side by side in the last buffer */
        int64_t last = d->buffers - 1;
        settle(&run, BIT(STREAM), BIT(last), team);
        team_part(team, step->outputs, 1, &start, &end);
        for (int64_t i = start; i < end; i++)
            memcpy(row_of(&run, (int)last, 0, i), row_of(&run, STREAM, 0, step->output[i]), (size_t)d->hidden * 4);
        run.rows = step->outputs, run.buffer[STREAM] = run.buffer[last];
        run.written |= BIT(STREAM), run.input = NULL;
    }
    run_ops(&run, d->tail, d->tail_count, 0, team);
}

void decoder_step(const Step *step, int32_t threads) { parallel_adaptive(step_job, (void *)step, threads); }

/* Of one sequence, `cache_copy` in all layers. `apart`: numbers from one head's `from`, and `to`, to the next one's; 0: all heads have the
 * same. `counts`: of each head, no more than `apart`; NULL: `count`. `old`, `new`: see `Step.ragged`. `before`, `after`: in pages
 * of the sequence. `broken` is set to 1 where the storage cannot hold a number. */
typedef struct {
    const Decoder *decoder;
    const int32_t *pages, *into;
    const Ragged *old, *new;
    int64_t count, apart, before, after;
    const int64_t *counts, *from, *to;
    int32_t *broken;
} CopyOrder;
static void copy_job(void *p, const Team *team) {
    const CopyOrder *o = p;
    int64_t start, end, heads = o->decoder->kv_heads;
    team_part(team, o->decoder->layers * heads, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        Cache cache = cache_of(o->decoder, o->decoder->blocks + unit / heads);
        const HeadPages old = head_pages(o->pages, o->old, unit / heads, heads, (int)(unit % heads)),
                        new = head_pages(o->into, o->new, unit / heads, heads, (int)(unit % heads));
        const int64_t count = o->counts ? o->counts[unit] : o->count, *to = o->to + unit * o->apart;
        if (!cache_copy(&cache, &old, &new, count, o->from + unit * o->apart, to, o->before + old.shift, o->after + new.shift)) *o->broken = 1;
        if (cache.bounds) bound_copied(&cache, (int)(unit % heads), o->into, count, to, o->after); /* where all heads see the same pages */
    }
}
void decoder_copy(const CopyOrder *order, int32_t threads) { parallel(copy_job, (void *)order, threads); }

/* What every token of a sequence gets of the attention of some of its queries: sums [layers, kv_heads, slots] += weights, by positions as
 * heads count them, in all layers whose queries see all. query: [layers, rows, heads, head_dim], rotated, of the tokens at position[rows]
 * in the pages of the sequence, in order. `memory`: received_memory bytes. */
typedef struct {
    const Decoder *decoder;
    const int32_t *pages;
    const Ragged *ragged; /* see `Step.ragged` */
    int64_t rows, slots;
    const int64_t *hidden; /* [layers, kv_heads]: before these positions queries see nothing; NULL: they see all */
    const int64_t *position;
    const float *query;
    float *sums;
    char *memory;
} ReceivedOrder;
static void received_job(void *p, const Team *team) {
    const ReceivedOrder *o = p;
    const Decoder *d = o->decoder;
    int64_t start, end;
    team_part(team, d->layers * d->kv_heads, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        const int64_t layer = unit / d->kv_heads;
        const Block *block = d->blocks + layer;
        const Op *op = block->ops;
        while (op->kind != OP_ATTEND) op++;
        if (op->attend.window) continue;
        Attention a = {
            .cache = cache_of(d, block), .rows = o->rows, .heads = d->heads, .position = o->position,
            .query = o->query + layer * o->rows * d->heads * d->head_dim, .sinks = op->attend.sinks,
            .scale = op->attend.scale, .softcap = op->attend.softcap,
        };
        const HeadPages pages = head_pages(o->pages, o->ragged, layer, d->kv_heads, (int)(unit % d->kv_heads));
        float *score = (float *)o->memory + team->index * MOST_BLOCK * o->slots;
        attention_received(&a, &pages, o->hidden ? o->hidden[unit] : 0, o->slots, score, o->sums + unit * o->slots);
    }
}
/* Bytes; `slots` is a multiple of PAGE, and all positions are below. */
int64_t received_memory(int64_t slots, int32_t threads) { return threads * MOST_BLOCK * slots * 4; }
void decoder_received(const ReceivedOrder *order, int32_t threads) { parallel(received_job, (void *)order, threads); }

/* Keys and values of tokens of one sequence in a layer, as queries at `before` see them. */
typedef struct {
    const Decoder *decoder;
    const int32_t *pages;
    const Ragged *ragged; /* see `Step.ragged` */
    int64_t layer, count, before; /* before: in pages of the sequence */
    const int64_t *from;  /* [kv_heads, count]: positions, as heads count */
    float *keys, *values; /* [kv_heads, count, head_dim], [kv_heads, count, value_dim] */
} TokensOrder;
static void tokens_job(void *p, const Team *team) {
    const TokensOrder *o = p;
    const Decoder *d = o->decoder;
    const Cache cache = cache_of(d, d->blocks + o->layer);
    int64_t start, end;
    team_part(team, d->kv_heads * o->count, PAGE, &start, &end);
    for (int64_t i = start; i < end; i++) {
        const HeadPages pages = head_pages(o->pages, o->ragged, o->layer, d->kv_heads, (int)(i / o->count));
        cache_read(&cache, &pages, o->from[i], o->before + pages.shift, o->keys + i * d->head_dim, o->values + i * d->value_dim);
    }
}
void decoder_tokens(const TokensOrder *order, int32_t threads) { parallel(tokens_job, (void *)order, threads); }
