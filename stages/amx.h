/* What the files of the library share: the vector and tile unit's intrinsics, their smallest pieces, and threads.

   TILES is defined where the compiler knows the tile unit (AMX) of x86 CPUs, and what is defined for it ends with
   END_OF_TILES. Elsewhere a file's functions are empty, and actorpp_amx_start says that they are not to be called. */

#pragma once

#include <stdint.h>

/* As in stages/amx.py; to be raised there and here with every change of a function. */
enum { INTERFACE = 2 };

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 11)
#define TILES

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#define END_OF_TILES _Pragma("clang attribute pop")
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")
#define END_OF_TILES
#endif
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

enum {
    LANES = 16,  /* floats of a vector, rows of a tile */
    TILE = 512,  /* bfloat16 numbers of a tile: 16 rows of 64 bytes */
    MAX_THREADS = 64,
};

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

#endif
