"""Conformance kits, fakes and strategies for tests of lmkit and its plugins."""
