// One simdgroup for each value of each value head; a lane holds every 32nd element of its state.
// mixed: [rows, channels]; a: [rows, heads], in KDA [rows, KEYS]; beta: [rows, heads]; state:
// [heads, VALUE_DIM, KEY_DIM]; y: [rows, heads, VALUE_DIM]. RULE: 0 Gated DeltaNet, 1 Kimi Delta
// Attention, 2 Mamba-2.
constexpr int per_lane = (KEY_DIM + 31) / 32;
int lane = thread_index_in_simdgroup;
int value = thread_position_in_grid.y;
int head = thread_position_in_grid.z;
int key_head = head_keys[head];
int channels = 2 * KEYS + HEADS * VALUE_DIM;
int rows = mixed_shape[0];
int place = (head * VALUE_DIM + value) * KEY_DIM;
float held[per_lane];
for (int i = 0; i < per_lane; ++i) {
  int element = lane + 32 * i;
  held[i] = element < KEY_DIM ? float(state[place + element]) : 0.0f;
}
float rate = exp(float(a_log[head]));
float scale = rsqrt(float(KEY_DIM));
for (int row = 0; row < rows; ++row) {
  int begin = row * channels;
  int own = begin + key_head * KEY_DIM;
  float x = float(mixed[begin + 2 * KEYS + head * VALUE_DIM + value]);
  float time = 0.0f;
  float decay = 1.0f;
  if (RULE != 1) {
    time = sp_softplus(float(a[row * HEADS + head]) + float(dt_bias[head]));
    decay = exp(-rate * time);
  }
  float keys[per_lane];
  // All sums of a row at once, so that no one waits for another: what the faded state says of key
  // and query, and the lengths of key and query, by which they are divided only then.
  float of_key = 0.0f;
  float of_query = 0.0f;
  float key_squares = 0.0f;
  float query_squares = 0.0f;
  float products = 0.0f;
  for (int i = 0; i < per_lane; ++i) {
    int element = lane + 32 * i;
    bool inside = element < KEY_DIM;
    float query = inside ? float(mixed[own + element]) : 0.0f;
    float key = inside ? float(mixed[own + KEYS + element]) : 0.0f;
    if (RULE == 1) {
      int channel = key_head * KEY_DIM + element;
      float t = inside ? float(a[row * KEYS + channel]) + float(dt_bias[channel]) : 0.0f;
      decay = exp(HAS_LIMIT ? -limit * sp_sigmoid(rate * t) : -rate * sp_softplus(t));
    }
    keys[i] = key;
    held[i] *= decay;
    of_query += held[i] * query;
    products += key * query;
    if (RULE != 2) {
      of_key += held[i] * key;
      key_squares += key * key;
      query_squares += query * query;
    }
  }
  of_query = simd_sum(of_query);
  products = simd_sum(products);
  float change = x * time;
  float query_length = 1.0f;
  if (RULE != 2) {
    float key_length = rsqrt(simd_sum(key_squares) + 1e-6f);
    query_length = rsqrt(simd_sum(query_squares) + 1e-6f) * scale;
    float strength = sp_sigmoid(float(beta[row * HEADS + head]));
    change = (x - simd_sum(of_key) * key_length) * strength * key_length;
  }
  for (int i = 0; i < per_lane; ++i) {
    held[i] += keys[i] * change;
  }
  float out = (of_query + products * change) * query_length;
  if (RULE == 2) {
    out += x * float(skip[head]);
  }
  if (lane == 0) {
    y[(row * HEADS + head) * VALUE_DIM + value] = out;
  }
}
for (int i = 0; i < per_lane; ++i) {
  int element = lane + 32 * i;
  if (element < KEY_DIM) {
    new_state[place + element] = held[i];
  }
}
