// Matrix products x · wᵀ of weights row by row, on any CPU with vectors.
//
// Every sum runs along the inputs in the same order, whatever rows stand beside a row: lane l of a
// vector sums the inputs l, l + WIDTH, l + 2 · WIDTH, …, and at the end the lanes are summed. What is
// chosen by the number of rows is only how many sums run at once.

#pragma once

#include "matrix.h"
#include "vectors.h"

namespace peagle {

constexpr int64_t CHUNK = 2 * WIDTH;  // inputs of a step: a vector of bf16
constexpr int64_t STRIP = 16;         // outputs of one thread at a time
constexpr int MOST_ROWS = 6;          // of one block
constexpr int64_t EXPANDED = 1 << 14;  // weights of few bits that are floats at a time

// Outputs that are summed at once for so many rows: all sums stay in registers.
constexpr int outputs_at_once(int rows) {
  if (WIDTH == 16) return rows < 3 ? 8 : 4;
  return rows == 1 ? 8 : rows < 4 ? 4 : 2;
}

// Half of the weights of a chunk: the first or second of float, the even or odd ones of bf16.
template <int HALF>
inline Wide half(const float* from) {
  Wide lanes;
  std::memcpy(&lanes, from + HALF * WIDTH, sizeof(lanes));
  return lanes;
}
template <int HALF>
inline Wide half(const Bf16* from) {
  WideBits lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return Wide(HALF ? lanes & 0xffff0000u : lanes << 16);
}

// Inputs of a chunk as floats, in the order in which `half` reads weights of type W.
template <typename W, typename T>
inline void spread_chunk(const T* from, float* to) {
  if constexpr (sizeof(W) == 2 && sizeof(T) == 2) {
    Wide halves[2] = {half<0>(from), half<1>(from)};
    std::memcpy(to, halves, sizeof(halves));
  } else {
    for (int64_t i = 0; i < CHUNK; ++i) to[i] = load(from[i]);
  }
}

// Rows x (rows, inputs) as floats (rows, stride), in whole chunks, with zeros after the last input.
template <typename W, typename T>
void spread(const T* x, float* out, int64_t rows, int64_t inputs, int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 32)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * inputs;
    float* to = out + row * stride;
    int64_t at = 0;
    for (; at + CHUNK <= inputs; at += CHUNK) spread_chunk<W>(from + at, to + at);
    if (at < inputs) {
      T rest[CHUNK] = {};
      std::memcpy(rest, from + at, (inputs - at) * sizeof(T));
      spread_chunk<W>(rest, to + at);
    }
  }
}

// The sum of all lanes, of neighbours SIDE apart first.
template <int SIDE = WIDTH / 2>
inline float total(Wide v) {
  if constexpr (SIDE == 0) {
    return v[0];
  } else {
    WideBits other;
    for (uint32_t lane = 0; lane < WIDTH; ++lane) other[lane] = lane ^ SIDE;
    return total<SIDE / 2>(v + __builtin_shuffle(v, other));
  }
}

template <int HALF, int ROWS, int OUTPUTS, typename W>
inline void add_half(const float* x, int64_t stride, const W* const (&w)[OUTPUTS], int64_t at,
                     Wide (&sums)[ROWS][OUTPUTS]) {
  Wide weights[OUTPUTS];
  for (int o = 0; o < OUTPUTS; ++o) weights[o] = half<HALF>(w[o] + at);
  for (int r = 0; r < ROWS; ++r) {
    Wide values;
    std::memcpy(&values, x + r * stride + HALF * WIDTH, sizeof(values));
    for (int o = 0; o < OUTPUTS; ++o) sums[r][o] += values * weights[o];
  }
}

// Sums of ROWS rows by OUTPUTS outputs.
template <int ROWS, int OUTPUTS, typename W>
inline void multiply_block(const float* x, int64_t stride, const W* w, int64_t inputs,
                           float (&found)[ROWS][OUTPUTS]) {
  Wide sums[ROWS][OUTPUTS] = {};
  const W* from[OUTPUTS];
  for (int o = 0; o < OUTPUTS; ++o) from[o] = w + o * inputs;
  int64_t whole = inputs / CHUNK * CHUNK;
  for (int64_t at = 0; at < whole; at += CHUNK) {
    for (int o = 0; o < OUTPUTS; ++o) __builtin_prefetch(from[o] + at + OUTPUTS * inputs);
    add_half<0>(x + at, stride, from, at, sums);
    add_half<1>(x + at, stride, from, at, sums);
  }
  if (whole < inputs) {
    W rest[OUTPUTS][CHUNK] = {};
    for (int o = 0; o < OUTPUTS; ++o) {
      std::memcpy(rest[o], from[o] + whole, (inputs - whole) * sizeof(W));
      from[o] = rest[o];
    }
    add_half<0>(x + whole, stride, from, 0, sums);
    add_half<1>(x + whole, stride, from, 0, sums);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int o = 0; o < OUTPUTS; ++o) found[r][o] = total(sums[r][o]);
}

// One product on its way: rows as floats, and what is done to a sum.
template <typename T>
struct Rows {
  const float* x;  // (rows, stride)
  int64_t stride, rows;
  const Product<T>& product;

  // Keep the sum of a row and an output. `fma` by name: everywhere with the same rounding.
  void keep(int64_t row, int64_t output, float sum) const {
    const Matrix& m = product.matrix;
    float scale = m.bits == 8 ? load(static_cast<const T*>(m.scales)[output]) : 1.0f;
    float bias = m.bias ? load(product.bias()[output]) : 0.0f;
    store(product.out[row * m.outputs + output], std::fma(sum, scale, bias));
  }
};

template <int ROWS, int OUTPUTS, typename T, typename W>
void multiply_and_keep(const Rows<T>& rows, int64_t row, const W* w, int64_t output) {
  float found[ROWS][OUTPUTS];
  multiply_block(rows.x + row * rows.stride, rows.stride, w, rows.product.matrix.inputs, found);
  for (int r = 0; r < ROWS; ++r)
    for (int o = 0; o < OUTPUTS; ++o) rows.keep(row + r, output + o, found[r][o]);
}

// ROWS rows by `count` outputs, whose weights are at w.
template <int ROWS, typename T, typename W>
void multiply_strip(const Rows<T>& rows, int64_t row, const W* w, int64_t output, int64_t count) {
  constexpr int AT_ONCE = outputs_at_once(ROWS);
  int64_t inputs = rows.product.matrix.inputs, done = 0;
  for (; done + AT_ONCE <= count; done += AT_ONCE)
    multiply_and_keep<ROWS, AT_ONCE>(rows, row, w + done * inputs, output + done);
  for (; done < count; ++done)
    multiply_and_keep<ROWS, 1>(rows, row, w + done * inputs, output + done);
}

// All rows by `count` outputs, in blocks of rows that are about equally large.
template <typename T, typename W>
void multiply_rows(const Rows<T>& rows, const W* w, int64_t output, int64_t count) {
  typedef void (*Multiply)(const Rows<T>&, int64_t, const W*, int64_t, int64_t);
  constexpr Multiply BY_ROWS[] = {
      nullptr, multiply_strip<1, T, W>, multiply_strip<2, T, W>, multiply_strip<3, T, W>,
      multiply_strip<4, T, W>, multiply_strip<5, T, W>, multiply_strip<6, T, W>};
  int64_t row = 0;
  for (int64_t blocks = (rows.rows + MOST_ROWS - 1) / MOST_ROWS; blocks; --blocks) {
    int64_t size = (rows.rows - row + blocks - 1) / blocks;
    BY_ROWS[size](rows, row, w, output, count);
    row += size;
  }
}

// Some weights of 8 bits as floats, without their scale, which comes to the sum.
inline void expand_8(const int8_t* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = float(from[i]);
}

// A group of weights of 4 bits as floats. In a vector the group's four words stand WIDTH / 4 times.
inline void expand_4(const uint32_t* from, float scale, float zero, float* to) {
  WideBits words, shifts;
  for (uint32_t lane = 0; lane < WIDTH; ++lane) {
    words[lane] = from[lane % 4];
    shifts[lane] = lane / 4 * 4;
  }
  for (int i = 0; i < GROUP; i += WIDTH, shifts += WIDTH) {
    Wide numbers = __builtin_convertvector(WideInts((words >> shifts) & 15) - 8, Wide);
    Wide weights = numbers * scale + zero;
    std::memcpy(to + i, &weights, sizeof(weights));
  }
}

// The weights of an output as floats.
template <typename T>
void expand_row(const Matrix& m, int64_t output, float* to) {
  int64_t first = output * m.inputs, groups = m.inputs / GROUP;
  if (m.bits == 8) return expand_8(static_cast<const int8_t*>(m.data) + first, to, m.inputs);
  const uint32_t* from = static_cast<const uint32_t*>(m.data) + first / 8;
  const T* pairs = static_cast<const T*>(m.scales) + output * groups * 2;
  for (int64_t g = 0; g < groups; ++g)
    expand_4(from + g * 4, load(pairs[2 * g]), load(pairs[2 * g + 1]), to + g * GROUP);
}

// Outputs of 8 or 4 bits are expanded so many at a time that they stay in a near cache.
template <typename T>
void multiply_ints(const Rows<T>& rows, int64_t output, int64_t count) {
  const Matrix& m = rows.product.matrix;
  static thread_local std::vector<float> room;
  int64_t most = std::clamp<int64_t>(EXPANDED / m.inputs / 4 * 4, 2, STRIP);
  float* weights = room_for(room, most * m.inputs);
  for (int64_t done = 0; done < count; done += most) {
    int64_t now = std::min(most, count - done);
    for (int64_t i = 0; i < now; ++i) expand_row<T>(m, output + done + i, weights + i * m.inputs);
    multiply_rows(rows, weights, output + done, now);
  }
}

// Strip number `strip` of a product.
template <typename T>
void multiply_part(const Rows<T>& rows, int64_t strip) {
  const Matrix& m = rows.product.matrix;
  int64_t output = strip * STRIP, count = std::min(STRIP, m.outputs - output);
  if (m.bits == 32)
    multiply_rows(rows, static_cast<const float*>(m.data) + output * m.inputs, output, count);
  else if (m.bits == 16)
    multiply_rows(rows, static_cast<const Bf16*>(m.data) + output * m.inputs, output, count);
  else
    multiply_ints(rows, output, count);
}

}  // namespace peagle
