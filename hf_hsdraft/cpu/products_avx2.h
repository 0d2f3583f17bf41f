// Products of a few rows with AVX2. An output sums its inputs one after another, whatever the number of rows.
#pragma once

constexpr bool kPairsOfHalves = false;  // whether bfloat16 is multiplied as it is
constexpr bool kHasWords = false;
bool has_tiles() { return false; }
bool is_quick() { return true; }

// A vector of the even outputs of a group and one of the odd ones: a word of a block has one of each.
struct Sides {
  Floats even, odd;
};

// The same of 16 numbers in order.
INLINE Sides by_side(Floats first, Floats second) {
  const auto ordered = [](Floats x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)); };
  return {ordered(_mm256_shuffle_ps(first, second, 0x88)), ordered(_mm256_shuffle_ps(first, second, 0xdd))};
}
INLINE Sides by_side(const float* from) { return by_side(load(from), load(from + kWidth)); }
INLINE Sides halves_by_side(const uint8_t* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return by_side(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
}

// The scale and the least value, or second scale, of each output.
struct Scales {
  Sides scale, least;
};

template <int64_t F>
INLINE Scales scales_of(const uint8_t* block) {
  Scales found{};
  const uint8_t* place = block + (in_4_bits(F) ? 256 : 512);
  if constexpr (F == kBlocks8 || F == kBlocks4) found.scale = halves_by_side(place);
  if constexpr (F == kBlocks4) found.least = halves_by_side(place + 32);
  if constexpr (F >= kLong4) {
    found.scale = by_side(reinterpret_cast<const float*>(place));
    found.least = by_side(reinterpret_cast<const float*>(place + 64));
  }
  return found;
}

// The numbers at a `place` of 4 or 8 bits in each word, as float32, or rounded to bfloat16. `second`: the last 16 inputs.
template <int64_t F, bool Half>
INLINE Floats dequantised(Words words, int place, bool second, Floats scale, Floats least) {
  Floats found = to_floats(in_4_bits(F) ? _mm256_and_si256(_mm256_srli_epi32(words, 4 * place), splat_words(15))
                                        : _mm256_srai_epi32(_mm256_slli_epi32(words, 24 - 8 * place), 24));
  if constexpr (F == kInt8) return found;
  found = F == kBlocks8   ? found * scale
          : F == kHalves8 ? found * (second ? least : scale)
                          : fused(found, scale, least);
  return Half ? in_bfloat16(found) : found;
}

// Calls `each` with the number of each input of a block, and the weights of the outputs.
template <int64_t F, bool Half, typename Each>
INLINE void unpack(const uint8_t* block, const Each& each) {
  ask_for<F>(block);
  constexpr int together = in_4_bits(F) ? 4 : 2;  // inputs of an output in a word
  const auto [scale, least] = scales_of<F>(block);
#pragma GCC unroll 1
  for (int input = 0; input < kInputs; input += together) {
    const Words words = load_words(block + 8 * sizeof(int32_t) * (input / together));
#pragma GCC unroll 4
    for (int i = 0; i < together; ++i) {
      const int place = in_4_bits(F) ? 2 * (i % 2) + i / 2 : i;
      const bool second = input >= kInputs / 2;
      each(input + i, Sides{dequantised<F, Half>(words, place, second, scale.even, least.even),
                            dequantised<F, Half>(words, place + together, second, scale.odd, least.odd)});
    }
  }
}

template <int64_t F, bool Half>
INLINE void write_sides(const Task& task, int64_t row, int64_t group, Sides sums) {
  const Floats low = _mm256_unpacklo_ps(sums.even, sums.odd), high = _mm256_unpackhi_ps(sums.even, sums.odd);
  write<F, Half>(task, row, group * kOutputs, _mm256_permute2f128_ps(low, high, 0x20));
  write<F, Half>(task, row, group * kOutputs + kWidth, _mm256_permute2f128_ps(low, high, 0x31));
}

INLINE Sides added(Sides weights, float input, Sides sums) {
  const Floats inputs = splat(input);
  return {fused(weights.even, inputs, sums.even), fused(weights.odd, inputs, sums.odd)};
}

// 16 outputs of so few rows that weights stay in registers.
template <int64_t F, bool Half, int N>
void directly(const Task& task, int64_t group) {
  const int64_t parts = task.inputs / kInputs, stride = task.inputs;
  const uint8_t* block = task.blocks + group * parts * kSizes[F];
  const float* x = static_cast<const float*>(task.x);
  Sides sums[N];
  for (int i = 0; i < N; ++i) sums[i] = {splat(0.f), splat(0.f)};
  for (int64_t part = 0; part < parts; ++part, block += kSizes[F], x += kInputs)
    unpack<F, Half>(block, [&](int input, Sides weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sums[i] = added(weights, x[i * stride + input], sums[i]);
    });
  for (int i = 0; i < N; ++i) write_sides<F, Half>(task, i, group, sums[i]);
}

// Weights of several blocks, for more rows: [inputs][outputs, even before odd ones].
constexpr int kBlocks = 6, kTogetherRows = 6, kDirectRows = 4;
using Panel = float[kBlocks * kInputs][kOutputs];

// Adds the products of N rows `x` by a panel to their sums.
template <int N>
void add_products(const Panel& panel, const float* x, int64_t stride, int64_t inputs, float (*sums)[kOutputs]) {
  Sides found[N];
  for (int i = 0; i < N; ++i) found[i] = {load(sums[i]), load(sums[i] + kWidth)};
  for (int64_t input = 0; input < inputs; ++input) {
    const Sides weights{load(panel[input]), load(panel[input] + kWidth)};
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) found[i] = added(weights, x[i * stride + input], found[i]);
  }
  for (int i = 0; i < N; ++i) store(sums[i], found[i].even), store(sums[i] + kWidth, found[i].odd);
}

template <int64_t F, bool Half>
void by_panels(const Task& task, int64_t group) {
  const int64_t parts = task.inputs / kInputs, turns = (task.rows + kTogetherRows - 1) / kTogetherRows;
  const int64_t each = (task.rows + turns - 1) / turns;
  const uint8_t* block = task.blocks + group * parts * kSizes[F];
  alignas(64) Panel panel;
  alignas(64) float sums[kMostRows][kOutputs] = {};
  for (int64_t part = 0; part < parts; part += kBlocks) {
    const int64_t blocks = std::min<int64_t>(kBlocks, parts - part);
    for (int64_t at = 0; at < blocks; ++at, block += kSizes[F])
      unpack<F, Half>(block, [&](int input, Sides weights) __attribute__((always_inline)) {
        float* to = panel[at * kInputs + input];
        store(to, weights.even), store(to + kWidth, weights.odd);
      });
    const float* x = static_cast<const float*>(task.x) + part * kInputs;
    const auto add = [&](int row, auto few) {
      add_products<decltype(few)::value>(panel, x + row * task.inputs, task.inputs, blocks * kInputs, sums + row);
    };
    for (int64_t row = 0; row < task.rows; row += each) by_few<kTogetherRows>(row, std::min(each, task.rows - row), add);
  }
  for (int64_t row = 0; row < task.rows; ++row)
    write_sides<F, Half>(task, row, group, {load(sums[row]), load(sums[row] + kWidth)});
}

template <int64_t F, bool Half>
void wide(const Task& task, int64_t begin, int64_t end) {
  for (int64_t group = begin; group < end; ++group) {
    if (task.rows > kDirectRows) by_panels<F, Half>(task, group);
    else by_few<kDirectRows>(0, task.rows, [&](int, auto few) { directly<F, Half, decltype(few)::value>(task, group); });
  }
}
