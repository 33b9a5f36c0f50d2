/* What stands between a model's matrix products, row by row in bfloat16: normalising, rotating, filing keys and values,
   and finding the likeliest id.

   A decode step has few rows, so that calls cost more than what they compute: each function here stands for a handful
   of torch's. One thread computes all rows; beside the products that is nothing. Arithmetic is in float32, and each
   result is rounded once, to the nearest even. Pointers are to rows that lie one behind the other.

   This file knows nothing of Python or torch: stages/native.py calls it where actorpp_start found a unit. */

#include "native.h"

#ifdef COMPILED

#include <math.h>

enum { BLOCK = 16 }; /* rows that are computed side by side: they stay in the first cache */

INLINE __m512i rounded(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); /* adding could make it infinite, or zero */
    return _mm512_srli_epi32(_mm512_mask_mov_epi32(nearest, nan, _mm512_set1_epi32(0x7fc00000)), 16);
}

INLINE void store(bf16 *to, __m512 x) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(rounded(x))); }

void actorpp_normalise(Rows x, const bf16 *weight, Rows out, int64_t rows, int64_t n, float epsilon) {
    for (int64_t first = 0; first < rows; first += BLOCK) {
        int64_t end = first + BLOCK < rows ? first + BLOCK : rows;
        float scales[BLOCK];
        for (int64_t row = first; row < end; row++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = 0; i < n; i += LANES) {
                __m512 part = load(at(&x, row, i));
                sum = _mm512_fmadd_ps(part, part, sum);
            }
            scales[row - first] = 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)n + epsilon);
        }
        for (int64_t i = 0; i < n; i += LANES) {
            __m512 factor = load(weight + i);
            for (int64_t row = first; row < end; row++) {
                __m512 scale = _mm512_set1_ps(scales[row - first]);
                __m512i normed = _mm512_slli_epi32(rounded(_mm512_mul_ps(load(at(&x, row, i)), scale)), 16);
                store(at(&out, row, i), _mm512_mul_ps(_mm512_castsi512_ps(normed), factor));
            }
        }
    }
}

void actorpp_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t n, float epsilon) {
    actorpp_normalise(row_by_row(x, n), weight, row_by_row(out, n), rows, n, epsilon);
}

void actorpp_turn(Rows heads, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t num_heads, int64_t width) {
    int64_t half = width / 2;
    for (int64_t first = 0; first < rows; first += BLOCK) {
        int64_t end = first + BLOCK < rows ? first + BLOCK : rows;
        for (int64_t head = 0; head < num_heads * width; head += width) {
            for (int64_t row = first; row < end; row++) {
                const bf16 *c = cos + row * width, *s = sin + row * width;
                for (int64_t i = 0; i < half; i += LANES) {
                    bf16 *x = at(&heads, row, head + i), *y = at(&heads, row, head + half + i);
                    __m512 low = load(x), high = load(y);
                    store(x, _mm512_fmadd_ps(low, load(c + i), _mm512_mul_ps(high, load(s + i))));
                    store(y, _mm512_fmadd_ps(high, load(c + half + i), _mm512_mul_ps(low, load(s + half + i))));
                }
            }
        }
    }
}

void actorpp_rotate(bf16 *heads, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t row_stride, int64_t num_heads,
                    int64_t width) {
    actorpp_turn(row_by_row(heads, row_stride), cos, sin, rows, num_heads, width);
}

void actorpp_file(char *to, const char *from, const int64_t *slots, int64_t rows, int64_t heads, int64_t width,
                  int64_t to_head, int64_t to_slot, int64_t from_head, int64_t from_row) {
    for (int64_t head = 0; head < heads; head++, to += to_head, from += from_head)
        for (int64_t row = 0; row < rows; row++) memcpy(to + slots[row] * to_slot, from + row * from_row, (size_t)width);
}

/* Numbers that are in order as the 32 of up to count are, the others the least: zeros are equal, NaN is the largest. */
INLINE __m512i ordered(const bf16 *x, int64_t count) {
    __mmask32 there = count < 32 ? (__mmask32)((1u << count) - 1) : 0xffffffffu;
    __m512i bits = _mm512_maskz_loadu_epi16(there, x), size = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    __mmask32 nan = _mm512_cmpgt_epi16_mask(size, _mm512_set1_epi16(0x7f80));
    size = _mm512_mask_sub_epi16(size, _mm512_movepi16_mask(bits), _mm512_setzero_si512(), size);
    size = _mm512_mask_mov_epi16(size, nan, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_mov_epi16(_mm512_set1_epi16(-0x8000), there, size);
}

void actorpp_likeliest(const bf16 *x, int64_t *ids, int64_t rows, int64_t n) {
    for (int64_t row = 0; row < rows; row++, x += n) {
        __m512i lanes = _mm512_set1_epi16(-0x8000);
        for (int64_t i = 0; i < n; i += 32) lanes = _mm512_max_epi16(lanes, ordered(x + i, n - i));
        int16_t each[32], largest = -0x8000;
        _mm512_storeu_si512(each, lanes);
        for (int i = 0; i < 32; i++) largest = each[i] > largest ? each[i] : largest;
        int64_t at = 0;
        __mmask32 found;
        while (!(found = _mm512_cmpeq_epi16_mask(ordered(x + at, n - at), _mm512_set1_epi16(largest)))) at += 32;
        ids[row] = at + __builtin_ctz(found);
    }
}

END_OF_TARGET

#else

void actorpp_normalise(void) {}
void actorpp_rms_norm(void) {}
void actorpp_turn(void) {}
void actorpp_rotate(void) {}
void actorpp_file(void) {}
void actorpp_likeliest(void) {}

#endif
