// Attention over paged KV memory: the structs that Python fills.
//
// KV memory of a layer: [num_blocks][num_kv_heads][block_size * head_dim keys, block_size * v_head_dim values]. Keys and
// values of a head stand in tiles of 16 positions, as the kernels read them:
//   keys    [head_dim / P][16][P]     positions are the lanes, P neighbouring dimensions go into one dot product
//   values  [16 / P][v_head_dim][P]   dimensions are the lanes, P neighbouring positions go into one dot product
// with P = 2 for bfloat16 and 8-bit elements (two are one operand of a bfloat16 dot product), 1 for the others. Where the
// elements are 8-bit integers, floats stand behind the values: scales of keys [block_size], scales of values [block_size].
// Where values are the first v_head_dim numbers of keys (latents), keys stand alone: their tiles are put into the order of
// values as they are read. Of 8-bit integers that part of a key has the first scale, the rest the second.
//
// The result for a query does not depend on how the work was cut: positions are taken in segments of ATTENTION_SEGMENT,
// counted from position 0; each segment gets a softmax of its own, and segments are merged in order (Rabe and Staats
// 2021, "Self-attention does not need O(n^2) memory"; Dao et al. 2022, "FlashAttention").
#pragma once

#include "lk.h"

enum { ATTENTION_SEGMENT = 512, ATTENTION_TILE = 16 };

// Queries of one row and, at run time, one KV head: num_query tokens from `token` on, the first at `position`.
struct AttentionItem {
    int32_t row, token, num_query, position;
    int32_t segment, num_segments;  // those to read, their results left from `partial` on; -1: all, the result goes to `out`
    int32_t partial;
};

// A row whose segments were read one by one: num_segments times num_query results stand from `partial` on.
struct AttentionMerge {
    int32_t token, num_query, partial, num_segments;
};

// One step of a group of layers: arguments of the operator "attention_plan", and its result, which every layer reads.
struct AttentionPlan {
    lk_header header;
    int64_t chunks[2];     // result: items and merges, times num_kv_heads; the chunks of "attention"
    AttentionItem* items;  // [max_items], result
    AttentionMerge* merges;  // [max_items], result
    float* partial;  // [max_partial][num_q_heads][v_head_dim + 2]: maximum, sum, weighted values
    const int32_t* query_start;  // [R + 1]
    const int32_t* seq_len;      // [R]
    const int32_t* table;        // [R][table_stride]
    const int64_t* tree;  // [T], or null: bit i of a token: whether it sees the place i before its row's last
    int64_t table_stride, num_rows, max_items, max_partial;
    int32_t num_q_heads, num_kv_heads, head_dim, v_head_dim, block_size;
    int32_t window;   // 0 = none
    int32_t chunked;  // the window begins at a multiple of its size
    int32_t causal;
    int32_t latent;  // values are a part of keys
    int32_t full;  // result: 1 when there was not enough room
};

struct AttentionArgs {
    lk_header header;
    const AttentionPlan* plan;
    const void* q;        // [T][num_q_heads][head_dim], q_stride elements from token to token, q_head from head to head
    const void* kv;       // of the layer
    void* out;            // [T][num_q_heads][v_head_dim]
    const float* slopes;  // [num_q_heads], of alibi, or null
    const float* sinks;   // [num_q_heads], or null
    int64_t q_stride, q_head;
    int32_t dtype, kv_dtype;
    float scale, softcap;  // softcap: 0 = none
};

struct WriteKvArgs {
    lk_header header;
    void* q;               // [T][num_q_heads][head_dim], strides of tokens and heads in elements; turned like k
    void* k;               // [T][num_kv_heads][head_dim]
    const void* v;         // [T][num_kv_heads][v_head_dim]
    void* kv;              // of the layer
    const int64_t* slots;  // [T]; -1: not written
    const float *cos, *sin;  // [T][pairs]
    int64_t q_stride, q_head, k_stride, k_head, v_stride, v_head;  // from token to token, from head to head
    int64_t num_tokens, step;                                      // a chunk is `step` tokens
    int32_t num_q_heads, num_kv_heads, head_dim, v_head_dim, block_size;
    int32_t latent;  // v is a part of k, and not written
    int32_t pairs;  // of values of a head that are turned; 0: q and k stay as they are
    int32_t interleaved, dtype, kv_dtype;
};

// Keys and values of places to other places, in all layers of a group, in the order given.
struct MoveKvArgs {
    lk_header header;
    void* kv;  // of the first layer; the others follow. A chunk is a layer
    const int64_t *sources, *targets;  // [num_tokens] slots
    int64_t num_tokens, layer_pages;   // pages of a layer: one for each block and KV head
    int32_t num_kv_heads, head_dim, v_head_dim, block_size, latent, kv_dtype;
};
