// Vectors of 16 numbers of 32 bits: those of AVX-512, or pairs of AVX2's where HSDRAFT_AVX2 is defined.
#pragma once

#if defined(HSDRAFT_AVX2)
#define WIDE __attribute__((target("avx2,f16c,fma")))
#else
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma")))
#endif
#define INLINE inline __attribute__((always_inline))

// Two bfloat16, or a float32, as they are.
INLINE int32_t word_at(const void* from) {
  int32_t bits;
  std::memcpy(&bits, from, 4);
  return bits;
}

#if defined(HSDRAFT_AVX2)

bool has_vectors() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

struct Floats {
  __m256 low, high;
};
struct Words {
  __m256i low, high;
};
using Mask = Floats;  // all bits of a lane, or none

WIDE INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
WIDE INLINE void store(float* to, Floats x) { _mm256_storeu_ps(to, x.low), _mm256_storeu_ps(to + 8, x.high); }
WIDE INLINE Words load_words(const void* from) {
  const auto* halves = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
WIDE INLINE void store_words(void* to, Words x) {
  auto* halves = static_cast<__m256i*>(to);
  _mm256_storeu_si256(halves, x.low), _mm256_storeu_si256(halves + 1, x.high);
}
WIDE INLINE Floats all_lanes(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
WIDE INLINE Words all_lanes(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
WIDE INLINE Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
WIDE INLINE Words as_words(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }

WIDE INLINE Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
WIDE INLINE Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
WIDE INLINE Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
WIDE INLINE Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

// a b + c.
WIDE INLINE Floats fused(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

// The second where one is NaN.
WIDE INLINE Floats greater_of(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

WIDE INLINE Floats magnitude(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
WIDE INLINE Floats nearest(Floats x) {
  constexpr int way = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, way), _mm256_round_ps(x.high, way)};
}

WIDE INLINE __m256 power_of_two(__m256 power) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23));
}

// x 2^power, for whole powers from -126 to 0.
WIDE INLINE Floats scaled(Floats x, Floats power) { return x * Floats{power_of_two(power.low), power_of_two(power.high)}; }

template <int Compared>
WIDE INLINE Mask compared(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, Compared), _mm256_cmp_ps(a.high, b.high, Compared)};
}
WIDE INLINE Floats chosen(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, mask.low), _mm256_blendv_ps(no.high, yes.high, mask.high)};
}
WIDE INLINE uint32_t bits_of(Mask mask) { return _mm256_movemask_ps(mask.low) | _mm256_movemask_ps(mask.high) << 8; }

// Lanes that hold a number other than 0.
WIDE INLINE Mask are_set(Words x) {
  const __m256i none = _mm256_setzero_si256(), all = _mm256_set1_epi32(-1);
  return as_floats({_mm256_xor_si256(_mm256_cmpeq_epi32(x.low, none), all),
                    _mm256_xor_si256(_mm256_cmpeq_epi32(x.high, none), all)});
}

WIDE INLINE float first_lane(Floats x) { return _mm256_cvtss_f32(x.low); }
WIDE INLINE float sum_of(Floats x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
WIDE INLINE float greatest_of(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// 16 bytes, as numbers with or without a sign.
WIDE INLINE Words of_bytes(const void* from) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
WIDE INLINE Words of_signed_bytes(const void* from) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
WIDE INLINE Floats to_floats(Words x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

// The low four bits of each number, or the next four.
WIDE INLINE Floats four_bits(Words x, bool next) {
  const __m256i mask = _mm256_set1_epi32(15);
  if (next) x = {_mm256_srli_epi32(x.low, 4), _mm256_srli_epi32(x.high, 4)};
  return to_floats({_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)});
}

// Numbers 8 half to 8 half + 7, each twice.
WIDE INLINE Floats doubled(Floats x, int half) {
  const __m256 own = half ? x.high : x.low;
  return {_mm256_permutevar8x32_ps(own, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
          _mm256_permutevar8x32_ps(own, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}

WIDE INLINE __m256 sums_of_pairs(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(a, b)), 0xd8));
}

// Sums of numbers 0 and 1, 2 and 3, and so on, of two vectors.
WIDE INLINE Floats sums_of_pairs(Floats a, Floats b) {
  return {sums_of_pairs(a.low, a.high), sums_of_pairs(b.low, b.high)};
}

// The pair of numbers at a place, in all pairs.
WIDE INLINE Floats pairs_of(const float* x) {
  const __m256 both = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(x)));
  return {both, both};
}

WIDE INLINE __m256 widened(__m128i bfloat16s) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bfloat16s), 16));
}

// 16 bfloat16, or float16.
WIDE INLINE Floats widened(const void* bfloat16s) {
  const auto* eights = static_cast<const __m128i*>(bfloat16s);
  return {widened(_mm_loadu_si128(eights)), widened(_mm_loadu_si128(eights + 1))};
}
WIDE INLINE Floats of_halves(const void* float16s) {
  const auto* eights = static_cast<const __m128i*>(float16s);
  return {_mm256_cvtph_ps(_mm_loadu_si128(eights)), _mm256_cvtph_ps(_mm_loadu_si128(eights + 1))};
}

// The bits of the nearest bfloat16, ties to even, in the upper half of each lane.
WIDE INLINE __m256i to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), top = _mm256_set1_epi32(0xffff0000);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 unordered = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 all = _mm256_blendv_ps(_mm256_castsi256_ps(near), _mm256_castsi256_ps(quiet), unordered);
  return _mm256_and_si256(_mm256_castps_si256(all), top);
}
WIDE INLINE Floats in_bfloat16(Floats x) { return as_floats({to_bfloat16(x.low), to_bfloat16(x.high)}); }
WIDE INLINE void store_bfloat16(void* to, Floats x) {
  const __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(to_bfloat16(x.low), 16),
                                           _mm256_srli_epi32(to_bfloat16(x.high), 16));
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permute4x64_epi64(both, 0xd8));
}

// The first numbers of pairs of bfloat16, and the second ones.
WIDE INLINE __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
WIDE INLINE __m256 second_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
}

// Adds the products of pairs of bfloat16.
WIDE INLINE Floats added_pairs(Floats sums, Words a, Words b) {
  sums = fused({first_of(a.low), first_of(a.high)}, {first_of(b.low), first_of(b.high)}, sums);
  return fused({second_of(a.low), second_of(a.high)}, {second_of(b.low), second_of(b.high)}, sums);
}

WIDE INLINE void transpose_eight(__m256i* rows) {
  __m256i pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int half = 0; half < 2; ++half) {
      fours[i + 2 * half] = _mm256_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
      fours[i + 2 * half + 1] = _mm256_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
    }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x31);
  }
}

WIDE INLINE void transpose(Words* rows) {
  __m256i corners[2][2][8];
  for (int i = 0; i < 16; ++i) corners[i / 8][0][i % 8] = rows[i].low, corners[i / 8][1][i % 8] = rows[i].high;
  for (auto& side : corners)
    for (auto& corner : side) transpose_eight(corner);
  for (int i = 0; i < 16; ++i) rows[i] = {corners[0][i / 8][i % 8], corners[1][i / 8][i % 8]};
}

#else

bool has_vectors() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}

using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

WIDE INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
WIDE INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
WIDE INLINE Words load_words(const void* from) { return _mm512_loadu_si512(from); }
WIDE INLINE void store_words(void* to, Words x) { _mm512_storeu_si512(to, x); }
WIDE INLINE Floats all_lanes(float x) { return _mm512_set1_ps(x); }
WIDE INLINE Words all_lanes(int32_t x) { return _mm512_set1_epi32(x); }
WIDE INLINE Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
WIDE INLINE Words as_words(Floats x) { return _mm512_castps_si512(x); }

// a b + c.
WIDE INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// The second where one is NaN.
WIDE INLINE Floats greater_of(Floats a, Floats b) { return _mm512_max_ps(a, b); }
WIDE INLINE Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
WIDE INLINE Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 0); }

// x 2^power, for whole powers from -126 to 0.
WIDE INLINE Floats scaled(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }

template <int Compared>
WIDE INLINE Mask compared(Floats a, Floats b) {
  return _mm512_cmp_ps_mask(a, b, Compared);
}
WIDE INLINE Floats chosen(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
WIDE INLINE uint32_t bits_of(Mask mask) { return mask; }

// Lanes that hold a number other than 0.
WIDE INLINE Mask are_set(Words x) { return _mm512_test_epi32_mask(x, x); }
WIDE INLINE float first_lane(Floats x) { return _mm512_cvtss_f32(x); }
WIDE INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
WIDE INLINE float greatest_of(Floats x) { return _mm512_reduce_max_ps(x); }

// 16 bytes, as numbers with or without a sign.
WIDE INLINE Words of_bytes(const void* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
WIDE INLINE Words of_signed_bytes(const void* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
WIDE INLINE Floats to_floats(Words x) { return _mm512_cvtepi32_ps(x); }

// The low four bits of each number, or the next four; a table of 16 numbers is picked by them.
WIDE INLINE Floats four_bits(Words x, bool next) {
  const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(next ? _mm512_srli_epi32(x, 4) : x, all);
}

// Numbers 8 half to 8 half + 7, each twice.
WIDE INLINE Floats doubled(Floats x, int half) {
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(half ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low, x);
}

// Sums of numbers 0 and 1, 2 and 3, and so on, of two vectors.
WIDE INLINE Floats sums_of_pairs(Floats a, Floats b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return _mm512_permutex2var_ps(a, even, b) + _mm512_permutex2var_ps(a, odd, b);
}

// The pair of numbers at a place, in all pairs.
WIDE INLINE Floats pairs_of(const float* x) {
  double both;
  std::memcpy(&both, x, 8);
  return _mm512_castpd_ps(_mm512_set1_pd(both));
}

// 16 bfloat16, or float16.
WIDE INLINE Floats widened(const void* bfloat16s) {
  const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(bfloat16s));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
WIDE INLINE Floats of_halves(const void* float16s) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(float16s)));
}
WIDE INLINE void store_bfloat16(void* to, Floats x) {
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  std::memcpy(to, &rounded, 32);
}
WIDE INLINE Floats in_bfloat16(Floats x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// Adds the products of pairs of bfloat16.
WIDE INLINE Floats added_pairs(Floats sums, Words a, Words b) {
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

WIDE INLINE void transpose(Words* rows) {
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; ++half) {
      fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
      fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
    }
  for (int i = 0; i < 4; ++i) {  // a lane of 128 bits has four rows of one column
    const __m512i a = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    rows[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
    rows[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}

#endif

// e to the power of x <= 0, and 0 where float32 has no normal number.
WIDE INLINE Floats exponential(Floats x) {
  const Mask normal = compared<_CMP_NLE_UQ>(x, all_lanes(-87.f));  // NaN stays NaN
  const Floats whole = nearest(x * all_lanes(1.44269504f));
  Floats rest = fused(whole, all_lanes(-0.693359375f), x);
  rest = fused(whole, all_lanes(2.12194440e-4f), rest);
  Floats sum = all_lanes(1.f / 5040);
  for (const float factor : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f})
    sum = fused(sum, rest, all_lanes(factor));
  return chosen(normal, scaled(sum, whole), all_lanes(0.f));
}

// 1 / (1 + e^-x).
WIDE INLINE Floats sigmoid(Floats x) {
  const Floats one = all_lanes(1.f), small = exponential(all_lanes(0.f) - magnitude(x));
  return chosen(compared<_CMP_LT_OQ>(x, all_lanes(0.f)), small, one) / (one + small);
}

// Adds the products of numbers of T, float32 or pairs of bfloat16, in each word.
template <typename T>
WIDE INLINE Floats added_products(Floats sums, Words a, Words b) {
  if constexpr (sizeof(T) == 2) return added_pairs(sums, a, b);
  return fused(as_floats(a), as_floats(b), sums);
}

// 16 numbers of float32 or of bfloat16, T its bits.
template <typename T>
WIDE INLINE Floats numbers(const void* from) {
  if constexpr (sizeof(T) == 2) return widened(from);
  return load(static_cast<const float*>(from));
}

template <typename T>
WIDE INLINE void put(void* to, Floats from) {
  if constexpr (sizeof(T) == 2) return store_bfloat16(to, from);
  store(static_cast<float*>(to), from);
}

// As a tensor of T would hold it.
template <typename T>
WIDE INLINE Floats rounded(Floats from) {
  if constexpr (sizeof(T) == 2) return in_bfloat16(from);
  return from;
}
