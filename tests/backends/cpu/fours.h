// AVX-VNNI in plain C++, for a processor that has none: what g++ is told to include first.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd

// sums[i] += x[4i] · y[4i] + … + x[4i + 3] · y[4i + 3], x without signs
inline __m256i emulated_dpbusd(__m256i sums, __m256i x, __m256i y) {
  int32_t lanes[8];
  uint8_t left[32];
  int8_t right[32];
  std::memcpy(lanes, &sums, 32);
  std::memcpy(left, &x, 32);
  std::memcpy(right, &y, 32);
  for (int i = 0; i < 32; ++i) lanes[i / 4] += left[i] * right[i];
  std::memcpy(&sums, lanes, 32);
  return sums;
}
