// Matrix products x · wᵀ of few rows on Intel's tiles (AMX): the weights (outputs, inputs) are read
// as they lie, once. Every 16 outputs are a panel: written by one thread, 32 inputs at a time.

#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "vectors.h"

namespace peagle {

constexpr int64_t STEP = 2 * LANES;

// Two bf16 in each lane.
inline Bits pairs(const Bf16* from) {
  Bits lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// Sixteen outputs of a row.
inline void write(Vector sums, const Bf16* bias, Bf16* out) {
  if (bias)
    for (int i = 0; i < LANES; ++i) sums[i] += load(bias[i]);
  Bits bits = Bits(sums), nan = Bits(sums != sums);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // as `store` does
  Halves halves = __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), Halves);
  std::memcpy(out, &halves, sizeof(halves));
}

constexpr int64_t BLOCKS = 4;  // of 16 rows, at once

struct Tiles {  // the configuration that `ldtilecfg` reads: 8 tiles of 16 rows of 64 bytes
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// One panel for up to BLOCKS blocks of rows; `turned`: (blocks, inputs / 32) tiles of x.
inline void panel(const Bits* turned, int64_t blocks, const Bf16* w, int64_t inputs,
                  Bits (&sums)[BLOCKS][LANES]) {
  int64_t steps = inputs / STEP;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k, turned += LANES) {
    const Bf16* next = w + LANES * inputs + k * LANES * STEP;
    for (int64_t j = 0; j < LANES; ++j) __builtin_prefetch(next + j * STEP, 0, 1);
    _tile_loadd(4, w + k * STEP, inputs * 2);
    _tile_loadd(5, turned, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (blocks > 1) {
      _tile_loadd(6, turned + steps * LANES, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (blocks > 2) {
      _tile_loadd(7, turned + 2 * steps * LANES, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (blocks > 3) {
      _tile_loadd(5, turned + 3 * steps * LANES, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums[0], 64);
  if (blocks > 1) _tile_stored(1, sums[1], 64);
  if (blocks > 2) _tile_stored(2, sums[2], 64);
  if (blocks > 3) _tile_stored(3, sums[3], 64);
}

void linear(const Bf16* x, const Bf16* w, const Bf16* bias, Bf16* out, int64_t rows,
              int64_t inputs, int64_t outputs, int threads) {
  int64_t blocks = (rows + LANES - 1) / LANES, steps = inputs / STEP;
  static thread_local std::vector<Bits> turned;
  turned.resize(blocks * steps * LANES);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t k = 0; k < steps; ++k) {
      Bits square[LANES] = {};
      for (int64_t j = 0; j < std::min<int64_t>(LANES, rows - block * LANES); ++j)
        square[j] = pairs(x + (block * LANES + j) * inputs + k * STEP);
      transpose(square);
      std::memcpy(&turned[(block * steps + k) * LANES], square, sizeof(square));
    }
  const Bits* given = turned.data();
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    _tile_loadconfig(&tiles);
#pragma omp for
    for (int64_t at = 0; at < outputs; at += LANES)
      for (int64_t block = 0; block < blocks; block += BLOCKS) {
        Bits sums[BLOCKS][LANES];
        int64_t count = std::min(BLOCKS, blocks - block);
        panel(given + block * steps * LANES, count, w + at * inputs, inputs, sums);
        for (int64_t b = 0; b < count; ++b) {
          transpose(sums[b]);
          int64_t row = (block + b) * LANES;
          for (int64_t j = 0; j < std::min<int64_t>(LANES, rows - row); ++j)
            write(Vector(sums[b][j]), bias ? bias + at : nullptr, out + (row + j) * outputs + at);
        }
      }
    _tile_release();
  }
}

}  // namespace peagle

#endif
