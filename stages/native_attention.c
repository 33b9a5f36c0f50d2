/* Softmax attention of a packed step's bfloat16 queries over their requests' keys, on the tile unit (AMX) or the vector
   unit of x86 CPUs.

   The online softmax is that of FlashAttention-2 (Dao, 2023): keys come in blocks, each query keeps the largest score,
   the sum of its weights and its weighted values so far. Products take bfloat16 and add up in float32; weights are
   rounded to bfloat16 for the second product, as torch's own kernel does.

   The tile unit works beside the vector unit: while the scores of a block become weights, the values of the block
   before are added up and the block after is scored (a turn). So one block's scores are turned into weights with the
   largest score known before it; where these become too large, which is rare, the block is done again. On vectors the
   same is done in the same order, by ports that products leave idle.

   Everything is computed transposed. Sixteen queries (a group) are the columns of a tile and a vector's lanes, keys are
   its rows. So the largest score and the sum need no step across lanes, keys are read as they are stored, and the
   weights come out as the tile unit wants its second operand: pairs of rows in turn. Values are transposed once for a
   range of keys, which all groups then share. The heads that share keys are neighbours in a group.

   A step's result does not depend on the number of threads: each computes groups of its own.

   This file knows nothing of Python or torch: stages/native.py calls it where actorpp_start found a unit. */

#include "native.h"

#ifdef COMPILED

#include <math.h>
#include <stddef.h>

enum {
    BLOCK = 64,     /* keys of a turn: their scores and those of the next stay in the first cache, weights fill tiles */
    RANGE = 2048,   /* keys that are laid out at a time: they and their values stay in the second cache */
    AT_ONCE = 2,    /* groups that share a key tile */
    NONE = -1,      /* no block */
    TURN = 256,     /* groups that share a range of keys, a multiple of AT_ONCE */
    ALONE = 1 << 21 /* scores of a step up to which one thread computes them: starting others costs more */
};

/* Stands for minus infinity: differences of it are numbers. */
#define HIDDEN (-1e30f)

/* A larger score than those so far is taken up when a query's weights add up to more than this: below it a smaller one
   serves as well, for float32 and bfloat16 are as exact everywhere. */
#define MOST 0x1p60f

typedef struct {
    bf16 *query;    /* key_width / 32 tiles: rows are pairs of elements, columns are queries */
    float *out;     /* value_width rows of 16 lanes, not yet divided by the total */
    float *largest; /* of the first block's scores, before scaling, or of a later one's that was taken up */
    float *total;   /* of the weights so far */
    int32_t position[LANES];
    int row; /* its first, of all rows of its segment and key head: heads of a token, tokens in turn */
} Group;

/* Where a request's tokens lie, gone through in order. */
typedef struct {
    const int64_t *run;
    int64_t start;
} Cursor;

/* A part of a step's work, and the memory it needs. */
typedef struct {
    const Step *step;
    int part, parts, failed;
    Cursor next; /* what is to be fetched meanwhile: this key head of a request with so many tokens */
    int64_t next_length;
    int next_head;
    int capacity; /* groups that there is room for */
    Group *groups;
    float *states;
    bf16 *queries, *keys, *values;
    float *scores;
} Worker;

/* --- arithmetic --------------------------------------------------------------------------------------------------- */

/* The 16 x 16 matrix of 32-bit numbers whose rows are given, transposed in place. */
INLINE void transpose(__m512i r[LANES]) {
    __m512i t[LANES];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

/* The sixteen numbers as bfloat16, rounded to nearest even. */
INLINE __m256i to_bf16(__m512i bits) {
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

/* --- a block of keys ---------------------------------------------------------------------------------------------- */

/* A block is named by its first key among those laid out. */

/* Where the scores of a block's keys for the first group are, and BLOCK rows further those for the second. Weights take
   their place. Those of a block and the next are apart. */
INLINE float *scores_of(const Worker *w, int block) { return w->scores + block / BLOCK % 2 * AT_ONCE * BLOCK * LANES; }

/* Key k of a block, from element d on, a multiple of 32. Of each block's keys the first 32 elements lie together, then
   the next of all: in rows that are a line apart, whatever the width. */
INLINE bf16 *keys_of(const Worker *w, int block, int k, int d) {
    return w->keys + block * w->step->key_width + d * BLOCK + k * GROUP;
}

/* Element d of the values of a block, from key k on, a multiple of 32. Tiles of 16 elements have rows of 32 keys. */
INLINE bf16 *values_of(const Worker *w, int block, int d, int k) {
    return w->values + block * w->step->value_width + d / 16 * (BLOCK / 32 * TILE) + k / 32 * TILE + d % 16 * GROUP;
}

/* Hide what the group's queries do not see of a block, which begins at the position first. That includes what is past
   the last key. */
static void hide(const Group *g, float *scores, int first, int window) {
    const __m512 hidden = _mm512_set1_ps(HIDDEN);
    __m512i to = _mm512_loadu_si512(g->position);
    __m512i from = window ? _mm512_sub_epi32(to, _mm512_set1_epi32(window)) : _mm512_set1_epi32(-1);
    for (int k = 0; k < BLOCK; k++) {
        __m512i at = _mm512_set1_epi32(first + k);
        __mmask16 seen = _mm512_cmple_epi32_mask(at, to) & _mm512_cmpgt_epi32_mask(at, from);
        float *row = scores + k * LANES;
        _mm512_store_ps(row, _mm512_mask_blend_ps(seen, hidden, _mm512_load_ps(row)));
    }
}

/* Take up the largest of a block's scores, and bring to it what was summed up before. */
static void take_up(Group *g, const float *scores, int width, __m512 factor) {
    __m512 before = _mm512_load_ps(g->largest), largest = before;
    for (int k = 0; k < BLOCK; k++) largest = _mm512_max_ps(largest, _mm512_load_ps(scores + k * LANES));
    __m512 shrink = exp2_of(_mm512_mul_ps(_mm512_sub_ps(before, largest), factor));
    _mm512_store_ps(g->largest, largest);
    _mm512_store_ps(g->total, _mm512_mul_ps(_mm512_load_ps(g->total), shrink));
    for (int d = 0; d < width; d++) {
        float *row = g->out + d * LANES;
        _mm512_store_ps(row, _mm512_mul_ps(_mm512_load_ps(row), shrink));
    }
}

/* Where a block's weights are up to, and what they are made with. */
typedef struct {
    float *scores;
    int pair; /* of rows */
    __m512 factor, shift[AT_ONCE], total[AT_ONCE];
} Weighing;

/* 2 ** t, so that what is cut off to bfloat16 is rounded to nearest: a minimax polynomial of degree 3 from the integer
   below (7e-5), plus half a unit of bfloat16's last place. */
INLINE __m512 weight(__m512 t) {
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0.07802452f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.22606716f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69583356f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.9999252f + 0x1p-8f));
    return _mm512_scalef_ps(p, t);
}

INLINE Weighing begin_weighing(const Worker *w, const Group *g, int groups, int block, __m512 factor) {
    Weighing v = {.scores = scores_of(w, block), .factor = factor};
#pragma GCC unroll 2
    for (int i = 0; i < groups; i++) {
        /* Half of HIDDEN: where all keys so far are hidden, their weights are 0. */
        __m512 largest = _mm512_max_ps(_mm512_load_ps(g[i].largest), _mm512_set1_ps(HIDDEN / 2));
        v.shift[i] = _mm512_mul_ps(largest, factor);
        v.total[i] = _mm512_load_ps(g[i].total);
    }
    return v;
}

INLINE void end_weighing(const Weighing *v, Group *g, int groups) {
#pragma GCC unroll 2
    for (int i = 0; i < groups; i++) _mm512_store_ps(g[i].total, v->total[i]);
}

/* Turn so many more pairs of rows of scores into weights, as the tile unit reads them: row k / 2 then holds keys k and
   k + 1. What is summed up are the rounded ones. */
INLINE void weigh(Weighing *v, int groups, int pairs) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int until = v->pair + pairs; v->pair < until; v->pair++) {
#pragma GCC unroll 2
        for (int i = 0; i < groups; i++) {
            float *to = v->scores + (i * BLOCK + v->pair) * LANES;
            const float *from = to + v->pair * LANES;
            __m512 low = weight(_mm512_fmsub_ps(_mm512_load_ps(from), v->factor, v->shift[i]));
            __m512 high = weight(_mm512_fmsub_ps(_mm512_load_ps(from + LANES), v->factor, v->shift[i]));
            __m512i cut = _mm512_castps_si512(low), both = _mm512_castps_si512(high);
            both = _mm512_mask_alignr_epi8(both, 0x3333333333333333, cut, cut, 2);
            v->total[i] = _mm512_dpbf16_ps(v->total[i], (__m512bh)both, ones);
            _mm512_store_si512(to, both);
        }
    }
}

/* For one or two groups: weigh the block now, and in between add the values of the block before by their weights and
   score the block after; each of them may be NONE. A tile's result is stored after some more weights are made, so that
   these do not wait for it. */
INLINE void turn_of(const Worker *w, Group *g, int groups, int before, int now, int after, __m512 factor) {
    const int key_width = (int)w->step->key_width, value_width = (int)w->step->value_width;
    const int pairs = now == NONE ? 0 : BLOCK / 2;
    int products = 0; /* after each, of two tiles at most, some weights are made */
    if (before != NONE) products += 2 * value_width / 16;
    if (after != NONE) products += 2 * BLOCK / 16 * ((key_width + 63) / 64);
    const int some = products ? pairs / products : 0;
    Weighing v = begin_weighing(w, g, groups, now == NONE ? 0 : now, factor);
    if (before != NONE) {
        const float *weights = scores_of(w, before);
        float *out = g[0].out, *other = g[groups - 1].out;
        _tile_loadd(4, weights, 64);
        _tile_loadd(6, weights + 16 * LANES, 64);
        if (groups == 2) {
            _tile_loadd(5, weights + BLOCK * LANES, 64);
            _tile_loadd(7, weights + (BLOCK + 16) * LANES, 64);
        }
        for (int d = 0; d < value_width; d += 16) {
            _tile_loadd(2, values_of(w, before, d, 0), 64);
            _tile_loadd(3, values_of(w, before, d, 32), 64);
            _tile_loadd(0, out + d * LANES, 64);
            _tile_dpbf16ps(0, 2, 4);
            _tile_dpbf16ps(0, 3, 6);
            weigh(&v, groups, some);
            if (groups == 2) {
                if (d) _tile_stored(1, other + (d - 16) * LANES, 64);
                _tile_loadd(1, other + d * LANES, 64);
                _tile_dpbf16ps(1, 2, 5);
                _tile_dpbf16ps(1, 3, 7);
            }
            weigh(&v, groups, some);
            _tile_stored(0, out + d * LANES, 64);
        }
        if (groups == 2) _tile_stored(1, other + (value_width - 16) * LANES, 64);
    }
    if (after != NONE) {
        float *scores = scores_of(w, after);
        for (int k = 0; k < BLOCK; k += 16) {
            for (int d = 0; d < key_width; d += 64) {
                const int both = d + 32 < key_width;
                if (k == 0 || key_width > 64) { /* else they are still there */
                    const bf16 *query = g[0].query + d / 32 * TILE, *other = g[groups - 1].query + d / 32 * TILE;
                    _tile_loadd(4, query, 64);
                    if (groups == 2) _tile_loadd(5, other, 64);
                    if (both) _tile_loadd(6, query + TILE, 64);
                    if (both && groups == 2) _tile_loadd(7, other + TILE, 64);
                }
                _tile_loadd(2, keys_of(w, after, k, d), 64);
                if (both) _tile_loadd(3, keys_of(w, after, k, d + 32), 64);
                if (!d) _tile_zero(0);
                _tile_dpbf16ps(0, 2, 4);
                if (both) _tile_dpbf16ps(0, 3, 6);
                weigh(&v, groups, some);
                if (groups == 2) {
                    if (!d && k) _tile_stored(1, scores + (BLOCK + k - 16) * LANES, 64);
                    if (!d) _tile_zero(1);
                    _tile_dpbf16ps(1, 2, 5);
                    if (both) _tile_dpbf16ps(1, 3, 7);
                }
                weigh(&v, groups, some);
            }
            _tile_stored(0, scores + k * LANES, 64);
        }
        if (groups == 2) _tile_stored(1, scores + (2 * BLOCK - 16) * LANES, 64);
    }
    weigh(&v, groups, pairs - v.pair);
    end_weighing(&v, g, groups);
}

/* Add the values of a block by their weights, on vectors, and make some weights after each tile. */
INLINE void add_values(const Worker *w, const Group *g, int groups, int block, Weighing *v, int some) {
    const bf16 *weights = (const bf16 *)scores_of(w, block);
    float *out[AT_ONCE] = {g[0].out, g[groups - 1].out};
    for (int d = 0; d < w->step->value_width; d += AT_A_TIME) {
        __m512 sums[AT_A_TIME][2];
#pragma GCC unroll 8
        for (int r = 0; r < AT_A_TIME; r++)
            for (int i = 0; i < groups; i++) sums[r][i] = _mm512_load_ps(out[i] + (d + r) * LANES);
        for (int k = 0; k < BLOCK; k += 32) {
            const bf16 *values = values_of(w, block, d, k), *of_keys = weights + k * LANES;
            multiply_tile(sums, AT_A_TIME, groups, values, GROUP, of_keys, of_keys + BLOCK * GROUP);
            weigh(v, groups, some);
        }
#pragma GCC unroll 8
        for (int r = 0; r < AT_A_TIME; r++)
            for (int i = 0; i < groups; i++) _mm512_store_ps(out[i] + (d + r) * LANES, sums[r][i]);
    }
}

/* Score a block, on vectors, and make some weights after each tile. */
INLINE void score(const Worker *w, const Group *g, int groups, int block, Weighing *v, int some) {
    float *scores = scores_of(w, block);
    for (int k = 0; k < BLOCK; k += AT_A_TIME) {
        __m512 sums[AT_A_TIME][2];
#pragma GCC unroll 8
        for (int r = 0; r < AT_A_TIME; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        for (int d = 0; d < w->step->key_width; d += 32) {
            const bf16 *query = g[0].query + d / 32 * TILE, *other = g[groups - 1].query + d / 32 * TILE;
            multiply_tile(sums, AT_A_TIME, groups, keys_of(w, block, k, d), GROUP, query, other);
            weigh(v, groups, some);
        }
#pragma GCC unroll 8
        for (int r = 0; r < AT_A_TIME; r++)
            for (int i = 0; i < groups; i++) _mm512_store_ps(scores + (i * BLOCK + k + r) * LANES, sums[r][i]);
    }
}

/* The same as turn_of, on vectors. Weights take what products leave idle there: most of it is done by other ports. */
INLINE void turn_on_vectors(const Worker *w, Group *g, int groups, int before, int now, int after, __m512 factor) {
    const int pairs = now == NONE ? 0 : BLOCK / 2;
    int64_t tiles = 0;
    if (before != NONE) tiles += w->step->value_width / AT_A_TIME * (BLOCK / 32);
    if (after != NONE) tiles += BLOCK / AT_A_TIME * (w->step->key_width / 32);
    const int some = tiles ? (int)(pairs / tiles) : 0;
    Weighing v = begin_weighing(w, g, groups, now == NONE ? 0 : now, factor);
    if (before != NONE) add_values(w, g, groups, before, &v, some);
    if (after != NONE) score(w, g, groups, after, &v, some);
    weigh(&v, groups, pairs - v.pair);
    end_weighing(&v, g, groups);
}

static void turn(const Worker *w, Group *g, int groups, int before, int now, int after, __m512 factor) {
    if (actorpp_unit == VECTORS && groups == 2)
        turn_on_vectors(w, g, 2, before, now, after, factor);
    else if (actorpp_unit == VECTORS)
        turn_on_vectors(w, g, 1, before, now, after, factor);
    else if (groups == 2)
        turn_of(w, g, 2, before, now, after, factor);
    else
        turn_of(w, g, 1, before, now, after, factor);
}

/* Hide what the groups' queries do not see of a block that has been scored; the keys begin at the position first. */
static void hide_unseen(const Worker *w, const Group *g, int groups, int first, int block) {
    int window = (int)w->step->window;
    for (int i = 0; i < groups; i++, g++) {
        int lowest = g->position[0], highest = g->position[LANES - 1];
        if (first + block + BLOCK - 1 > lowest || (window && first + block <= highest - window))
            hide(g, scores_of(w, block) + i * BLOCK * LANES, first + block, window);
    }
}

/* Attend with one or two groups over the keys that are laid out, which begin at the position first. */
static void over_range(const Worker *w, Group *g, int groups, int first, int count) {
    int width = (int)w->step->value_width, window = (int)w->step->window;
    const __m512 factor = _mm512_set1_ps(w->step->scaling * 1.44269504f);
    int end = g[groups - 1].position[LANES - 1] + 1 - first, begin = window ? g[0].position[0] + 1 - window - first : 0;
    if (end > count) end = count;
    int before = NONE, now = begin < 0 ? 0 : begin / BLOCK * BLOCK;
    if (now >= end) return;
    turn(w, g, groups, NONE, NONE, now, factor);
    for (; now < end; now += BLOCK) {
        float *scores = scores_of(w, now);
        __m512 totals[AT_ONCE];
        int first_scores = 0, too_large = 0;
        hide_unseen(w, g, groups, first, now);
        for (int i = 0; i < groups; i++)
            first_scores |= _mm512_cmp_ps_mask(_mm512_load_ps(g[i].largest), _mm512_set1_ps(HIDDEN), _CMP_EQ_OQ);
        if (first_scores) {
            turn(w, g, groups, before, NONE, NONE, factor);
            before = NONE;
            for (int i = 0; i < groups; i++) take_up(&g[i], scores + i * BLOCK * LANES, width, factor);
        }
        for (int i = 0; i < groups; i++) totals[i] = _mm512_load_ps(g[i].total);
        turn(w, g, groups, before, now, now + BLOCK < end ? now + BLOCK : NONE, factor);
        for (int i = 0; i < groups; i++)
            too_large |= _mm512_cmp_ps_mask(_mm512_load_ps(g[i].total), _mm512_set1_ps(MOST), _CMP_NLE_UQ);
        if (too_large) {
            turn(w, g, groups, NONE, NONE, now, factor);
            hide_unseen(w, g, groups, first, now);
            for (int i = 0; i < groups; i++) {
                _mm512_store_ps(g[i].total, totals[i]);
                take_up(&g[i], scores + i * BLOCK * LANES, width, factor);
            }
            turn(w, g, groups, NONE, now, NONE, factor);
        }
        before = now;
    }
    turn(w, g, groups, before, NONE, NONE, factor);
}

/* --- laying out --------------------------------------------------------------------------------------------------- */

/* Lay out a group's queries as tiles, and begin its softmax. Lanes past the last row repeat it. */
static void begin_group(const Step *step, Group *g, int64_t offset, int past, int row, int rows, int head) {
    int fold = (int)(step->heads / step->kv_heads);
    g->row = row;
    const bf16 *from[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        int own = row + lane < rows ? row + lane : rows - 1;
        g->position[lane] = past + own / fold;
        from[lane] = step->query.data + (head * fold + own % fold) * step->query.head_stride +
                     (offset + own / fold) * step->query.token_stride;
    }
    for (int d = 0; d < step->key_width; d += 32) {
        __m512i r[LANES];
        for (int lane = 0; lane < LANES; lane++) r[lane] = _mm512_loadu_si512(from[lane] + d / GROUP * step->group_stride);
        transpose(r);
        for (int pair = 0; pair < 16; pair++) _mm512_store_si512(g->query + d / 32 * TILE + pair * 32, r[pair]);
    }
    memset(g->out, 0, (size_t)step->value_width * LANES * sizeof(float));
    _mm512_store_ps(g->largest, _mm512_set1_ps(HIDDEN));
    _mm512_store_ps(g->total, _mm512_setzero_ps());
}

/* Write a group's result. */
static void end_group(const Step *step, const Group *g, int64_t offset, int rows, int head) {
    int fold = (int)(step->heads / step->kv_heads), lanes = rows - g->row < LANES ? rows - g->row : LANES;
    __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(g->total));
    bf16 *to[LANES];
    for (int lane = 0; lane < lanes; lane++) {
        int own = g->row + lane, of = head * fold + own % fold;
        int64_t token = offset + own / fold;
        to[lane] = step->out.data + of * step->out.head_stride + token * step->out.token_stride;
        if (step->lse) step->lse[token * step->heads + of] = g->largest[lane] * step->scaling + logf(g->total[lane]);
    }
    for (int d = 0; d < step->value_width; d += 16) {
        __m512i r[LANES];
        for (int i = 0; i < 16; i++)
            r[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(g->out + (d + i) * LANES), inverse));
        transpose(r);
        int64_t at = d / GROUP * step->group_stride + d % GROUP;
        for (int lane = 0; lane < lanes; lane++) _mm256_storeu_si256((__m256i *)(to[lane] + at), to_bf16(r[lane]));
    }
}

static int64_t slot_of(Cursor *cursor, int64_t position) {
    while (position >= cursor->start + cursor->run[1]) {
        cursor->start += cursor->run[1];
        cursor->run += 2;
    }
    return cursor->run[0] + position - cursor->start;
}

/* Fetch the keys and values of 32 tokens that are laid out later, so that they are in the second cache then. */
static void fetch(Worker *w, int64_t first) {
    const Side *key = &w->step->key, *value = &w->step->value;
    for (int64_t at = first; at < first + 32 && at < w->next_length; at++) {
        int64_t slot = slot_of(&w->next, at);
        const bf16 *from = key->data + w->next_head * key->head_stride + slot * key->token_stride;
        for (int d = 0; d < w->step->key_width; d += 32) _mm_prefetch(from + d, _MM_HINT_T1);
        from = value->data + w->next_head * value->head_stride + slot * value->token_stride;
        for (int d = 0; d < w->step->value_width; d += 32) _mm_prefetch(from + d, _MM_HINT_T1);
    }
}

/* Lay out a range of keys, and their values transposed. What is past the last key of the last block is zero. */
static void lay_out(Worker *w, Cursor *cursor, int first, int count, int head) {
    const Step *step = w->step;
    const Side *key = &step->key, *value = &step->value;
    for (int at = 0; at < (count + BLOCK - 1) / BLOCK * BLOCK; at += 32) {
        const bf16 *from[32];
        fetch(w, first + at);
        for (int k = 0; k < 32; k++) {
            const bf16 *stored = NULL;
            from[k] = NULL;
            if (at + k < count) {
                int64_t slot = slot_of(cursor, first + at + k);
                from[k] = value->data + head * value->head_stride + slot * value->token_stride;
                stored = key->data + head * key->head_stride + slot * key->token_stride;
            }
            for (int d = 0; d < step->key_width; d += 32) {
                __m512i part = stored ? _mm512_loadu_si512(stored + d) : _mm512_setzero_si512();
                _mm512_store_si512(keys_of(w, at / BLOCK * BLOCK, at % BLOCK + k, d), part);
            }
        }
        for (int d = 0; d < step->value_width; d += 16) {
            __m512i r[LANES];
            for (int i = 0; i < 16; i++) {
                __m512i pair[2];
                for (int j = 0; j < 2; j++) {
                    const bf16 *row = from[2 * i + j];
                    pair[j] = _mm512_setzero_si512();
                    if (row) pair[j] = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(row + d)));
                }
                r[i] = _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16));
            }
            transpose(r);
            bf16 *tile = values_of(w, at / BLOCK * BLOCK, d, at % BLOCK);
            for (int i = 0; i < 16; i++) _mm512_store_si512(tile + i * 32, r[i]);
        }
    }
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

static void *room(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes) ? NULL : memory;
}

/* Memory for so many groups. Returns whether there is. */
static int reserve(Worker *w, int groups) {
    const Step *step = w->step;
    if (groups <= w->capacity) return 1;
    free(w->groups);
    free(w->states);
    free(w->queries);
    size_t state = (size_t)(step->value_width + 2) * LANES, query = (size_t)step->key_width * LANES;
    w->groups = malloc((size_t)groups * sizeof(Group));
    w->states = room((size_t)groups * state * sizeof(float));
    w->queries = room((size_t)groups * query * sizeof(bf16));
    w->capacity = groups;
    if (!w->groups || !w->states || !w->queries) return 0;
    for (int i = 0; i < groups; i++) {
        Group *g = &w->groups[i];
        g->query = w->queries + (size_t)i * query;
        g->out = w->states + (size_t)i * state;
        g->largest = g->out + step->value_width * LANES;
        g->total = g->largest + LANES;
    }
    return 1;
}

/* Compute the groups that stand first in the worker's memory, of one segment and one key head. */
static void attend_groups(Worker *w, int groups, int64_t offset, int rows, const int64_t *runs, int head) {
    const Step *step = w->step;
    int end = w->groups[groups - 1].position[LANES - 1] + 1;
    int start = step->window ? (w->groups[0].position[0] + 1 - (int)step->window) / BLOCK * BLOCK : 0;
    if (start < 0) start = 0;
    Cursor cursor = {runs, 0};
    for (int first = start; first < end; first += RANGE) {
        int count = end - first < RANGE ? end - first : RANGE;
        lay_out(w, &cursor, first, count, head);
        int i = 0;
        for (; i + 1 < groups; i += 2) over_range(w, &w->groups[i], 2, first, count);
        if (i < groups) over_range(w, &w->groups[i], 1, first, count);
    }
    for (int i = 0; i < groups; i++) end_group(step, &w->groups[i], offset, rows, head);
}

/* Keys of a segment: tokens of its request so far. */
static int64_t count_keys(const Step *step, const int64_t *segment) {
    int64_t count = 0;
    for (int64_t i = 0; i < segment[3]; i++) count += step->runs[2 * (segment[2] + i) + 1];
    return count;
}

/* The worker's groups of one segment and one key head, so many at a time that what they have summed up stays in the
   second cache; those of all segments and heads are dealt out in turn. Returns whether there was memory. */
static int attend_segment(Worker *w, const int64_t *segment, int head, int64_t *dealt) {
    const Step *step = w->step;
    int64_t offset = segment[0];
    const int64_t *runs = step->runs + 2 * segment[2];
    int n = (int)segment[1], past = (int)count_keys(step, segment) - n, rows = n * (int)(step->heads / step->kv_heads);
    int all = (rows + LANES - 1) / LANES, at_once = all == 1 ? 1 : AT_ONCE, groups = 0;
    if (!reserve(w, all < TURN ? all : TURN)) return 0;
    for (int i = 0; i < all; i += at_once) {
        if ((*dealt)++ % w->parts != w->part) continue;
        for (int j = i; j < i + at_once && j < all; j++)
            begin_group(step, &w->groups[groups++], offset, past, j * LANES, rows, head);
        if (groups < TURN) continue;
        attend_groups(w, groups, offset, rows, runs, head);
        groups = 0;
    }
    if (groups) attend_groups(w, groups, offset, rows, runs, head);
    return 1;
}

/* Have a task's keys and values fetched while the one before it is computed, if that one is a single group: the many of
   a chunk leave time enough, and need the cache. */
static void expect(Worker *w, int64_t task, const int64_t *before) {
    const Step *step = w->step;
    const int64_t *segment = step->segments + task / step->kv_heads * 4;
    w->next_length = 0;
    if (task >= step->num_segments * step->kv_heads || before[1] * step->heads > LANES * step->kv_heads) return;
    w->next_length = count_keys(step, segment);
    w->next_head = (int)(task % step->kv_heads);
    w->next = (Cursor){step->runs + 2 * segment[2], 0};
}

static void *work(void *argument) {
    Worker *w = argument;
    const Step *step = w->step;
    const uint8_t full[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    w->keys = room((size_t)RANGE * step->key_width * sizeof(bf16));
    w->values = room((size_t)RANGE * step->value_width * sizeof(bf16));
    w->scores = room((size_t)2 * AT_ONCE * BLOCK * LANES * sizeof(float));
    w->failed = !w->keys || !w->values || !w->scores;
    int64_t dealt = 0;
    /* Numbers too small for float32 are zeros: to make them by halves would take the vector unit thirty times as long. */
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON);
    if (actorpp_unit == TILES) configure(full);
    for (int64_t task = 0; task < step->num_segments * step->kv_heads && !w->failed; task++) {
        const int64_t *segment = step->segments + task / step->kv_heads * 4;
        expect(w, task + w->parts, segment);
        w->failed = !attend_segment(w, segment, (int)(task % step->kv_heads), &dealt);
    }
    if (actorpp_unit == TILES) _tile_release();
    _mm_setcsr(mode);
    free(w->groups);
    free(w->states);
    free(w->queries);
    free(w->keys);
    free(w->values);
    free(w->scores);
    return NULL;
}

/* How many scores there are at most. */
static int64_t count_scores(const Step *step) {
    int64_t count = 0;
    for (const int64_t *segment = step->segments; segment < step->segments + 4 * step->num_segments; segment += 4)
        count += segment[1] * count_keys(step, segment);
    return count * step->heads;
}

int actorpp_attend(const Step *step) {
    Worker workers[MAX_THREADS];
    int parts = step->threads < MAX_THREADS ? step->threads : MAX_THREADS, failed = 0;
    if (count_scores(step) <= ALONE) parts = 1;
    for (int i = 0; i < parts; i++) workers[i] = (Worker){.step = step, .part = i, .parts = parts};
    in_threads(work, workers, sizeof *workers, parts);
    for (int i = 0; i < parts; i++) failed |= workers[i].failed;
    return failed;
}

END_OF_TARGET

#else

int actorpp_attend(const void *step) {
    (void)step;
    return 1;
}

#endif
