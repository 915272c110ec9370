"""
Layers: which layers of torch take the first dimension for time, and does this one?

batch_first.py and mixed_samples.py ask.
"""

from torch import nn

LAYERS = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def batch_is_first(layer):
    attention = getattr(layer, "self_attn", layer)
    return attention.batch_first
