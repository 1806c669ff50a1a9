"""The demo model: a small Llama in plain PyTorch whose parameter names are those of Hugging Face checkpoints.

Written out here rather than taken from transformers so that one forward pass compiles to few kernels. The saved
checkpoint is an ordinary `LlamaForCausalLM`. Shape suffixes: B rows, T tokens per row, H heads, D head size, C hidden.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `to_hf` is the checkpoint's config.json."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048

    def to_hf(self, bos_token_id: int, eos_token_id: int, pad_token_id: int) -> dict:
        """The config.json of the exported checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 like the reference implementation."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))


def rotary_tables(positions_BT: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's rotation angles, each of shape (B, 1, T, D)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = positions_BT[:, None, :, None].float() * config.rope_theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the rotate-half layout."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention under an additive mask."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        batch, length, _ = x_BTC.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.config.head_dim).transpose(1, 2)

        query = rotate(heads(self.q_proj(x_BTC)), *rotary)
        key = rotate(heads(self.k_proj(x_BTC)), *rotary)
        value = heads(self.v_proj(x_BTC))
        repeats = self.config.num_heads // self.config.num_kv_heads
        out_BHTD = F.scaled_dot_product_attention(
            query.to(value.dtype),
            key.to(value.dtype).repeat_interleave(repeats, dim=1),
            value.repeat_interleave(repeats, dim=1),
            attn_mask=mask.to(value.dtype),
        )
        return self.o_proj(out_BHTD.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor) -> Tensor:
        rotary = rotary_tables(positions_BT, self.config)
        mask = block_causal_mask(segments_BT)
        x = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x = layer(x, rotary, mask)
        return self.norm(x)


class DemoModel(nn.Module):
    """The language model; the output layer shares the embedding's weight."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor) -> Tensor:
        """Logits of shape (B, T, vocabulary) for rows of packed chats."""
        return F.linear(self.model(tokens_BT, positions_BT, segments_BT), self.model.embed_tokens.weight)


def block_causal_mask(segments_BT: Tensor) -> Tensor:
    """Additive mask (B, 1, T, T): a token sees earlier tokens of its own chat and nothing else."""
    length = segments_BT.shape[1]
    same_chat = segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(same_chat.shape).masked_fill(~(same_chat & causal), float("-inf"))


def weighted_loss(logits_BTV: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Mean cross entropy in nats per unit of weight."""
    losses = F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="none")
    weights = weights_BT.flatten()
    return (losses * weights).sum() / weights.sum()
