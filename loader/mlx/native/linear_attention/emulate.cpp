// Runs the text of the kernels for Metal on a processor, 32 lanes in lock-step, and compares it
// with the plain loops. Compiled and run by tests/linear_attention.rs.

#include <barrier>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "steps.h"

using std::exp;
using std::fabs;
using std::log;
typedef unsigned int uint;

static float rsqrt(float x) { return 1.0f / std::sqrt(x); }

struct Place {
  uint x, y, z;
};
static thread_local Place thread_position_in_grid;
static thread_local uint thread_index_in_simdgroup;
static std::barrier lanes_meet(32);
static float lanes[32];

static float simd_sum(float x) {
  lanes[thread_index_in_simdgroup] = x;
  lanes_meet.arrive_and_wait();
  float sum = 0;
  for (float lane : lanes) sum += lane;
  lanes_meet.arrive_and_wait();
  return sum;
}

// bfloat16, rounded to even.
struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    bits = uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
};

#include "functions.metal"

template <typename T>
struct Inputs {
  const T *q, *k, *v, *window, *a, *beta, *z;
  const float *q_weights, *k_weights, *v_weights, *q_bias, *k_bias, *v_bias, *a_log, *dt_bias, *skip, *gain, *state;
  const uint32_t* head_keys;
  float limit, eps;
  int q_shape[2], mixed_shape[2];
  T *mixed, *new_window, *out;
  float *y, *new_state;
};

#define INPUTS \
  auto [q, k, v, window, a, beta, z, q_weights, k_weights, v_weights, q_bias, k_bias, v_bias, a_log, dt_bias, skip, \
        gain, state, head_keys, limit, eps, q_shape, mixed_shape, mixed, new_window, out, y, new_state] = inputs;

template <typename T, int KEYS, int VALUES, int KERNEL, bool HAS_BIAS>
void convolution(const Inputs<T>& inputs) {
  INPUTS
#include "convolution.metal"
}
template <typename T, int RULE, int KEYS, int HEADS, int KEY_DIM, int VALUE_DIM, bool HAS_LIMIT>
void state_update(const Inputs<T>& inputs) {
  INPUTS
#include "state_update.metal"
}
template <typename T, int RULE, int VALUES, int RUN, bool HAS_NORM>
void gated_norm(const Inputs<T>& inputs) {
  INPUTS
#include "gated_norm.metal"
}

// Of each simdgroup its 32 lanes, together.
static void dispatch(uint y, uint z, const std::function<void()>& kernel) {
  std::vector<std::thread> threads;
  for (uint lane = 0; lane < 32; lane++) {
    threads.emplace_back([=, &kernel] {
      thread_index_in_simdgroup = lane;
      for (uint at = 0; at < y * z; at++) {
        thread_position_in_grid = {lane, at % y, at / y};
        kernel();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

static std::mt19937 generator(7);
template <typename T = float>
static std::vector<T> numbers(size_t len, float width = 1, float middle = 0) {
  std::normal_distribution<float> normal(middle, width);
  std::vector<T> all(len);
  for (auto& x : all) x = T(normal(generator));
  return all;
}
template <typename T>
static std::vector<float> exact(const std::vector<T>& x) { return {x.begin(), x.end()}; }

static int failures = 0;
template <typename T>
static void compare(const char* what, const std::vector<float>& expected, const std::vector<T>& found, float bound) {
  float worst = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); i++) {
    const float apart = std::fabs(expected[i] - float(found[i]));
    worst = apart <= worst ? worst : apart;
    largest = std::max(largest, std::fabs(expected[i]));
  }
  const bool good = worst <= bound * largest && largest > 0;
  std::printf("  %s: %.1e of %.1e%s\n", what, worst, largest, good ? "" : " FAILED");
  failures += !good;
}

template <typename T, int RULE, int KEY_HEADS, int HEADS, int KEY_DIM, int VALUE_DIM, int KERNEL, bool EXTRA>
static void check(int rows) {
  constexpr int KEYS = KEY_HEADS * KEY_DIM, VALUES = HEADS * VALUE_DIM, CHANNELS = 2 * KEYS + VALUES;
  std::printf("rule %d, %d rows, %d/%d heads of %d/%d, %zu bytes, extra %d\n", RULE, rows, KEY_HEADS, HEADS, KEY_DIM,
              VALUE_DIM, sizeof(T), EXTRA);
  const float rounded = sizeof(T) == 2 ? 5e-3f : 2e-5f;
  linear_attention::Sizes size{RULE, KEYS, HEADS, KEY_DIM, VALUE_DIM, KERNEL};
  auto q = numbers<T>(rows * KEYS), k = numbers<T>(rows * KEYS), v = numbers<T>(rows * VALUES);
  auto window = numbers<T>((KERNEL - 1) * CHANNELS), z = numbers<T>(rows * VALUES), beta = numbers<T>(rows * HEADS);
  const int a_width = RULE == 1 ? KEYS : HEADS;
  auto a = numbers<T>(rows * a_width);
  auto qw = numbers(KEYS * KERNEL), kw = numbers(KEYS * KERNEL), vw = numbers(VALUES * KERNEL);
  auto qb = numbers(KEYS), kb = numbers(KEYS), vb = numbers(VALUES), a_log = numbers(HEADS), dt = numbers(a_width, 2, -1);
  auto skip = numbers(HEADS), gain = numbers(RULE == 2 ? VALUES : VALUE_DIM), state = numbers(VALUES * KEY_DIM);
  std::vector<uint32_t> head_keys(HEADS);
  for (int head = 0; head < HEADS; head++) head_keys[head] = head * KEY_HEADS / HEADS;
  const float limit = 0.7f, eps = 1e-5f;

  std::vector<T> mixed(rows * CHANNELS), new_window(window.size()), out(rows * VALUES);
  std::vector<float> y(rows * VALUES), new_state(state.size());
  const Inputs<T> inputs{q.data(), k.data(), v.data(), window.data(), a.data(), beta.data(), z.data(), qw.data(),
                         kw.data(), vw.data(), qb.data(), kb.data(), vb.data(), a_log.data(), dt.data(), skip.data(),
                         gain.data(), state.data(), head_keys.data(), limit, eps, {rows, KEYS}, {rows, CHANNELS},
                         mixed.data(), new_window.data(), out.data(), y.data(), new_state.data()};

  std::vector<float> parts[3] = {exact(q), exact(k), exact(v)}, before = exact(window);
  std::vector<float> expected(mixed.size()), moved(window.size());
  const float *in[3] = {parts[0].data(), parts[1].data(), parts[2].data()}, *weights[3] = {qw.data(), kw.data(), vw.data()};
  const float* biases[3] = {qb.data(), kb.data(), vb.data()};
  linear_attention::convolve(size, rows, in, weights, EXTRA ? biases : nullptr, before.data(), expected.data(), moved.data());
  for (int row = 0; row < rows + KERNEL - 1; row++) {
    for (int channel = 0; channel < CHANNELS; channel++) {
      thread_position_in_grid = {uint(channel), uint(row), 0};
      convolution<T, KEYS, VALUES, KERNEL, EXTRA>(inputs);
    }
  }
  compare("convolution", expected, mixed, rounded);
  compare("window", moved, new_window, 0);

  auto rows_in = exact(mixed), a_in = exact(a), beta_in = exact(beta), z_in = exact(z), memory = state;
  std::vector<float> result(rows * VALUES), gated(rows * VALUES);
  linear_attention::update_state(size, rows, rows_in.data(), a_in.data(), beta_in.data(), a_log.data(), dt.data(),
                                 RULE == 2 ? skip.data() : nullptr, head_keys.data(), EXTRA ? &limit : nullptr,
                                 memory.data(), result.data());
  dispatch(VALUE_DIM, HEADS, [&] { state_update<T, RULE, KEYS, HEADS, KEY_DIM, VALUE_DIM, EXTRA>(inputs); });
  compare("result", result, y, 2e-5f);
  compare("state", memory, new_state, 2e-5f);

  constexpr int RUN = RULE == 2 ? VALUES / KEY_HEADS : VALUE_DIM;
  constexpr bool NORM = RULE != 2 || EXTRA;
  linear_attention::gate_and_norm(RULE, rows, VALUES, RUN, y.data(), z_in.data(), NORM ? gain.data() : nullptr, eps, gated.data());
  dispatch(VALUES / RUN, rows, [&] { gated_norm<T, RULE, VALUES, RUN, NORM>(inputs); });
  compare("gated norm", gated, out, rounded);
}

int main() {
  // Widths below, at and above a simdgroup; more value heads than key heads; steps shorter and
  // longer than the window.
  check<float, 0, 2, 4, 16, 5, 4, false>(1);
  check<float, 0, 1, 2, 64, 8, 4, true>(7);
  check<float, 1, 2, 2, 40, 6, 4, false>(2);
  check<float, 1, 2, 2, 32, 4, 4, true>(5);
  check<float, 2, 1, 3, 48, 4, 4, true>(6);
  check<float, 2, 2, 4, 7, 3, 2, false>(3);
  check<Half, 0, 2, 4, 40, 4, 4, false>(5);
  check<Half, 1, 2, 2, 32, 4, 4, true>(3);
  check<Half, 2, 1, 2, 33, 4, 4, true>(4);
  if (failures) std::printf("%d comparisons failed\n", failures);
  return failures != 0;
}
