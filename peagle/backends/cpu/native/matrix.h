// The weights of a product, and what a product is. peagle/backends/cpu/matrix.py mirrors Matrix.

#pragma once

#include <cstdint>

namespace peagle {

// Weights (outputs, inputs) of 32 (float), 16 (bf16), 8 or 4 bits.
//
// Row by row, 32, 16 and 8 bits lie as they are. 4 bits lie in groups of GROUP inputs, a group as
// four words: word l holds the inputs l, 4 + l, 8 + l, … from its lowest bits on. `scales` and `bias`
// have the type of the rows that are multiplied. Scales of 8 bits are (outputs,), those of 4 bits
// (outputs, groups, 2) pairs of scale and zero.
//
// Tiled weights, for AMX, are described in tiles.h (16 bits) and ints.h (8 and 4 bits).
struct Matrix {
  const void *data, *scales, *bias;  // bias (outputs,), or none
  int64_t bits, tiled, outputs, inputs;
};

constexpr int64_t GROUP = 32;  // inputs that share a scale and a zero

template <typename T>
struct Product {
  Matrix matrix;
  T* out;  // (rows, outputs)

  const T* bias() const { return static_cast<const T*>(matrix.bias); }
};

}  // namespace peagle
