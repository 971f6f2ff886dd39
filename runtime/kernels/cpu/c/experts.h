/* Mixtures of experts: which experts a token goes to, and what these make of it. Only their weights are read.
 *
 * (token, expert) pairs are sorted by expert, so that each weight is read once for all its tokens. The products of all chosen experts
 * are one pool of work that threads divide between barriers. What a token gets is added up in float32 in the order of the experts'
 * numbers: the same bits alone, in any batch, and with any number of threads. */
typedef struct { Linear gate, up, down; } Expert;

enum { GATE_NONE_SILU = 0, GATE_SILU = 1, GATE_CLAMPED = 2 };

/* What layers of all experts read: integer ones (groups > 0: there are some) the same digits, dense ones numbers. */
typedef struct {
    Input input;
    int64_t dense;
} Reading;

typedef struct {
    const Expert *expert;           /* [count], of one shape */
    int64_t count, hidden, inner;
    Reading first, second;          /* of gate and up, and of down */
    int32_t own_scales;             /* experts have static scales of their own for what they read */
    int32_t activation;             /* silu(up) | silu(gate) up | (up + 1) gate sigmoid(alpha gate), both held within +-limit */
    float alpha, limit;
} Experts;

/* Scores: softmax over all experts, softmax over the chosen, or sigmoid. The highest (with `correction` added, which weights nothing)
 * are chosen, those of the `best` groups of experts whose two highest scores add up to the most; of equal ones the first, and NaN is
 * the highest. */
enum { SCORE_SOFTMAX = 0, SCORE_CHOSEN = 1, SCORE_SIGMOID = 2 };
typedef struct {
    Linear logits;                  /* [experts, hidden], dense */
    int32_t score, chosen, groups, best, normalize;
    float epsilon, scale;           /* normalize: divided by the sum + epsilon; then multiplied by scale */
    const float *correction;        /* [experts] or NULL */
} Router;

/* Pairs in the order of experts, and what each reads. A lone token's experts share its one row. */
typedef struct {
    int64_t *index;                 /* [rows, chosen]: experts of each token; numbers that are none are left out */
    float *weight;                  /* [rows, chosen] */
    int64_t *first;                 /* [count + 1]: pairs of each expert */
    int64_t *own;                   /* [rows, chosen]: a token's pairs, in the order of experts; -1 after the last */
    int64_t *source;                /* [pairs]: place in `index` and `weight` */
    float *x, *gate, *up, *out;     /* [pairs, hidden] (dense layers read it), [pairs, inner] twice, [pairs, hidden] */
    char *first_digits, *second_digits;
    int64_t rows, chosen;
} Routed;

static int64_t reading_bytes(const Reading *r, int64_t pairs) { return r->input.groups ? digits_bytes(pairs, &r->input) : 0; }

/* Where everything lies in `memory`; bytes in all. */
static int64_t route_memory(const Experts *e, int64_t rows, int64_t chosen, char *memory, Routed *r) {
    int64_t pairs = rows * chosen, at = 0;
    r->rows = rows, r->chosen = chosen;
    r->index = memory_part(memory, &at, pairs * 8);
    r->weight = memory_part(memory, &at, pairs * 4);
    r->first = memory_part(memory, &at, e->count * 8 + 8);
    r->own = memory_part(memory, &at, pairs * 8);
    r->source = memory_part(memory, &at, pairs * 8);
    r->x = memory_part(memory, &at, pairs * e->hidden * 4);
    r->gate = memory_part(memory, &at, pairs * e->inner * 4);
    r->up = memory_part(memory, &at, pairs * e->inner * 4);
    r->out = memory_part(memory, &at, pairs * e->hidden * 4);
    r->first_digits = memory_part(memory, &at, reading_bytes(&e->first, pairs));
    r->second_digits = memory_part(memory, &at, reading_bytes(&e->second, pairs));
    return at;
}

static inline int higher(float a, float b) { return a > b || (a != a && b == b); }

/* The `chosen` highest of n values, highest first, into `index`. */
static void highest(const float *value, int64_t n, int64_t chosen, int64_t *index) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t at = found < chosen ? found++ : chosen;
        while (at > 0 && higher(value[i], value[index[at - 1]])) {
            if (at < chosen) index[at] = index[at - 1];
            at--;
        }
        if (at < chosen) index[at] = i;
    }
}

static void softmax(float *value, int64_t n) {
    float most = value[0], sum = 0.0f;
    for (int64_t i = 1; i < n; i++)
        if (higher(value[i], most)) most = value[i];
    for (int64_t i = 0; i < n; i++) sum += value[i] = exp_fast(value[i] - most);
    for (int64_t i = 0; i < n; i++) value[i] /= sum;
}

/* Experts of one token and their weights; `logits` [n] is overwritten, `work` has room for 2 n. */
static void choose_experts(const Router *r, float *logits, int64_t n, float *work, int64_t *index, float *weight) {
    float *choice = logits;
    if (r->score == SCORE_SOFTMAX) softmax(logits, n);
    if (r->score == SCORE_SIGMOID)
        for (int64_t i = 0; i < n; i++) logits[i] = 1.0f / (1.0f + exp_fast(-logits[i]));
    if (r->correction || r->groups > 1) {
        choice = work;
        for (int64_t i = 0; i < n; i++) choice[i] = logits[i] + (r->correction ? r->correction[i] : 0.0f);
    }
    if (r->groups > 1) {
        const int64_t size = n / r->groups;
        float *group = work + n;
        int64_t two[2];
        for (int64_t g = 0; g < r->groups; g++) {
            highest(choice + g * size, size, size < 2 ? size : 2, two);
            group[g] = choice[g * size + two[0]] + (size < 2 ? 0.0f : choice[g * size + two[1]]);
        }
        for (int64_t g = 0; g < r->groups; g++) {
            int64_t before = 0; /* groups that are chosen earlier */
            for (int64_t i = 0; i < r->groups; i++) before += i < g ? !higher(group[g], group[i]) : higher(group[i], group[g]);
            for (int64_t i = g * size; before >= r->best && i < (g + 1) * size; i++) choice[i] = -INFINITY;
        }
    }
    highest(choice, n, r->chosen, index);
    for (int64_t i = 0; i < r->chosen; i++) weight[i] = logits[index[i]];
    if (r->score == SCORE_CHOSEN) softmax(weight, r->chosen);
    float sum = r->epsilon;
    for (int64_t i = 0; r->normalize && i < r->chosen; i++) sum += weight[i];
    for (int64_t i = 0; i < r->chosen; i++) weight[i] = (r->normalize ? weight[i] / sum : weight[i]) * r->scale;
}

/* Counting sort of the pairs by expert; tokens of an expert stay in order. One thread does it. */
static void sort_pairs(const Experts *e, Routed *r) {
    const int64_t pairs = r->rows * r->chosen;
    memset(r->first, 0, (size_t)(e->count + 1) * 8);
    for (int64_t i = 0; i < pairs; i++)
        if (r->index[i] >= 0 && r->index[i] < e->count) r->first[r->index[i] + 1]++;
    for (int64_t i = 0; i < e->count; i++) r->first[i + 1] += r->first[i];
    for (int64_t i = 0; i < pairs; i++) /* moves each beginning to the end, which is the next one's beginning */
        if (r->index[i] >= 0 && r->index[i] < e->count) r->source[r->first[r->index[i]]++] = i;
    memmove(r->first + 1, r->first, (size_t)e->count * 8), r->first[0] = 0;
    for (int64_t i = 0; i < pairs; i++) r->own[i] = -1;
    for (int64_t p = 0; p < r->first[e->count]; p++) {
        int64_t *own = r->own + r->source[p] / r->chosen * r->chosen;
        while (*own >= 0) own++;
        *own = p;
    }
}

/* Whether all pairs read one row: a lone token, every expert at most once. */
static int one_row(const Experts *e, const Routed *r) {
    int64_t most = 0;
    for (int64_t i = 0; i < e->count && r->rows == 1; i++)
        most = r->first[i + 1] - r->first[i] > most ? r->first[i + 1] - r->first[i] : most;
    return r->rows == 1 && most <= 1 && !e->own_scales;
}

static const Rounding *rounding_of(const Experts *e, int64_t expert, int down) {
    return down ? &e->expert[expert].down.rounding : &e->expert[expert].up.rounding;
}
/* Digits of `count` pairs from `first` on, those of one expert, in the memory of all. */
static Digits pair_digits(const Experts *e, const Routed *r, int down, int64_t expert, int64_t first, int64_t count) {
    const Reading *reading = down ? &e->second : &e->first;
    const int64_t each = reading_bytes(reading, 1) - reading_bytes(reading, 0);
    Digits found = digits_in((down ? r->second_digits : r->first_digits) + first * each, count, &reading->input);
    found.rounding = *rounding_of(e, expert, down);
    return found;
}
/* Digits of the expert that has pair p, and in `row` the pair's place in them. */
static Digits digits_of_pair(const Experts *e, const Routed *r, int down, int64_t p, int64_t *row) {
    const int64_t expert = r->index[r->source[p]], first = r->first[expert];
    *row = p - first;
    return pair_digits(e, r, down, expert, first, r->first[expert + 1] - first);
}

/* Rows of the pairs side by side, as numbers for dense layers and as digits for the others. */
static void gather_pairs(const Experts *e, const Routed *r, const void *x, int type, int64_t apart, int shared, const Team *team) {
    const int64_t hidden = e->hidden;
    int64_t start, end, pairs = r->first[e->count];
    if (pairs > 1 && shared) pairs = 1;
    if (e->first.input.groups) {
        const int64_t groups = e->first.input.groups;
        Grid cached = {.at = -1};
        team_part(team, pairs * groups, 1, &start, &end);
        for (int64_t unit = start; unit < end; unit++) {
            int64_t p = unit / groups, row = r->source[p] / r->chosen, place;
            if (e->own_scales && unit % groups == 0) cached.at = -1; /* another expert makes other scales of the same row */
            const Digits digits = digits_of_pair(e, r, 0, p, &place);
            quantize(x, type, row * apart, hidden, &digits, place, unit % groups, &cached);
        }
    }
    if (!e->first.dense) return;
    team_part(team, pairs, 1, &start, &end);
    for (int64_t p = start; p < end; p++) {
        Grid cached = {.at = -1};
        round_numbers(x, type, r->source[p] / r->chosen * apart, hidden, 0, hidden, rounding_of(e, r->index[r->source[p]], 0), &cached, r->x + p * hidden);
    }
}

static float clamped_gate(const Experts *e, float gate, float up) {
    gate = gate > e->limit ? e->limit : gate;
    up = up > e->limit ? e->limit : up < -e->limit ? -e->limit : up;
    return (up + 1.0f) * (gate / (1.0f + exp_fast(-e->alpha * gate)));
}

/* Digits of pair p for down, out of r->gate. */
static void quantize_pair(const Experts *e, const Routed *r, int64_t p, int64_t g, Grid *cached) {
    int64_t place;
    const Digits digits = digits_of_pair(e, r, 1, p, &place);
    quantize(r->gate, TYPE_F32, p * e->inner, e->inner, &digits, place, g, cached);
}

/* The gate over both first products, into r->gate, and its digits for down. */
static void activate_pairs(const Experts *e, const Routed *r, const Team *team) {
    const int64_t pairs = r->first[e->count], inner = e->inner, groups = e->second.input.groups, step = groups ? e->second.input.group : 256;
    const int64_t steps = groups ? groups : (inner + step - 1) / step;
    const int whole = e->second.input.rounding.kind != ROUND_NOT; /* rows are complete before they are rounded */
    Grid cached = {.at = -1};
    int64_t start, end;
    team_part(team, pairs * steps, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        int64_t p = unit / steps, g = unit % steps, from = g * step;
        int count = (int)(inner - from < step ? inner - from : step);
        if (count < 0) count = 0;
        float *gate = r->gate + p * inner + from, *up = r->up + p * inner + from;
        if (e->activation == GATE_CLAMPED)
            for (int i = 0; i < count; i++) gate[i] = clamped_gate(e, gate[i], up[i]);
        else if (e->activation == GATE_SILU) activate(ACT_SILU, gate, up, count);
        else {
            memcpy(gate, up, (size_t)count * 4);
            activate(ACT_SILU, gate, NULL, count);
        }
        if (groups && !whole) quantize_pair(e, r, p, g, &cached);
    }
    if (!whole) return;
    team_barrier(team);
    for (int64_t unit = start; unit < end && groups; unit++) quantize_pair(e, r, unit / steps, unit % steps, &cached);
    if (!e->second.dense) return;
    if (groups) team_barrier(team); /* rows are rounded in place */
    team_part(team, pairs, 1, &start, &end);
    for (int64_t p = start; p < end; p++) {
        Grid cached = {.at = -1};
        round_numbers(r->gate + p * inner, TYPE_F32, 0, inner, 0, inner, rounding_of(e, r->index[r->source[p]], 1), &cached, r->gate + p * inner);
    }
}

#define UNIT 2 /* panels of a weight that one thread multiplies by */

/* This member's share of one kind of product of all experts that have pairs. Work is counted in bytes and multiplications: a unit costs
 * what it takes to read it, and more with every row. */
static void multiply_pairs(const Experts *e, const Routed *r, int down, int shared, const Team *team) {
    const int64_t columns = down ? e->inner : e->hidden, rows = down ? e->hidden : e->inner;
    const int64_t units = (rows + UNIT * PANEL - 1) / (UNIT * PANEL), reading = 3; /* a guess, not measured */
    const int layers = down || e->activation == GATE_NONE_SILU ? 1 : 2;
    int64_t total = 0, at = 0;
    for (int64_t i = 0; i < e->count; i++)
        if (r->first[i + 1] > r->first[i]) total += layers * units * (reading + r->first[i + 1] - r->first[i]);
    const int64_t from = total * team->index / team->count, until = total * (team->index + 1) / team->count;
    for (int64_t i = 0; i < e->count && at < until; i++) {
        const int64_t p = r->first[i], pairs = r->first[i + 1] - p, cost = reading + pairs;
        if (!pairs) continue;
        for (int layer = 0; layer < layers; layer++, at += units * cost) {
            const Linear *l = down ? &e->expert[i].down : layer ? &e->expert[i].gate : &e->expert[i].up;
            float *y = down ? r->out + p * rows : (layer ? r->gate : r->up) + p * rows;
            int64_t first = from > at ? (from - at + cost - 1) / cost : 0, last = (until - at + cost - 1) / cost;
            if (last > units) last = units;
            const int dense = l->kind == KIND_DENSE;
            const Digits mine = dense ? (Digits){0} : pair_digits(e, r, down, i, shared ? 0 : p, pairs);
            const float *x = (down ? r->gate : r->x) + (shared ? 0 : p * columns);
            for (int64_t unit = first; unit < last; unit++) {
                const Team one = {(int)unit, (int)units}; /* the unit is what that member of so many would do */
                if (dense) dense_part(l, x, columns, pairs, y, TYPE_F32, rows, 0, &one);
                else integer_part(l, &mine, y, TYPE_F32, rows, 0, &one);
            }
        }
    }
}

/* y [rows, hidden] (+)= the weighted sum of what a token's experts gave, in the order of their numbers. */
static void sum_pairs(const Experts *e, const Routed *r, void *y, int type, int64_t apart, int add, const Team *team) {
    const int64_t hidden = e->hidden, step = 256, steps = (hidden + step - 1) / step;
    int64_t start, end;
    float total[256];
    team_part(team, r->rows * steps, 1, &start, &end);
    for (int64_t unit = start; unit < end; unit++) {
        int64_t row = unit / steps, from = unit % steps * step;
        int count = (int)(hidden - from < step ? hidden - from : step);
        for (int i = 0; i < count; i++) total[i] = 0.0f;
        for (int64_t k = row * r->chosen; k < (row + 1) * r->chosen && r->own[k] >= 0; k++) {
            const float *out = r->out + r->own[k] * hidden + from, weight = r->weight[r->source[r->own[k]]];
            for (int i = 0; i < count; i++) total[i] += out[i] * weight;
        }
        put_row(y, type, row * apart + from, total, NULL, count, add);
    }
}

/* y (+)= what the experts in r->index make of x [rows, hidden], weighted; r->index and r->weight are complete when this is entered. */
static void experts_part(const Experts *e, Routed *r, const void *x, int type, int64_t x_apart, void *y, int y_type, int64_t y_apart,
                         int add, const Team *team) {
    if (team->index == 0) sort_pairs(e, r);
    team_barrier(team);
    const int shared = one_row(e, r);
    gather_pairs(e, r, x, type, x_apart, shared, team);
    team_barrier(team);
    multiply_pairs(e, r, 0, shared, team);
    team_barrier(team);
    activate_pairs(e, r, team);
    team_barrier(team);
    multiply_pairs(e, r, 1, 0, team);
    team_barrier(team);
    sum_pairs(e, r, y, y_type, y_apart, add, team);
}

/* Experts and weights of every token into r. `logits` has room for rows x 3 x experts; complete after the next barrier. */
static void route_part(const Router *router, const float *x, int64_t apart, float *logits, Routed *r, const Team *team) {
    const int64_t n = router->logits.rows;
    int64_t start, end;
    dense_part(&router->logits, x, apart, r->rows, logits, TYPE_F32, 3 * n, 0, team);
    team_barrier(team);
    team_part(team, r->rows, 1, &start, &end);
    for (int64_t row = start; row < end; row++) {
        float *mine = logits + row * 3 * n;
        choose_experts(router, mine, n, mine + n, r->index + row * r->chosen, r->weight + row * r->chosen);
    }
}

/* Bytes that mixture_part wants. */
static int64_t mixture_memory(const Router *router, const Experts *e, int64_t rows) {
    Routed r;
    return route_memory(e, rows, router->chosen, NULL, &r) + rows * 3 * e->count * 4;
}
/* y (+)= what experts make of x; rows of x and y are so many numbers apart. */
static void mixture_part(const Router *router, const Experts *e, const float *x, int64_t x_apart, int64_t rows, float *y, int64_t y_apart,
                         int add, char *memory, const Team *team) {
    Routed r;
    float *logits = (float *)(memory + route_memory(e, rows, router->chosen, memory, &r));
    route_part(router, x, x_apart, logits, &r, team);
    team_barrier(team);
    experts_part(e, &r, x, TYPE_F32, x_apart, y, TYPE_F32, y_apart, add, team);
}

typedef struct {
    const Experts *experts;
    const Router *router;
    const int64_t *index;
    const void *x;
    const float *weight;
    void *y;
    char *memory;
    int64_t rows, chosen;
    int32_t x_type, y_type;
} ExpertsJob;

static void experts_job(void *p, const Team *team) {
    const ExpertsJob *job = p;
    Routed r;
    route_memory(job->experts, job->rows, job->chosen, job->memory, &r);
    r.index = (int64_t *)job->index, r.weight = (float *)job->weight; /* only read */
    const int64_t hidden = job->experts->hidden;
    experts_part(job->experts, &r, job->x, job->x_type, hidden, job->y, job->y_type, hidden, 0, team);
}

int64_t experts_memory(const Experts *e, int64_t rows, int64_t chosen) {
    Routed r;
    return route_memory(e, rows, chosen, NULL, &r);
}
/* x [rows, hidden] -> y of the same shape; `index` and `weight` [rows, chosen]: each token's experts. */
void experts_run(const Experts *e, const void *x, int32_t x_type, int64_t rows, int64_t chosen, const int64_t *index,
                 const float *weight, void *y, int32_t y_type, char *memory, int32_t threads) {
    ExpertsJob job = {e, NULL, index, x, weight, y, memory, rows, chosen, x_type, y_type};
    parallel_adaptive(experts_job, &job, threads);
}

static void router_job(void *p, const Team *team) {
    const ExpertsJob *job = p;
    Routed r = {.index = (int64_t *)job->index, .weight = (float *)job->weight, .rows = job->rows, .chosen = job->chosen};
    route_part(job->router, job->x, job->router->logits.columns, (float *)job->memory, &r, team);
}
/* x float32 [rows, hidden] -> index and weight [rows, chosen]; `memory`: rows x 3 x experts numbers. */
void router_run(const Router *router, const float *x, int64_t rows, int64_t *index, float *weight, float *memory, int32_t threads) {
    ExpertsJob job = {.router = router, .index = index, .x = x, .weight = weight, .memory = (char *)memory, .rows = rows,
                      .chosen = router->chosen};
    parallel(router_job, &job, threads);
}
