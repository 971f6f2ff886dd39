/* The tile intrinsics of runtime/kernels/cpu/c/amx.h in plain C, after Intel's descriptions of them. What a CPU would refuse
 * is counted instead, and done all the same. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#define __AMX_INT8__ 1

static _Thread_local struct {
    uint8_t palette, rows[8];
    uint16_t row_bytes[8];
    uint8_t data[8][16][64];
} tiles;
/* Products so far; what would have been a fault; threads whose tiles are configured. */
static _Atomic int64_t tile_products, tile_faults, tile_threads;
void tile_counts(int64_t counts[3]) { counts[0] = tile_products, counts[1] = tile_faults, counts[2] = tile_threads; }

static inline void _tile_loadconfig(const void *memory) {
    const uint8_t *config = memory;
    int wrong = config[0] > 1 || config[1], any = 0;
    for (int i = 0; i < 64; i++) any |= config[i], wrong |= config[i] && ((i >= 2 && i < 16) || (i >= 32 && i < 48) || i >= 56);
    tile_threads += (config[0] > 0) - (tiles.palette > 0);
    memset(&tiles, 0, sizeof tiles);
    tiles.palette = config[0];
    memcpy(tiles.row_bytes, config + 16, 16), memcpy(tiles.rows, config + 48, 8);
    for (int t = 0; t < 8; t++) wrong |= tiles.rows[t] > 16 || tiles.row_bytes[t] > 64 || !tiles.rows[t] != !tiles.row_bytes[t];
    tile_faults += wrong || (!config[0] && any);
}
static inline void _tile_release(void) {
    tile_threads -= tiles.palette > 0;
    memset(&tiles, 0, sizeof tiles);
}
static inline void tile_check(int tile) { tile_faults += !tiles.palette || !tiles.rows[tile] || !tiles.row_bytes[tile]; }
static inline void _tile_zero(int tile) {
    tile_check(tile);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}
static inline void _tile_loadd(int tile, const void *memory, int64_t stride) {
    _tile_zero(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(tiles.data[tile][row], (const uint8_t *)memory + row * stride, tiles.row_bytes[tile]);
}
static inline void _tile_stored(int tile, void *memory, int64_t stride) {
    tile_check(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy((uint8_t *)memory + row * stride, tiles.data[tile][row], tiles.row_bytes[tile]);
}
/* Signed bytes of a [rows, columns], unsigned ones of b [columns / 4, rows of b, 4], added to 32 bits. */
static inline void _tile_dpbsud(int sum, int a, int b) {
    tile_check(sum), tile_check(a), tile_check(b);
    tile_faults += sum == a || sum == b || a == b;
    tile_faults += tiles.rows[sum] != tiles.rows[a] || tiles.row_bytes[sum] != tiles.row_bytes[b];
    tile_faults += tiles.row_bytes[a] % 4 || tiles.row_bytes[b] % 4 || tiles.row_bytes[a] / 4 != tiles.rows[b];
    tile_products++;
    for (int m = 0; m < tiles.rows[sum]; m++)
        for (int n = 0; n < tiles.row_bytes[sum] / 4; n++) {
            uint32_t total;
            memcpy(&total, tiles.data[sum][m] + 4 * n, 4);
            for (int k = 0; k < tiles.row_bytes[a]; k++)
                total += (uint32_t)((int8_t)tiles.data[a][m][k] * tiles.data[b][k / 4][4 * n + k % 4]);
            memcpy(tiles.data[sum][m] + 4 * n, &total, 4);
        }
}
