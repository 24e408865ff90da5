// Row kernels of the fused head for a CPU, in float32. What each computes stands in rows.py.
//
// Plain functions over pointers, loaded by ctypes: no header of torch is needed, so this compiles in
// a second or two. Vectors are as wide as the machine's. OpenMP's symbols are left open and found in
// the runtime that torch has loaded, so that there is one pool of threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
// In memory: anywhere.
typedef float Stored __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Columns whose sums are added up in float32 before they go to float64.
constexpr int64_t kBlock = 1024;

Floats spread(float x) { return x - Floats{}; }

Floats load(const float* from) { return *reinterpret_cast<const Stored*>(from); }

void store(float* to, Floats x) { *reinterpret_cast<Stored*>(to) = x; }

// The first `count` lanes from memory, `rest` in the others.
Floats load_some(const float* from, int64_t count, float rest) {
  Floats x = spread(rest);
  std::memcpy(&x, from, count * sizeof(float));
  return x;
}

float lane_max(Floats x) {
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

double lane_sum(Floats x) {
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

// A product as the float32 number it is: fused into the sum that follows, it would have more digits
// than the largest logit that is subtracted from it, and e^0 would not be 1.
Floats rounded(Floats x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// e^x for x from -87.3, above which it is a normal number, to about 80; to an ulp or so. NaN stays
// NaN. x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial for e^r.
Floats exponential(Floats x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const Floats shifted = x * spread(1.44269504f) + spread(12582912.0f);
  const Floats n = shifted - spread(12582912.0f);
  Floats r = x - n * spread(0.693359375f);
  r = r - n * spread(-2.12194440e-4f);
  Floats p = spread(1.9875691500e-4f);
  p = p * r + spread(1.3981999507e-3f);
  p = p * r + spread(8.3334519073e-3f);
  p = p * r + spread(4.1665795894e-2f);
  p = p * r + spread(1.6666665459e-1f);
  p = p * r + spread(5.0000001201e-1f);
  p = p * (r * r) + r + spread(1.0f);
  return p * (Floats)(((Ints)shifted + 127) << 23);  // Times 2^n, made from its bits.
}

constexpr float kLowest = -87.3f;

Floats at_least_lowest(Floats x) { return x < spread(kLowest) ? spread(kLowest) : x; }

// tanh x, to an ulp or two: an odd polynomial near 0, where the quotient would cancel.
Floats hyperbolic_tangent(Floats x) {
  const Floats size = x < Floats{} ? -x : x;
  const Floats square = x * x;
  Floats p = spread(-5.70498872745e-3f);
  p = p * square + spread(2.06390887954e-2f);
  p = p * square + spread(-5.37397155531e-2f);
  p = p * square + spread(1.33314422036e-1f);
  p = p * square + spread(-3.33332819422e-1f);
  const Floats near = x + x * square * p;
  const Floats limited = size > spread(10.0f) ? spread(10.0f) : size;  // tanh 10 is 1.
  const Floats far = 1.0f - 2.0f / (exponential(2.0f * limited) + 1.0f);
  return size < spread(0.625f) ? near : (x < Floats{} ? -far : far);
}

// z = cap(x) / temperature.
struct Scale {
  float inv_temperature, softcap, inv_softcap;
  bool capped;

  Scale(float inv_temperature, float softcap)
      : inv_temperature(inv_temperature),
        softcap(softcap),
        inv_softcap(1.0f / softcap),
        capped(softcap > 0) {}

  template <bool kCapped>
  Floats z(Floats x) const {
    if (kCapped) x = softcap * hyperbolic_tangent(x * inv_softcap);
    return rounded(x * inv_temperature);
  }

  float one(float x) const { return (capped ? z<true>(spread(x)) : z<false>(spread(x)))[0]; }
};

// m, s and u of a row, of which blocks are added one after the other.
struct Statistics {
  float top = -kInfinity;
  double sum = 0, weighted = 0;

  void raise(float top_of_block) {
    if (!(top_of_block > top)) return;
    const double shift = double(top) - double(top_of_block);
    const double scale = std::exp(shift);
    // Nothing but -inf so far, or NaN: there is nothing to rescale.
    if (top != -kInfinity) weighted = (weighted + sum * shift) * scale;
    sum *= scale;
    top = top_of_block;
  }
};

template <bool kCapped>
void add_block(Statistics& row, const float* x, int64_t width, const Scale& scale) {
  alignas(64) float z[kBlock];
  Floats most = spread(-kInfinity);
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    const Floats value = scale.z<kCapped>(load(x + j));
    store(z + j, value);
    most = value > most ? value : most;
  }
  if (j < width) {
    store(z + j, scale.z<kCapped>(load_some(x + j, width - j, 0.0f)));
    for (int64_t i = width; i < j + kLanes; ++i) z[i] = -kInfinity;
    const Floats value = load(z + j);
    most = value > most ? value : most;
    j += kLanes;
  }
  row.raise(lane_max(most));
  // Nothing but -inf so far has no maximum to subtract; its sums are 0.
  const Floats top = spread(row.top == -kInfinity ? 0.0f : row.top);
  Floats sum = {}, weighted = {};
  for (int64_t i = 0; i < j; i += kLanes) {
    const Floats distance = load(z + i) - top;
    // Not -inf, which times an exponential of 0 would be NaN.
    const Floats shifted = at_least_lowest(distance);
    const Floats e = distance < spread(kLowest) ? Floats{} : exponential(shifted);
    sum += e;
    weighted += e * shifted;
  }
  row.sum += lane_sum(sum);
  row.weighted += lane_sum(weighted);
}

// What the gradient of a row is made of: dz = p (at + slope ln p), and `target` more at the target.
struct Slope {
  float top, log_sum, at, slope, target;
};

template <bool kCapped>
Floats gradient(Floats x, const Scale& scale, const Slope& row) {
  Floats tangent = {};
  if (kCapped) {
    tangent = hyperbolic_tangent(x * scale.inv_softcap);
    x = scale.softcap * tangent;
  }
  const Floats z = rounded(x * scale.inv_temperature);
  const Floats log_p = (z - row.top) - row.log_sum;
  const Floats p = exponential(at_least_lowest(log_p));
  const Floats full = p * (row.at + row.slope * log_p);
  const Floats d = log_p < spread(kLowest) ? Floats{} : full;
  return kCapped ? d * (1.0f - tangent * tangent) : d;
}

template <bool kCapped>
void gradient_row(float* x, int64_t width, int64_t column, const Scale& scale, const Slope& row) {
  float at_target = 0;
  const bool here = column >= 0 && column < width;
  if (here) {
    at_target = row.target;
    if (kCapped) {
      const float tangent = hyperbolic_tangent(spread(x[column] * scale.inv_softcap))[0];
      at_target *= 1.0f - tangent * tangent;
    }
  }
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    store(x + j, gradient<kCapped>(load(x + j), scale, row));
  }
  if (j < width) {
    const Floats last = gradient<kCapped>(load_some(x + j, width - j, 0.0f), scale, row);
    std::memcpy(x + j, &last, (width - j) * sizeof(float));
  }
  if (here) x[column] += at_target;
}

}  // namespace

extern "C" {

// Lanes of a vector, for the run's header.
int32_t rl_lanes() { return kLanes; }

// out [4, rows]: m, s, u, z of the target, of logits [rows, width].
void rl_row_statistics(const float* logits, int64_t rows, int64_t width, const int64_t* column,
                       const float* inv_temperature, float softcap, float* out, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < rows; ++i) {
    const float* x = logits + i * width;
    const Scale scale(inv_temperature[i], softcap);
    Statistics row;
    for (int64_t start = 0; start < width; start += kBlock) {
      const int64_t size = width - start < kBlock ? width - start : kBlock;
      if (scale.capped) {
        add_block<true>(row, x + start, size, scale);
      } else {
        add_block<false>(row, x + start, size, scale);
      }
    }
    const bool here = column[i] >= 0 && column[i] < width;
    out[i] = row.top;
    out[rows + i] = float(row.sum);
    out[2 * rows + i] = float(row.weighted);
    out[3 * rows + i] = here ? scale.one(x[column[i]]) : 0.0f;
  }
}

// Overwrites logits [rows, width] with the gradient to them.
void rl_row_gradient(float* logits, int64_t rows, int64_t width, const int64_t* column,
                     const float* inv_temperature, float softcap, const float* top,
                     const float* log_sum, const float* entropy, const float* g_logprob,
                     const float* g_entropy, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < rows; ++i) {
    const Scale scale(inv_temperature[i], softcap);
    const float inv = inv_temperature[i];
    // -g_logprob p - g_entropy p (ln p + H), each over the temperature.
    const Slope row = {top[i], log_sum[i], -(g_logprob[i] + g_entropy[i] * entropy[i]) * inv,
                       -g_entropy[i] * inv, g_logprob[i] * inv};
    float* x = logits + i * width;
    if (scale.capped) {
      gradient_row<true>(x, width, column[i], scale, row);
    } else {
      gradient_row<false>(x, width, column[i], scale, row);
    }
  }
}

// total [count] of a sum that is kept as bfloat16 and an 8-bit tail; see sums.py.
void rl_join(const int16_t* high, const int8_t* tail, float* total, int64_t count,
             int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = ((uint32_t(int32_t(high[i])) << 8) + uint32_t(int32_t(tail[i]))) << 8;
    std::memcpy(total + i, &bits, sizeof bits);
  }
}

// The way back, rounded to the nearest.
void rl_split(const float* total, int16_t* high, int8_t* tail, int64_t count, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, total + i, sizeof bits);
    bits = total[i] == total[i] ? bits : 0x7fc00000u;  // Another NaN might be carried to a 0.
    const int32_t kept = int32_t(bits + 0x80u) >> 8;
    const int32_t upper = (kept + 0x80) >> 8;
    high[i] = int16_t(upper);
    tail[i] = int8_t(kept - upper * 256);
  }
}

}  // extern "C"
