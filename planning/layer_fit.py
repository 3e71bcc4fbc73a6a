"""The cost of a layer from measured chunks: weighted non-negative least squares.

    seconds of a chunk on one layer = a + b * tokens + c * sum(length^2),    a, b, c >= 0

minimises the sum of squared *relative* errors, so that small chunks count as much as large ones. Not here: how a stage
of a pipeline differs from its layers, and memory.
"""

import numpy as np
from scipy.optimize import nnls

from planning.layer_cost import LayerCost


def fit_layer_cost(num_tokens: np.ndarray, num_tokens2: np.ndarray, layer_seconds: np.ndarray) -> LayerCost:
    """Of chunks with so many tokens, sums of squared lengths, and seconds per layer.

    Chunks of one size cannot tell the terms apart: all is then proportional to the tokens.
    """
    relative = _features(num_tokens, num_tokens2) / layer_seconds[:, None]
    if len(np.unique(num_tokens)) == 1:
        relative[:, [0, 2]] = 0.0
    scale = np.maximum(relative.max(axis=0), 1e-300)  # tokens^2 and 1 differ by many orders of magnitude
    coefficients, _ = nnls(relative / scale, np.ones(len(layer_seconds)))
    return LayerCost(*(coefficients / scale).tolist())


def layer_seconds(cost: LayerCost, num_tokens: np.ndarray, num_tokens2: np.ndarray) -> np.ndarray:
    """What the fit says of such chunks."""
    coefficients = np.array([cost.fixed_seconds, cost.seconds_per_token, cost.seconds_per_token2])
    return np.asarray(_features(num_tokens, num_tokens2) @ coefficients)


def _features(num_tokens: np.ndarray, num_tokens2: np.ndarray) -> np.ndarray:
    return np.stack([np.ones(len(num_tokens)), num_tokens, num_tokens2], axis=1).astype(float)
