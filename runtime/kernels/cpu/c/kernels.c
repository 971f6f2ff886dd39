/* The CPU kernels of this runtime, one library an instruction set. runtime/kernels/cpu/library.py compiles and loads it. */
#include "parts.h"
#include "simd.h"
#include "pool.h"
#include "contention.h"
#include "digits.h"
#include "planes.h"
#include "linear.h"
#include "sparse.h"
#include "dense.h"
#include "gemm.h"
#include "amx.h"
#include "product.h"
#if IN_PART(STEPS)
#include "tiles.h"
#include "pack.h"
#include "elementwise.h"
#include "experts.h"
#include "kv_page.h"
#include "kv_codes.h"
#include "kv_store.h"
#include "attention.h"
#include "selection.h"
#include "program.h"
#include "operations.h"
#include "decoder.h"

const char *isa_name(void) { return ISA_NAME; }
#endif
