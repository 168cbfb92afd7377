// Dot products of four bytes each, and of pairs of bf16: what instruction sets have of their own.
// All else is written in vectors, which every CPU has.

#pragma once

#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace peagle {

// `dot<BITS>`: to each lane of `sums`, four bytes of `weights` times the four of `x`. Weights are
// −127 … 127 (8 bits) or 0 … 15 (4 bits), x is −127 … 127. The result is too large by SURPLUS times
// the sum of x.

#if defined(__AVX512VNNI__)
constexpr bool UNSIGNED_WEIGHTS = true;
#else
constexpr bool UNSIGNED_WEIGHTS = false;
#endif

template <int BITS>
constexpr int32_t SURPLUS = UNSIGNED_WEIGHTS && BITS == 8 ? 128 : 0;

template <int BITS>
inline WideInts dot(WideInts sums, WideInts weights, WideInts x) {
#if defined(__AVX512VNNI__)
  WideInts unsigned_bytes = BITS == 8 ? weights ^ int32_t(0x80808080) : weights;
  return WideInts(_mm512_dpbusd_epi32(__m512i(sums), __m512i(unsigned_bytes), __m512i(x)));
#elif defined(__AVX512BW__)
  __m512i w = __m512i(weights), values = __m512i(x);
  if (BITS == 8) {  // the sign of a weight becomes that of its input
    values = _mm512_mask_sub_epi8(values, _mm512_movepi8_mask(w), _mm512_setzero_si512(), values);
    w = _mm512_abs_epi8(w);
  }
  __m512i pairs = _mm512_maddubs_epi16(w, values);  // at most 2 · 127², which fits
  return sums + WideInts(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  __m256i w = __m256i(weights), values = __m256i(x);
  __m256i positive = BITS == 8 ? _mm256_abs_epi8(w) : w;
  __m256i turned = BITS == 8 ? _mm256_sign_epi8(values, w) : values;
  __m256i pairs = _mm256_maddubs_epi16(positive, turned);  // at most 2 · 127², which fits
  return sums + WideInts(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(__ARM_NEON)
  int8x16_t w = vreinterpretq_s8_s32(int32x4_t(weights));
  int8x16_t values = vreinterpretq_s8_s32(int32x4_t(x));
#if defined(__ARM_FEATURE_DOTPROD)
  return WideInts(vdotq_s32(int32x4_t(sums), w, values));
#else
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(values)));
  int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(values)));
  return WideInts(vaddq_s32(int32x4_t(sums), vpaddq_s32(low, high)));
#endif
#else
  for (int shift = 24; shift >= 0; shift -= 8)
    sums += ((weights << shift) >> 24) * ((x << shift) >> 24);
  return sums;
#endif
}

// To each lane of `sums`, a pair of weights times the pair of `x`.
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
inline Wide dot_pairs(Wide sums, WideBits weights, WideBits x) {
  return Wide(_mm512_dpbf16_ps(__m512(sums), __m512bh(weights), __m512bh(x)));
}
#else
constexpr bool HAS_PAIRS = false;
inline Wide dot_pairs(Wide sums, WideBits, WideBits) { return sums; }
#endif

}  // namespace peagle
