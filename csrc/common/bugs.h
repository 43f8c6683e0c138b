// Mutants: bugs of one line each, planted in the roles where a test must catch them. `injected(Bug::kName)` marks the
// place. In the product nothing is injected and the branches fold away; test builds (HEP_MUTANTS) choose one at run
// time, so that one program holds every mutant. A mutant without a test that fails is a test that is missing.
#pragma once
#include <cstdint>

#include "common/macros.h"

// clang-format off
#define HEP_BUGS(BUG) \
  BUG(kRefillBeforeConsumed, "the producer refills a stage without waiting for its consumers") \
  BUG(kReadBeforeLoaded, "a consumer reads a stage without waiting for its loads") \
  BUG(kStageBackUnpublished, "a stage is given back with generic accesses unpublished") \
  BUG(kCreditOneChunkOld, "the credit that is waited for is one chunk too old") \
  BUG(kSignalWithoutOrder, "a chunk's signal does not order its bytes") \
  BUG(kRailChunkUnawaited, "a rail chunk is read without waiting for its signal") \
  BUG(kCreditAtFirstStage, "the credit returns with the first stage of a chunk instead of the last") \
  BUG(kEnterUnawaited, "nobody waits for the node's ranks to enter the operation") \
  BUG(kDoneUnawaited, "nobody waits for the node's ranks to be done with the receive rows") \
  BUG(kStageBackByOneLane, "one lane gives a stage back before its warp has met") \
  BUG(kFewerBytesAnnounced, "a stage announces fewer bytes than it loads") \
  BUG(kPutBeforeSlotStored, "a send slot is put on the rail before its stores are complete") \
  BUG(kStageBackWhileStoring, "with few stages, a stage is given back while stores still read it") \
  BUG(kDoneBeforeStores, "done is announced before the stores to the peers are complete") \
  BUG(kTileOverwrittenWhileStoring, "an output tile is overwritten while its store still reads it") \
  BUG(kTileUnpublished, "an output tile is stored unpublished") \
  BUG(kSliceBeforeItsWarp, "a slice of an output tile is stored before its warp has written it") \
  BUG(kSumPutBeforeStored, "a node sum is put on the rail before its stores are complete") \
  BUG(kStreamsInOrder, "streams are served in order, so that one that waits starves the others") \
  BUG(kNoCredits, "credits are never returned") \
  BUG(kConsumedNotReset, "the counter of consumed stages is not reset") \
  BUG(kFinishedNotReset, "the counter of finished roles is not reset") \
  BUG(kRecvSlotsFromOperationStart, "arrived chunks are looked for in slots counted from the operation's start") \
  BUG(kCountVectorsShared, "count vectors of successive exchanges share their memory") \
  BUG(kCountFlagsShared, "count vectors of successive exchanges share the flag of their rail") \
  BUG(kTilesFromRowStart, "every tile of a row is loaded from the row's start") \
  BUG(kWeightsInFirstPairs, "weights on their way back land in the slots of the token's first pairs") \
  BUG(kPaddingNotCleared, "padding rows are not cleared") \
  BUG(kCountsForwardedEarly, "count vectors of the rail are forwarded before they came") \
  BUG(kCreditBeforeWeights, "the credit of a chunk of sums does not wait for the weights' tiles") \
  BUG(kEveryRoleDone, "every role announces done, not the last one") \
  BUG(kOneEpoch, "all operations have the same epoch") \
  BUG(kChunkBehindLast, "a block serves the chunk behind its last, whoever has taken it") \
  BUG(kShortChunkSkipped, "nobody serves the first of the short chunks at a stream's end") \
  BUG(kRecordsNotKept, "records of rail tokens are not kept for the way back") \
  BUG(kSendSlotsFromOperationStart, "send slots are counted from the operation's start") \
  BUG(kHeldStageBackWhileStoring, "a held stage is given back while stores still read it") \
  BUG(kWrongStagePhase, "the producer waits for the wrong phase of a stage") \
  BUG(kFlagBeforeCounts, "the flag of a count vector is set before the vector is copied") \
  BUG(kCreditOneStageEarly, "the credit returns one stage early") \
  BUG(kDeliverStageBackEarly, "deliver gives a stage back while stores still read it") \
  BUG(kN2nStageBackEarly, "N2N gives a stage back while stores still read it") \
  BUG(kCreditOfAnotherSlot, "the credit of another slot is waited for") \
  BUG(kSignalOneLow, "a chunk's signal is one too low") \
  BUG(kRailCallUnchecked, "chunks of another call are taken for this one's") \
  BUG(kCountsOneExchangeOld, "counts of the exchange before are taken for this one's") \
  BUG(kPartialsOneRowOff, "partials are written one row off") \
  BUG(kResultsBeforeStores, "combine's results are announced before their stores are complete") \
  BUG(kCallsUnchecked, "nobody looks whether the calls of the ranks fit together") \
  BUG(kNotifiedBeforeCounts, "the host is told the counts before they are known") \
  BUG(kPairsCountedUnordered, "a lane counts a token's pair before others have counted the token before") \
  BUG(kGivenUpRankStarts, "a kernel starts although its rank was given up") \
  BUG(kTakenNotReset, "the counters of taken chunks are not reset") \
  BUG(kCountedNeverCredited, "rail rows of a sum that were counted are never credited") \
  BUG(kOneSlotNotAtOnce, "with a ring of one slot, rail rows of a sum are not credited at once") \
  BUG(kSumFromPositiveZero, "a sum of negative zeros begins with a positive one") \
  BUG(kSumPutBeforeAllWarps, "a node sum is put on the rail before all warps' stores are complete") \
  BUG(kSaidAfterReady, "where rows are to land, or lie, is said after ready") \
  BUG(kLandsOneRowOff, "payload lands one row off") \
  BUG(kLandingOfAnother, "rows land where the rank before said that its own do") \
  BUG(kLandedBeforeStores, "rows are told as landed before their stores are complete") \
  BUG(kLandedUnawaited, "deliver does not wait until rows have landed") \
  BUG(kLandedOneRowEarly, "deliver takes a group of rows when all but one have landed") \
  BUG(kLandedNotSettled, "what has landed in earlier operations counts for this one") \
  BUG(kLeftWhileRowsLand, "a rank hands the memory of its result out again while peers may still store rows there") \
  BUG(kLeftWhileRowsAreRead, "a rank hands the memory of its outputs out again while peers may still read them there") \
  BUG(kDuplicateForgotten, "the last of a token's duplicates is not copied") \
  BUG(kPartialsUnawaited, "sums do not wait for the partial rows that they read") \
  BUG(kLookLeavesOneOut, "of tokens whose partial rows are looked at together the last is left out") \
  BUG(kPartialsBeforeStores, "partial rows are told before their stores are complete") \
  BUG(kPartialsBeforeAllWarps, "partial rows are told before all warps' stores are complete") \
  BUG(kPartialsToOneReader, "of a group of partial rows only the first source's reader is told") \
  BUG(kPartialLeftOut, "of tokens with two pairs on a rank no partial is formed, as if they were read in place") \
  BUG(kFirstOfTwoPairs, "of tokens with two pairs on a rank the first is read in place, as if there were one") \
  BUG(kReadOneRowOff, "rows are read in place one row off") \
  BUG(kRecordsUnawaited, "records are read before they have come to shared memory") \
  BUG(kGroupRecordsUnawaited, "records of a group of rows are read before they have come to shared memory") \
  BUG(kPartUnrounded, "what is added in place of a partial is not rounded") \
  BUG(kBlocksDoNotMeet, "blocks that count do not wait for one another") \
  BUG(kMeetingNotReset, "the counter of blocks that have met is not reset") \
  BUG(kBlocksBeforeForgotten, "positions do not begin behind those of the blocks before") \
  BUG(kWarpsBeforeForgotten, "positions do not begin behind those of the warps before") \
  BUG(kFoldUnmet, "lanes take what others found before they have brought it") \
  BUG(kDraftsUnmet, "constructions are compared before all are made") \
  BUG(kShareNotLocalFirst, "a clone's tokens are not taken from its own rank first") \
  BUG(kFlowNotTakenBack, "a search keeps what the last flow of a choice moved when it turns back") \
  BUG(kCloneCountsToldEarly, "a rank tells its tokens by expert before it has counted them") \
  BUG(kCloneCountsOneStepOld, "clones are planned for the counts of the micro-batch before") \
  BUG(kCloneShareOfAnother, "tokens are shared out among clones as if they were another rank's") \
  BUG(kSlotNotAwaitedFree, "weights are stored into a spare slot that its holder may still use") \
  BUG(kSlotFullBeforeStores, "a spare slot is said to be full before the stores into it are complete") \
  BUG(kSlotFullByEveryWarp, "every warp that stores into a spare slot says that it is full") \
  BUG(kWeightsInAnotherSlot, "weights of a clone go to the spare slot behind its own") \
  BUG(kWeightsUnawaited, "nobody waits for the weights of clones") \
  BUG(kCloneGradientTwice, "a clone's gradient is added twice") \
  BUG(kCloneGradientsUnawaited, "gradients of clones are read before their holder says that they are there") \
  BUG(kChunkToldBeforeStores, "a chunk of a clone's weights is told before its stores are complete") \
  BUG(kChunkFedUnasked, "a channel's slot is filled again before its last chunk has been stored") \
  BUG(kOneCopyOfANode, "of an expert's clones on another node only the first takes part") \
  BUG(kChunkCreditedUnread, "a chunk of gradients is given back when the one before it has come") \
  BUG(kExpertAwaitedByOneWarp, "of the warps that share a channel one alone waits for an expert's slots or gradients") \
  BUG(kOwnNodeFirst, "an owner adds its own node's clones before those of other nodes have come") \
  BUG(kCloneGradientsNotTaken, "a rank goes on before the owners have read its clones' gradients") \
  BUG(kPartRelayedUnawaited, "a part of an expert is passed on before it has come from the owner") \
  BUG(kSumUnawaited, "a part of a sum of clones' gradients is read before it is said to be formed") \
  BUG(kSumToldByEveryWarp, "every warp that forms a part of a sum of gradients says that it is there") \
  BUG(kTornLine, "a line becomes visible in two parts, in any order") \
  BUG(kFlagBeforePayload, "a line's flag becomes visible before its payload") \
  BUG(kEarlyCredit, "a step of the latency path ends without having heard of every rank") \
  BUG(kOneSlabParity, "slabs of successive steps share their memory") \
  BUG(kStaleStep, "a line of two steps before is taken for this step's") \
  BUG(kRestOfRowUnawaited, "of a row only the first lines are waited for") \
  BUG(kRailRowBeforeAllWarps, "a row goes to the rail before all warps that share it have stored their parts") \
  BUG(kRailRowUnawaited, "a row of the latency path is read before its signal along the rail has come") \
  BUG(kEarlyRailCredit, "a step of the latency path ends without having heard of every rail peer") \
  BUG(kForwardedFromNextSource, "rows of the rail are handed on as if they were of the rank behind their source") \
  BUG(kOtherNodesForgotten, "a sum of the latency path is over when it has the partial rows of its own node")
// clang-format on

namespace hep {

#define HEP_BUG_NAME(name, sentence) name,
enum class Bug : uint8_t { kNone, HEP_BUGS(HEP_BUG_NAME) kCount };
#undef HEP_BUG_NAME

#if defined(HEP_MUTANTS)
inline Bug injected_bug = Bug::kNone;
#else
inline constexpr Bug injected_bug = Bug::kNone;
#endif

HEP_HOST_DEVICE bool injected(Bug bug) {
  return injected_bug == bug;
}

}  // namespace hep
