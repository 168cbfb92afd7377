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

template <int BITS>
constexpr int32_t SURPLUS = BITS == 8 ? 128 : 0;

template <int BITS>
inline WideInts dot(WideInts sums, WideInts weights, WideInts x) {
  WideInts unsigned_bytes = BITS == 8 ? weights ^ int32_t(0x80808080) : weights;
  return WideInts(_mm512_dpbusd_epi32(__m512i(sums), __m512i(unsigned_bytes), __m512i(x)));
}

#elif defined(__AVX2__)

template <int BITS>
constexpr int32_t SURPLUS = 0;

template <int BITS>
inline __m256i dot_of_half(__m256i sums, __m256i weights, __m256i x) {
  __m256i positive = BITS == 8 ? _mm256_abs_epi8(weights) : weights;
  __m256i turned = BITS == 8 ? _mm256_sign_epi8(x, weights) : x;
  __m256i pairs = _mm256_maddubs_epi16(positive, turned);  // at most 2 · 127², which fits
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <int BITS>
inline WideInts dot(WideInts sums, WideInts weights, WideInts x) {
  __m256i all[3][WIDTH / 8];
  std::memcpy(all[0], &sums, sizeof(sums));
  std::memcpy(all[1], &weights, sizeof(sums));
  std::memcpy(all[2], &x, sizeof(sums));
  for (int i = 0; i < WIDTH / 8; ++i)
    all[0][i] = dot_of_half<BITS>(all[0][i], all[1][i], all[2][i]);
  std::memcpy(&sums, all[0], sizeof(sums));
  return sums;
}

#elif defined(__ARM_NEON)

template <int BITS>
constexpr int32_t SURPLUS = 0;

template <int BITS>
inline WideInts dot(WideInts sums, WideInts weights, WideInts x) {
  int8x16_t w = vreinterpretq_s8_s32(int32x4_t(weights));
  int8x16_t values = vreinterpretq_s8_s32(int32x4_t(x));
#if defined(__ARM_FEATURE_DOTPROD)
  return WideInts(vdotq_s32(int32x4_t(sums), w, values));
#else
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(values)));
  int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(values)));
  return WideInts(vaddq_s32(int32x4_t(sums), vpaddq_s32(low, high)));
#endif
}

#else

template <int BITS>
constexpr int32_t SURPLUS = 0;

template <int BITS>
inline WideInts dot(WideInts sums, WideInts weights, WideInts x) {
  for (int shift = 24; shift >= 0; shift -= 8)
    sums += ((weights << shift) >> 24) * ((x << shift) >> 24);
  return sums;
}

#endif

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
