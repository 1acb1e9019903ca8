// The C layer between shardpack and MLX's C++ library: plain functions over opaque arrays.
//
// Every function that can fail returns 0 (or a null pointer) and leaves a message for sp_error();
// no C++ exception leaves this file. Arrays are lazy: nothing is computed before sp_eval. All
// calls come from one thread, except the collective callback, which runs on the thread of MLX's
// CPU stream. What the functions do is said beside their twins in ../src/table.rs.

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/compile.h"
#include "mlx/backend/metal/metal.h"
#include "mlx/distributed/distributed.h"
#include "mlx/distributed/ops.h"
#include "mlx/fast.h"
#include "mlx/graph_utils.h"
#include "mlx/memory.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "mlx/version.h"

namespace mx = mlx::core;

// Changes whenever a function here changes its meaning or its parameters.
#ifndef SP_ABI
#error "SP_ABI is given by the installer"
#endif

namespace {

// MLX's streams belong to the thread that made them, so a rank is a thread: several ranks may run
// in one process, each with a context of its own.
thread_local std::string last_error;

thread_local std::optional<mx::Stream> comm_stream;

std::optional<mx::distributed::Group> mlx_group;

mx::array* keep(mx::array&& a) {
  return new mx::array(std::move(a));
}

template <typename F>
auto guarded(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "an unknown C++ exception";
  }
  return decltype(f()){};
}

mx::Dtype dtype_of(int32_t code) {
  switch (code) {
    case 0: return mx::float32;
    case 1: return mx::float16;
    case 2: return mx::bfloat16;
    case 3: return mx::uint32;
    case 4: return mx::int32;
    case 5: return mx::uint8;
    case 6: return mx::bool_;
    case 7: return mx::uint64;
    default: throw std::invalid_argument("unknown dtype code");
  }
}

std::vector<mx::array> arrays_of(mx::array* const* arrays, size_t n) {
  std::vector<mx::array> all;
  for (size_t i = 0; i < n; i++) all.push_back(*arrays[i]);
  return all;
}

mx::Shape shape_of(const int32_t* dims, size_t n) {
  return mx::Shape(dims, dims + n);
}

std::vector<int> ints(const int32_t* values, size_t n) {
  return std::vector<int>(values, values + n);
}

std::optional<mx::array> maybe(const mx::array* a) {
  return a ? std::optional<mx::array>(*a) : std::nullopt;
}

// A scalar in an array's own type: data, no kernel, and no promotion to f32.
mx::array scalar(float value, mx::Dtype type) {
  return mx::array(value, type);
}

// Stands for a kernel in a graph that is drawn and not computed: on a processor MLX spells out
// what one kernel does on a GPU.
class Marker : public mx::Primitive {
 public:
  Marker(mx::Stream s, const char* name) : Primitive(s), name_(name) {}
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("a graph of markers is drawn, not computed");
  }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    eval_cpu(inputs, outputs);
  }
  const char* name() const override { return name_; }

 private:
  const char* name_;
};

thread_local bool marks_kernels = false;

thread_local bool compiles_always = false;

// While a graph is differentiated: which entries are chosen does not change with what they hold.
thread_local bool differentiates = false;

mx::array chosen(mx::array&& indices) {
  return differentiates ? mx::stop_gradient(indices) : std::move(indices);
}

mx::array marker(const char* name, mx::Shape shape, mx::Dtype type, std::vector<mx::array> inputs) {
  auto stream = mx::default_stream(mx::default_device());
  return mx::array(std::move(shape), type, std::make_shared<Marker>(stream, name), std::move(inputs));
}

// `x`, computed after `after` where there is one.
mx::array ordered(const mx::array& x, const mx::array* after) {
  return after ? mx::depends({x}, {*after})[0] : x;
}

} // namespace

// --- collectives inside the graph -----------------------------------------------------------

// Fills `out` from `in` over the ranks. kind 0: elementwise sum of f32, kind 2: of bf16 (in and out
// may be the same memory); kind 1: every rank's bytes, in rank order. 0 = done. It must return by
// its own deadline, must not call MLX and must not unwind.
typedef int32_t (*sp_collective)(
    void* ctx, int32_t kind, const void* in, size_t in_bytes, void* out, size_t out_bytes);

// Who carries out the collectives of a rank's graphs. It is never freed: graphs may outlive the
// model that they belong to.
struct sp_context {
  std::atomic<sp_collective> call{nullptr};
  std::atomic<void*> ctx{nullptr};
  // First failure. Once set, no further callback is made: a graph with 160 collectives costs one
  // deadline, not 160. The error is read with sp_failed after every evaluation, since exceptions
  // thrown in stream tasks can hang MLX 0.32 or get lost.
  std::atomic<int32_t> code{0};
};

namespace {

void run_collective(sp_context& collective, int32_t kind, const void* in, size_t in_bytes, void* out, size_t out_bytes) {
  int32_t code = collective.code.load(std::memory_order_acquire);
  if (code == 0 && out_bytes != 0) {
    auto call = collective.call.load(std::memory_order_acquire);
    code = call ? call(collective.ctx.load(std::memory_order_acquire), kind, in, in_bytes, out, out_bytes) : -1;
    if (code != 0) collective.code.store(code, std::memory_order_release);
  }
  if (code != 0 && in != out) {
    // No uninitialised memory downstream.
    std::memset(out, 0, out_bytes);
    if (kind != 1) std::memcpy(out, in, in_bytes);
  }
}

class Collective : public mx::UnaryPrimitive {
 public:
  Collective(mx::Stream s, sp_context* context, int32_t kind, mx::Shape shape)
      : UnaryPrimitive(s), context_(context), kind_(kind), shape_(std::move(shape)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    if (kind_ != 1 && in.is_donatable()) {
      out.copy_shared_buffer(in);
    } else {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    }
    // Raw pointers as in MLX's own collectives: MLX keeps the input until this task is done, the
    // consumers keep the output. Capturing arrays would defeat donation downstream.
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([context = context_,
                      kind = kind_,
                      in_ptr = in.data<char>(),
                      in_bytes = in.nbytes(),
                      out_ptr = out.data<char>(),
                      out_bytes = out.nbytes()] {
      run_collective(*context, kind, in_ptr, in_bytes, out_ptr, out_bytes);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("a collective runs on a CPU stream only");
  }

  const char* name() const override { return "ShardpackCollective"; }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override { return {shape_}; }

 private:
  sp_context* context_;
  int32_t kind_;
  mx::Shape shape_;
};

} // namespace

extern "C" {

int32_t sp_abi(void) { return SP_ABI; }
const char* sp_version(void) { return mx::version(); }
int32_t sp_version_built(void) { return MLX_VERSION_NUMERIC; }
// The file that MLX's code was really loaded from.
const char* sp_loaded_from(void) {
  Dl_info info{};
  return dladdr(reinterpret_cast<const void*>(&mx::version), &info) && info.dli_fname ? info.dli_fname : "";
}
const char* sp_error(void) { return last_error.c_str(); }

int32_t sp_metal(void) {
  return guarded([] { return int32_t(mx::metal::is_available() ? 1 : 0); });
}

int32_t sp_start(int32_t gpu) {
  return guarded([&] {
    mx::Device device(gpu ? mx::Device::gpu : mx::Device::cpu);
    if (gpu && !mx::is_available(device)) throw std::runtime_error("this machine has no Metal GPU");
    mx::set_default_device(device);
    // A stream of this thread's own: on a shared one, a rank that waits in a collective would keep
    // the other ranks of the process from computing what it waits for.
    auto stream = mx::new_stream(device);
    mx::set_default_stream(stream);
    // Collectives stand on a CPU stream. Where the CPU computes too, one stream for both saves
    // two thread hand-overs a sum.
    comm_stream = gpu ? mx::new_stream(mx::Device::cpu) : stream;
    return 1;
  });
}

sp_context* sp_new_context(void) { return new sp_context(); }
void sp_set_collective(sp_context* context, sp_collective call, void* ctx) {
  context->ctx.store(ctx, std::memory_order_release);
  context->call.store(call, std::memory_order_release);
}
int32_t sp_failed(const sp_context* context) { return context->code.load(std::memory_order_acquire); }
int32_t sp_reset(sp_context* context) {
  // Both streams are waited for even where the first one's error is thrown here.
  auto comm = guarded([&] {
    if (comm_stream) mx::synchronize(*comm_stream);
    return 1;
  });
  auto own = guarded([&] {
    mx::synchronize();
    return 1;
  });
  context->code.store(0, std::memory_order_release);
  return comm & own;
}

// `after`, where there is one, is computed before: without it MLX orders what does not depend on
// each other as it likes, on each rank in another way.
mx::array* sp_collective_node(sp_context* context, const mx::array* x, const mx::array* after, int32_t kind,
                              const int32_t* shape, size_t n) {
  return guarded([&]() -> mx::array* {
    if (!comm_stream) throw std::runtime_error("sp_start was not called");
    if (kind == 0 && x->dtype() == mx::bfloat16) kind = 2;
    auto in = mx::contiguous(kind == 0 ? mx::astype(*x, mx::float32) : *x);
    auto out = shape_of(shape, n);
    std::vector<mx::array> inputs{in};
    if (after) inputs.push_back(*after);
    return keep(mx::array(
        out, in.dtype(), std::make_shared<Collective>(*comm_stream, context, kind, out), std::move(inputs)));
  });
}

// --- MLX's own distributed layer -------------------------------------------------------------

int32_t sp_dist_available(const char* backend) {
  return guarded([&] { return int32_t(mx::distributed::is_available(backend) ? 1 : 0); });
}
int32_t sp_dist_init(const char* backend, int32_t* rank, int32_t* size) {
  return guarded([&] {
    mlx_group = mx::distributed::init(true, backend);
    *rank = mlx_group->rank();
    *size = mlx_group->size();
    return 1;
  });
}
mx::array* sp_dist_sum(const mx::array* x, const mx::array* after) {
  return guarded([&] {
    if (!mlx_group) throw std::runtime_error("no distributed group");
    return keep(mx::distributed::all_sum(ordered(*x, after), mlx_group, *comm_stream));
  });
}
mx::array* sp_dist_gather(const mx::array* x, const mx::array* after) {
  return guarded([&] {
    if (!mlx_group) throw std::runtime_error("no distributed group");
    return keep(mx::distributed::all_gather(ordered(*x, after), mlx_group, *comm_stream));
  });
}

// --- arrays ------------------------------------------------------------------------------------

mx::array* sp_copy_in(const void* data, int32_t dtype, const int32_t* shape, size_t n) {
  return guarded([&] {
    auto type = dtype_of(dtype);
    auto dims = shape_of(shape, n);
    size_t bytes = mx::size_of(type);
    for (auto d : dims) bytes *= size_t(d);
    auto buffer = mx::allocator::malloc(bytes);
    if (bytes) std::memcpy(buffer.raw_ptr(), data, bytes);
    return keep(mx::array(buffer, dims, type));
  });
}

mx::array* sp_wrap(void* data, int32_t dtype, const int32_t* shape, size_t n,
                   void (*release)(void*), void* owner, int32_t* copied) {
  return guarded([&] {
    auto a = mx::array(data, shape_of(shape, n), dtype_of(dtype), [=](void*) { release(owner); });
    *copied = a.data<char>() != static_cast<char*>(data);
    return keep(std::move(a));
  });
}

mx::array* sp_clone(const mx::array* a) { return guarded([&] { return keep(mx::array(*a)); }); }
void sp_free(mx::array* a) { delete a; }
size_t sp_ndim(const mx::array* a) { return a->ndim(); }
int32_t sp_dim(const mx::array* a, size_t axis) { return a->shape()[axis]; }
size_t sp_nbytes(const mx::array* a) { return a->nbytes(); }
int32_t sp_dtype(const mx::array* a) {
  for (int32_t code = 0; code < 8; code++) {
    if (dtype_of(code) == a->dtype()) return code;
  }
  return -1;
}

int32_t sp_eval(mx::array* const* arrays, size_t n) {
  return guarded([&] {
    mx::eval(arrays_of(arrays, n));
    return 1;
  });
}

int32_t sp_read(const mx::array* a, float* out, size_t len) {
  return guarded([&] {
    auto x = mx::contiguous(mx::astype(*a, mx::float32));
    mx::eval(x);
    if (x.size() != len) throw std::runtime_error("sp_read: another number of elements");
    if (len) std::memcpy(out, x.data<float>(), len * sizeof(float));
    return 1;
  });
}

// Contiguous, in a buffer of its own: a slice keeps the whole array that it is cut from.
mx::array* sp_contiguous(const mx::array* a) {
  return guarded([&] { return keep(mx::contiguous(*a)); });
}
// The graph of what is not computed yet, as GraphViz reads it; stays until the next call.
const char* sp_graph(mx::array* const* arrays, size_t n) {
  static thread_local std::string text;
  return guarded([&]() -> const char* {
    std::ostringstream out;
    mx::export_to_dot(out, arrays_of(arrays, n));
    text = out.str();
    return text.c_str();
  });
}
// Compiles fused functions on a processor too, which needs a C++ compiler at run time; for tests.
void sp_compile_always(int32_t on) { compiles_always = on != 0; }
// From now on this thread's graphs have one marker for each fused kernel; for sp_graph alone.
void sp_mark_kernels(int32_t on) { marks_kernels = on != 0; }

mx::array* sp_full(float value, int32_t dtype, const int32_t* shape, size_t n) {
  return guarded([&] { return keep(mx::full(shape_of(shape, n), value, dtype_of(dtype))); });
}
mx::array* sp_astype(const mx::array* a, int32_t dtype) {
  return guarded([&] { return keep(mx::astype(*a, dtype_of(dtype))); });
}

// --- shapes ------------------------------------------------------------------------------------

mx::array* sp_reshape(const mx::array* a, const int32_t* shape, size_t n) {
  return guarded([&] { return keep(mx::reshape(*a, shape_of(shape, n))); });
}
mx::array* sp_transpose(const mx::array* a, const int32_t* axes, size_t n) {
  return guarded([&] { return keep(mx::transpose(*a, ints(axes, n))); });
}
mx::array* sp_broadcast(const mx::array* a, const int32_t* shape, size_t n) {
  return guarded([&] { return keep(mx::broadcast_to(*a, shape_of(shape, n))); });
}
mx::array* sp_slice(const mx::array* a, const int32_t* start, const int32_t* stop, size_t n) {
  return guarded([&] { return keep(mx::slice(*a, shape_of(start, n), shape_of(stop, n))); });
}
mx::array* sp_slice_update(const mx::array* a, const mx::array* part, const int32_t* start,
                           const int32_t* stop, size_t n) {
  return guarded([&] { return keep(mx::slice_update(*a, *part, shape_of(start, n), shape_of(stop, n))); });
}
// `a` [entries, heads, places, width] with rows[i] [heads, 1, width] at places[i] of a[entries[i]].
mx::array* sp_with_rows(const mx::array* a, const mx::array* entries, const mx::array* places,
                        const mx::array* rows) {
  return guarded([&] {
    return keep(mx::scatter(*a, {*entries, *places}, mx::expand_dims(*rows, 1), {0, 2}));
  });
}
mx::array* sp_concat(mx::array* const* arrays, size_t n, int32_t axis) {
  return guarded([&] {
    return keep(mx::concatenate(arrays_of(arrays, n), axis));
  });
}
mx::array* sp_take(const mx::array* a, const mx::array* indices, int32_t axis) {
  return guarded([&] { return keep(mx::take(*a, *indices, axis)); });
}
mx::array* sp_take_along(const mx::array* a, const mx::array* indices, int32_t axis) {
  return guarded([&] { return keep(mx::take_along_axis(*a, *indices, axis)); });
}
mx::array* sp_put_along(const mx::array* a, const mx::array* indices, const mx::array* values, int32_t axis) {
  return guarded([&] { return keep(mx::put_along_axis(*a, *indices, *values, axis)); });
}

// --- elementwise -------------------------------------------------------------------------------

mx::array* sp_unary(int32_t op, const mx::array* a) {
  return guarded([&]() -> mx::array* {
    switch (op) {
      case 0: return keep(mx::negative(*a));
      case 1: return keep(mx::exp(*a));
      case 2: return keep(mx::log(*a));
      case 3: return keep(mx::tanh(*a));
      case 4: return keep(mx::sigmoid(*a));
      case 5: return keep(mx::sqrt(*a));
      case 6: return keep(mx::rsqrt(*a));
      case 7: return keep(mx::erf(*a));
      case 8: return keep(mx::square(*a));
      case 9: return keep(mx::abs(*a));
      case 10: return keep(mx::log1p(*a));
      case 11: return keep(mx::floor(*a));
      default: throw std::invalid_argument("unknown unary operation");
    }
  });
}
mx::array* sp_binary(int32_t op, const mx::array* a, const mx::array* b) {
  return guarded([&]() -> mx::array* {
    switch (op) {
      case 0: return keep(mx::add(*a, *b));
      case 1: return keep(mx::subtract(*a, *b));
      case 2: return keep(mx::multiply(*a, *b));
      case 3: return keep(mx::divide(*a, *b));
      case 4: return keep(mx::maximum(*a, *b));
      case 5: return keep(mx::minimum(*a, *b));
      case 6: return keep(mx::logaddexp(*a, *b));
      case 7: return keep(mx::less(*a, *b));
      case 8: return keep(mx::less_equal(*a, *b));
      case 9: return keep(mx::greater(*a, *b));
      case 10: return keep(mx::greater_equal(*a, *b));
      case 11: return keep(mx::equal(*a, *b));
      case 12: return keep(mx::logical_and(*a, *b));
      case 13: return keep(mx::logical_or(*a, *b));
      case 14: return keep(mx::floor_divide(*a, *b));
      default: throw std::invalid_argument("unknown binary operation");
    }
  });
}
// The same with a number in place of the second array, in the first one's type.
mx::array* sp_with_scalar(int32_t op, const mx::array* a, float b) {
  return guarded([&]() -> mx::array* {
    auto type = mx::issubdtype(a->dtype(), mx::floating) || a->dtype() == mx::uint32 || a->dtype() == mx::int32
        ? a->dtype()
        : mx::float32;
    auto number = scalar(b, type);
    return sp_binary(op, a, &number);
  });
}
mx::array* sp_where(const mx::array* c, const mx::array* a, const mx::array* b) {
  return guarded([&] { return keep(mx::where(*c, *a, *b)); });
}
mx::array* sp_reduce(int32_t op, const mx::array* a, int32_t axis, int32_t keepdims) {
  return guarded([&]() -> mx::array* {
    switch (op) {
      case 0: return keep(mx::sum(*a, axis, keepdims != 0));
      case 1: return keep(mx::max(*a, axis, keepdims != 0));
      case 2: return keep(mx::mean(*a, axis, keepdims != 0));
      default: throw std::invalid_argument("unknown reduction");
    }
  });
}
mx::array* sp_softmax(const mx::array* a, int32_t axis) {
  return guarded([&] { return keep(mx::softmax(*a, axis, true)); });
}
// The order of an axis in which the first `kth + 1` are the smallest, in any order.
mx::array* sp_argpartition(const mx::array* a, int32_t kth, int32_t axis) {
  return guarded([&] { return keep(chosen(mx::argpartition(*a, kth, axis))); });
}
// The values of an axis in such an order.
mx::array* sp_partition(const mx::array* a, int32_t kth, int32_t axis) {
  return guarded([&] { return keep(mx::partition(*a, kth, axis)); });
}
mx::array* sp_argsort(const mx::array* a, int32_t axis) {
  return guarded([&] { return keep(chosen(mx::argsort(*a, axis))); });
}

// --- products ----------------------------------------------------------------------------------

mx::array* sp_matmul(const mx::array* a, const mx::array* b) {
  return guarded([&] { return keep(mx::matmul(*a, *b)); });
}
// `mode` is MLX's name of the groups; float groups have no biases.
mx::array* sp_quantized_matmul(const mx::array* x, const mx::array* w, const mx::array* scales,
                               const mx::array* biases, int32_t transpose, int32_t group, int32_t bits,
                               const char* mode) {
  return guarded([&] {
    return keep(mx::quantized_matmul(*x, *w, *scales, maybe(biases), transpose != 0, group, bits, mode));
  });
}
mx::array* sp_dequantize(const mx::array* w, const mx::array* scales, const mx::array* biases,
                         int32_t group, int32_t bits, const char* mode, int32_t dtype) {
  return guarded([&] {
    return keep(mx::dequantize(*w, *scales, maybe(biases), group, bits, mode, std::nullopt, dtype_of(dtype)));
  });
}
mx::array* sp_gather_qmm(const mx::array* x, const mx::array* w, const mx::array* scales,
                         const mx::array* biases, const mx::array* lhs, const mx::array* rhs,
                         int32_t group, int32_t bits, const char* mode, int32_t sorted) {
  return guarded([&] {
    return keep(mx::gather_qmm(*x, *w, *scales, maybe(biases), maybe(lhs), maybe(rhs), true, group,
                               bits, mode, sorted != 0));
  });
}
mx::array* sp_gather_mm(const mx::array* x, const mx::array* w, const mx::array* lhs,
                        const mx::array* rhs, int32_t sorted) {
  return guarded([&] { return keep(mx::gather_mm(*x, *w, maybe(lhs), maybe(rhs), sorted != 0)); });
}

// --- fused -------------------------------------------------------------------------------------

mx::array* sp_rms_norm(const mx::array* x, const mx::array* gain, float eps) {
  return guarded([&] {
    if (marks_kernels) return keep(marker("rms_norm", x->shape(), x->dtype(), gain ? std::vector{*x, *gain} : std::vector{*x}));
    return keep(mx::fast::rms_norm(*x, maybe(gain), eps));
  });
}
mx::array* sp_layer_norm(const mx::array* x, const mx::array* gain, const mx::array* bias, float eps) {
  return guarded([&] {
    if (marks_kernels) return keep(marker("layer_norm", x->shape(), x->dtype(), {*x}));
    return keep(mx::fast::layer_norm(*x, maybe(gain), maybe(bias), eps));
  });
}
// `x` is [rows, heads, 1, width]; `positions` has one for each row, or one for all.
mx::array* sp_rope(const mx::array* x, int32_t dims, int32_t traditional, const mx::array* positions,
                   const mx::array* periods) {
  return guarded([&] {
    if (marks_kernels) return keep(marker("rope", x->shape(), x->dtype(), {*x, *positions, *periods}));
    return keep(mx::fast::rope(*x, dims, traditional != 0, std::nullopt, 1.0f, *positions, *periods));
  });
}
mx::array* sp_attention(const mx::array* q, const mx::array* k, const mx::array* v, float scale,
                        const char* mode, const mx::array* mask, const mx::array* sinks) {
  return guarded([&] {
    if (marks_kernels) {
      auto shape = q->shape();
      shape.back() = v->shape().back();
      std::vector<mx::array> inputs{*q, *k, *v};
      for (const auto* more : {mask, sinks}) {
        if (more) inputs.push_back(*more);
      }
      return keep(marker("attention", std::move(shape), q->dtype(), std::move(inputs)));
    }
    return keep(mx::fast::scaled_dot_product_attention(*q, *k, *v, scale, mode, maybe(mask), maybe(sinks)));
  });
}

// Makes arrays of arrays; what it gives is freed here.
typedef int32_t (*sp_build)(void* ctx, mx::array* const* inputs, size_t n, mx::array** outputs, size_t m);
using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

static Function calling(sp_build build, void* ctx, size_t m) {
  return [build, ctx, m](const std::vector<mx::array>& in) {
    std::vector<mx::array*> handles;
    for (const auto& a : in) handles.push_back(const_cast<mx::array*>(&a));
    std::vector<mx::array*> out(m, nullptr);
    int32_t done = build(ctx, handles.data(), handles.size(), out.data(), m);
    std::vector<mx::array> results;
    for (auto* a : out) {
      if (a) results.push_back(*a);
      delete a;
    }
    if (done != 1 || results.size() != m) throw std::runtime_error("a function gave nothing");
    return results;
  };
}

// Element-wise functions as one kernel. `build` is called when the kernel of this `key` is traced,
// and must depend on nothing but what the key says. On a processor it is called each time, since
// MLX would want a C++ compiler there.
int32_t sp_fused(uint64_t key, sp_build build, void* ctx, mx::array* const* inputs, size_t n,
                 mx::array** outputs, size_t m) {
  static thread_local std::unordered_map<uint64_t, Function> compiled;
  static thread_local Function current;
  return guarded([&] {
    auto in = arrays_of(inputs, n);
    auto plain = calling(build, ctx, m);
    std::vector<mx::array> out;
    if (marks_kernels) {
      auto shapes = plain(in);
      auto stream = mx::default_stream(mx::default_device());
      std::vector<mx::Shape> dims;
      std::vector<mx::Dtype> types;
      for (const auto& a : shapes) {
        dims.push_back(a.shape());
        types.push_back(a.dtype());
      }
      out = mx::array::make_arrays(std::move(dims), types, std::make_shared<Marker>(stream, "fused"), in);
    } else if (mx::default_device() == mx::Device::gpu || compiles_always) {
      auto found = compiled.find(key);
      if (found == compiled.end()) {
        // With something captured: MLX would take functions without for one and the same.
        Function traced = [key](const std::vector<mx::array>& in) {
          if (!current) throw std::runtime_error("a fused function is traced outside of its call");
          return current(in);
        };
        found = compiled.emplace(key, mx::compile(std::move(traced), true)).first;
      }
      struct Reset {
        ~Reset() { current = nullptr; }
      } reset;
      current = plain;
      out = found->second(in);
    } else {
      out = plain(in);
    }
    for (size_t i = 0; i < m; i++) outputs[i] = keep(std::move(out[i]));
    return 1;
  });
}

// --- gradients ---------------------------------------------------------------------------------

// The array that `build` makes of the inputs, and the gradients of its product with `cotangent` by
// each of them: outputs[0], and as many more as inputs.
int32_t sp_gradients(sp_build build, void* ctx, mx::array* const* inputs, size_t n,
                     const mx::array* cotangent, mx::array** outputs) {
  struct Differentiates {
    Differentiates() { differentiates = true; }
    ~Differentiates() { differentiates = false; }
  } on;
  return guarded([&] {
    auto [values, gradients] = mx::vjp(calling(build, ctx, 1), arrays_of(inputs, n), {*cotangent});
    outputs[0] = keep(std::move(values[0]));
    for (size_t i = 0; i < n; i++) outputs[1 + i] = keep(std::move(gradients[i]));
    return 1;
  });
}

// --- memory ------------------------------------------------------------------------------------

size_t sp_active_memory(void) { return guarded([] { return mx::get_active_memory(); }); }
size_t sp_peak_memory(void) { return guarded([] { return mx::get_peak_memory(); }); }
int32_t sp_set_limits(size_t memory, size_t cache, size_t wired) {
  return guarded([&] {
    mx::set_memory_limit(memory);
    mx::set_cache_limit(cache);
    if (wired) mx::set_wired_limit(wired);
    return 1;
  });
}
void sp_clear_cache(void) { guarded([] { mx::clear_cache(); return 1; }); }

size_t sp_device_info(const char* key) {
  return guarded([&]() -> size_t {
    mx::Device gpu(mx::Device::gpu);
    if (!mx::is_available(gpu)) return 0;
    // metal::device_info() is defined in MLX's build for processors alone.
    const auto& info = mx::device_info(gpu);
    auto found = info.find(key);
    if (found == info.end()) return 0;
    const auto* value = std::get_if<size_t>(&found->second);
    return value ? *value : 0;
  });
}

} // extern "C"
