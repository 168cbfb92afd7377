// What a layer does to single rows. A row is computed in the same way whatever rows stand beside
// it. All threads of a team run these functions together. Row i of R is always the same thread's:
// so `rotate` and `add` do not wait for the other threads, and what follows may read these rows.

#pragma once

#include "team.h"
#include "vectors.h"

namespace peagle {

// Rows of `out` lie `stride` apart.
template <typename T>
void norm(const T* x, const float* weight, T* out, int64_t stride, int64_t rows, int64_t width,
          float eps) {
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * width;
    T* to = out + row * stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += load(from[i]) * load(from[i]);
    float scale = 1.0f / std::sqrt(sum / float(width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) store(to[i], load(from[i]) * scale * weight[i]);
  }
  wait_for_team();
}

// RoPE of x (rows, heads, size) by cos and sin (rows, size).
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t rows, int64_t heads,
            int64_t size) {
  int64_t half = size / 2;
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) {
    const T *c = cos + row * size, *s = sin + row * size;
    for (int64_t head = 0; head < heads; ++head) {
      const T* from = x + (row * heads + head) * size;
      T* to = out + (row * heads + head) * size;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        float kept = rounded<T>(load(from[i]) * load(c[i]));
        store(to[i], kept - load(from[half + i]) * load(s[i]));
      }
#pragma omp simd
      for (int64_t i = half; i < size; ++i) {
        float kept = rounded<T>(load(from[i]) * load(c[i]));
        store(to[i], kept + load(from[i - half]) * load(s[i]));
      }
    }
  }
}

enum class Activation : int64_t { SILU, GELU_TANH };

// activation(x) · up. `out` may be x. Both are x · sigmoid(z): SiLU's z is x, and 1 + tanh(u) is
// 2 · sigmoid(2u).
template <typename T>
void gate(const T* x, const T* up, T* out, int64_t rows, int64_t width, Activation activation) {
  float cubic = activation == Activation::SILU ? 0.0f : 0.044715f;
  float slope = activation == Activation::SILU ? 1.0f : 1.5957691216f;  // 2 · sqrt(2 / pi)
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) {
    const T *from = x + row * width, *times = up + row * width;
    T* to = out + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      float value = load(from[i]);
      float z = slope * (value + cubic * value * value * value);
      float small = exponential(-std::fabs(z));
      float active = value * (z < 0 ? small : 1.0f) / (1.0f + small);
      store(to[i], rounded<T>(active) * load(times[i]));
    }
  }
  wait_for_team();
}

// x + y. `out` may be x.
template <typename T>
void add(const T* x, const T* y, T* out, int64_t rows, int64_t width) {
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) {
    const T *from = x + row * width, *more = y + row * width;
    T* to = out + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) store(to[i], load(from[i]) + load(more[i]));
  }
}

}  // namespace peagle
