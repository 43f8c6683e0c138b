// The litmus program's C interface: what scripts/gpu_litmus.py asks for and gets back. Plain data.
#pragma once
#include <cstdint>

namespace hep::litmus {

struct Request {
  int32_t pattern;                       // of the table, by position
  int32_t writer_device, reader_device;  // the same: two streams of one device
  int32_t rows_at_writer;                // rows lie in the writer's memory and are pulled; else in the reader's, pushed
  int32_t load;                          // copies between the two devices meanwhile
  uint32_t blocks;                       // pairs of a writer and a reader at once
  uint32_t places;                       // of a pair's rows; a power of two, 4 or more
  uint64_t rounds, timeout_ns;           // of each pair; of every wait
  uint64_t seed;                         // of the order in which places are used
};

struct Result {
  uint64_t rounds;             // of all pairs
  uint64_t old_words, others;  // words that a reader saw although their round's flag had come: of an earlier round, or
                               // of none
  uint64_t first_round, first_word, first_seen;  // of the first such word of the first pair that has one
  double seconds;
  char error[256];  // empty, or why it did not run to its end
};

}  // namespace hep::litmus
