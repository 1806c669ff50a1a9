from lmkit_testing import GrammarConformance, StructuredOutputConformance


class TestTrie(GrammarConformance):
    plugin = "grammar:trie"


class TestInline(StructuredOutputConformance):
    plugin = "structured_output:inline"
