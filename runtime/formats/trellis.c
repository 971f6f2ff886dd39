/* The search of runtime/formats/trellis.py, which says what is computed: words of 16 numbers, for several rows at a time. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define STEPS 16   /* numbers of a word */
#define STATES 64  /* six bits that two windows share: three digits to base 4 */
#define CHOICES 4  /* digits that enter and leave */
#define LANES 8    /* rows that are searched together */
#define EACH_LANE for (int r = 0; r < LANES; r++)

/* A step drops the lowest digit of the state and adds a highest one. The new digit takes the place of the one that was dropped, so that
 * numbers of states never move: which place a digit has depends on the step. */
static const int APART[3] = {16, 4, 1}; /* states that differ by one in the digit of a place */
static int place_of(int step, int state) {
    return (state & 3) * APART[step % 3] + (state >> 2 & 3) * APART[(step + 1) % 3] + (state >> 4) * APART[(step + 2) % 3];
}

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t M __attribute__((vector_size(4 * LANES))); /* a comparison: -1 where it holds */
static inline V set1(float value) { return value - (V){0}; }
static inline V pick(M where, V a, V b) { return (V)(((M)a & where) | ((M)b & ~where)); }
static inline V least_of(V a, V b) { return pick(a < b, a, b); }
static inline V square_cost(float cost, V error) { return set1(cost) * error * error; }

typedef struct { V at[STATES]; } States;

/* Where the four states are that differ in the digit that step t changes, the n-th of 16 such sets, and the values of the windows from the
 * l-th of them to the h-th. */
typedef struct { int first, apart; float window[CHOICES][CHOICES]; } Set; /* [h][l] */
static Set set_of(const float *values, int t, int n) {
    Set set = {(n & 3) * APART[(t + 1) % 3] + (n >> 2) * APART[(t + 2) % 3], APART[t % 3], {{0}}};
    for (int h = 0; h < CHOICES; h++)
        for (int l = 0; l < CHOICES; l++) set.window[h][l] = values[h << 6 | n << 2 | l];
    return set;
}

/* Costs of the best paths through steps [first, end). Forwards: state has the cost of starting in each state, and gets the least cost of a
 * path that ends there. Backwards: the cost of ending in each state, and the least cost of a path that starts there. Step t costs
 * cost[t] (x[t] - value)^2. */
static inline __attribute__((always_inline)) void best_paths(const Set sets[3][16], const V *x, const float *cost, int first, int end,
                                                             const int back, States *state) {
    for (int t = back ? end - 1 : first; t >= first && t < end; t += back ? -1 : 1)
        for (int n = 0; n < 16; n++) {
            const Set *set = &sets[t % 3][n];
            V *at = state->at + set->first, known[CHOICES];
            for (int k = 0; k < CHOICES; k++) known[k] = at[k * set->apart];
            for (int o = 0; o < CHOICES; o++) {
                V least = set1(INFINITY);
                for (int k = 0; k < CHOICES; k++) {
                    const float value = back ? set->window[k][o] : set->window[o][k];
                    least = least_of(known[k] + square_cost(cost[t], x[t] - set1(value)), least);
                }
                at[o * set->apart] = least;
            }
        }
}

typedef struct {
    States state, errors[STEPS];
    M taken[STEPS][STATES];
} Paths;

/* Best paths from a state of each row to itself; words and least costs of those that cost less than `least`. */
static void best_closed_paths(const Set sets[3][16], const V *x, const float *cost, const float (*couple)[STEPS], const int *start, Paths *p,
                              V *least, uint32_t *words) {
    for (int s = 0; s < STATES; s++) p->state.at[s] = set1(INFINITY);
    EACH_LANE p->state.at[place_of(0, start[r])][r] = 0;
    for (int t = 0; t < STEPS; t++) {
        V lowest = set1(INFINITY);
        for (int n = 0; n < 16; n++) {
            const Set *set = &sets[t % 3][n];
            const int apart = set->apart;
            V *state = p->state.at + set->first, before[CHOICES], wanted[CHOICES];
            M choice[CHOICES];
            for (int l = 0; l < CHOICES; l++) before[l] = state[l * apart], wanted[l] = set1(0);
            for (int j = 0; j < t; j++)
                for (int l = 0; l < CHOICES; l++) wanted[l] += set1(couple[t][j]) * p->errors[j].at[set->first + l * apart];
            for (int h = 0; h < CHOICES; h++) {
                V next = set1(INFINITY), own = set1(0);
                choice[h] = (M){0};
                for (int l = 0; l < CHOICES; l++) {
                    V error = x[t] - set1(set->window[h][l]), total = before[l] + square_cost(cost[t], error + wanted[l]);
                    M better = total < next;
                    choice[h] = (better & l) | (choice[h] & ~better);
                    own = pick(better, error, own), next = pick(better, total, next);
                }
                state[h * apart] = next, p->errors[t].at[set->first + h * apart] = own;
                p->taken[t][set->first + h * apart] = choice[h];
                lowest = least_of(next, lowest);
            }
            /* Each state inherits the errors of the path that survived into it. */
            for (int j = 0; j < t; j++) {
                V *errors = p->errors[j].at + set->first, were[CHOICES];
                for (int l = 0; l < CHOICES; l++) were[l] = errors[l * apart];
                for (int h = 0; h < CHOICES; h++) {
                    const M odd = -(choice[h] & 1), high = -(choice[h] >> 1);
                    errors[h * apart] = pick(high, pick(odd, were[3], were[2]), pick(odd, were[1], were[0]));
                }
            }
        }
        int more = 0; /* costs only grow */
        EACH_LANE more |= lowest[r] < (*least)[r];
        if (!more) return;
    }
    EACH_LANE {
        const float lost = p->state.at[place_of(STEPS, start[r])][r];
        if (!(lost < (*least)[r])) continue;
        (*least)[r] = lost, words[r] = 0;
        for (int t = STEPS - 1, s = start[r]; t >= 0; t--) {
            const uint32_t choice = (uint32_t)p->taken[t][place_of(t + 1, s)][r];
            words[r] |= choice << 2 * t;
            s = (int)((4 * (uint32_t)s + choice) % STATES);
        }
    }
}

/* target [16][rows], in the order of the steps and in units of the values; values [256]; cost [16]; couple [16][16], below the diagonal;
 * single [16]: what a step costs by itself; words [rows]. */
void trellis_search(const float *target, int64_t rows, const float *values, const float *cost, const float *couple, const float *single,
                    int64_t tries, int32_t *words, int64_t begin, int64_t end) {
    Set sets[3][16];
    Paths paths;
    int uncoupled = 1;
    for (int t = 0; t < 3; t++)
        for (int n = 0; n < 16; n++) sets[t][n] = set_of(values, t, n);
    for (int i = 0; i < STEPS * STEPS; i++) uncoupled &= couple[i] == 0;
    for (int64_t row = begin; row < end; row += LANES) {
        V x[STEPS], least = set1(INFINITY);
        States ahead = {0}, back = {0};
        uint32_t found[LANES] = {0};
        for (int t = 0; t < STEPS; t++) EACH_LANE x[t][r] = target[t * rows + (row + r < end ? row + r : end - 1)];
        best_paths(sets, x, single, STEPS / 2, STEPS, 0, &ahead);
        best_paths(sets, x, single, 0, STEPS / 2, 1, &back);
        V through[STATES]; /* of paths through a state at the beginning, where errors do not couple */
        for (int s = 0; s < STATES; s++) through[s] = back.at[place_of(0, s)] + ahead.at[place_of(STEPS, s)];
        for (int64_t n = 0; n < tries; n++) {
            int start[LANES], more = 0;
            M lowest = {0};
            V bound = through[0];
            for (int s = 1; s < STATES; s++) {
                const M lower = through[s] < bound;
                lowest = (lower & s) | (lowest & ~lower), bound = pick(lower, through[s], bound);
            }
            EACH_LANE {
                start[r] = lowest[r];
                more |= !uncoupled || bound[r] < least[r]; /* no word that passes there costs less */
                through[start[r]][r] = INFINITY;
            }
            if (!more) break;
            best_closed_paths(sets, x, cost, (const float(*)[STEPS])couple, start, &paths, &least, found);
        }
        for (int r = 0; r < LANES && row + r < end; r++) words[row + r] = (int32_t)found[r];
    }
}
