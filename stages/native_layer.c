/* Decoder layers of Llama's form in one call, each out of the library's other functions: norm, query, key and value,
   rotation, filing, attention, output, norm, gate and up, down.

   A decode step has few rows, so that calls between these cost as much as they do: what makes the calls has left the
   caches each time. What is the same in all steps is described once (Layer), and what is the same in all layers of a
   step once a step (Batch).

   This file knows nothing of Python or torch: stages/native.py calls it where actorpp_start found a unit. */

#include "native.h"

#ifdef COMPILED

typedef struct {
    const bf16 *weight;
    float epsilon;
} Norm;

typedef struct {
    Norm before_attention, before_mlp;
    Linear project; /* to the queries of all heads, then the keys, then the values */
    Linear output;
    Linear gated; /* gate and up */
    Linear down;
    Side key, value; /* everything that is stored of the layer */
    int64_t heads, kv_heads, width, window;
    float scaling;
} Layer;

typedef struct {
    const bf16 *cos, *sin;                   /* as actorpp_rotate takes them */
    const int64_t *slots, *segments, *runs; /* slots: (rows,), of the new keys and values; others: see Step */
    int64_t rows, num_segments;
    int32_t threads;
} Batch;

static void multiply(const Batch *batch, const Linear *linear, Rows input, Rows other, Rows out, int gated) {
    actorpp_multiply(linear, input, other, out, batch->rows, gated, batch->threads);
}

static void normalise(const Batch *batch, const Norm *norm, Rows x, Rows out, int64_t n) {
    actorpp_normalise(x, norm->weight, out, batch->rows, n, norm->epsilon);
}

/* File keys or values, which are from that number of the rows on. */
static void file(const Batch *batch, const Layer *layer, const Side *side, const Rows *rows, int64_t from) {
    enum { SIZE = sizeof(bf16) };
    for (int64_t i = 0; i < layer->width; i += GROUP)
        actorpp_file((char *)(side->data + i), (const char *)at(rows, 0, from + i), batch->slots, batch->rows,
                     layer->kv_heads, GROUP * SIZE, side->head_stride * SIZE, side->token_stride * SIZE,
                     layer->width / GROUP * rows->group_stride * SIZE, rows->row_stride * SIZE);
}

static void copy(Rows to, Rows from, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < n; i += GROUP)
        for (int64_t row = 0; row < rows; row++) memcpy(at(&to, row, i), at(&from, row, i), GROUP * sizeof *to.data);
}

/* Compute a layer in place. Returns whether there was memory. */
static int compute(const Layer *layer, const Batch *batch, Rows hidden, bf16 *scratch) {
    int64_t rows = batch->rows, hidden_size = layer->project.in_features, queries = layer->output.in_features;
    Rows normed = group_by_group(scratch, rows), none = {NULL, 0, 0};
    Rows heads = group_by_group(normed.data + rows * hidden_size, rows);
    Rows attended = group_by_group(heads.data + rows * layer->project.out_features, rows);
    Rows gated = group_by_group(attended.data + rows * queries, rows);
    int64_t group = heads.group_stride, of_head = layer->width / GROUP * group;
    Step step = {
        .query = {heads.data, of_head, GROUP},
        .key = layer->key,
        .value = layer->value,
        .out = {attended.data, of_head, GROUP},
        .segments = batch->segments,
        .runs = batch->runs,
        .num_segments = batch->num_segments,
        .heads = layer->heads,
        .kv_heads = layer->kv_heads,
        .key_width = layer->width,
        .value_width = layer->width,
        .group_stride = group,
        .window = layer->window,
        .scaling = layer->scaling,
        .threads = batch->threads,
    };
    normalise(batch, &layer->before_attention, hidden, normed, hidden_size);
    multiply(batch, &layer->project, normed, none, heads, 0);
    actorpp_turn(heads, batch->cos, batch->sin, rows, layer->heads + layer->kv_heads, layer->width);
    file(batch, layer, &layer->key, &heads, queries);
    file(batch, layer, &layer->value, &heads, queries + layer->kv_heads * layer->width);
    if (actorpp_attend(&step)) return 0;
    multiply(batch, &layer->output, attended, hidden, hidden, 0);
    normalise(batch, &layer->before_mlp, hidden, normed, hidden_size);
    multiply(batch, &layer->gated, normed, none, gated, 1);
    multiply(batch, &layer->down, gated, hidden, hidden, 0);
    return 1;
}

/* Compute the layers in turn. hidden, out: (rows, hidden_size). scratch: for each row twice as many numbers as
   hidden_size, and as many as project of a layer has outputs and its output and down have inputs. Returns 0, or 1 when
   there is no memory. */
int actorpp_layers(const Layer *layers, int64_t count, const Batch *batch, const bf16 *hidden, bf16 *scratch,
                   bf16 *out) {
    int64_t n = layers->project.in_features;
    Rows between = group_by_group(scratch, batch->rows);
    copy(between, row_by_row(hidden, n), batch->rows, n);
    for (int64_t i = 0; i < count; i++)
        if (!compute(&layers[i], batch, between, scratch + batch->rows * n)) return 1;
    copy(row_by_row(out, n), between, batch->rows, n);
    return 0;
}

END_OF_TARGET

#else

void actorpp_layers(void) {}

#endif
