// Lays blocks of GGUF files out as few_rows.cpp multiplies them, if they hold a weight's numbers exactly.
#pragma once

// Blocks of GGUF files: their sizes in bytes and in weights, and how they are laid out here.
enum Kind : int64_t { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kIQ4_NL, kQ4_K, kQ5_K, kQ6_K };
struct Source {
  int64_t bytes, weights, format;
};
constexpr Source kSources[] = {{34, 32, kBlocks8},  {18, 32, kBlocks4},  {20, 32, kBlocks4},
                               {22, 32, kBlocks8},  {24, 32, kLong8},    {18, 32, kBlocks8},
                               {144, 256, kLong4},  {176, 256, kLong8},  {210, 256, kHalves8}};
constexpr int8_t kLevels[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // of IQ4_NL

// The bits of the nearest float16.
INLINE uint16_t as_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

float half_at(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, 2);
  return _cvtsh_ss(bits);
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
    found.added = affine ? half_at(raw + 2) : K == kQ4_0 ? _cvtsh_ss(as_half(-8 * half_at(raw))) : 0;
  }
  return found;
}

// The bits of a float32, or of the nearest bfloat16, ties to even.
template <typename W>
INLINE W bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return sizeof(W) == 4 ? bits : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Lays a row out, its `lane` of 16 in a group, and returns whether its weights, by their bits, are these.
template <int64_t K, typename W>
bool lay_out(const uint8_t* raw, const W* weight, uint8_t* group, int lane, int64_t parts, bool words) {
  constexpr int64_t F = kSources[K].format, size = kSizes[F];
  constexpr W magnitude = static_cast<W>(~W(0)) >> 1;
  uint32_t wrong = 0;
  for (int64_t part = 0; part < parts; ++part, weight += kInputs) {
    uint8_t* blocks = group + part * size;
    const Part found = part_of<K>(raw, part);
    const int8_t* numbers = found.numbers;
    for (int i = 0; i < kInputs; ++i) {  // zeros of both signs are the same
      const W bits = bits_of<W>(F != kHalves8 ? found.factor * numbers[i] + found.added
                                              : numbers[i] * (i < 16 ? found.factor : found.added));
      wrong |= (bits | weight[i]) & magnitude ? bits ^ weight[i] : 0;
    }
    uint8_t* scales = words ? group + part * of_scales(F) : blocks + size - of_scales(F);
    if (words) {
      uint8_t* line = group + of_scales(F) * parts + (lane / kOfLine * parts + part) * kLine + lane % kOfLine / 2;
      for (int i = 0; i < kInputs; ++i, line += 2) *line = lane % 2 ? *line | numbers[i] << 4 : numbers[i];
    } else if constexpr (in_4_bits(F)) {
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
      const uint16_t halves[] = {as_half(found.factor), as_half(found.added)};
      std::memcpy(scales + 2 * lane, halves, 2);
      if constexpr (F == kBlocks4) std::memcpy(scales + 32 + 2 * lane, halves + 1, 2);
    }
  }
  return wrong == 0;
}

template <int64_t K, typename W>
bool lay_all_out(const uint8_t* raw, const void* weight, const int64_t* order, uint8_t* to, int64_t outputs,
                 int64_t inputs, bool words) {
  const int64_t raw_row = inputs / kSources[K].weights * kSources[K].bytes, parts = inputs / kInputs;
  std::atomic<bool> same{true};
  parallel_for(0, outputs / kOutputs, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kOutputs; row < end * kOutputs && same; ++row)
      if (!lay_out<K>(raw + order[row] * raw_row, static_cast<const W*>(weight) + row * inputs,
                      to + row / kOutputs * parts * kSizes[kSources[K].format], row % kOutputs, parts, words))
        same = false;
  });
  return same;
}

// By kind, for bfloat16 and for float32.
template <typename W>
constexpr decltype(&lay_all_out<kQ8_0, W>) kLayOut[] = {
    lay_all_out<kQ8_0, W>,   lay_all_out<kQ4_0, W>, lay_all_out<kQ4_1, W>, lay_all_out<kQ5_0, W>, lay_all_out<kQ5_1, W>,
    lay_all_out<kIQ4_NL, W>, lay_all_out<kQ4_K, W>, lay_all_out<kQ5_K, W>, lay_all_out<kQ6_K, W>};

// `raw` is [outputs, bytes]; row i of `weight`, bfloat16 or float32, is row order[i] of it. The copy, which is empty if the
// weights differ, and its format.
std::tuple<Tensor, int64_t> blocks_of(const Tensor& raw, const Tensor& weight, const Tensor& order, int64_t kind) {
  CHECK(kind >= 0 && kind <= kQ6_K, "no such blocks");
  const Source source = kSources[kind];
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  CHECK(raw.is_contiguous() && raw.size(0) == outputs && raw.size(1) == inputs / source.weights * source.bytes,
              "not of this shape");
  CHECK(weight.is_contiguous() && outputs % kOutputs == 0 && inputs % source.weights == 0, "no such layout");
  const auto type = weight.scalar_type();
  CHECK(type == kBFloat16 || type == kFloat, "expected bfloat16 or float32");
  Tensor blocks = empty({outputs / kOutputs, inputs / kInputs, kSizes[source.format]}, raw.scalar_type());
  const bool words = kHasWords && !has_tiles() && type == kBFloat16 && in_4_bits(source.format);
  const auto lay = type == kFloat ? kLayOut<uint32_t>[kind] : kLayOut<uint16_t>[kind];
  const bool same = lay(raw.data<uint8_t>(), weight.data(), order.data<int64_t>(),
                        blocks.data<uint8_t>(), outputs, inputs, words);
  const int64_t format = !words ? source.format : source.format == kBlocks4 ? kWords4 : kLongWords4;
  return {same ? blocks : empty({0}, kByte), format};
}
