"""Logits to tokens: an ordered sampler, counter-based noise, log-probabilities, verification of drafts."""

from lmkit.sampling.logprobs import TokenChoice, gather_logprobs
from lmkit.sampling.sampler import SampleBatch, Sampled, Sampler
from lmkit.sampling.verify import accept

__all__ = ["SampleBatch", "Sampled", "Sampler", "TokenChoice", "accept", "gather_logprobs"]
