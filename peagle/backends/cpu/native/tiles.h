// Matrix products x · wᵀ on Intel's tiles (AMX), of bf16 weights as they lie. Every 16 outputs are
// a panel, multiplied by one thread, 32 inputs at a time.

#pragma once

#include "vectors.h"

#ifdef PEAGLE_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace peagle {

constexpr int64_t STEP = 2 * LANES;

inline bool may_use_tiles() {
  static bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // Linux wants to be asked
  return may;
}

// Sixteen outputs of a row.
inline void write(Vector sums, const Bf16* bias, Bf16* out) {
  if (bias)
    for (int i = 0; i < LANES; ++i) sums[i] += load(bias[i]);
  __m256bh halves = _mm512_cvtneps_pbh(__m512(sums));
  std::memcpy(out, &halves, sizeof(halves));
}

struct Tiles {  // the configuration that `ldtilecfg` reads: 8 tiles of 16 rows of 64 bytes
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// GCC's own name too little of what they read, and so it may leave that unwritten.
inline void configure(const Tiles& tiles) {
  asm volatile("" : : "m"(tiles));
  _tile_loadconfig(&tiles);
}
#define LOAD_TILE(tile, from, stride) \
  do {                                \
    asm volatile("" : : : "memory");  \
    _tile_loadd(tile, from, stride);  \
  } while (0)

inline void clear_sums() {  // tiles 0 to 3
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Up to two panels by up to two blocks of 16 rows: so every tile that is loaded is used twice.
// `turned`: (blocks, inputs / 32) tiles of x; `sums`: (panels, blocks).
inline void square(const Bits* turned, int64_t blocks, const Bf16* w, int64_t panels,
                   int64_t inputs, bool ahead, Bits (&sums)[2][2][LANES]) {
  int64_t steps = inputs / STEP;
  const Bf16* second = w + LANES * inputs;
  clear_sums();
  for (int64_t k = 0; k < steps; ++k, turned += LANES) {
    if (ahead)
      for (int64_t j = 0; j < 2 * LANES; ++j)
        __builtin_prefetch(w + 2 * (LANES * inputs + k * LANES * STEP) + j * STEP, 0, 1);
    LOAD_TILE(4, w + k * STEP, inputs * 2);
    LOAD_TILE(6, turned, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (panels > 1) {
      LOAD_TILE(5, second + k * STEP, inputs * 2);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (blocks > 1) {
      LOAD_TILE(7, turned + steps * LANES, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (panels > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  _tile_stored(2, sums[1][0], 64);
  _tile_stored(3, sums[1][1], 64);
}

// Rows x (rows, inputs) as tiles (rows / 16, inputs / 32), inputs downwards. All threads of a
// team share them.
inline void turn(const Bf16* x, int64_t rows, int64_t inputs, Bits* tiles) {
  int64_t steps = inputs / STEP;
#pragma omp for schedule(static) nowait
  for (int64_t at = 0; at < (rows + LANES - 1) / LANES * steps; ++at) {
    Bits tile[LANES] = {};
    int64_t row = at / steps * LANES;
    for (int64_t j = 0; j < std::min<int64_t>(LANES, rows - row); ++j)
      tile[j] = load_vector<Bits>(x + (row + j) * inputs + at % steps * STEP);
    transpose(tile);
    std::memcpy(tiles + at * LANES, tile, sizeof(tile));
  }
}

// The panels from output `at` on, two at most, of a product with all rows.
inline void multiply(const Bits* turned, const Bf16* w, const Bf16* bias, Bf16* out, int64_t at,
                     int64_t rows, int64_t inputs, int64_t outputs) {
  int64_t blocks = (rows + LANES - 1) / LANES, steps = inputs / STEP;
  int64_t panels = std::min<int64_t>(2, (outputs - at) / LANES);
  for (int64_t block = 0; block < blocks; block += 2) {
    Bits sums[2][2][LANES];
    int64_t beside = std::min<int64_t>(2, blocks - block);
    square(turned + block * steps * LANES, beside, w + at * inputs, panels, inputs, block == 0,
           sums);
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t b = 0; b < beside; ++b) {
        transpose(sums[p][b]);
        int64_t row = (block + b) * LANES, output = at + p * LANES;
        for (int64_t j = 0; j < std::min<int64_t>(LANES, rows - row); ++j)
          write(Vector(sums[p][b][j]), bias ? bias + output : nullptr,
                out + (row + j) * outputs + output);
      }
  }
}

}  // namespace peagle

#endif
