"""Logits to tokens: an ordered sampler, counter-based noise, log-probabilities, verification of drafts."""

from lmkit_worker.sampling.logprobs import TokenChoice, gather_logprobs
from lmkit_worker.sampling.sampler import Drawn, SampleBatch, Sampled, Sampler
from lmkit_worker.sampling.verify import accept

__all__ = ["Drawn", "SampleBatch", "Sampled", "Sampler", "TokenChoice", "accept", "gather_logprobs"]
