// Matrix products x · wᵀ of weights in panels, on any CPU with vectors.
//
// A panel is read from its first step to its last, for a few rows whose sums stay in registers.
// Lanes are outputs, so nothing is summed across lanes. Every sum runs along the inputs in the same
// order, whatever rows stand beside a row: what is chosen by the number of rows is only how many
// sums run at once.

#pragma once

#include "dots.h"
#include "matrix.h"

namespace peagle {

constexpr int64_t PARTS = LANES / WIDTH;  // vectors of the outputs of a panel
constexpr int64_t LINE = 4 * LANES;       // bytes of these
constexpr int64_t ROWS_OF_A_CHUNK = 48;   // rows that stay in a near cache while panels pass by

// Of one block: rows by one panel. Each vector of outputs takes `Steps::KEPT` registers of a row,
// of the few of AVX2 only one: there floats wait in memory.
template <typename Steps>
constexpr int MOST_ROWS = std::max<int>(1, MOST_SUMS / PARTS / (WIDTH == 8 ? 1 : Steps::KEPT));

// Panels that a block of `rows` rows reads at once.
template <typename Steps>
constexpr int panels_at_once(int rows) {
  return 4 * rows * PARTS * Steps::KEPT <= MOST_SUMS ? 2 : 1;
}

// Where a step of some panels lies.
template <int64_t INPUTS, int64_t BYTES>
struct Place {
  static constexpr int64_t INPUTS_OF_A_STEP = INPUTS, KEPT = 1;
  const uint8_t* at;
  int64_t apart;  // bytes from one panel to the next
  int64_t ahead;  // bytes from these panels to those that are read after them

  // Panels from `panel` on, or that one twice.
  Place(const Matrix& m, int64_t panel, int64_t panels, bool twice) {
    int64_t bytes = steps(m.inputs, INPUTS) * BYTES;
    at = static_cast<const uint8_t*>(m.data) + panel * bytes;
    apart = twice ? 0 : bytes;
    ahead = panels * bytes;
  }
  // Vector i of line `line` of this step. Meanwhile the same of the next panels comes nearer.
  template <typename V>
  V read(int64_t i, int64_t line = 0) const {
    const uint8_t* from = at + i / PARTS * apart + i % PARTS * LINE / PARTS + line * LINE;
    __builtin_prefetch(from + ahead, 0, 2);
    return load_vector<V>(from);
  }
  void next() { at += BYTES; }
};

// To the sums of each row, a vector of weights times the row's input: `read(i)` is weights i, and
// `add(sum, weights, r)` the sum with row r's product.
template <int ROWS, int VECTORS, typename Read, typename Add>
inline void add_products(Wide (&sums)[ROWS][VECTORS], Read read, Add add) {
  decltype(read(0)) weights[VECTORS];
  for (int i = 0; i < VECTORS; ++i) weights[i] = read(i);
#pragma GCC unroll 32  // or sums of more than 17 rows are kept in memory
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < VECTORS; ++i) sums[r][i] = add(sums[r][i], weights[i], r);
}

// The ways to read weights: `add` adds a step of some panels, and goes on to the next. `Input` is
// what a step multiplies of a row; the rows' inputs lie `stride` apart.

struct FloatSteps : Place<1, LINE> {
  typedef float Input;
  using Place<1, LINE>::Place;

  template <int ROWS, int VECTORS>
  void add(const Input* x, Wide (&sums)[ROWS][VECTORS]) {
    add_products(
        sums, [&](int i) { return read<Wide>(i); },
        [&](Wide sum, Wide weights, int r) { return sum + x[r] * weights; });
    next();
  }
};

// Weights of bf16 become floats, which is exact.
struct WidenedSteps : Place<2, LINE> {
  struct Input {
    float pair[2];
  };
  using Place<2, LINE>::Place;

  template <int ROWS, int VECTORS>
  void add(const Input* x, Wide (&sums)[ROWS][VECTORS]) {
    add_half<0>(x, sums);
    add_half<1>(x, sums);
    next();
  }

 private:
  template <int ODD, int ROWS, int VECTORS>
  void add_half(const Input* x, Wide (&sums)[ROWS][VECTORS]) {
    auto read_half = [&](int i) {
      WideBits both = read<WideBits>(i);
      return Wide(ODD ? both & 0xffff0000u : both << 16);
    };
    add_products(sums, read_half,
                 [&](Wide sum, Wide weights, int r) { return sum + x[r].pair[ODD] * weights; });
  }
};

// Weights of bf16 as they lie, where the CPU multiplies pairs.
struct PairSteps : Place<2, LINE> {
  typedef uint32_t Input;
  using Place<2, LINE>::Place;

  template <int ROWS, int VECTORS>
  void add(const Input* x, Wide (&sums)[ROWS][VECTORS]) {
    add_products(
        sums, [&](int i) { return read<WideBits>(i); },
        [&](Wide sum, WideBits weights, int r) {
          return dot_pairs(sum, weights, WideBits{} + x[r]);
        });
    next();
  }
};

// A group of inputs as bytes: input i is about `scale` times byte i.
template <int BITS>
struct ByteGroup {
  int32_t inputs[GROUP / 4 * (WORDS && BITS == 8 ? 2 : 1)];  // of each piece of each line
  int32_t surplus;
  float scale, total;  // of all inputs
};

// Weights of 8 or 4 bits times rows of 8 bits. A group's sum is a whole number, so it is exact.
template <int BITS, typename T>
struct ByteSteps : Place<GROUP, LANES * GROUP * BITS / 8> {
  typedef ByteGroup<BITS> Input;
  static constexpr int64_t KEPT = 2;
  static constexpr int64_t LINES = GROUP / 4 * BITS / 8;

  ByteSteps(const Matrix& m, int64_t panel, int64_t panels, bool twice)
      : ByteSteps::Place(m, panel, panels, twice) {
    if (BITS == 8) return;
    int64_t numbers = m.inputs / GROUP * 2 * LANES;
    scales = static_cast<const T*>(m.scales) + panel * numbers;
    scales_apart = twice ? 0 : numbers;
  }

  template <int ROWS, int VECTORS>
  void add(const Input* x, Wide (&sums)[ROWS][VECTORS]) {
    WideInts found[ROWS][VECTORS] = {};
#pragma GCC unroll 8
    for (int line = 0; line < LINES; ++line) {
      WideInts pieces[VECTORS][PIECES<BITS>];
      for (int i = 0; i < VECTORS; ++i)
        in_pieces<BITS>(this->template read<WideInts>(i, line), pieces[i]);
      for (int p = 0; p < PIECES<BITS>; ++p)
        for (int r = 0; r < ROWS; ++r) {
          WideInts inputs = WideInts{} + x[r].inputs[line * PIECES<BITS> + p];
          for (int i = 0; i < VECTORS; ++i)
            found[r][i] = dot<BITS>(found[r][i], pieces[i][p], inputs);
        }
    }
    for (int i = 0; i < VECTORS; ++i) {
      Wide scale = {}, zero = {};
      if (BITS == 4) {
        const T* pairs = scales + i / PARTS * scales_apart + i % PARTS * WIDTH;
        for (int lane = 0; lane < WIDTH; ++lane) scale[lane] = load(pairs[lane]);
        for (int lane = 0; lane < WIDTH; ++lane) zero[lane] = load(pairs[LANES + lane]);
      }
      for (int r = 0; r < ROWS; ++r) {
        WideInts all = found[r][i];
        if (WORDS && BITS == 4) all = dot<8>(WideInts{}, all, WideInts{} + 0x00010001);
        Wide sum = __builtin_convertvector(all - x[r].surplus, Wide) * x[r].scale;
        sums[r][i] += BITS == 8 ? sum : scale * sum;
        if (BITS == 4) sums[r][i] += zero * x[r].total;
      }
    }
    this->next();
    scales += 2 * LANES;
  }

 private:
  const T* scales = nullptr;  // of 4 bits
  int64_t scales_apart = 0;
};

// Make outputs of a panel from the sums of `rows` rows, which lie `apart` floats apart. Not
// inlined: it would take registers from the loop of the sums. `fma` by name: everywhere with the
// same rounding.
template <typename T>
[[gnu::noinline]] void keep(const Product<T>& product, int64_t row, int64_t rows, int64_t panel,
                            const float* sums, int64_t apart) {
  const Matrix& m = product.matrix;
  int64_t output = panel * LANES, count = std::min<int64_t>(LANES, m.outputs - output);
  const T *bias = product.bias(), *scale = static_cast<const T*>(m.scales);
  float scales[LANES], biases[LANES] = {};
  std::fill(scales, scales + LANES, 1.0f);
  for (int64_t i = 0; m.bits == 8 && i < count; ++i) scales[i] = load(scale[output + i]);
  for (int64_t i = 0; bias && i < count; ++i) biases[i] = load(bias[output + i]);
  T* to = product.out + row * m.outputs + output;
  for (int64_t r = 0; r < rows; ++r, sums += apart, to += m.outputs)
    for (int64_t i = 0; i < count; ++i) store(to[i], std::fma(sums[i], scales[i], biases[i]));
}

// ROWS rows, from `row` on, by PANELS panels, from `panel` on, or by that one if it is the last.
// `x` are the inputs of `rows` rows, step by step.
template <int ROWS, int PANELS, typename Steps, typename T>
void multiply_block(const Product<T>& product, int64_t panel, int64_t panels,
                    const typename Steps::Input* x, int64_t rows, int64_t row) {
  int64_t count = steps(product.matrix.inputs, Steps::INPUTS_OF_A_STEP);
  Steps weights(product.matrix, panel, PANELS, panels < PANELS);
  Wide sums[ROWS][PANELS * PARTS] = {};
  x += row;
  for (int64_t k = 0; k < count; ++k) {
    asm volatile("");  // or GCC makes vectors of several steps, which are slower
    weights.add(x + k * rows, sums);
  }
  float found[ROWS][PANELS][LANES];
#pragma GCC unroll 32
  for (int r = 0; r < ROWS; ++r) std::memcpy(found[r], sums[r], sizeof(found[r]));
  for (int p = 0; p < std::min<int64_t>(panels, PANELS); ++p)
    keep(product, row, ROWS, panel + p, found[0][p], PANELS * LANES);
}

template <int ROWS, typename Steps, typename T>
[[gnu::noinline]] void multiply_panels(const Product<T>& product, int64_t first, int64_t last,
                                       const typename Steps::Input* x, int64_t rows, int64_t row) {
  constexpr int PANELS = panels_at_once<Steps>(ROWS);
  for (int64_t panel = first; panel < last; panel += PANELS)
    multiply_block<ROWS, PANELS, Steps>(product, panel, last - panel, x, rows, row);
}

// All rows by the panels first … last − 1, in blocks of rows that are about equally large. What
// follows each other reads the same panels.
template <typename Steps, typename T>
void multiply(const Product<T>& product, int64_t first, int64_t last, const void* spread,
              int64_t rows) {
  constexpr int MOST = MOST_ROWS<Steps>;
  const auto* x = static_cast<const typename Steps::Input*>(spread);
  for (int64_t done = 0; done < rows; done += ROWS_OF_A_CHUNK) {
    int64_t count = std::min(rows - done, ROWS_OF_A_CHUNK), together = count > MOST ? 2 : last;
    for (int64_t panel = first; panel < last; panel += together)
      in_blocks<MOST>(count, [&](auto size, int64_t row) {
        int64_t end = std::min(panel + together, last);
        multiply_panels<size, Steps>(product, panel, end, x, rows, done + row);
      });
  }
}

// ---- Rows, as the ways to read weights want them: their steps lie `apart` ----

template <typename T>
inline void spread(const T* x, int64_t inputs, float* to, int64_t apart) {
  for (int64_t i = 0; i < inputs; ++i) to[i * apart] = load(x[i]);
}

template <typename T>
inline void spread(const T* x, int64_t inputs, WidenedSteps::Input* to, int64_t apart) {
  for (int64_t i = 0; i < inputs; i += 2) {
    to[i / 2 * apart].pair[0] = load(x[i]);
    to[i / 2 * apart].pair[1] = i + 1 < inputs ? load(x[i + 1]) : 0.0f;
  }
}

inline void spread(const Bf16* x, int64_t inputs, uint32_t* to, int64_t apart) {
  for (int64_t i = 0; i < inputs; i += 2)
    to[i / 2 * apart] = x[i].bits | (i + 1 < inputs ? uint32_t(x[i + 1].bits) << 16 : 0);
}

// Up to a group as bytes, to the nearest, ties to even: the largest becomes 127. `poison` is NaN
// where a number is not finite, which the bytes do not show, else 0.
template <int BITS, typename T>
inline ByteGroup<BITS> in_bytes(const T* from, int64_t count) {
  float x[GROUP], most = 0, poison = 0;
  for (int64_t i = 0; i < count; ++i) x[i] = load(from[i]);
  std::fill(x + count, x + GROUP, 0.0f);
#pragma omp simd reduction(max : most) reduction(+ : poison)
  for (int64_t i = 0; i < GROUP; ++i) {
    most = std::max(most, std::fabs(x[i]));
    poison += x[i] * 0.0f;
  }
  float inverse = most > 0 ? 127.0f / most : 0.0f, scale = most / 127.0f + poison;
  int32_t whole[GROUP], total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < GROUP; ++i) total += whole[i] = int32_t(std::rint(x[i] * inverse));
  ByteGroup<BITS> group{{}, total * SURPLUS<BITS>, scale, float(total) * scale};
  for (int64_t i = 0; i < GROUP / 4; ++i) {
    const int32_t* four = whole + 4 * i;
    if constexpr (BITS == 8 && WORDS) {
      group.inputs[2 * i] = (four[0] & 0xffff) + four[2] * 0x10000;
      group.inputs[2 * i + 1] = (four[1] & 0xffff) + four[3] * 0x10000;
    } else {
      int32_t first = (four[0] & 0xff) + (four[1] & 0xff) * 0x100 + (four[2] & 0xff) * 0x10000;
      group.inputs[BITS == 4 ? i % 4 * 2 + i / 4 : i] = first + four[3] * 0x1000000;
    }
  }
  return group;
}

}  // namespace peagle
