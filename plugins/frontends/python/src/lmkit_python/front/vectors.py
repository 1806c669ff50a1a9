"""What the vectors of turns say: arrays of numpy, and how well documents answer queries.

numpy is imported when there are vectors: most processes have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmkit.api import EngineBusy

from lmkit_python.front.ask import ScoreAsk
from lmkit_python.front.prepare import Turn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]  # [size], or [tokens, size] of a token task


def vector_of(turn: Turn) -> Vector:
    """The answer to one prompt. Raises EngineBusy when there is none."""
    import numpy as np

    pooled = turn.message.pooled
    if pooled is None:
        raise EngineBusy("the request was aborted")
    return np.frombuffer(pooled.data, "<f4").reshape(pooled.shape)


def scores_of(ask: ScoreAsk, turns: Sequence[Turn]) -> list[float]:
    """How well each document answers its query, from the turns of the ask.

    A cross-encoder has read both. Embeddings are compared by cosine; vectors per token by the sum over the query's of
    the best match (ColBERT, arXiv:2004.12832).
    """
    vectors = [vector_of(turn) for turn in turns]
    asked = turns[0].request.pooling
    if asked is not None and asked.task == "classify":
        return [float(vector[0]) for vector in vectors]
    of = {turn.prompt: _unit(vector) for turn, vector in zip(turns, vectors, strict=True)}
    return [_similarity(of[query], of[document]) for query, document in ask.pairs]


def _unit(vectors: Vector) -> Vector:
    import numpy as np

    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(length, 1e-12)


def _similarity(query: Vector, document: Vector) -> float:
    if query.ndim == 1:
        return float(query @ document)
    return float((query @ document.T).max(axis=1).sum())
