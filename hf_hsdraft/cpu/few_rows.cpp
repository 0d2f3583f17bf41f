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

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma")))
#define TILES \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,f16c,fma,amx-tile,amx-bf16")))
#define INLINE inline __attribute__((always_inline))

namespace {

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

// The scale and the least value, or second scale, of each weight in a vector: outputs 0 to 7, then 8 to 15, each twice.
struct Scales {
  __m512 scale[2], least[2];
};

WIDE INLINE void spread(__m512 all, __m512* found) {
  found[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), all);
  found[1] = _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), all);
}

template <int64_t F>
WIDE INLINE Scales scales_of(const uint8_t* block) {
  Scales found{};
  const uint8_t* place = block + (in_4_bits(F) ? 256 : 512);
  if constexpr (F == kBlocks8 || F == kBlocks4)
    spread(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(place))), found.scale);
  if constexpr (F == kBlocks4)
    spread(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(place + 32))), found.least);
  if constexpr (F >= kLong4) {
    spread(_mm512_loadu_ps(place), found.scale);
    spread(_mm512_loadu_ps(place + 64), found.least);
  }
  return found;
}

// Vector `pair` of a block, as float32.
template <int64_t F>
WIDE INLINE void dequantised(const uint8_t* block, const Scales& scales, int pair, __m512& low, __m512& high) {
  if constexpr (in_4_bits(F)) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32 * (pair / 2)));
    const __m256i bits = _mm256_and_si256(pair % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    low = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bits)));
    high = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bits, 1)));
  } else {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(block + 32 * pair);
    low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
  }
  if constexpr (F == kBlocks8 || F == kHalves8) {
    const __m512* scale = F == kHalves8 && pair >= kPairs / 2 ? scales.least : scales.scale;
    low = _mm512_mul_ps(low, scale[0]);
    high = _mm512_mul_ps(high, scale[1]);
  } else if constexpr (F != kInt8) {
    low = _mm512_fmadd_ps(low, scales.scale[0], scales.least[0]);
    high = _mm512_fmadd_ps(high, scales.scale[1], scales.least[1]);
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
  for (int line = 0; line < kSizes[F]; line += 64) _mm_prefetch(block + 8 * kSizes[F] + line, _MM_HINT_T0);
  const Scales scales = scales_of<F>(block);
#pragma GCC unroll 16
  for (int pair = 0; pair < kPairs; ++pair)
    if constexpr (F != kInt8)
      to[pair] = in_bfloat16<F>(block, scales, pair);
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
                            __builtin_cpu_supports("avx512vbmi") &&
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
  TORCH_CHECK(format >= 0 && format <= kHalves8 && inputs % kInputs == 0 && outputs % kOutputs == 0, "no such layout");
  TORCH_CHECK(blocks.numel() == outputs / kOutputs * (inputs / kInputs) * kSizes[format], "not of this shape");
  TORCH_CHECK(blocks.is_contiguous() && (format != kInt8 || (scales && scales->numel() == outputs)), "no scales");
  TORCH_CHECK(!bias || (bias->numel() == outputs && bias->scalar_type() == x.scalar_type() && bias->is_contiguous()),
              "no such bias");
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
    constexpr decltype(&run<kInt8>) runs[] = {run<kInt8>,  run<kBlocks8>, run<kBlocks4>,
                                              run<kLong4>, run<kLong8>,   run<kHalves8>};
    runs[format](part, half, with_tiles);
  }
  return y;
}

// Blocks of GGUF files: their sizes in bytes and in weights, and how they are laid out here.
enum Kind : int64_t { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kIQ4_NL, kQ4_K, kQ5_K, kQ6_K };
struct Source {
  int64_t bytes, weights, format;
};
constexpr Source kSources[] = {{34, 32, kBlocks8},  {18, 32, kBlocks4},  {20, 32, kBlocks4},
                               {22, 32, kBlocks8},  {24, 32, kLong8},    {18, 32, kBlocks8},
                               {144, 256, kLong4},  {176, 256, kLong8},  {210, 256, kHalves8}};
constexpr int8_t kLevels[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // of IQ4_NL

float half_at(const uint8_t* bytes) {
  c10::Half found;
  std::memcpy(&found, bytes, 2);
  return found;
}

// 32 weights: `numbers` times `factor` plus `added`; of kHalves8 the last 16 are `numbers` times `added`.
struct Part {
  int8_t numbers[kInputs];
  float factor, added = 0;
};

// The scale and the least value of one of 8 parts, 6 bits each, packed in 12 bytes.
INLINE void packed_scales(const uint8_t* bytes, int64_t part, int& scale, int& least) {
  const uint8_t *low = bytes + part, *high = bytes + part - 4;
  scale = part < 4 ? low[0] & 63 : (low[4] & 15) | high[0] >> 6 << 4;
  least = part < 4 ? low[4] & 63 : low[4] >> 4 | low[0] >> 6 << 4;
}

// Weights 32 * part to 32 * part + 31 of a row. Products of these floats are exact: 11 bits by 6 or 8, by 4 to 6.
template <int64_t K>
INLINE Part part_of(const uint8_t* row, int64_t part) {
  constexpr int64_t in_block = kSources[K].weights / kInputs;
  const uint8_t* raw = row + part / in_block * kSources[K].bytes;
  part %= in_block;
  Part found;
  const auto nibble = [](const uint8_t* bytes, int i) { return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4; };
  if constexpr (K == kQ6_K) {
    const uint8_t *low = raw + 64 * (part / 4) + 32 * (part & 1), *high = raw + 128 + 32 * (part / 4);
    const auto* scales = reinterpret_cast<const int8_t*>(raw + 192) + 2 * part;
    for (int i = 0; i < kInputs; ++i)
      found.numbers[i] = ((low[i] >> 4 * (part % 4 / 2) & 15) | (high[i] >> 2 * (part % 4) & 3) << 4) - 32;
    found.factor = half_at(raw + 208) * scales[0], found.added = half_at(raw + 208) * scales[1];
  } else if constexpr (K == kQ4_K || K == kQ5_K) {
    const uint8_t* low = raw + (K == kQ5_K ? 48 : 16) + 32 * (part / 2);
    for (int i = 0; i < kInputs; ++i) {
      found.numbers[i] = low[i] >> 4 * (part & 1) & 15;
      if constexpr (K == kQ5_K) found.numbers[i] |= (raw[16 + i] >> part & 1) << 4;
    }
    int scale, least;
    packed_scales(raw + 4, part, scale, least);
    found.factor = half_at(raw) * scale, found.added = -(half_at(raw + 2) * least);
  } else if constexpr (K == kQ8_0) {
    std::memcpy(found.numbers, raw + 2, kInputs);
    found.factor = half_at(raw);
  } else {
    constexpr bool affine = K == kQ4_1 || K == kQ5_1, fifth = K == kQ5_0 || K == kQ5_1;
    const uint8_t* bits = raw + (affine ? 4 : 2);  // the fifth bit of each weight, if there is one
    for (int i = 0; i < kInputs; ++i) {
      const int four = nibble(bits + (fifth ? 4 : 0), i), top = fifth ? (bits[i / 8] >> i % 8 & 1) << 4 : 0;
      found.numbers[i] = K == kIQ4_NL ? kLevels[four] : (four | top) - (K == kQ5_0 ? 16 : 0);
    }
    found.factor = half_at(raw);
    found.added = affine ? half_at(raw + 2) : K == kQ4_0 ? float(c10::Half(-8 * half_at(raw))) : 0;
  }
  return found;
}

// Lays a row out, its `lane` of 16, and returns whether its weights, bfloat16, are these.
template <int64_t K>
WIDE bool lay_out(const uint8_t* raw, const uint16_t* weight, uint8_t* blocks, int lane, int64_t parts) {
  constexpr int64_t F = kSources[K].format, size = kSizes[F];
  uint32_t wrong = 0;
  for (int64_t part = 0; part < parts; ++part, weight += kInputs, blocks += size) {
    const Part found = part_of<K>(raw, part);
    const int8_t* numbers = found.numbers;
    for (int i = 0; i < kInputs; ++i) {  // rounds to the nearest, ties to even; zeros of both signs are the same
      const float value = F != kHalves8 ? found.factor * numbers[i] + found.added
                                        : numbers[i] * (i < 16 ? found.factor : found.added);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      const uint32_t either = (bits | weight[i]) & 0x7fff;
      wrong |= either ? bits ^ weight[i] : 0;
    }
    uint8_t* scales = blocks + (in_4_bits(F) ? 256 : 512);
    if constexpr (in_4_bits(F)) {
      for (int pair = 0; pair < kPairs; pair += 2)
        for (int i = 0; i < 2; ++i)
          blocks[16 * pair + 2 * lane + i] = numbers[2 * pair + i] | numbers[2 * pair + 2 + i] << 4;
    } else {
      for (int pair = 0; pair < kPairs; ++pair) std::memcpy(blocks + 32 * pair + 2 * lane, numbers + 2 * pair, 2);
    }
    if constexpr (F >= kLong4) {
      std::memcpy(scales + 4 * lane, &found.factor, 4);
      std::memcpy(scales + 64 + 4 * lane, &found.added, 4);
    } else {
      const c10::Half halves[] = {found.factor, found.added};
      std::memcpy(scales + 2 * lane, halves, 2);
      if constexpr (F == kBlocks4) std::memcpy(scales + 32 + 2 * lane, halves + 1, 2);
    }
  }
  return wrong == 0;
}

// `raw` is [outputs, bytes]; row i of `weight` is row order[i] of it. Empty if the weights differ.
at::Tensor blocks_of(const at::Tensor& raw, const at::Tensor& weight, const at::Tensor& order, int64_t kind) {
  TORCH_CHECK(kind >= 0 && kind <= kQ6_K, "no such blocks");
  const Source source = kSources[kind];
  const int64_t outputs = weight.size(0), inputs = weight.size(1), parts = inputs / kInputs;
  const int64_t size = kSizes[source.format], raw_row = inputs / source.weights * source.bytes;
  TORCH_CHECK(raw.is_contiguous() && raw.size(0) == outputs && raw.size(1) == raw_row, "not of this shape");
  TORCH_CHECK(weight.is_contiguous() && outputs % kOutputs == 0 && inputs % source.weights == 0, "no such layout");
  at::Tensor blocks = at::empty({outputs / kOutputs, parts, size}, raw.options());
  std::atomic<bool> same{true};
  const uint8_t* from = raw.const_data_ptr<uint8_t>();
  const auto* weights = reinterpret_cast<const uint16_t*>(weight.const_data_ptr<c10::BFloat16>());
  constexpr decltype(&lay_out<kQ8_0>) lays[] = {lay_out<kQ8_0>, lay_out<kQ4_0>,   lay_out<kQ4_1>,
                                                lay_out<kQ5_0>, lay_out<kQ5_1>,   lay_out<kIQ4_NL>,
                                                lay_out<kQ4_K>, lay_out<kQ5_K>,   lay_out<kQ6_K>};
  const int64_t* rows = order.const_data_ptr<int64_t>();
  uint8_t* to = blocks.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, outputs / kOutputs, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kOutputs; row < end * kOutputs && same; ++row)
      if (!lays[kind](from + rows[row] * raw_row, weights + row * inputs, to + row / kOutputs * parts * size,
                      row % kOutputs, parts))
        same = false;
  });
  return same ? blocks : blocks.new_empty({0});
}

#include "few_queries.h"
#include "decoder.h"
#include "drafts.h"

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
