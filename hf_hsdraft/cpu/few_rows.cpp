// Products of a few rows by weights of 8 or 4 bits; see small_weights.py for the layout of the copies.
//
// A block is 16 outputs of 32 inputs: 16 vectors, each of 2 inputs by 16 outputs, pairs of inputs side by side, as the
// dot products of AVX-512 and AMX read them. They are dequantised to the inputs' dtype in registers.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma")))
#define TILES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma,amx-tile,amx-bf16")))
#define INLINE inline __attribute__((always_inline))

namespace {

enum Format : int64_t { kInt8 = 0, kBlocks8 = 1, kBlocks4 = 2 };
constexpr int64_t kSizes[] = {512, 512 + 32, 256 + 64};  // bytes of a block
constexpr int kOutputs = 16, kInputs = 32, kPairs = 16, kMostRows = 32;

struct Task {
  const void* x;         // [rows, inputs]
  const uint8_t* blocks;  // [outputs / 16, inputs / 32, bytes of a block]
  const float* scales;    // [outputs] of kInt8
  const void* bias;       // [outputs], or null
  void* y;                // [rows, outputs]
  int64_t rows, inputs, outputs;
};

// The scale and the least value of each weight in a vector: outputs 0 to 7, then 8 to 15, each twice.
struct Scales {
  __m512 scale[2], least[2];
};

WIDE INLINE void spread(const uint8_t* halves, __m512* found) {
  const __m512 all = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  found[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), all);
  found[1] = _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), all);
}

template <int64_t F>
WIDE INLINE Scales scales_of(const uint8_t* block) {
  Scales found{};
  if constexpr (F == kBlocks8) spread(block + 512, found.scale);
  if constexpr (F == kBlocks4) {
    spread(block + 256, found.scale);
    spread(block + 288, found.least);
  }
  return found;
}

// Vector `pair` of a block, as float32.
template <int64_t F>
WIDE INLINE void dequantised(const uint8_t* block, const Scales& scales, int pair, __m512& low, __m512& high) {
  if constexpr (F == kBlocks4) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32 * (pair / 2)));
    const __m256i bits = _mm256_and_si256(pair % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    low = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bits)));
    high = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bits, 1)));
    low = _mm512_fmadd_ps(low, scales.scale[0], scales.least[0]);
    high = _mm512_fmadd_ps(high, scales.scale[1], scales.least[1]);
  } else {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(block + 32 * pair);
    low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
    if constexpr (F == kBlocks8) {
      low = _mm512_mul_ps(low, scales.scale[0]);
      high = _mm512_mul_ps(high, scales.scale[1]);
    }
  }
}

template <int64_t F>
WIDE INLINE __m512bh in_bfloat16(const uint8_t* block, const Scales& scales, int pair) {
  __m512 low, high;
  dequantised<F>(block, scales, pair, low, high);
  return _mm512_cvtne2ps_pbh(high, low);
}

WIDE INLINE __m512 widened(const void* bfloat16s) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bfloat16s));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Writes the sums of a row's 16 outputs from `first` on.
template <int64_t F, bool Half>
WIDE INLINE void write(const Task& task, int64_t row, int64_t first, __m512 sums) {
  if constexpr (F == kInt8) sums = _mm512_mul_ps(sums, _mm512_loadu_ps(task.scales + first));
  const int64_t place = row * task.outputs + first;
  if constexpr (Half) {
    if (task.bias) sums = _mm512_add_ps(sums, widened(static_cast<const uint16_t*>(task.bias) + first));
    const __m256bh rounded = _mm512_cvtneps_pbh(sums);
    std::memcpy(static_cast<uint16_t*>(task.y) + place, &rounded, 32);
  } else {
    if (task.bias) sums = _mm512_add_ps(sums, _mm512_loadu_ps(static_cast<const float*>(task.bias) + first));
    _mm512_storeu_ps(static_cast<float*>(task.y) + place, sums);
  }
}

WIDE INLINE __m512bh pair_of(const uint16_t* x) {
  int32_t bits;
  std::memcpy(&bits, x, 4);
  return (__m512bh)_mm512_set1_epi32(bits);
}

// 16 outputs of N rows from `row` on, by dot products of pairs of bfloat16.
template <int64_t F, int N>
WIDE void dots(const Task& task, int64_t row, int64_t group) {
  const int64_t parts = task.inputs / kInputs;
  const uint8_t* block = task.blocks + group * parts * kSizes[F];
  const uint16_t* x = static_cast<const uint16_t*>(task.x) + row * task.inputs;
  __m512 sums[N];
  for (int i = 0; i < N; ++i) sums[i] = _mm512_setzero_ps();
  for (int64_t part = 0; part < parts; ++part, block += kSizes[F], x += kInputs) {
    _mm_prefetch(block + 4 * kSizes[F], _MM_HINT_T0);
    const Scales scales = scales_of<F>(block);
    for (int pair = 0; pair < kPairs; ++pair) {
      const __m512bh weights = in_bfloat16<F>(block, scales, pair);
#pragma GCC unroll 32
      for (int i = 0; i < N; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], weights, pair_of(x + i * task.inputs + 2 * pair));
    }
  }
  for (int i = 0; i < N; ++i) write<F, true>(task, row + i, group * kOutputs, sums[i]);
}

// The same in float32: sums of even and of odd inputs side by side, joined at the end.
template <int64_t F, int N>
WIDE void sums_of_products(const Task& task, int64_t row, int64_t group) {
  const int64_t parts = task.inputs / kInputs;
  const uint8_t* block = task.blocks + group * parts * kSizes[F];
  const float* x = static_cast<const float*>(task.x) + row * task.inputs;
  __m512 sums[N][2];
  for (int i = 0; i < N; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  for (int64_t part = 0; part < parts; ++part, block += kSizes[F], x += kInputs) {
    const Scales scales = scales_of<F>(block);
    for (int pair = 0; pair < kPairs; ++pair) {
      __m512 low, high;
      dequantised<F>(block, scales, pair, low, high);
#pragma GCC unroll 32
      for (int i = 0; i < N; ++i) {
        double both;
        std::memcpy(&both, x + i * task.inputs + 2 * pair, 8);
        const __m512 inputs = _mm512_castpd_ps(_mm512_set1_pd(both));
        sums[i][0] = _mm512_fmadd_ps(low, inputs, sums[i][0]);
        sums[i][1] = _mm512_fmadd_ps(high, inputs, sums[i][1]);
      }
    }
  }
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int i = 0; i < N; ++i) {
    const __m512 a = _mm512_permutex2var_ps(sums[i][0], even, sums[i][1]);
    const __m512 b = _mm512_permutex2var_ps(sums[i][0], odd, sums[i][1]);
    write<F, false>(task, row + i, group * kOutputs, _mm512_add_ps(a, b));
  }
}

// Takes all rows, as many at once as there are registers.
template <int64_t F, bool Half, int N>
void wide_rows(const Task& task, int64_t row, int64_t count, int64_t group) {
  if constexpr (N > 0) {
    if (count != N) return wide_rows<F, Half, N - 1>(task, row, count, group);
    if constexpr (Half)
      dots<F, N>(task, row, group);
    else
      sums_of_products<F, N>(task, row, group);
  }
}

template <int64_t F, bool Half>
void wide(const Task& task, int64_t begin, int64_t end) {
  constexpr int64_t most = Half ? 24 : 12;
  const int64_t turns = (task.rows + most - 1) / most, each = (task.rows + turns - 1) / turns;
  for (int64_t group = begin; group < end; ++group)
    for (int64_t row = 0; row < task.rows; row += each)
      wide_rows<F, Half, most>(task, row, std::min(each, task.rows - row), group);
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
  for (int64_t group = begin; group < end; ++group) {
    const uint8_t* block = task.blocks + group * parts * kSizes[F];
    const uint16_t* x = static_cast<const uint16_t*>(task.x);
    _tile_zero(0);
    if (Two) _tile_zero(1);
    for (int64_t part = 0; part < parts; ++part, block += kSizes[F], x += kInputs) {
      for (int line = 0; line < kSizes[F]; line += 64) _mm_prefetch(block + 4 * kSizes[F] + line, _MM_HINT_T0);
      const Scales scales = scales_of<F>(block);
#pragma GCC unroll 16
      for (int pair = 0; pair < kPairs; ++pair) weights[part % 2][pair] = in_bfloat16<F>(block, scales, pair);
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
      write<F, true>(task, row, group * kOutputs, _mm512_load_ps(sums[row]));
  }
  if (before.palette)
    _tile_loadconfig(&before);
  else
    _tile_release();
}

bool has_wide() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}

bool has_tiles() {
#if defined(__linux__)
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool found = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                            syscall(SYS_arch_prctl, request, tile_data) == 0;
  return found;
#else
  return false;
#endif
}

template <int64_t F>
void run(const Task& task, bool half, bool with_tiles) {
  const int64_t groups = task.outputs / kOutputs;
  const int64_t grain = std::max<int64_t>(1, 32768 / (task.inputs * kOutputs));
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    if (!half) return wide<F, false>(task, begin, end);
    if (!with_tiles) return wide<F, true>(task, begin, end);
    return task.rows > 16 ? tiles<F, true>(task, begin, end) : tiles<F, false>(task, begin, end);
  });
}

at::Tensor product(const at::Tensor& x, const at::Tensor& blocks, const std::optional<at::Tensor>& scales,
                   const std::optional<at::Tensor>& bias, int64_t outputs, int64_t format, bool by_tiles) {
  const int64_t inputs = x.size(-1), rows = inputs ? x.numel() / inputs : 0;
  const bool half = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(half || x.scalar_type() == at::kFloat, "expected bfloat16 or float32");
  TORCH_CHECK(format >= 0 && format <= 2 && inputs % kInputs == 0 && outputs % kOutputs == 0, "no such layout");
  TORCH_CHECK(blocks.numel() == outputs / kOutputs * (inputs / kInputs) * kSizes[format], "not of this shape");
  TORCH_CHECK(blocks.is_contiguous() && (format != kInt8 || (scales && scales->numel() == outputs)), "no scales");
  auto sizes = x.sizes().vec();
  sizes.back() = outputs;
  at::Tensor y = at::empty(sizes, x.options()), from = x.contiguous();
  Task task{from.const_data_ptr(), blocks.const_data_ptr<uint8_t>(), scales ? scales->const_data_ptr<float>() : nullptr,
            bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(), 0, inputs, outputs};
  const int64_t size = half ? 2 : 4;
  for (int64_t row = 0; row < rows; row += kMostRows) {
    Task part = task;
    part.rows = std::min<int64_t>(rows - row, kMostRows);
    part.x = static_cast<const char*>(task.x) + row * inputs * size;
    part.y = static_cast<char*>(task.y) + row * outputs * size;
    const bool with_tiles = half && by_tiles && has_tiles();
    if (format == kInt8) run<kInt8>(part, half, with_tiles);
    if (format == kBlocks8) run<kBlocks8>(part, half, with_tiles);
    if (format == kBlocks4) run<kBlocks4>(part, half, with_tiles);
  }
  return y;
}

// Blocks of a GGUF file: their sizes in bytes, and where the weights begin.
enum Kind : int64_t { kQ8_0 = 0, kQ4_0 = 1, kQ4_1 = 2 };
constexpr int64_t kRawSizes[] = {34, 18, 20}, kRawStarts[] = {2, 2, 4};

float half_at(const uint8_t* bytes) {
  c10::Half found;
  std::memcpy(&found, bytes, 2);
  return found;
}

// Lays a row out, its `lane` of 16, and returns whether its weights, bfloat16, are these.
template <int64_t K>
WIDE bool lay_out(const uint8_t* raw, const uint16_t* weight, uint8_t* blocks, int lane, int64_t parts) {
  constexpr int64_t size = kSizes[K == kQ8_0 ? kBlocks8 : kBlocks4];
  uint32_t wrong = 0;
  for (int64_t part = 0; part < parts; ++part, raw += kRawSizes[K], weight += kInputs, blocks += size) {
    const c10::Half scale(half_at(raw)), least(K == kQ4_1 ? half_at(raw + 2) : -8 * half_at(raw));
    const float factor = scale, added = least;
    const uint8_t* bytes = raw + kRawStarts[K];
    int8_t numbers[kInputs];
    for (int i = 0; i < 16; ++i) {
      numbers[i] = K == kQ8_0 ? bytes[i] : bytes[i] & 15;
      numbers[16 + i] = K == kQ8_0 ? bytes[16 + i] : bytes[i] >> 4;
    }
    for (int i = 0; i < kInputs; ++i) {  // rounds to the nearest, ties to even; zeros of both signs are the same
      const float value = K == kQ8_0 ? factor * numbers[i] : factor * numbers[i] + added;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      const uint32_t either = (bits | weight[i]) & 0x7fff;
      wrong |= either ? bits ^ weight[i] : 0;
    }
    if constexpr (K == kQ8_0) {
      for (int pair = 0; pair < kPairs; ++pair) std::memcpy(blocks + 32 * pair + 2 * lane, numbers + 2 * pair, 2);
      std::memcpy(blocks + 512 + 2 * lane, &scale, 2);
    } else {
      for (int pair = 0; pair < kPairs; pair += 2)
        for (int i = 0; i < 2; ++i)
          blocks[16 * pair + 2 * lane + i] = numbers[2 * pair + i] | numbers[2 * pair + 2 + i] << 4;
      std::memcpy(blocks + 256 + 2 * lane, &scale, 2);
      std::memcpy(blocks + 288 + 2 * lane, &least, 2);
    }
  }
  return wrong == 0;
}

// `raw` is [outputs, bytes]; row i of `weight` is row order[i] of it. Empty if the weights differ.
at::Tensor blocks_of(const at::Tensor& raw, const at::Tensor& weight, const at::Tensor& order, int64_t kind) {
  const int64_t outputs = weight.size(0), parts = weight.size(1) / kInputs;
  const int64_t size = kSizes[kind == kQ8_0 ? kBlocks8 : kBlocks4], raw_row = parts * kRawSizes[kind];
  TORCH_CHECK(raw.is_contiguous() && raw.size(0) == outputs && raw.size(1) == raw_row, "not of this shape");
  TORCH_CHECK(weight.is_contiguous() && outputs % kOutputs == 0 && weight.size(1) % kInputs == 0, "no such layout");
  at::Tensor blocks = at::empty({outputs / kOutputs, parts, size}, raw.options());
  std::atomic<bool> same{true};
  const uint8_t* from = raw.const_data_ptr<uint8_t>();
  const auto* weights = reinterpret_cast<const uint16_t*>(weight.const_data_ptr<c10::BFloat16>());
  const auto lay = kind == kQ8_0 ? lay_out<kQ8_0> : kind == kQ4_0 ? lay_out<kQ4_0> : lay_out<kQ4_1>;
  const int64_t* rows = order.const_data_ptr<int64_t>();
  uint8_t* to = blocks.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, outputs / kOutputs, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kOutputs; row < end * kOutputs && same; ++row)
      if (!lay(from + rows[row] * raw_row, weights + row * weight.size(1), to + row / kOutputs * parts * size,
               row % kOutputs, parts))
        same = false;
  });
  return same ? blocks : blocks.new_empty({0});
}

#include "few_queries.h"

}  // namespace

// The name of the library, which a compiler is given, has a digest of these files: another version may be loaded too.
#define DEFINE(name)                                                                                            \
  TORCH_LIBRARY(name, library) {                                                                                \
    library.def("runs_here() -> bool", [] { return has_wide(); });                                              \
    library.def("has_tiles() -> bool", [] { return has_wide() && has_tiles(); });                               \
    library.def(                                                                                                \
        "product(Tensor x, Tensor blocks, Tensor? scales, Tensor? bias, int outputs, int format, bool by_tiles)" \
        " -> Tensor");                                                                                          \
    library.def("blocks_of(Tensor raw, Tensor weight, Tensor order, int kind) -> Tensor");                      \
    library.def("attend(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling) -> Tensor");       \
  }                                                                                                             \
  TORCH_LIBRARY_IMPL(name, CPU, library) {                                                                      \
    library.impl("product", &product);                                                                          \
    library.impl("blocks_of", &blocks_of);                                                                      \
    library.impl("attend", &attend);                                                                            \
  }
DEFINE(HSDRAFT_LIBRARY)
