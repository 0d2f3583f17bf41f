// Products of a few rows by weights of 8 or 4 bits; see small_weights.py for the layout of the copies.
//
// A block is 16 outputs of 32 inputs: 16 vectors, each of 2 inputs by 16 outputs, pairs of inputs side by side, as the
// dot products of AVX-512 and AMX read them. They are dequantised to the inputs' dtype in registers.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#include "vectors.h"

// Blocks of 8 or 4 bits, each followed by a scale of each output, float16, and with 4 bits by a least value. Long ones
// have both as float32, and kHalves8 a second scale for the last 16 inputs in place of the least value.
enum Format : int64_t { kInt8, kBlocks8, kBlocks4, kLong4, kLong8, kHalves8 };
constexpr int64_t kSizes[] = {512, 512 + 32, 256 + 64, 256 + 128, 512 + 128, 512 + 128};  // bytes of a block
constexpr bool in_4_bits(int64_t format) { return format == kBlocks4 || format == kLong4; }
constexpr int kOutputs = 16, kInputs = 32, kPairs = 16, kMostRows = 32;

struct Task {
  const void* x;         // [rows, inputs]
  const uint8_t* blocks;  // [outputs / 16, inputs / 32, bytes of a block]
  const float* scales;    // [outputs] of kInt8
  const void* bias;       // [outputs], or null
  void* y;                // [rows, outputs]
  int64_t rows, inputs, outputs;
};

constexpr int kVectors = 2 * kOutputs / kWidth;  // of a pair of inputs of all outputs
#if defined(__AVX512BF16__)
constexpr bool kPairsOfHalves = true;  // whether bfloat16 is multiplied as it is
#else
constexpr bool kPairsOfHalves = false;
#endif

// The scale and the least value, or second scale, of each weight in a vector.
struct Scales {
  Floats scale, least;
};

template <int64_t F>
INLINE Scales scales_of(const uint8_t* block, int vector) {
  Scales found{};
  const uint8_t* place = block + (in_4_bits(F) ? 256 : 512) + (F >= kLong4 ? 2 : 1) * kWidth * vector;
  if constexpr (F == kBlocks8 || F == kBlocks4) found.scale = doubled_halves(place);
  if constexpr (F == kBlocks4) found.least = doubled_halves(place + 32);
  if constexpr (F >= kLong4) {
    found.scale = doubled(reinterpret_cast<const float*>(place));
    found.least = doubled(reinterpret_cast<const float*>(place + 64));
  }
  return found;
}

// A vector of a pair of inputs, as float32.
template <int64_t F>
INLINE Floats dequantised(const uint8_t* block, const Scales& scales, int pair, int vector) {
  const Floats found = in_4_bits(F) ? four_bits(of_bytes(block + 32 * (pair / 2) + kWidth * vector), pair % 2)
                                    : to_floats(of_signed_bytes(block + 32 * pair + kWidth * vector));
  if constexpr (F == kBlocks8 || F == kHalves8)
    return found * (F == kHalves8 && pair >= kPairs / 2 ? scales.least : scales.scale);
  if constexpr (F != kInt8) return fused(found, scales.scale, scales.least);
  return found;
}

// Asks for a block that is read soon: the processor itself stops at the end of each page.
template <int64_t F>
INLINE void ask_for(const uint8_t* block) {
  for (int line = 0; line < kSizes[F]; line += 64) _mm_prefetch(block + 8 * kSizes[F] + line, _MM_HINT_T0);
}

// Writes the sums of a row's outputs from `first` on.
template <int64_t F, bool Half>
INLINE void write(const Task& task, int64_t row, int64_t first, Floats sums) {
  using T = std::conditional_t<Half, uint16_t, float>;
  if constexpr (F == kInt8) sums = sums * load(task.scales + first);
  if (task.bias) sums = sums + numbers<T>(static_cast<const T*>(task.bias) + first);
  put<T>(static_cast<T*>(task.y) + row * task.outputs + first, sums);
}

// The same of all 16 outputs of a group, from sums of even and of odd inputs side by side.
template <int64_t F, bool Half>
INLINE void write_joined(const Task& task, int64_t row, int64_t group, const float* pairs) {
  alignas(64) float sums[kOutputs];
  for (int at = 0; at < kOutputs; ++at) sums[at] = pairs[2 * at] + pairs[2 * at + 1];
  for (int at = 0; at < kOutputs; at += kWidth) write<F, Half>(task, row, group * kOutputs + at, load(sums + at));
}

// 16 outputs of N rows from `row` on, in float32. With `Half` weights and outputs are rounded to bfloat16.
template <int64_t F, bool Half, int N>
void sums_of_products(const Task& task, int64_t row, int64_t group) {
  const int64_t parts = task.inputs / kInputs;
  alignas(64) float found[N][2 * kOutputs];
  for (int first = 0; first < kVectors; first += 2) {  // two vectors at a time
    const uint8_t* block = task.blocks + group * parts * kSizes[F];
    const float* x = static_cast<const float*>(task.x) + row * task.inputs;
    Floats sums[N][2];
    for (int i = 0; i < N; ++i) sums[i][0] = sums[i][1] = splat(0.f);
    for (int64_t part = 0; part < parts; ++part, block += kSizes[F], x += kInputs) {
      if (first == 0) ask_for<F>(block);
      const Scales scales[] = {scales_of<F>(block, first), scales_of<F>(block, first + 1)};
      for (int two = 0; two < kPairs; two += 2)
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
          Floats low = dequantised<F>(block, scales[0], two | k, first);
          Floats high = dequantised<F>(block, scales[1], two | k, first + 1);
          if constexpr (Half && F != kInt8) low = in_bfloat16(low), high = in_bfloat16(high);
#pragma GCC unroll 32
          for (int i = 0; i < N; ++i) {
            const Floats inputs = pairs_of(x + i * task.inputs + 2 * (two | k));
            sums[i][0] = fused(low, inputs, sums[i][0]);
            sums[i][1] = fused(high, inputs, sums[i][1]);
          }
        }
    }
    for (int i = 0; i < N; ++i)
      for (int side = 0; side < 2; ++side) store(found[i] + kWidth * (first + side), sums[i][side]);
  }
  for (int i = 0; i < N; ++i) write_joined<F, Half>(task, row + i, group, found[i]);
}

#if defined(__AVX512BF16__)

template <int64_t F>
INLINE __m512bh pairs_at(const uint8_t* block, const Scales (&scales)[2], int pair) {
  return _mm512_cvtne2ps_pbh(dequantised<F>(block, scales[1], pair, 1), dequantised<F>(block, scales[0], pair, 0));
}

// 16 outputs of N rows from `row` on, by dot products of pairs of bfloat16.
template <int64_t F, int N>
void dots(const Task& task, int64_t row, int64_t group) {
  const int64_t parts = task.inputs / kInputs;
  const uint8_t* block = task.blocks + group * parts * kSizes[F];
  const uint16_t* x = static_cast<const uint16_t*>(task.x) + row * task.inputs;
  __m512 sums[N];
  for (int i = 0; i < N; ++i) sums[i] = _mm512_setzero_ps();
  for (int64_t part = 0; part < parts; ++part, block += kSizes[F], x += kInputs) {
    ask_for<F>(block);
    const Scales scales[] = {scales_of<F>(block, 0), scales_of<F>(block, 1)};
    for (int two = 0; two < kPairs; two += 2)
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
        const __m512bh weights = pairs_at<F>(block, scales, two | k);
        const uint16_t* inputs = x + 2 * (two | k);
#pragma GCC unroll 32
        for (int i = 0; i < N; ++i)
          sums[i] = _mm512_dpbf16_ps(sums[i], weights, (__m512bh)splat_words(word_at(inputs + i * task.inputs)));
      }
  }
  for (int i = 0; i < N; ++i) write<F, true>(task, row + i, group * kOutputs, sums[i]);
}

#endif

// Takes all rows, as many at once as there are registers.
template <int64_t F, bool Half, int N>
void wide_rows(const Task& task, int64_t row, int64_t count, int64_t group) {
  if constexpr (N > 0) {
    if (count != N) return wide_rows<F, Half, N - 1>(task, row, count, group);
#if defined(__AVX512BF16__)
    if constexpr (Half) return dots<F, N>(task, row, group);
#endif
    sums_of_products<F, Half, N>(task, row, group);
  }
}

#if !defined(__AVX512BF16__)

// Dequantised weights of several blocks, two vectors of each pair of inputs, for more rows than there are registers.
constexpr int kBlocks = 8, kTogetherRows = 6, kDirectRows = 3;
using Panel = float[kBlocks * kPairs][2 * kWidth];

template <int64_t F, bool Half>
void fill(Panel& panel, const uint8_t* block, int64_t blocks, int first) {
  for (int64_t at = 0; at < blocks; ++at, block += kSizes[F]) {
    if (first == 0) ask_for<F>(block);
    const Scales scales[] = {scales_of<F>(block, first), scales_of<F>(block, first + 1)};
    for (int two = 0; two < kPairs; two += 2)
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k)
        for (int side = 0; side < 2; ++side) {
          const Floats weights = dequantised<F>(block, scales[side], two | k, first + side);
          store(panel[at * kPairs + (two | k)] + kWidth * side, Half && F != kInt8 ? in_bfloat16(weights) : weights);
        }
  }
}

// Adds the products of N rows `x` by a panel to their sums.
template <int N>
void add_products(const Panel& panel, const float* x, int64_t stride, int64_t pairs, float (*sums)[2 * kOutputs]) {
  Floats low[N], high[N];
  for (int i = 0; i < N; ++i) low[i] = load(sums[i]), high[i] = load(sums[i] + kWidth);
  for (int64_t pair = 0; pair < pairs; ++pair, x += 2) {
    const Floats first = load(panel[pair]), second = load(panel[pair] + kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      const Floats inputs = pairs_of(x + i * stride);
      low[i] = fused(first, inputs, low[i]), high[i] = fused(second, inputs, high[i]);
    }
  }
  for (int i = 0; i < N; ++i) store(sums[i], low[i]), store(sums[i] + kWidth, high[i]);
}

template <int64_t F, bool Half>
void by_panels(const Task& task, int64_t group) {
  const int64_t parts = task.inputs / kInputs, turns = (task.rows + kTogetherRows - 1) / kTogetherRows;
  const int64_t each = (task.rows + turns - 1) / turns;
  const float* x = static_cast<const float*>(task.x);
  alignas(64) Panel panel;
  alignas(64) float sums[kMostRows][2 * kOutputs] = {};
  for (int first = 0; first < kVectors; first += 2)
    for (int64_t part = 0; part < parts; part += kBlocks) {
      const int64_t blocks = std::min<int64_t>(kBlocks, parts - part);
      fill<F, Half>(panel, task.blocks + (group * parts + part) * kSizes[F], blocks, first);
      const auto add = [&](int row, auto few) {
        add_products<decltype(few)::value>(panel, x + row * task.inputs + part * kInputs, task.inputs, blocks * kPairs,
                                           reinterpret_cast<float(*)[2 * kOutputs]>(sums[row] + kWidth * first));
      };
      for (int64_t row = 0; row < task.rows; row += each)
        by_few<kTogetherRows>(row, std::min(each, task.rows - row), add);
    }
  for (int64_t row = 0; row < task.rows; ++row) write_joined<F, Half>(task, row, group, sums[row]);
}

template <int64_t F, bool Half>
void wide(const Task& task, int64_t begin, int64_t end) {
  for (int64_t group = begin; group < end; ++group)
    task.rows > kDirectRows ? by_panels<F, Half>(task, group)
                            : wide_rows<F, Half, kDirectRows>(task, 0, task.rows, group);
}

#else

template <int64_t F, bool Half>
void wide(const Task& task, int64_t begin, int64_t end) {
  constexpr int64_t most = Half ? 24 : 12;
  const int64_t turns = (task.rows + most - 1) / most, each = (task.rows + turns - 1) / turns;
  for (int64_t group = begin; group < end; ++group)
    for (int64_t row = 0; row < task.rows; row += each)
      wide_rows<F, Half, most>(task, row, std::min(each, task.rows - row), group);
}

#endif

#if !defined(__AVX512BF16__)

bool has_tiles() { return false; }
bool is_quick() { return true; }

#else

#define TILES __attribute__((target("avx512vbmi,amx-tile,amx-bf16")))

// The low and the high bytes of 0 to 127 as bfloat16.
struct Tables {
  alignas(64) uint8_t low[128], high[128];

  Tables() {
    for (int i = 0; i < 128; ++i) {
      const float number = i;
      uint32_t bits;
      std::memcpy(&bits, &number, 4);
      low[i] = bits >> 16, high[i] = bits >> 24;
    }
  }
};

TILES INLINE __m512i picked(const uint8_t* table, __m512i places) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), places, _mm512_load_si512(table + 64));
}

// 64 numbers of 8 bits as bfloat16, by tables: conversions are twice as many instructions.
TILES INLINE void looked_up(const uint8_t* numbers, const Tables& tables, __m512bh* to) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // as halves of 128 bits are joined below
  const __m512i found = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(numbers)), size = _mm512_abs_epi8(found);
  const __m512i low = picked(tables.low, size), sign = _mm512_set1_epi8(-128);
  __m512i high = _mm512_ternarylogic_epi64(picked(tables.high, size), found, sign, 0xf8);  // or with its sign
  high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(size), _mm512_set1_epi8(-61));  // -128 is 0xc300
  to[0] = (__m512bh)_mm512_unpacklo_epi8(low, high), to[1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
}

// A block as bfloat16.
template <int64_t F>
TILES INLINE void in_tile(const uint8_t* block, const Tables& tables, __m512bh* to) {
  ask_for<F>(block);
  const Scales scales[] = {scales_of<F>(block, 0), scales_of<F>(block, 1)};
#pragma GCC unroll 16
  for (int pair = 0; pair < kPairs; ++pair)
    if constexpr (F != kInt8)
      to[pair] = pairs_at<F>(block, scales, pair);
    else if (pair % 2 == 0)
      looked_up(block + 32 * pair, tables, to + pair);
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// 16 outputs of up to 32 rows by tiles: 0 and 1 are sums, 2 and 3 inputs, 4 weights.
template <int64_t F, bool Two>
TILES void tiles(const Task& task, int64_t begin, int64_t end) {
  const int64_t parts = task.inputs / kInputs, first = std::min<int64_t>(task.rows, 16), second = task.rows - first;
  TileShapes before, shapes;
  _tile_storeconfig(&before);  // other kernels expect theirs
  for (int tile : {0, 2}) shapes.bytes[tile] = 64, shapes.rows[tile] = first;
  if (Two)
    for (int tile : {1, 3}) shapes.bytes[tile] = 64, shapes.rows[tile] = second;
  shapes.bytes[4] = 64, shapes.rows[4] = kPairs;
  _tile_loadconfig(&shapes);
  alignas(64) __m512bh weights[2][kPairs];
  alignas(64) float sums[kMostRows][kOutputs];
  const int64_t stride = 2 * task.inputs;
  static const Tables tables;
  for (int64_t group = begin; group < end; ++group) {
    const uint8_t* block = task.blocks + group * parts * kSizes[F];
    const uint16_t* x = static_cast<const uint16_t*>(task.x);
    _tile_zero(0);
    if (Two) _tile_zero(1);
    in_tile<F>(block, tables, weights[0]);
    for (int64_t part = 0; part < parts; ++part, x += kInputs) {  // the next block is unpacked before this one is read
      if (part + 1 < parts) in_tile<F>(block += kSizes[F], tables, weights[(part + 1) % 2]);
      _tile_loadd(4, weights[part % 2], 64);
      _tile_loadd(2, x, stride);
      _tile_dpbf16ps(0, 2, 4);
      if (Two) {
        _tile_loadd(3, x + 16 * task.inputs, stride);
        _tile_dpbf16ps(1, 3, 4);
      }
    }
    _tile_stored(0, sums[0], 64);
    if (Two) _tile_stored(1, sums[16], 64);
    for (int64_t row = 0; row < task.rows; ++row)
      write<F, true>(task, row, group * kOutputs, load(sums[row]));
  }
  if (before.palette)
    _tile_loadconfig(&before);
  else
    _tile_release();
}

bool has_tiles() {
#if defined(__linux__)
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool found = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                            __builtin_cpu_supports("avx512vbmi") &&
                            syscall(SYS_arch_prctl, request, tile_data) == 0;
  return found;
#else
  return false;
#endif
}

// Whether bfloat16 is multiplied by small weights quicker than by packed ones: Intel's dot products of pairs are not.
bool is_quick() { return has_tiles() || __builtin_cpu_is("amd"); }

#endif

template <int64_t F>
void run(const Task& task, bool half, bool with_tiles) {
  const int64_t groups = task.outputs / kOutputs;
  const int64_t grain = std::max<int64_t>(1, 32768 / (task.inputs * kOutputs));
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    if (!half) return wide<F, false>(task, begin, end);
#if defined(__AVX512BF16__)
    if (with_tiles) return task.rows > 16 ? tiles<F, true>(task, begin, end) : tiles<F, false>(task, begin, end);
#endif
    wide<F, true>(task, begin, end);
  });
}

at::Tensor product(const at::Tensor& x, const at::Tensor& blocks, const std::optional<at::Tensor>& scales,
                   const std::optional<at::Tensor>& bias, int64_t outputs, int64_t format, bool by_tiles) {
  const int64_t inputs = x.size(-1), rows = inputs ? x.numel() / inputs : 0;
  const bool half = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(half || x.scalar_type() == at::kFloat, "expected bfloat16 or float32");
  TORCH_CHECK(format >= 0 && format <= kHalves8 && inputs % kInputs == 0 && outputs % kOutputs == 0, "no such layout");
  TORCH_CHECK(blocks.numel() == outputs / kOutputs * (inputs / kInputs) * kSizes[format], "not of this shape");
  TORCH_CHECK(blocks.is_contiguous() && (format != kInt8 || (scales && scales->numel() == outputs)), "no scales");
  TORCH_CHECK(!bias || (bias->numel() == outputs && bias->scalar_type() == x.scalar_type() && bias->is_contiguous()),
              "no such bias");
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  at::Tensor y = at::empty(sizes, x.options()), from = (kPairsOfHalves ? x : x.to(at::kFloat)).contiguous();
  Task task{from.const_data_ptr(), blocks.const_data_ptr<uint8_t>(), scales ? scales->const_data_ptr<float>() : nullptr,
            bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(), 0, inputs, outputs};
  const int64_t size = half ? 2 : 4, size_of_x = from.element_size();
  for (int64_t row = 0; row < rows; row += kMostRows) {
    Task part = task;
    part.rows = std::min<int64_t>(rows - row, kMostRows);
    part.x = static_cast<const char*>(task.x) + row * inputs * size_of_x;
    part.y = static_cast<char*>(task.y) + row * outputs * size;
    const bool with_tiles = half && by_tiles && has_tiles();
    constexpr decltype(&run<kInt8>) runs[] = {run<kInt8>,  run<kBlocks8>, run<kBlocks4>,
                                              run<kLong4>, run<kLong8>,   run<kHalves8>};
    runs[format](part, half, with_tiles);
  }
  return y;
}

void sum_words(const uint64_t* from, int64_t* to, int64_t count, int64_t words) {
  for (int64_t i = 0; i < count; ++i, from += words) {
    uint64_t sum = 0;
    for (int64_t word = 0; word < words; ++word) sum += from[word];
    to[i] = sum;
  }
}

// The sum of each of `parts` equal parts of each row's bits, in words of 8 bytes.
at::Tensor sums(const at::Tensor& rows, int64_t parts) {
  const int64_t count = rows.dim() ? rows.size(0) * parts : 0, bytes = count ? rows.nbytes() / count : 0;
  TORCH_CHECK(count && rows.is_contiguous() && bytes * count == static_cast<int64_t>(rows.nbytes()) && bytes % 8 == 0,
              "expected rows of whole words");
  at::Tensor found = at::empty({rows.size(0), parts}, rows.options().dtype(at::kLong));
  const auto* from = static_cast<const char*>(rows.const_data_ptr());
  int64_t* to = found.mutable_data_ptr<int64_t>();
  at::parallel_for(0, count, std::max<int64_t>(1, 262144 / bytes), [&](int64_t begin, int64_t end) {
    sum_words(reinterpret_cast<const uint64_t*>(from + begin * bytes), to + begin, end - begin, bytes / 8);
  });
  return found;
}

#include "gguf_blocks.h"
#include "few_queries.h"
#include "decoder.h"
#include "drafts.h"

}  // namespace

// The name of the library, which a compiler is given, has a digest of these files: another version may be loaded too.
#define DEFINE(name)                                                                                            \
  TORCH_LIBRARY(name, library) {                                                                                \
    library.def("runs_here() -> bool", [] { return has_vectors(); });                                              \
    library.def("has_tiles() -> bool", [] { return has_vectors() && has_tiles(); });                               \
    library.def("is_quick() -> bool", [] { return has_vectors() && is_quick(); });                                 \
    library.def(                                                                                                \
        "product(Tensor x, Tensor blocks, Tensor? scales, Tensor? bias, int outputs, int format, bool by_tiles)" \
        " -> Tensor");                                                                                          \
    library.def("sums(Tensor rows, int parts) -> Tensor");                                                      \
    library.def("blocks_of(Tensor raw, Tensor weight, Tensor order, int kind) -> Tensor");                      \
    library.def("attend(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling) -> Tensor");       \
    library.def(                                                                                                \
        "decode(Tensor x, Tensor cos, Tensor sin, Tensor? mask, Tensor?[] parts, Tensor[] rooms, int length,"    \
        " int[] formats, int[] form, float[] scales) -> Tensor[]");                                              \
    library.def(                                                                                                \
        "roll_out(Tensor taps, Tensor embeds, Tensor positions, Tensor frequencies, Tensor?[] parts,"            \
        " Tensor[] rooms, int length, int ahead, int window, int[] formats, int[] form, float eps) -> Tensor");  \
    library.def(                                                                                                \
        "search(Tensor logits, Tensor projected, Tensor paths, bool rootless, Tensor roots, Tensor vocab_ids,"   \
        " Tensor table, Tensor up, Tensor?[] parts, int[] formats, int[] sizes, float eps, float temperature)"   \
        " -> (Tensor, int[])");                                                                                 \
  }                                                                                                             \
  TORCH_LIBRARY_IMPL(name, CPU, library) {                                                                      \
    library.impl("product", &product);                                                                          \
    library.impl("sums", &sums);                                                                                \
    library.impl("blocks_of", &blocks_of);                                                                      \
    library.impl("attend", &attend);                                                                            \
    library.impl("decode", &decode);                                                                            \
    library.impl("roll_out", &roll_out);                                                                        \
    library.impl("search", &search);                                                                            \
  }                                                                                                             \
  TORCH_LIBRARY_IMPL(name, MkldnnCPU, library) { /* of torch's packed copies */                                  \
    library.impl("decode", &decode);                                                                            \
    library.impl("roll_out", &roll_out);                                                                        \
    library.impl("search", &search);                                                                            \
  }
DEFINE(HSDRAFT_LIBRARY)
