// Attention of all spans of a forward.

#pragma once

#include "attention.h"
#include "attention_tiles.h"

namespace peagle {

template <typename Task, typename T>
void attend_by(const T* q, const Kept<T>& kept, T* out, int64_t query_heads, const int64_t* spans,
               int64_t count, const int64_t* blocks, const Spec& spec, int threads) {
  int64_t groups = query_heads / kept.heads;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int64_t span = 0; span < count; ++span)
    for (int64_t head = 0; head < kept.heads; ++head) {
      const int64_t* s = spans + 4 * span;
      Task task(kept, spec, blocks + s[3], s[1], s[2]);
      task.run(q + s[0] * query_heads * kept.key_width, out + s[0] * query_heads * kept.value_width,
               head, groups);
    }
}

// spans: (count, 4): first packed token, position of the first, tokens, and where its blocks begin
// in `blocks`.
template <typename T>
void attend(const T* q, const Kept<T>& kept, T* out, int64_t query_heads, const int64_t* spans,
            int64_t count, const int64_t* blocks, const Spec& spec, int threads) {
#ifdef PEAGLE_TILES
  if constexpr (sizeof(T) == 2)
    if (TiledTask::takes(kept))
      return attend_by<TiledTask>(q, kept, out, query_heads, spans, count, blocks, spec, threads);
#endif
  attend_by<Task<T>>(q, kept, out, query_heads, spans, count, blocks, spec, threads);
}

}  // namespace peagle
