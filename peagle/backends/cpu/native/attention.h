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
      int64_t bytes = std::min(SIDE, width - at) * sizeof(T), have = count - part * WIDTH;
      const T* from = rows + part * WIDTH * stride + at;
      bool whole = have >= WIDTH && bytes == sizeof(WideBits);
      WideBits square[WIDTH];
#pragma GCC unroll 16  // or they are not kept in registers
      for (int64_t j = 0; j < WIDTH; ++j) {
        square[j] = WideBits{};
        if (whole)
          square[j] = load_vector<WideBits>(from + j * stride);
        else if (j < have)
          std::memcpy(&square[j], from + j * stride, bytes);
      }
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

// Rows of `width` as vectors of one step of them, each step from a whole vector on.
template <typename T>
void spread_rows(const T* rows, int64_t count, int64_t stride, int64_t width,
                 typename Step<T>::Lanes* lanes) {
  constexpr int64_t EACH = Step<T>::NUMBERS;
  auto* to = reinterpret_cast<typename Step<T>::Input*>(lanes);
  for (int64_t j = 0; j < count;
       j += EACH, rows += EACH * stride, to += steps(width, LANES) * LANES)
    if constexpr (EACH == 1)
      for (int64_t i = 0; i < width; ++i) to[i] = load(rows[i]);
    else if (j + 1 == count)
      for (int64_t i = 0; i < width; ++i) to[i] = rows[i].bits;
    else
      for (int64_t i = 0; i < width; ++i)
        to[i] = rows[i].bits | uint32_t(rows[stride + i].bits) << 16;
}

struct Spec {  // 0, or no pointer, where a layer has none
  float scale, softcap;
  int64_t window;
  const float* sinks;
};

// Positions from `first` on are columns, in groups of `size` that begin at multiples of it: so each
// key has its place in a group. Columns before `together` have the same keys for all rows.
struct Columns {
  int64_t first, columns, together;

  Columns(const Spec& spec, const Span& span, int64_t size) {
    first = spec.window ? std::max<int64_t>(0, span.start + 1 - spec.window) / size * size : 0;
    columns = steps(span.end() - first, size) * size;
    together = span.tails ? (span.shared() - first) / size * size : columns;
  }
};

// The queries of one span that share some key heads, head by head: of a head, query r is token
// r / groups.
template <typename T>
class Task : Columns {
 public:
  static constexpr int64_t MOST_TOKENS = 16;

  Task(const Kept<T>& kept, const Spec& spec, const Span& span)
      : Columns(spec, span, LANES), kept(kept), spec(spec), span(span) {}

  void run(const T* q, T* out, int64_t begin, int64_t end, int64_t groups_of_a_head) {
    first_head = begin, last_head = end, groups = groups_of_a_head, of_a_head = groups * span.count;
    int64_t queries = groups * kept.heads, rows = of_a_head * (last_head - first_head);
    vectors = steps(kept.value_width, LANES);
    key_steps = steps(kept.key_width, EACH);
    auto token = [&](int64_t row) { return row % of_a_head / groups; };
    auto query = [&](int64_t row) { return (begin + row / of_a_head) * groups + row % groups; };
    auto place = [&](int64_t row) { return token(row) * queries + query(row); };

    static thread_local Memory memory;
    int64_t key_width = key_steps * EACH;
    input = room_for(memory.input, rows * key_width);
    scores = room_for(memory.scores, rows * columns / LANES);
    shares = room_for(memory.shares, rows * columns);
    scales = room_for(memory.scales, rows);
    output = room_for(memory.output, rows * vectors);
    turned = room_for(memory.turned, std::max(key_width + 2 * LANES, LANES * vectors));
    gathered = room_for(memory.gathered, LANES * std::max(kept.key_width, kept.value_width));
    std::fill(input, input + rows * key_width, Number{});
    std::fill(output, output + rows * vectors, Vector{});
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = q + place(row) * kept.key_width;
      for (int64_t i = 0; i < kept.key_width; ++i) store(input[row * key_width + i], load(from[i]));
    }
    for_all(kept.keys, kept.key_width, turn<T>,
            [&](auto size, int64_t row, int64_t at, int64_t) { multiply_keys<size>(row, at); });
    for (int64_t row = 0; row < rows; ++row)
      softmax(row, span.position(token(row)), spec.sinks ? spec.sinks + query(row) : nullptr);
    for_all(kept.values, kept.value_width, spread_rows<T>,
            [&](auto size, int64_t row, int64_t at, int64_t count) {
              multiply_values<size>(row, at, count);
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
  static constexpr int MOST_ROWS = std::min<int>(12, MOST_SUMS / PARTS);
  typedef std::conditional_t<EACH == 1, float, T> Number;  // as it is multiplied
  const Kept<T>& kept;
  const Spec& spec;
  const Span& span;
  int64_t first_head, last_head, groups, of_a_head;  // `of_a_head`: its rows
  int64_t vectors, key_steps;
  Number* input;                     // (rows, key_steps · EACH)
  Vector *scores, *output, *turned;  // (rows, columns), (rows, value_width)
  Number* shares;                    // (rows, columns): e^score, at most 1
  float* scales;                     // (rows,) that shares are multiplied by
  T* gathered;                       // (LANES, width)
  struct Memory {                    // a thread's, kept for its next task
    std::vector<Number> input, shares;
    std::vector<Vector> scores, output, turned;
    std::vector<float> scales;
    std::vector<T> gathered;
  };

  Lanes* lanes() { return reinterpret_cast<Lanes*>(turned); }

  // All that is kept as keys, or as values, LANES columns of a head at a time: make them ready by
  // prepare(rows, count, stride, width, lanes), then call multiply(size, row, at, count) for blocks
  // of `size` rows. A block of memory has all heads side by side, so they follow each other.
  template <typename Prepare, typename Multiply>
  void for_all(const T* rows, int64_t width, Prepare prepare, Multiply multiply) {
    int64_t stride = kept.heads * width;
    auto by_heads = [&](auto run) {
      for (int64_t head = first_head; head < last_head; ++head)
        run(rows + head * width, (head - first_head) * of_a_head);
    };
    for (int64_t at = 0; at < together; at += LANES)
      by_heads([&](const T* from, int64_t begin) {
        int64_t next = at + LANES, count = std::min<int64_t>(LANES, span.shared() - first - at);
        if (next < together) ask(from + span.slot(first + next) * stride, width, stride);
        prepare(from + span.slot(first + at) * stride, count, stride, width, lanes());
        in_blocks<MOST_ROWS>(
            of_a_head, [&](auto size, int64_t row) { multiply(size, begin + row, at, count); });
      });
    for (int64_t token = 0; span.tails && token < span.count; ++token) {
      int64_t stop = span.position(token) + 1 - first;
      for (int64_t at = together; at < stop; at += LANES)
        by_heads([&](const T* from, int64_t begin) {
          int64_t count = std::min<int64_t>(LANES, stop - at);
          gather(span, token, first + at, count, from, stride, width, gathered);
          prepare(gathered, count, width, width, lanes());
          in_blocks<MOST_ROWS>(groups, [&](auto size, int64_t row) {
            multiply(size, begin + token * groups + row, at, count);
          });
        });
    }
  }

  // Ask for the rows that come next, which lie too far apart for the processor to see. Into the
  // second cache: more lines can be on their way to it than to the first.
  static void ask(const T* row, int64_t width, int64_t stride) {
    for (int64_t j = 0; j < LANES; ++j, row += stride)
      for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T)))
        __builtin_prefetch(row + i, 0, 2);
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
    Wide* to = reinterpret_cast<Wide*>(scores) + (row * columns + at) / WIDTH;
    for (int r = 0; r < ROWS; ++r)
      for (int64_t part = 0; part < PARTS; ++part) to[r * columns / WIDTH + part] = sums[r][part];
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

  template <int ROWS>
  void multiply_values(int64_t row, int64_t at, int64_t count) {
    const Number* share = &shares[row * columns + at];
    Wide* to = reinterpret_cast<Wide*>(output + row * vectors);
    for (int64_t at_vector = 0; at_vector < vectors * PARTS; at_vector += PARTS, to += PARTS) {
      const Lanes* in = lanes() + at_vector;
      Wide sums[ROWS][PARTS];
      for (int r = 0; r < ROWS; ++r)
        for (int64_t part = 0; part < PARTS; ++part) sums[r][part] = to[r * vectors * PARTS + part];
      for (int64_t j = 0; j < count; j += EACH, in += vectors * PARTS)
        for (int r = 0; r < ROWS; ++r) {
          Input theirs = *reinterpret_cast<const Input*>(share + r * columns + j);
          for (int64_t part = 0; part < PARTS; ++part)
            sums[r][part] = Step<T>::add(sums[r][part], in[part], theirs);
        }
      for (int r = 0; r < ROWS; ++r)
        for (int64_t part = 0; part < PARTS; ++part) to[r * vectors * PARTS + part] = sums[r][part];
    }
  }
};

}  // namespace peagle
