// Products of a few rows by weights of 8 or 4 bits; see small_weights.py for the layout of the copies.
//
// A block is 16 outputs of 32 inputs: 16 vectors, each of 2 inputs by 16 outputs, pairs of inputs side by side, as the
// dot products of AVX-512 and AMX read them. They are dequantised to the inputs' dtype in registers.
#include <dlfcn.h>
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#include "torch_abi.h"
#include "vectors.h"

// Blocks of 8 or 4 bits, each followed by a scale of each output, float16, and with 4 bits by a least value. Long ones
// have both as float32, and kHalves8 a second scale for the last 16 inputs in place of the least value. Words are in the
// order of four_bits_avx512.h, for bfloat16 alone.
enum Format : int64_t { kInt8, kBlocks8, kBlocks4, kLong4, kLong8, kHalves8, kWords4, kLongWords4, kFormats };
constexpr int64_t kSizes[] = {512, 512 + 32, 256 + 64, 256 + 128, 512 + 128, 512 + 128, 256 + 64, 256 + 128};  // of a block
constexpr bool in_words(int64_t format) { return format >= kWords4; }
constexpr bool in_4_bits(int64_t format) { return format == kBlocks4 || format == kLong4 || in_words(format); }
constexpr int kOutputs = 16, kInputs = 32, kPairs = 16, kTileRows = 32;
constexpr int kMostRows = 96;  // at once: their inputs stay in a core's cache while it reads weights
constexpr int64_t of_scales(int64_t format) { return kSizes[format] - kOutputs * kInputs / (in_4_bits(format) ? 2 : 1); }

constexpr int kLine = 64, kOfLine = 4;  // bytes and outputs of a line of words

struct Task {
  const void* x;         // [rows, inputs]
  const uint8_t* blocks;  // [outputs / 16, inputs / 32, bytes of a block]
  const float* scales;    // [outputs] of kInt8
  const void* bias;       // [outputs], or null
  void* y;                // [rows, outputs]
  int64_t rows, inputs, outputs;
};

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

template <int64_t F>
void by_words(const Task& task, int64_t begin, int64_t end);

#if defined(__AVX512BF16__)
#include "products_avx512.h"
#include "four_bits_avx512.h"
#else
#include "products_avx2.h"
#endif

template <int64_t F>
void run(const Task& task, bool half, bool with_tiles) {
  const int64_t groups = task.outputs / kOutputs;
  const int64_t grain = std::max<int64_t>(1, 32768 / (task.inputs * kOutputs));
  parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    if constexpr (in_words(F)) {
      if constexpr (kHasWords) by_words<F>(task, begin, end);
    } else if (!half) {
      wide<F, false>(task, begin, end);
    } else {
#if defined(__AVX512BF16__)
      if (with_tiles) return task.rows > 16 ? tiles<F, true>(task, begin, end) : tiles<F, false>(task, begin, end);
#endif
      wide<F, true>(task, begin, end);
    }
  });
}

Tensor product(const Tensor& x, const Tensor& blocks, const Maybe& scales,
                   const Maybe& bias, int64_t outputs, int64_t format, bool by_tiles) {
  const int64_t inputs = x.size(-1), rows = inputs ? x.numel() / inputs : 0;
  const bool half = x.scalar_type() == kBFloat16;
  CHECK(half || x.scalar_type() == kFloat, "expected bfloat16 or float32");
  CHECK(format >= 0 && format < kFormats && inputs % kInputs == 0 && outputs % kOutputs == 0, "no such layout");
  CHECK(!in_words(format) || (half && kHasWords), "expected bfloat16 and AVX-512 for this layout");
  CHECK(blocks.numel() == outputs / kOutputs * (inputs / kInputs) * kSizes[format], "not of this shape");
  CHECK(blocks.is_contiguous() && (format != kInt8 || (scales && scales->numel() == outputs)), "no scales");
  CHECK(!bias || (bias->numel() == outputs && bias->scalar_type() == x.scalar_type() && bias->is_contiguous()),
              "no such bias");
  Sizes sizes = x.sizes();
  sizes.back() = outputs;
  const Tensor y = empty(sizes, x.scalar_type()), from = kPairsOfHalves || !half ? x.contiguous() : copied(x, kFloat);
  Task task{from.data(), blocks.data<uint8_t>(), scales ? scales->data<float>() : nullptr,
            bias ? bias->data() : nullptr, y.data(), 0, inputs, outputs};
  const int64_t size = half ? 2 : 4, size_of_x = from.element_size();
  const bool with_tiles = half && by_tiles && has_tiles();
  const int64_t most = with_tiles ? kTileRows : kMostRows;
  for (int64_t row = 0; row < rows; row += most) {
    Task part = task;
    part.rows = std::min(rows - row, most);
    part.x = static_cast<const char*>(task.x) + row * inputs * size_of_x;
    part.y = static_cast<char*>(task.y) + row * outputs * size;
    constexpr decltype(&run<kInt8>) runs[] = {run<kInt8>,  run<kBlocks8>, run<kBlocks4>, run<kLong4>,
                                              run<kLong8>, run<kHalves8>, run<kWords4>,  run<kLongWords4>};
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

// Sums of the bits of each row of all matrices, in words of 8 bytes; four of each row whose words are divisible by four.
Tensor sums(const std::vector<Tensor>& matrices) {
  int64_t size = 0;
  const auto words_of = [](const Tensor& rows) { return static_cast<int64_t>(rows.nbytes()) / 8 / rows.size(0); };
  const auto parts_of = [](int64_t words) { return words % 4 ? 1 : 4; };
  for (const Tensor& rows : matrices) {
    CHECK(rows.dim() == 2 && rows.numel() && rows.is_contiguous() &&
              words_of(rows) * rows.size(0) * 8 == static_cast<int64_t>(rows.nbytes()),
          "expected rows of whole words");
    size += rows.size(0) * parts_of(words_of(rows));
  }
  Tensor found = empty({size}, kLong);
  int64_t* to = size ? found.data<int64_t>() : nullptr;
  for (const Tensor& rows : matrices) {
    const auto* from = static_cast<const uint64_t*>(rows.data());
    const int64_t parts = parts_of(words_of(rows)), words = words_of(rows) / parts, count = rows.size(0) * parts;
    parallel_for(0, count, std::max<int64_t>(1, 32768 / words), [&](int64_t begin, int64_t end) {
      sum_words(from + begin * words, to + begin, end - begin, words);
    });
    to += count;
  }
  return found;
}

#include "gguf_blocks.h"
#include "few_queries.h"
#include "decoder.h"
#include "drafts.h"

const std::vector<const char*> kAlsoPacked = {"CPU", "MkldnnCPU"};  // which take torch's packed copies too

bool runs_here() { return has_vectors(); }
bool runs_tiles() { return has_vectors() && has_tiles(); }
bool runs_quickly() { return has_vectors() && is_quick(); }

// The name of the library, which a compiler is given, has a digest of these files: another version may be loaded too.
#define NAME(name) #name
#define NAME_OF(name) NAME(name)
const Library library(
    NAME_OF(HSDRAFT_LIBRARY),
    {{"runs_here", "() -> bool", Operator<&runs_here>::run, {"CompositeExplicitAutograd"}},
     {"has_tiles", "() -> bool", Operator<&runs_tiles>::run, {"CompositeExplicitAutograd"}},
     {"is_quick", "() -> bool", Operator<&runs_quickly>::run, {"CompositeExplicitAutograd"}},
     {"product",
      "(Tensor x, Tensor blocks, Tensor? scales, Tensor? bias, int outputs, int format, bool by_tiles) -> Tensor",
      Operator<&product>::run},
     {"sums", "(Tensor[] matrices) -> Tensor", Operator<&sums>::run},
     {"blocks_of", "(Tensor raw, Tensor weight, Tensor order, int kind) -> (Tensor, int)", Operator<&blocks_of>::run},
     {"attend", "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling) -> Tensor",
      Operator<&attend>::run},
     {"decode",
      "(Tensor x, Tensor cos, Tensor sin, Tensor? mask, Tensor? last, Tensor?[] parts, Tensor[] held, Tensor[] rooms,"
      " int[] wanted, int[] formats, int[] form, float[] scales) -> Tensor[]",
      Operator<&decode>::run, kAlsoPacked},
     {"roll_out",
      "(Tensor taps, Tensor embeds, Tensor positions, Tensor frequencies, Tensor?[] parts, Tensor[] rooms,"
      " int length, int ahead, int window, int[] formats, int[] form, float eps) -> Tensor",
      Operator<&roll_out>::run, kAlsoPacked},
     {"search",
      "(Tensor logits, Tensor projected, Tensor paths, bool rootless, Tensor roots, Tensor vocab_ids, Tensor table,"
      " Tensor up, Tensor?[] parts, int[] formats, int[] sizes, float eps, float temperature) -> (Tensor, int[])",
      Operator<&search>::run, kAlsoPacked}});

}  // namespace
