/* The same for every other machine, in the vector types of GCC and Clang: they become what vectors there are. */
#define LANES 16
#define WIDE_SUMS 1 /* partial sums hold a whole group */
#define ISA_NAME "portable"

typedef int32_t I __attribute__((vector_size(64)));
typedef float F __attribute__((vector_size(64)));
typedef uint32_t W __attribute__((vector_size(64))); /* a lane: the four weights of a row */
typedef struct { int32_t v[4]; } X;
typedef I P;
#define EACH for (int i = 0; i < 16; i++)

static inline W w_load(const uint8_t *p) { W w; memcpy(&w, p, 64); return w; }
static inline void w_store(uint8_t *p, W w) { memcpy(p, &w, 64); }
static inline W w_and(W w, int mask) { return w & (uint32_t)mask * 0x01010101u; }
static inline W w_shift(W w, int left) { return left < 0 ? w >> -left : w << left; }
static inline W w_select(int mask, W a, W b) { return w_and(a, mask) | w_and(b, ~mask & 255); }
static inline W w_add(W a, W b) { return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u); }
/* The bits of every lane, rotated to the right. */
static inline W w_rotate(W w, int bits) { return w >> bits | w << (32 - bits); }
static inline W w_rotate_byte(W w) { return w_rotate(w, 8); }
/* Bytes of a table, by numbers below 16. */
static inline W w_lookup(const uint8_t table[16], W w) {
    uint8_t bytes[64];
    memcpy(bytes, &w, 64);
    for (int i = 0; i < 64; i++) bytes[i] = table[bytes[i]];
    return w_load(bytes);
}
/* Levels of rows: each lane's own table of 4, 8 or 16 bytes, four of them a piece, by the low bits of its bytes; others mean nothing. */
static inline W w_lookup_rows(const W *piece, const int bits, W codes) {
    uint8_t bytes[64];
    memcpy(bytes, &codes, 64);
    for (int i = 0; i < 64; i++) {
        const int code = bytes[i] & ((1 << bits) - 1);
        bytes[i] = (uint8_t)(piece[code / 4][i / 4] >> 8 * (code % 4));
    }
    return w_load(bytes);
}
static inline X x_load(const int8_t *p) { return (X){{p[0], p[1], p[2], p[3]}}; }
static inline I i_set1(int32_t v) { return v - (I){0}; }
static inline I i_zero(void) { return (I){0}; }
static inline P p_zero(void) { return (P){0}; }
static inline P p_dot(P p, W w, X x) { /* memory order is little-endian, as the files' own */
    return p + (I)(w & 255u) * x.v[0] + (I)(w >> 8 & 255u) * x.v[1] + (I)(w >> 16 & 255u) * x.v[2] + (I)(w >> 24) * x.v[3];
}
static inline I i_add(I a, I b) { return a + b; }
static inline I i_sub(I a, I b) { return a - b; }
static inline I i_mul(I a, I b) { return a * b; }
static inline I i_shift(I a, int left) { return left < 0 ? a >> -left : a * (1 << left); }
static inline I p_flush(I sum, P p, int times) { return (void)times, sum + p; }
static inline I i_load_i8(const int8_t *p) { I r; EACH r[i] = p[i]; return r; }
static inline I i_load_i16(const int16_t *p) { I r; EACH r[i] = p[i]; return r; }

/* Two numbers a lane. */
typedef struct { I first, second; } Pair;
static inline Pair pair_load(const uint8_t *p) {
    Pair r;
    EACH r.first[i] = (int8_t)p[2 * i], r.second[i] = (int8_t)p[2 * i + 1];
    return r;
}
static inline Pair pair_same(const uint8_t *p) { /* a byte a lane, twice */
    I one = i_load_i8((const int8_t *)p);
    return (Pair){one, one};
}
static inline Pair pair_low(Pair v) { return (Pair){v.first & 15, v.second & 15}; } /* nibbles of the bytes */
static inline Pair pair_high(Pair v) { return (Pair){v.first >> 4 & 15, v.second >> 4 & 15}; }
/* Sums times one of a pair (0, 1; ALIKE: they are); pairs times two numbers. */
static inline I p_scaled(I sum, P p, Pair v, const int which) { return sum + p * (which == 1 ? v.second : v.first); }
static inline I i_pair_dot(I sum, Pair v, const int16_t *two) { return sum + v.first * two[0] + v.second * two[1]; }

static inline F f_set1(float v) { return v - (F){0}; }
static inline F f_zero(void) { return (F){0}; }
static inline F f_load(const float *p) { F r; memcpy(&r, p, 64); return r; }
static inline void f_store(float *p, F v) { memcpy(p, &v, 64); }
static inline F f_from_i(I v) { return __builtin_convertvector(v, F); }
static inline F f_fma(F a, F b, F c) { EACH c[i] = fmaf(a[i], b[i], c[i]); return c; } /* one rounding, as everywhere */
static inline F f_mul(F a, F b) { return a * b; }
static inline F f_add(F a, F b) { return a + b; }
static inline F f_max(F a, F b) { EACH a[i] = a[i] > b[i] ? a[i] : b[i]; return a; } /* b where either is no number */
static inline float f_reduce_max(F v) {
    for (int step = 8; step; step >>= 1)
        for (int i = 0; i < step; i++) v[i] = v[i] > v[i + step] ? v[i] : v[i + step];
    return v[0];
}
static inline F f_load_bf16(const uint16_t *p) { F r; EACH r[i] = bf16_to_float(p[i]); return r; }
static inline F f_load_f16(const uint16_t *p) { F r; EACH r[i] = f16_to_float(p[i]); return r; }
static inline F f_load_f8(const uint8_t *p) { F r; EACH r[i] = f8_to_float(p[i]); return r; }
static inline F f_load_e8m0(const uint8_t *p) { F r; EACH r[i] = e8m0_to_float(p[i]); return r; }
static inline float f_sum(F v) {
    for (int step = 8; step; step >>= 1)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
}
static inline void f_transpose(F v[16]) { /* rows of a matrix, transposed */
    F rows[16];
    memcpy(rows, v, sizeof rows);
    for (int k = 0; k < 16; k++) EACH v[k][i] = rows[i][k];
}

typedef struct { uint8_t v[16]; } X16;
static inline X16 x16_load(const int8_t *p) {
    X16 x;
    EACH x.v[i] = (uint8_t)(p[i] ^ 0x80);
    return x;
}
typedef struct { uint32_t first[2][16], second[2][16]; } Picker;
static inline Picker picker(const uint32_t first[2][16], const uint32_t second[2][16]) {
    Picker t;
    memcpy(t.first, first, sizeof t.first);
    memcpy(t.second, second, sizeof t.second);
    return t;
}
static inline W pick_control(const Picker *t, W meta, int part) {
    W out;
    EACH out[i] = t->first[part & 1][meta[i] >> (8 * part) & 15] | t->second[part & 1][meta[i] >> (8 * part + 4) & 15];
    return out;
}
static inline W pick_value(const Picker *t, W nibbles) { (void)t; return nibbles; }
static inline P p_pick_dot(P p, X16 x, W control, W value) {
    EACH for (int j = 0; j < 32; j += 8)
        p[i] += (int32_t)x.v[control[i] >> j & 15] * ((int32_t)(value[i] >> j & 15) - 8);
    return p;
}
#undef EACH
