// What the caller and the simulator exchange: one dispatch of one kernel. `run.py` declares the same layout.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tqsim {

constexpr int MAX_BUFFERS = 32;
constexpr size_t ERROR_BYTES = 8192;

// Lane operations, one for each lane that does it. CONVERT is from an integer, INTEGER what is done to a uint, SHARED a
// load or store of up to 16 bytes of threadgroup memory, MATRIX a multiplication of two elements. Arithmetic on other integers, which is addresses and loops, does not count.
enum Operation { COLLECTIVE, BARRIER, ADD, MULTIPLY, FMA, DIVIDE, TRANSCENDENTAL, COMPARE, CONVERT, INTEGER, SHARED, MATRIX, OPERATIONS };

struct Buffer {
  char* data;       // lowest address
  uint64_t bytes;
  uint64_t origin;  // offset of element 0, which a negative stride puts above the lowest address
  uint64_t loaded, stored;  // by all lanes
  uint64_t fetched;         // loaded, each byte once for all lanes of a threadgroup
};

struct Dispatch {
  Buffer buffers[MAX_BUFFERS];
  uint64_t operations[OPERATIONS];
  uint64_t order;  // of the threads, see choose_order
  uint32_t count;  // of buffers
  uint32_t grid[3], threadgroup[3];
  uint32_t first;  // threadgroup along x that runs
  char error[ERROR_BYTES];  // empty: all went well
};

}  // namespace tqsim
