// The small operations of decoding on a CPU, each in one pass over its data: what torch has takes
// several, and every one of them costs more to start than to run at a few rows.
//
// T is float or bf16; sums are float32. A row is computed in the same way whatever rows stand
// beside it. peagle/model/native.py compiles this file and calls its functions.

#include "layer.h"
#include "linear.h"
#include "rows.h"
#include "spans.h"

using namespace peagle;

#define FUNCTIONS(T, NAME)                                                                       \
  extern "C" void norm_##NAME(const T* x, const T* weight, T* out, int64_t rows, int64_t width,  \
                              float eps, int threads) {                                          \
    norm(x, weight, out, width, rows, width, eps, threads);                                      \
  }                                                                                              \
  extern "C" void rotate_##NAME(const T* x, const T* cos, const T* sin, T* out, int64_t rows,    \
                                int64_t heads, int64_t size, int threads) {                      \
    rotate(x, cos, sin, out, rows, heads, size, threads);                                        \
  }                                                                                              \
  extern "C" void gate_##NAME(const T* x, const T* up, T* out, int64_t rows, int64_t width,      \
                              int threads) {                                                     \
    gate(x, up, out, rows, width, threads);                                                      \
  }                                                                                              \
  extern "C" void attend_##NAME(const T* q, const T* keys, const T* values, T* out,              \
                                const int64_t* sizes, const int64_t* spans, int64_t count,       \
                                const int64_t* blocks, const float* scales, const float* sinks,  \
                                int threads) {                                                   \
    attend(q, Kept<T>{keys, values, sizes[1], sizes[2], sizes[3], sizes[4]}, out, sizes[0],      \
           spans, count, blocks, Spec{scales[0], scales[1], sizes[5], sinks}, threads);          \
  }

FUNCTIONS(float, float32)
FUNCTIONS(Bf16, bfloat16)

// Whether `linear` may be called here.
extern "C" int has_tiles() {
#ifdef PEAGLE_TILES
  return may_use_tiles();
#else
  return 0;
#endif
}

#ifdef PEAGLE_TILES
extern "C" void linear_bfloat16(const Bf16* x, const Matrix* matrix, const Bf16* bias, Bf16* out,
                                int64_t rows, int64_t inputs, int threads) {
  linear(x, {{*matrix, bias, out}}, rows, inputs, threads);
}

extern "C" void layers_bfloat16(const Bf16* x, const Bf16* embedding, Bf16* out,
                                const int64_t* taps, Bf16* features, const Weights* const* weights, int64_t count, const Bf16* cos,
                                const Bf16* sin, const Cache* caches, const int64_t* slots,
                                const Sizes* sizes, const int64_t* spans, const int64_t* blocks,
                                float eps, float scale, int threads) {
  for (int64_t i = 0; i < count; ++i) {
    tap(i ? out : x, i, taps, features, *sizes);
    layer(i ? out : x, embedding, out, *weights[i], cos, sin, caches[i], slots, *sizes, spans,
          blocks, eps, scale, threads);
  }
}
#endif
