// Row sums of the weights digest; what they are stands in digest.py.
//
// Plain functions over pointers, loaded by ctypes, as the row kernels of the head are.

#include <cstdint>
#include <cstring>

namespace {

// Columns worked on at once, in the fastest cache.
constexpr int64_t kBlock = 2048;

// The bits of a value in float32, its high half folded into its low one.
inline uint32_t mixed(uint32_t bits) { return bits ^ (bits >> 16); }

void unpack(const uint32_t* from, int64_t count, uint32_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = mixed(from[i]);
}

void unpack(const uint16_t* from, int64_t count, uint32_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = mixed(static_cast<uint32_t>(from[i]) << 16);
}

// Sum of x * k modulo 2^64. The halves of k are multiplied apart: 32 by 32 bits is one instruction.
uint64_t weighted_sum(const uint32_t* x, const uint64_t* k, int64_t count) {
  uint64_t low = 0, high = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t value = x[i];
    low += value * static_cast<uint32_t>(k[i]);
    high += value * static_cast<uint32_t>(k[i] >> 32);
  }
  return low + (high << 32);
}

template <typename Bits>
void row_sums(const Bits* data, int64_t rows, int64_t columns, const uint64_t* k, uint64_t* sums,
              int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    uint32_t block[kBlock];
    uint64_t first = 0, second = 0;
    for (int64_t start = 0; start < columns; start += kBlock) {
      const int64_t count = columns - start < kBlock ? columns - start : kBlock;
      unpack(data + row * columns + start, count, block);
      first += weighted_sum(block, k + start, count);
      second += weighted_sum(block, k + columns + start, count);
    }
    sums[row] = first;
    sums[rows + row] = second;
  }
}

}  // namespace

extern "C" {

// data [rows, columns] float32, k [2, columns], sums [2, rows].
void rl_digest_float32(const void* data, int64_t rows, int64_t columns, const void* k, void* sums,
                       int32_t threads) {
  row_sums(static_cast<const uint32_t*>(data), rows, columns, static_cast<const uint64_t*>(k),
           static_cast<uint64_t*>(sums), threads);
}

// The same of bfloat16.
void rl_digest_bfloat16(const void* data, int64_t rows, int64_t columns, const void* k, void* sums,
                        int32_t threads) {
  row_sums(static_cast<const uint16_t*>(data), rows, columns, static_cast<const uint64_t*>(k),
           static_cast<uint64_t*>(sums), threads);
}
}
