// Causal attention of short spans over keys and values that are kept in blocks.

#pragma once

#include <limits>

#include "vectors.h"

namespace peagle {

// A layer's keys and values, in blocks: (blocks, size, heads, width of a head).
template <typename T>
struct Kept {
  const T *keys, *values;
  int64_t size, heads, key_width, value_width;

  // The first of the LANES rows at a multiple of LANES; the others follow at `stride`.
  const T* key(const int64_t* blocks, int64_t at, int64_t head) const {
    return keys + (row(blocks, at) * heads + head) * key_width;
  }
  const T* value(const int64_t* blocks, int64_t at, int64_t head) const {
    return values + (row(blocks, at) * heads + head) * value_width;
  }
  int64_t row(const int64_t* blocks, int64_t at) const {
    return blocks[at / size] * size + at % size;
  }
};

struct Spec {  // 0, or no pointer, where a layer has none
  float scale, softcap;
  int64_t window;
  const float* sinks;
};

// The queries of one span that share a key head, `rows` of them: query r is token r / groups.
template <typename T>
class Task {
 public:
  Task(const Kept<T>& kept, const Spec& spec, const int64_t* blocks, int64_t start, int64_t length)
      : kept(kept), spec(spec), blocks(blocks), start(start), length(length) {}

  void run(const T* q, T* out, int64_t head, int64_t groups) {
    int64_t queries = groups * kept.heads, rows = groups * length;
    first = spec.window ? std::max<int64_t>(0, start + 1 - spec.window) / LANES * LANES : 0;
    columns = (start + length - first + LANES - 1) / LANES * LANES;
    padded = (rows + 3) / 4 * 4;
    auto place = [&](int64_t row) { return row / groups * queries + head * groups + row % groups; };

    input.assign(padded * kept.key_width, 0.0f);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < kept.key_width; ++i)
        input[row * kept.key_width + i] = load(q[place(row) * kept.key_width + i]) * spec.scale;
    scores.resize(padded * columns / LANES);
    int64_t vectors = (kept.value_width + LANES - 1) / LANES;
    turned.assign(std::max(kept.key_width + 2 * LANES, LANES * vectors), Vector{});
    for (int64_t at = 0; at < columns; at += LANES) multiply_keys(head, at);
    for (int64_t row = 0; row < padded; ++row) {
      const float* sink = spec.sinks ? spec.sinks + head * groups + row % groups : nullptr;
      softmax(row, std::min(start + row / groups, start + length - 1), sink);
    }
    output.assign(padded * vectors, Vector{});
    for (int64_t at = 0; at < columns; at += LANES) multiply_values(head, at, vectors);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = reinterpret_cast<const float*>(&output[row * vectors]);
      for (int64_t i = 0; i < kept.value_width; ++i)
        store(out[place(row) * kept.value_width + i], from[i]);
    }
  }

 private:
  static constexpr int64_t PARTS = LANES / WIDTH;  // vectors of this CPU in one of LANES lanes
  const Kept<T>& kept;
  const Spec& spec;
  const int64_t* blocks;
  int64_t start, length, first, columns, padded;
  std::vector<float> input;                     // (padded, key_width), scaled
  std::vector<Vector> scores, output, turned;  // (padded, columns), (padded, value_width)

  // Ask for the rows that come next: they are a row of all heads apart, too far for the processor
  // to see what follows.
  void ask(const T* row, int64_t width) const {
    for (int64_t j = 0; j < LANES; ++j, row += kept.heads * width)
      for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
  }

  int64_t end(int64_t at) const { return std::min<int64_t>(LANES, start + length - first - at); }

  // Scores of LANES keys: every lane is a key, so nothing is summed across lanes.
  void multiply_keys(int64_t head, int64_t at) {
    int64_t width = kept.key_width;
    if (at + LANES < columns) ask(kept.key(blocks, first + at + LANES, head), width);
    turn(kept.key(blocks, first + at, head), end(at), kept.heads * width, width, turned.data());
    for (int64_t row = 0; row < padded; row += 4) {
      const float *a = &input[row * width], *b = a + width, *c = b + width, *d = c + width;
      const Wide* keys = reinterpret_cast<const Wide*>(turned.data());
      Wide sums[4][PARTS] = {};
      for (int64_t i = 0; i < width; ++i, keys += PARTS)
        for (int64_t part = 0; part < PARTS; ++part) {
          sums[0][part] += a[i] * keys[part];
          sums[1][part] += b[i] * keys[part];
          sums[2][part] += c[i] * keys[part];
          sums[3][part] += d[i] * keys[part];
        }
      for (int r = 0; r < 4; ++r)
        std::memcpy(&scores[(row + r) * columns / LANES + at / LANES], sums[r], sizeof(sums[r]));
    }
  }

  void softmax(int64_t row, int64_t stands, const float* sink) {
    float* x = reinterpret_cast<float*>(&scores[row * columns / LANES]);
    int64_t begin = spec.window ? std::max<int64_t>(0, stands + 1 - spec.window) - first : 0;
    int64_t stop = stands + 1 - first;
    if (spec.softcap)
      for (int64_t i = begin; i < stop; ++i) x[i] = std::tanh(x[i] / spec.softcap) * spec.softcap;
    float most = sink ? *sink : -std::numeric_limits<float>::infinity(), sum = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = begin; i < stop; ++i) most = x[i] > most ? x[i] : most;
    std::fill(x, x + begin, 0.0f);
    std::fill(x + stop, x + columns, 0.0f);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < stop; ++i) {
      x[i] = exponential(x[i] - most);
      sum += x[i];
    }
    if (sink) sum += exponential(*sink - most);
    float share = 1.0f / sum;
#pragma omp simd
    for (int64_t i = begin; i < stop; ++i) x[i] *= share;
  }

  void multiply_values(int64_t head, int64_t at, int64_t vectors) {
    int64_t keys = end(at), width = kept.value_width;
    if (at + LANES < columns) ask(kept.value(blocks, first + at + LANES, head), width);
    const T* value = kept.value(blocks, first + at, head);
    float* to = reinterpret_cast<float*>(turned.data());
    for (int64_t j = 0; j < keys; ++j, value += kept.heads * width, to += vectors * LANES)
      for (int64_t i = 0; i < width; ++i) to[i] = load(value[i]);
    for (int64_t row = 0; row < padded; row += 4) {
      const float* a = reinterpret_cast<const float*>(&scores[(row * columns + at) / LANES]);
      const float *b = a + columns, *c = b + columns, *d = c + columns;
      int64_t parts = vectors * PARTS;
      for (int64_t part = 0; part < parts; ++part) {
        Wide* out = reinterpret_cast<Wide*>(&output[row * vectors]) + part;
        const Wide* in = reinterpret_cast<const Wide*>(turned.data()) + part;
        Wide sums[4] = {out[0], out[parts], out[2 * parts], out[3 * parts]};
        for (int64_t j = 0; j < keys; ++j, in += parts) {
          sums[0] += a[j] * *in;
          sums[1] += b[j] * *in;
          sums[2] += c[j] * *in;
          sums[3] += d[j] * *in;
        }
        for (int r = 0; r < 4; ++r) out[r * parts] = sums[r];
      }
    }
  }
};

}  // namespace peagle
