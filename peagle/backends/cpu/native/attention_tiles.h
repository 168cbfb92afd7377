// Causal attention by tiles (AMX), over bf16 keys and values. Up to 16 queries that share a key
// head are the lanes of every vector, so a softmax is one of vectors.

#pragma once

#include "attention.h"
#include "tiles.h"

#ifdef PEAGLE_TILES

namespace peagle {

// The queries of one span that share a key head: query r is token r / groups.
class TiledTask : Columns {
 public:
  static constexpr int64_t MOST_TOKENS = 32;

  static bool takes(const Kept<Bf16>& kept) {
    return may_use_tiles() && kept.key_width % STEP == 0 && kept.value_width % STEP == 0;
  }

  TiledTask(const Kept<Bf16>& kept, const Spec& spec, const Span& span)
      : Columns(spec, span, STEP), kept(kept), spec(spec), span(span) {}

  void run(const Bf16* q, Bf16* out, int64_t first_head, int64_t last_head, int64_t groups) {
    Tiles tiles;
    configure(tiles);
    for (int64_t head = first_head; head < last_head; ++head) run_head(q, out, head, groups);
    _tile_release();
  }

 private:
  struct Queries {  // up to 16
    int64_t count, places[LANES];
    Ints tokens = Ints{} - 1;  // rows of the span
    Vector stands = {}, sinks = {};
  };

  const Kept<Bf16>& kept;
  const Spec& spec;
  const Span& span;

  void run_head(const Bf16* q, Bf16* out, int64_t head, int64_t groups) {
    int64_t queries = groups * kept.heads, rows = groups * span.count;
    for (int64_t begin = 0; begin < rows; begin += LANES) {
      Queries these;
      these.count = std::min<int64_t>(LANES, rows - begin);
      for (int64_t i = 0; i < these.count; ++i) {
        int64_t token = (begin + i) / groups, query = head * groups + (begin + i) % groups;
        these.tokens[i] = token;
        these.places[i] = token * queries + query;
        these.stands[i] = float(span.position(token));
        these.sinks[i] = spec.sinks ? spec.sinks[query] : -std::numeric_limits<float>::infinity();
      }
      multiply_keys(q, these, head);
      Vector sum = softmax(these.stands, these.sinks);
      multiply_values(these, head, 1.0f / sum, out);
    }
  }

  // Call run(token, at, count) for each token of a tree among these and its columns from `together`
  // on, 32 at a time.
  template <typename Run>
  void own_steps(const Queries& these, Run run) const {
    if (!span.tails) return;
    for (int64_t token = these.tokens[0]; token <= these.tokens[these.count - 1]; ++token) {
      int64_t stop = span.position(token) + 1 - first;
      for (int64_t at = together; at < stop; at += STEP)
        run(token, at, std::min<int64_t>(STEP, stop - at));
    }
  }

  // What a token of a tree sees at `count` columns of 32.
  const Bf16* gathered(int64_t token, int64_t at, int64_t count, const Bf16* rows,
                       int64_t width) const {
    static thread_local std::vector<Bits> room;
    auto* to = reinterpret_cast<Bf16*>(room_for(room, width));  // 32 rows
    gather(span, token, first + at, count, rows, kept.heads * width, width, to);
    return to;
  }

  static Vector* scores(int64_t count) {  // (columns,) of 16 queries
    static thread_local std::vector<Vector> room;
    return room_for(room, count);
  }

  // Scores of 16 keys, as they lie, at a time.
  void multiply_keys(const Bf16* q, const Queries& these, int64_t head) {
    static thread_local std::vector<Bits> room;
    int64_t width = kept.key_width, steps = width / STEP;
    Bits* turned = room_for(room, steps * LANES);
    for (int64_t s = 0; s < steps; ++s) {
      Bits tile[LANES] = {};
      for (int64_t i = 0; i < these.count; ++i)
        tile[i] = load_vector<Bits>(q + these.places[i] * width + s * STEP);
      transpose(tile);
      std::memcpy(turned + s * LANES, tile, sizeof(tile));
    }
    auto multiply = [&](const Bf16* keys, int64_t stride, Vector* to) {
      _tile_zero(0);
      for (int64_t s = 0; s < steps; ++s) {
        LOAD_TILE(1, keys + s * STEP, stride * 2);
        LOAD_TILE(2, turned + s * LANES, 64);
        _tile_dpbf16ps(0, 1, 2);
      }
      _tile_stored(0, to, 64);
    };
    int64_t stop = std::min(together, span.shared() - first);
    for (int64_t at = 0; at < stop; at += LANES)
      multiply(kept.key(span.slot(first + at), head), kept.heads * width, scores(columns) + at);
    own_steps(these, [&](int64_t token, int64_t at, int64_t count) {
      const Bf16* keys = gathered(token, at, count, kept.key(0, head), width);
      for (int64_t part = 0; part < count; part += LANES) {
        Vector found[LANES], *to = scores(columns) + at + part;
        multiply(keys + part * width, width, found);
        for (int i = 0; i < LANES; ++i) to[i] = these.tokens == int32_t(token) ? found[i] : to[i];
      }
    });
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
    x = x < -87.0f ? Vector{} - 87.0f : x;
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

  // Values of 32 dimensions of 32 rows, of which `count` are there: pairs of rows side by side, in
  // one tile the first four of every eight dimensions, in the next the others. The others are
  // zeros. `row(i)` is where row i lies, for even i; the next one follows at `stride`.
  template <typename Row>
  static void interleave(Row row, int64_t count, int64_t stride, Bits* to) {
    for (int64_t i = 0; i < STEP; i += 2, ++to) {
      __m512i pair[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
      if (i < count) pair[0] = _mm512_loadu_si512(row(i));
      if (i + 1 < count) pair[1] = _mm512_loadu_si512(row(i) + stride);
      _mm512_store_si512(to, _mm512_unpacklo_epi16(pair[0], pair[1]));
      _mm512_store_si512(to + LANES, _mm512_unpackhi_epi16(pair[0], pair[1]));
    }
  }

  // The same from `at` on, where all rows have the same keys.
  void interleave(int64_t at, int64_t head, int64_t dim, Bits* to) const {
    int64_t stride = kept.heads * kept.value_width, count = span.shared() - at;
    const Bf16* halves[2] = {};
    for (int half = 0; half < 2 && half * LANES < count; ++half)
      halves[half] = kept.value(span.slot(at + half * LANES), head) + dim;
    auto row = [&](int64_t i) { return halves[i / LANES] + i % LANES * stride; };
    interleave(row, count, stride, to);
  }

  void multiply_values(const Queries& these, int64_t head, Vector share, Bf16* out) {
    static thread_local std::vector<Bits> room;
    int64_t width = kept.value_width, steps = together / STEP;
    Bits *parts = room_for(room, (steps + 5) * LANES), *ring = parts + steps * LANES;
    Bits* own = ring + 4 * LANES;
    for (int64_t k = 0; k < steps; ++k) shares(scores(columns) + k * STEP, parts + k * LANES);
    auto multiply = [](const Bits* part, const Bits* values) {
      LOAD_TILE(2, part, 64);
      LOAD_TILE(3, values, 64);
      LOAD_TILE(4, values + LANES, 64);
      _tile_dpbf16ps(0, 2, 3);
      _tile_dpbf16ps(1, 2, 4);
    };
    for (int64_t dim = 0; dim < width; dim += STEP) {
      _tile_zero(0);
      _tile_zero(1);
      if (steps) interleave(first, head, dim, ring);
      for (int64_t k = 0; k < steps; ++k) {  // the next ones are written before these are read
        if (k + 1 < steps)
          interleave(first + (k + 1) * STEP, head, dim, ring + (k + 1) % 2 * 2 * LANES);
        multiply(parts + k * LANES, ring + k % 2 * 2 * LANES);
      }
      own_steps(these, [&](int64_t token, int64_t at, int64_t count) {
        Vector theirs[STEP];  // nothing for other tokens
        for (int64_t i = 0; i < STEP; ++i)
          theirs[i] = these.tokens == int32_t(token) ? scores(columns)[at + i] : Vector{};
        shares(theirs, own);
        const Bf16* values = gathered(token, at, count, kept.value(0, head), width) + dim;
        interleave([&](int64_t i) { return values + i * width; }, count, width, ring);
        multiply(own, ring);
      });
      Vector found[2][LANES];
      _tile_stored(0, found[0], 64);
      _tile_stored(1, found[1], 64);
      const Bits low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
      for (int64_t i = 0; i < these.count; ++i) {
        Vector four = found[0][i] * share[i], others = found[1][i] * share[i];
        Bf16* to = out + these.places[i] * width + dim;
        write(__builtin_shuffle(four, others, low), nullptr, to);
        write(__builtin_shuffle(four, others, low + 8), nullptr, to + LANES);
      }
    }
  }
};

}  // namespace peagle

#endif
