// Drafts of a hidden-state drafter: its trunk (trunk.py) over one text, and beam search with its path injector
// (network.py), to the same results but for rounding.
#pragma once

// Of a norm and the product behind it: the norm's weights, and copy and scales of the product's.
constexpr int64_t kOfNormed = 3;

// Cosines and sines `[2, positions, size]` of rotations.
template <typename T>
Tensor angles_of(const std::vector<int64_t>& positions, const Tensor& frequencies, const Tensor& like) {
  const int64_t half = frequencies.numel(), count = positions.size();
  Tensor both = empty({2, count, 2 * half}, like.scalar_type());
  const float* turns = read<float>(frequencies);
  T *cos = written<T>(both), *sin = cos + 2 * count * half;
  std::vector<float> cosines(half), sines(half);
  for (int64_t row = 0; row < count; ++row, cos += 2 * half, sin += 2 * half) {
    for (int64_t at = 0; at < half; ++at) {
      const float angle = static_cast<float>(positions[row]) * turns[at];
      cosines[at] = std::cos(angle), sines[at] = std::sin(angle);
    }
    for (int64_t at = 0; at < half; at += kWidth)
      for (T* side : {cos, cos + half, sin, sin + half})
        put<T>(side + at, load((side == cos || side == cos + half ? cosines : sines).data() + at));
  }
  return both;
}

// Where a drafter's parts begin: its inputs and sets of a step have kOfNormed tensors each, layers kOfLayer behind them.
struct TrunkForm {
  int64_t layers, rolled, sets, own;  // layers; those of a step; sets of a step's parts; the first one's first layer
};

template <typename T>
struct Trunk {
  Decoder decoder;
  TrunkForm form;
  const Maybe* parts;
  const int64_t* formats;  // 1 of each of the inputs and the sets, kProducts of each layer
  const std::vector<Tensor>& rooms;
  int64_t window;

  Tensor product(int64_t place, const Tensor& x, int64_t size) const {
    const Maybe* own = parts + place * kOfNormed;
    return multiplied(normed<T>(x, own[0], size, decoder.eps, false), own[1], own[2], Maybe(), formats[place]);
  }

  // Which of `n` positions behind `length` sees which slots from `begin` on.
  Tensor mask_of(int64_t n, int64_t length, int64_t begin) const {
    const int64_t all = length + n - begin;
    Tensor mask = empty({1, 1, n, all}, kBool);
    bool* seen = mask.data<bool>();
    for (int64_t row = 0; row < n; ++row)
      for (int64_t at = 0, last = length + row - begin; at < all; ++at)
        *seen++ = at <= last && at > last - window;
    return mask;
  }

  // Through `count` layers from `first` on, whose keys and values are those of the last rooms.
  Tensor through(int64_t first, int64_t count, Tensor x, const Tensor& cos, const Tensor& sin,
                     int64_t length) const {
    const int64_t begin = std::max<int64_t>(length + 1 - window, 0), ahead = 1 + form.sets;
    const Maybe mask = x.size(1) > 1 ? Maybe(mask_of(x.size(1), length, begin)) : Maybe();
    for (int64_t i = 0; i < count; ++i) {
      const Layer<T> layer{decoder, parts + ahead * kOfNormed + (first + i) * kOfLayer,
                           formats + ahead + (first + i) * kProducts};
      const auto room = [&](int64_t side) {
        const Tensor& whole = rooms[rooms.size() - 2 * (count - i) + side];
        return whole.from(1, begin).unsqueezed();
      };
      x = layer(x, cos, sin, mask, room(0), room(1), length - begin);
    }
    return x;
  }

  Tensor operator()(const Tensor& inputs, int64_t size, const Tensor& positions,
                        const Tensor& frequencies, int64_t length, int64_t ahead) const {
    const int64_t count = positions.numel();
    std::vector<int64_t> places(read<int64_t>(positions), read<int64_t>(positions) + count);
    for (int64_t step = 0; step < ahead; ++step) places.push_back(places.back() + 1);
    const Tensor angles = angles_of<T>(places, frequencies, inputs), cos = angles[0], sin = angles[1];
    Tensor x = product(0, inputs, size);
    x = through(0, form.layers, x, cos.narrow(0, 0, count).unsqueezed(), sin.narrow(0, 0, count).unsqueezed(), length);
    std::vector<Tensor> states{x.from(1, count - 1).contiguous()};
    for (int64_t step = 0; step < ahead; ++step) {
      const int64_t set = std::min(step, form.sets - 1), place = count + step;
      x = product(1 + set, states.back(), states.back().size(2));
      const auto own = [&](const Tensor& side) { return side.narrow(0, place, 1).unsqueezed(); };
      states.push_back(through(form.own + set * form.rolled, form.rolled, x, own(cos), own(sin), length + place));
    }
    return cat(states, 1);
  }
};

// Reads accepted positions, `[T, ...]`, and rolls `ahead` states on from the last one: `[1, 1 + ahead, D]`. `rooms` has
// keys and values `[key heads, slots, size]` of each layer, of which `length` slots are filled. `form` is heads, key
// heads, their size, and `TrunkForm`.
Tensor roll_out(const Tensor& taps, const Tensor& embeds, const Tensor& positions,
                    const Tensor& frequencies, const std::vector<Maybe>& parts, const std::vector<Tensor>& rooms, int64_t length,
                    int64_t ahead, int64_t window, const Sizes& formats, const Sizes& form, double eps) {
  CHECK(form.size() == 7, "no such form");
  const Decoder decoder{form[0], form[1], form[2], kOurs, false, false, eps, eps, 1 / std::sqrt(double(form[2]))};
  const TrunkForm trunk{form[3], form[4], form[5], form[6]};
  const int64_t layers = std::max(trunk.layers, trunk.own + trunk.sets * trunk.rolled), count = positions.numel();
  const auto type = taps.scalar_type();
  CHECK(type == kBFloat16 || type == kFloat, "expected bfloat16 or float32");
  CHECK(trunk.rolled > 0 && trunk.rolled <= trunk.layers && trunk.sets > 0 && trunk.own >= 0, "no such trunk");
  CHECK(static_cast<int64_t>(parts.size()) == (1 + trunk.sets) * kOfNormed + layers * kOfLayer &&
                  static_cast<int64_t>(formats.size()) == 1 + trunk.sets + layers * kProducts,
              "not of these layers");
  CHECK(decoder.size > 0 && decoder.size % 32 == 0 && decoder.size <= kMostSize, "no such heads");
  CHECK(embeds.scalar_type() == type && taps.dim() == 2 && embeds.dim() == 2 && taps.size(0) == count &&
                  embeds.size(0) == count && count > 0 && positions.scalar_type() == kLong &&
                  positions.is_contiguous(),
              "no such inputs");
  CHECK(frequencies.scalar_type() == kFloat && frequencies.is_contiguous() &&
                  2 * frequencies.numel() == decoder.size,
              "no such frequencies");
  CHECK(static_cast<int64_t>(rooms.size()) == 2 * trunk.layers && window > 0 && length >= 0 && ahead >= 0,
              "not of these layers");
  for (const Tensor& room : rooms)
    CHECK(room.scalar_type() == type && room.dim() == 3 && room.size(0) == decoder.key_heads &&
                    room.size(1) >= length + count + ahead && room.size(2) == decoder.size && room.stride(2) == 1,
                "no such room");
  const Tensor inputs = cat({taps, embeds}, 1).unsqueezed();
  const auto run = [&](const auto& own) { return own(inputs, embeds.size(1), positions, frequencies, length, ahead); };
  return type == kFloat ? run(Trunk<float>{decoder, trunk, parts.data(), formats.data(), rooms, window})
                            : run(Trunk<uint16_t>{decoder, trunk, parts.data(), formats.data(), rooms, window});
}

// A child that a search has found: its path's log-probability, its column, and its parent's rank.
struct Child {
  float score;
  int32_t column, parent;
};

// The `most` best children, the best first; of equal ones the first that was added.
struct Best {
  size_t most;
  std::vector<Child> found;

  float least() const { return found.size() < most ? -std::numeric_limits<float>::infinity() : found.back().score; }

  void add(const Child& child) {
    if (found.size() == most) found.pop_back();
    const auto better = [](const Child& a, const Child& b) { return a.score > b.score; };
    found.insert(std::upper_bound(found.begin(), found.end(), child, better), child);
  }
};

// Adds what is left of the probability of logits `[count]`, whole vectors, to a parent's score.
void add_children(const float* logits, int64_t count, float score, int32_t parent, Best& best) {
  Floats highest = load(logits), sums = splat(0.f);
  for (int64_t at = kWidth; at < count; at += kWidth) highest = greater_of(highest, load(logits + at));
  const float top = greatest_of(highest);
  for (int64_t at = 0; at < count; at += kWidth) sums = sums + exponential(load(logits + at) - splat(top));
  const float log_sum = top + std::log(sum_of(sums));
  for (int64_t at = 0; at < count; at += kWidth) {
    const Floats scores = splat(score) + (load(logits + at) - splat(log_sum));
    uint32_t left = bits_of(compared<_CMP_GT_OQ>(scores, splat(best.least())));
    if (!left) continue;
    alignas(64) float each[kWidth];
    store(each, scores);
    for (; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (each[lane] > best.least()) best.add({each[lane], static_cast<int32_t>(at + lane), parent});
    }
  }
}

// The columns of a draft vocabulary that a search considers, with rows `[columns, rank]` of the bias's last product.
// Numbers of a vector of columns are side by side, of bfloat16 pairs of numbers.
template <typename T>
struct Columns {
  static constexpr int64_t kEach = 4 / sizeof(T);  // numbers that are multiplied at once
  std::vector<int64_t> ids;  // the last one again up to whole vectors
  int64_t count, words = 0;
  std::vector<uint32_t> panel;

  // The `most` columns with the highest logit at any depth, by its first 16 bits.
  Columns(const T* logits, int64_t depth, int64_t all, int64_t most) : count(most) {
    std::vector<float> highest(all);
    highest_of(logits, depth, all, highest.data());
    std::vector<uint16_t> keys(all);
    std::vector<int64_t> counts(1 << 16);
    for (int64_t at = 0; at < all; ++at) {
      uint32_t bits;
      std::memcpy(&bits, &highest[at], 4);
      keys[at] = (bits >> 31 ? ~bits : bits | 1u << 31) >> 16;
      ++counts[keys[at]];
    }
    int least = counts.size() - 1;
    int64_t left = most;  // of the least ones
    for (; counts[least] < left; --least) left -= counts[least];
    for (int64_t at = 0; at < all; ++at)
      if (keys[at] > least || (keys[at] == least && left-- > 0)) ids.push_back(at);
    ids.resize((count + kWidth - 1) / kWidth * kWidth, ids.back());
  }

  static void highest_of(const T* logits, int64_t depth, int64_t all, float* highest) {
    int64_t at = 0;
    for (; at + kWidth <= all; at += kWidth) {
      Floats found = splat(kNothing);  // also where a logit is NaN
      for (int64_t row = 0; row < depth; ++row) found = greater_of(numbers<T>(logits + row * all + at), found);
      store(highest + at, found);
    }
    for (; at < all; ++at) {
      highest[at] = -std::numeric_limits<float>::infinity();
      for (int64_t row = 0; row < depth; ++row) highest[at] = std::max(highest[at], number(logits[row * all + at]));
    }
  }

  static float number(T x) {
    if constexpr (sizeof(T) == 4) return x;
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
  }

  // Those of a depth's logits; of padding none.
  void take(const T* logits, float* to) const {
    for (size_t at = 0; at < ids.size(); ++at)
      to[at] = static_cast<int64_t>(at) < count ? number(logits[ids[at]]) : -std::numeric_limits<float>::infinity();
  }

  void pack(const T* up, int64_t rank) {
    words = rank / kEach;
    panel.resize(ids.size() * words);
    for (size_t group = 0; group < ids.size(); group += kWidth)
      for (int64_t word = 0; word < words; word += kWidth) {
        Words rows[kWidth];
        for (int lane = 0; lane < kWidth; ++lane) rows[lane] = load_words(up + ids[group + lane] * rank + word * kEach);
        transpose(rows);
        for (int i = 0; i < kWidth; ++i) store_words(panel.data() + group * words + kWidth * (word + i), rows[i]);
      }
  }

  // Logits of a vector of columns for N nodes with codes `[N, rank]`: those before, plus the bias.
  template <int N>
  void add_bias(const float* before, const T* codes, size_t group, float* to) const {
    const Floats own = load(before + group);
    const uint32_t* weights = panel.data() + group * words;
    const int64_t rank = words * kEach;
    Floats sums[N];
    for (int i = 0; i < N; ++i) sums[i] = splat(0.f);
    for (int64_t word = 0; word < words; ++word, weights += kWidth) {
      const Words found = load_words(weights);
      for (int i = 0; i < N; ++i)
        sums[i] = added_products<T>(sums[i], found, splat_words(word_at(codes + i * rank + kEach * word)));
    }
    for (int i = 0; i < N; ++i)
      store(to + i * ids.size() + group, rounded<T>(own + rounded<T>(sums[i])));
  }
};

// path + sigmoid(gate) (tanh(candidate) - path), in place.
template <typename T>
void follow_path(T* path, const T* gate, const T* candidate, int64_t size) {
  for (int64_t at = 0; at < size; at += kWidth) {
    const Floats before = numbers<T>(path + at), two = splat(2.f);
    const Floats next = sigmoid(numbers<T>(candidate + at) * two) * two - splat(1.f);
    const Floats weight = rounded<T>(sigmoid(numbers<T>(gate + at)));
    put<T>(path + at, fused(weight, rounded<T>(next) - before, before));
  }
}

void scale(float* numbers, int64_t count, float factor) {
  for (int64_t at = 0; at < count; at += kWidth)
    store(numbers + at, load(numbers + at) * splat(factor));
}

// Parts of a path injector: the norm of tokens, copies of its products, their scales, and the bias of the path's.
enum Injecting { kTokenNorm, kToken, kUpdate, kState, kCode, kScales, kUpdateBias = kScales + 4, kInjecting };

// A search of one text's tree, see `searched` in tree_builders.py.
template <typename T>
struct Search {
  const Maybe* parts;
  const int64_t* formats;  // of each product
  Tensor logits, projected, table, up;  // [depth, V'], [depth, 4 S], [tokens, D], [V', rank]
  const int64_t* vocabulary;
  double eps, temperature;

  Tensor product(Injecting part, const Tensor& x, const Maybe& bias = {}) const {
    return multiplied(x, parts[part], parts[part + kScales - kToken], bias, formats[part - kToken]);
  }

  // States of tokens, [n, 2 S]: what is known of them, and of the paths `[n, S]` up to them.
  Tensor advanced(const std::vector<int64_t>& tokens, const Tensor& paths) const {
    const int64_t n = tokens.size(), width = table.size(1), size = paths.size(1);
    Tensor embeds = empty({n, width}, table.scalar_type());
    for (int64_t row = 0; row < n; ++row) {
      CHECK(tokens[row] >= 0 && tokens[row] < table.size(0), "no such token");
      std::memcpy(written<T>(embeds) + row * width, read<T>(table) + tokens[row] * width, width * sizeof(T));
    }
    const Tensor own = product(kToken, normed<T>(embeds, parts[kTokenNorm], width, eps, false));
    const Tensor states = cat({own, paths}, 1), both = product(kUpdate, states, parts[kUpdateBias]);
    CHECK(own.size(1) == size && both.size(1) == 2 * size, "not of this injector");
    for (int64_t row = 0; row < n; ++row) {
      const T* next = read<T>(both) + 2 * row * size;
      follow_path(written<T>(states) + (2 * row + 1) * size, next, next + size, size);
    }
    return states;
  }

  // Codes of nodes in `states`, [n, rank]; `level` is of their children.
  Tensor coded(const Tensor& states, int64_t level) const {
    Tensor both = product(kState, states);
    const int64_t n = states.size(0), width = both.size(1), half = width / 2;
    CHECK(width == projected.size(1), "not of this injector");
    Tensor active = empty({n, half}, states.scalar_type());
    for (int64_t row = 0; row < n; ++row) {
      T* sums = written<T>(both) + row * width;
      add_row(sums, read<T>(projected) + (level - 1) * width, sums, width);
      activate(sums, sums + half, written<T>(active) + row * half, half, false);
    }
    const Tensor codes = product(kCode, active);
    CHECK(codes.size(1) == up.size(1), "not of this injector");
    return codes;
  }

  // Writes tokens, ranks of parents, and bits of scores of all nodes, each `stride` behind the one before.
  void operator()(int64_t root, Tensor paths, bool rootless, const std::vector<int64_t>& sizes, int64_t width,
                  int64_t most_columns, int32_t* to, int64_t stride) const {
    const int64_t depth = logits.size(0), all = logits.size(1);
    Columns<T> columns(read<T>(logits), depth, all, most_columns);
    if (depth > 1 || rootless) columns.pack(read<T>(up), up.size(1));
    const int64_t count = columns.ids.size();
    std::vector<float> before(count), after;
    std::vector<int64_t> tokens{root};
    std::vector<float> scores{0.f};
    to[0] = static_cast<int32_t>(root), to[stride] = to[2 * stride] = 0, ++to;
    for (int64_t level = 1; level <= depth; ++level) {
      const int64_t n = tokens.size();
      const Tensor states = advanced(tokens, paths);
      columns.take(read<T>(logits) + (level - 1) * all, before.data());
      const bool told = level > 1 || rootless;
      after = before;
      if (told) {
        const Tensor codes = coded(states, level);
        after.resize(n * count);
        const T* own = read<T>(codes);
        const int64_t rank = codes.size(1);
        parallel_for(0, count / kWidth, 32, [&](int64_t begin, int64_t end) {
          for (int64_t group = begin; group < end; ++group)
            by_few<8>(0, n, [&](int row, auto few) {
              columns.template add_bias<decltype(few)::value>(before.data(), own + row * rank, kWidth * group,
                                                              after.data() + row * count);
            });
        });
      }
      if (temperature != 1) scale(after.data(), after.size(), 1 / temperature);
      Best best{static_cast<size_t>(sizes[level]), {}};
      for (int64_t row = 0; row < n; ++row) add_children(after.data() + row * count, count, scores[row], row, best);
      best.found.resize(best.most, {-std::numeric_limits<float>::infinity(), 0, 0});
      tokens.clear(), scores.clear();
      std::vector<int64_t> parents;
      for (const Child& child : best.found) {
        const int64_t token = vocabulary[columns.ids[child.column]];
        to[0] = static_cast<int32_t>(token), to[stride] = child.parent;
        std::memcpy(to + 2 * stride, &child.score, 4), ++to;
        if (static_cast<int64_t>(tokens.size()) < width)
          tokens.push_back(token), scores.push_back(child.score), parents.push_back(child.parent);
      }
      paths = empty({static_cast<int64_t>(tokens.size()), paths.size(1)}, states.scalar_type());
      const int64_t size = paths.size(1);
      for (size_t row = 0; row < parents.size(); ++row)
        std::memcpy(written<T>(paths) + row * size, read<T>(states) + (2 * parents[row] + 1) * size, size * sizeof(T));
    }
  }
};

// As `searched`: `[3, B, nodes]`, and the number of nodes of each depth. `paths` is the state of the text before each
// root, `[B, S]`; `rootless` if nothing drafted has read the roots. `sizes` is most nodes of a depth, those that are
// expanded, and most columns that are considered.
std::tuple<Tensor, std::vector<int64_t>> search(const Tensor& logits, const Tensor& projected,
                                                    const Tensor& paths, bool rootless, const Tensor& roots,
                                                    const Tensor& vocab_ids, const Tensor& table,
                                                    const Tensor& up, const std::vector<Maybe>& parts,
                                                    const Sizes& formats, const Sizes& sizes, double eps,
                                                    double temperature) {
  const auto type = logits.scalar_type();
  CHECK(type == kBFloat16 || type == kFloat, "expected bfloat16 or float32");
  CHECK(parts.size() == kInjecting && formats.size() == 4 && sizes.size() == 3, "not of this injector");
  const int64_t texts = logits.size(0), depth = logits.size(1), all = logits.size(2), most = sizes[0];
  for (const Tensor* each : {&logits, &projected, &paths, &table, &up})
    CHECK(each->scalar_type() == type && each->is_contiguous(), "expected tensors of one dtype without gaps");
  CHECK(logits.dim() == 3 && projected.dim() == 3 && projected.size(0) == texts && projected.size(1) == depth &&
                  projected.size(2) % 32 == 0 && paths.dim() == 2 && paths.size(0) == texts && paths.size(1) % 16 == 0,
              "no such states");
  CHECK(table.dim() == 2 && table.size(1) % 16 == 0 && up.dim() == 2 && up.size(0) == all && all > 0 &&
                  up.size(1) % 32 == 0,
              "no such weights");
  for (const Tensor* each : {&roots, &vocab_ids})
    CHECK(each->scalar_type() == kLong && each->is_contiguous(), "expected int64");
  CHECK(roots.numel() == texts && vocab_ids.numel() == all && depth > 0 && most > 0 && sizes[1] > 0 && sizes[2] > 0,
              "no such sizes");
  const int64_t columns = std::min(sizes[2], all);
  std::vector<int64_t> levels{1};
  for (int64_t level = 1; level <= depth; ++level)
    levels.push_back(std::min(most, (level > 1 ? std::min(levels.back(), sizes[1]) : 1) * columns));
  int64_t nodes = 0;
  for (const int64_t size : levels) nodes += size;
  Tensor found = empty({3, texts, nodes}, kInt);
  for (int64_t text = 0; text < texts; ++text) {
    int32_t* to = found.data<int32_t>() + text * nodes;
    const auto run = [&](const auto& own) {
      own(roots.data<int64_t>()[text], paths.narrow(0, text, 1), rootless, levels, sizes[1], columns, to,
          texts * nodes);
    };
    const auto* tokens = vocab_ids.data<int64_t>();
    if (type == kFloat)
      run(Search<float>{parts.data(), formats.data(), logits[text], projected[text], table, up, tokens, eps, temperature});
    else
      run(Search<uint16_t>{parts.data(), formats.data(), logits[text], projected[text], table, up, tokens, eps, temperature});
  }
  return {found, levels};
}
