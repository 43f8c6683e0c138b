// Rounds of the loops that one lane of a copy role makes. A machine with a clock charges for each what the compiled
// loop takes (scripts/sass_roles.py); on all others they are nothing.
#pragma once

namespace hep {

enum class LoopStep : int {
  kG2sToken,        // a tile of a token, from the caller's row or a rail slot into a stage
  kS2gToken,        // a tile of a token out of a stage, beside
  kS2gDestination,  // each rank that it goes to, and
  kS2gPair,         // each further row on a rank
  kN2nToken,        // a tile of a token into a stage and out of another
  kDeliverLoad,     // a tile of a received row into a stage,
  kDeliverStore,    // and out of it
  kSumToken,        // a sum, beside
  kSumDestination,  // each rank that has rows of it, and
  kSumPartial,      // a receive row of which a partial may have to be formed, beside
  kSumPair,         // each row of this rank's that it is formed of, and
  kSumRow,          // each tile of a row into a stage
};
inline constexpr int kLoopSteps = int(LoopStep::kSumRow) + 1;

}  // namespace hep
