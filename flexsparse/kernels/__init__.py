"""The conversion's kernels: what turns indices into occupancy, lists and membership."""
