/* The tile unit's intrinsics on the vector unit, for CPUs without AMX: included before a source of the library, it has
   the tile unit's code run on any CPU with AVX512-BF16. What it computes is what the instructions' description says. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static _Thread_local struct {
    int rows, row_bytes;
    uint8_t row[16][64] __attribute__((aligned(64)));
} emulated[8];

static inline void emulated_loadconfig(const uint8_t *config) {
    for (int i = 0; i < 8; i++) {
        memset(&emulated[i], 0, sizeof emulated[i]);
        memcpy(&emulated[i].row_bytes, config + 16 + 2 * i, 2);
        emulated[i].rows = config[48 + i];
    }
}

static inline void emulated_zero(int tile) { memset(emulated[tile].row, 0, sizeof emulated[tile].row); }

static inline void emulated_load(int tile, const void *from, int64_t stride) {
    emulated_zero(tile);
    for (int r = 0; r < emulated[tile].rows; r++)
        memcpy(emulated[tile].row[r], (const char *)from + r * stride, (size_t)emulated[tile].row_bytes);
}

static inline void emulated_store(int tile, void *to, int64_t stride) {
    for (int r = 0; r < emulated[tile].rows; r++)
        memcpy((char *)to + r * stride, emulated[tile].row[r], (size_t)emulated[tile].row_bytes);
}

__attribute__((target("avx512f,avx512bf16"))) static inline void emulated_dpbf16ps(int sum, int left, int right) {
    for (int r = 0; r < emulated[sum].rows; r++) {
        __m512 total = _mm512_load_ps(emulated[sum].row[r]);
        for (int k = 0; k < emulated[left].row_bytes / 4; k++) {
            int32_t pair;
            memcpy(&pair, emulated[left].row[r] + 4 * k, sizeof pair);
            __m512bh columns = (__m512bh)_mm512_load_si512(emulated[right].row[k]);
            total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_set1_epi32(pair), columns);
        }
        _mm512_store_ps(emulated[sum].row[r], total);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_loadconfig((const uint8_t *)(config))
#define _tile_release() memset(emulated, 0, sizeof emulated)
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sum, left, right) emulated_dpbf16ps(sum, left, right)
