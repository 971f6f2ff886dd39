/* The search of `best_levels` in runtime/formats/row_codebook.py, which says what is computed. */

#include <math.h>
#include <stdint.h>

#define MOST_CHOICES 256
#define MOST_LEVELS 16

/* Rows [first, end): of each, `turn` [2 choices - 1] at every middle of two choices, the sums of mass and of mass times point as `ends` [2],
 * and `found` [count]: numbers of the chosen levels, the first of which is -reach. */
void levels_search(const float *turn, const float *ends, int64_t reach, int64_t count, int64_t *found, int64_t first, int64_t end) {
    const int choices = 2 * (int)reach + 1;
    int32_t origin[MOST_LEVELS][MOST_CHOICES];
    float total[MOST_CHOICES], next[MOST_CHOICES];
    for (int64_t row = first; row < end; row++) {
        const float *own = turn + row * (2 * choices - 1);
        for (int to = 0; to < choices; to++) total[to] = 0;
        for (int number = 1; number < count; number++) {
            int32_t *restrict from = origin[number];
            for (int to = 0; to < choices; to++) next[to] = INFINITY, from[to] = 0;
            for (int a = number - 1; a < choices; a++) {
                const float before = total[a], *restrict at = own + a;
                for (int to = a + 1; to < choices; to++) {
                    const float cost = before + (float)(to - a) * at[to];
                    from[to] = cost < next[to] ? a : from[to];
                    next[to] = cost < next[to] ? cost : next[to];
                }
            }
            for (int to = 0; to < choices; to++) total[to] = next[to];
        }
        float least = INFINITY;
        int last = choices - 1;
        for (int to = 0; to < choices; to++) {
            const float level = (float)(to - reach), cost = total[to] + level * level * ends[2 * row] - 2 * level * ends[2 * row + 1];
            if (cost < least) least = cost, last = to;
        }
        for (int number = (int)count - 1; number >= 0; number--) {
            found[row * count + number] = last - reach;
            if (number) last = origin[number][last];
        }
    }
}
