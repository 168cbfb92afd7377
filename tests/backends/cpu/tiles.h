// Intel's tiles (AMX) in plain C++, for a processor that has none: what g++ is told to include
// first.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>

#include <cstdint>
#include <cstring>

namespace emulated {

struct Tile {
  uint32_t rows[16][16];  // each word two bf16, or a float
};

inline thread_local Tile tiles[8];

inline void load(int tile, const void* from, long stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(tiles[tile].rows[row], static_cast<const char*>(from) + row * stride, 64);
}

inline void store(int tile, void* to, long stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile].rows[row], 64);
}

inline float number(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// sums[m][n] += x[m][2k] · w[k][2n] + x[m][2k + 1] · w[k][2n + 1]
inline void multiply(int sums, int x, int w) {
  for (int m = 0; m < 16; ++m) {
    float row[16];
    std::memcpy(row, tiles[sums].rows[m], 64);
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n) {
        uint32_t a = tiles[x].rows[m][k], b = tiles[w].rows[k][n];
        row[n] += number(a << 16) * number(b << 16);
        row[n] += number(a & 0xffff0000) * number(b & 0xffff0000);
      }
    std::memcpy(tiles[sums].rows[m], row, 64);
  }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(configuration) (void)(configuration)
#define _tile_release() (void)0
#define _tile_zero(tile) \
  emulated::tiles[tile] = emulated::Tile {}
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sums, x, w) emulated::multiply(sums, x, w)

#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield  // Linux grants what is asked for: 0
