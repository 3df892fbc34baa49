"""What a reader must know beside a row's figures, so that they are not taken for more than they are."""

from __future__ import annotations

from typing import Any


def notes(record: dict[str, Any]) -> list[str]:
    """Sentences over a finished row, as it stands in ``rows.jsonl``."""
    told = []
    outside, pairs = record["pairs_outside"], record["budget"]["logical_pairs"]
    if outside:
        told.append(
            f"sees {outside:,} pairs ({outside / pairs:.1%} of its own) that the baseline "
            f"{record['dense']['rule']} does not: what is promised, delivered and kept speaks of the "
            "baseline's pairs alone. Write baseline: null to hold all rows against full attention, "
            "or name the rule that is this row's dense form"
        )
    if record["pairs_dropped"] == 0:
        told.append(
            "the selector keeps every block that the rule reaches, so it costs time and skips "
            "nothing: give it a smaller keep or smaller blocks"
        )
    if record["score"] is not None:
        told.append(
            "has a score, which the baseline has not: its output error holds what the score "
            "changes too, and mass kept is that of attention without it"
        )
    return told
