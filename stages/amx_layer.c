/* Decoder layers of Llama's form in one call, each out of the library's other functions: norm, query, key and value,
   rotation, filing, attention, output, norm, gate and up, down.

   A decode step has few rows, so that calls between these cost as much as they do: what makes the calls has left the
   caches each time. What is the same in all steps is described once (Layer), and what is the same in all layers of a
   step once a step (Batch).

   This file knows nothing of Python or torch: stages/amx.py calls it, on CPUs for which actorpp_amx_start returned
   0. */

#include "amx.h"

#ifdef TILES

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

static void multiply(const Batch *batch, const Linear *linear, const bf16 *input, const bf16 *other, bf16 *out,
                     int gated) {
    actorpp_amx_linear(linear, input, other, out, batch->rows, gated, batch->threads);
}

static void normalise(const Batch *batch, const Norm *norm, const bf16 *x, bf16 *out, int64_t n) {
    actorpp_rms_norm(x, norm->weight, out, batch->rows, n, norm->epsilon);
}

static void file(const Batch *batch, const Layer *layer, const Side *side, const bf16 *from) {
    enum { SIZE = sizeof(bf16) };
    actorpp_file((char *)side->data, (const char *)from, batch->slots, batch->rows, layer->kv_heads,
                 layer->width * SIZE, side->head_stride * SIZE, layer->width * SIZE, layer->project.out_features * SIZE);
}

/* hidden and out may be the same. Returns whether there was memory. */
static int compute(const Layer *layer, const Batch *batch, const bf16 *hidden, bf16 *scratch, bf16 *out) {
    int64_t hidden_size = layer->project.in_features, row_size = layer->project.out_features;
    int64_t queries = layer->heads * layer->width, keys = layer->kv_heads * layer->width;
    bf16 *normed = scratch, *heads = normed + batch->rows * hidden_size, *attended = heads + batch->rows * row_size;
    bf16 *gated = attended + batch->rows * queries;
    Step step = {
        .query = {heads, layer->width, row_size},
        .key = layer->key,
        .value = layer->value,
        .out = {attended, layer->width, queries},
        .segments = batch->segments,
        .runs = batch->runs,
        .num_segments = batch->num_segments,
        .heads = layer->heads,
        .kv_heads = layer->kv_heads,
        .key_width = layer->width,
        .value_width = layer->width,
        .window = layer->window,
        .scaling = layer->scaling,
        .threads = batch->threads,
    };
    normalise(batch, &layer->before_attention, hidden, normed, hidden_size);
    multiply(batch, &layer->project, normed, NULL, heads, 0);
    actorpp_rotate(heads, batch->cos, batch->sin, batch->rows, row_size, layer->heads + layer->kv_heads, layer->width);
    file(batch, layer, &layer->key, heads + queries);
    file(batch, layer, &layer->value, heads + queries + keys);
    if (actorpp_amx_attend(&step)) return 0;
    multiply(batch, &layer->output, attended, hidden, out, 0);
    normalise(batch, &layer->before_mlp, out, normed, hidden_size);
    multiply(batch, &layer->gated, normed, NULL, gated, 1);
    multiply(batch, &layer->down, gated, out, out, 0);
    return 1;
}

/* Compute the layers in turn. hidden, out: (rows, hidden_size). scratch: for each row as many numbers as project, output
   and down of a layer have inputs and project has outputs. Returns 0, or 1 when there is no memory. */
int actorpp_amx_layers(const Layer *layers, int64_t count, const Batch *batch, const bf16 *hidden, bf16 *scratch,
                       bf16 *out) {
    for (int64_t i = 0; i < count; i++)
        if (!compute(&layers[i], batch, i ? out : hidden, scratch, out)) return 1;
    return 0;
}

END_OF_TILES

#else

void actorpp_amx_layers(void) {}

#endif
