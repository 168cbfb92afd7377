// Products of the same rows with several matrices, each in the way its weights are laid out for.
// All threads of a team run these functions together.

#pragma once

#include <initializer_list>
#include <type_traits>
#include <utility>

#include "ints.h"
#include "products.h"
#include "team.h"

namespace peagle {

constexpr int MOST_PRODUCTS = 3;  // of the same rows

// Rows that are turned into tiles at a time: they stay in the second cache, while panel after panel
// is multiplied by them.
constexpr int64_t MOST_TURNED = 1 << 19;  // their inputs: a megabyte
inline int64_t turned_rows(int64_t inputs) {
  return 2 * LANES * std::max<int64_t>(1, MOST_TURNED / (2 * LANES * inputs));
}

// A thread's part of `count` things: always the same ones, so that it reads the same memory.
struct Share {
  int64_t first, last;
  explicit Share(int64_t count) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    first = count * thread / threads;
    last = count * (thread + 1) / threads;
  }
};

// Some products, one after another, and their parts of `size` outputs.
template <typename T>
struct Parts {
  Product<T> products[MOST_PRODUCTS];
  int64_t begins[MOST_PRODUCTS + 1] = {}, size;
  int count = 0;

  Parts(std::initializer_list<Product<T>> from, bool tiled, int64_t size) : size(size) {
    for (const Product<T>& product : from)
      if (bool(product.matrix.tiled) == tiled) {
        products[count] = product;
        begins[count + 1] = begins[count] + steps(product.matrix.outputs, size);
        ++count;
      }
  }

  bool any(int64_t bits) const {
    for (int i = 0; i < count; ++i)
      if (products[i].matrix.bits == bits) return true;
    return false;
  }
  // Call run(product, first, last) for this thread's parts of each product.
  template <typename Run>
  void share(Run run) const {
    Share mine(begins[count]);
    for (int i = 0; i < count; ++i) {
      int64_t first = std::max(mine.first, begins[i]), last = std::min(mine.last, begins[i + 1]);
      if (first < last) run(products[i], first - begins[i], last - begins[i]);
    }
  }
};

// Rows as the weights of a product want them, beside one another. A team has one, and one product
// at a time.
struct Room {
  std::vector<ByteGroup<8>> eights;
  std::vector<ByteGroup<4>> fours;
  std::vector<float> plain;
  std::vector<Bits> tiles;
  const float* totals;

  void fit(int64_t rows, int64_t inputs) {
    room_for(eights, rows * steps(inputs, GROUP));
    room_for(fours, rows * steps(inputs, GROUP));
    room_for(plain, rows * (inputs + 1));
    int64_t most = std::max(MOST_TURNED, 2 * LANES * inputs);
    room_for(tiles, std::min(most, steps(rows, LANES) * LANES * inputs) / (2 * LANES));
  }
};

template <typename T>
using PlainSteps = std::conditional_t<sizeof(T) == 4, FloatSteps,
                                      std::conditional_t<HAS_PAIRS, PairSteps, WidenedSteps>>;

template <typename T>
void linear_by_panels(const T* x, const Parts<T>& parts, int64_t rows, int64_t inputs, Room& room) {
  typedef PlainSteps<T> Plain;
  bool plain_ones = parts.any(8 * sizeof(T)), eights = parts.any(8), fours = parts.any(4);
  auto* plain = reinterpret_cast<typename Plain::Input*>(room.plain.data());
#pragma omp for schedule(static) nowait
  for (int64_t group = 0; group < steps(inputs, GROUP); ++group)
    for (int64_t row = 0; row < rows; ++row) {
      int64_t at = group * GROUP, count = std::min(GROUP, inputs - at);
      const T* from = x + row * inputs + at;
      if (plain_ones) spread(from, count, plain + at / Plain::INPUTS_OF_A_STEP * rows + row, rows);
      if (eights) room.eights[group * rows + row] = in_bytes<8>(from, count);
      if (fours) room.fours[group * rows + row] = in_bytes<4>(from, count);
    }
  wait_for_team();
  parts.share([&](const Product<T>& product, int64_t first, int64_t last) {
    int64_t bits = product.matrix.bits;
    if (bits == 8) return multiply<ByteSteps<8, T>>(product, first, last, room.eights.data(), rows);
    if (bits == 4) return multiply<ByteSteps<4, T>>(product, first, last, room.fours.data(), rows);
    multiply<Plain>(product, first, last, plain, rows);
  });
  wait_for_team();
}

#ifdef PEAGLE_TILES
// Some rows: `rows`, from row `from` on.
inline void linear_by_tiles(const Bf16* x, const Parts<Bf16>& parts, int64_t from, int64_t rows,
                            int64_t inputs, Room& room) {
  x += from * inputs;
  if (parts.any(16)) turn(x, rows, inputs, room.tiles.data());
#pragma omp single nowait
  room.totals = parts.any(4) ? totals(x, rows, inputs) : nullptr;
  wait_for_team(false);
  constexpr int64_t WHOLE = -1;
  int64_t configured = 0;  // tiles: whole ones, or for how many rows after the first 16
  Tiles whole;
  parts.share([&](const Product<Bf16>& p, int64_t first, int64_t last) {
    Bf16* out = p.out + from * p.matrix.outputs;
    for (int64_t at = first * parts.size; at < last * parts.size; at += parts.size)
      if (p.matrix.bits == 16) {
        if (std::exchange(configured, WHOLE) != WHOLE) configure(whole);
        multiply(room.tiles.data(), static_cast<const Bf16*>(p.matrix.data), p.bias(), out, at,
                 rows, inputs, p.matrix.outputs);
      } else {
        auto run = p.matrix.bits == 8 ? multiply_ints<8> : multiply_ints<4>;
        run(x, room.totals, p.matrix, p.bias(), out, at, rows, inputs, configured);
      }
  });
  _tile_release();
  wait_for_team();
}
#endif

// x (rows, inputs) times each matrix.
template <typename T>
void linear(const T* x, std::initializer_list<Product<T>> products, int64_t rows, int64_t inputs,
            Room& room) {
  Parts<T> by_panels(products, false, LANES);
  if (by_panels.count) linear_by_panels(x, by_panels, rows, inputs, room);
#ifdef PEAGLE_TILES
  if constexpr (sizeof(T) == 2) {
    Parts<Bf16> by_tiles(products, true, 2 * LANES);
    int64_t most = by_tiles.any(16) ? turned_rows(inputs) : rows;
    for (int64_t row = 0; by_tiles.count && row < rows; row += most)
      linear_by_tiles(x, by_tiles, row, std::min(most, rows - row), inputs, room);
  }
#endif
}

}  // namespace peagle
