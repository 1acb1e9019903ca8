// Linear attention on a processor: plain loops over f32, row by row as the papers have it, and
// the twin that the kernels for a GPU are compared with.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace linear_attention {

struct Sizes {
  // 0 Gated DeltaNet, 1 Kimi Delta Attention, 2 Mamba-2.
  int rule;
  int keys, heads, key_dim, value_dim, kernel;
  int values() const { return heads * value_dim; }
  int channels() const { return 2 * keys + values(); }
};

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
// In eight sums, which a compiler may compute at once.
inline float dot(const float* a, const float* b, int len) {
  float sums[8] = {}, rest = 0;
  int i = 0;
  for (; i + 8 <= len; i += 8) {
    for (int lane = 0; lane < 8; lane++) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < len; i++) rest += a[i] * b[i];
  for (float sum : sums) rest += sum;
  return rest;
}
inline float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

// Each channel's sum over the last rows, through silu. `in`: q, k, v; `weights` and `biases` (which
// may be null) likewise.
inline void convolve(const Sizes& size, int rows, const float* const* in, const float* const* weights,
                     const float* const* biases, const float* window, float* mixed, float* new_window) {
  const int channels = size.channels(), before = size.kernel - 1;
  const int widths[3] = {size.keys, size.keys, size.values()};
  int channel = 0;
  for (int part = 0; part < 3; part++) {
    for (int c = 0; c < widths[part]; c++, channel++) {
      auto input = [&](int row) {
        return row < 0 ? window[size_t(row + before) * channels + channel] : in[part][size_t(row) * widths[part] + c];
      };
      for (int row = 0; row < rows; row++) {
        float sum = 0;
        for (int tap = 0; tap < size.kernel; tap++) {
          sum += input(row - before + tap) * weights[part][c * size.kernel + tap];
        }
        if (biases) sum += biases[part][c];
        mixed[size_t(row) * channels + channel] = sum * sigmoid(sum);
      }
      for (int row = 0; row < before; row++) {
        new_window[size_t(row) * channels + channel] = input(rows - before + row);
      }
    }
  }
}

// `state` moves on in place. `beta`, `skip` and `limit` may be null.
inline void update_state(const Sizes& size, int rows, const float* mixed, const float* a, const float* beta,
                         const float* a_log, const float* dt_bias, const float* skip, const uint32_t* head_keys,
                         const float* limit, float* state, float* y) {
  const int dim = size.key_dim;
  std::vector<float> q(dim), k(dim), decay(dim);
  for (int head = 0; head < size.heads; head++) {
    const int key_head = int(head_keys[head]);
    const float rate = std::exp(a_log[head]);
    for (int row = 0; row < rows; row++) {
      const float* inputs = mixed + size_t(row) * size.channels();
      float query_length = 1, key_length = 1;
      if (size.rule != 2) {
        float queries = 0, keys = 0;
        for (int i = 0; i < dim; i++) {
          const float query = inputs[key_head * dim + i], key = inputs[size.keys + key_head * dim + i];
          queries += query * query;
          keys += key * key;
        }
        query_length = 1 / std::sqrt(queries + 1e-6f) / std::sqrt(float(dim));
        key_length = 1 / std::sqrt(keys + 1e-6f);
      }
      float time = 0;
      if (size.rule != 1) {
        time = softplus(a[size_t(row) * size.heads + head] + dt_bias[head]);
        std::fill(decay.begin(), decay.end(), std::exp(-rate * time));
      }
      for (int i = 0; i < dim; i++) {
        const int channel = key_head * dim + i;
        q[i] = inputs[channel] * query_length;
        k[i] = inputs[size.keys + channel] * key_length;
        if (size.rule == 1) {
          const float t = a[size_t(row) * size.keys + channel] + dt_bias[channel];
          decay[i] = std::exp(limit ? -*limit * sigmoid(rate * t) : -rate * softplus(t));
        }
      }
      for (int value = 0; value < size.value_dim; value++) {
        float* held = state + (size_t(head) * size.value_dim + value) * dim;
        const float x = inputs[2 * size.keys + head * size.value_dim + value];
        float change = x * time;
        for (int i = 0; i < dim; i++) held[i] *= decay[i];
        if (size.rule != 2) {
          change = (x - dot(held, k.data(), dim)) * sigmoid(beta[size_t(row) * size.heads + head]);
        }
        for (int i = 0; i < dim; i++) held[i] += change * k[i];
        const float out = dot(held, q.data(), dim);
        y[(size_t(row) * size.heads + head) * size.value_dim + value] = skip ? out + x * skip[head] : out;
      }
    }
  }
}

// The result of each run, gated and normalised in the rule's order. `gain` may be null in Mamba-2.
inline void gate_and_norm(int rule, int rows, int values, int run, const float* y, const float* z,
                          const float* gain, float eps, float* out) {
  for (size_t begin = 0; begin < size_t(rows) * values; begin += run) {
    float squares = 0;
    for (int i = 0; i < run; i++) {
      const float gate = z[begin + i];
      const float x = rule == 2 ? y[begin + i] * gate * sigmoid(gate) : y[begin + i];
      squares += x * x;
      out[begin + i] = x;
    }
    const float scale = gain ? 1 / std::sqrt(squares / run + eps) : 1;
    for (int i = 0; i < run; i++) {
      const float gate = z[begin + i];
      float x = out[begin + i] * scale;
      if (gain) x *= gain[rule == 2 ? (begin + i) % values : i];
      out[begin + i] = rule == 2 ? x : x * (rule == 1 ? sigmoid(gate) : gate * sigmoid(gate));
    }
  }
}

} // namespace linear_attention
