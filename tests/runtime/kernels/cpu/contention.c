/* contention.h on a clock of its own: prints how many of 4 threads work, region after region of 25 ms.
 * contention MILLISECONDS:LATE:PERCENT...: for so long the last LATE of 4 cores are taken for PERCENT of the time. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#define CONTENTION_CLOCK
static int64_t now, delay;
static int64_t clock_now(void) { return now; }
static int64_t run_queue_delay(void) { return delay; }
#include POOL
#include CONTENTION

int main(int argc, char **argv) {
    int64_t without[4] = {0};
    Sample last[4] = {{0}};
    for (int i = 1; i < argc; i++) {
        int milliseconds, late, percent;
        if (sscanf(argv[i], "%d:%d:%d", &milliseconds, &late, &percent) != 3) return 2;
        for (int passed = 0; passed < milliseconds; passed += 25) {
            const int threads = threads_to_use(4);
            atomic_int delayed = 0;
            now += 25 * MILLISECOND;
            for (int member = 0; member < threads; member++) {
                if (member >= 4 - late) without[member] += MILLISECOND * percent / 4;
                delay = percent < 0 ? -1 : without[member];
                sample_delay(&delayed, last + member);
            }
            back_off(delayed, threads);
            printf("%d ", threads);
        }
        printf("\n");
    }
    return 0;
}
