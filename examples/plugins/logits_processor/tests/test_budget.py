from lmkit_testing import LogitsProcessorConformance


class TestBudget(LogitsProcessorConformance):
    plugin = "logits_processor:budget"
    asked = ({"tokens": 0, "then": [3, 4]}, {"tokens": 5, "then": [1]}, {"tokens": 0, "then": [1 << 20]})
    refused = ({"tokens": -1, "then": [1]}, {"tokens": 1, "then": []}, {"tokens": 1}, {"tokens": 1, "then": "1"})
