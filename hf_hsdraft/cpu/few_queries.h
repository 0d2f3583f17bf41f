// Attention over a cache: queries of all heads that share a key head read each key once.
//
// A task has a few rows, queries of one text and one key head. Keys come in blocks, transposed in registers to
// [size][keys], so that a vector holds one number of several keys. The softmax is kept running over the blocks (FlashAttention,
// algorithm 1), in float32.
#pragma once

constexpr int kParts = 4, kKeys = kParts * kWidth, kMostQueries = 24, kMostSize = 256;
constexpr int kTogether = kWidth == 16 ? 6 : 3;  // rows, as there are registers

struct Attention {
  const char *query, *key, *value, *mask;  // [B, heads, n, size], [B, key heads, length, size] twice, [B, 1, n, length]
  char* out;                               // [B, n, heads, size]
  int64_t query_strides[3], key_strides[3], value_strides[3], mask_strides[2];  // in bytes, of the axes but the last
  int64_t heads, key_heads, n, length, size;
  Type mask_type;
  float scaling;
};

// Rows of one task, and what is known of them after the blocks so far.
template <typename T>
struct alignas(64) Rows {
  uint32_t keys[kMostSize * sizeof(T) / 4][kKeys];
  float scores[kMostQueries][kKeys], sums[kMostQueries][kMostSize], highest[kMostQueries], total[kMostQueries];
  T queries[kMostQueries][kMostSize];
};

// A block of keys of a head from `first` on, or 0 beyond the last.
template <typename T>
void load_keys(const Attention& task, const char* keys, int64_t first, Rows<T>& rows) {
  const int64_t lanes = task.size * sizeof(T) / 4;
  for (int part = 0; part < kParts; ++part)
    for (int64_t lane = 0; lane < lanes; lane += kWidth) {
      Words found[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        const int64_t place = first + kWidth * part + i;
        found[i] = place < task.length ? load_words(keys + place * task.key_strides[2] + 4 * lane) : splat_words(0);
      }
      transpose(found);
      for (int i = 0; i < kWidth; ++i) store_words(&rows.keys[lane + i][kWidth * part], found[i]);
    }
}

template <typename T, int N>
void score(const Attention& task, Rows<T>& rows, int row) {
  const int64_t lanes = task.size * sizeof(T) / 4;
  Floats sums[N][kParts];
  for (int i = 0; i < N; ++i)
    for (int part = 0; part < kParts; ++part) sums[i][part] = splat(0.f);
  for (int64_t lane = 0; lane < lanes; ++lane)
#pragma GCC unroll 6
    for (int i = 0; i < N; ++i) {
      const Words query = splat_words(word_at(reinterpret_cast<const char*>(rows.queries[row + i]) + 4 * lane));
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        sums[i][part] = added_products<T>(sums[i][part], load_words(&rows.keys[lane][kWidth * part]), query);
      }
    }
  for (int i = 0; i < N; ++i)
    for (int part = 0; part < kParts; ++part)
      store(&rows.scores[row + i][kWidth * part], sums[i][part] * splat(task.scaling));
}

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Scores of a vector of keys under the mask; those from `end` on are minus infinity.
INLINE Floats masked(const Attention& task, const char* mask, int64_t first, int64_t end, Floats scores) {
  const int64_t size = task.mask_type == kBool ? 1 : task.mask_type == kBFloat16 ? 2 : 4;
  const void* own = mask ? mask + size * first : nullptr;
  alignas(64) uint8_t copy[4 * kWidth];
  if (end - first < kWidth) {
    const int64_t inside = std::max<int64_t>(end - first, 0);
    alignas(64) float found[kWidth];
    store(found, scores);
    std::fill_n(found + inside, kWidth - inside, kNothing);
    scores = load(found);
    std::fill_n(copy, 4 * kWidth, 0);
    if (mask && inside) std::memcpy(copy, own, size * inside);
    own = copy;
  }
  if (!mask) return scores;
  if (size == 1) return chosen(are_set(of_bytes(static_cast<const uint8_t*>(own))), scores, splat(kNothing));
  return scores + (size == 2 ? widened(own) : load(static_cast<const float*>(own)));
}

// Turns the scores of a row into weights, relative to its highest score so far.
template <typename T>
void weigh(const Attention& task, Rows<T>& rows, int row, const char* mask, int64_t first, int64_t end) {
  float* scores = rows.scores[row];
  const Floats nothing = splat(kNothing);
  Floats found[kParts], most = nothing;
  uint32_t seen = 0;
  for (int part = 0; part < kParts; ++part) {
    found[part] = masked(task, mask, first + kWidth * part, end, load(scores + kWidth * part));
    most = greater_of(most, found[part]);
    seen |= bits_of(compared<_CMP_NEQ_UQ>(found[part], nothing));
  }
  const float before = rows.highest[row], highest = std::max(before, greatest_of(most));
  if (!seen) {
    std::fill_n(scores, kKeys, 0.f);
    return;
  }
  Floats total = splat(0.f);
  for (int part = 0; part < kParts; ++part) {
    found[part] = exponential(found[part] - splat(highest));
    store(scores + kWidth * part, found[part]);
    total = total + found[part];
  }
  if (highest > before) {
    const float factor = first_of(exponential(splat(before - highest)));
    rows.total[row] *= factor, rows.highest[row] = highest;
    for (int64_t at = 0; at < task.size; at += kWidth)
      store(rows.sums[row] + at, load(rows.sums[row] + at) * splat(factor));
  }
  rows.total[row] += sum_of(total);
}

// Adds the weighted values of a block to N rows, C vectors of them from `at` on.
template <typename T, int C, int N>
void add_values(const Attention& task, Rows<T>& rows, int row, const char* values, int64_t at, int64_t count) {
  Floats sums[N][C];
  for (int i = 0; i < N; ++i)
    for (int c = 0; c < C; ++c) sums[i][c] = load(rows.sums[row + i] + at + kWidth * c);
  values += at * sizeof(T);
  for (int64_t key = 0; key < count; ++key, values += task.value_strides[2]) {
    Floats found[C];
    for (int c = 0; c < C; ++c) found[c] = numbers<T>(values + kWidth * c * sizeof(T));
#pragma GCC unroll 6
    for (int i = 0; i < N; ++i) {
      const Floats weight = splat(rows.scores[row + i][key]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[i][c] = fused(found[c], weight, sums[i][c]);
    }
  }
  for (int i = 0; i < N; ++i)
    for (int c = 0; c < C; ++c) store(rows.sums[row + i] + at + kWidth * c, sums[i][c]);
}

template <typename T, int N>
void add_all_values(const Attention& task, Rows<T>& rows, int row, const char* values, int64_t count) {
  int64_t at = 0;
  for (; at + 4 * kWidth <= task.size; at += 4 * kWidth) add_values<T, 4, N>(task, rows, row, values, at, count);
  for (; at < task.size; at += 2 * kWidth) add_values<T, 2, N>(task, rows, row, values, at, count);
}

template <typename T>
void write_out(const Attention& task, const Rows<T>& rows, int row, char* out) {
  const Floats share = splat(rows.total[row] == 0 ? 0.f : 1 / rows.total[row]);
  for (int64_t at = 0; at < task.size; at += kWidth, out += kWidth * sizeof(T)) put<T>(out, load(rows.sums[row] + at) * share);
}

// Rows `begin` to `end` of a key head: query i of head g among those that share it is row g * n + i. Without a mask it sees
// the keys up to its own, of which there are n.
template <typename T>
void attend_rows(const Attention& task, int64_t text, int64_t head, int64_t begin, int64_t end) {
  thread_local Rows<T> rows;
  const int count = end - begin;
  const int64_t groups = task.heads / task.key_heads;
  const char* masks[kMostQueries];
  int64_t ends[kMostQueries];
  for (int row = 0; row < count; ++row) {
    const int64_t group = (begin + row) / task.n, place = (begin + row) % task.n;
    const char* query = task.query + text * task.query_strides[0] + (head * groups + group) * task.query_strides[1] +
                        place * task.query_strides[2];
    std::memcpy(rows.queries[row], query, task.size * sizeof(T));
    std::fill_n(rows.sums[row], task.size, 0.f);
    rows.highest[row] = -std::numeric_limits<float>::infinity(), rows.total[row] = 0;
    masks[row] = task.mask ? task.mask + text * task.mask_strides[0] + place * task.mask_strides[1] : nullptr;
    ends[row] = task.mask ? task.length : task.length - task.n + place + 1;
  }
  const int64_t length = *std::max_element(ends, ends + count);
  const char* keys = task.key + text * task.key_strides[0] + head * task.key_strides[1];
  const char* values = task.value + text * task.value_strides[0] + head * task.value_strides[1];
  for (int64_t first = 0; first < length; first += kKeys) {
    load_keys<T>(task, keys, first, rows);
    by_few<kTogether>(0, count, [&](int row, auto few) { score<T, decltype(few)::value>(task, rows, row); });
    for (int row = 0; row < count; ++row) weigh<T>(task, rows, row, masks[row], first, ends[row]);
    const int64_t left = std::min<int64_t>(kKeys, length - first);
    const char* block = values + first * task.value_strides[2];
    by_few<kTogether>(0, count, [&](int row, auto few) { add_all_values<T, decltype(few)::value>(task, rows, row, block, left); });
  }
  for (int row = 0; row < count; ++row) {
    const int64_t group = (begin + row) / task.n, place = (begin + row) % task.n;
    const int64_t out = ((text * task.n + place) * task.heads + head * groups + group) * task.size;
    write_out<T>(task, rows, row, task.out + out * sizeof(T));
  }
}

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value,
                  const Maybe& mask, double scaling) {
  const bool half = query.scalar_type() == kBFloat16;
  const int64_t texts = query.size(0), heads = query.size(1), n = query.size(2), size = query.size(3);
  const int64_t key_heads = key.size(1), length = key.size(2);
  CHECK(half || query.scalar_type() == kFloat, "expected bfloat16 or float32");
  CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(), "dtypes differ");
  CHECK(size % 32 == 0 && size <= kMostSize && heads % key_heads == 0, "no such heads");
  CHECK(key.sizes() == value.sizes() && key.size(0) == texts && key.size(3) == size, "shapes differ");
  CHECK(mask || n <= length, "expected a key for each query");
  CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "expected rows without gaps");
  Attention task{};
  if (mask) {
    const auto type = task.mask_type = mask->scalar_type();
    CHECK(type == kBool || type == kBFloat16 || type == kFloat, "no such mask");
    CHECK(mask->dim() == 4 && mask->size(1) == 1 && mask->size(2) == n && mask->size(3) == length &&
                    (mask->size(0) == 1 || mask->size(0) == texts) && (mask->stride(3) == 1 || length == 1),
                "no mask of this shape");
    const int64_t bytes = mask->element_size();
    task.mask = static_cast<const char*>(mask->data());
    task.mask_strides[0] = mask->size(0) == 1 ? 0 : mask->stride(0) * bytes;
    task.mask_strides[1] = mask->stride(2) * bytes;
  }
  Tensor out = empty({texts, n, heads, size}, query.scalar_type());
  if (!out.numel()) return out;
  task.query = static_cast<const char*>(query.data()), task.key = static_cast<const char*>(key.data());
  task.value = static_cast<const char*>(value.data()), task.out = static_cast<char*>(out.data());
  for (int axis = 0; axis < 3; ++axis) {
    task.query_strides[axis] = query.stride(axis) * query.element_size();
    task.key_strides[axis] = key.stride(axis) * key.element_size();
    task.value_strides[axis] = value.stride(axis) * value.element_size();
  }
  task.heads = heads, task.key_heads = key_heads, task.n = n, task.length = length, task.size = size;
  task.scaling = scaling;
  const int64_t rows = heads / key_heads * n, threads = thread_count();
  int64_t parts = (rows + kMostQueries - 1) / kMostQueries;
  const auto tasks = [&] { return texts * key_heads * parts; };
  while (tasks() < threads && parts < rows) ++parts;  // so that all threads have tasks, and as many as others
  while (tasks() < 4 * threads && tasks() % threads && rows / (parts + 1) >= kTogether) ++parts;
  const int64_t each = (rows + parts - 1) / parts;
  parallel_for(0, tasks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t part = place % parts, turn = part % 2 ? parts - 1 - part / 2 : part / 2;  // later rows see more
      const int64_t first = turn * each, last = std::min(first + each, rows);
      const int64_t text = place / parts / key_heads, head = place / parts % key_heads;
      if (first >= last) continue;
      half ? attend_rows<uint16_t>(task, text, head, first, last) : attend_rows<float>(task, text, head, first, last);
    }
  });
  return out;
}
