// A whole decoder layer.

#pragma once

#include <utility>

#include "linear.h"
#include "rows.h"
#include "spans.h"

#ifdef PEAGLE_TILES

namespace peagle {

void add(const Bf16* x, const Bf16* y, Bf16* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(out[i], load(x[i]) + load(y[i]));
}

struct Weights {  // of a decoder layer; the norms behind the second may be missing
  Matrix q, k, v, o, gate, up, down;
  const Bf16 *input_norm, *post_norm, *q_norm, *k_norm;
  const Bf16* hidden_norm;  // of a head's first layer, and whether what it makes is the residual
  int64_t normed_residual;
};

struct Cache {  // a layer's
  Bf16 *keys, *values;
};

struct Sizes {  // rows behind the tokens are padding
  int64_t rows, tokens, width, head, block, spans, taps;
};

// What enters a layer, beside what entered others: as columns of `features`.
void tap(const Bf16* x, int64_t layer, const int64_t* taps, Bf16* features, const Sizes& n) {
  for (int64_t column = 0; column < n.taps; ++column)
    if (taps[column] == layer)
      for (int64_t row = 0; row < n.rows; ++row)
        std::memcpy(features + (row * n.taps + column) * n.width, x + row * n.width,
                    n.width * sizeof(Bf16));
}

// A decoder layer of Llama or Qwen3, by the functions above: what is between them costs more in
// Python than they do. A head's first layer reads an embedding beside x. `out` may be x.
void layer(const Bf16* x, const Bf16* embedding, Bf16* out, const Weights& w, const Bf16* cos,
           const Bf16* sin, const Cache& cache, const int64_t* slots, const Sizes& n,
           const int64_t* spans, const int64_t* blocks, float eps, float scale, int threads) {
  int64_t queries = w.q.outputs, kept = w.k.outputs, inner = w.gate.outputs;
  int64_t heads = queries / n.head, kv_heads = kept / n.head;
  static thread_local std::vector<Bits> room;  // aligned, as tiles want rows
  int64_t values = n.rows * (3 * n.width + 3 * queries + 3 * kept + 2 * inner);
  void* all = room_for(room, (values + STEP - 1) / STEP);
  Bf16* free = static_cast<Bf16*>(all);
  auto take = [&](int64_t width) { return std::exchange(free, free + n.rows * width); };
  Bf16 *normed = take(2 * n.width), *made = take(n.width), *q = take(queries), *k = take(kept),
       *v = take(kept), *turned_q = take(queries), *turned_k = take(kept), *seen = take(queries),
       *gated = take(inner), *up = take(inner);

  int64_t inputs = w.hidden_norm ? 2 * n.width : n.width;
  norm(w.hidden_norm ? embedding : x, w.input_norm, normed, inputs, n.rows, n.width, eps, threads);
  if (w.hidden_norm) {
    norm(x, w.hidden_norm, normed + n.width, inputs, n.rows, n.width, eps, threads);
    if (w.normed_residual) {
      for (int64_t row = 0; row < n.rows; ++row)
        std::memcpy(out + row * n.width, normed + row * inputs + n.width, n.width * sizeof(Bf16));
      x = out;
    }
  }
  linear(normed, {{w.q, nullptr, q}, {w.k, nullptr, k}, {w.v, nullptr, v}}, n.rows, inputs,
         threads);
  if (w.q_norm) norm(q, w.q_norm, q, n.head, n.rows * heads, n.head, eps, threads);
  if (w.k_norm) norm(k, w.k_norm, k, n.head, n.rows * kv_heads, n.head, eps, threads);
  rotate(q, cos, sin, turned_q, n.rows, heads, n.head, threads);
  rotate(k, cos, sin, turned_k, n.rows, kv_heads, n.head, threads);
  for (int64_t row = 0; row < n.tokens; ++row) {
    std::memcpy(cache.keys + slots[row] * kept, turned_k + row * kept, kept * sizeof(Bf16));
    std::memcpy(cache.values + slots[row] * kept, v + row * kept, kept * sizeof(Bf16));
  }
  attend(turned_q, Kept<Bf16>{cache.keys, cache.values, n.block, kv_heads, n.head, n.head}, seen,
         heads, spans, n.spans, blocks, Spec{scale, 0, 0, nullptr}, threads);
  std::fill(seen + n.tokens * queries, seen + n.rows * queries, Bf16{});
  linear(seen, {{w.o, nullptr, made}}, n.rows, queries, threads);
  add(x, made, out, n.rows * n.width);

  norm(out, w.post_norm, normed, n.width, n.rows, n.width, eps, threads);
  linear(normed, {{w.gate, nullptr, gated}, {w.up, nullptr, up}}, n.rows, n.width, threads);
  gate(gated, up, gated, n.rows, inner, threads);
  linear(gated, {{w.down, nullptr, made}}, n.rows, inner, threads);
  add(out, made, out, n.rows * n.width);
}

}  // namespace peagle

#endif
