// Vectors, and what bf16 is to them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define PEAGLE_TILES  // Intel's, which multiply
#endif

namespace peagle {

constexpr int LANES = 16;  // keys that are read together, and floats of a vector of AVX-512
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

#if defined(__AVX512BW__)
constexpr int WIDTH = 16;  // floats of a vector of this CPU
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float Wide __attribute__((vector_size(4 * WIDTH), may_alias));
typedef uint32_t WideBits __attribute__((vector_size(4 * WIDTH)));
typedef int32_t WideInts __attribute__((vector_size(4 * WIDTH)));

#if defined(__AVX512BW__)
constexpr int MOST_SUMS = 24;  // vectors that stay in registers, beside weights and inputs
#elif defined(__ARM_NEON)
constexpr int MOST_SUMS = 16;
#else
constexpr int MOST_SUMS = 12;
#endif

template <typename V>
inline V load_vector(const void* from) {
  V lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// The number of steps that `inputs` take, the last one may be short.
inline int64_t steps(int64_t inputs, int64_t of_a_step) {
  return (inputs + of_a_step - 1) / of_a_step;
}

template <int SIZE, typename Run>
void run_block(int64_t size, int64_t row, Run run) {
  if constexpr (SIZE > 1)
    if (size < SIZE) return run_block<SIZE - 1>(size, row, run);
  run(std::integral_constant<int, SIZE>(), row);
}

// Call run(size, row) for rows in blocks of at most MOST, which are about equally large. `size` is
// known when this is compiled.
template <int MOST, typename Run>
void in_blocks(int64_t rows, Run run) {
  int64_t row = 0;
  for (int64_t blocks = steps(rows, MOST); blocks; --blocks) {
    int64_t size = steps(rows - row, blocks);
    run_block<MOST>(size, row, run);
    row += size;
  }
}

struct Bf16 {
  uint16_t bits;
};

// Room for `count`, kept for the next time: `resize` would write zeros whenever sizes alternate.
template <typename T>
inline T* room_for(std::vector<T>& kept, size_t count) {
  if (kept.size() < count) kept.resize(count);
  return kept.data();
}

inline float load(float x) { return x; }
inline float load(Bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void store(float& to, float x) { to = x; }
inline void store(Bf16& to, float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = x != x ? 0x7fc0 : uint16_t(rounded);
}

template <typename T>
inline float rounded(float x) {  // as if it had been kept in between
  T kept;
  store(kept, x);
  return load(kept);
}

// e^x of x = whole · log 2 + rest, but for the power of two: of floats or vectors of them.
template <typename T>
inline T mantissa(T x, T whole) {
  T rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  T sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  return sum * rest * rest + rest + 1.0f;
}

// e^x for x ≤ 0 to the last bit or two, without a branch, so that loops of it become vectors.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  float whole = std::floor(x * 1.44269504f + 0.5f);
  uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return mantissa(x, whole) * power;
}

// Swap the corners of every square of 2 · SIDE lanes: with all sides, a transpose.
template <int SIDE, typename V, int COUNT>
inline void swap_corners(V (&rows)[COUNT]) {
  V upper, lower;
  for (uint32_t lane = 0; lane < COUNT; ++lane) {
    upper[lane] = lane & SIDE ? COUNT + lane - SIDE : lane;
    lower[lane] = lane & SIDE ? COUNT + lane : lane + SIDE;
  }
  for (int i = 0; i < COUNT; ++i)
    if (!(i & SIDE)) {
      V a = rows[i], b = rows[i + SIDE];
      rows[i] = __builtin_shuffle(a, b, upper);
      rows[i + SIDE] = __builtin_shuffle(a, b, lower);
    }
}

// As many rows as a vector of them has lanes.
template <typename V, int COUNT>
inline void transpose(V (&rows)[COUNT]) {
  swap_corners<1>(rows);
  swap_corners<2>(rows);
  if constexpr (COUNT > 4) swap_corners<4>(rows);
  if constexpr (COUNT > 8) swap_corners<8>(rows);
}

}  // namespace peagle
