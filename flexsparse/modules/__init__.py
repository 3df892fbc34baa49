"""Attention that mixes several branches, as modules with weights: one published method a file."""

from flexsparse.modules.compression import MeanCompression, MLPCompression
from flexsparse.modules.nsa import Branches, NSAAttention

__all__ = ["Branches", "MLPCompression", "MeanCompression", "NSAAttention"]
