// The largest numbers of rows, as of logits, in order. Of equal ones the first comes first.

#pragma once

#include <limits>

#include "team.h"
#include "vectors.h"

namespace peagle {

constexpr int64_t PART = 128;  // numbers whose largest decides whether any of them is looked at

// The `count` largest numbers of a row so far, in the caller's memory.
struct Largest {
  int64_t count;
  float* values;
  int64_t* ids;
  int64_t found = 0;

  bool takes(float value) const { return found < count || value > values[count - 1]; }

  void add(float value, int64_t id) {
    if (!takes(value)) return;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
  }
};

// Fill `largest` from x (width,). A row with a NaN has it as its largest number.
template <typename T>
void rank_row(const T* x, int64_t width, Largest largest) {
  int nan = 0;
  for (int64_t first = 0; first < width; first += PART) {
    int64_t last = std::min(first + PART, width);
    float most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : most) reduction(| : nan)
    for (int64_t i = first; i < last; ++i) {
      float value = load(x[i]);
      most = value > most ? value : most;
      nan |= value != value;
    }
    if (!largest.takes(most)) continue;
    for (int64_t i = first; i < last; ++i) largest.add(load(x[i]), i);
  }
  if (nan) largest.values[0] = std::numeric_limits<float>::quiet_NaN();
}

// Turn the largest numbers of x (width,) into their parts of its softmax.
template <typename T>
void weigh_row(const T* x, int64_t width, Largest largest) {
  float most = largest.values[0], sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) sum += exponential(load(x[i]) - most);
  for (int64_t at = 0; at < largest.count; ++at)
    largest.values[at] = std::exp(largest.values[at] - most) / sum;
}

// x (rows, width) → values and ids (rows, count); `weighed`: values are probabilities.
template <typename T>
void rank(const T* x, int64_t rows, int64_t width, int64_t count, bool weighed, float* values,
          int64_t* ids) {
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) {
    Largest largest{count, values + row * count, ids + row * count};
    rank_row(x + row * width, width, largest);
    if (weighed) weigh_row(x + row * width, width, largest);
  }
}

}  // namespace peagle
