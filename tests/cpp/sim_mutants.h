// Mutants that the simulator alone must catch, beside those of mutants.h; and those of mutants.h that need more
// lanes than the simulator has.
#pragma once
#include "mutants.h"

namespace hep::test {

inline constexpr Mutant kSimMutants[] = {
    {34, "dispatch returns without quiet: its puts may still be in flight"},
    {35, "send slots are counted from the operation's start"},
    {36, "a held stage is given back while stores still read it"},
    {37, "the producer waits for the wrong phase of a stage"},
    {38, "the flag of a count vector is set before the vector is copied"},
    {39, "the credit returns one stage early"},
    {40, "deliver gives a stage back while stores still read it"},
    {41, "N2N gives a stage back while stores still read it"},
    {42, "the credit of another slot is waited for"},
    {43, "a chunk's signal is one too low"},
    {44, "counts of the exchange before are taken for this one's"},
    {45, "partials are written one row off"},
    {46, "combine returns without quiet: its puts may still be in flight"},
    {47, "combine's results are announced before their stores are complete"},
};

// 10, 17, 52 and 58 are races between lanes or warps of one group; a simulated group has one lane. 16: that lane writes
// the output tile before it gives the last row's stage back, which publishes both. 57: it adds whole tiles (TileMath).
inline constexpr int kNeedMoreLanes[] = {10, 16, 17, 52, 57, 58};

}  // namespace hep::test
