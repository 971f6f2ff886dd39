/* The search of runtime/formats/trellis.py, which says what is computed: words of 16 numbers, one row at a time. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define STEPS 16    /* numbers of a word */
#define STATES 64   /* six bits that two windows share */
#define CHOICES 4   /* two bits that leave a window when the next begins */
#define QUARTER (STATES / CHOICES)

/* windows[l][s]: value of the window 4 s + l, which leads to the state s, from the state (4 s + l) % 64 */
typedef struct { float windows[CHOICES][STATES]; } Code;

/* state: on entry the cost of starting in each state, on return the least cost of a path of count steps that ends there. Step t costs
 * cost[t] (x[t] - value)^2. */
static void forward(const Code *code, const float *x, const float *cost, int count, float *state) {
    for (int t = 0; t < count; t++) {
        float next[STATES];
        for (int s = 0; s < STATES; s++) {
            float least = INFINITY;
            for (int l = 0; l < CHOICES; l++) {
                float off = x[t] - code->windows[l][s], total = state[(4 * s + l) % STATES] + cost[t] * off * off;
                least = total < least ? total : least;
            }
            next[s] = least;
        }
        memcpy(state, next, sizeof next);
    }
}

/* The same backwards: on entry the cost of ending in each state, on return the least cost of a path of count steps that starts there. */
static void backward(const Code *code, const float *x, const float *cost, int count, float *state) {
    for (int t = count - 1; t >= 0; t--) {
        float before[STATES];
        for (int s = 0; s < STATES; s++) before[s] = INFINITY;
        for (int l = 0; l < CHOICES; l++)
            for (int s = 0; s < STATES; s++) {
                float off = x[t] - code->windows[l][s], total = state[s] + cost[t] * off * off;
                float *at = before + (4 * s + l) % STATES;
                *at = total < *at ? total : *at;
            }
        memcpy(state, before, sizeof before);
    }
}

/* Numbers of the states in the order in which a step takes them: state 4 q + l is at 16 l + q. */
typedef struct { float of[STATES]; } Split;
static inline Split split(const float *states) {
    Split out;
    for (int l = 0; l < CHOICES; l++)
        for (int q = 0; q < QUARTER; q++) out.of[QUARTER * l + q] = states[CHOICES * q + l];
    return out;
}

/* The best path from a state to itself, as a word; its cost in *least if that is below what is there. */
static uint32_t best_closed_path(const Code *code, const float *x, const float *cost, const float (*couple)[STEPS], int start, float *least, uint32_t word) {
    Split state, errors[STEPS];
    float next[STATES];
    int32_t taken[STEPS][STATES];
    for (int s = 0; s < STATES; s++) state.of[QUARTER * (s % CHOICES) + s / CHOICES] = s == start ? 0 : INFINITY;
    for (int t = 0; t < STEPS; t++) {
        Split shift = {0};
        float off[STATES];
        for (int j = 0; j < t; j++)
            for (int s = 0; s < STATES; s++) shift.of[s] += couple[t][j] * errors[j].of[s];
        for (int h = 0; h < CHOICES; h++)
            for (int q = 0; q < QUARTER; q++) {
                const int s = QUARTER * h + q;
                float best = INFINITY, own = 0;
                int32_t choice = 0;
                for (int l = 0; l < CHOICES; l++) {
                    float e = x[t] - code->windows[l][s], all = e + shift.of[QUARTER * l + q], total = state.of[QUARTER * l + q] + cost[t] * all * all;
                    choice = total < best ? l : choice;
                    own = total < best ? e : own;
                    best = total < best ? total : best;
                }
                next[s] = best, off[s] = own, taken[t][s] = choice;
            }
        /* Each state inherits the errors of the path that survived into it. */
        for (int j = 0; j < t; j++) {
            float kept[STATES];
            for (int h = 0; h < CHOICES; h++)
                for (int q = 0; q < QUARTER; q++) {
                    const int32_t choice = taken[t][QUARTER * h + q];
                    const float *of = errors[j].of + q;
                    float one = choice & 1 ? of[QUARTER] : of[0], other = choice & 1 ? of[3 * QUARTER] : of[2 * QUARTER];
                    kept[QUARTER * h + q] = choice & 2 ? other : one;
                }
            errors[j] = split(kept);
        }
        errors[t] = split(off), state = split(next);
        float lowest = INFINITY;
        for (int s = 0; s < STATES; s++) lowest = next[s] < lowest ? next[s] : lowest;
        if (lowest >= *least) return word; /* costs only grow */
    }
    if (!(next[start] < *least)) return word;
    *least = next[start];
    uint32_t found = 0;
    for (int t = STEPS - 1, s = start; t >= 0; t--) {
        found |= (uint32_t)taken[t][s] << 2 * t;
        s = (CHOICES * s + taken[t][s]) % STATES;
    }
    return found;
}

/* target [16][rows], in the order of the steps and in units of the values; values [256]; cost [16]; couple [16][16], below the diagonal;
 * single [16]: what a step costs by itself; words [rows]. */
void trellis_search(const float *target, int64_t rows, const float *values, const float *cost, const float *couple, const float *single,
                    int64_t tries, int32_t *words, int64_t begin, int64_t end) {
    Code code;
    for (int s = 0; s < STATES; s++)
        for (int l = 0; l < CHOICES; l++) code.windows[l][s] = values[4 * s + l];
    int uncoupled = 1;
    for (int i = 0; i < STEPS * STEPS; i++) uncoupled &= couple[i] == 0;
    for (int64_t row = begin; row < end; row++) {
        float x[STEPS], ahead[STATES] = {0}, back[STATES] = {0}, least = INFINITY;
        for (int t = 0; t < STEPS; t++) x[t] = target[t * rows + row];
        forward(&code, x + STEPS / 2, single + STEPS / 2, STEPS / 2, ahead);
        backward(&code, x, single, STEPS / 2, back);
        for (int s = 0; s < STATES; s++) ahead[s] += back[s];
        uint32_t word = 0;
        for (int64_t n = 0; n < tries; n++) {
            int start = 0;
            for (int s = 1; s < STATES; s++) start = ahead[s] < ahead[start] ? s : start;
            if (uncoupled && ahead[start] >= least) break; /* no word that passes there costs less */
            ahead[start] = INFINITY;
            word = best_closed_path(&code, x, cost, (const float(*)[STEPS])couple, start, &least, word);
        }
        words[row] = (int32_t)word;
    }
}
