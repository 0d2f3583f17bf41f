// Tensors, operators and threads of torch by its stable C interface (torch/csrc/stable/c/shim.h, from torch 2.10 on).
//
// Its functions are looked up when this library is loaded. So torch is not needed to compile it, and one library serves
// each version of torch.
#pragma once

using Raw = struct Opaque*;  // a tensor, a list or a library
using Value = uint64_t;      // an argument or a result of an operator

struct Torch {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  bool complete = library != nullptr;

  void* found(const char* name, bool needed = true) {
    void* function = library ? dlsym(library, name) : nullptr;
    complete = complete && (function || !needed);
    return function;
  }

#define FUNCTION(result, name, ...) result (*name)(__VA_ARGS__) = reinterpret_cast<decltype(name)>(found(#name))
#define MAYBE(result, name, ...) result (*name)(__VA_ARGS__) = reinterpret_cast<decltype(name)>(found(#name, false))
  MAYBE(const char*, torch_exception_get_what_without_backtrace, void);  // from 2.13 on
  FUNCTION(size_t, aoti_torch_dtype_element_size, int32_t);
  // Inductor's, which is not part of the stable interface; torch's packed copies are multiplied by it.
  MAYBE(int32_t, aoti_torch_cpu__linear_pointwise, Raw, Raw, Raw*, const char*, const double**, int64_t,
           const char**, Raw*);
  // All others return 0, or have caught an error.
  FUNCTION(int32_t, aoti_torch_new_tensor_handle, Raw, Raw*);
  FUNCTION(int32_t, aoti_torch_delete_tensor_object, Raw);
  FUNCTION(int32_t, aoti_torch_get_dim, Raw, int64_t*);
  FUNCTION(int32_t, aoti_torch_get_numel, Raw, int64_t*);
  FUNCTION(int32_t, aoti_torch_get_sizes, Raw, int64_t**);
  FUNCTION(int32_t, aoti_torch_get_strides, Raw, int64_t**);
  FUNCTION(int32_t, aoti_torch_get_dtype, Raw, int32_t*);
  FUNCTION(int32_t, aoti_torch_get_data_ptr, Raw, void**);
  FUNCTION(int32_t, aoti_torch_is_contiguous, Raw, bool*);
  FUNCTION(int32_t, aoti_torch_empty_strided, int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Raw*);
  FUNCTION(int32_t, aoti_torch__reinterpret_tensor, Raw, int64_t, const int64_t*, const int64_t*, int64_t, Raw*);
  FUNCTION(int32_t, aoti_torch_copy_, Raw, Raw, int32_t);
  FUNCTION(int32_t, torch_call_dispatcher, const char*, const char*, Value*, uint64_t);
  FUNCTION(int32_t, torch_new_list_reserve_size, size_t, Raw*);
  FUNCTION(int32_t, torch_list_size, Raw, size_t*);
  FUNCTION(int32_t, torch_list_get_item, Raw, size_t, Value*);
  FUNCTION(int32_t, torch_list_push_back, Raw, Value);
  FUNCTION(int32_t, torch_delete_list, Raw);
  FUNCTION(int32_t, torch_parallel_for, int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
  FUNCTION(int32_t, torch_get_num_threads, uint32_t*);
  FUNCTION(int32_t, torch_library_impl, Raw, const char*, void (*)(Value*, uint64_t, uint64_t), uint64_t);
  FUNCTION(int32_t, aoti_torch_library_init_def, const char*, const char*, uint32_t, Raw*);
  FUNCTION(int32_t, aoti_torch_library_init_impl, const char*, const char*, const char*, uint32_t, Raw*);
  FUNCTION(int32_t, aoti_torch_library_def, Raw, const char*);
};
const Torch torch_;

constexpr uint64_t kVersion = 2ull << 56 | 10ull << 48;  // of the interface: 2.10
enum Type : int32_t { kByte = 0, kInt = 3, kLong = 4, kFloat = 6, kBool = 11, kBFloat16 = 15 };
#define CHECK(condition, message) \
  if (!(condition)) throw std::runtime_error(message)
#define CALL(name, ...) \
  if (torch_.name(__VA_ARGS__)) throw failed(#name)

std::runtime_error failed(const char* name) {
  const auto why = torch_.torch_exception_get_what_without_backtrace;
  return std::runtime_error(why ? why() : std::string(name) + " failed");
}

using Sizes = std::vector<int64_t>;

// A tensor on the CPU, of which this holds one reference.
class Tensor {
 public:
  explicit Tensor(Raw raw = nullptr) : raw_(raw) {}
  Tensor(Tensor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Tensor(const Tensor& other) : raw_(other.shared()) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Tensor() {
    if (raw_) torch_.aoti_torch_delete_tensor_object(raw_);
  }

  Raw raw() const { return raw_; }
  // Another reference, which its receiver deletes.
  Raw shared() const {
    Raw found = nullptr;
    if (raw_) CALL(aoti_torch_new_tensor_handle, raw_, &found);
    return found;
  }

  int64_t dim() const { return asked<int64_t>(torch_.aoti_torch_get_dim); }
  int64_t numel() const { return asked<int64_t>(torch_.aoti_torch_get_numel); }
  Type scalar_type() const { return static_cast<Type>(asked<int32_t>(torch_.aoti_torch_get_dtype)); }
  bool is_contiguous() const { return asked<bool>(torch_.aoti_torch_is_contiguous); }
  int64_t element_size() const { return torch_.aoti_torch_dtype_element_size(scalar_type()); }
  int64_t nbytes() const { return numel() * element_size(); }
  int64_t size(int64_t axis) const { return asked<int64_t*>(torch_.aoti_torch_get_sizes)[place(axis)]; }
  int64_t stride(int64_t axis) const { return asked<int64_t*>(torch_.aoti_torch_get_strides)[place(axis)]; }
  Sizes sizes() const { return all(asked<int64_t*>(torch_.aoti_torch_get_sizes)); }
  Sizes strides() const { return all(asked<int64_t*>(torch_.aoti_torch_get_strides)); }

  void* data() const { return asked<void*>(torch_.aoti_torch_get_data_ptr); }
  // Of this dtype.
  template <typename T>
  T* data() const {
    constexpr Type type = std::is_same_v<T, uint8_t>   ? kByte
                          : std::is_same_v<T, int32_t> ? kInt
                          : std::is_same_v<T, int64_t> ? kLong
                          : std::is_same_v<T, bool>    ? kBool
                                                       : kFloat;
    static_assert(type != kFloat || std::is_same_v<T, float>);
    CHECK(scalar_type() == type, "expected another dtype");
    return static_cast<T*>(data());
  }

  // A view whose first number is `offset` numbers behind this one's.
  Tensor viewed(const Sizes& sizes, const Sizes& strides, int64_t offset = 0) const {
    Raw made;
    CALL(aoti_torch__reinterpret_tensor, raw_, sizes.size(), sizes.data(), strides.data(), offset, &made);
    return Tensor(made);
  }
  Tensor narrow(int64_t axis, int64_t begin, int64_t count) const {
    Sizes found = sizes();
    CHECK(begin >= 0 && count >= 0 && begin + count <= found.at(axis), "no such slots");
    found[axis] = count;
    return viewed(found, strides(), begin * stride(axis));
  }
  Tensor from(int64_t axis, int64_t begin) const { return narrow(axis, begin, size(axis) - begin); }
  // Without the first axis, at one of its places.
  Tensor operator[](int64_t at) const {
    Sizes found = sizes(), steps = strides();
    CHECK(at >= 0 && at < found.at(0), "no such row");
    const int64_t step = steps[0];
    found.erase(found.begin()), steps.erase(steps.begin());
    return viewed(found, steps, at * step);
  }
  Tensor transpose(int64_t a, int64_t b) const {
    Sizes found = sizes(), steps = strides();
    std::swap(found.at(a), found.at(b)), std::swap(steps[a], steps[b]);
    return viewed(found, steps);
  }
  // With one more axis in front.
  Tensor unsqueezed() const {
    Sizes found = sizes(), steps = strides();
    steps.insert(steps.begin(), found.empty() ? 1 : found[0] * steps[0]), found.insert(found.begin(), 1);
    return viewed(found, steps);
  }
  inline Tensor contiguous() const;
  // In another shape; a copy where there are gaps. The last size may be -1.
  inline Tensor shaped(Sizes sizes) const;

 private:
  template <typename T, typename Function>
  T asked(Function function) const {
    T found{};
    CHECK(!function(raw_, &found), "expected a tensor");
    return found;
  }
  Sizes all(const int64_t* numbers) const { return {numbers, numbers + dim()}; }
  int64_t place(int64_t axis) const {
    const int64_t count = dim();
    CHECK(axis < count && axis >= -count, "expected a tensor with more axes");
    return axis < 0 ? axis + count : axis;
  }

  Raw raw_;
};
using Maybe = std::optional<Tensor>;

Sizes strides_of(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t axis = sizes.size(); axis-- > 0; step *= std::max<int64_t>(sizes[axis], 1)) strides[axis] = step;
  return strides;
}

Tensor empty(const Sizes& sizes, Type type) {
  Raw made;
  CALL(aoti_torch_empty_strided, sizes.size(), sizes.data(), strides_of(sizes).data(), type, 0, 0, &made);
  return Tensor(made);
}

Tensor copied(const Tensor& x, Type type) {
  const Tensor to = empty(x.sizes(), type);
  CALL(aoti_torch_copy_, to.raw(), x.raw(), 0);
  return to;
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : copied(*this, scalar_type()); }

Tensor Tensor::shaped(Sizes sizes) const {
  int64_t others = 1;
  for (size_t axis = 0; axis + 1 < sizes.size(); ++axis) others *= sizes[axis];
  if (sizes.back() < 0) sizes.back() = others ? numel() / others : 0;
  CHECK(others * sizes.back() == numel(), "not of this shape");
  return contiguous().viewed(sizes, strides_of(sizes));
}

Tensor cat(const std::vector<Tensor>& parts, int64_t axis) {
  Sizes sizes = parts.at(0).sizes();
  for (size_t i = 1; i < parts.size(); ++i) {
    Sizes other = parts[i].sizes();
    const int64_t more = other.at(axis);
    other[axis] = sizes[axis];
    CHECK(other == sizes && parts[i].scalar_type() == parts[0].scalar_type(), "expected tensors alike");
    sizes[axis] += more;
  }
  const Tensor to = empty(sizes, parts[0].scalar_type());
  int64_t begin = 0;
  for (const Tensor& part : parts) {
    CALL(aoti_torch_copy_, to.narrow(axis, begin, part.size(axis)).raw(), part.raw(), 0);
    begin += part.size(axis);
  }
  return to;
}

template <typename Function>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  const auto call = [](int64_t first, int64_t last, void* own) { (*static_cast<const Function*>(own))(first, last); };
  CALL(torch_parallel_for, begin, end, grain, call, const_cast<Function*>(&function));
}

int64_t thread_count() {
  uint32_t count;
  CALL(torch_get_num_threads, &count);
  return count;
}

// Arguments and results: what an operator is given is its own, and what it returns its caller's.
template <typename T>
struct Passed {  // bool, int, float
  static T taken(Value value) {
    T found;
    std::memcpy(&found, &value, sizeof(T));
    return found;
  }
  static Value given(T found) {
    Value value = 0;
    std::memcpy(&value, &found, sizeof(T));
    return value;
  }
};

template <>
struct Passed<Tensor> {
  static Tensor taken(Value value) { return Tensor(reinterpret_cast<Raw>(value)); }
  static Value given(const Tensor& tensor) { return reinterpret_cast<Value>(tensor.shared()); }
};

template <typename T>
struct Passed<std::optional<T>> {
  static std::optional<T> taken(Value value) {
    if (!value) return {};
    const std::unique_ptr<Value> own(reinterpret_cast<Value*>(value));
    return Passed<T>::taken(*own);
  }
  static Value given(const std::optional<T>& found) {
    return found ? reinterpret_cast<Value>(new Value(Passed<T>::given(*found))) : 0;
  }
};

template <typename T>
struct Passed<std::vector<T>> {
  static std::vector<T> taken(Value value) {
    const std::unique_ptr<Opaque, int32_t (*)(Raw)> own(reinterpret_cast<Raw>(value), torch_.torch_delete_list);
    size_t count;
    CALL(torch_list_size, own.get(), &count);
    std::vector<T> found;
    found.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      Value each;
      CALL(torch_list_get_item, own.get(), i, &each);
      found.push_back(Passed<T>::taken(each));
    }
    return found;
  }
  static Value given(const std::vector<T>& found) {
    Raw list;
    CALL(torch_new_list_reserve_size, found.size(), &list);
    for (const T& each : found) CALL(torch_list_push_back, list, Passed<T>::given(each));
    return reinterpret_cast<Value>(list);
  }
};

// Calls an operator of torch with one result.
template <typename... Arguments>
Tensor called(const char* name, const Arguments&... arguments) {
  Value stack[] = {Passed<Arguments>::given(arguments)...};
  CALL(torch_call_dispatcher, name, "", stack, kVersion);
  return Passed<Tensor>::taken(stack[0]);
}

// An operator as torch calls it, by a stack of values.
template <auto function>
struct Operator;

template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Operator<function> {
  static void run(Value* stack, uint64_t, uint64_t) { run_at(stack, std::index_sequence_for<Arguments...>()); }

 private:
  template <size_t... at>
  static void run_at(Value* stack, std::index_sequence<at...>) {
    std::tuple<std::decay_t<Arguments>...> own{Passed<std::decay_t<Arguments>>::taken(stack[at])...};
    give(stack, function(std::get<at>(own)...));
  }
  template <typename T>
  static void give(Value* stack, const T& result) {
    stack[0] = Passed<T>::given(result);
  }
  template <typename... Ts>
  static void give(Value* stack, const std::tuple<Ts...>& results) {
    std::apply([&](const Ts&... each) { ((*stack++ = Passed<Ts>::given(each)), ...); }, results);
  }
};

struct Definition {
  const char *name, *schema;
  void (*run)(Value*, uint64_t, uint64_t);
  std::vector<const char*> keys = {"CPU"};
};

// Defines a library of operators, unless this torch lacks a function or refuses it: an error here would end the process.
struct Library {
  Library(const char* name, const std::vector<Definition>& all) {
    try {
      if (torch_.complete) define(name, all);
    } catch (const std::exception&) {
    }
  }

  static void define(const char* name, const std::vector<Definition>& all) {
    Raw library;
    CALL(aoti_torch_library_init_def, name, __FILE__, __LINE__, &library);
    for (const Definition& each : all) {
      CALL(aoti_torch_library_def, library, (std::string(each.name) + each.schema).c_str());
      for (const char* key : each.keys) {
        Raw own;  // a library for each: it may have operators of one key only
        CALL(aoti_torch_library_init_impl, name, key, __FILE__, __LINE__, &own);
        CALL(torch_library_impl, own, each.name, each.run, kVersion);
      }
    }
  }
};
