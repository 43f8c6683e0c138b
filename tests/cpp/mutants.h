// The mutants: bugs of one line each, marked `kMutant ==` in csrc, that the tests must catch. What each one is.
#pragma once

namespace hep::test {

struct Mutant {
  int number;
  const char* bug;
};

inline constexpr Mutant kMutants[] = {
    {1, "the producer refills a stage without waiting for its consumers"},
    {2, "a consumer reads a stage without waiting for its loads"},
    {3, "a stage is given back with generic accesses unpublished"},
    {4, "the credit that is waited for is one chunk too old"},
    {5, "a chunk's signal does not order its bytes"},
    {6, "a rail chunk is read without waiting for its signal"},
    {7, "the credit returns with the first stage of a chunk instead of the last"},
    {8, "nobody waits for the node's ranks to enter the operation"},
    {9, "nobody waits for the node's ranks to be done with the receive rows"},
    {10, "one lane gives a stage back before its warp has met"},
    {11, "a stage announces fewer bytes than it loads"},
    {12, "a send slot is put on the rail before its stores are complete"},
    {13, "with few stages, a stage is given back while stores still read it"},
    {14, "done is announced before the stores to the peers are complete"},
    {15, "an output tile is overwritten while its store still reads it"},
    {16, "an output tile is stored unpublished"},
    {17, "a slice of an output tile is stored before its warp has written it"},
    {18, "a node sum is put on the rail before its stores are complete"},
    {19, "streams are served in order, so that one that waits starves the others"},
    {20, "credits are never returned"},
    {21, "the counter of consumed stages is not reset"},
    {22, "the counter of finished roles is not reset"},
    {23, "arrived chunks are looked for in slots counted from the operation's start"},
    {24, "count vectors of successive exchanges share their memory"},
    {25, "every tile of a row is loaded from the row's start"},
    {26, "weights on their way back land in the slots of the token's first pairs"},
    {27, "padding rows are not cleared"},
    {28, "count vectors of the rail are forwarded before they came"},
    {29, "the credit of a chunk of sums does not wait for the weights' tiles"},
    {30, "every role announces done, not the last one"},
    {31, "all operations have the same epoch"},
    {32, "a block serves the chunk behind its last, whoever has taken it"},
    {33, "records of rail tokens are not kept for the way back"},
    {52, "a lane counts a token's pair before others have counted the token before"},
    {54, "the counters of taken chunks are not reset"},
    {55, "rail rows of a sum that were counted are never told"},
    {56, "with a ring of one slot, rail rows of a sum are not told at once"},
    {57, "a sum of negative zeros begins with a positive one"},
    {58, "a node sum is put on the rail before all warps' stores are complete"},
};

}  // namespace hep::test
