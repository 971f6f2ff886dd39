/* The CPU kernels of this runtime, one library an instruction set. runtime/kernels/cpu/library.py compiles and loads it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* clock_gettime, O_CLOEXEC */
#endif
#include "simd.h"
#include "pool.h"
#include "crowd.h"
#include "digits.h"
#include "planes.h"
#include "linear.h"
#include "sparse.h"
#include "dense.h"
#include "gemm.h"
#include "product.h"
#include "tiles.h"
#include "elementwise.h"
#include "experts.h"
#include "kv_page.h"
#include "kv_codes.h"
#include "kv_store.h"
#include "attention.h"
#include "program.h"
#include "operations.h"
#include "decoder.h"

const char *isa_name(void) { return ISA_NAME; }
