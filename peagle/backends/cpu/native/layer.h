// A whole decoder layer, and all layers of a model one after another.

#pragma once

#include "attend.h"
#include "linear.h"
#include "rows.h"

namespace peagle {

// Norms that a layer does not have are missing: of queries and keys, of what attention and the
// feed-forward add to the residual (Gemma's), and of the feature, which only a head's first layer
// reads.
struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *input_norm, *attention_norm, *mlp_input_norm, *mlp_norm;
  const float *q_norm, *k_norm, *hidden_norm;
  int64_t normed_residual;  // whether what `hidden_norm` makes is the residual, or what it reads
  int64_t window;           // newest positions that a row sees; 0: all
  int64_t rope;             // which of the tables of cos and sin
};

struct Model {
  const Layer* layers;
  const float* norm;  // after the last layer
  int64_t count, width, head;
  Activation activation;
  float eps, scale;
};

template <typename T>
struct Cache {  // a layer's
  T *keys, *values;
};

template <typename T>
struct Forward {
  const Batch* batch;
  const Cache<T>* caches;
  const T *x, *embedding;  // (rows, width); an embedding for a head's first layer
  const T *cos, *sin;      // (tables, rows, head)
  const int64_t* taps;     // layers, in any order; `count` is after the last
  int64_t tap_count;
  T* features;      // (rows, taps, width): what enters these layers, or leaves the last
  T *out, *normed;  // (rows, width): what leaves the last layer, and its norm
  int64_t threads;
};

// What enters a layer, beside what entered others: as columns of `features`.
template <typename T>
void tap(const T* x, int64_t layer, const Model& model, const Forward<T>& f) {
  int64_t width = model.width;
  for (int64_t column = 0; column < f.tap_count; ++column)
    if (f.taps[column] == layer)
#pragma omp for schedule(static) nowait
      for (int64_t row = 0; row < f.batch->rows; ++row)
        std::memcpy(f.features + (row * f.tap_count + column) * width, x + row * width,
                    width * sizeof(T));
}

// Numbers of type T that are between the steps of a layer, for each row.
inline int64_t between(const Layer& w, int64_t width) {
  return 3 * width + 3 * w.q.outputs + 3 * w.k.outputs + 2 * w.gate.outputs;
}

// A decoder layer, or the first of a head. `out` may be x. `free` is
// memory for `between`, which all threads share.
template <typename T>
void run_layer(const T* x, T* out, const Layer& w, const Cache<T>& cache, const Model& m,
               const Forward<T>& f, T* free, Room& room) {
  int64_t rows = f.batch->rows, width = m.width;
  int64_t queries = w.q.outputs, kept = w.k.outputs, inner = w.gate.outputs;
  int64_t heads = queries / m.head, kv_heads = kept / m.head;
  auto take = [&](int64_t width) { return std::exchange(free, free + rows * width); };
  T *normed = take(2 * width), *made = take(width);
  T *q = take(queries), *turned_q = take(queries), *seen = take(queries);
  T *k = take(kept), *turned_k = take(kept), *v = take(kept);
  T *gated = take(inner), *up = take(inner);

  int64_t inputs = w.hidden_norm ? 2 * width : width;
  norm(w.hidden_norm ? f.embedding : x, w.input_norm, normed, inputs, rows, width, m.eps);
  if (w.hidden_norm) {
    norm(x, w.hidden_norm, normed + width, inputs, rows, width, m.eps);
    if (w.normed_residual) {
#pragma omp for schedule(static) nowait
      for (int64_t row = 0; row < rows; ++row)
        std::memcpy(out + row * width, normed + row * inputs + width, width * sizeof(T));
      wait_for_team();
      x = out;
    }
  }
  linear<T>(normed, {{w.q, q}, {w.k, k}, {w.v, v}}, rows, inputs, room);
  if (w.q_norm) norm(q, w.q_norm, q, m.head, rows * heads, m.head, m.eps);
  if (w.k_norm) norm(k, w.k_norm, k, m.head, rows * kv_heads, m.head, m.eps);
  const T *cos = f.cos + w.rope * rows * m.head, *sin = f.sin + w.rope * rows * m.head;
  rotate(q, cos, sin, turned_q, rows, heads, m.head);
  rotate(k, cos, sin, turned_k, rows, kv_heads, m.head);
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) {
    int64_t slot = f.batch->slot_mapping[row];
    std::memcpy(cache.keys + slot * kept, turned_k + row * kept, kept * sizeof(T));
    std::memcpy(cache.values + slot * kept, v + row * kept, kept * sizeof(T));
  }
  wait_for_team();
  Kept<T> all{cache.keys, cache.values, kv_heads, m.head, m.head};
  attend(turned_q, all, seen, heads, *f.batch, Spec{m.scale, 0, w.window, nullptr});
  linear<T>(seen, {{w.o, made}}, rows, queries, room);
  if (w.attention_norm) norm(made, w.attention_norm, made, width, rows, width, m.eps);
  add(x, made, out, rows, width);

  norm(out, w.mlp_input_norm, normed, width, rows, width, m.eps);
  linear<T>(normed, {{w.gate, gated}, {w.up, up}}, rows, width, room);
  gate(gated, up, gated, rows, inner, m.activation);
  linear<T>(gated, {{w.down, made}}, rows, inner, room);
  if (w.mlp_norm) norm(made, w.mlp_norm, made, width, rows, width, m.eps);
  add(out, made, out, rows, width);
}

// All threads go through all layers together, and wait for each other where one reads what others
// wrote.
template <typename T>
void decode(const Model& m, const Forward<T>& f) {
  static thread_local std::vector<Bits> memory;  // aligned, as tiles want rows
  static thread_local Room rooms;
  int64_t rows = f.batch->rows, most = 0, inputs = 0;
  for (int64_t i = 0; i < m.count; ++i) {
    const Layer& w = m.layers[i];
    most = std::max(most, between(w, m.width));
    inputs = std::max({inputs, w.q.inputs, w.o.inputs, w.gate.inputs, w.down.inputs});
  }
  void* free = room_for(memory, steps(rows * most * sizeof(T), sizeof(Bits)));
  Room& room = rooms;
  room.fit(rows, inputs);
  together(int(f.threads), [&] {
    const T* x = f.x;
    for (int64_t i = 0; i < m.count; ++i) {
      tap(x, i, m, f);
      run_layer(x, f.out, m.layers[i], f.caches[i], m, f, static_cast<T*>(free), room);
      x = f.out;
    }
    tap(x, m.count, m, f);
    norm(f.out, m.norm, f.normed, m.width, rows, m.width, m.eps);
  });
}

}  // namespace peagle
