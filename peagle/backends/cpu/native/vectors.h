// Vectors, and what bf16 is to them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define PEAGLE_TILES  // Intel's, which multiply
#endif

namespace peagle {

constexpr int LANES = 16;  // keys that are read together, and floats of a vector of AVX-512
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // floats of a vector of this CPU
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float Wide __attribute__((vector_size(4 * WIDTH), may_alias));
typedef uint32_t WideBits __attribute__((vector_size(4 * WIDTH)));
typedef int32_t WideInts __attribute__((vector_size(4 * WIDTH)));

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

// What a transposed lane holds: one float, or two bf16. Columns lie `apart`.
inline void unpack(WideBits lane, Wide* to, int64_t, float) { to[0] = Wide(lane); }
inline void unpack(WideBits lane, Wide* to, int64_t apart, Bf16) {
  to[0] = Wide(lane << 16);
  to[apart] = Wide(lane & 0xffff0000u);
}

// Up to LANES rows of `width`, as vectors of one column each; missing rows are zero. Columns up to
// a multiple of 2 · LANES are written.
template <typename T>
void turn(const T* rows, int64_t count, int64_t stride, int64_t width, Vector* to) {
  constexpr int64_t EACH = 4 / sizeof(T), STEP = WIDTH * EACH;  // values of a lane, of a square
  constexpr int64_t PARTS = LANES / WIDTH;                      // squares beside each other
  Wide* columns = reinterpret_cast<Wide*>(to);
  for (int64_t at = 0; at < width; at += STEP)
    for (int64_t part = 0; part < PARTS; ++part) {
      WideBits square[WIDTH] = {};
      int64_t bytes = std::min(STEP, width - at) * sizeof(T);
      const T* from = rows + part * WIDTH * stride + at;
      for (int64_t j = 0; j < std::min<int64_t>(WIDTH, count - part * WIDTH); ++j)
        if (bytes == sizeof(WideBits))
          std::memcpy(&square[j], from + j * stride, sizeof(WideBits));
        else
          std::memcpy(&square[j], from + j * stride, bytes);
      transpose(square);
      for (int i = 0; i < WIDTH; ++i)
        unpack(square[i], columns + (at + i * EACH) * PARTS + part, PARTS, T{});
    }
}

}  // namespace peagle
