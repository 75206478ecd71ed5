// y = x Wᵀ for few rows of x, with W as it is stored: bfloat16, or codes of 8 or 4 bits with scales. Each byte of W is read once.
//
//     y[m, n] = Σ_group scale[n, group] · Σ_k∈group (code[n, k] − zero[n, group]) · x[m, k]
//
// A tile of AMX holds 16 outputs of W, another one 16 columns of x, a third the sums of their products. Products are exact: those
// of bfloat16 are summed in float32; those of codes are integers, and a row of x is then a power of two times integers of 16 bits
// (two columns of 8 bits), or of 24 bits (three columns) if x is float32: an error of at most 2⁻¹⁵ or 2⁻²³ of its largest value.
// One or two rows times codes of 4 bits need no tile: instructions that sum four products of bytes (VNNI) wait less for memory.
//
// 64 stored bytes of each output are a step: 32 values of bfloat16, 64 codes of a byte, or 128 nibbles, of which tile 0 takes the
// even inputs and tile 1 the odd ones; x is laid out in the same order.
//
// Shapes: x (rows, inp)   codes (out, bytes)   scale, zero (out, groups)   y (rows, out)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

namespace {

using torch::stable::Tensor;

enum Kind : int64_t { BF16 = 0, INT8 = 1, INT4 = 2 };
constexpr int OUTS = 16, COLS = 16, STEP = 64, TILE = 1024;  // outputs and columns of a tile, bytes of a step and of a tile
constexpr int SUMS = 4;                                      // tiles of sums
constexpr int AHEAD = 4096;                                  // bytes that are fetched ahead where W is read output by output

constexpr int inputs_of(int64_t kind) { return kind == BF16 ? 32 : kind == INT8 ? 64 : 128; }  // of a step
constexpr int tiles_of(int64_t kind) { return kind == INT4 ? 2 : 1; }                          // of W in a step

float from_bf16(uint16_t v) {
  const uint32_t bits = uint32_t(v) << 16;
  float f;
  return std::memcpy(&f, &bits, 4), f;
}

struct Work {
  const uint8_t* codes;
  const uint16_t* scale;  // none for bfloat16
  const uint8_t* zero;    // none where it is 8
  const void* x;
  void* y;
  int64_t rows, out, inp, bytes, groups, group, steps;
  bool wide;       // x and y are float32
  int parts;       // columns of a row
  uint8_t* tiles;  // of x
  float* unit;     // of each row of x
};

// -- x

__m512 sixteen(const Work& w, int64_t row, int64_t k) {
  const int64_t left = std::clamp<int64_t>(w.inp - k, 0, 16);
  const __mmask16 inside = (1u << left) - 1;
  if (w.wide) return _mm512_maskz_loadu_ps(inside, static_cast<const float*>(w.x) + row * w.inp + k);
  const __m256i narrow = _mm256_maskz_loadu_epi16(inside, static_cast<const uint16_t*>(w.x) + row * w.inp + k);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// The bytes of 16 integers at each column: put(part, bytes of inputs k … k+15, of nibbles the even ones first). The lowest byte of
// an integer is read as signed, so that the others are of the rest divided by 256.
template <class Put>
void integers(const Work& w, int64_t row, int64_t end, bool nibbles, const Put& put) {
  __m512 most = _mm512_setzero_ps(), nothing = _mm512_setzero_ps();
  for (int64_t k = 0; k < w.inp; k += 16) {
    const __m512 v = sixteen(w, row, k);
    most = _mm512_max_ps(most, _mm512_abs_ps(v));
    nothing = _mm512_fmadd_ps(v, _mm512_setzero_ps(), nothing);  // unless v is infinite or not a number
  }
  const bool finite = _mm512_reduce_add_ps(nothing) == 0;
  const float largest = finite ? _mm512_reduce_max_ps(most) : 0;
  int exponent = 0;
  const bool full = std::frexp(largest, &exponent) > 0.99f;  // what the highest byte, −128 … 127, would not hold
  const float one = largest > 0 ? std::ldexp(1.0f, std::max(exponent + full - (w.wide ? 23 : 15), -120)) : 1.0f;
  w.unit[row] = finite ? one : NAN;
  const __m512 per_unit = _mm512_set1_ps(1 / one);
  const __m128i even_odd = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  for (int64_t k = 0; k < end; k += 16) {
    __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(sixteen(w, row, k), per_unit));
    for (int part = w.parts - 1; part >= 0; part--) {
      const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
      const __m128i bytes = _mm512_cvtepi32_epi8(low);
      rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, low), 8);
      put(part, k, nibbles ? _mm_shuffle_epi8(bytes, even_odd) : bytes);
    }
  }
}

void put_rows(uint8_t* to, int64_t eight) {  // four bytes in each of two rows of a tile
  const int32_t first = int32_t(eight), second = int32_t(eight >> 32);
  std::memcpy(to, &first, 4);
  std::memcpy(to + 64, &second, 4);
}

template <int KIND>
void lay_out(const Work& w, int64_t row) {
  const auto at = [&](int part, int64_t tile) {
    const int64_t column = row * w.parts + part;
    return w.tiles + ((column / COLS) * w.steps * tiles_of(KIND) + tile) * TILE + (column % COLS) * 4;
  };
  if constexpr (KIND == BF16) {
    w.unit[row] = 1;
    const __m512i down = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 6);
    for (int64_t tile = 0; tile < w.steps; tile++) {
      const int64_t left = std::min<int64_t>(w.inp - tile * 32, 32);
      const __mmask32 inside = left == 32 ? ~0u : (1u << left) - 1;
      const uint16_t* from = static_cast<const uint16_t*>(w.x) + row * w.inp + tile * 32;
      _mm512_i32scatter_epi32(at(0, tile), down, _mm512_maskz_loadu_epi16(inside, from), 1);
    }
  } else {
    integers(w, row, w.steps * inputs_of(KIND), KIND == INT4, [&](int part, int64_t k, __m128i bytes) {
      const int64_t first = _mm_cvtsi128_si64(bytes), second = _mm_extract_epi64(bytes, 1);
      if constexpr (KIND == INT8) {
        uint8_t* to = at(part, k / 64) + k % 64 / 4 * 64;
        put_rows(to, first), put_rows(to + 128, second);
      } else {
        const int64_t step = k / 128, down = k % 128 / 8 * 64;
        put_rows(at(part, 2 * step) + down, first), put_rows(at(part, 2 * step + 1) + down, second);
      }
    });
  }
}

// -- W

struct Zeros {  // the zero points of the bytes of a step
  __m512i lane;
  int groups;  // of a step
  explicit Zeros(int groups) : groups(groups) {
    alignas(64) uint8_t group[STEP];
    for (int j = 0; j < STEP; j++) group[j] = uint8_t(j * groups / STEP);
    lane = _mm512_load_si512(group);
  }
  __m512i at(const uint8_t* zero, int64_t left) const {  // `left`: groups of the output from here on
    const __mmask16 inside = (1u << std::min<int64_t>(groups, left)) - 1;
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_maskz_loadu_epi8(inside, zero)), lane);
  }
};

__m512i low_halves(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
__m512i high_halves(__m512i v) { return low_halves(_mm512_srli_epi16(v, 4)); }

void read_scales(const Work& w, int64_t first, float* to) {
  for (int o = 0; o < OUTS; o++, to += w.groups) {
    const uint16_t* from = w.scale + std::min(first + o, w.out - 1) * w.groups;
    if (w.scale) std::transform(from, from + w.groups, to, from_bf16);
    else *to = 1;
  }
}

// -- tiles of outputs

struct Config {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// The intrinsics that load tiles do not tell the compiler what memory they read: it is written before this line.
#define WRITTEN asm volatile("" ::: "memory")

// Tiles 0 … 3: sums; 4: W, `width` bytes per output; 5: x. A width below 64 holds the inputs of one group.
void configure(int width) {
  Config c;
  for (int i = 0; i < SUMS; i++) c.rows[i] = OUTS, c.bytes[i] = 64;
  c.rows[4] = OUTS, c.bytes[4] = width, c.rows[5] = width / 4, c.bytes[5] = 64;
  WRITTEN;
  _tile_loadconfig(&c);
}

// A tile is named by the instruction itself, so that these cannot be functions.
#define DOT(sum, from)                                        \
  if constexpr (CB > sum) {                                   \
    _tile_loadd(5, (from) + sum * apart, 64);                 \
    if constexpr (KIND == BF16) _tile_dpbf16ps(sum, 4, 5);    \
    else _tile_dpbssd(sum, 4, 5);                             \
  }
#define STORE(tile, to)                         \
  switch (tile) {                               \
    case 0: _tile_stored(0, to, 64); break;     \
    case 1: _tile_stored(1, to, 64); break;     \
    case 2: _tile_stored(2, to, 64); break;     \
    default: _tile_stored(3, to, 64);           \
  }                                             \
  WRITTEN

void clear() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <int KIND, int CB>
inline void multiply(const uint8_t* from, int64_t stride, const uint8_t* x, int64_t apart) {
  _tile_loadd(4, from, stride);
  DOT(0, x)
  DOT(1, x)
  DOT(2, x)
  DOT(3, x)
}

using Sums = float[OUTS][COLS];

// sums += scale of each output · what the tiles of sums hold, which are cleared
template <int KIND, int CB>
inline void flush(Sums* sums, const float* scale, int64_t groups) {
  alignas(64) float held[OUTS][COLS];
  for (int i = 0; i < CB; i++) {
    STORE(i, held);
    for (int o = 0; o < OUTS; o++) {
      const __m512 value = KIND == BF16 ? _mm512_load_ps(held[o]) : _mm512_cvtepi32_ps(_mm512_load_si512(held[o]));
      _mm512_store_ps(sums[i][o], _mm512_fmadd_ps(value, _mm512_set1_ps(scale[o * groups]), _mm512_load_ps(sums[i][o])));
    }
  }
  clear();
}

void write(const Work& w, int64_t row, int64_t first, int64_t left, __m512 value) {
  const __mmask16 inside = (1u << std::min<int64_t>(left, 16)) - 1;
  value = _mm512_mul_ps(value, _mm512_set1_ps(w.unit[row]));
  if (w.wide) _mm512_mask_storeu_ps(static_cast<float*>(w.y) + row * w.out + first, inside, value);
  else
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(w.y) + row * w.out + first, inside, (__m256i)_mm512_cvtneps_pbh(value));
}

template <int KIND, int CB>
void by_tiles(const Work& w, int64_t begin, int64_t end) {
  constexpr int TILES = tiles_of(KIND);
  constexpr int64_t IN_STEP = inputs_of(KIND);
  const int64_t apart = w.steps * TILES * TILE;
  const int parts = w.group < IN_STEP ? int(IN_STEP / w.group) : 1;  // groups of a step
  const int64_t per = w.group < IN_STEP ? 1 : w.group / IN_STEP;     // steps of a group
  const int width = STEP / parts;
  const Zeros zeros(parts);
  const __m512i down = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);
  alignas(64) uint8_t decoded[TILES][OUTS][STEP];
  alignas(64) Sums sums[CB];
  std::vector<float> scale(OUTS * w.groups);
  configure(width);
  clear();
  for (int64_t first = begin * OUTS; first < end * OUTS; first += OUTS) {
    const bool whole = first + OUTS <= w.out;
    const uint8_t* block = w.codes + first * w.bytes;
    std::memset(sums, 0, sizeof sums);
    read_scales(w, first, scale.data());
    for (int64_t step = 0; step < w.steps; step++) {
      const int64_t left = w.bytes - step * STEP;
      const uint8_t* x = w.tiles + step * TILES * TILE;
      for (int o = 0; o < OUTS; o++) _mm_prefetch(block + (OUTS + o) * w.bytes + step * STEP, _MM_HINT_T0);  // of the next block
      if (KIND != INT4 && left >= STEP && whole) {  // read where it lies
        multiply<KIND, CB>(block + step * STEP, w.bytes, x, apart);
      } else {
        const __mmask64 inside = left >= STEP ? ~0ull : (1ull << left) - 1;
        for (int o = 0; o < OUTS; o++) {
          const int64_t n = std::min(first + o, w.out - 1);
          const __m512i v = _mm512_maskz_loadu_epi8(inside, w.codes + n * w.bytes + step * STEP);
          if constexpr (KIND == INT4) {
            const int64_t group = step * parts / per;
            const __m512i zero = w.zero ? zeros.at(w.zero + n * w.groups + group, w.groups - group) : _mm512_set1_epi8(8);
            _mm512_store_si512(decoded[0][o], _mm512_sub_epi8(low_halves(v), zero));
            _mm512_store_si512(decoded[1][o], _mm512_sub_epi8(high_halves(v), zero));
          } else {
            _mm512_store_si512(decoded[0][o], v);
          }
        }
        WRITTEN;
        for (int part = 0; part < parts; part++) {
          for (int i = 0; i < TILES; i++)
            multiply<KIND, CB>(&decoded[i][0][part * width], STEP, x + i * TILE + part * width * 16, apart);
          const int64_t group = step * parts + part;
          if (parts > 1 && group < w.groups) flush<KIND, CB>(sums, scale.data() + group, w.groups);
        }
      }
      if (parts == 1 && w.groups > 1 && (step + 1) % per == 0)
        flush<KIND, CB>(sums, scale.data() + step / per, w.groups);
    }
    if (w.groups == 1) flush<KIND, CB>(sums, scale.data(), w.groups);
    for (int64_t row = 0; row < w.rows; row++) {
      __m512 value = _mm512_setzero_ps();
      for (int64_t column = row * w.parts; column < (row + 1) * w.parts; column++)  // the highest bytes first
        value = _mm512_fmadd_ps(value, _mm512_set1_ps(256), _mm512_i32gather_ps(down, &sums[column / COLS][0][column % COLS], 4));
      write(w, row, first, w.out - first, value);
    }
  }
  _tile_release();
}

// -- one or two rows times nibbles, output by output: 16 sums of four bytes each, in which a group has its own lanes

template <int ROWS, int PARTS>
void by_outputs(const Work& w, int64_t begin, int64_t end) {
  constexpr int COLUMNS = ROWS * PARTS;
  const int64_t length = w.steps * 128;
  const int parts = w.group < 128 ? int(128 / w.group) : 1;
  const int64_t per = w.group < 128 ? 1 : w.group / 128;
  const __m512i lane = _mm512_srli_epi32(_mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                                            _mm512_set1_epi32(parts)), 4);
  const auto bytes = [&](int column, int64_t k) { return _mm512_load_si512(w.tiles + column * length + k); };
  for (int64_t first = begin * OUTS; first < end * OUTS; first += OUTS) {
    alignas(64) float sums[ROWS][OUTS] = {};
    for (int64_t n = first; n < std::min(first + OUTS, w.out); n++) {
      const uint8_t* row = w.codes + n * w.bytes;
      __m512 total[ROWS];
      for (int r = 0; r < ROWS; r++) total[r] = _mm512_setzero_ps();
      for (int64_t step = 0; step < w.steps; step++) {
        const int64_t left = w.bytes - step * STEP, in_row = step * parts / per, group = n * w.groups + in_row;
        const __mmask16 several = (1u << std::min<int64_t>(parts, w.groups - in_row)) - 1;
        _mm_prefetch(row + step * STEP + AHEAD, _MM_HINT_T0);
        const __m512i v = _mm512_maskz_loadu_epi8(left >= STEP ? ~0ull : (1ull << left) - 1, row + step * STEP);
        const __m512i low = low_halves(v), high = high_halves(v);
        const __m512i scales = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(several, w.scale + group));
        const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_permutexvar_epi32(lane, scales), 16));
        __m512i zero = _mm512_set1_epi32(8);
        if (w.zero) zero = _mm512_permutexvar_epi32(lane, _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(several, w.zero + group)));
        const __m512i ones = _mm512_set1_epi8(1);
        for (int r = 0; r < ROWS; r++) {
          __m512i value = _mm512_setzero_si512(), of_x = _mm512_setzero_si512();
          for (int c = r * PARTS; c < (r + 1) * PARTS; c++) {  // the highest bytes first
            const __m512i even = bytes(c, step * 128), odd = bytes(c, step * 128 + 64);
            value = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_slli_epi32(value, 8), low, even), high, odd);
            of_x = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_slli_epi32(of_x, 8), ones, even), ones, odd);
          }
          // 24 bits with their sign, times 15, 8 products: 32 bits hold them
          value = _mm512_sub_epi32(value, _mm512_mullo_epi32(zero, of_x));
          total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(value), scale, total[r]);
        }
      }
      for (int r = 0; r < ROWS; r++) sums[r][n - first] = _mm512_reduce_add_ps(total[r]);
    }
    for (int r = 0; r < ROWS; r++) write(w, r, first, w.out - first, _mm512_load_ps(sums[r]));
  }
}

// -- all rows

struct Buffer {  // of a thread, kept between calls
  uint8_t* data = nullptr;
  size_t size = 0;
  uint8_t* of(size_t needed) {
    if (needed > size) {
      std::free(data);
      size = (needed + 4095) / 4096 * 4096;
      data = static_cast<uint8_t*>(std::aligned_alloc(64, size));
      STD_TORCH_CHECK(data, "few_rows_linear: no memory for x");
      std::memset(data, 0, size);
    }
    return data;
  }
  ~Buffer() { std::free(data); }
};

template <int KIND>
void run(Work w) {
  const int64_t element = w.wide ? 4 : 2, all = w.rows, blocks = (w.out + OUTS - 1) / OUTS;
  w.parts = KIND == BF16 ? 1 : w.wide ? 3 : 2;
  const int64_t at_once = SUMS * COLS / w.parts;
  static thread_local Buffer buffer;
  for (int64_t first = 0; first < all; first += at_once) {
    w.rows = std::min(at_once, all - first);
    const int tiles = int((w.rows * w.parts + COLS - 1) / COLS);
    const size_t of_x = size_t(tiles) * w.steps * tiles_of(KIND) * TILE;
    w.tiles = buffer.of(of_x + at_once * sizeof(float)), w.unit = reinterpret_cast<float*>(w.tiles + of_x);
    if (KIND == INT4 && w.rows <= 2) {
      for (int64_t row = 0; row < w.rows; row++)
        integers(w, row, w.steps * 128, true, [&](int part, int64_t k, __m128i bytes) {
          uint8_t* to = w.tiles + (row * w.parts + part) * w.steps * 128 + k / 128 * 128 + k % 128 / 2;
          _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
          _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 64), _mm_srli_si128(bytes, 8));
        });
      torch::stable::parallel_for(0, blocks, 4, [&](int64_t begin, int64_t end) {
        if (w.rows == 1 && !w.wide) by_outputs<1, 2>(w, begin, end);
        if (w.rows == 1 && w.wide) by_outputs<1, 3>(w, begin, end);
        if (w.rows == 2 && !w.wide) by_outputs<2, 2>(w, begin, end);
        if (w.rows == 2 && w.wide) by_outputs<2, 3>(w, begin, end);
      });
    } else {
      torch::stable::parallel_for(0, w.rows, 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) lay_out<KIND>(w, row);
      });
      torch::stable::parallel_for(0, blocks, 4, [&](int64_t begin, int64_t end) {
        if (tiles == 1) by_tiles<KIND, 1>(w, begin, end);
        if (tiles == 2) by_tiles<KIND, 2>(w, begin, end);
        if (tiles == 3) by_tiles<KIND, 3>(w, begin, end);
        if (tiles == 4) by_tiles<KIND, 4>(w, begin, end);
      });
    }
    w.x = static_cast<const uint8_t*>(w.x) + w.rows * w.inp * element;
    w.y = static_cast<uint8_t*>(w.y) + w.rows * w.out * element;
  }
}

Tensor few_rows_linear(const Tensor& x, const Tensor& codes, const std::optional<Tensor>& scale, const std::optional<Tensor>& zero,
                       int64_t bits) {
  using torch::headeronly::ScalarType;
  const int64_t kind = bits == 16 ? BF16 : bits == 8 ? INT8 : INT4, in_step = inputs_of(kind);
  STD_TORCH_CHECK(bits == 16 || bits == 8 || bits == 4, "bits: 16, 8 or 4");
  STD_TORCH_CHECK(x.dim() == 2 && codes.dim() == 2 && x.is_contiguous() && codes.is_contiguous(), "x and codes: contiguous matrices");
  Work w{};
  w.wide = x.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK((w.wide && bits < 16) || x.scalar_type() == ScalarType::BFloat16, "x: bfloat16, or float32 with codes");
  w.rows = x.size(0), w.inp = x.size(1), w.out = codes.size(0), w.x = x.const_data_ptr();
  w.bytes = codes.size(1) * codes.element_size(), w.steps = (w.bytes + STEP - 1) / STEP;
  w.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  STD_TORCH_CHECK(w.bytes == (w.inp * bits + 7) / 8, "x and codes: the numbers of inputs differ");
  w.group = w.inp, w.groups = 1;
  STD_TORCH_CHECK(bits == 16 || scale, "scale: is missing");
  if (bits < 16) {
    STD_TORCH_CHECK(scale->is_contiguous() && scale->dim() == 2 && scale->size(0) == w.out, "scale: (out, groups)");
    STD_TORCH_CHECK(scale->scalar_type() == ScalarType::BFloat16, "scale: bfloat16");
    w.scale = static_cast<const uint16_t*>(scale->const_data_ptr()), w.groups = scale->size(1);
  }
  if (w.groups > 1 || bits == 4) {
    w.group = w.inp / w.groups;
    const bool parts = bits == 4 && w.group >= 8 && in_step % w.group == 0;
    STD_TORCH_CHECK((w.group % in_step == 0 || parts) && w.groups * w.group == w.inp, "scale: a group is not whole steps or a part of one");
  }
  if (zero) {
    STD_TORCH_CHECK(bits == 4 && zero->is_contiguous() && zero->size(0) == w.out && zero->size(1) == w.groups, "zero: as scale, of 4 bits");
    w.zero = static_cast<const uint8_t*>(zero->const_data_ptr());
  }
  Tensor y = torch::stable::new_empty(x, {w.rows, w.out});
  w.y = y.mutable_data_ptr();
  if (kind == BF16) run<BF16>(w);
  else if (kind == INT8) run<INT8>(w);
  else run<INT4>(w);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(dovetail, m) { m.def("few_rows_linear(Tensor x, Tensor codes, Tensor? scale, Tensor? zero, int bits) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(dovetail, CPU, m) { m.impl("few_rows_linear", TORCH_BOX(&few_rows_linear)); }
