"""FLOPs of products, from sizes alone: what the count of a running model and the shapes in a trace have in common.

A multiplication with its addition is two FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Dims = Sequence[int]


def convolution_flops(positions: int, weight: Dims) -> int:
    """Each position meets the channels of one group and the whole kernel. Positions are elements of the output, or of the
    input where the convolution is transposed."""
    return 2 * positions * math.prod(weight[1:])


def attention_flops(
    query: Dims, key: Dims, value: Dims, *, heads_first: bool, causal: bool, backward: bool = False
) -> int:
    """Scores and their sum of values; backward the scores again, then gradients of values, probabilities, queries and keys.

    `heads_first`: batch, heads, sequence, width; else batch, sequence, heads, width. Causal attention counts what is left
    of the square, which is half of it.
    """
    sequence, head = (-2, -3) if heads_first else (-3, -2)
    queries, keys = query[sequence], key[sequence]
    square = min(queries, keys)
    pairs = square * square / 2 + max(queries - keys, 0) * keys if causal else queries * keys
    of_key, of_value = (3, 2) if backward else (1, 1)
    width = of_key * query[-1] + of_value * value[-1]
    return int(2 * math.prod(query[:-3]) * query[head] * pairs * width)
