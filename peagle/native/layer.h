// A whole decoder layer.

#pragma once

#include <utility>
#include <vector>

#include "attention.h"
#include "rows.h"
#include "tiles.h"

#ifdef PEAGLE_TILES

namespace peagle {

void add(const Bf16* x, const Bf16* y, Bf16* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(out[i], load(x[i]) + load(y[i]));
}

struct Weights {  // of a decoder layer; the norms of queries and keys may be missing
  const Bf16 *input_norm, *q, *k, *v, *o, *post_norm, *gate, *up, *down, *q_norm, *k_norm;
};

struct Sizes {  // rows behind the tokens are padding
  int64_t rows, tokens, width, heads, kv_heads, head, inner, block, spans;
};

// A decoder layer of Llama or Qwen3, by the functions above: what is between them costs more in
// Python than they do.
void layer(const Bf16* x, Bf16* out, const Weights& w, const Bf16* cos, const Bf16* sin, Bf16* keys,
           Bf16* values, const int64_t* slots, const Sizes& n, const int64_t* spans,
           const int64_t* blocks, float eps, float scale, int threads) {
  int64_t queries = n.heads * n.head, kept = n.kv_heads * n.head;
  static thread_local std::vector<Bf16> room;
  room.resize(n.rows * (2 * n.width + 3 * queries + 4 * kept + 2 * n.inner));
  Bf16* free = room.data();
  auto take = [&](int64_t width) { return std::exchange(free, free + n.rows * width); };
  Bf16 *normed = take(n.width), *made = take(n.width), *q = take(queries), *k = take(kept),
       *v = take(kept), *turned_q = take(queries), *turned_k = take(kept), *seen = take(queries),
       *gated = take(n.inner), *up = take(n.inner);

  norm(x, w.input_norm, normed, n.rows, n.width, eps, threads);
  linear(normed, w.q, nullptr, q, n.rows, n.width, queries, threads);
  linear(normed, w.k, nullptr, k, n.rows, n.width, kept, threads);
  linear(normed, w.v, nullptr, v, n.rows, n.width, kept, threads);
  if (w.q_norm) norm(q, w.q_norm, q, n.rows * n.heads, n.head, eps, threads);
  if (w.k_norm) norm(k, w.k_norm, k, n.rows * n.kv_heads, n.head, eps, threads);
  rotate(q, cos, sin, turned_q, n.rows, n.heads, n.head, threads);
  rotate(k, cos, sin, turned_k, n.rows, n.kv_heads, n.head, threads);
  for (int64_t row = 0; row < n.tokens; ++row) {
    std::memcpy(keys + slots[row] * kept, turned_k + row * kept, kept * sizeof(Bf16));
    std::memcpy(values + slots[row] * kept, v + row * kept, kept * sizeof(Bf16));
  }
  attend(turned_q, Kept<Bf16>{keys, values, n.block, n.kv_heads, n.head, n.head}, seen, n.heads,
         spans, n.spans, blocks, Spec{scale, 0, 0, nullptr}, threads);
  std::fill(seen + n.tokens * queries, seen + n.rows * queries, Bf16{});
  linear(seen, w.o, nullptr, made, n.rows, queries, n.width, threads);
  add(x, made, out, n.rows * n.width);

  norm(out, w.post_norm, normed, n.rows, n.width, eps, threads);
  linear(normed, w.gate, nullptr, gated, n.rows, n.width, n.inner, threads);
  linear(normed, w.up, nullptr, up, n.rows, n.width, n.inner, threads);
  gate(gated, up, gated, n.rows, n.inner, threads);
  linear(gated, w.down, nullptr, made, n.rows, n.inner, n.width, threads);
  add(out, made, out, n.rows * n.width);
}

}  // namespace peagle

#endif
