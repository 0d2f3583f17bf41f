// Products of a few rows by weights of 4 bits with AVX-512, where there are no tiles.
//
// A weight of a block is one of 16 numbers. These are computed at once for 32 inputs of an output, and a permutation
// picks them: half as many instructions as when each weight is computed. So a line of 64 bytes has 4 outputs of 32
// inputs, as 32 words of 16 bits, an input each. Of 16 outputs, a group, a copy has first 16 scales and 16 least values
// for each 32 inputs, then the lines of the first 4 outputs, of the next 4 and so on. In float32 it does not pay.
#pragma once

constexpr bool kHasWords = true;
constexpr int kMostTogether = 5;  // rows, as there are registers
constexpr int kAhead = 40 * kLine;  // how far ahead the processor is asked for lines

// The scales and the least values of a group, as float32: 16 of each for each 32 inputs.
template <int64_t F>
void read_scales(const uint8_t* from, int64_t parts, float* to) {
  for (int64_t half = 0; half < 2 * parts; ++half, from += of_scales(F) / 2, to += kOutputs) {
    _mm_prefetch(from + kAhead, _MM_HINT_T0);
    if constexpr (F == kLongWords4)
      store_words(to, load_words(from));
    else
      store(to, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
}

// 32 inputs of output K of a line, as bfloat16.
template <int K>
INLINE Words picked(Words line, const float* scales) {
  const Floats all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Floats table = fused(all, splat(scales[K]), splat(scales[kOutputs + K]));
  const auto twice = (__m512i)_mm512_cvtne2ps_pbh(table, table);  // as the fifth bit of a place is the next output's
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4 * K), twice);
}

// The sums of the numbers of each of four vectors.
INLINE __m128 four_sums(const Floats* x) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// What products by 4 outputs read: either their lines and scales, or `weights`, which the rows before have kept there.
struct Four {
  const uint8_t* lines;
  const float* scales;
  char* weights;
  int64_t parts;
};

// The weights of 32 inputs of 4 outputs.
using Weights = Words[kOfLine];

INLINE void pick(const uint8_t* line, const float* scales, Weights& to) {
  _mm_prefetch(line + kAhead, _MM_HINT_T0);
  const Words found = load_words(line);
  to[0] = picked<0>(found, scales), to[1] = picked<1>(found, scales);
  to[2] = picked<2>(found, scales), to[3] = picked<3>(found, scales);
}

// Adds the products of N rows, of `stride` numbers each.
template <int N>
INLINE void add(const Weights& weights, const uint16_t* x, int64_t stride, Floats (&sums)[N][kOfLine]) {
#pragma GCC unroll 5
  for (int i = 0; i < N; ++i) {
    const Words inputs = load_words(x + i * stride);
#pragma GCC unroll 4
    for (int k = 0; k < kOfLine; ++k) sums[i][k] = added_pairs(sums[i][k], weights[k], inputs);
  }
}

// The products of N rows by 4 outputs.
template <int N, bool Kept, bool Keeps>
INLINE void by_four(const Four& four, const uint16_t* x, int64_t stride, float* to) {
  Floats sums[N][kOfLine];
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < kOfLine; ++k) sums[i][k] = splat(0.f);
  Weights found, next;
  char* weights = four.weights;
  const auto take = [&] {
    if constexpr (Kept || Keeps)
      for (int k = 0; k < kOfLine; ++k, weights += kLine)
        Kept ? void(found[k] = load_words(weights)) : store_words(weights, found[k]);
  };
  if constexpr (!Kept) pick(four.lines, four.scales, found);
  for (int64_t part = 1; part < four.parts; ++part, x += kInputs) {
    take();
    if constexpr (!Kept) pick(four.lines + part * kLine, four.scales + part * 2 * kOutputs, next);  // meanwhile
    add<N>(found, x, stride, sums);
    if constexpr (!Kept) std::copy(next, next + kOfLine, found);
  }
  take();
  add<N>(found, x, stride, sums);
#pragma GCC unroll 5
  for (int i = 0; i < N; ++i) _mm_storeu_ps(to + i * kOutputs, four_sums(sums[i]));
}

template <int N, bool Kept, bool Keeps>
void few_by_four(const Four& four, const uint16_t* x, int64_t stride, int64_t rows, float* to) {
  if constexpr (N > 0) {
    if (rows != N) return few_by_four<N - 1, Kept, Keeps>(four, x, stride, rows, to);
    by_four<N, Kept, Keeps>(four, x, stride, to);
  }
}

// Groups of 16 outputs of all rows.
template <int64_t F>
void by_words(const Task& task, int64_t begin, int64_t end) {
  constexpr int64_t most = kMostTogether;
  const int64_t parts = task.inputs / kInputs, stride = task.inputs;
  const int64_t turns = (task.rows + most - 1) / most, each = (task.rows + turns - 1) / turns;
  const auto* x = static_cast<const uint16_t*>(task.x);
  std::vector<float> scales(2 * kOutputs * parts);
  std::vector<char> kept(turns > 1 ? kOfLine * kLine * parts : 0);
  alignas(64) float sums[kMostRows][kOutputs];
  for (int64_t place = begin; place < end; ++place) {
    const uint8_t* group = task.blocks + place * parts * kSizes[F];
    read_scales<F>(group, parts, scales.data());
    for (int quarter = 0; quarter < kOutputs / kOfLine; ++quarter) {
      const Four four{group + (of_scales(F) + quarter * kLine) * parts, scales.data() + quarter * kOfLine, kept.data(), parts};
      float* to = sums[0] + quarter * kOfLine;
      if (turns == 1) {
        few_by_four<most, false, false>(four, x, stride, task.rows, to);
        continue;
      }
      few_by_four<most, false, true>(four, x, stride, each, to);
      for (int64_t row = each; row < task.rows; row += each)
        few_by_four<most, true, false>(four, x + row * stride, stride, std::min(each, task.rows - row), to + row * kOutputs);
    }
    for (int64_t row = 0; row < task.rows; ++row) write<F, true>(task, row, place * kOutputs, load(sums[row]));
  }
}
