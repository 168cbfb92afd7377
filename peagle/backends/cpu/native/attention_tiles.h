// Causal attention by tiles (AMX), over bf16 keys and values. Up to 16 queries that share a key head
// are the lanes of every vector, so a softmax is one of vectors.

#pragma once

#include "attention.h"
#include "tiles.h"

#ifdef PEAGLE_TILES

namespace peagle {

// The queries of one span that share a key head: query r is token r / groups.
class TiledTask {
 public:
  static bool takes(const Kept<Bf16>& kept) {
    return may_use_tiles() && kept.key_width % STEP == 0 && kept.value_width % STEP == 0;
  }

  TiledTask(const Kept<Bf16>& kept, const Spec& spec, const int64_t* blocks, int64_t start,
            int64_t length)
      : kept(kept), spec(spec), blocks(blocks), start(start), end(start + length) {
    // From a multiple of 32, wherever the span begins: each key has its place in a tile.
    first = spec.window ? std::max<int64_t>(0, start + 1 - spec.window) / STEP * STEP : 0;
    columns = (end - first + STEP - 1) / STEP * STEP;
  }

  void run(const Bf16* q, Bf16* out, int64_t head, int64_t groups) {
    int64_t queries = groups * kept.heads, rows = groups * (end - start);
    Tiles tiles;
    configure(tiles);
    for (int64_t begin = 0; begin < rows; begin += LANES) {
      int64_t count = std::min<int64_t>(LANES, rows - begin);
      int64_t places[LANES];
      Vector stands = {}, sinks = {};
      for (int64_t i = 0; i < count; ++i) {
        int64_t token = (begin + i) / groups, query = head * groups + (begin + i) % groups;
        places[i] = token * queries + query;
        stands[i] = float(start + token);
        sinks[i] = spec.sinks ? spec.sinks[query] : -std::numeric_limits<float>::infinity();
      }
      multiply_keys(q, places, count, head);
      Vector sum = softmax(stands, sinks);
      multiply_values(places, count, head, 1.0f / sum, out);
    }
    _tile_release();
  }

 private:
  const Kept<Bf16>& kept;
  const Spec& spec;
  const int64_t* blocks;
  int64_t start, end, first, columns;

  static Vector* scores(int64_t count) {  // (columns,) of 16 queries
    static thread_local std::vector<Vector> room;
    return room_for(room, count);
  }

  // Scores of 16 keys, as they lie, at a time.
  void multiply_keys(const Bf16* q, const int64_t* places, int64_t count, int64_t head) {
    static thread_local std::vector<Bits> room;
    int64_t steps = kept.key_width / STEP;
    Bits* turned = room_for(room, steps * LANES);
    for (int64_t s = 0; s < steps; ++s) {
      Bits tile[LANES] = {};
      for (int64_t i = 0; i < count; ++i) tile[i] = pairs(q + places[i] * kept.key_width + s * STEP);
      transpose(tile);
      std::memcpy(turned + s * LANES, tile, sizeof(tile));
    }
    Vector* to = scores(columns);
    for (int64_t at = first; at < end; at += LANES, to += LANES) {
      const Bf16* keys = kept.key(blocks, at, head);
      _tile_zero(0);
      for (int64_t s = 0; s < steps; ++s) {
        LOAD_TILE(1, keys + s * STEP, kept.heads * kept.key_width * 2);
        LOAD_TILE(2, turned + s * LANES, 64);
        _tile_dpbf16ps(0, 1, 2);
      }
      _tile_stored(0, to, 64);
    }
  }

  // Scores become shares, not yet divided by their sums, which are returned.
  Vector softmax(Vector stands, Vector sinks) const {
    Vector *x = scores(columns), most = sinks, none = {};
    Vector begins = spec.window ? stands + 1.0f - float(spec.window) : none;
    for (int64_t i = 0; i < columns; ++i) {
      float at = float(first + i);
      x[i] *= spec.scale;
      if (spec.softcap)
        for (int lane = 0; lane < LANES; ++lane)
          x[i][lane] = std::tanh(x[i][lane] / spec.softcap) * spec.softcap;
      auto seen = (at <= stands) & (at >= begins) & (x[i] > most);
      most = seen ? x[i] : most;
    }
    Vector sum = powers(sinks - most);
    for (int64_t i = 0; i < columns; ++i) {
      float at = float(first + i);
      x[i] = ((at <= stands) & (at >= begins)) ? powers(x[i] - most) : none;
      sum += x[i];
    }
    return sum;
  }

  // e^x for x ≤ 0: `exponential`, sixteen at a time.
  static Vector powers(Vector x) {
    x = x > -87.0f ? x : Vector{} - 87.0f;
    Vector whole = Vector(_mm512_floor_ps(__m512(x * 1.44269504f + 0.5f)));
    return Vector(_mm512_scalef_ps(__m512(mantissa(x, whole)), __m512(whole)));
  }

  // Shares of 32 keys as bf16, (queries, keys).
  static void shares(const Vector* x, Bits* to) {
    Bits tile[LANES];
    for (int i = 0; i < LANES; ++i, x += 2) {
      Bits halves[2];
      for (int odd = 0; odd < 2; ++odd) {
        halves[odd] = Bits(x[odd]);
        halves[odd] += 0x7fff + ((halves[odd] >> 16) & 1);  // to the nearest, ties to even
      }
      tile[i] = (halves[0] >> 16) | (halves[1] & 0xffff0000u);
    }
    transpose(tile);
    std::memcpy(to, tile, sizeof(tile));
  }

  // 32 keys' values of 32 dimensions: pairs of keys side by side, in one tile the first four of
  // every eight dimensions, in the next the others. Behind the last key are zeros.
  void interleave(int64_t at, int64_t head, int64_t dim, Bits* to) const {
    int64_t stride = kept.heads * kept.value_width;
    const Bf16* values = nullptr;
    for (int64_t i = 0; i < STEP; i += 2, ++to) {
      if (i % LANES == 0 && at + i < end) values = kept.value(blocks, at + i, head) + dim;
      __m512i pair[2];
      for (int odd = 0; odd < 2; ++odd, values += stride)
        pair[odd] = at + i + odd < end ? _mm512_loadu_si512(values) : _mm512_setzero_si512();
      _mm512_store_si512(to, _mm512_unpacklo_epi16(pair[0], pair[1]));
      _mm512_store_si512(to + LANES, _mm512_unpackhi_epi16(pair[0], pair[1]));
    }
  }

  void multiply_values(const int64_t* places, int64_t count, int64_t head, Vector share,
                       Bf16* out) {
    static thread_local std::vector<Bits> room;
    int64_t steps = columns / STEP;
    Bits *parts = room_for(room, (steps + 4) * LANES), *ring = parts + steps * LANES;
    for (int64_t k = 0; k < steps; ++k) shares(scores(columns) + k * STEP, parts + k * LANES);
    for (int64_t dim = 0; dim < kept.value_width; dim += STEP) {
      _tile_zero(0);
      _tile_zero(1);
      interleave(first, head, dim, ring);
      for (int64_t k = 0; k < steps; ++k) {  // the next ones are written before these are read
        if (k + 1 < steps)
          interleave(first + (k + 1) * STEP, head, dim, ring + (k + 1) % 2 * 2 * LANES);
        const Bits* now = ring + k % 2 * 2 * LANES;
        LOAD_TILE(2, parts + k * LANES, 64);
        LOAD_TILE(3, now, 64);
        LOAD_TILE(4, now + LANES, 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 2, 4);
      }
      Vector found[2][LANES];
      _tile_stored(0, found[0], 64);
      _tile_stored(1, found[1], 64);
      const Bits low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
      for (int64_t i = 0; i < count; ++i) {
        Vector four = found[0][i] * share[i], others = found[1][i] * share[i];
        Bf16* to = out + places[i] * kept.value_width + dim;
        write(__builtin_shuffle(four, others, low), nullptr, to);
        write(__builtin_shuffle(four, others, low + 8), nullptr, to + LANES);
      }
    }
  }
};

}  // namespace peagle

#endif
