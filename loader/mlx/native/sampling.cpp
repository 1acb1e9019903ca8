// Part of shim.cpp's translation unit: evaluation that does not wait, inputs that are written
// after their graph was built, and the best tokens of rows of logits.

namespace {

// SplitMix64's finalizer over uint64 arrays, as in the engine's sampler.
mx::array mix_words(const mx::array& words) {
  auto word = [](uint64_t value) { return mx::array(value, mx::uint64); };
  auto folded = [&](const mx::array& z, uint64_t by) {
    return mx::bitwise_xor(z, mx::right_shift(z, word(by)));
  };
  auto z = mx::add(words, word(0x9e3779b97f4a7c15ull));
  z = mx::multiply(folded(z, 30), word(0xbf58476d1ce4e5b9ull));
  z = mx::multiply(folded(z, 27), word(0x94d049bb133111ebull));
  return folded(z, 31);
}

// Gumbel noise `[rows, width]` in f32 for the tokens from `first` on; `keys` [rows, 1] uint64.
mx::array gumbel_noise(const mx::array& keys, uint32_t first, int32_t width) {
  auto word = [](uint64_t value) { return mx::array(value, mx::uint64); };
  auto tokens = mx::astype(mx::add(mx::arange(0, width, mx::uint32), mx::array(first, mx::uint32)), mx::uint64);
  auto bits = mx::right_shift(mix_words(mx::bitwise_xor(keys, tokens)), word(12));
  // The distance from the nearer of 0 and 1, which f32 holds with a small relative error.
  auto upper = mx::greater_equal(bits, word(1ull << 51));
  auto distance = mx::where(upper, mx::subtract(word((1ull << 52) - 1), bits), bits);
  auto part = mx::multiply(
      mx::add(mx::astype(distance, mx::float32), mx::array(0.5f)), mx::array(0x1p-52f));
  auto exponential = mx::negative(mx::where(upper, mx::log1p(mx::negative(part)), mx::log(part)));
  return mx::negative(mx::log(exponential));
}

} // namespace

extern "C" {

// Starts the computation of the arrays and returns; sp_eval of the same arrays waits for it.
int32_t sp_async_eval(mx::array* const* arrays, size_t n) {
  return guarded([&] {
    mx::async_eval(arrays_of(arrays, n));
    return 1;
  });
}

// Replaces the values of an array of sp_copy_in whose readers were not evaluated yet.
int32_t sp_overwrite(mx::array* a, const void* data, size_t bytes) {
  return guarded([&] {
    if (a->nbytes() != bytes) throw std::runtime_error("sp_overwrite: another number of bytes");
    if (bytes) std::memcpy(a->data<char>(), data, bytes);
    return 1;
  });
}

// Of rows of logits [rows, width] the two tokens with the highest scores, as f32 [rows, 6]: column,
// logit and score of each. The score is the logit, or with `keys` (two u32 a row, low word first)
// the logit over its row's temperature plus Gumbel noise. NaN has the lowest score; ties go to the
// lower token.
mx::array* sp_best_tokens(const mx::array* logits, const mx::array* keys, const mx::array* temperatures,
                          uint32_t first) {
  return guarded([&] {
    auto x = mx::astype(*logits, mx::float32);
    auto lowest = mx::array(-std::numeric_limits<float>::infinity());
    auto scores = x;
    if (keys) {
      auto noise = gumbel_noise(mx::view(*keys, mx::uint64), first, x.shape(1));
      scores = mx::add(mx::divide(x, *temperatures), noise);
    }
    scores = mx::where(mx::isnan(scores), lowest, scores);
    std::vector<mx::array> found;
    for (int place = 0; place < 2; place++) {
      auto best = mx::argmax(scores, 1, true);
      found.push_back(mx::astype(best, mx::float32));
      found.push_back(mx::take_along_axis(x, best, 1));
      found.push_back(mx::take_along_axis(scores, best, 1));
      if (place == 0) scores = mx::put_along_axis(scores, best, lowest, 1);
    }
    return keep(mx::concatenate(found, 1));
  });
}

} // extern "C"
