// Attention of few queries over a cache: those of all heads that share keys read each key once.
//
// A task has a few rows, queries of one text and one key head. Keys come in blocks of 64, transposed in registers to
// [size][64], so that a vector holds one number of 16 keys. The softmax is kept running over the blocks (FlashAttention,
// algorithm 1), in float32.
#pragma once

constexpr int kKeys = 64, kParts = kKeys / 16, kMostQueries = 24, kTogether = 6, kMostSize = 256;

struct Attention {
  const char *query, *key, *value, *mask;  // [B, heads, n, size], [B, key heads, length, size] twice, [B, 1, n, length]
  char* out;                               // [B, n, heads, size]
  int64_t query_strides[3], key_strides[3], value_strides[3], mask_strides[2];  // in bytes, of the axes but the last
  int64_t heads, key_heads, n, length, size;
  at::ScalarType mask_type;
  float scaling;
};

// Rows of one task, and what is known of them after the blocks so far.
template <typename T>
struct alignas(64) Rows {
  uint32_t keys[kMostSize * sizeof(T) / 4][kKeys];
  float scores[kMostQueries][kKeys], sums[kMostQueries][kMostSize], highest[kMostQueries], total[kMostQueries];
  T queries[kMostQueries][kMostSize];
};

WIDE INLINE void transpose(__m512i* rows) {
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

// e to the power of x <= 0, and 0 where float32 has no normal number.
WIDE INLINE __m512 exponential(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_NLE_UQ);  // NaN stays NaN
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.f / 5040);
  for (const float factor : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
  return _mm512_maskz_scalef_ps(normal, sum, whole);
}

template <typename T>
WIDE INLINE __m512 numbers(const void* from) {
  if constexpr (sizeof(T) == 2) return widened(from);
  return _mm512_loadu_ps(from);
}

// Keys `first` to `first` + 63 of a head, or 0 beyond the last.
template <typename T>
WIDE void load_keys(const Attention& task, const char* keys, int64_t first, Rows<T>& rows) {
  const int64_t lanes = task.size * sizeof(T) / 4;
  for (int part = 0; part < kParts; ++part)
    for (int64_t lane = 0; lane < lanes; lane += 16) {
      __m512i found[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t place = first + 16 * part + i;
        found[i] = place < task.length ? _mm512_loadu_si512(keys + place * task.key_strides[2] + 4 * lane)
                                       : _mm512_setzero_si512();
      }
      transpose(found);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(&rows.keys[lane + i][16 * part], found[i]);
    }
}

template <typename T, int N>
WIDE void score(const Attention& task, Rows<T>& rows, int row) {
  const int64_t lanes = task.size * sizeof(T) / 4;
  __m512 sums[N][kParts];
  for (int i = 0; i < N; ++i)
    for (int part = 0; part < kParts; ++part) sums[i][part] = _mm512_setzero_ps();
  for (int64_t lane = 0; lane < lanes; ++lane)
#pragma GCC unroll 6
    for (int i = 0; i < N; ++i) {
      int32_t bits;
      std::memcpy(&bits, reinterpret_cast<const char*>(rows.queries[row + i]) + 4 * lane, 4);
      const __m512i query = _mm512_set1_epi32(bits);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const __m512i keys = _mm512_load_si512(&rows.keys[lane][16 * part]);
        if constexpr (sizeof(T) == 2)
          sums[i][part] = _mm512_dpbf16_ps(sums[i][part], (__m512bh)keys, (__m512bh)query);
        else
          sums[i][part] = _mm512_fmadd_ps(_mm512_castsi512_ps(keys), _mm512_castsi512_ps(query), sums[i][part]);
      }
    }
  for (int i = 0; i < N; ++i)
    for (int part = 0; part < kParts; ++part)
      _mm512_store_ps(&rows.scores[row + i][16 * part], _mm512_mul_ps(sums[i][part], _mm512_set1_ps(task.scaling)));
}

// Scores of 16 keys under the mask; those beyond the last key are minus infinity.
WIDE INLINE __m512 masked(const Attention& task, const char* mask, int64_t first, __m512 scores) {
  const int64_t left = task.length - first;
  const __mmask16 inside = left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  if (!mask) return _mm512_mask_mov_ps(nothing, inside, scores);
  if (task.mask_type == at::kBool) {
    const __m128i bytes = _mm_maskz_loadu_epi8(inside, mask + first);
    return _mm512_mask_mov_ps(nothing, _mm_test_epi8_mask(bytes, bytes), scores);
  }
  __m512 added;
  if (task.mask_type == at::kBFloat16) {
    const __m256i bits = _mm256_maskz_loadu_epi16(inside, mask + 2 * first);
    added = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  } else {
    added = _mm512_maskz_loadu_ps(inside, mask + 4 * first);
  }
  return _mm512_mask_mov_ps(nothing, inside, _mm512_add_ps(scores, added));
}

// Turns the scores of a row into weights, relative to its highest score so far.
template <typename T>
WIDE void weigh(const Attention& task, Rows<T>& rows, int row, const char* mask, int64_t first) {
  float* scores = rows.scores[row];
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 found[kParts], most = nothing;
  __mmask16 seen = 0;
  for (int part = 0; part < kParts; ++part) {
    found[part] = masked(task, mask, first + 16 * part, _mm512_load_ps(scores + 16 * part));
    most = _mm512_max_ps(most, found[part]);
    seen |= _mm512_cmp_ps_mask(found[part], nothing, _CMP_NEQ_UQ);
  }
  const float before = rows.highest[row], highest = std::max(before, _mm512_reduce_max_ps(most));
  if (!seen) {
    std::fill_n(scores, kKeys, 0.f);
    return;
  }
  __m512 total = _mm512_setzero_ps();
  for (int part = 0; part < kParts; ++part) {
    found[part] = exponential(_mm512_sub_ps(found[part], _mm512_set1_ps(highest)));
    _mm512_store_ps(scores + 16 * part, found[part]);
    total = _mm512_add_ps(total, found[part]);
  }
  if (highest > before) {
    const float factor = _mm512_cvtss_f32(exponential(_mm512_set1_ps(before - highest)));
    rows.total[row] *= factor, rows.highest[row] = highest;
    for (int64_t at = 0; at < task.size; at += 16)
      _mm512_store_ps(rows.sums[row] + at, _mm512_mul_ps(_mm512_load_ps(rows.sums[row] + at), _mm512_set1_ps(factor)));
  }
  rows.total[row] += _mm512_reduce_add_ps(total);
}

// Adds the weighted values of a block to N rows, 16 C numbers of them from `at` on.
template <typename T, int C, int N>
WIDE void add_values(const Attention& task, Rows<T>& rows, int row, const char* values, int64_t at, int64_t count) {
  __m512 sums[N][C];
  for (int i = 0; i < N; ++i)
    for (int c = 0; c < C; ++c) sums[i][c] = _mm512_load_ps(rows.sums[row + i] + at + 16 * c);
  values += at * sizeof(T);
  for (int64_t key = 0; key < count; ++key, values += task.value_strides[2]) {
    __m512 found[C];
    for (int c = 0; c < C; ++c) found[c] = numbers<T>(values + 16 * c * sizeof(T));
#pragma GCC unroll 6
    for (int i = 0; i < N; ++i) {
      const __m512 weight = _mm512_set1_ps(rows.scores[row + i][key]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[i][c] = _mm512_fmadd_ps(found[c], weight, sums[i][c]);
    }
  }
  for (int i = 0; i < N; ++i)
    for (int c = 0; c < C; ++c) _mm512_store_ps(rows.sums[row + i] + at + 16 * c, sums[i][c]);
}

template <typename T, int N>
void add_all_values(const Attention& task, Rows<T>& rows, int row, const char* values, int64_t count) {
  int64_t at = 0;
  for (; at + 64 <= task.size; at += 64) add_values<T, 4, N>(task, rows, row, values, at, count);
  for (; at < task.size; at += 32) add_values<T, 2, N>(task, rows, row, values, at, count);
}

// Calls `each` with the first of up to `kTogether` rows, and their number as a constant.
template <int N = kTogether, typename Each>
void by_few(int row, int count, const Each& each) {
  if constexpr (N > 0) {
    for (; count >= N; row += N, count -= N) each(row, std::integral_constant<int, N>());
    by_few<N - 1>(row, count, each);
  }
}

template <typename T>
WIDE void write_out(const Attention& task, const Rows<T>& rows, int row, char* out) {
  const __m512 share = _mm512_set1_ps(rows.total[row] == 0 ? 0 : 1 / rows.total[row]);
  for (int64_t at = 0; at < task.size; at += 16, out += 16 * sizeof(T)) {
    const __m512 mixed = _mm512_mul_ps(_mm512_load_ps(rows.sums[row] + at), share);
    if constexpr (sizeof(T) == 2) {
      const __m256bh rounded = _mm512_cvtneps_pbh(mixed);
      std::memcpy(out, &rounded, 32);
    } else {
      _mm512_storeu_ps(out, mixed);
    }
  }
}

// Rows `begin` to `end` of a key head: query i of head g among those that share it is row g * n + i.
template <typename T>
void attend_rows(const Attention& task, int64_t text, int64_t head, int64_t begin, int64_t end) {
  thread_local Rows<T> rows;
  const int count = end - begin;
  const int64_t groups = task.heads / task.key_heads;
  const char* masks[kMostQueries];
  for (int row = 0; row < count; ++row) {
    const int64_t group = (begin + row) / task.n, place = (begin + row) % task.n;
    const char* query = task.query + text * task.query_strides[0] + (head * groups + group) * task.query_strides[1] +
                        place * task.query_strides[2];
    std::memcpy(rows.queries[row], query, task.size * sizeof(T));
    std::fill_n(rows.sums[row], task.size, 0.f);
    rows.highest[row] = -std::numeric_limits<float>::infinity(), rows.total[row] = 0;
    masks[row] = task.mask ? task.mask + text * task.mask_strides[0] + place * task.mask_strides[1] : nullptr;
  }
  const char* keys = task.key + text * task.key_strides[0] + head * task.key_strides[1];
  const char* values = task.value + text * task.value_strides[0] + head * task.value_strides[1];
  for (int64_t first = 0; first < task.length; first += kKeys) {
    load_keys<T>(task, keys, first, rows);
    by_few(0, count, [&](int row, auto few) { score<T, decltype(few)::value>(task, rows, row); });
    for (int row = 0; row < count; ++row) weigh<T>(task, rows, row, masks[row], first);
    const int64_t left = std::min<int64_t>(kKeys, task.length - first);
    const char* block = values + first * task.value_strides[2];
    by_few(0, count, [&](int row, auto few) { add_all_values<T, decltype(few)::value>(task, rows, row, block, left); });
  }
  for (int row = 0; row < count; ++row) {
    const int64_t group = (begin + row) / task.n, place = (begin + row) % task.n;
    const int64_t out = ((text * task.n + place) * task.heads + head * groups + group) * task.size;
    write_out<T>(task, rows, row, task.out + out * sizeof(T));
  }
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double scaling) {
  const bool half = query.scalar_type() == at::kBFloat16;
  const int64_t texts = query.size(0), heads = query.size(1), n = query.size(2), size = query.size(3);
  const int64_t key_heads = key.size(1), length = key.size(2);
  TORCH_CHECK(half || query.scalar_type() == at::kFloat, "expected bfloat16 or float32");
  TORCH_CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(), "dtypes differ");
  TORCH_CHECK(size % 32 == 0 && size <= kMostSize && heads % key_heads == 0, "no such heads");
  TORCH_CHECK(key.sizes() == value.sizes() && key.size(0) == texts && key.size(3) == size, "shapes differ");
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "expected rows without gaps");
  Attention task{};
  if (mask) {
    const auto type = task.mask_type = mask->scalar_type();
    TORCH_CHECK(type == at::kBool || type == at::kBFloat16 || type == at::kFloat, "no such mask");
    TORCH_CHECK(mask->dim() == 4 && mask->size(1) == 1 && mask->size(2) == n && mask->size(3) == length &&
                    (mask->size(0) == 1 || mask->size(0) == texts) && (mask->stride(3) == 1 || length == 1),
                "no mask of this shape");
    const int64_t bytes = mask->element_size();
    task.mask = static_cast<const char*>(mask->const_data_ptr());
    task.mask_strides[0] = mask->size(0) == 1 ? 0 : mask->stride(0) * bytes;
    task.mask_strides[1] = mask->stride(2) * bytes;
  }
  at::Tensor out = at::empty({texts, n, heads, size}, query.options());
  if (!out.numel()) return out;
  task.query = static_cast<const char*>(query.const_data_ptr()), task.key = static_cast<const char*>(key.const_data_ptr());
  task.value = static_cast<const char*>(value.const_data_ptr()), task.out = static_cast<char*>(out.mutable_data_ptr());
  for (int axis = 0; axis < 3; ++axis) {
    task.query_strides[axis] = query.stride(axis) * query.element_size();
    task.key_strides[axis] = key.stride(axis) * key.element_size();
    task.value_strides[axis] = value.stride(axis) * value.element_size();
  }
  task.heads = heads, task.key_heads = key_heads, task.n = n, task.length = length, task.size = size;
  task.scaling = scaling;
  const int64_t rows = heads / key_heads * n, threads = at::get_num_threads();
  int64_t parts = (rows + kMostQueries - 1) / kMostQueries;
  const auto tasks = [&] { return texts * key_heads * parts; };
  while (tasks() < threads && parts < rows) ++parts;  // so that all threads have tasks, and as many as others
  while (tasks() < 4 * threads && tasks() % threads && rows / (parts + 1) >= kTogether) ++parts;
  const int64_t each = (rows + parts - 1) / parts;
  at::parallel_for(0, tasks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t first = place % parts * each, last = std::min(first + each, rows);
      const int64_t text = place / parts / key_heads, head = place / parts % key_heads;
      if (first >= last) continue;
      half ? attend_rows<uint16_t>(task, text, head, first, last) : attend_rows<float>(task, text, head, first, last);
    }
  });
  return out;
}
