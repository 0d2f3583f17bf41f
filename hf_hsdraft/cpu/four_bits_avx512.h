// Products of a few rows by weights of 4 bits with AVX-512, where there are no tiles.
//
// A weight of a block is one of 16 numbers. These are computed at once for 32 inputs of an output, and a permutation
// picks them: half as many instructions as when each weight is computed. So a line of 64 bytes has 4 outputs of 32
// inputs, as 32 words of 16 bits, an input each. Of 16 outputs, a group, a copy has first 16 scales and 16 least values
// for each 32 inputs, then the lines of the first 4 outputs, of the next 4 and so on.
#pragma once

constexpr int kLine = 64, kOfLine = 4, kMostTogether = 5;  // rows, as there are registers
constexpr int kAhead = 40 * kLine;  // how far ahead the processor is asked for lines

// The bytes of a group's scales and least values for 32 inputs.
template <int64_t F>
constexpr int64_t kOfScales = kSizes[F] - kOutputs / kOfLine * kLine;

// Where an input (of 32) of an output (of 16) has its byte in a group of `parts` times 32 inputs.
template <int64_t F>
INLINE uint8_t* place_in_words(uint8_t* group, int64_t parts, int64_t part, int output, int input) {
  return group + kOfScales<F> * parts + (output / kOfLine * parts + part) * kLine + 2 * input + output % kOfLine / 2;
}

// The scales and the least values of a group, as float32: 16 of each for each 32 inputs.
template <int64_t F>
void read_scales(const uint8_t* from, int64_t parts, float* to) {
  for (int64_t half = 0; half < 2 * parts; ++half, from += kOfScales<F> / 2, to += kOutputs) {
    _mm_prefetch(from + kAhead, _MM_HINT_T0);
    if constexpr (F == kLong4)
      store_words(to, load_words(from));
    else
      store(to, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
}

// 32 inputs of output K of a line: a vector of bfloat16, or two of float32, first those at even places.
template <typename T, int K>
INLINE void pick(Words line, const float* scales, Words* to) {
  const Floats all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Floats table = fused(all, splat(scales[K]), splat(scales[kOutputs + K]));
  if constexpr (sizeof(T) == 2) {
    const auto twice = (__m512i)_mm512_cvtne2ps_pbh(table, table);  // as the fifth bit of a place is the next output's
    to[0] = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4 * K), twice);
  } else {
    to[0] = _mm512_castps_si512(_mm512_permutexvar_ps(_mm512_srli_epi32(line, 4 * K), table));
    to[1] = _mm512_castps_si512(_mm512_permutexvar_ps(_mm512_srli_epi32(line, 16 + 4 * K), table));
  }
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

// The weights of 32 inputs.
template <typename T>
using Weights = Words[kOfLine][sizeof(T) / 2];

template <typename T>
INLINE void pick_all(const uint8_t* line, const float* scales, Weights<T>& to) {
  _mm_prefetch(line + kAhead, _MM_HINT_T0);
  const Words numbers = load_words(line);
  pick<T, 0>(numbers, scales, to[0]), pick<T, 1>(numbers, scales, to[1]);
  pick<T, 2>(numbers, scales, to[2]), pick<T, 3>(numbers, scales, to[3]);
}

// Adds the products of N rows. `x` has a row of `stride` bytes.
template <typename T, int N>
INLINE void add_all(const Weights<T>& weights, const char* x, int64_t stride, Floats (&sums)[N][kOfLine]) {
#pragma GCC unroll 2
  for (int v = 0; v < sizeof(T) / 2; ++v)
#pragma GCC unroll 5
    for (int i = 0; i < N; ++i) {
      const Words inputs = load_words(x + i * stride + v * kLine);
#pragma GCC unroll 4
      for (int k = 0; k < kOfLine; ++k) sums[i][k] = added_products<T>(sums[i][k], weights[k][v], inputs);
    }
}

// The products of N rows by 4 outputs.
template <typename T, int N, bool Kept, bool Keeps>
INLINE void by_four(const Four& four, const char* x, int64_t stride, float* to) {
  Floats sums[N][kOfLine];
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < kOfLine; ++k) sums[i][k] = splat(0.f);
  Weights<T> found, next;
  char* weights = four.weights;
  const auto add = [&] {
    if constexpr (Kept || Keeps)
      for (Words* each = found[0]; each < found[kOfLine]; ++each, weights += kLine)
        Kept ? void(*each = load_words(weights)) : store_words(weights, *each);
  };
  if constexpr (!Kept) pick_all<T>(four.lines, four.scales, found);
  for (int64_t part = 1; part < four.parts; ++part, x += kInputs * sizeof(T)) {
    add();
    if constexpr (!Kept) pick_all<T>(four.lines + part * kLine, four.scales + part * 2 * kOutputs, next);  // meanwhile
    add_all<T, N>(found, x, stride, sums);
    if constexpr (!Kept)
      for (int k = 0; k < kOfLine; ++k) std::copy(next[k], next[k + 1], found[k]);
  }
  add();
  add_all<T, N>(found, x, stride, sums);
#pragma GCC unroll 5
  for (int i = 0; i < N; ++i) _mm_storeu_ps(to + i * kOutputs, four_sums(sums[i]));
}

template <typename T, int N, bool Kept, bool Keeps>
void few_by_four(const Four& four, const char* x, int64_t stride, int64_t rows, float* to) {
  if constexpr (N > 0) {
    if (rows != N) return few_by_four<T, N - 1, Kept, Keeps>(four, x, stride, rows, to);
    by_four<T, N, Kept, Keeps>(four, x, stride, to);
  }
}

// Groups of 16 outputs of all rows, which float32 has in the order of `evens_first`.
template <int64_t F, bool Half>
void by_words(const Task& task, int64_t begin, int64_t end) {
  using T = std::conditional_t<Half, uint16_t, float>;
  constexpr int64_t most = Half ? kMostTogether : kMostTogether - 1;
  const int64_t parts = task.inputs / kInputs, stride = task.inputs * sizeof(T);
  const int64_t turns = (task.rows + most - 1) / most, each = (task.rows + turns - 1) / turns;
  const auto* x = static_cast<const char*>(task.x);
  std::vector<float> scales(2 * kOutputs * parts);
  std::vector<char> kept(turns > 1 ? kOfLine * stride : 0);
  alignas(64) float sums[kMostRows][kOutputs];
  for (int64_t place = begin; place < end; ++place) {
    const uint8_t* group = task.blocks + place * parts * kSizes[F];
    read_scales<F>(group, parts, scales.data());
    for (int quarter = 0; quarter < kOutputs / kOfLine; ++quarter) {
      const Four four{group + (kOfScales<F> + quarter * kLine) * parts, scales.data() + quarter * kOfLine, kept.data(), parts};
      float* to = sums[0] + quarter * kOfLine;
      if (turns == 1) {
        few_by_four<T, most, false, false>(four, x, stride, task.rows, to);
        continue;
      }
      few_by_four<T, most, false, true>(four, x, stride, each, to);
      for (int64_t row = each; row < task.rows; row += each)
        few_by_four<T, most, true, false>(four, x + row * stride, stride, std::min(each, task.rows - row), to + row * kOutputs);
    }
    for (int64_t row = 0; row < task.rows; ++row) write<F, Half>(task, row, place * kOutputs, load(sums[row]));
  }
}

// Of each 32 numbers those at even places, then the others.
Tensor evens_first(const Tensor& x) {
  const Tensor to = empty(x.sizes(), kFloat);
  const float* from = x.data<float>();
  float* y = to.data<float>();
  const Words even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Words odd = _mm512_add_epi32(even, splat_words(1));
  for (int64_t at = 0; at < x.numel(); at += kInputs) {
    const Floats low = load(from + at), high = load(from + at + kWidth);
    store(y + at, _mm512_permutex2var_ps(low, even, high));
    store(y + at + kWidth, _mm512_permutex2var_ps(low, odd, high));
  }
  return to;
}
