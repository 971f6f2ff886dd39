/* Rows in units (pages, or tokens where single ones were chosen), their tiles, and parts of rows that are put together. */
#define FEW_PAGES 16 /* a thread more pays from so many on */

/* How many of a row's tokens any query sees. */
static int64_t limit_of(const Request *request, int64_t row) {
    int64_t length = request->lengths[row], most = 0;
    if (length > request->columns * PAGE) length = request->columns * PAGE;
    if (!request->visible) return length;
    for (int64_t q = 0; q < request->queries; q++) {
        int64_t seen = request->visible[row * request->queries + q];
        most = seen > most ? seen : most;
    }
    return most < length ? most : length;
}

static int64_t units_of(const Request *request, int64_t row) {
    int64_t limit = limit_of(request, row);
    if (!request->index) return (limit + PAGE - 1) / PAGE;
    int64_t count = request->counts[row] < request->most ? request->counts[row] : request->most;
    return count > 0 && limit > 0 ? count : 0;
}

static void put_token(Tile *tile, int64_t position) {
    tile->position[tile->count] = position;
    tile->slot[tile->count++] = (int32_t)(position % PAGE);
}

/* The first tile with tokens of units [at, until); count 0: there is none. Returns the unit that follows it. */
static int64_t next_tile(const Request *request, int64_t row, int64_t at, int64_t until, Tile *tile) {
    const int64_t *table = request->table + row * request->columns, *index = request->index ? request->index + row * request->most : NULL;
    int64_t limit = limit_of(request, row);
    tile->count = 0;
    for (; at < until && !tile->count; at++) {
        int64_t unit = index ? index[at] : at, last = index && at > 0 ? index[at - 1] : -1;
        if (index && unit <= last) continue; /* chosen twice, which counts once */
        int64_t column = request->unit == PAGE ? unit : unit / PAGE;
        if (unit < 0 || column * PAGE >= limit || table[column] < 0) continue;
        tile->page = table[column];
        if (request->unit == PAGE) {
            for (int64_t p = column * PAGE; p < limit && p < (column + 1) * PAGE; p++) put_token(tile, p);
            continue;
        }
        for (; at < until && index[at] / PAGE == column && index[at] > last; at++) {
            if (index[at] < limit) put_token(tile, index[at]);
            last = index[at];
        }
        at--;
    }
    for (int t = tile->count; tile->count && t < PAGE; t++) tile->slot[t] = tile->slot[tile->count - 1];
    return at;
}

/* ---- memory of a thread */
static int64_t grid_floats(const Side *side) {
    int64_t tokens = ROOM * (int64_t)(side->groups > 1 ? side->groups : 1);
    return tokens > side->wide ? tokens : side->wide;
}
static int64_t part_floats(const Request *request) { return request->queries * (request->value.wide + 2); }

static int64_t lay_out(const Request *request, char *memory, Work *work) {
    const Side *key = &request->key, *value = &request->value;
    int64_t m = request->queries, at = 0;
    struct { float **place; int64_t count; } all[] = {
        {&work->query, m * key->wide}, {&work->scaled, QUERIES * key->wide}, {&work->sums, m * key->groups},
        {&work->key_scale, grid_floats(key)}, {&work->key_zero, grid_floats(key)},
        {&work->page_scale, grid_floats(value)}, {&work->page_zero, grid_floats(value)},
        {&work->value_scale, grid_floats(value)}, {&work->value_zero, grid_floats(value)},
        {&work->key_tile, key->tile ? PAGE * key->wide : 0}, {&work->value_tile, value->tile ? PAGE * value->wide : 0},
        {&work->weights, value->groups * PAGE * QUERIES}, {&work->out, m * value->wide}, {&work->rest, m * value->groups},
        {&work->top, m}, {&work->total, m},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i].place = (float *)(memory + at);
        at += align64(all[i].count * 4);
    }
    return at;
}
static int64_t thread_bytes(const Request *request) {
    Work work;
    return lay_out(request, request->memory, &work) + 2 * align64(part_floats(request) * 4);
}
static char *memory_of(const Request *request, int member) {
    return request->memory + align64((request->rows + 1) * 8) + member * thread_bytes(request);
}
static Work work_of(const Request *request, int member) {
    Work work;
    lay_out(request, memory_of(request, member), &work);
    const Side *sides[] = {&request->key, &request->value};
    float *tiles[] = {work.key_tile, work.value_tile};
    for (int i = 0; i < 2; i++)
        if (sides[i]->tile) memset(tiles[i], 0, (size_t)(PAGE * sides[i]->wide) * 4);
    /* Channels past the last have code 0; a scale that is no number there would spoil it. */
    memset(work.key_scale, 0, (size_t)grid_floats(&request->key) * 4), memset(work.key_zero, 0, (size_t)grid_floats(&request->key) * 4);
    memset(work.value_scale, 0, (size_t)grid_floats(&request->value) * 4);
    memset(work.value_zero, 0, (size_t)grid_floats(&request->value) * 4);
    return work;
}
/* [queries, wide] sums, [queries] tops, [queries] totals: of a row that began before this thread's part, or that goes on after it. */
static float *part_of(const Request *request, int member, int began_before) {
    return (float *)(memory_of(request, member + 1) - (began_before ? 2 : 1) * align64(part_floats(request) * 4));
}

/* ---- a row */
static void begin_row(const Request *request, const Work *work, int64_t row) {
    const Side *key = &request->key, *value = &request->value;
    for (int64_t q = 0; q < request->queries; q++) {
        const float *from = request->query + (row * request->queries + q) * key->size;
        float *to = work->query + q * key->wide, *sums = work->sums + q * key->groups;
        memset(sums, 0, (size_t)key->groups * 4);
        for (int64_t c = 0; c < key->wide; c++) to[c] = c < key->size ? from[c] * request->scale : 0.0f;
        for (int64_t c = 0; c < key->size; c++) sums[key->groups > 1 ? c / key->group : 0] += to[c];
        work->top[q] = -INFINITY, work->total[q] = 0.0f;
    }
    memset(work->out, 0, (size_t)(request->queries * value->wide) * 4);
    memset(work->rest, 0, (size_t)(request->queries * value->groups) * 4);
}

static void keep_part(const Request *request, const Work *work, float *part) {
    int64_t m = request->queries, wide = request->value.wide;
    memcpy(part, work->out, (size_t)(m * wide) * 4);
    memcpy(part + m * wide, work->top, (size_t)m * 4), memcpy(part + m * (wide + 1), work->total, (size_t)m * 4);
}

static void add_part(const Request *request, const Work *work, const float *part) {
    int64_t m = request->queries, wide = request->value.wide;
    for (int64_t q = 0; q < m; q++) {
        float other = part[m * wide + q], top = other > work->top[q] ? other : work->top[q], base = top == -INFINITY ? 0.0f : top;
        float mine = expf(work->top[q] - base), theirs = expf(other - base);
        for (int64_t c = 0; c < wide; c++) work->out[q * wide + c] = work->out[q * wide + c] * mine + part[q * wide + c] * theirs;
        work->total[q] = work->total[q] * mine + part[m * (wide + 1) + q] * theirs;
        work->top[q] = top;
    }
}

static void finish(const Request *request, const Work *work, int64_t row) {
    const Side *value = &request->value;
    for (int64_t q = 0; q < request->queries; q++) {
        float total = work->total[q], inverse = total == 0.0f ? 0.0f : 1.0f / total;
        float *out = request->out + (row * request->queries + q) * value->size;
        for (int64_t c = 0; c < value->size; c++) out[c] = work->out[q * value->wide + c] * inverse;
        request->lse[row * request->queries + q] = total == 0.0f ? -INFINITY : work->top[q] + logf(total);
    }
}
