import numpy as np
from lmkit_proposer_recall.proposer import Recall
from lmkit_testing import ProposerConformance


class TestRecall(ProposerConformance):
    plugin = "proposer:recall"


def test_one_request_helps_another():
    recall = Recall(context=2)
    assert recall.propose([np.array([1, 2, 3, 4, 5], np.int32)], [4]) == [[]]
    assert recall.propose([np.array([9, 1, 2], np.int32)], [2]) == [[3, 4]]


def test_the_oldest_is_forgotten():
    recall = Recall(context=1, remembered=2)
    recall.propose([np.array([1, 2, 3, 4], np.int32)], [0])
    assert recall.propose([np.array([1], np.int32), np.array([3], np.int32)], [1, 1]) == [[], [4]]
