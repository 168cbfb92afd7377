// Matrix products x · wᵀ on Intel's tiles (AMX), of weights of 8 and 4 bits. They become whole
// numbers in bf16, which is exact, on their way into tiles; scales come to the sums.
//
// A tile has 32 inputs of a panel of 16 outputs: in row i the inputs 2i and 2i + 1 of each output.
// Weights lie panel by panel and in these tile by tile, as `expand` reads them; of 4 bits a tile's
// 16 pairs of scale and zero stand before it.

#pragma once

#include "matrix.h"
#include "tiles.h"

#ifdef PEAGLE_TILES

namespace peagle {

constexpr int64_t TILE = LANES * STEP;

// 8 bits: of each of 16 rows of the tile first the even inputs, then the odd ones.
inline void expand(const int8_t* from, Bf16* to) {
  for (int i = 0; i < LANES; ++i, from += STEP, to += STEP) {
    __m512 halves[2];
    for (int odd = 0; odd < 2; ++odd) {
      __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(from) + odd);
      halves[odd] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }
    Bits both = (Bits(halves[0]) >> 16) | (Bits(halves[1]) & 0xffff0000u);
    std::memcpy(to, &both, sizeof(both));
  }
}

// 4 bits: four vectors, each of four rows of the tile; of these a row is every fourth half byte.
inline void expand(const uint8_t* from, Bf16* to) {
  alignas(64) constexpr static uint16_t NUMBERS[STEP] = {
      // −8 … 7, twice: an index has 5 bits
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  const __m512i numbers = _mm512_load_si512(NUMBERS);
  for (int i = 0; i < LANES; i += 4, from += 64) {
    __m512i four = _mm512_loadu_si512(from);
    for (int j = 0; j < 4; ++j, to += STEP, four = _mm512_srli_epi16(four, 4))
      _mm512_store_si512(to, _mm512_permutexvar_epi16(four, numbers));
  }
}

// Up to 32 rows of x: tiles 0 and 1 sum up the first 16, if there are more, with one and the other
// panel, 2 and 3 the others; rows are brought into tiles 4 and 5, panels into 6 and 7.
struct Mixed : Tiles {
  explicit Mixed(int64_t others) {
    for (int tile : {2, 3, 5}) rows[tile] = uint8_t(others);
  }
};

typedef Vector Sums[2][2][LANES];  // of each block of rows, of each panel

// Two panels, or the last one twice.
template <int BITS>
struct Panels {
  static constexpr int64_t BYTES = BITS == 8 ? TILE : TILE / 2 + 64;  // of a tile
  static constexpr int64_t RING = 4, AHEAD = 2;  // expanded tiles that are kept, not used yet
  const uint8_t* data;
  int64_t second, steps;
  Bf16* room;  // as small as can be: what is written here is to stay in the nearest cache

  const uint8_t* kept(int panel, int64_t k) const { return data + panel * second + k * BYTES; }
  Bf16* tile(int panel, int64_t k) const { return room + (k % RING * 2 + panel) * TILE; }
  void make(int64_t k) const {
    for (int panel = 0; panel < 2; ++panel) {
      const uint8_t* from = kept(panel, k);
      for (int64_t byte = 0; byte < BYTES; byte += 64)  // of the panels behind these
        __builtin_prefetch(from + 2 * steps * BYTES + byte);
      if constexpr (BITS == 8)
        expand(reinterpret_cast<const int8_t*>(from), tile(panel, k));
      else
        expand(from + 64, tile(panel, k));
    }
  }
};

// Add what 32 inputs give, by scale and zero of each output. `totals`: sums of these inputs.
inline void scaled(const Vector* found, const uint8_t* from, const float* totals, int64_t steps,
                   int64_t rows, Vector* sums) {
  Bits both = load_vector<Bits>(from);
  Vector scale = Vector(both << 16), zero = Vector(both & 0xffff0000u);
  for (int64_t row = 0; row < rows; ++row)
    sums[row] += scale * found[row] + zero * totals[row * steps];
}

// Up to 32 rows, more than 16 if MANY. `totals`: (rows, steps) sums of 32 inputs each.
template <int BITS, bool MANY>
inline void pass(const Bf16* x, const float* totals, int64_t rows, const Panels<BITS>& w,
                 Sums& sums) {
  int64_t inputs = w.steps * STEP, first = MANY ? LANES : 0;
  auto take = [](Sums& to) {
    if (MANY) {
      _tile_stored(0, to[0][0], 64);
      _tile_stored(1, to[0][1], 64);
    }
    _tile_stored(2, to[1][0], 64);
    _tile_stored(3, to[1][1], 64);
  };
  for (int64_t k = 0; k < std::min(w.AHEAD, w.steps); ++k) w.make(k);
  clear_sums();
  for (int64_t k = 0; k < w.steps; ++k) {
    if (k + w.AHEAD < w.steps) w.make(k + w.AHEAD);
    LOAD_TILE(6, w.tile(0, k), 64);
    LOAD_TILE(7, w.tile(1, k), 64);
    if (MANY) {
      LOAD_TILE(4, x + k * STEP, inputs * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    LOAD_TILE(5, x + first * inputs + k * STEP, inputs * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (BITS == 8) continue;
    Sums found;
    take(found);
    clear_sums();
    for (int panel = 0; panel < 2; ++panel) {
      const uint8_t* from = w.kept(panel, k);
      if (MANY) scaled(found[0][panel], from, totals + k, w.steps, LANES, sums[0][panel]);
      scaled(found[1][panel], from, totals + first * w.steps + k, w.steps, rows - first,
             sums[1][panel]);
    }
  }
  if (BITS == 8) take(sums);
}

// The panels from output `at` on, two at most, of a product with all rows. `others`: what tiles are
// configured for.
template <int BITS>
void multiply_ints(const Bf16* x, const float* totals, const Matrix& w, const Bf16* bias, Bf16* out,
                   int64_t at, int64_t rows, int64_t inputs, int64_t& others) {
  alignas(64) Bf16 room[2 * Panels<BITS>::RING * TILE];
  int64_t steps = inputs / STEP, panel = steps * Panels<BITS>::BYTES;
  int64_t panels = std::min<int64_t>(2, (w.outputs - at) / LANES);
  Panels<BITS> both{static_cast<const uint8_t*>(w.data) + at / LANES * panel,
                    panels > 1 ? panel : 0, steps, room};
  for (int64_t first = 0; first < rows; first += 2 * LANES) {
    Sums sums = {};
    int64_t count = std::min<int64_t>(2 * LANES, rows - first);
    bool many = count > LANES;
    if (others != count - many * LANES) {
      Mixed tiles(others = count - many * LANES);
      configure(tiles);
    }
    auto run = many ? pass<BITS, true> : pass<BITS, false>;
    run(x + first * inputs, totals + first * steps, count, both, sums);
    for (int p = 0; p < panels; ++p) {
      int64_t output = at + p * LANES;
      Vector scale;
      if (BITS == 8)
        for (int i = 0; i < LANES; ++i)
          scale[i] = load(static_cast<const Bf16*>(w.scales)[output + i]);
      for (int64_t row = 0; row < count; ++row) {
        Vector sum = sums[!many || row >= LANES][p][row % LANES];
        write(BITS == 8 ? sum * scale : sum, bias ? bias + output : nullptr,
              out + (first + row) * w.outputs + output);
      }
    }
  }
}

// Sums of 32 inputs each of rows x (rows, inputs).
inline const float* totals(const Bf16* x, int64_t rows, int64_t inputs) {
  static thread_local std::vector<float> room;
  float* sums = room_for(room, rows * inputs / STEP);
  for (int64_t i = 0; i < rows * inputs / STEP; ++i, x += STEP) {
    float sum = 0;
    for (int j = 0; j < STEP; ++j) sum += load(x[j]);
    sums[i] = sum;
  }
  return sums;
}

}  // namespace peagle

#endif
