/* Linear layers in bfloat16 on the tile unit (AMX) or the vector unit of x86 CPUs: products of any number of rows with
   weights that were laid out as tiles, and what follows a product.

   Weights come in panels of 32 output features: for each 32 input features two tiles of 16 outputs, whose rows hold
   pairs of inputs. A panel is multiplied with all rows before the next one is, so that each weight is read once from
   memory; the rows are read from the second cache again for each panel, with loads that do not drive the panel out of
   the first. Two things go on beside the products: the next panel is fetched, and the sums of the block before are
   finished, on the vector unit that would else wait; or on vectors by ports that products leave idle.

   Sums are in float32, over the input features in their order, whatever the number of rows: what a row gives does not
   depend on those beside it, nor on the number of threads. Results are rounded once, to the nearest even.

   This file knows nothing of Python or torch: stages/native.py calls it where actorpp_start found a unit. */

#include "native.h"

#ifdef COMPILED

enum {
    PANEL = 32,       /* output features of a panel, input features of a tile */
    BLOCK = 32,       /* rows of a block: two tiles */
    PAIR = 2 * TILE,  /* numbers of a panel's two tiles */
    TILED = 1 << 20,  /* bytes, at most, of the rows that tiles multiply with a panel: they stay in the second cache */
    OTHERS = 1 << 22, /* of those that vectors do, which can wait for the third */
    LINE = 32,        /* numbers of a cache line */
    AHEAD = 8192,     /* numbers between what is multiplied and what is fetched where a panel is used once */
    ALONE = 1 << 26,  /* multiplications up to which one thread computes them: starting others costs more */
    LEAST_ROWS = 64,  /* what few rows count as there: they wait for their weights */
};

typedef enum { PLAIN, PLUS, GATED } Finish;

/* The part of a layer's outputs that a thread computes. */
typedef struct {
    Rows input;         /* of in_features */
    const bf16 *weight; /* panels */
    const bf16 *bias;   /* (out_features), or NULL */
    Rows other;         /* of out_features: added to the product */
    Rows out;           /* of out_features; gated: of half as many */
    int64_t rows, in_features, first_panel, end_panel;
    Finish finish;
} Part;

/* Sums of up to 32 rows with a panel, and which they are. */
typedef struct {
    float sums[BLOCK * PANEL] __attribute__((aligned(64)));
    int64_t row, panel;
    int rows;
} Block;

INLINE __m512 silu(__m512 x) {
    __m512 grown = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), grown));
}

/* Write the results of one row of a block. */
INLINE void finish_row(const Part *p, Finish finish, const Block *block, int row) {
    __m512 low = _mm512_load_ps(block->sums + row * PANEL), high = _mm512_load_ps(block->sums + row * PANEL + LANES);
    int64_t column = block->panel * PANEL;
    bf16 *to = at(&p->out, block->row + row, finish == GATED ? column / 2 : column);
    if (p->bias) {
        low = _mm512_add_ps(low, load(p->bias + column));
        high = _mm512_add_ps(high, load(p->bias + column + LANES));
    }
    if (finish == GATED) {
        __m256bh gated = _mm512_cvtneps_pbh(_mm512_mul_ps(silu(low), high));
        memcpy(to, &gated, sizeof gated);
        return;
    }
    if (finish == PLUS) {
        const bf16 *other = at(&p->other, block->row + row, column);
        low = _mm512_add_ps(low, load(other));
        high = _mm512_add_ps(high, load(other + LANES));
    }
    __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    memcpy(to, &both, sizeof both);
}

static void finish_any_row(const Part *p, const Block *block, int row) {
    if (p->finish == PLAIN) finish_row(p, PLAIN, block, row);
    if (p->finish == PLUS) finish_row(p, PLUS, block, row);
    if (p->finish == GATED) finish_row(p, GATED, block, row);
}

/* What goes on beside the products on vectors: finishing the rows of the block before, and fetching lines from ahead
   on, so many for each 32 input features. */
typedef struct {
    const Block *before;
    const bf16 *ahead;
    int finished, lines;
} Beside;

/* Sum up so many rows of a block, from that one on, on vectors. */
INLINE void sum_up_rows(const Part *p, Block *block, int first, int rows, int64_t row_stride, Beside *beside) {
    int64_t n = p->in_features, group = p->input.group_stride;
    const bf16 *weight = p->weight + block->panel * PANEL * n, *row = at(&p->input, block->row + first, 0);
    __m512 sums[AT_A_TIME][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += PANEL, weight += PAIR, row += group) {
        if (!first)
            for (int line = 0; line < beside->lines; line++, beside->ahead += LINE)
                _mm_prefetch(beside->ahead, _MM_HINT_T1);
        multiply_tile(sums, rows, 2, row, row_stride, weight, weight + TILE);
        if (beside->finished < beside->before->rows) finish_any_row(p, beside->before, beside->finished++);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        _mm512_store_ps(block->sums + (first + r) * PANEL, sums[r][0]);
        _mm512_store_ps(block->sums + (first + r) * PANEL + LANES, sums[r][1]);
    }
}

INLINE void sum_up_all_rows(const Part *p, Block *block, int64_t row_stride, Beside *beside) {
    int row = 0;
    for (; block->rows - row >= AT_A_TIME; row += AT_A_TIME) sum_up_rows(p, block, row, AT_A_TIME, row_stride, beside);
    switch (block->rows - row) {
    case 1: sum_up_rows(p, block, row, 1, row_stride, beside); break;
    case 2: sum_up_rows(p, block, row, 2, row_stride, beside); break;
    case 3: sum_up_rows(p, block, row, 3, row_stride, beside); break;
    case 4: sum_up_rows(p, block, row, 4, row_stride, beside); break;
    case 5: sum_up_rows(p, block, row, 5, row_stride, beside); break;
    case 6: sum_up_rows(p, block, row, 6, row_stride, beside); break;
    case 7: sum_up_rows(p, block, row, 7, row_stride, beside); break;
    }
}

/* Sum up a block on vectors. Meanwhile finish the one before, and fetch so many lines for each 32 input features from
   ahead on. */
static void sum_up_on_vectors(const Part *p, Block *block, const Block *before, const bf16 *ahead, int lines) {
    Beside beside = {before, ahead, 0, lines};
    if (p->input.row_stride == GROUP)
        sum_up_all_rows(p, block, GROUP, &beside); /* rows a known distance apart take fewer registers */
    else
        sum_up_all_rows(p, block, p->input.row_stride, &beside);
    while (beside.finished < before->rows) finish_any_row(p, before, beside.finished++);
}

/* Sum up a block of more than 16 rows (tall) or up to so many. Meanwhile finish the one before, and fetch so many lines
   in each step from ahead on. */
INLINE void sum_up(const Part *p, Finish finish, Block *block, int tall, const Block *before, const bf16 *ahead,
                   int lines) {
    int64_t n = p->in_features, steps = n / PANEL;
    const bf16 *weight = p->weight + block->panel * PANEL * n;
    const bf16 *upper = at(&p->input, block->row, 0), *lower = at(&p->input, block->row + LANES, 0);
    int64_t group = p->input.group_stride, row_bytes = p->input.row_stride * (int64_t)sizeof(bf16);
    int finished = 0, in_step = (int)((BLOCK + steps - 1) / steps);
    _tile_zero(0);
    _tile_zero(1);
    if (tall) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i++, weight += PAIR, upper += group, lower += group) {
        for (int line = 0; line < lines; line++, ahead += LINE) _mm_prefetch(ahead, _MM_HINT_T1);
        _tile_stream_loadd(4, upper, row_bytes);
        _tile_loadd(6, weight, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (tall) {
            _tile_stream_loadd(5, lower, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int j = 0; j < in_step && finished < before->rows; j++) finish_row(p, finish, before, finished++);
    }
    _tile_stored(0, block->sums, 2 * 64);
    _tile_stored(1, block->sums + LANES, 2 * 64);
    if (tall) {
        _tile_stored(2, block->sums + LANES * PANEL, 2 * 64);
        _tile_stored(3, block->sums + LANES * PANEL + LANES, 2 * 64);
    }
}

/* Compute the rows from first to end, few enough for the second cache. */
INLINE void compute_rows(const Part *p, Finish finish, int64_t first, int64_t end) {
    Block memory[2], *block = &memory[0], *before = &memory[1];
    int64_t blocks = (end - first + BLOCK - 1) / BLOCK, ahead = blocks == 1 ? AHEAD : PANEL * p->in_features;
    int lines = (int)((PAIR / LINE + blocks - 1) / blocks), configured = 0;
    before->rows = 0;
    for (int64_t panel = p->first_panel; panel < p->end_panel; panel++) {
        const bf16 *next = p->weight + panel * PANEL * p->in_features + ahead;
        for (int64_t row = first; row < end; row += BLOCK, next += lines * LINE * p->in_features / PANEL) {
            block->row = row;
            block->panel = panel;
            block->rows = (int)(end - row < BLOCK ? end - row : BLOCK);
            if (actorpp_unit == TILES && block->rows != configured) {
                uint8_t upper = (uint8_t)(block->rows < LANES ? block->rows : LANES);
                uint8_t lower = (uint8_t)(block->rows - upper);
                const uint8_t row_counts[8] = {upper, upper, lower, lower, upper, lower, LANES, LANES};
                configure(row_counts);
                configured = block->rows;
            }
            if (actorpp_unit == VECTORS)
                sum_up_on_vectors(p, block, before, next, lines);
            else if (block->rows > LANES)
                sum_up(p, finish, block, 1, before, next, lines);
            else
                sum_up(p, finish, block, 0, before, next, lines);
            Block *other = before;
            before = block;
            block = other;
            if (blocks > 1) continue;
            for (int i = 0; i < before->rows; i++) finish_row(p, finish, before, i);
            before->rows = 0;
        }
    }
    for (int i = 0; i < before->rows; i++) finish_row(p, finish, before, i);
}

INLINE void compute(const Part *p, Finish finish) {
    int64_t bytes = actorpp_unit == TILES ? TILED : OTHERS;
    int64_t blocks = (p->rows + BLOCK - 1) / BLOCK, most = bytes / 2 / p->in_features / BLOCK;
    int64_t times = most > 1 ? (blocks + most - 1) / most : blocks; /* of the same size: a panel for few rows is dear */
    for (int64_t i = 0; i < times; i++) {
        int64_t first = blocks * i / times * BLOCK, end = blocks * (i + 1) / times * BLOCK;
        compute_rows(p, finish, first, end < p->rows ? end : p->rows);
    }
}

static void *work(void *part) {
    const Part *p = part;
    if (p->finish == PLAIN) compute(p, PLAIN);
    if (p->finish == PLUS) compute(p, PLUS);
    if (p->finish == GATED) compute(p, GATED);
    if (actorpp_unit == TILES) _tile_release();
    return NULL;
}

void actorpp_multiply(const Linear *linear, Rows input, Rows other, Rows out, int64_t rows, int gated, int threads) {
    Part parts[MAX_THREADS];
    int64_t n = linear->in_features, panels = linear->out_features / PANEL;
    int64_t count = threads < MAX_THREADS ? threads : MAX_THREADS;
    if (count > panels) count = panels;
    if ((rows > LEAST_ROWS ? rows : LEAST_ROWS) * n * linear->out_features <= ALONE) count = 1;
    Finish finish = gated ? GATED : other.data ? PLUS : PLAIN;
    for (int64_t i = 0; i < count; i++) {
        int64_t first = panels * i / count, end = panels * (i + 1) / count;
        parts[i] = (Part){input, linear->weight, linear->bias, other, out, rows, n, first, end, finish};
    }
    in_threads(work, parts, sizeof *parts, (int)count);
}

void actorpp_linear(const Linear *linear, const bf16 *input, const bf16 *other, bf16 *out, int64_t rows, int32_t gated,
                    int32_t threads) {
    int64_t n = linear->out_features;
    actorpp_multiply(linear, row_by_row(input, linear->in_features), row_by_row(other, n),
                     row_by_row(out, gated ? n / 2 : n), rows, gated, threads);
}

END_OF_TARGET

#else

void actorpp_multiply(void) {}
void actorpp_linear(void) {}

#endif
