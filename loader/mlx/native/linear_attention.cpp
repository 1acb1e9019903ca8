// Linear attention as one kernel for each of its three parts: the short convolution, the update of
// the state, the gated norm. Compiled after shim.cpp as one file with it; the installer puts
// linear_attention/steps.h and the kernels' texts (kernel_…) before.

namespace {

// What a part is told besides arrays.
struct LinearAttentionPart {
  enum Kind { Convolution, StateUpdate, GatedNorm } kind;
  linear_attention::Sizes size;
  int run = 0;
  // Of inputs that may be missing: biases, skip or gain.
  bool has_extra = false;
  bool has_limit = false;
};

// An array's values as f32 in order: where they lie, or copied.
struct Widened {
  const void* data;
  mx::Dtype type;
  std::vector<int64_t> shape, strides;
  size_t size;
  bool in_place;

  explicit Widened(const mx::array& a)
      : data(a.data<char>()),
        type(a.dtype()),
        shape(a.shape().begin(), a.shape().end()),
        strides(a.strides().begin(), a.strides().end()),
        size(a.size()),
        in_place(a.flags().row_contiguous && a.dtype() == mx::float32) {}

  template <typename T>
  void copy(std::vector<float>& out) const {
    std::vector<int64_t> index(shape.size(), 0);
    int64_t at = 0;
    for (size_t i = 0; i < size; i++) {
      out[i] = float(static_cast<const T*>(data)[at]);
      for (size_t axis = shape.size(); axis-- > 0;) {
        at += strides[axis];
        if (++index[axis] < shape[axis]) break;
        at -= strides[axis] * shape[axis];
        index[axis] = 0;
      }
    }
  }

  const float* read(std::vector<float>& room) const {
    if (in_place) return static_cast<const float*>(data);
    room.resize(size);
    if (type == mx::float32) copy<float>(room);
    if (type == mx::float16) copy<mx::float16_t>(room);
    if (type == mx::bfloat16) copy<mx::bfloat16_t>(room);
    return room.data();
  }
};

// Where f32 values go, rounded to the array's type.
struct Narrowed {
  void* data;
  mx::Dtype type;
  size_t size;

  explicit Narrowed(mx::array& a) : data(a.data<char>()), type(a.dtype()), size(a.size()) {}

  float* begin(std::vector<float>& room) const {
    if (type == mx::float32) return static_cast<float*>(data);
    room.resize(size);
    return room.data();
  }
  void end(const std::vector<float>& room) const {
    for (size_t i = 0; i < room.size(); i++) {
      if (type == mx::float16) static_cast<mx::float16_t*>(data)[i] = mx::float16_t(room[i]);
      if (type == mx::bfloat16) static_cast<mx::bfloat16_t*>(data)[i] = mx::bfloat16_t(room[i]);
    }
  }
};

const char* name_of(LinearAttentionPart::Kind kind) {
  switch (kind) {
    case LinearAttentionPart::Convolution: return "LinearAttentionConvolution";
    case LinearAttentionPart::StateUpdate: return "LinearAttentionStateUpdate";
    default: return "LinearAttentionGatedNorm";
  }
}

void run_linear_attention(const LinearAttentionPart& part, int rows, const std::vector<const float*>& in,
                          const uint32_t* head_keys, const std::vector<float*>& out) {
  switch (part.kind) {
    case LinearAttentionPart::Convolution: {
      const float* const* biases = part.has_extra ? &in[6] : nullptr;
      linear_attention::convolve(part.size, rows, &in[0], &in[3], biases, in[9], out[0], out[1]);
      return;
    }
    case LinearAttentionPart::StateUpdate: {
      const auto& size = part.size;
      std::copy_n(in[6], size_t(size.values()) * size.key_dim, out[1]);
      linear_attention::update_state(size, rows, in[0], in[1], in[2], in[3], in[4], part.has_extra ? in[5] : nullptr,
                                     head_keys, part.has_limit ? in[7] : nullptr, out[1], out[0]);
      return;
    }
    case LinearAttentionPart::GatedNorm:
      linear_attention::gate_and_norm(part.size.rule, rows, part.size.values(), part.run, in[0], in[1],
                                      part.has_extra ? in[2] : nullptr, *in[3], out[0]);
  }
}

class LinearAttentionOnCpu : public mx::Primitive {
 public:
  LinearAttentionOnCpu(mx::Stream s, LinearAttentionPart part) : Primitive(s), part_(part) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    std::vector<Widened> in;
    const uint32_t* head_keys = nullptr;
    for (const auto& a : inputs) {
      if (a.dtype() == mx::uint32) {
        head_keys = a.data<uint32_t>();
      } else {
        in.emplace_back(a);
      }
    }
    std::vector<Narrowed> out;
    for (auto& a : outputs) {
      a.set_data(mx::allocator::malloc(a.nbytes()));
      out.emplace_back(a);
    }
    const int rows = inputs[0].shape(0);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([part = part_, rows, in = std::move(in), out = std::move(out), head_keys] {
      std::vector<std::vector<float>> in_rooms(in.size()), out_rooms(out.size());
      std::vector<const float*> from;
      std::vector<float*> to;
      for (size_t i = 0; i < in.size(); i++) from.push_back(in[i].read(in_rooms[i]));
      for (size_t i = 0; i < out.size(); i++) to.push_back(out[i].begin(out_rooms[i]));
      run_linear_attention(part, rows, from, head_keys, to);
      for (size_t i = 0; i < out.size(); i++) out[i].end(out_rooms[i]);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("on a GPU linear attention is a kernel");
  }

  const char* name() const override { return name_of(part_.kind); }

 private:
  LinearAttentionPart part_;
};

// How a part is spread over a GPU.
struct Spread {
  std::tuple<int, int, int> grid, group;
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> constants;
};

#ifdef __APPLE__
const mx::fast::CustomKernelFunction& metal_kernel_of(LinearAttentionPart::Kind kind) {
  // In the order of the inputs of each part.
  static const auto convolution = mx::fast::metal_kernel(
      "shardpack_convolution",
      {"q", "k", "v", "q_weights", "k_weights", "v_weights", "q_bias", "k_bias", "v_bias", "window"},
      {"mixed", "new_window"}, kernel_convolution, kernel_functions);
  static const auto state_update = mx::fast::metal_kernel(
      "shardpack_state_update",
      {"mixed", "a", "beta", "a_log", "dt_bias", "skip", "state", "limit", "head_keys"},
      {"y", "new_state"}, kernel_state_update, kernel_functions);
  static const auto gated_norm = mx::fast::metal_kernel(
      "shardpack_gated_norm", {"y", "z", "gain", "eps"}, {"out"}, kernel_gated_norm, kernel_functions);
  switch (kind) {
    case LinearAttentionPart::Convolution: return convolution;
    case LinearAttentionPart::StateUpdate: return state_update;
    default: return gated_norm;
  }
}
#endif

std::vector<mx::array> linear_attention_node(LinearAttentionPart part, std::vector<mx::array> inputs,
                                             std::vector<mx::Shape> shapes, std::vector<mx::Dtype> types, Spread spread) {
  auto device = mx::default_device();
  auto stream = mx::default_stream(device);
#ifdef __APPLE__
  if (device == mx::Device::gpu) {
    return metal_kernel_of(part.kind)(inputs, shapes, types, spread.grid, spread.group, spread.constants,
                                      std::nullopt, false, stream);
  }
#endif
  return mx::array::make_arrays(std::move(shapes), types, std::make_shared<LinearAttentionOnCpu>(stream, part), inputs);
}

} // namespace

// Sizes of one layer's part that is held here; as in ../src/linear_attention.rs.
struct sp_linear_sizes {
  int32_t rule, key_heads, heads, key_dim, value_dim, kernel;
};

namespace {

linear_attention::Sizes sizes_of(const sp_linear_sizes& s) {
  return {s.rule, s.key_heads * s.key_dim, s.heads, s.key_dim, s.value_dim, s.kernel};
}

} // namespace

extern "C" {

// `inputs`: queries, keys, values, the weights of each and, where they have some, the biases of
// each. `window` may be null: zeros.
int32_t sp_linear_convolution(const sp_linear_sizes* sizes, mx::array* const* inputs, size_t n,
                              const mx::array* window, mx::array** outputs) {
  return guarded([&] {
    LinearAttentionPart part{LinearAttentionPart::Convolution, sizes_of(*sizes)};
    const auto& size = part.size;
    if (n != 6 && n != 9) throw std::invalid_argument("a convolution of another number of inputs");
    part.has_extra = n == 9;
    std::vector<mx::array> in;
    for (size_t i = 0; i < n; i++) in.push_back(*inputs[i]);
    for (size_t i = n; i < 9; i++) in.push_back(in[i - 3]);
    auto type = in[2].dtype();
    int rows = in[2].shape(0);
    mx::Shape moved{size.kernel - 1, size.channels()};
    in.push_back(window ? *window : mx::zeros(moved, type));
    Spread spread{{size.channels(), rows + size.kernel - 1, 1}, {128, 1, 1},
                  {{"T", type}, {"KEYS", size.keys}, {"VALUES", size.values()}, {"KERNEL", size.kernel},
                   {"HAS_BIAS", part.has_extra}}};
    auto out = linear_attention_node(part, std::move(in), {{rows, size.channels()}, moved}, {type, type}, std::move(spread));
    for (size_t i = 0; i < 2; i++) outputs[i] = keep(std::move(out[i]));
    return 1;
  });
}

// `beta`, `skip`, `state` (zeros) may be null; a limit that is no number is none.
int32_t sp_linear_state_update(const sp_linear_sizes* sizes, const mx::array* mixed, const mx::array* a,
                               const mx::array* beta, const mx::array* a_log, const mx::array* dt_bias,
                               const mx::array* skip, const mx::array* head_keys, const mx::array* state, float limit,
                               mx::array** outputs) {
  return guarded([&] {
    LinearAttentionPart part{LinearAttentionPart::StateUpdate, sizes_of(*sizes)};
    const auto& size = part.size;
    part.has_extra = skip != nullptr;
    part.has_limit = limit == limit;
    int rows = mixed->shape(0);
    mx::Shape held{size.heads, size.value_dim, size.key_dim};
    // What is missing is not read.
    std::vector<mx::array> in{*mixed, *a, beta ? *beta : *a, *a_log, *dt_bias, skip ? *skip : *a_log,
                              state ? *state : mx::zeros(held, mx::float32),
                              mx::array(part.has_limit ? limit : 0.0f, mx::float32), *head_keys};
    Spread spread{{32, size.value_dim, size.heads}, {32, 4, 1},
                  {{"RULE", size.rule}, {"KEYS", size.keys}, {"HEADS", size.heads}, {"KEY_DIM", size.key_dim},
                   {"VALUE_DIM", size.value_dim}, {"HAS_LIMIT", part.has_limit}}};
    auto out = linear_attention_node(part, std::move(in), {{rows, size.values()}, held}, {mx::float32, mx::float32},
                                     std::move(spread));
    for (size_t i = 0; i < 2; i++) outputs[i] = keep(std::move(out[i]));
    return 1;
  });
}

// The result has the type of `z`. `gain` may be null.
mx::array* sp_linear_gated_norm(const sp_linear_sizes* sizes, const mx::array* y, const mx::array* z,
                                const mx::array* gain, float eps) {
  return guarded([&] {
    LinearAttentionPart part{LinearAttentionPart::GatedNorm, sizes_of(*sizes)};
    const auto& size = part.size;
    part.run = size.rule == 2 ? size.values() / sizes->key_heads : size.value_dim;
    part.has_extra = gain != nullptr;
    if (size.rule != 2 && !gain) throw std::invalid_argument("the delta rule's result is normalised");
    int rows = y->shape(0);
    std::vector<mx::array> in{*y, *z, gain ? *gain : *y, mx::array(eps, mx::float32)};
    Spread spread{{32, size.values() / part.run, rows}, {32, 1, 1},
                  {{"T", z->dtype()}, {"RULE", size.rule}, {"VALUES", size.values()}, {"RUN", part.run},
                   {"HAS_NORM", part.has_extra}}};
    auto out = linear_attention_node(part, std::move(in), {{rows, size.values()}}, {z->dtype()}, std::move(spread));
    return keep(std::move(out[0]));
  });
}

} // extern "C"
