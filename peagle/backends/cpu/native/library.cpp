// Models on a CPU: peagle/backends/cpu/library.py compiles this file, and the modules beside it
// call its functions. T is float or bf16; sums are float32.
//
// In what order to read:
//   team.h             threads, and how they wait for each other
//   vectors.h          bf16, vectors of 16 lanes and their transpose
//   matrix.h           the weights of a product, in all their layouts
//   dots.h             products of bytes and of pairs, by instruction set
//   products.h         products by panels of weights, on any CPU
//   tiles.h, ints.h    products by tiles of weights, on CPUs with AMX: of bf16, and of 8 and 4 bits
//   linear.h           the same rows by several matrices, each in its way
//   attention.h, attention_tiles.h   attention of a few rows over keys kept in blocks; by AMX
//   attend.h           attention of a whole batch
//   rows.h             norms, RoPE, gate: what is done to single rows
//   ranking.h          the largest logits of rows
//   layer.h            a decoder layer, and a whole decoder

#include "layer.h"
#include "ranking.h"

using namespace peagle;

template <typename T>
void linear_alone(const T* x, const Matrix& matrix, T* out, int64_t rows, int threads) {
  static thread_local Room rooms;
  Room& room = rooms;
  room.fit(rows, matrix.inputs);
  together(threads, [&] { linear<T>(x, {{matrix, out}}, rows, matrix.inputs, room); });
}

// All else is this library's own: a process may load several, compiled for other instructions.
#define API __attribute__((visibility("default")))

#define FUNCTIONS(T, NAME)                                                                      \
  API void decode_##NAME(const Model* model, const Forward<T>* forward) {                       \
    decode(*model, *forward);                                                                   \
  }                                                                                             \
  API void linear_##NAME(const T* x, const Matrix* matrix, T* out, int64_t rows, int threads) { \
    linear_alone(x, *matrix, out, rows, threads);                                               \
  }                                                                                             \
  API void attend_##NAME(const T* q, const Kept<T>* kept, T* out, int64_t query_heads,          \
                         const Batch* batch, const Spec* spec, int threads) {                   \
    together(threads, [&] { attend(q, *kept, out, query_heads, *batch, *spec); });              \
  }                                                                                             \
  API void rank_##NAME(const T* x, int64_t rows, int64_t width, int64_t count, int weighed,     \
                       float* values, int64_t* ids, int threads) {                              \
    together(threads, [&] { rank(x, rows, width, count, weighed, values, ids); });              \
  }

extern "C" {

FUNCTIONS(float, float32)
FUNCTIONS(Bf16, bfloat16)

// peagle/backends/cpu/structs.py mirrors these, and compares their sizes when it loads the library.
API int64_t struct_sizes[] = {sizeof(Matrix), sizeof(Batch), sizeof(Kept<float>),   sizeof(Spec),
                              sizeof(Layer),  sizeof(Model), sizeof(Forward<float>)};

// Whether this CPU multiplies by tiles: then matrices may be tiled.
API int has_tiles() {
#ifdef PEAGLE_TILES
  return may_use_tiles();
#else
  return 0;
#endif
}

}  // extern "C"
