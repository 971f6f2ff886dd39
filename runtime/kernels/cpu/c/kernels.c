/* The CPU kernels of this runtime, one library an instruction set. runtime/kernels/cpu/library.py compiles and loads it. */
#include "simd.h"
#include "pool.h"
#include "digits.h"
#include "linear.h"
#include "sparse.h"
#include "dense.h"
#include "product.h"
#include "tiles.h"
#include "elementwise.h"
#include "experts.h"
#include "kv_page.h"
#include "kv_store.h"
#include "attention.h"
#include "program.h"
#include "operations.h"
#include "decoder.h"

const char *isa_name(void) { return ISA_NAME; }
