// What decoding does to single rows.

#pragma once

#include "vectors.h"

namespace peagle {

// Rows of `out` lie `stride` apart.
template <typename T>
void norm(const T* x, const T* weight, T* out, int64_t stride, int64_t rows, int64_t width,
          float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 2 * LANES)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * width;
    T* to = out + row * stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += load(from[i]) * load(from[i]);
    float scale = 1.0f / std::sqrt(sum / float(width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) store(to[i], load(from[i]) * scale * load(weight[i]));
  }
}

// The second half of sin comes with its sign: halves only change places.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t rows, int64_t heads,
            int64_t size, int threads) {
  int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) if (rows > 2 * LANES)
  for (int64_t row = 0; row < rows; ++row) {
    const T *c = cos + row * size, *s = sin + row * size;
    for (int64_t head = 0; head < heads; ++head) {
      const T* from = x + (row * heads + head) * size;
      T* to = out + (row * heads + head) * size;
      for (int64_t side = 0; side < 2; ++side) {
        int64_t here = side * half, there = half - here;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          float kept = rounded<T>(load(from[here + i]) * load(c[here + i]));
          store(to[here + i], kept + load(from[there + i]) * load(s[here + i]));
        }
      }
    }
  }
}

template <typename T>
void gate(const T* x, const T* up, T* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 2 * LANES)
  for (int64_t row = 0; row < rows; ++row) {
    const T *from = x + row * width, *times = up + row * width;
    T* to = out + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      float value = load(from[i]), small = exponential(-std::fabs(value));
      float silu = value * (value < 0 ? small : 1.0f) / (1.0f + small);
      store(to[i], rounded<T>(silu) * load(times[i]));
    }
  }
}

}  // namespace peagle
