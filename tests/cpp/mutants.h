// Which mutants whose tests must catch.
#pragma once
#include "common/bugs.h"

namespace hep::test {

#define HEP_BUG_NAME(name, sentence) #name,
inline constexpr const char* kBugNames[] = {"kNone", HEP_BUGS(HEP_BUG_NAME)};
#undef HEP_BUG_NAME
#define HEP_BUG_SENTENCE(name, sentence) sentence,
inline constexpr const char* kBugSentences[] = {"none", HEP_BUGS(HEP_BUG_SENTENCE)};
#undef HEP_BUG_SENTENCE

constexpr const char* name_of(Bug bug) {
  return kBugNames[int(bug)];
}
constexpr const char* sentence_of(Bug bug) {
  return kBugSentences[int(bug)];
}

// Worlds of the host's executors, and simulated ones.
inline constexpr Bug kWorldBugs[] = {
    Bug::kRefillBeforeConsumed,
    Bug::kReadBeforeLoaded,
    Bug::kStageBackUnpublished,
    Bug::kCreditOneChunkOld,
    Bug::kSignalWithoutOrder,
    Bug::kRailChunkUnawaited,
    Bug::kCreditAtFirstStage,
    Bug::kEnterUnawaited,
    Bug::kDoneUnawaited,
    Bug::kStageBackByOneLane,
    Bug::kFewerBytesAnnounced,
    Bug::kPutBeforeSlotStored,
    Bug::kStageBackWhileStoring,
    Bug::kTileOverwrittenWhileStoring,
    Bug::kTileUnpublished,
    Bug::kSliceBeforeItsWarp,
    Bug::kSumPutBeforeStored,
    Bug::kStreamsInOrder,
    Bug::kNoCredits,
    Bug::kConsumedNotReset,
    Bug::kFinishedNotReset,
    Bug::kRecvSlotsFromOperationStart,
    Bug::kCountVectorsShared,
    Bug::kTilesFromRowStart,
    Bug::kWeightsInFirstPairs,
    Bug::kPaddingNotCleared,
    Bug::kCountsForwardedEarly,
    Bug::kCreditBeforeWeights,
    Bug::kOneEpoch,
    Bug::kChunkBehindLast,
    Bug::kShortChunkSkipped,
    Bug::kRecordsNotKept,
    Bug::kPairsCountedUnordered,
    Bug::kTakenNotReset,
    Bug::kCountedNeverCredited,
    Bug::kOneSlotNotAtOnce,
    Bug::kSumFromPositiveZero,
    Bug::kSumPutBeforeAllWarps,
    Bug::kLandsOneRowOff,
    Bug::kLandingOfAnother,
    Bug::kLeftWhileRowsLand,
    Bug::kLeftWhileRowsAreRead,
    Bug::kDuplicateForgotten,
    Bug::kPartialsUnawaited,
    Bug::kLookLeavesOneOut,
    Bug::kPartialsBeforeStores,
    Bug::kPartialsBeforeAllWarps,
    Bug::kPartialsToOneReader,
    Bug::kPartialLeftOut,
    Bug::kFirstOfTwoPairs,
    Bug::kReadOneRowOff,
    Bug::kRecordsUnawaited,
    Bug::kGroupRecordsUnawaited,
    Bug::kPartUnrounded,
    Bug::kBlocksDoNotMeet,
    Bug::kMeetingNotReset,
    Bug::kBlocksBeforeForgotten,
    Bug::kWarpsBeforeForgotten,
};

// Simulated worlds alone.
inline constexpr Bug kSimBugs[] = {
    Bug::kSendSlotsFromOperationStart,
    Bug::kHeldStageBackWhileStoring,
    Bug::kWrongStagePhase,
    Bug::kFlagBeforeCounts,
    Bug::kCreditOneStageEarly,
    Bug::kDeliverStageBackEarly,
    Bug::kN2nStageBackEarly,
    Bug::kCreditOfAnotherSlot,
    Bug::kSignalOneLow,
    Bug::kCountsOneExchangeOld,
    Bug::kPartialsOneRowOff,
    Bug::kResultsBeforeStores,
    Bug::kCountFlagsShared,
    Bug::kLandedBeforeStores,
    Bug::kLandedUnawaited,
    Bug::kLandedOneRowEarly,
    Bug::kLandedNotSettled,
    // Another rank has to look in the moment between the two, which threads seldom do.
    Bug::kSaidAfterReady,
    // Deliver does not wait for done: few worlds show them.
    Bug::kDoneBeforeStores,
    Bug::kEveryRoleDone,
};

// Of kWorldBugs, not for simulated worlds. Six are races between lanes or warps of one group, and a simulated group
// has one lane, as a block of a simulated exchange has one warp. kTileUnpublished: that lane writes the output tile
// before it gives the last row's stage back, which publishes both. kSumFromPositiveZero: it adds whole tiles
// (TileMath), which begin with their first row. kPartUnrounded: it adds no parts.
inline constexpr Bug kNeedMoreLanes[] = {
    Bug::kStageBackByOneLane,    Bug::kTileUnpublished,        Bug::kSliceBeforeItsWarp,
    Bug::kPairsCountedUnordered, Bug::kSumFromPositiveZero,    Bug::kSumPutBeforeAllWarps,
    Bug::kWarpsBeforeForgotten,  Bug::kPartialsBeforeAllWarps, Bug::kPartUnrounded,
};

// Of the latency path: worlds whose operations go by lines, of the host's executors and simulated ones.
inline constexpr Bug kLatencyBugs[] = {
    Bug::kTornLine,      Bug::kFlagBeforePayload, Bug::kEarlyCredit,
    Bug::kOneSlabParity, Bug::kStaleStep,         Bug::kRestOfRowUnawaited,
};

// Of the same over several nodes.
inline constexpr Bug kLatencyRailBugs[] = {
    Bug::kRailRowBeforeAllWarps,   Bug::kRailRowUnawaited,    Bug::kEarlyRailCredit,
    Bug::kForwardedFromNextSource, Bug::kOtherNodesForgotten,
};

// Of clones: simulated worlds with spare slots, and those of test_balance.cpp, test_spares.cpp and, the first,
// test_plan_clones.cpp.
inline constexpr Bug kCloneBugs[] = {
    Bug::kShareNotLocalFirst,   Bug::kCloneCountsToldEarly, Bug::kCloneCountsOneStepOld,   Bug::kCloneShareOfAnother,
    Bug::kSlotNotAwaitedFree,   Bug::kSlotFullBeforeStores, Bug::kSlotFullByEveryWarp,     Bug::kWeightsInAnotherSlot,
    Bug::kWeightsUnawaited,     Bug::kCloneGradientTwice,   Bug::kCloneGradientsUnawaited, Bug::kCloneGradientsNotTaken,
    Bug::kPartRelayedUnawaited, Bug::kSumUnawaited,         Bug::kSumToldByEveryWarp,      Bug::kChunkToldBeforeStores,
    Bug::kChunkFedUnasked,      Bug::kOneCopyOfANode,       Bug::kChunkCreditedUnread,     Bug::kExpertAwaitedByOneWarp,
};

// kCallsUnchecked, kNotifiedBeforeCounts and kGivenUpRankStarts: test_count_notification.cpp.
// kRailCallUnchecked: test_rail_ring.cpp.
// kFoldUnmet, kDraftsUnmet, kFlowNotTakenBack: test_plan_clones.cpp.
// kOwnNodeFirst: test_spares.cpp.

}  // namespace hep::test
