// The weights of a product, and what a product is.

#pragma once

#include "vectors.h"

namespace peagle {

// Weights (outputs, inputs) of 32 (float), 16 (bf16), 8 or 4 bits, in panels of LANES outputs.
// Zeros fill up the last panel and the last step of every panel. A step of a panel is
//
//   32 bits: one input of each output
//   16 bits: two inputs of each output, side by side
//    8 bits: GROUP inputs, by fours: four inputs of each output, side by side
//    4 bits: GROUP inputs: byte b has input b in its lower half, and input b + GROUP / 2 in its
//            upper half, where bytes lie as the first GROUP / 2 inputs of 8 bits do; numbers are
//            0 … 15 and mean 8 less
//
// `scales` and `bias` have the type of the rows that are multiplied. Scales of 8 bits are
// (outputs,). Those of 4 bits are (panels, groups, 2, LANES): a scale and a zero of each output.
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
