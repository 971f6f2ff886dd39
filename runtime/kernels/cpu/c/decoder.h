/* A step of a Llama-like decoder: all layers (or some: weights may be streamed) in one parallel region, the residual stream in float32.
 *
 * A step takes `rows` tokens of any sequences at any positions. Row r belongs to sequence sequence[r], whose pages are
 * pages[sequence[r] * pages_stride ...]; rows of one sequence are consecutive and in order. Rows of a tree (parents before children)
 * have positions of their own and slots one after another; what a row sees of its tree is its path. */
typedef struct {
    Linear query, key, value, output, gate, up, down;
    const float *input_norm, *mlp_norm;
    const float *query_norm, *key_norm; /* [head_dim], or NULL */
    char *keys, *values;                /* this layer's pages */
    char *stored;                       /* those of them that are stored in fewer bits, or NULL */
    int64_t window;                     /* positions a query sees; 0: all before it */
    int64_t skip;                       /* of SKIP_ATTENTION and SKIP_MLP: what is left out */
} Block;
enum { SKIP_ATTENTION = 1, SKIP_MLP = 2 };

typedef struct {
    int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, rotary; /* rotary: how many of head_dim are rotated */
    int32_t cache_type, digits;
    float eps, scale;
    Storage storage;
    const Block *blocks;
    const float *final_norm;
    Linear head;
} Decoder;

typedef struct {
    int64_t rows, outputs, pages_stride;
    int64_t first, last; /* layers to run; the final norm and the head follow when `outputs` > 0 */
    float *x;                   /* [rows, hidden]: embeddings; overwritten */
    const int32_t *sequence;    /* [rows] */
    const int64_t *position;    /* [rows] */
    const int64_t *slot;        /* [rows]: where its keys and values are put; NULL: at its position */
    const int64_t *base, *path; /* [rows]: positions from base[r] on are at slots[path[r]], slots[path[r] + 1], ...; path[r] < 0: in order */
    const int32_t *slots;
    const int32_t *pages;       /* [sequences, pages_stride] */
    const float *cosine, *sine; /* [positions, rotary / 2] */
    const int32_t *output;      /* [outputs]: rows whose logits are wanted */
    float *logits;              /* [outputs, vocabulary] */
    float *record;              /* [layers, rows, hidden]: x after each layer that is run; NULL: nobody wants it */
    char *memory;               /* decoder_memory(...) bytes */
    const int32_t *settle;      /* [settled]: pages to be stored in fewer bits when their tokens are written */
    int32_t *broken;            /* set to 1 where that cannot hold a number */
    int64_t settled;
    const Decoder *decoder;
} Step;

typedef struct {
    float *normed, *q, *k, *v, *gate, *up;
    char *digits, *partials;
} Scratch;

static int64_t wider(const Linear *l, int64_t width) { /* of the padded input of l */
    int64_t wide = l->kind == KIND_DENSE ? 0 : (int64_t)l->group * l->groups;
    return wide > width ? wide : width;
}
static int64_t align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t lay_out(const Decoder *d, int64_t rows, char *memory, Scratch *s) {
    int64_t wide = d->heads * d->head_dim;
    for (int64_t i = 0; i < d->layers; i++) {
        const Block *b = d->blocks + i;
        const Linear *all[] = {&b->query, &b->key, &b->value, &b->output, &b->gate, &b->up, &b->down};
        for (int j = 0; j < 7; j++) wide = wider(all[j], wide);
    }
    wide = wider(&d->head, wide);
    int64_t normed = d->hidden > d->heads * d->head_dim ? d->hidden : d->heads * d->head_dim, at = 0;
    s->normed = (float *)(memory + at), at += align64(rows * normed * 4);
    s->q = (float *)(memory + at), at += align64(rows * d->heads * d->head_dim * 4);
    s->k = (float *)(memory + at), at += align64(rows * d->kv_heads * d->head_dim * 4);
    s->v = (float *)(memory + at), at += align64(rows * d->kv_heads * d->head_dim * 4);
    s->gate = (float *)(memory + at), at += align64(rows * d->intermediate * 4);
    s->up = (float *)(memory + at), at += align64(rows * d->intermediate * 4);
    s->digits = memory + at, at += align64(digits_bytes(rows, d->digits, wide, wide / 16 + 1));
    s->partials = memory + at, at += align64(attention_memory(d->head_dim));
    return at;
}
int64_t decoder_memory(const Decoder *d, int64_t rows) {
    Scratch s;
    return lay_out(d, rows, NULL, &s);
}

/* y_i = x W_i^T for several weights of one input (complete when this is entered). `add`: added to what is in y. */
static void project(const Decoder *d, const Linear *const *linear, float *const *y, int count, const float *x, int64_t rows, int add,
                    char *memory, const Team *team) {
    int group = 0;
    Digits digits;
    for (int i = 0; i < count; i++) {
        const Linear *l = linear[i];
        if (l->kind == KIND_DENSE) {
            dense_part(l, x, l->columns, rows, y[i], TYPE_F32, l->rows, add, team);
            continue;
        }
        if (l->group != group) {
            if (group) team_barrier(team); /* the others still read the last digits */
            digits = digits_in(memory, rows, d->digits, l->group, l->groups);
            quantize_rows(x, TYPE_F32, l->columns, l->columns, &digits, team);
            team_barrier(team);
            group = l->group;
        }
        integer_part(l, &digits, y[i], TYPE_F32, l->rows, add, team);
    }
}

static void norm_rows(const float *x, const float *weight, int64_t rows, int64_t n, float eps, float *out, const Team *team) {
    int64_t start, end;
    team_part(team, rows, 1, &start, &end);
    for (int64_t r = start; r < end; r++) rms_norm(x + r * n, weight, n, eps, out + r * n);
}

/* Norms of heads, rotation, and the new keys and values into their pages. */
static void place_heads(const Step *step, const Block *b, const Cache *cache, const Scratch *s, const Team *team) {
    const Decoder *d = step->decoder;
    int64_t start, end, all = d->heads + d->kv_heads, half = d->rotary / 2;
    team_part(team, step->rows * all, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        int64_t r = unit / all, head = unit % all, at = step->position[r];
        const float *cosine = step->cosine + at * half, *sine = step->sine + at * half;
        if (head < d->heads) {
            float *q = s->q + (r * d->heads + head) * d->head_dim;
            if (b->query_norm) rms_norm(q, b->query_norm, d->head_dim, d->eps, q);
            rotate(q, cosine, sine, (int)half);
        } else {
            head -= d->heads;
            float *k = s->k + (r * d->kv_heads + head) * d->head_dim;
            if (b->key_norm) rms_norm(k, b->key_norm, d->head_dim, d->eps, k);
            rotate(k, cosine, sine, (int)half);
            int64_t slot = step->slot ? step->slot[r] : at;
            int32_t page = step->pages[step->sequence[r] * step->pages_stride + slot / PAGE];
            cache_write(cache, (int)head, page, (int)(slot % PAGE), k, s->v + (r * d->kv_heads + head) * d->head_dim);
        }
    }
}

static Cache layer_cache(const Decoder *d, const Block *b) {
    return (Cache){b->keys, b->values, b->stored, d->cache_type, (int32_t)d->kv_heads, (int32_t)d->head_dim, (int32_t)d->head_dim, d->storage};
}

static void run_attention(const Step *step, const Block *b, const Scratch *s, const Team *team) {
    const Decoder *d = step->decoder;
    int64_t rows = step->rows;
    Cache cache = layer_cache(d, b);
    Attention a = {
        .cache = cache, .rows = rows, .heads = d->heads, .window = b->window, .pages_stride = step->pages_stride, .sequence = step->sequence,
        .position = step->position, .base = step->base, .path = step->slot ? step->path : NULL, .slots = step->slots, .pages = step->pages,
        .query = s->q, .out = s->normed, .scale = d->scale, .memory = s->partials,
    };
    norm_rows(step->x, b->input_norm, rows, d->hidden, d->eps, s->normed, team);
    team_barrier(team);
    project(d, (const Linear *[]){&b->query, &b->key, &b->value}, (float *[]){s->q, s->k, s->v}, 3, s->normed, rows, 0, s->digits, team);
    team_barrier(team);
    place_heads(step, b, &cache, s, team);
    team_barrier(team);
    if (step->settled) {
        store_pages(&cache, step->settle, step->settled, step->broken, team);
        team_barrier(team);
    }
    attention_part(&a, team);
    team_barrier(team);
    project(d, (const Linear *[]){&b->output}, (float *[]){step->x}, 1, s->normed, rows, 1, s->digits, team);
    team_barrier(team);
}

static void run_mlp(const Step *step, const Block *b, const Scratch *s, const Team *team) {
    const Decoder *d = step->decoder;
    int64_t start, end, rows = step->rows;
    norm_rows(step->x, b->mlp_norm, rows, d->hidden, d->eps, s->normed, team);
    team_barrier(team);
    project(d, (const Linear *[]){&b->gate, &b->up}, (float *[]){s->gate, s->up}, 2, s->normed, rows, 0, s->digits, team);
    team_barrier(team);
    team_part(team, rows * b->gate.rows, 64, &start, &end); /* layers may be of different widths */
    swiglu(s->gate + start, s->up + start, end - start);
    team_barrier(team);
    project(d, (const Linear *[]){&b->down}, (float *[]){step->x}, 1, s->gate, rows, 1, s->digits, team);
    team_barrier(team);
}

static void step_job(void *p, const Team *team) {
    Step *step = p;
    const Decoder *d = step->decoder;
    Scratch s;
    lay_out(d, step->rows, step->memory, &s);
    int64_t start, end, numbers = step->rows * d->hidden;
    for (int64_t i = step->first; i < step->last; i++) {
        const Block *b = d->blocks + i;
        if (!(b->skip & SKIP_ATTENTION)) run_attention(step, b, &s, team);
        if (!(b->skip & SKIP_MLP)) run_mlp(step, b, &s, team);
        if (step->record) {
            team_part(team, numbers, 64, &start, &end);
            memcpy(step->record + i * numbers + start, step->x + start, (size_t)(end - start) * 4);
            team_barrier(team); /* the next layer may add to x in other parts */
        }
    }
    team_part(team, step->outputs, 1, &start, &end);
    for (int64_t i = start; i < end; i++)
        rms_norm(step->x + step->output[i] * d->hidden, d->final_norm, d->hidden, d->eps, s.normed + i * d->hidden);
    team_barrier(team);
    if (step->outputs)
        project(d, (const Linear *[]){&d->head}, (float *[]){step->logits}, 1, s.normed, step->outputs, 0, s.digits, team);
}

void decoder_step(const Step *step, int32_t threads) { parallel(step_job, (void *)step, threads); }

/* Of one sequence's pages in all layers: what is at slot from[i] also to slot to[i], one after another. */
void decoder_copy(const Decoder *d, const int32_t *pages, int64_t count, const int64_t *from, const int64_t *to) {
    for (int64_t layer = 0; layer < d->layers; layer++) {
        const Block *b = d->blocks + layer;
        Cache cache = layer_cache(d, b);
        for (int64_t i = 0; i < count; i++) cache_copy(&cache, pages, from[i], to[i]);
    }
}
