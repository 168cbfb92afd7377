// Attention of short spans, causal or of a draft tree, over keys and values that are kept in
// blocks.
//
// A row's keys are taken in groups by logical position, whoever else is in the span, so a row of a
// tree is computed as it would be after its ancestors alone.

#pragma once

#include <limits>
#include <type_traits>

#include "dots.h"

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

// What attention multiplies at once: two numbers beside each other where the CPU multiplies pairs
// of bf16, else a float.
template <typename T, bool = HAS_PAIRS && sizeof(T) == 2>
struct Step {
  static constexpr int64_t NUMBERS = 1;
  typedef float Input;
  typedef Wide Lanes;
  static Wide add(Wide sums, Lanes lanes, Input x) { return sums + x * lanes; }
};
template <typename T>
struct Step<T, true> {
  static constexpr int64_t NUMBERS = 2;
  typedef uint32_t Input __attribute__((may_alias));
  typedef WideBits Lanes;
  static Wide add(Wide sums, Lanes lanes, Input x) { return dot_pairs(sums, lanes, Lanes{} + x); }
};

// Up to LANES rows of `width`, as vectors of one step of each; missing rows are zero. Steps up to a
// multiple of 2 · LANES numbers are written.
template <typename T>
void turn(const T* rows, int64_t count, int64_t stride, int64_t width,
          typename Step<T>::Lanes* to) {
  constexpr int64_t EACH = 4 / sizeof(T), SIDE = WIDTH * EACH;  // numbers of a lane, of a square
  constexpr int64_t PARTS = LANES / WIDTH;                      // squares beside each other
  for (int64_t at = 0; at < width; at += SIDE)
    for (int64_t part = 0; part < PARTS; ++part) {
      WideBits square[WIDTH] = {};
      int64_t bytes = std::min(SIDE, width - at) * sizeof(T);
      const T* from = rows + part * WIDTH * stride + at;
      for (int64_t j = 0; j < std::min<int64_t>(WIDTH, count - part * WIDTH); ++j)
        if (bytes == sizeof(WideBits))
          std::memcpy(&square[j], from + j * stride, sizeof(WideBits));
        else
          std::memcpy(&square[j], from + j * stride, bytes);
      transpose(square);
      for (int i = 0; i < WIDTH; ++i) {
        auto* column = to + (at / Step<T>::NUMBERS + i * EACH / Step<T>::NUMBERS) * PARTS + part;
        if constexpr (EACH == Step<T>::NUMBERS) {
          column[0] = typename Step<T>::Lanes(square[i]);
        } else {  // bf16 as floats
          column[0] = Wide(square[i] << 16);
          column[PARTS] = Wide(square[i] & 0xffff0000u);
        }
      }
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
    key_steps = (kept.key_width + EACH - 1) / EACH;
    auto place = [&](int64_t row) { return row / groups * queries + head * groups + row % groups; };

    static thread_local Memory memory;
    int64_t key_width = key_steps * EACH;
    input = room_for(memory.input, padded * key_width);
    scores = room_for(memory.scores, padded * columns / LANES);
    shares = room_for(memory.shares, padded * columns);
    scales = room_for(memory.scales, padded);
    output = room_for(memory.output, padded * vectors);
    turned = room_for(memory.turned, std::max(key_width + 2 * LANES, LANES * vectors));
    gathered = room_for(memory.gathered, LANES * std::max(kept.key_width, kept.value_width));
    std::fill(input, input + padded * key_width, Number{});
    std::fill(output, output + padded * vectors, Vector{});
    for (int64_t row = 0; row < rows; ++row) {
      const T* query = q + place(row) * kept.key_width;
      std::transform(query, query + kept.key_width, input + row * key_width, number);
    }

    for (int64_t at = 0; at < together; at += LANES) {
      turn_keys(head, at);
      by_rows([&](auto count, int64_t row) { multiply_keys<count>(row, at); });
    }
    own_groups([&](int64_t token, int64_t at, int64_t count) {
      int64_t width = kept.key_width, stride = kept.heads * width;
      gather(span, token, first + at, count, kept.key(0, head), stride, width, gathered);
      turn(gathered, count, width, width, lanes());
      for (int64_t i = 0; i < groups; ++i) multiply_keys<1>(token * groups + i, at);
    });
    for (int64_t row = 0; row < padded; ++row) {
      const float* sink = spec.sinks ? spec.sinks + head * groups + row % groups : nullptr;
      softmax(row, span.position(std::min(row / groups, span.count - 1)), sink);
    }
    for (int64_t at = 0; at < together; at += LANES) {
      int64_t count = spread_values(head, at);
      by_rows([&](auto rows, int64_t row) { multiply_values<rows>(row, at, count); });
    }
    own_groups([&](int64_t token, int64_t at, int64_t count) {
      int64_t width = kept.value_width, stride = kept.heads * width;
      gather(span, token, first + at, count, kept.value(0, head), stride, width, gathered);
      spread(gathered, count, width);
      for (int64_t i = 0; i < groups; ++i) multiply_values<1>(token * groups + i, at, count);
    });
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = reinterpret_cast<const float*>(&output[row * vectors]);
      for (int64_t i = 0; i < kept.value_width; ++i)
        store(out[place(row) * kept.value_width + i], from[i] * scales[row]);
    }
  }

 private:
  typedef typename Step<T>::Input Input;
  typedef typename Step<T>::Lanes Lanes;
  static constexpr int64_t EACH = Step<T>::NUMBERS;  // numbers of an input
  static constexpr int64_t PARTS = LANES / WIDTH;    // vectors of this CPU in one of LANES lanes
  typedef std::conditional_t<EACH == 1, float, T> Number;  // as it is multiplied
  const Kept<T>& kept;
  const Spec& spec;
  const Span& span;
  // Positions `first` on are columns. Those before `together` have the same keys for all rows.
  int64_t first, columns, together, padded, vectors, key_steps;
  Number* input;                     // (padded, key_steps · EACH)
  Vector *scores, *output, *turned;  // (padded, columns), (padded, value_width)
  Number* shares;                    // (padded, columns): e^score, at most 1
  float* scales;                     // (padded,) that shares are multiplied by
  T* gathered;                       // (LANES, width)
  struct Memory {                    // a thread's, kept for its next task
    std::vector<Number> input, shares;
    std::vector<Vector> scores, output, turned;
    std::vector<float> scales;
    std::vector<T> gathered;
  };

  static Number number(T x) {
    if constexpr (EACH == 1)
      return load(x);
    else
      return x;
  }
  Lanes* lanes() { return reinterpret_cast<Lanes*>(turned); }

  // Call run(count, row) for rows by eights and fours.
  template <typename Run>
  void by_rows(Run run) const {
    int64_t row = 0;
    for (; row + 8 <= padded; row += 8) run(std::integral_constant<int, 8>(), row);
    for (; row < padded; row += 4) run(std::integral_constant<int, 4>(), row);
  }

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
    turn(keys, end(at), kept.heads * width, width, lanes());
  }

  // Scores of LANES keys: every lane is a key, so nothing is summed across lanes.
  template <int ROWS>
  void multiply_keys(int64_t row, int64_t at) {
    const Input* x = reinterpret_cast<const Input*>(input) + row * key_steps;
    const Lanes* keys = lanes();
    Wide sums[ROWS][PARTS] = {};
    for (int64_t i = 0; i < key_steps; ++i, keys += PARTS)
      for (int r = 0; r < ROWS; ++r)
        for (int64_t part = 0; part < PARTS; ++part)
          sums[r][part] = Step<T>::add(sums[r][part], keys[part], x[r * key_steps + i]);
    for (int r = 0; r < ROWS; ++r)
      std::memcpy(&scores[(row + r) * columns / LANES + at / LANES], sums[r], sizeof(sums[r]));
  }

  void softmax(int64_t row, int64_t stands, const float* sink) {
    float* x = reinterpret_cast<float*>(&scores[row * columns / LANES]);
    int64_t begin = spec.window ? std::max<int64_t>(0, stands + 1 - spec.window) - first : 0;
    int64_t stop = stands + 1 - first;
    float most = sink ? *sink : -std::numeric_limits<float>::infinity(), sum = 0;
#pragma omp simd
    for (int64_t i = begin; i < stop; ++i) x[i] *= spec.scale;
    if (spec.softcap)
      for (int64_t i = begin; i < stop; ++i) x[i] = std::tanh(x[i] / spec.softcap) * spec.softcap;
#pragma omp simd reduction(max : most)
    for (int64_t i = begin; i < stop; ++i) most = x[i] > most ? x[i] : most;
    Number* share = &shares[row * columns];
    std::fill(share, share + begin, Number{});
    std::fill(share + stop, share + columns, Number{});
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < stop; ++i) {
      float power = exponential(x[i] - most);
      store(share[i], power);
      sum += power;
    }
    if (sink) sum += exponential(*sink - most);
    scales[row] = 1.0f / sum;
  }

  // Values as they are multiplied, each row from a whole vector on. Returns the number of keys.
  int64_t spread_values(int64_t head, int64_t at) {
    int64_t width = kept.value_width;
    if (at + LANES < together) ask(kept.value(span.slot(first + at + LANES), head), width);
    spread(kept.value(span.slot(first + at), head), end(at), kept.heads * width);
    return end(at);
  }

  void spread(const T* value, int64_t count, int64_t stride) {
    Input* to = reinterpret_cast<Input*>(lanes());
    int64_t width = kept.value_width;
    for (int64_t j = 0; j < count; j += EACH, value += EACH * stride, to += vectors * LANES)
      if constexpr (EACH == 1)
        for (int64_t i = 0; i < width; ++i) to[i] = load(value[i]);
      else if (j + 1 == count)
        for (int64_t i = 0; i < width; ++i) to[i] = value[i].bits;
      else
        for (int64_t i = 0; i < width; ++i)
          to[i] = value[i].bits | uint32_t(value[stride + i].bits) << 16;
  }

  template <int ROWS>
  void multiply_values(int64_t row, int64_t at, int64_t count) {
    const Number* share = &shares[row * columns + at];
    int64_t parts = vectors * PARTS;
    for (int64_t part = 0; part < parts; ++part) {
      Wide* out = reinterpret_cast<Wide*>(&output[row * vectors]) + part;
      const Lanes* in = lanes() + part;
      Wide sums[ROWS];
      for (int r = 0; r < ROWS; ++r) sums[r] = out[r * parts];
      for (int64_t j = 0; j < count; j += EACH, in += parts)
        for (int r = 0; r < ROWS; ++r) {
          const Number* theirs = share + r * columns + j;
          sums[r] = Step<T>::add(sums[r], *in, *reinterpret_cast<const Input*>(theirs));
        }
      for (int r = 0; r < ROWS; ++r) out[r * parts] = sums[r];
    }
  }
};

}  // namespace peagle
