"""What a run came to, in one sentence: did the model learn from context, or where is the run to be taken up again."""

from __future__ import annotations

EXIT_NOT_LEARNED = 3  # of a command whose run is through and did not learn
_FAILED = "NOT LEARNED"


def verdict(
    outcome: str | None, step: int, held_out_loss: float | None, entropy: float, name: str, must_learn: bool = True
) -> tuple[str, bool]:
    """(sentence, whether the run is through and did not learn as it must). entropy: of single bytes, in nats, as the
    loss. must_learn: the recipe's."""
    if outcome != "done" or held_out_loss is None:
        return f"Stopped after step {step}. Continue with: make pretrain RESUME={name}", False
    if held_out_loss < entropy:
        return (
            f"LEARNED: held-out loss {held_out_loss:.4f} nats/byte is {held_out_loss / entropy:.0%} of the unigram "
            f"entropy {entropy:.4f}: the model uses context."
        ), False
    if not must_learn:
        return (
            f"RAN: {step} steps are done. Held-out loss {held_out_loss:.4f} nats/byte, unigram entropy {entropy:.4f}: "
            "a recipe this short shows that everything runs, and is not asked to learn (schedule.must_learn is false)."
        ), False
    return (
        f"{_FAILED}: held-out loss {held_out_loss:.4f} nats/byte is not below the unigram entropy {entropy:.4f}."
    ), True


def failed(sentence: str) -> bool:
    """Whether a run's last sentence says that it did not learn."""
    return sentence.startswith(_FAILED)
