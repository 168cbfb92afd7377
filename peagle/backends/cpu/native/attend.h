// Attention of all rows of a batch. All threads of a team run it together.

#pragma once

#include "attention.h"
#include "attention_tiles.h"
#include "team.h"

namespace peagle {

// As peagle/backends/batch.py has it.
struct Batch {
  int64_t rows, requests, table;         // `table`: blocks of a row of block_tables
  const int64_t* slot_mapping;           // (rows,)
  const int64_t* block_tables;           // (requests, table)
  const int64_t *query_lens, *seq_lens;  // (requests,)
  const int64_t* tails;                  // (rows, longest), or none without trees
  int64_t longest;
};

constexpr int64_t NEAR_SCORES = 1 << 16;  // that stay in a near cache while keys pass by

// The rows of each request in parts of at most `most`, which are about equally large.
inline std::vector<Span> spans(const Batch& batch, int64_t most) {
  std::vector<Span> made;
  int64_t first = 0;
  for (int64_t r = 0; r < batch.requests; ++r) {
    int64_t rows = batch.query_lens[r], last = first + rows - 1, done = 0;
    bool tree = batch.tails && batch.tails[last * batch.longest] >= 0;
    for (int64_t left = steps(rows, most); left; --left) {
      int64_t count = steps(rows - done, left);
      int64_t start = tree ? batch.seq_lens[r] - 1 : batch.seq_lens[r] - rows + done;
      const int64_t* tails = tree ? batch.tails + (first + done) * batch.longest : nullptr;
      const int64_t* blocks = batch.block_tables + r * batch.table;
      made.push_back({first + done, start, count, blocks, tails, batch.longest});
      done += count;
    }
    first += rows;
  }
  return made;
}

// Spans are split further where threads would have nothing to do. Where there are enough, a task
// has several heads, whose keys and values lie side by side.
template <typename Task, typename T>
void attend_by(const T* q, const Kept<T>& kept, T* out, int64_t query_heads, const Batch& batch,
               const Spec& spec) {
  int64_t groups = query_heads / kept.heads, threads = omp_get_num_threads();
  int64_t most = Task::MOST_TOKENS, scores = 1;
  std::vector<Span> all = spans(batch, most);
  auto tasks = [&] { return int64_t(all.size()) * kept.heads; };
  while (most > 2 && tasks() < 4 * threads && tasks() % threads) all = spans(batch, most /= 2);
  for (const Span& span : all) scores = std::max(scores, groups * span.count * span.end());
  bool few = tasks() < 2 * threads * kept.heads;
  int64_t heads = few ? 1 : std::clamp<int64_t>(NEAR_SCORES / scores, 1, kept.heads);
#pragma omp for collapse(2) schedule(dynamic) nowait
  for (size_t i = 0; i < all.size(); ++i)
    for (int64_t head = 0; head < kept.heads; head += heads) {
      Task task(kept, spec, all[i]);
      task.run(q + all[i].first * query_heads * kept.key_width,
               out + all[i].first * query_heads * kept.value_width, head,
               std::min(head + heads, kept.heads), groups);
    }
  wait_for_team(tasks() >= threads);
}

// q (rows, query heads, key width) → out (rows, query heads, value width).
template <typename T>
void attend(const T* q, const Kept<T>& kept, T* out, int64_t query_heads, const Batch& batch,
            const Spec& spec) {
#ifdef PEAGLE_TILES
  if constexpr (sizeof(T) == 2)
    if (TiledTask::takes(kept)) return attend_by<TiledTask>(q, kept, out, query_heads, batch, spec);
#endif
  attend_by<Task<T>>(q, kept, out, query_heads, batch, spec);
}

}  // namespace peagle
