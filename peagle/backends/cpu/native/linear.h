// Products of the same rows with several matrices, each in the way its weights are laid out for.

#pragma once

#include <initializer_list>

#include "ints.h"
#include "products.h"

namespace peagle {

constexpr int MOST_PRODUCTS = 3;  // of the same rows

// Some products, one after another, and a loop over all their parts of `size` outputs.
template <typename T>
struct Parts {
  Product<T> products[MOST_PRODUCTS];
  int64_t ends[MOST_PRODUCTS], size;
  int count = 0;

  Parts(std::initializer_list<Product<T>> from, bool tiled, int64_t size) : size(size) {
    for (const Product<T>& product : from)
      if (bool(product.matrix.tiled) == tiled) {
        products[count] = product;
        ends[count] = all() + (product.matrix.outputs + size - 1) / size;
        ++count;
      }
  }

  int64_t all() const { return count ? ends[count - 1] : 0; }
  int owner(int64_t part) const {
    int i = 0;
    while (part >= ends[i]) ++i;
    return i;
  }
  int64_t within(int64_t part, int owner) const { return part - (owner ? ends[owner - 1] : 0); }
  bool any(int64_t bits) const {
    for (int i = 0; i < count; ++i)
      if (products[i].matrix.bits == bits) return true;
    return false;
  }
};

template <typename T>
void linear_by_rows(const T* x, const Parts<T>& parts, int64_t rows, int64_t inputs, int threads) {
  int64_t stride = (inputs + CHUNK - 1) / CHUNK * CHUNK;
  static thread_local std::vector<float> rooms[2];
  float *plain = nullptr, *split = nullptr;  // rows as float weights want them, and as bf16 do
  if (parts.any(16)) {
    split = room_for(rooms[0], rows * stride);
    spread<Bf16>(x, split, rows, inputs, stride, threads);
  }
  if (parts.any(32) || parts.any(8) || parts.any(4)) {
    plain = room_for(rooms[1], rows * stride);
    spread<float>(x, plain, rows, inputs, stride, threads);
  }
#pragma omp parallel for num_threads(threads)
  for (int64_t part = 0; part < parts.all(); ++part) {
    int owner = parts.owner(part);
    const Product<T>& product = parts.products[owner];
    const float* from = product.matrix.bits == 16 ? split : plain;
    multiply_part(Rows<T>{from, stride, rows, product}, parts.within(part, owner));
  }
}

#ifdef PEAGLE_TILES
inline void linear_by_tiles(const Bf16* x, const Parts<Bf16>& parts, int64_t rows, int64_t inputs,
                            int threads) {
  const Bits* tiles = parts.any(16) ? turned(x, rows, inputs) : nullptr;
  const float* sums = parts.any(4) ? totals(x, rows, inputs) : nullptr;
#pragma omp parallel num_threads(threads)
  {
    constexpr int64_t WHOLE = -1;
    int64_t configured = 0;  // tiles: whole ones, or for how many rows after the first 16
    Tiles whole;
#pragma omp for
    for (int64_t part = 0; part < parts.all(); ++part) {
      int owner = parts.owner(part);
      const Product<Bf16>& p = parts.products[owner];
      int64_t at = parts.within(part, owner) * parts.size;
      if (p.matrix.bits == 16) {
        if (configured != WHOLE) configure(whole);
        configured = WHOLE;
        multiply(tiles, static_cast<const Bf16*>(p.matrix.data), p.bias(), p.out, at, rows, inputs,
                 p.matrix.outputs);
      } else {
        auto run = p.matrix.bits == 8 ? multiply<8> : multiply<4>;
        run(x, sums, p.matrix, p.bias(), p.out, at, rows, inputs, configured);
      }
    }
    _tile_release();
  }
}
#endif

// x (rows, inputs) times each matrix.
template <typename T>
void linear(const T* x, std::initializer_list<Product<T>> products, int64_t rows, int64_t inputs,
            int threads) {
  Parts<T> by_rows(products, false, STRIP);
  if (by_rows.count) linear_by_rows(x, by_rows, rows, inputs, threads);
#ifdef PEAGLE_TILES
  if constexpr (sizeof(T) == 2) {
    Parts<Bf16> by_tiles(products, true, 2 * LANES);
    if (by_tiles.count) linear_by_tiles(x, by_tiles, rows, inputs, threads);
  }
#endif
}

}  // namespace peagle
