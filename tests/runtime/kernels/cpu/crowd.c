/* crowd.h on a clock of its own: prints how many of 4 threads work, region after region of 25 ms.
 * crowd MILLISECONDS:LATE:PERCENT...: for so long the last LATE of 4 cores are taken for PERCENT of the time. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#define CROWD_CLOCK
static int64_t now, waited;
static int64_t clock_now(void) { return now; }
static int64_t time_without_core(void) { return waited; }
#include POOL
#include CROWD

int main(int argc, char **argv) {
    int64_t without[4] = {0};
    Look last[4] = {{0}};
    for (int i = 1; i < argc; i++) {
        int milliseconds, late, percent;
        if (sscanf(argv[i], "%d:%d:%d", &milliseconds, &late, &percent) != 3) return 2;
        for (int passed = 0; passed < milliseconds; passed += 25) {
            const int threads = crowd_threads(4);
            atomic_int seen = 0;
            now += 25 * MILLISECOND;
            for (int member = 0; member < threads; member++) {
                if (member >= 4 - late) without[member] += MILLISECOND * percent / 4;
                waited = percent < 0 ? -1 : without[member];
                crowd_look(&seen, last + member);
            }
            crowd_learn(seen, threads);
            printf("%d ", threads);
        }
        printf("\n");
    }
    return 0;
}
