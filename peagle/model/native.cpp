// The small operations of decoding on a CPU, each in one pass over its data: what torch has takes
// several, and every one of them costs more to start than to run at a few rows.
//
// T is float or bf16; sums are float32. A row is computed in the same way whatever rows stand
// beside it. native.py compiles this file and calls the functions at its end.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int LANES = 16;  // floats of a vector, and keys that are read together
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct Bf16 {
  uint16_t bits;
};

inline float load(float x) { return x; }
inline float load(Bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void store(float& to, float x) { to = x; }
inline void store(Bf16& to, float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = x != x ? 0x7fc0 : uint16_t(rounded);
}

template <typename T>
inline float rounded(float x) {  // as if it had been kept in between
  T kept;
  store(kept, x);
  return load(kept);
}

// e^x for x ≤ 0 to the last bit or two, without a branch, so that loops of it become vectors.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  float whole = std::floor(x * 1.44269504f + 0.5f);
  float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return sum * power;
}

// Swap the corners of every square of 2 · SIDE lanes: with all four sides, a transpose.
template <int SIDE>
inline void swap_corners(Bits (&rows)[LANES]) {
  Bits upper, lower;
  for (uint32_t lane = 0; lane < LANES; ++lane) {
    upper[lane] = lane & SIDE ? LANES + lane - SIDE : lane;
    lower[lane] = lane & SIDE ? LANES + lane : lane + SIDE;
  }
  for (int i = 0; i < LANES; ++i)
    if (!(i & SIDE)) {
      Bits a = rows[i], b = rows[i + SIDE];
      rows[i] = __builtin_shuffle(a, b, upper);
      rows[i + SIDE] = __builtin_shuffle(a, b, lower);
    }
}

inline void transpose(Bits (&rows)[LANES]) {
  swap_corners<1>(rows);
  swap_corners<2>(rows);
  swap_corners<4>(rows);
  swap_corners<8>(rows);
}

// What a transposed lane holds: one float, or two bf16.
inline void unpack(Bits lane, Vector* to, float) { to[0] = Vector(lane); }
inline void unpack(Bits lane, Vector* to, Bf16) {
  to[0] = Vector(lane << 16);
  to[1] = Vector(lane & 0xffff0000u);
}

// Up to LANES rows of `width`, as vectors of one column each; missing rows are zero.
template <typename T>
void turn(const T* rows, int64_t count, int64_t stride, int64_t width, Vector* to) {
  constexpr int64_t EACH = 4 / sizeof(T), STEP = LANES * EACH;  // values of a lane, of a row
  for (int64_t at = 0; at < width; at += STEP) {
    Bits square[LANES] = {};
    int64_t bytes = std::min(STEP, width - at) * sizeof(T);
    for (int64_t j = 0; j < count; ++j)
      if (bytes == sizeof(Bits))
        std::memcpy(&square[j], rows + j * stride + at, sizeof(Bits));
      else
        std::memcpy(&square[j], rows + j * stride + at, bytes);
    transpose(square);
    for (int i = 0; i < LANES; ++i) unpack(square[i], to + at + i * EACH, T{});
  }
}

template <typename T>
void norm(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float eps,
          int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 2 * LANES)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * width;
    T* to = out + row * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += load(from[i]) * load(from[i]);
    float scale = 1.0f / std::sqrt(sum / float(width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) store(to[i], load(from[i]) * scale * load(weight[i]));
  }
}

// The second half of sin comes with its sign: halves only change places.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t rows, int64_t heads,
            int64_t size, int threads) {
  int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) if (rows > 2 * LANES)
  for (int64_t row = 0; row < rows; ++row) {
    const T *c = cos + row * size, *s = sin + row * size;
    for (int64_t head = 0; head < heads; ++head) {
      const T* from = x + (row * heads + head) * size;
      T* to = out + (row * heads + head) * size;
      for (int64_t side = 0; side < 2; ++side) {
        int64_t here = side * half, there = half - here;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          float kept = rounded<T>(load(from[here + i]) * load(c[here + i]));
          store(to[here + i], kept + load(from[there + i]) * load(s[here + i]));
        }
      }
    }
  }
}

template <typename T>
void gate(const T* x, const T* up, T* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 2 * LANES)
  for (int64_t row = 0; row < rows; ++row) {
    const T *from = x + row * width, *times = up + row * width;
    T* to = out + row * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      float value = load(from[i]), small = exponential(-std::fabs(value));
      float silu = value * (value < 0 ? small : 1.0f) / (1.0f + small);
      store(to[i], rounded<T>(silu) * load(times[i]));
    }
  }
}

#if defined(__AMX_BF16__)

// Matrix products x · wᵀ of few rows on Intel's tiles (AMX): the weights (outputs, inputs) are read
// as they lie, once. Every 16 outputs are a panel: written by one thread, 32 inputs at a time.
constexpr int64_t STEP = 2 * LANES;

// Two bf16 in each lane.
inline Bits pairs(const Bf16* from) {
  Bits lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// Sixteen outputs of a row.
inline void write(Vector sums, const Bf16* bias, Bf16* out) {
  if (bias)
    for (int i = 0; i < LANES; ++i) sums[i] += load(bias[i]);
  Bits bits = Bits(sums), nan = Bits(sums != sums);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // as `store` does
  Halves halves = __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), Halves);
  std::memcpy(out, &halves, sizeof(halves));
}

constexpr int64_t BLOCKS = 4;  // of 16 rows, at once

struct Tiles {  // the configuration that `ldtilecfg` reads: 8 tiles of 16 rows of 64 bytes
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// One panel for up to BLOCKS blocks of rows; `turned`: (blocks, inputs / 32) tiles of x.
inline void panel(const Bits* turned, int64_t blocks, const Bf16* w, int64_t inputs,
                  Bits (&sums)[BLOCKS][LANES]) {
  int64_t steps = inputs / STEP;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k, turned += LANES) {
    const Bf16* next = w + LANES * inputs + k * LANES * STEP;
    for (int64_t j = 0; j < LANES; ++j) __builtin_prefetch(next + j * STEP, 0, 1);
    _tile_loadd(4, w + k * STEP, inputs * 2);
    _tile_loadd(5, turned, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (blocks > 1) {
      _tile_loadd(6, turned + steps * LANES, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (blocks > 2) {
      _tile_loadd(7, turned + 2 * steps * LANES, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (blocks > 3) {
      _tile_loadd(5, turned + 3 * steps * LANES, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums[0], 64);
  if (blocks > 1) _tile_stored(1, sums[1], 64);
  if (blocks > 2) _tile_stored(2, sums[2], 64);
  if (blocks > 3) _tile_stored(3, sums[3], 64);
}

void linear(const Bf16* x, const Bf16* w, const Bf16* bias, Bf16* out, int64_t rows,
              int64_t inputs, int64_t outputs, int threads) {
  int64_t blocks = (rows + LANES - 1) / LANES, steps = inputs / STEP;
  static thread_local std::vector<Bits> turned;
  turned.resize(blocks * steps * LANES);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t k = 0; k < steps; ++k) {
      Bits square[LANES] = {};
      for (int64_t j = 0; j < std::min<int64_t>(LANES, rows - block * LANES); ++j)
        square[j] = pairs(x + (block * LANES + j) * inputs + k * STEP);
      transpose(square);
      std::memcpy(&turned[(block * steps + k) * LANES], square, sizeof(square));
    }
  const Bits* given = turned.data();
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    _tile_loadconfig(&tiles);
#pragma omp for
    for (int64_t at = 0; at < outputs; at += LANES)
      for (int64_t block = 0; block < blocks; block += BLOCKS) {
        Bits sums[BLOCKS][LANES];
        int64_t count = std::min(BLOCKS, blocks - block);
        panel(given + block * steps * LANES, count, w + at * inputs, inputs, sums);
        for (int64_t b = 0; b < count; ++b) {
          transpose(sums[b]);
          int64_t row = (block + b) * LANES;
          for (int64_t j = 0; j < std::min<int64_t>(LANES, rows - row); ++j)
            write(Vector(sums[b][j]), bias ? bias + at : nullptr, out + (row + j) * outputs + at);
        }
      }
    _tile_release();
  }
}

#endif

// A layer's keys and values, in blocks: (blocks, size, heads, width of a head).
template <typename T>
struct Kept {
  const T *keys, *values;
  int64_t size, heads, key_width, value_width;

  // The first of the LANES rows at a multiple of LANES; the others follow at `stride`.
  const T* key(const int64_t* blocks, int64_t at, int64_t head) const {
    return keys + (row(blocks, at) * heads + head) * key_width;
  }
  const T* value(const int64_t* blocks, int64_t at, int64_t head) const {
    return values + (row(blocks, at) * heads + head) * value_width;
  }
  int64_t row(const int64_t* blocks, int64_t at) const {
    return blocks[at / size] * size + at % size;
  }
};

struct Spec {  // 0, or no pointer, where a layer has none
  float scale, softcap;
  int64_t window;
  const float* sinks;
};

// The queries of one span that share a key head, `rows` of them: query r is token r / groups.
template <typename T>
class Task {
 public:
  Task(const Kept<T>& kept, const Spec& spec, const int64_t* blocks, int64_t start, int64_t length)
      : kept(kept), spec(spec), blocks(blocks), start(start), length(length) {}

  void run(const T* q, T* out, int64_t head, int64_t groups) {
    int64_t queries = groups * kept.heads, rows = groups * length;
    first = spec.window ? std::max<int64_t>(0, start + 1 - spec.window) / LANES * LANES : 0;
    columns = (start + length - first + LANES - 1) / LANES * LANES;
    padded = (rows + 3) / 4 * 4;
    auto place = [&](int64_t row) { return row / groups * queries + head * groups + row % groups; };

    input.assign(padded * kept.key_width, 0.0f);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < kept.key_width; ++i)
        input[row * kept.key_width + i] = load(q[place(row) * kept.key_width + i]) * spec.scale;
    scores.resize(padded * columns / LANES);
    int64_t vectors = (kept.value_width + LANES - 1) / LANES;
    turned.assign(std::max(kept.key_width + 2 * LANES, LANES * vectors), Vector{});
    for (int64_t at = 0; at < columns; at += LANES) multiply_keys(head, at);
    for (int64_t row = 0; row < padded; ++row) {
      const float* sink = spec.sinks ? spec.sinks + head * groups + row % groups : nullptr;
      softmax(row, std::min(start + row / groups, start + length - 1), sink);
    }
    output.assign(padded * vectors, Vector{});
    for (int64_t at = 0; at < columns; at += LANES) multiply_values(head, at, vectors);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = reinterpret_cast<const float*>(&output[row * vectors]);
      for (int64_t i = 0; i < kept.value_width; ++i)
        store(out[place(row) * kept.value_width + i], from[i]);
    }
  }

 private:
  const Kept<T>& kept;
  const Spec& spec;
  const int64_t* blocks;
  int64_t start, length, first, columns, padded;
  std::vector<float> input;                     // (padded, key_width), scaled
  std::vector<Vector> scores, output, turned;  // (padded, columns), (padded, value_width)

  // Ask for the rows that come next: they are a row of all heads apart, too far for the processor
  // to see what follows.
  void ask(const T* row, int64_t width) const {
    for (int64_t j = 0; j < LANES; ++j, row += kept.heads * width)
      for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
  }

  int64_t end(int64_t at) const { return std::min<int64_t>(LANES, start + length - first - at); }

  // Scores of LANES keys: every lane is a key, so nothing is summed across lanes.
  void multiply_keys(int64_t head, int64_t at) {
    int64_t width = kept.key_width, next = columns / LANES;
    if (at + LANES < columns) ask(kept.key(blocks, first + at + LANES, head), width);
    turn(kept.key(blocks, first + at, head), end(at), kept.heads * width, width, turned.data());
    for (int64_t row = 0; row < padded; row += 4) {
      const float *a = &input[row * width], *b = a + width, *c = b + width, *d = c + width;
      Vector sums[4] = {};
      for (int64_t i = 0; i < width; ++i) {
        sums[0] += a[i] * turned[i];
        sums[1] += b[i] * turned[i];
        sums[2] += c[i] * turned[i];
        sums[3] += d[i] * turned[i];
      }
      for (int r = 0; r < 4; ++r) scores[(row + r) * next + at / LANES] = sums[r];
    }
  }

  void softmax(int64_t row, int64_t stands, const float* sink) {
    float* x = reinterpret_cast<float*>(&scores[row * columns / LANES]);
    int64_t begin = spec.window ? std::max<int64_t>(0, stands + 1 - spec.window) - first : 0;
    int64_t stop = stands + 1 - first;
    if (spec.softcap)
      for (int64_t i = begin; i < stop; ++i) x[i] = std::tanh(x[i] / spec.softcap) * spec.softcap;
    float most = sink ? *sink : -std::numeric_limits<float>::infinity(), sum = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = begin; i < stop; ++i) most = x[i] > most ? x[i] : most;
    std::fill(x, x + begin, 0.0f);
    std::fill(x + stop, x + columns, 0.0f);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < stop; ++i) {
      x[i] = exponential(x[i] - most);
      sum += x[i];
    }
    if (sink) sum += exponential(*sink - most);
    float share = 1.0f / sum;
#pragma omp simd
    for (int64_t i = begin; i < stop; ++i) x[i] *= share;
  }

  void multiply_values(int64_t head, int64_t at, int64_t vectors) {
    int64_t keys = end(at), width = kept.value_width;
    if (at + LANES < columns) ask(kept.value(blocks, first + at + LANES, head), width);
    const T* value = kept.value(blocks, first + at, head);
    float* to = reinterpret_cast<float*>(turned.data());
    for (int64_t j = 0; j < keys; ++j, value += kept.heads * width, to += vectors * LANES)
      for (int64_t i = 0; i < width; ++i) to[i] = load(value[i]);
    for (int64_t row = 0; row < padded; row += 4) {
      const float* a = reinterpret_cast<const float*>(&scores[(row * columns + at) / LANES]);
      const float *b = a + columns, *c = b + columns, *d = c + columns;
      for (int64_t part = 0; part < vectors; ++part) {
        Vector *out = &output[row * vectors + part], *in = &turned[part];
        Vector sums[4] = {out[0], out[vectors], out[2 * vectors], out[3 * vectors]};
        for (int64_t j = 0; j < keys; ++j, in += vectors) {
          sums[0] += a[j] * *in;
          sums[1] += b[j] * *in;
          sums[2] += c[j] * *in;
          sums[3] += d[j] * *in;
        }
        for (int r = 0; r < 4; ++r) out[r * vectors] = sums[r];
      }
    }
  }
};

// spans: (count, 4): first packed token, position of the first, tokens, and where its blocks begin
// in `blocks`.
template <typename T>
void attend(const T* q, const Kept<T>& kept, T* out, int64_t query_heads, const int64_t* spans,
            int64_t count, const int64_t* blocks, const Spec& spec, int threads) {
  int64_t groups = query_heads / kept.heads;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int64_t span = 0; span < count; ++span)
    for (int64_t head = 0; head < kept.heads; ++head) {
      const int64_t* s = spans + 4 * span;
      Task<T> task(kept, spec, blocks + s[3], s[1], s[2]);
      task.run(q + s[0] * query_heads * kept.key_width, out + s[0] * query_heads * kept.value_width,
               head, groups);
    }
}

}  // namespace

#define FUNCTIONS(T, NAME)                                                                       \
  extern "C" void norm_##NAME(const T* x, const T* weight, T* out, int64_t rows, int64_t width,  \
                              float eps, int threads) {                                          \
    norm(x, weight, out, rows, width, eps, threads);                                             \
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
#if defined(__AMX_BF16__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // Linux wants to be asked
#else
  return 0;
#endif
}

#if defined(__AMX_BF16__)
extern "C" void linear_bfloat16(const Bf16* x, const Bf16* w, const Bf16* bias, Bf16* out,
                                int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  linear(x, w, bias, out, rows, inputs, outputs, threads);
}
#endif
