/* What attention over a region is asked for. The Python side (cpu.py) fills these structures; the layouts must agree. */
#define PAGE 32 /* tokens of a page (pages.py) */
#define ROOM (PAGE + 8) /* for numbers of a page's tokens: vectors are read from any of them on */
#define QUERIES 4 /* computed together at most: they share every decoded code */

enum { KIND_F32, KIND_BF16, KIND_F16, KIND_FP8, KIND_INT2, KIND_INT4, KIND_INT8, KIND_BITMAP, KIND_GROUPED };
enum { GRID_NONE, GRID_CHANNEL, GRID_TOKEN };

/* Keys or values of a region: [pages, PAGE, ...] each. */
typedef struct {
    int32_t kind;
    int32_t type;      /* of a bitmap's codes: TYPE_F32, TYPE_BF16, TYPE_F16 */
    int32_t grid;      /* of integers: scale and zero float16 [pages, size] or [pages, PAGE, groups]; fp8: scale float32 [pages, PAGE] */
    int32_t groups;    /* grids of a token (GRID_TOKEN) */
    int64_t group;     /* channels of a grid of a token */
    int64_t size;      /* channels */
    int64_t wide;      /* channels as computed with: a multiple of 32 */
    int64_t stride;    /* bytes of a token's codes */
    int64_t mask_stride; /* bytes of a token's mask (bitmap) */
    int32_t tile;      /* pages are decoded to floats before anything is computed */
    int32_t chunks;    /* of 16 channels, that a token's codes have */
    const uint8_t *codes, *mask;
    const void *scale, *zero;
} Side;

typedef struct {
    Side key, value;
    int64_t rows, queries; /* queries of a row */
    int64_t columns;       /* of the table */
    int64_t most, unit;    /* columns of `index`; PAGE or 1 */
    float scale, softcap;
    const float *query;    /* [rows, queries, key.size] */
    const int64_t *table;  /* [rows, columns]: pages */
    const int64_t *lengths; /* [rows] */
    const int64_t *visible; /* [rows, queries], or NULL */
    const int64_t *index, *counts; /* [rows, most], [rows], or NULL */
    const float *bias;     /* [pages, PAGE], or NULL */
    float *out, *lse;      /* [rows, queries, value.size], [rows, queries] */
    char *memory;          /* attention_memory(...) bytes */
} Request;

/* Tokens of one page that are read together. */
typedef struct {
    int64_t page, next;     /* of the pool; the one that is read after it (or the same) */
    int64_t position[PAGE]; /* of a token in its row */
    int32_t slot[PAGE];     /* in the page; entries from `count` on repeat the last */
    int32_t count;
} Tile;

/* A thread's own memory. */
typedef struct {
    float *query;             /* [queries, key.wide], times Request.scale, zeros in the padding */
    float *scaled;            /* [QUERIES, key.wide]: times the scale of a page's channels */
    float *sums;              /* [queries, key.groups]: of the query over the channels of a grid */
    float *key_scale, *key_zero;     /* of a page, [wide] or [PAGE, groups] */
    float *page_scale, *page_zero;   /* of values on grids of tokens, [PAGE, groups] */
    float *value_scale, *value_zero; /* [wide] or [groups, ROOM] */
    float *key_tile, *value_tile; /* [PAGE, wide] */
    float *weights;           /* [value.groups, PAGE * QUERIES] */
    float *out;               /* [queries, value.wide]: not normalized */
    float *rest;              /* [queries, value.groups]: what zeros of grids add to the channels of a group */
    float *top, *total;       /* [queries]: largest score, and the sum of exponentials below it */
} Work;
