// Consecutive decoder layers over a few tokens in one call: norms, products, rotations, attention, activations, sums.
//
// Everything but products and attention rounds where transformers' operators do. New keys and values are written behind
// those of the text, into the room that the cache has.
#pragma once

// Attention by our operator, or by torch's, of each head or of all that share keys.
enum Way : int64_t { kOurs, kByHead, kByKeys };
// All but kBefore and kMiddle may be missing.
enum Norm { kBefore, kQuery, kKey, kAfter, kMiddle, kEnd, kNorms };
// Products: of queries, keys and values; of attention; of gate and up; of the activation.
enum Place { kIn, kOut, kUp, kDown, kProducts };
constexpr int kLinears = 7, kFirstBias[] = {0, 3, 4, 6, 7};
constexpr int64_t kOfLayer = kNorms + 2 * kProducts + kLinears;  // norms, copies, scales, biases of linear layers

struct Decoder {
  int64_t heads, key_heads, size, way;
  bool gelu, from_zero;  // activation; whether a norm's weights are added to 1
  double eps, head_eps, scaling;
};

template <typename T>
void norm_row(const T* x, const T* weight, T* to, int64_t size, double eps, bool from_zero) {
  Floats squares = splat(0.f);
  for (int64_t at = 0; at < size; at += kWidth) {
    const Floats found = numbers<T>(x + at);
    squares = fused(found, found, squares);
  }
  const Floats factor = splat(1 / std::sqrt(sum_of(squares) / size + static_cast<float>(eps)));
  for (int64_t at = 0; at < size; at += kWidth) {
    const Floats levelled = numbers<T>(x + at) * factor, own = numbers<T>(weight + at);
    put<T>(to + at, from_zero ? levelled * (own + splat(1.f)) : rounded<T>(levelled) * own);
  }
}

template <typename T>
INLINE Floats times(Floats x, const T* y) {
  return rounded<T>(x * numbers<T>(y));
}

// x to x cos + (-second half of x, first half of x) sin.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* to, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t at = 0; at < half; at += kWidth) {
    const Floats a = numbers<T>(x + at), b = numbers<T>(x + half + at);
    const Floats low = times(a, cos + at) - times(b, sin + at);
    const Floats high = times(b, cos + half + at) + times(a, sin + half + at);
    put<T>(to + at, low), put<T>(to + half + at, high);
  }
}

template <typename T>
void activate(const T* gate, const T* up, T* to, int64_t size, bool gelu) {
  for (int64_t at = 0; at < size; at += kWidth) {
    const Floats x = numbers<T>(gate + at);
    Floats inside = x;
    if (gelu) {  // x / 2 (1 + tanh(y / 2)) is x sigmoid(y)
      inside = fused(x * x * x, splat(0.044715f), x) * splat(1.5957691216f);
    }
    put<T>(to + at, rounded<T>(x * sigmoid(inside)) * numbers<T>(up + at));
  }
}

template <typename T>
void add_row(const T* a, const T* b, T* to, int64_t size) {
  for (int64_t at = 0; at < size; at += kWidth) put<T>(to + at, numbers<T>(a + at) + numbers<T>(b + at));
}

template <typename T>
const T* read(const Tensor& tensor) {
  return static_cast<T*>(tensor.data());
}

template <typename T>
T* written(const Tensor& tensor) {
  return static_cast<T*>(tensor.data());
}

// Calls `each` with every row of `size` numbers, by several threads if there are many.
template <typename Each>
void by_rows(int64_t rows, int64_t size, const Each& each) {
  parallel_for(0, rows, std::max<int64_t>(1, 32768 / size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) each(row);
  });
}

// x W^T + b, by a copy of one of the formats, or by torch's packed copy.
Tensor multiplied(const Tensor& x, const Maybe& copy, const Maybe& scales, const Maybe& bias, int64_t format) {
  CHECK(copy, "expected a weight");
  if (format >= 0) return ::product(x, *copy, scales, bias, copy->size(0) * kOutputs, format, true);
  CHECK(torch_.aoti_torch_cpu__linear_pointwise, "no such product");
  Raw added = bias ? bias->raw() : nullptr, made;
  CALL(aoti_torch_cpu__linear_pointwise, x.raw(), copy->raw(), bias ? &added : nullptr, "none", nullptr, 0, nullptr, &made);
  return Tensor(made);
}

// Norms of vectors of `size`; where these are parts of longer ones, the weights are of all parts.
template <typename T>
Tensor normed(const Tensor& x, const Maybe& weight, int64_t size, double eps, bool from_zero) {
  CHECK(weight && weight->is_contiguous() && weight->scalar_type() == x.scalar_type() && x.is_contiguous() &&
                  size > 0 && size % 16 == 0 && weight->numel() == x.size(-1) && x.size(-1) % size == 0,
              "not of this norm");
  Tensor to = empty(x.sizes(), x.scalar_type());
  const int64_t parts = x.size(-1) / size;
  const T *from = read<T>(x), *weights = read<T>(*weight);
  T* y = written<T>(to);
  by_rows(x.numel() / size, size, [&](int64_t row) {
    norm_row(from + row * size, weights + row % parts * size, y + row * size, size, eps, from_zero);
  });
  return to;
}

// The parts of one layer, and what it does to hidden states `[B, n, size]`.
template <typename T>
struct Layer {
  const Decoder& form;
  const Maybe* parts;
  const int64_t* formats;  // of the products; -1 for torch's packed copies

  Tensor product(Place place, const Tensor& x) const {
    std::vector<Tensor> biases;
    for (int linear = kFirstBias[place]; linear < kFirstBias[place + 1]; ++linear)
      if (const Maybe& bias = parts[kNorms + 2 * kProducts + linear]) biases.push_back(*bias);
    const Maybe bias = biases.empty() ? Maybe() : biases.size() == 1 ? biases[0] : cat(biases, 0);
    return multiplied(x, parts[kNorms + place], parts[kNorms + kProducts + place], bias, formats[place]);
  }

  Tensor norm(Norm part, const Tensor& x) const {
    return normed<T>(x, parts[part], x.size(-1), form.eps, form.from_zero);
  }

  // `x` plus what the layer has made of it.
  Tensor added(const Tensor& x, Tensor made, Norm after) const {
    CHECK(made.sizes() == x.sizes(), "not of this layer");
    if (parts[after]) made = norm(after, made);
    const int64_t size = x.size(-1);
    Tensor to = empty(x.sizes(), x.scalar_type());
    const T *a = read<T>(x), *b = read<T>(made);
    T* y = written<T>(to);
    by_rows(x.numel() / size, size,
            [&](int64_t row) { add_row(a + row * size, b + row * size, y + row * size, size); });
    return to;
  }

  // Rotates queries in place; puts keys and values into the cache's last slots.
  void enter(const Tensor& joint, const Tensor& cos, const Tensor& sin, const Tensor& keys,
             const Tensor& values, int64_t length) const {
    const int64_t n = joint.size(1), size = form.size, heads = form.heads + 2 * form.key_heads;
    const T *cosines = read<T>(cos), *sines = read<T>(sin);
    T *x = written<T>(joint), *k = written<T>(keys), *v = written<T>(values);
    const T* norms[] = {parts[kQuery] ? read<T>(*parts[kQuery]) : nullptr, parts[kKey] ? read<T>(*parts[kKey]) : nullptr};
    const Sizes to_key = keys.strides(), to_value = values.strides();
    const bool one = cos.size(0) == 1;
    by_rows(joint.size(0) * n, heads * size, [&](int64_t row) {
      const int64_t text = row / n, place = row % n, angle = (one ? place : row) * size;
      T* from = x + row * heads * size;
      const auto turned = [&](T* head, T* to, const T* norm) {
        if (norm) norm_row(head, norm, head, size, form.head_eps, form.from_zero);
        rotate(head, cosines + angle, sines + angle, to, size);
      };
      const auto slot = [&](const Sizes& steps, int64_t head) {
        return text * steps[0] + head * steps[1] + (length + place) * steps[2];
      };
      for (int64_t head = 0; head < form.heads; ++head, from += size) turned(from, from, norms[0]);
      for (int64_t head = 0; head < form.key_heads; ++head, from += size) turned(from, k + slot(to_key, head), norms[1]);
      for (int64_t head = 0; head < form.key_heads; ++head, from += size)
        std::memcpy(v + slot(to_value, head), from, size * sizeof(T));
    });
  }

  Tensor attended(const Tensor& joint, const Tensor& keys, const Tensor& values,
                      const Maybe& mask) const {
    const int64_t texts = joint.size(0), n = joint.size(1), size = form.size, groups = form.heads / form.key_heads;
    const int64_t all = joint.size(2);
    Tensor query = joint.viewed({texts, form.heads, n, size}, {n * all, size, all, 1});
    if (form.way == kOurs) return attend(query, keys, values, mask, form.scaling).shaped({texts, n, -1});
    Maybe seen = mask;
    if (form.way == kByKeys) {
      query = query.shaped({texts, form.key_heads, groups * n, size});
      if (mask && n > 1) seen = cat(std::vector<Tensor>(groups, *mask), 2);
    }
    const Tensor mixed = called("aten::scaled_dot_product_attention", query, keys, values, seen, 0.0, !mask && n > 1,
                                std::optional<double>(form.scaling), query.size(1) != form.key_heads);
    return mixed.shaped({texts, form.heads, n, size}).transpose(1, 2).shaped({texts, n, -1});
  }

  Tensor operator()(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& mask,
                        const Tensor& key_room, const Tensor& value_room, int64_t length) const {
    const Tensor joint = product(kIn, norm(kBefore, x));
    CHECK(joint.size(2) == (form.heads + 2 * form.key_heads) * form.size, "not of this layer");
    enter(joint, cos, sin, key_room, value_room, length);
    const int64_t all = length + x.size(1);
    const Tensor mixed = attended(joint, key_room.narrow(2, 0, all), value_room.narrow(2, 0, all), mask);
    const Tensor middle = added(x, product(kOut, mixed), kAfter);
    const Tensor both = product(kUp, norm(kMiddle, middle));
    const int64_t inner = both.size(-1) / 2;
    CHECK(both.size(-1) % 32 == 0, "not of this layer");
    Tensor active = empty({x.size(0), x.size(1), inner}, x.scalar_type());
    const T* from = read<T>(both);
    T* to = written<T>(active);
    by_rows(x.size(0) * x.size(1), inner, [&](int64_t row) {
      activate(from + 2 * row * inner, from + (2 * row + 1) * inner, to + row * inner, inner, form.gelu);
    });
    return added(middle, product(kDown, active), kEnd);
  }
};

// Whether a room still begins with what a layer of the cache holds, and has slots for `more`.
bool begins(const Tensor& room, const Tensor& held, int64_t more) {
  return room.dim() == 4 && held.dim() == 4 && (!held.numel() || room.data() == held.data()) &&
         room.strides() == held.strides() && room.scalar_type() == held.scalar_type() &&
         room.size(0) == held.size(0) && room.size(1) == held.size(1) && room.size(3) == held.size(3) &&
         held.size(2) + more <= room.size(2);
}

// The outputs of the `wanted` layers, in order, then each layer's keys and values, which begin with those `held`, then the
// norm of the last output if its weight is given; nothing where a room does not fit. `parts` has kOfLayer tensors for each
// layer, `held` and `rooms` that of its keys and that of its values, [B, key heads, slots, size]. Without a mask tokens see
// those before them.
std::vector<Tensor> decode(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& mask,
                               const Maybe& last, const std::vector<Maybe>& parts, const std::vector<Tensor>& held,
                               const std::vector<Tensor>& rooms, const Sizes& wanted,
                               const Sizes& formats, const Sizes& form, const std::vector<double>& scales) {
  const int64_t layers = rooms.size() / 2, texts = x.size(0), n = x.size(1);
  CHECK(form.size() == 6 && scales.size() == 3 && held.size() == rooms.size() && layers, "no such form");
  const Decoder decoder{form[0],      form[1],   form[2],   form[3],  form[4] != 0,
                        form[5] != 0, scales[0], scales[1], scales[2]};
  const auto type = x.scalar_type();
  CHECK(type == kBFloat16 || type == kFloat, "expected bfloat16 or float32");
  CHECK(x.dim() == 3 && x.is_contiguous() && x.size(2) % 16 == 0 && decoder.size % 32 == 0, "no such sizes");
  for (const Tensor* each : {&cos, &sin})
    CHECK(each->scalar_type() == type && each->is_contiguous() && each->size(-1) == decoder.size &&
                    (each->numel() == n * decoder.size || each->numel() == texts * n * decoder.size),
                "no such angles");
  CHECK(static_cast<int64_t>(parts.size()) == layers * kOfLayer, "not of these layers");
  CHECK(static_cast<int64_t>(formats.size()) == layers * kProducts, "not of these layers");
  const int64_t length = held[0].dim() == 4 ? held[0].size(2) : 0;
  for (size_t i = 0; i < rooms.size(); ++i)
    if (!begins(rooms[i], held[i], n) || rooms[i].scalar_type() != type || held[i].size(2) != length ||
        rooms[i].size(0) != texts || rooms[i].size(1) != decoder.key_heads || rooms[i].size(3) != decoder.size ||
        rooms[i].stride(3) != 1)
      return {};
  CHECK(mask || n == 1 || decoder.way == kOurs || !length, "expected a mask");
  std::vector<Tensor> outputs;
  Tensor state = x;
  for (int64_t i = 0; i < layers; ++i) {
    const auto run = [&](const auto& layer) {
      return layer(state, cos, sin, mask, rooms[2 * i], rooms[2 * i + 1], length);
    };
    const Maybe* own = &parts[i * kOfLayer];
    const int64_t* their = &formats[i * kProducts];
    state = type == kFloat ? run(Layer<float>{decoder, own, their}) : run(Layer<uint16_t>{decoder, own, their});
    if (std::find(wanted.begin(), wanted.end(), i) != wanted.end()) outputs.push_back(state);
  }
  for (const Tensor& room : rooms) outputs.push_back(room.narrow(2, 0, length + n));
  const auto norm = type == kFloat ? normed<float> : normed<uint16_t>;
  if (last) outputs.push_back(norm(state, last, x.size(-1), decoder.eps, decoder.from_zero));
  return outputs;
}
