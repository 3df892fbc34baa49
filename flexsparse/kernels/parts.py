"""How much is held at once where pairs are worked off a few rows after the other."""

# Pairs of a query and a key, or of what stands for keys: enough to fill the device, little beside the
# tensors of a call.
PAIRS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}


def rows_at_once(device: str, pairs_a_row: int) -> int:
    return max(1, PAIRS_AT_ONCE.get(device, PAIRS_AT_ONCE["cpu"]) // max(1, pairs_a_row))
