// Products of a few rows with AVX-512, and with AMX where the processor has it.
#pragma once

constexpr bool kPairsOfHalves = true;  // whether bfloat16 is multiplied as it is

// A vector of bytes with a sign.
INLINE Words of_signed_bytes(const uint8_t* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The low four bits of each number, or the next four: they pick from 16 numbers.
INLINE Floats four_bits(Words x, bool next) {
  const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(next ? _mm512_srli_epi32(x, 4) : x, all);
}

// Half as many numbers, float32 or float16, each twice.
INLINE Floats doubled(__m256 x) {
  const __m512i places = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(places, _mm512_castps256_ps512(x));
}
INLINE Floats doubled(const float* from) { return doubled(_mm256_loadu_ps(from)); }
INLINE Floats doubled_halves(const void* from) {
  return doubled(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}

// Two numbers, again and again.
INLINE Floats pairs_of(const float* x) {
  double both;
  std::memcpy(&both, x, 8);
  return _mm512_castpd_ps(_mm512_set1_pd(both));
}

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

template <int64_t F>
INLINE __m512bh pairs_at(const uint8_t* block, const Scales (&scales)[2], int pair) {
  return _mm512_cvtne2ps_pbh(dequantised<F>(block, scales[1], pair, 1), dequantised<F>(block, scales[0], pair, 0));
}

// A pair of inputs of 16 outputs as rows are multiplied by it: a vector of pairs of bfloat16, or of float32 those of the
// first 8 outputs and those of the last.
template <bool Half>
struct Pair {
  Floats of[Half ? 1 : 2];
};

template <int64_t F, bool Half>
INLINE Pair<Half> pair_of(const uint8_t* block, const Scales (&scales)[2], int pair) {
  if constexpr (Half) return {(Floats)pairs_at<F>(block, scales, pair)};
  else return {dequantised<F>(block, scales[0], pair, 0), dequantised<F>(block, scales[1], pair, 1)};
}

// The weights of a group of 16 outputs, dequantised, for many rows.
template <int64_t F, bool Half>
void unpack(const Task& task, int64_t group, Pair<Half>* to) {
  const int64_t parts = task.inputs / kInputs;
  const uint8_t* block = task.blocks + group * parts * kSizes[F];
  for (int64_t part = 0; part < parts; ++part, block += kSizes[F]) {
    ask_for<F>(block);
    const Scales scales[] = {scales_of<F>(block, 0), scales_of<F>(block, 1)};
#pragma GCC unroll 16
    for (int pair = 0; pair < kPairs; ++pair) *to++ = pair_of<F, Half>(block, scales, pair);
  }
}

// 16 outputs of N rows from `row` on; by `kept` weights, which `unpack` has made, where there are some.
template <int64_t F, bool Half, int N, bool Kept>
void sums_of_products(const Task& task, int64_t row, int64_t group, const Pair<Half>* kept) {
  using T = std::conditional_t<Half, uint16_t, float>;
  const int64_t parts = task.inputs / kInputs;
  const uint8_t* block = task.blocks + group * parts * kSizes[F];
  const T* x = static_cast<const T*>(task.x) + row * task.inputs;
  Floats sums[N][Half ? 1 : 2];  // in float32, of even and of odd inputs side by side
  for (int i = 0; i < N; ++i)
    for (Floats& sum : sums[i]) sum = splat(0.f);
  for (int64_t part = 0; part < parts; ++part, block += kSizes[F], kept += kPairs, x += kInputs) {
    Scales scales[2];
    if constexpr (!Kept) ask_for<F>(block), scales[0] = scales_of<F>(block, 0), scales[1] = scales_of<F>(block, 1);
    for (int two = 0; two < kPairs; two += 2)
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
        const Pair<Half> weights = Kept ? kept[two | k] : pair_of<F, Half>(block, scales, two | k);
        const T* inputs = x + 2 * (two | k);
#pragma GCC unroll 32
        for (int i = 0; i < N; ++i)
          if constexpr (Half) {
            const Words both = splat_words(word_at(inputs + i * task.inputs));
            sums[i][0] = added_pairs(sums[i][0], (Words)weights.of[0], both);
          } else {
            const Floats both = pairs_of(inputs + i * task.inputs);
            sums[i][0] = fused(weights.of[0], both, sums[i][0]), sums[i][1] = fused(weights.of[1], both, sums[i][1]);
          }
      }
  }
#pragma GCC unroll 32  // else the compiler keeps sums in memory
  for (int i = 0; i < N; ++i) {
    if constexpr (Half) {
      write<F, true>(task, row + i, group * kOutputs, sums[i][0]);
    } else {
      alignas(64) float pairs[2 * kOutputs], found[kOutputs];
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) store(pairs + kWidth * side, sums[i][side]);
      for (int at = 0; at < kOutputs; ++at) found[at] = pairs[2 * at] + pairs[2 * at + 1];
      write<F, false>(task, row + i, group * kOutputs, load(found));
    }
  }
}

template <int64_t F, bool Half, bool Kept, int N>
void wide_rows(const Task& task, int64_t row, int64_t count, int64_t group, const Pair<Half>* kept) {
  if constexpr (N > 0) {
    if (count != N) return wide_rows<F, Half, Kept, N - 1>(task, row, count, group, kept);
    sums_of_products<F, Half, N, Kept>(task, row, group, kept);
  }
}

// Takes all rows, as many at once as there are registers.
template <int64_t F, bool Half>
void wide(const Task& task, int64_t begin, int64_t end) {
  constexpr int64_t most = Half ? 24 : 12;
  const int64_t turns = (task.rows + most - 1) / most, each = (task.rows + turns - 1) / turns;
  const std::unique_ptr<Pair<Half>[]> kept(turns > 1 ? new Pair<Half>[task.inputs / 2] : nullptr);
  for (int64_t group = begin; group < end; ++group) {
    if (kept) unpack<F, Half>(task, group, kept.get());
    for (int64_t row = 0; row < task.rows; row += each) {
      const int64_t count = std::min(each, task.rows - row);
      kept ? wide_rows<F, Half, true, most>(task, row, count, group, kept.get())
           : wide_rows<F, Half, false, most>(task, row, count, group, nullptr);
    }
  }
}

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
  alignas(64) float sums[kTileRows][kOutputs];
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
