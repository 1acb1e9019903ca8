// One thread for each channel of each row, and of each row of the new window.
// q, k: [rows, KEYS], v: [rows, VALUES], window: [KERNEL - 1, channels], weights: [channels of
// q, k or v, KERNEL]; mixed: [rows, channels], new_window: as window.
uint channels = 2 * KEYS + VALUES;
uint channel = thread_position_in_grid.x;
int rows = q_shape[0];
int row = thread_position_in_grid.y;
// Those past the last row write the window.
int last = row < rows ? row : row - KERNEL + 1;
int first = row < rows ? last - (KERNEL - 1) : last;
float sum = 0.0f;
for (int at = first; at <= last; ++at) {
  float x;
  float weight;
  int tap = at - first;
  if (channel < KEYS) {
    x = at < 0 ? float(window[(at + KERNEL - 1) * channels + channel]) : float(q[at * KEYS + channel]);
    weight = float(q_weights[channel * KERNEL + tap]);
  } else if (channel < 2 * KEYS) {
    uint own = channel - KEYS;
    x = at < 0 ? float(window[(at + KERNEL - 1) * channels + channel]) : float(k[at * KEYS + own]);
    weight = float(k_weights[own * KERNEL + tap]);
  } else {
    uint own = channel - 2 * KEYS;
    x = at < 0 ? float(window[(at + KERNEL - 1) * channels + channel]) : float(v[at * VALUES + own]);
    weight = float(v_weights[own * KERNEL + tap]);
  }
  sum += row < rows ? x * weight : x;
}
if (row < rows) {
  if (HAS_BIAS) {
    sum += channel < KEYS ? float(q_bias[channel])
        : channel < 2 * KEYS ? float(k_bias[channel - KEYS])
                             : float(v_bias[channel - 2 * KEYS]);
  }
  mixed[row * channels + channel] = T(sp_silu(sum));
} else {
  new_window[(row - rows) * channels + channel] = T(sum);
}
