// A product by native code, without Python: test_neon.py runs it in an emulator. From standard
// input come the fields of a Matrix, the number of rows and the size of a number of theirs, each
// int64, and lengths and bytes of the weights, of their scales, of the bias and of the rows. The
// product goes to standard output.

#include <cstdio>

#include "linear.h"

using namespace peagle;

template <typename T>
std::vector<T> read(int64_t count) {
  std::vector<T> made(count);
  if (std::fread(made.data(), sizeof(T), count, stdin) != size_t(count)) std::abort();
  return made;
}

std::vector<uint8_t> read_bytes() { return read<uint8_t>(read<int64_t>(1)[0]); }

template <typename T>
void multiply(const Matrix& matrix, const std::vector<uint8_t>& x, int64_t rows) {
  std::vector<T> out(rows * matrix.outputs);
  Room room;
  room.fit(rows, matrix.inputs);
  linear<T>(reinterpret_cast<const T*>(x.data()), {{matrix, out.data()}}, rows, matrix.inputs,
            room);
  std::fwrite(out.data(), sizeof(T), out.size(), stdout);
}

int main() {
  std::vector<int64_t> sizes = read<int64_t>(5);
  std::vector<uint8_t> data = read_bytes(), scales = read_bytes(), bias = read_bytes();
  std::vector<uint8_t> x = read_bytes();
  Matrix matrix{data.data(), scales.data(), bias.data(), sizes[0], 0, sizes[1], sizes[2]};
  if (sizes[4] == 4)
    multiply<float>(matrix, x, sizes[3]);
  else
    multiply<Bf16>(matrix, x, sizes[3]);
}
