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
            f"{record['dense']['rule']} does not: it does other work than the baseline, not less of "
            "it. Write 'baseline: null' to hold all rows against attention without a mask, or name "
            "this row's own dense rule as the baseline"
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
