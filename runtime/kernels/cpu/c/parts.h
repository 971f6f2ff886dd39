/* The library in parts that are compiled in parallel: kernels.c with -DPART=0, 1, ...; without PART it is one unit. Threads, and what else
 * has a state, are in STEPS alone. */
#define STEPS 0 /* all that other parts are not, and all that Python calls */
#define PRODUCTS 1
#define TILES 2
#define MORE_TILES 3
#define LEVEL_TILES 4
#define LEVEL_BYTES 5
#ifdef PART
#define IN_PART(NAME) (PART == NAME)
#define SHARED __attribute__((visibility("hidden"))) /* by the parts of this library */
#define DECLARED extern SHARED
#else
#define IN_PART(NAME) 1
#define SHARED static
#define DECLARED static
#endif
