// Products of the same rows with several matrices, of bf16, 8 or 4 bits.

#pragma once

#include "ints.h"

#ifdef PEAGLE_TILES

namespace peagle {

struct Product {
  Matrix matrix;
  const Bf16* bias;  // or none
  Bf16* out;         // (rows, outputs)
};

// One behind the other in one loop of all threads; x is brought into the form that each kind wants.
template <int COUNT>
void linear(const Bf16* x, const Product (&products)[COUNT], int64_t rows, int64_t inputs,
            int threads) {
  int64_t ends[COUNT], all = 0;  // in pairs of panels
  bool plain = false, summed = false;
  for (int i = 0; i < COUNT; ++i) {
    ends[i] = all += (products[i].matrix.outputs + 2 * LANES - 1) / (2 * LANES);
    plain |= products[i].matrix.bits == 16;
    summed |= products[i].matrix.bits == 4;
  }
  const Bits* tiles = plain ? turned(x, rows, inputs) : nullptr;
  const float* sums = summed ? totals(x, rows, inputs) : nullptr;
#pragma omp parallel num_threads(threads)
  {
    constexpr int64_t WHOLE = -1;
    int64_t configured = 0;  // tiles: whole ones, or for how many rows behind the first 16
    Tiles whole;
#pragma omp for
    for (int64_t pair = 0; pair < all; ++pair) {
      int i = 0;
      while (pair >= ends[i]) ++i;
      int64_t at = (pair - (i ? ends[i - 1] : 0)) * 2 * LANES;
      const Product& p = products[i];
      if (p.matrix.bits == 16) {
        if (configured != WHOLE) configure(whole);
        configured = WHOLE;
        multiply(tiles, static_cast<const Bf16*>(p.matrix.data), p.bias, p.out, at, rows, inputs,
                 p.matrix.outputs);
      } else {
        auto run = p.matrix.bits == 8 ? multiply<8> : multiply<4>;
        run(x, sums, p.matrix, p.bias, p.out, at, rows, inputs, configured);
      }
    }
    _tile_release();
  }
}

}  // namespace peagle

#endif
