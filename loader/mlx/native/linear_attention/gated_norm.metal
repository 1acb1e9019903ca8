// One simdgroup for each run of RUN elements of a row. y, z, out: [rows, VALUES]; gain: [RUN], in
// Mamba-2 [VALUES]. RULE: 0 norm, then silu(z); 1 norm, then sigmoid(z); 2 silu(z), then norm if
// HAS_NORM.
int lane = thread_index_in_simdgroup;
int run = thread_position_in_grid.y;
int begin = thread_position_in_grid.z * VALUES + run * RUN;
float squares = 0.0f;
for (int i = lane; i < RUN; i += 32) {
  float x = float(y[begin + i]);
  if (RULE == 2) {
    x *= sp_silu(float(z[begin + i]));
  }
  squares += x * x;
}
float scale = HAS_NORM ? rsqrt(simd_sum(squares) / float(RUN) + eps) : 1.0f;
for (int i = lane; i < RUN; i += 32) {
  float x = float(y[begin + i]) * scale;
  float gate = float(z[begin + i]);
  x *= RULE == 1 ? sp_sigmoid(gate) : sp_silu(gate);
  if (HAS_NORM) {
    x *= float(gain[RULE == 2 ? run * RUN + i : i]);
  }
  out[begin + i] = T(x);
}
