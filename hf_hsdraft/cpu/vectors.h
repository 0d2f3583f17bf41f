// Vectors of numbers of 32 bits: 16 with AVX-512, else 8 with AVX2. The compiler is told which the processor has.
#pragma once

#define INLINE inline __attribute__((always_inline))

// Two bfloat16, or a float32, as they are.
INLINE int32_t word_at(const void* from) {
  int32_t bits;
  std::memcpy(&bits, from, 4);
  return bits;
}

#if defined(__AVX512BF16__)

constexpr int kWidth = 16;
using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

bool has_vectors() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}

INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
INLINE Words load_words(const void* from) { return _mm512_loadu_si512(from); }
INLINE void store_words(void* to, Words x) { _mm512_storeu_si512(to, x); }
INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
INLINE Words splat_words(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }

// a b + c.
INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// The second where one is NaN.
INLINE Floats greater_of(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
INLINE Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 0); }

// x 2^power, for whole powers from -126 to 0.
INLINE Floats scaled(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }

template <int Compared>
INLINE Mask compared(Floats a, Floats b) {
  return _mm512_cmp_ps_mask(a, b, Compared);
}
INLINE Floats chosen(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
INLINE uint32_t bits_of(Mask mask) { return mask; }
INLINE Mask are_set(Words x) { return _mm512_test_epi32_mask(x, x); }  // lanes other than 0
INLINE float first_of(Floats x) { return _mm512_cvtss_f32(x); }
INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
INLINE float greatest_of(Floats x) { return _mm512_reduce_max_ps(x); }

// A vector of bytes without a sign.
INLINE Words of_bytes(const uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
INLINE Floats to_floats(Words x) { return _mm512_cvtepi32_ps(x); }

// A vector of bfloat16.
INLINE Floats widened(const void* from) {
  const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
INLINE void store_bfloat16(void* to, Floats x) {
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  std::memcpy(to, &rounded, 32);
}
INLINE Floats in_bfloat16(Floats x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// Adds the products of pairs of bfloat16.
INLINE Floats added_pairs(Floats sums, Words a, Words b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

INLINE void transpose(Words* rows) {
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

#else

constexpr int kWidth = 8;
using Floats = __m256;
using Words = __m256i;
using Mask = __m256;  // all bits of a lane, or none

bool has_vectors() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

INLINE Floats load(const float* from) { return _mm256_loadu_ps(from); }
INLINE void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
INLINE Words load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
INLINE void store_words(void* to, Words x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
INLINE Floats splat(float x) { return _mm256_set1_ps(x); }
INLINE Words splat_words(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Floats as_floats(Words x) { return _mm256_castsi256_ps(x); }
INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats greater_of(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), x); }
INLINE Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Floats scaled(Floats x, Floats power) {
  const __m256i exponents = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23));
}

template <int Compared>
INLINE Mask compared(Floats a, Floats b) {
  return _mm256_cmp_ps(a, b, Compared);
}
INLINE Floats chosen(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }
INLINE uint32_t bits_of(Mask mask) { return _mm256_movemask_ps(mask); }
INLINE Mask are_set(Words x) {
  return as_floats(_mm256_xor_si256(_mm256_cmpeq_epi32(x, _mm256_setzero_si256()), _mm256_set1_epi32(-1)));
}
INLINE float first_of(Floats x) { return _mm256_cvtss_f32(x); }
INLINE float sum_of(Floats x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE float greatest_of(Floats x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE Words of_bytes(const uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
INLINE Floats to_floats(Words x) { return _mm256_cvtepi32_ps(x); }
INLINE Floats widened(const void* from) {
  const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// The nearest bfloat16, ties to even.
INLINE Floats in_bfloat16(Floats x) {
  const __m256i bits = _mm256_castps_si256(x), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const Floats found = chosen(_mm256_cmp_ps(x, x, _CMP_UNORD_Q), as_floats(quiet), as_floats(near));
  return _mm256_and_ps(found, as_floats(_mm256_set1_epi32(0xffff0000)));
}
INLINE void store_bfloat16(void* to, Floats x) {
  const __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(in_bfloat16(x)), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(static_cast<__m128i*>(to), packed);
}
INLINE Floats added_pairs(Floats sums, Words a, Words b) {
  const Words second = _mm256_set1_epi32(0xffff0000);
  sums = fused(as_floats(_mm256_slli_epi32(a, 16)), as_floats(_mm256_slli_epi32(b, 16)), sums);
  return fused(as_floats(_mm256_and_si256(a, second)), as_floats(_mm256_and_si256(b, second)), sums);
}

INLINE void transpose(Words* rows) {
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

#endif

// e to the power of x <= 0, and 0 where float32 has no normal number.
INLINE Floats exponential(Floats x) {
  const Mask normal = compared<_CMP_NLE_UQ>(x, splat(-87.f));  // NaN stays NaN
  const Floats whole = nearest(x * splat(1.44269504f));
  Floats rest = fused(whole, splat(-0.693359375f), x);
  rest = fused(whole, splat(2.12194440e-4f), rest);
  Floats sum = splat(1.f / 5040);
  for (const float factor : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f})
    sum = fused(sum, rest, splat(factor));
  return chosen(normal, scaled(sum, whole), splat(0.f));
}

// 1 / (1 + e^-x).
INLINE Floats sigmoid(Floats x) {
  const Floats one = splat(1.f), small = exponential(splat(0.f) - magnitude(x));
  return chosen(compared<_CMP_LT_OQ>(x, splat(0.f)), small, one) / (one + small);
}

// Adds the products of numbers of T, float32 or pairs of bfloat16, in each word.
template <typename T>
INLINE Floats added_products(Floats sums, Words a, Words b) {
  if constexpr (sizeof(T) == 2) return added_pairs(sums, a, b);
  return fused(as_floats(a), as_floats(b), sums);
}

// A vector of float32 or of bfloat16, T its bits.
template <typename T>
INLINE Floats numbers(const void* from) {
  if constexpr (sizeof(T) == 2) return widened(from);
  return load(static_cast<const float*>(from));
}

template <typename T>
INLINE void put(void* to, Floats from) {
  if constexpr (sizeof(T) == 2) return store_bfloat16(to, from);
  store(static_cast<float*>(to), from);
}

// As a tensor of T would hold it.
template <typename T>
INLINE Floats rounded(Floats from) {
  if constexpr (sizeof(T) == 2) return in_bfloat16(from);
  return from;
}

// Calls `each` with the first of up to N rows, and their number as a constant.
template <int N, typename Each>
void by_few(int row, int count, const Each& each) {
  if constexpr (N > 0) {
    for (; count >= N; row += N, count -= N) each(row, std::integral_constant<int, N>());
    by_few<N - 1>(row, count, each);
  }
}
