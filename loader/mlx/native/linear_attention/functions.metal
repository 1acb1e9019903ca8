// What the kernels of linear attention share. Metal's sources here are C++ as well: emulate.cpp
// runs these very lines on a processor.
inline float sp_sigmoid(float x) {
  float e = exp(-fabs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
inline float sp_silu(float x) { return x * sp_sigmoid(x); }
// ln(1 + exp(x)), exact for small results too.
inline float sp_softplus(float x) {
  float e = exp(-fabs(x));
  float one = 1.0f + e;
  float rest = one == 1.0f ? e : log(one) * (e / (one - 1.0f));
  return (x > 0.0f ? x : 0.0f) + rest;
}
