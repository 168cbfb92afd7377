// A whole decoder layer, and all layers of a model one after another.
//
// peagle/backends/cpu/decoder.py mirrors Layer, Model, Cache and Forward.

#pragma once

#include <utility>

#include "attend.h"
#include "linear.h"
#include "rows.h"

namespace peagle {

// Norms that a layer does not have are missing: of queries and keys, and of the feature, which only
// a head's first layer reads.
template <typename T>
struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const T *input_norm, *post_norm, *q_norm, *k_norm, *hidden_norm;
  int64_t normed_residual;  // whether what `hidden_norm` makes is the residual, or what it reads
};

template <typename T>
struct Model {
  const Layer<T>* layers;
  const T* norm;  // after the last layer
  int64_t count, width, head;
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
  const T *cos, *sin;      // (rows, head)
  const int64_t* taps;     // layers, in any order
  int64_t tap_count;
  T *features;  // (rows, taps, width): what enters these layers
  T *out, *normed;  // (rows, width): what leaves the last layer, and its norm
  int64_t threads;
};

// What enters a layer, beside what entered others: as columns of `features`.
template <typename T>
void tap(const T* x, int64_t layer, const Model<T>& model, const Forward<T>& f) {
  int64_t width = model.width;
  for (int64_t column = 0; column < f.tap_count; ++column)
    if (f.taps[column] == layer)
      for (int64_t row = 0; row < f.batch->rows; ++row)
        std::memcpy(f.features + (row * f.tap_count + column) * width, x + row * width,
                    width * sizeof(T));
}

// Memory for what is between the steps of a layer, kept for the next one.
template <typename T>
class Scratch {
 public:
  Scratch(int64_t rows, int64_t width) : rows(rows) {
    static thread_local std::vector<Bits> room;  // aligned, as tiles want rows
    constexpr int64_t EACH = sizeof(Bits) / sizeof(T);
    void* all = room_for(room, (rows * width + EACH - 1) / EACH);
    free = static_cast<T*>(all);
  }
  T* take(int64_t width) { return std::exchange(free, free + rows * width); }

 private:
  int64_t rows;
  T* free;
};

// A decoder layer of Llama or Qwen3, or the first of a head of theirs. `out` may be x.
template <typename T>
void run_layer(const T* x, T* out, const Layer<T>& w, const Cache<T>& cache, const Model<T>& m,
               const Forward<T>& f) {
  int64_t rows = f.batch->rows, width = m.width;
  int64_t queries = w.q.outputs, kept = w.k.outputs, inner = w.gate.outputs;
  int64_t heads = queries / m.head, kv_heads = kept / m.head;
  int threads = int(f.threads);
  Scratch<T> scratch(rows, 3 * width + 3 * queries + 3 * kept + 2 * inner);
  T *normed = scratch.take(2 * width), *made = scratch.take(width);
  T *q = scratch.take(queries), *turned_q = scratch.take(queries), *seen = scratch.take(queries);
  T *k = scratch.take(kept), *turned_k = scratch.take(kept), *v = scratch.take(kept);
  T *gated = scratch.take(inner), *up = scratch.take(inner);

  int64_t inputs = w.hidden_norm ? 2 * width : width;
  norm(w.hidden_norm ? f.embedding : x, w.input_norm, normed, inputs, rows, width, m.eps, threads);
  if (w.hidden_norm) {
    norm(x, w.hidden_norm, normed + width, inputs, rows, width, m.eps, threads);
    if (w.normed_residual) {
      for (int64_t row = 0; row < rows; ++row)
        std::memcpy(out + row * width, normed + row * inputs + width, width * sizeof(T));
      x = out;
    }
  }
  linear<T>(normed, {{w.q, q}, {w.k, k}, {w.v, v}}, rows, inputs, threads);
  if (w.q_norm) norm(q, w.q_norm, q, m.head, rows * heads, m.head, m.eps, threads);
  if (w.k_norm) norm(k, w.k_norm, k, m.head, rows * kv_heads, m.head, m.eps, threads);
  rotate(q, f.cos, f.sin, turned_q, rows, heads, m.head, threads);
  rotate(k, f.cos, f.sin, turned_k, rows, kv_heads, m.head, threads);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t slot = f.batch->slot_mapping[row];
    std::memcpy(cache.keys + slot * kept, turned_k + row * kept, kept * sizeof(T));
    std::memcpy(cache.values + slot * kept, v + row * kept, kept * sizeof(T));
  }
  Kept<T> all{cache.keys, cache.values, BLOCK, kv_heads, m.head, m.head};
  attend(turned_q, all, seen, heads, *f.batch, Spec{m.scale, 0, 0, nullptr}, threads);
  linear<T>(seen, {{w.o, made}}, rows, queries, threads);
  add(x, made, out, rows * width);

  norm(out, w.post_norm, normed, width, rows, width, m.eps, threads);
  linear<T>(normed, {{w.gate, gated}, {w.up, up}}, rows, width, threads);
  gate(gated, up, gated, rows, inner, threads);
  linear<T>(gated, {{w.down, made}}, rows, inner, threads);
  add(out, made, out, rows * width);
}

template <typename T>
void decode(const Model<T>& m, const Forward<T>& f) {
  const T* x = f.x;
  for (int64_t i = 0; i < m.count; ++i) {
    tap(x, i, m, f);
    run_layer(x, f.out, m.layers[i], f.caches[i], m, f);
    x = f.out;
  }
  norm(f.out, m.norm, f.normed, m.width, f.batch->rows, m.width, m.eps, int(f.threads));
}

}  // namespace peagle
