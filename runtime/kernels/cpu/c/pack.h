/* Rows of 4-bit codes, as files have them, into panels: a row's word of eight codes in order becomes a piece's (planes.h), whose low nibbles
 * are the first four. What is beyond the rows and words that there are is 0. */
typedef struct {
    const uint32_t *packed; /* [rows, given] */
    uint32_t *out;          /* [panels, words, 32] */
    int64_t rows, given, panels, words;
} PackOrder;

static void pack_job(void *p, const Team *team) {
    const PackOrder *o = p;
    int64_t start, end;
    team_part(team, o->panels, 1, &start, &end);
    for (int64_t panel = start; panel < end; panel++) {
        const int64_t first = panel * PANEL, valid = o->rows - first < PANEL ? o->rows - first : PANEL;
        uint32_t *out = o->out + first * o->words;
        for (int64_t w = 0; w < o->words; w += 16) { /* a cache line of every row */
            const int64_t last = w + 16 < o->words ? w + 16 : o->words, there = last < o->given ? last : o->given;
            if (valid < PANEL || there < last) memset(out + w * PANEL, 0, (size_t)(last - w) * PANEL * 4);
            for (int64_t i = 0; i < valid; i++)
                for (int64_t k = w; k < there; k++) {
                    const uint32_t v = o->packed[(first + i) * o->given + k], front = v & 0xffff, back = v >> 16;
                    const uint32_t low = (front | front << 8) & 0x00ff00ff, high = (back | back << 8) & 0x00ff00ff;
                    out[k * PANEL + i] = ((low | low << 4) & 0x0f0f0f0f) | ((high | high << 4) & 0x0f0f0f0f) << 4;
                }
        }
    }
}
void panels_pack(const PackOrder *order, int32_t threads) { parallel(pack_job, (void *)order, threads); }
