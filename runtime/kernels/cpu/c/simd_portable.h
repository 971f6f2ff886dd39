/* The same in plain C, for every other machine; compilers turn the loops over lanes into what vectors there are. */
#define LANES 16
#define RUN_DOTS 8
#define ISA_NAME "portable"

typedef struct { uint8_t v[64]; } W;
typedef struct { int8_t v[4]; } X;
typedef struct { int32_t v[16]; } I;
typedef struct { float v[16]; } F;
typedef I P;
typedef I P8;
#define EACH for (int i = 0; i < 16; i++)

static inline W w_load(const uint8_t *p) { W w; memcpy(w.v, p, 64); return w; }
static inline void w_store(uint8_t *p, W w) { memcpy(p, w.v, 64); }
static inline W w_low(W w) { for (int i = 0; i < 64; i++) w.v[i] &= 15; return w; }
static inline W w_high(W w) { for (int i = 0; i < 64; i++) w.v[i] >>= 4; return w; }
static inline X x_load(const int8_t *p) { X x; memcpy(x.v, p, 4); return x; }
static inline I i_set1(int32_t v) { I r; EACH r.v[i] = v; return r; }
static inline I i_zero(void) { return i_set1(0); }
static inline P p_zero(void) { return i_set1(0); }
static inline P p_dot(P p, W w, X x) {
    EACH for (int j = 0; j < 4; j++) p.v[i] += (int32_t)w.v[4 * i + j] * x.v[j];
    return p;
}
static inline I i_add(I a, I b) { EACH a.v[i] += b.v[i]; return a; }
static inline I i_sub(I a, I b) { EACH a.v[i] -= b.v[i]; return a; }
static inline I i_mul(I a, I b) { EACH a.v[i] *= b.v[i]; return a; }
static inline I p_flush(I sum, P p) { return i_add(sum, p); }
static inline P8 p8_zero(void) { return i_set1(0); }
static inline P8 p8_dot(P8 p, W w, X x) { return p_dot(p, w, x); }
static inline I p8_flush(I sum, P8 p) { return i_add(sum, p); }
static inline I i_load_i8(const int8_t *p) { I r; EACH r.v[i] = p[i]; return r; }
static inline I i_load_i16(const int16_t *p) { I r; EACH r.v[i] = p[i]; return r; }

static inline F f_set1(float v) { F r; EACH r.v[i] = v; return r; }
static inline F f_zero(void) { return f_set1(0.0f); }
static inline F f_load(const float *p) { F r; memcpy(r.v, p, 64); return r; }
static inline void f_store(float *p, F v) { memcpy(p, v.v, 64); }
static inline F f_from_i(I v) { F r; EACH r.v[i] = (float)v.v[i]; return r; }
static inline F f_fma(F a, F b, F c) { EACH a.v[i] = fmaf(a.v[i], b.v[i], c.v[i]); return a; }
static inline F f_mul(F a, F b) { EACH a.v[i] *= b.v[i]; return a; }
static inline F f_add(F a, F b) { EACH a.v[i] += b.v[i]; return a; }
static inline F f_load_bf16(const uint16_t *p) { F r; EACH r.v[i] = bf16_to_float(p[i]); return r; }
static inline F f_load_f16(const uint16_t *p) { F r; EACH r.v[i] = f16_to_float(p[i]); return r; }
static inline float f_sum(F v) {
    for (int step = 8; step; step >>= 1)
        for (int i = 0; i < step; i++) v.v[i] += v.v[i + step];
    return v.v[0];
}

typedef struct { uint8_t v[16]; } X16;
static inline X16 x16_load(const int8_t *p) {
    X16 x;
    for (int i = 0; i < 16; i++) x.v[i] = (uint8_t)(p[i] ^ 0x80);
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
    EACH {
        uint32_t m;
        memcpy(&m, meta.v + 4 * i, 4);
        uint32_t c = t->first[part & 1][m >> (8 * part) & 15] | t->second[part & 1][m >> (8 * part + 4) & 15];
        memcpy(out.v + 4 * i, &c, 4);
    }
    return out;
}
static inline W pick_value(const Picker *t, W nibbles) { (void)t; return nibbles; }
static inline P p_pick_dot(P p, X16 x, W control, W value) {
    EACH for (int j = 0; j < 4; j++) p.v[i] += (int32_t)x.v[control.v[4 * i + j]] * ((int32_t)value.v[4 * i + j] - 8);
    return p;
}
#undef EACH
