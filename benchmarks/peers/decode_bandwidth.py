"""How fast this machine reads memory: a C loop that sums 64-bit words of a buffer, in every thread a part of it.

Measured with ordinary pages and with huge ones; the better is the bandwidth that the products are held against.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from decode_common import main, matvec_result

SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct { const uint64_t *start; size_t words; uint64_t sum; } Part;

static void *add(void *argument) {
    Part *part = argument;
    uint64_t sums[32] = {0};
    const uint64_t *p = part->start;
    for (size_t i = 0; i + 32 <= part->words; i += 32) {
        __builtin_prefetch(p + i + 1024);  /* 8 KiB ahead */
        __builtin_prefetch(p + i + 1032);
        __builtin_prefetch(p + i + 1040);
        __builtin_prefetch(p + i + 1048);
        for (int j = 0; j < 32; j++) sums[j] += p[i + j];
    }
    part->sum = 0;
    for (int j = 0; j < 32; j++) part->sum += sums[j];
    return NULL;
}

int main(int argc, char **argv) {
    int threads = atoi(argv[1]), rounds = atoi(argv[3]);
    size_t bytes = strtoull(argv[2], NULL, 10), words = bytes / 8 / threads / 32 * 32;
    uint64_t *buffer = aligned_alloc(4096, bytes), total = 0;
    madvise(buffer, bytes, atoi(argv[4]) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(buffer, 1, bytes);
    Part parts[64];
    pthread_t ids[64];
    for (int round = 0; round < rounds; round++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int t = 0; t < threads; t++) {
            parts[t] = (Part){buffer + t * words, words, 0};
            if (t) pthread_create(&ids[t], NULL, add, &parts[t]);
        }
        add(&parts[0]);
        for (int t = 1; t < threads; t++) pthread_join(ids[t], NULL);
        clock_gettime(CLOCK_MONOTONIC, &b);
        for (int t = 0; t < threads; t++) total += parts[t].sum;
        printf("%.9f\n", (b.tv_sec - a.tv_sec) + 1e-9 * (b.tv_nsec - a.tv_nsec));
    }
    fprintf(stderr, "%llu\n", (unsigned long long)total);
    return 0;
}
"""
BYTES = 1 << 29


def matvec(request: dict[str, Any]) -> dict[str, Any]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("there is no C compiler")
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory) / "read.c", Path(directory) / "read"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-O3", "-march=native", "-pthread", "-o", program, source], check=True)
        rounds = max(5, int(request["seconds"] * 20e9 / BYTES))
        command = [str(program), str(request["threads"]), str(BYTES), str(rounds + 1)]
        found = {}
        for name, huge in (("ordinary", "0"), ("huge", "1")):
            lines = subprocess.run([*command, huge], check=True, capture_output=True, text=True).stdout.split()
            found[name] = matvec_result([float(line) for line in lines[1:]], BYTES)
    best = max(found, key=lambda name: found[name]["gb_per_second"])
    return {**found[best], "pages": best, "by_pages": {name: result["gb_per_second"] for name, result in found.items()}}


if __name__ == "__main__":
    main({"matvec": matvec})
