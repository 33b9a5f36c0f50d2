/* What the files of the library share: intrinsics, their smallest pieces, and threads.

   Matrix products are computed by one of two units of x86 CPUs: tiles (AMX), or vectors with instructions for bfloat16
   (AVX512-BF16). Operands are laid out alike for both, and all else is the same. COMPILED is defined where the compiler
   knows them, and what is defined for them ends with END_OF_TARGET. Elsewhere a file's functions are empty, and
   actorpp_start says that they are not to be called. */

#pragma once

#include <stdint.h>

/* As in stages/native.py; to be raised there and here with every change of a function. */
enum { INTERFACE = 8 };

/* What products are computed on, the slowest first. */
enum { NOTHING, VECTORS, TILES };

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 11)
#define COMPILED

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#define END_OF_TARGET _Pragma("clang attribute pop")
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")
#define END_OF_TARGET _Pragma("GCC pop_options")
#endif
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

enum {
    LANES = 16, /* floats of a vector, rows of a tile */
    TILE = 512, /* bfloat16 numbers of a tile: 16 rows of 64 bytes */
    GROUP = 32, /* bfloat16 numbers of a cache line, of a row of a tile */
    MAX_THREADS = 64,
    AT_A_TIME = 8, /* rows that vectors multiply with two columns of numbers: twice as many sums hide what each takes */
};

/* VECTORS or TILES, as actorpp_start found. */
extern int actorpp_unit;

/* Sixteen bfloat16 numbers as float32. */
INLINE __m512 load(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

/* 2 ** t, to 3e-6 of itself: a minimax polynomial of degree 4 within half a unit of the nearest integer. */
INLINE __m512 exp2_of(__m512 t) {
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(t, whole);
    __m512 p = _mm512_set1_ps(0.00957010034f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0559178591f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240247443f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693121791f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999999285f));
    return _mm512_scalef_ps(p, whole);
}

/* Give tile i row_counts[i] rows of 64 bytes; 0: it is not used. The contents of all are lost. */
INLINE void configure(const uint8_t row_counts[8]) {
    struct {
        uint8_t palette, first_row, unused[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = row_counts[i] ? 64 : 0;
        config.rows[i] = row_counts[i];
    }
    _tile_loadconfig(&config);
}

/* Rows of numbers: number i of a row lies at data[row * row_stride + i / GROUP * group_stride + i % GROUP]. */
typedef struct {
    bf16 *data;
    int64_t row_stride, group_stride;
} Rows;

INLINE bf16 *at(const Rows *rows, int64_t row, int64_t i) {
    return rows->data + row * rows->row_stride + i / GROUP * rows->group_stride + i % GROUP;
}

/* Row after row of n numbers, as everyone else has them. */
INLINE Rows row_by_row(const bf16 *data, int64_t n) { return (Rows){(bf16 *)data, n, GROUP}; }

/* The first 32 numbers of all rows, then the next of all rows. A product makes 32 numbers of many rows at a time, and
   takes them so: it writes one line behind the other, and a tile's rows lie side by side. With lines that are rows
   apart a product of 512 rows takes a sixth longer. */
INLINE Rows group_by_group(bf16 *data, int64_t rows) { return (Rows){data, GROUP, rows * GROUP}; }

/* A linear layer. */
typedef struct {
    const bf16 *weight; /* panels */
    const bf16 *bias;   /* (out_features,), or NULL */
    int64_t in_features, out_features;
} Linear;

/* One side of the attention: number (head, token, i) lies at data[head * head_stride + token * token_stride + i]; of
   queries and results at [... + i / GROUP * group_stride + i % GROUP], as in Rows. */
typedef struct {
    bf16 *data;
    int64_t head_stride, token_stride;
} Side;

/* What the caller describes. Of a segment: offset of its first token in the packed row, its tokens, its first run and
   how many runs. Of a run: its first slot and its length. */
typedef struct {
    Side query, key, value, out;
    float *lse; /* (tokens, heads), or NULL */
    const int64_t *segments, *runs;
    int64_t num_segments, heads, kv_heads, key_width, value_width;
    int64_t group_stride; /* of queries and results: see Side */
    int64_t window; /* 0: none */
    float scaling;
    int32_t threads; /* at most */
} Step;

/* What vectors do instead of tiles: add to sum (r, c) the products of the 32 numbers of row r with those of column c. A
   vector of columns holds a pair of numbers of each of 16 columns, and the next pair of these lies behind it, as in a
   tile. There are one or two times 16 columns, and up to AT_A_TIME rows. */
INLINE void multiply_tile(__m512 sums[AT_A_TIME][2], int rows, int columns, const bf16 *row, int64_t row_stride,
                          const bf16 *column, const bf16 *next_column) {
#pragma GCC unroll 16
    for (int pair = 0; pair < GROUP / 2; pair++) {
        __m512bh first = (__m512bh)_mm512_loadu_si512(column + pair * GROUP), second = first;
        if (columns == 2) second = (__m512bh)_mm512_loadu_si512(next_column + pair * GROUP);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, row + r * row_stride + 2 * pair, sizeof both);
            __m512bh of_row = (__m512bh)_mm512_set1_epi32(both);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], first, of_row);
            if (columns == 2) sums[r][1] = _mm512_dpbf16_ps(sums[r][1], second, of_row);
        }
    }
}

/* Call work with each of count parts (at most MAX_THREADS, of so many bytes), each in a thread of its own where there
   are threads to be had. */
static inline void in_threads(void *(*work)(void *), void *parts, size_t bytes, int count) {
    pthread_t threads[MAX_THREADS];
    int own[MAX_THREADS] = {0};
    char *part = parts;
    for (int i = 1; i < count; i++) own[i] = !pthread_create(&threads[i], NULL, work, part + (size_t)i * bytes);
    for (int i = 0; i < count; i++)
        if (!own[i]) work(part + (size_t)i * bytes);
    for (int i = 1; i < count; i++)
        if (own[i]) pthread_join(threads[i], NULL);
}

/* Compute a step. Widths are multiples of 32, kv_heads divides heads, scaling is positive, and a token's elements lie
   side by side: the caller has checked that. Returns 0, or 1 when there is no memory. */
int actorpp_attend(const Step *step);

/* out = input * weight + bias, plus other where it has data. Gated: each panel's first 16 outputs g gate its last 16,
   u: SiLU(g) * u. Features are multiples of 32; other and out may be the same. At most so many threads compute. */
void actorpp_multiply(const Linear *linear, Rows input, Rows other, Rows out, int64_t rows, int gated, int threads);

/* The same of rows that lie one behind the other; other may be NULL. */
void actorpp_linear(const Linear *linear, const bf16 *input, const bf16 *other, bf16 *out, int64_t rows, int32_t gated,
                    int32_t threads);

/* out = weight * bf16(x / sqrt(mean(x * x) + epsilon)) for each row of n numbers, a multiple of 16. */
void actorpp_normalise(Rows x, const bf16 *weight, Rows out, int64_t rows, int64_t n, float epsilon);

/* The same of rows that lie one behind the other. */
void actorpp_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t n, float epsilon);

/* Rotates the first num_heads heads of each row in place by the angles of its position. A head has width numbers, a
   multiple of 32.

   cos, sin: (rows, width); a sine has the sign of what it is multiplied with: number i +- width / 2 for number i. */
void actorpp_turn(Rows heads, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t num_heads, int64_t width);

/* The same of rows of which each begins row_stride behind the one before. */
void actorpp_rotate(bf16 *heads, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t row_stride, int64_t num_heads,
                    int64_t width);

/* Copies row after row of each head to its slot: so many bytes (width). Strides are in bytes, too. */
void actorpp_file(char *to, const char *from, const int64_t *slots, int64_t rows, int64_t heads, int64_t width,
                  int64_t to_head, int64_t to_slot, int64_t from_head, int64_t from_row);

/* Where the largest of each row of n numbers is, the first of several; NaN counts as larger than all else. */
void actorpp_likeliest(const bf16 *x, int64_t *ids, int64_t rows, int64_t n);

#endif
