// Attention of short spans, causal or of a draft tree, over keys and values that are kept in
// blocks.
//
// A row's keys are taken in groups by logical position, whoever else is in the span, so a row of a
// tree is computed as it would be after its ancestors alone.

#pragma once

#include <limits>

#include "vectors.h"

namespace peagle {

constexpr int64_t BLOCK = 16;  // tokens of a block of keys and values

// A layer's keys and values: (slots, heads, width of a head).
template <typename T>
struct Kept {
  const T *keys, *values;
  int64_t heads, key_width, value_width;

  const T* key(int64_t slot, int64_t head) const {
    return keys + (slot * heads + head) * key_width;
  }
  const T* value(int64_t slot, int64_t head) const {
    return values + (slot * heads + head) * value_width;
  }
};

// Some rows of one request: tokens at positions start, start + 1, …, or rows of a draft tree whose
// root is at `start`. peagle/backends/batch.py describes tails.
struct Span {
  int64_t first, start, count;  // `first`: row of the batch
  const int64_t* blocks;
  const int64_t* tails = nullptr;  // of a tree: (count, longest), −1 after the last of a row
  int64_t longest = 0;

  // The position of a row, which is the last that it sees.
  int64_t position(int64_t row) const {
    if (!tails) return start + row;
    const int64_t* tail = tails + row * longest;
    return start + (std::find(tail, tail + longest, -1) - tail);
  }
  // One more than the last position of any row.
  int64_t end() const {
    int64_t most = 0;
    for (int64_t row = 0; row < count; ++row) most = std::max(most, position(row));
    return most + 1;
  }
  // Up to here positions are in the same slots for all rows.
  int64_t shared() const { return tails ? start + 1 : start + count; }
  // The slot of a position before `shared`. A block's slots follow each other.
  int64_t slot(int64_t at) const { return blocks[at / BLOCK] * BLOCK + at % BLOCK; }
  // The slot of any position that a row sees.
  int64_t slot(int64_t row, int64_t at) const {
    return at < shared() ? slot(at) : tails[row * longest + at - shared()];
  }
};

// What a row of a tree sees at `count` positions from `at` on: `width` numbers of each, side by
// side. `rows` is what one head keeps in slot 0; slots are `stride` apart.
template <typename T>
void gather(const Span& span, int64_t row, int64_t at, int64_t count, const T* rows, int64_t stride,
            int64_t width, T* to) {
  for (int64_t j = 0; j < count; ++j, to += width) {
    const T* from = rows + span.slot(row, at + j) * stride;
    std::copy(from, from + width, to);
  }
}

struct Spec {  // 0, or no pointer, where a layer has none
  float scale, softcap;
  int64_t window;
  const float* sinks;
};

// The queries of one span that share a key head, `rows` of them: query r is token r / groups.
template <typename T>
class Task {
 public:
  static constexpr int64_t MOST_TOKENS = 8;  // so that there are enough tasks for all threads

  Task(const Kept<T>& kept, const Spec& spec, const Span& span)
      : kept(kept), spec(spec), span(span) {}

  void run(const T* q, T* out, int64_t head, int64_t groups) {
    int64_t queries = groups * kept.heads, rows = groups * span.count;
    first = spec.window ? std::max<int64_t>(0, span.start + 1 - spec.window) / LANES * LANES : 0;
    columns = (span.end() - first + LANES - 1) / LANES * LANES;
    together = span.tails ? (span.shared() - first) / LANES * LANES : columns;
    padded = (rows + 3) / 4 * 4;
    vectors = (kept.value_width + LANES - 1) / LANES;
    auto place = [&](int64_t row) { return row / groups * queries + head * groups + row % groups; };

    input.assign(padded * kept.key_width, 0.0f);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < kept.key_width; ++i)
        input[row * kept.key_width + i] = load(q[place(row) * kept.key_width + i]) * spec.scale;
    scores.resize(padded * columns / LANES);
    output.assign(padded * vectors, Vector{});
    turned.assign(std::max(kept.key_width + 2 * LANES, LANES * vectors), Vector{});

    for (int64_t at = 0; at < together; at += LANES) {
      turn_keys(head, at);
      int64_t row = 0;
      for (; row + 8 <= padded; row += 8) multiply_keys<8>(row, at);
      for (; row < padded; row += 4) multiply_keys<4>(row, at);
    }
    own_groups([&](int64_t token, int64_t at, int64_t count) {
      int64_t width = kept.key_width;
      T* keys = room_for(gathered, LANES * width);
      gather(span, token, first + at, count, kept.key(0, head), kept.heads * width, width, keys);
      turn(keys, count, width, width, turned.data());
      for (int64_t i = 0; i < groups; ++i) multiply_keys<1>(token * groups + i, at);
    });
    for (int64_t row = 0; row < padded; ++row) {
      const float* sink = spec.sinks ? spec.sinks + head * groups + row % groups : nullptr;
      softmax(row, span.position(std::min(row / groups, span.count - 1)), sink);
    }
    for (int64_t at = 0; at < together; at += LANES) {
      int64_t count = widen_values(head, at), row = 0;
      for (; row + 8 <= padded; row += 8) multiply_values<8>(row, at, count);
      for (; row < padded; row += 4) multiply_values<4>(row, at, count);
    }
    own_groups([&](int64_t token, int64_t at, int64_t count) {
      int64_t width = kept.value_width;
      T* values = room_for(gathered, LANES * width);
      gather(span, token, first + at, count, kept.value(0, head), kept.heads * width, width,
             values);
      widen(values, count, width);
      for (int64_t i = 0; i < groups; ++i) multiply_values<1>(token * groups + i, at, count);
    });
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
  const Span& span;
  // Positions `first` on are columns. Those before `together` have the same keys for all rows.
  int64_t first, columns, together, padded, vectors;
  std::vector<float> input;                    // (padded, key_width), scaled
  std::vector<Vector> scores, output, turned;  // (padded, columns), (padded, value_width)
  std::vector<T> gathered;                     // (LANES, width)

  // Ask for the rows that come next: they are a row of all heads apart, too far for the processor
  // to see what follows.
  void ask(const T* row, int64_t width) const {
    for (int64_t j = 0; j < LANES; ++j, row += kept.heads * width)
      for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
  }

  int64_t end(int64_t at) const { return std::min<int64_t>(LANES, span.shared() - first - at); }

  // Call run(token, at, count) for each token of a tree and its columns from `together` on.
  template <typename Run>
  void own_groups(Run run) {
    if (!span.tails) return;
    for (int64_t token = 0; token < span.count; ++token) {
      int64_t stop = span.position(token) + 1 - first;
      for (int64_t at = together; at < stop; at += LANES)
        run(token, at, std::min<int64_t>(LANES, stop - at));
    }
  }

  void turn_keys(int64_t head, int64_t at) {
    int64_t width = kept.key_width;
    if (at + LANES < together) ask(kept.key(span.slot(first + at + LANES), head), width);
    const T* keys = kept.key(span.slot(first + at), head);
    turn(keys, end(at), kept.heads * width, width, turned.data());
  }

  // Scores of LANES keys: every lane is a key, so nothing is summed across lanes.
  template <int ROWS>
  void multiply_keys(int64_t row, int64_t at) {
    int64_t width = kept.key_width;
    const float* x = &input[row * width];
    const Wide* keys = reinterpret_cast<const Wide*>(turned.data());
    Wide sums[ROWS][PARTS] = {};
    for (int64_t i = 0; i < width; ++i, keys += PARTS)
      for (int r = 0; r < ROWS; ++r)
        for (int64_t part = 0; part < PARTS; ++part) sums[r][part] += x[r * width + i] * keys[part];
    for (int r = 0; r < ROWS; ++r)
      std::memcpy(&scores[(row + r) * columns / LANES + at / LANES], sums[r], sizeof(sums[r]));
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

  // Values as floats, each row from a whole vector on. Returns the number of keys.
  int64_t widen_values(int64_t head, int64_t at) {
    int64_t width = kept.value_width;
    if (at + LANES < together) ask(kept.value(span.slot(first + at + LANES), head), width);
    widen(kept.value(span.slot(first + at), head), end(at), kept.heads * width);
    return end(at);
  }

  void widen(const T* value, int64_t count, int64_t stride) {
    float* to = reinterpret_cast<float*>(turned.data());
    for (int64_t j = 0; j < count; ++j, value += stride, to += vectors * LANES)
      for (int64_t i = 0; i < kept.value_width; ++i) to[i] = load(value[i]);
  }

  template <int ROWS>
  void multiply_values(int64_t row, int64_t at, int64_t count) {
    const float* shares = reinterpret_cast<const float*>(&scores[(row * columns + at) / LANES]);
    int64_t parts = vectors * PARTS;
    for (int64_t part = 0; part < parts; ++part) {
      Wide* out = reinterpret_cast<Wide*>(&output[row * vectors]) + part;
      const Wide* in = reinterpret_cast<const Wide*>(turned.data()) + part;
      Wide sums[ROWS];
      for (int r = 0; r < ROWS; ++r) sums[r] = out[r * parts];
      for (int64_t j = 0; j < count; ++j, in += parts)
        for (int r = 0; r < ROWS; ++r) sums[r] += shares[r * columns + j] * *in;
      for (int r = 0; r < ROWS; ++r) out[r * parts] = sums[r];
    }
  }
};

}  // namespace peagle
