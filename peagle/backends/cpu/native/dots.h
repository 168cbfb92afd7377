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

// Weights of 8 and 4 bits times inputs of −127 … 127. A line has four bytes of each output. It is
// multiplied in PIECES: of 4 bits the lower and the upper halves of bytes, 0 … 15; of 8 bits the
// bytes, or the even ones and the odd ones as WORDS of 16 bits.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool WORDS = false, UNSIGNED_WEIGHTS = true;
#elif defined(__AVX2__)
constexpr bool WORDS = true, UNSIGNED_WEIGHTS = false;
#else
constexpr bool WORDS = false, UNSIGNED_WEIGHTS = false;
#endif

template <int BITS>
constexpr int PIECES = BITS == 4 || WORDS ? 2 : 1;

// A group's sum of products is too large by this times the sum of its inputs.
template <int BITS>
constexpr int32_t SURPLUS = BITS == 4 ? 8 : (UNSIGNED_WEIGHTS ? 128 : 0);

typedef int16_t WideWords __attribute__((vector_size(4 * WIDTH)));

template <int BITS>
inline void in_pieces(WideInts line, WideInts (&pieces)[PIECES<BITS>]) {
  if constexpr (BITS == 4) {
    pieces[0] = line & 0x0f0f0f0f;
    pieces[1] = (line >> 4) & 0x0f0f0f0f;
  } else if constexpr (WORDS) {
    pieces[0] = WideInts((WideWords(line) << 8) >> 8);
    pieces[1] = WideInts(WideWords(line) >> 8);
  } else {
    pieces[0] = UNSIGNED_WEIGHTS ? line ^ int32_t(0x80808080) : line;
  }
}

// Add products of a piece and its inputs, which are as many, to the lanes of their outputs. With
// WORDS and 4 bits a lane has two sums of 16 bits, which 16 products of 15 · 127 each fit in.
template <int BITS>
inline WideInts dot(WideInts sums, WideInts weights, WideInts x) {
#if defined(__AVX512VNNI__)
  return WideInts(_mm512_dpbusd_epi32(__m512i(sums), __m512i(weights), __m512i(x)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return WideInts(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(weights), __m256i(x)));
#elif defined(__AVX2__)
#if defined(__AVX512BW__)
  __m512i w = __m512i(weights), values = __m512i(x);
  __m512i made = BITS == 8 ? _mm512_madd_epi16(w, values) : _mm512_maddubs_epi16(w, values);
#else
  __m256i w = __m256i(weights), values = __m256i(x);
  __m256i made = BITS == 8 ? _mm256_madd_epi16(w, values) : _mm256_maddubs_epi16(w, values);
#endif
  sums = BITS == 8 ? sums + WideInts(made) : WideInts(WideWords(sums) + WideWords(made));
  asm volatile("" : "+v"(sums));  // or GCC makes all products first, and keeps them in memory
  return sums;
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
