"""Train an EAGLE head for the demo checkpoint by self-distillation, and write it in the published layout.

The head is one layer of the model behind a projection of the next token's embedding and the model's hidden state (Li et
al. 2024, arXiv:2401.15077). It learns the model's own distribution over the chats that the model was trained on, from
the model's hidden states and then from its own, which is what it gets when it guesses several tokens in a row.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from train.data import PROMPT_WEIGHT, Batch, Mix, Renderer, batches, make_chat, pack
from train.model import DemoModel, Layer, ModelConfig, block_causal_mask, rotary_tables
from train.train import batch_tensors, learning_rate_factor

FEATURE_WEIGHT = 0.1  # of the distance between hidden states, beside that between distributions
FADING = 0.8  # weight of each further guess in a row
LONGEST_REPLY = 160  # tokens


class Head(nn.Module):
    """hidden states and embeddings of the tokens that follow, both (B, T, C) -> the hidden states that follow."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.layers[0].input_layernorm = nn.Identity()
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        size = config.hidden_size  # it begins by passing the hidden state on
        nn.init.eye_(self.fc.weight.data[:, size:])
        for linear in (self.layers[0].self_attn.o_proj, self.layers[0].mlp.down_proj):
            nn.init.zeros_(linear.weight)

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        return self.layers[0](self.fc(torch.cat((embedded, hidden), dim=-1)), rotary, mask)


def head_loss(head: Head, model: DemoModel, batch: dict[str, Tensor], depth: int) -> tuple[Tensor, Tensor]:
    """The loss of `depth` guesses in a row at every place, and of each guess the share that the model agrees with.

    At a place the head knows the token that follows, the target of the model there, and says what comes after it.
    """
    tokens, positions, segments = batch["tokens"], batch["positions"], batch["segments"]
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        true = model.model(tokens, positions, segments)
        teacher = F.log_softmax(F.linear(true, embedding).float(), -1)
    rotary, mask = rotary_tables(positions, head.config), block_causal_mask(segments)
    embedded = F.embedding(batch["targets"], embedding)
    hidden, total, agreed = true, torch.zeros(()), []
    same = segments[:, 1:] == segments[:, :-1]
    for guess in range(depth):
        hidden = head(hidden, embedded, rotary, mask)
        # what the head makes of place t is compared with what the model has at place t + 1, in replies
        read = (batch["weights"][:, 1:] == 1) & same & (positions[:, 1:] > guess)
        student, wanted = F.log_softmax(F.linear(hidden[:, :-1][read], embedding).float(), -1), teacher[:, 1:][read]
        distance = F.kl_div(student, wanted, log_target=True, reduction="batchmean")
        feature = F.smooth_l1_loss(hidden[:, :-1][read].float(), true[:, 1:][read].float())
        total = total + FADING**guess * (distance + FEATURE_WEIGHT * feature)
        agreed.append((student.argmax(-1) == wanted.argmax(-1)).float().mean().detach())
        hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))  # the next guess reads this one
    return total, torch.stack(agreed)


def replies(model: Path, tokenizer: Tokenizer, num: int, seed: int, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and weights of `num` chats whose last reply the model wrote, half of them at temperature 1."""
    from lmkit import LLM, SamplingParams

    rng, renderer, prompts = Random(seed), Renderer(), []
    while len(prompts) < num:
        chat = make_chat(rng, False, Mix())
        messages = chat.messages()
        asked = max(i for i, message in enumerate(messages) if message["role"] == "user")
        prompts.append(renderer.prompt(messages[: asked + 1], chat.tools, chat.thinking))
    encoded = [e.ids for e in tokenizer.encode_batch(prompts)]
    encoded = [ids for ids in encoded if len(ids) + LONGEST_REPLY < length]
    params = [SamplingParams(max_tokens=LONGEST_REPLY, temperature=i % 2, seed=seed + i) for i in range(len(encoded))]
    found = []
    for ids, answer in zip(encoded, LLM(str(model)).generate(encoded, params), strict=True):
        written = answer.outputs[0].token_ids
        weights = [PROMPT_WEIGHT] * len(ids) + [1.0] * len(written)
        found.append((np.array([*ids, *written]), np.array(weights, np.float32)))
    return found


def reply_batches(chats: list, seed: int, num_rows: int, length: int) -> Iterator[Batch]:
    """Endless batches of `chats`, in another order each time."""
    rng, waiting = Random(seed), []
    while True:
        while sum(len(tokens) for tokens, _ in waiting) < num_rows * length * 1.3:
            waiting += rng.sample(chats, min(64, len(chats)))
        batch, waiting = pack(waiting, num_rows, length)
        yield batch


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of 8 bits [N, K], and the scale of each row [N, 1]."""
    scale = (matrix.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-8).to(torch.bfloat16)
    return (matrix.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


def write_head(head: Head, config: dict, out: Path) -> None:
    """The folder that `lmkit serve --proposer eagle` reads: guesses are read from memory again and again, and need not
    be exact, so matrices have 8 bits."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    for name in [name for name, tensor in weights.items() if tensor.ndim == 2]:
        weights[name], weights[f"{name}_scale"] = rounded(weights[name])
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    sizes = {**config, "num_hidden_layers": 1, "bias": False, "tie_word_embeddings": False}
    bits = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": bits, "input_activations": None, "output_activations": None}
    sizes["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (out / "config.json").write_text(json.dumps(sizes, indent=2) + "\n")


def read_head(folder: Path) -> dict[str, Tensor]:
    """The weights of a head that `write_head` wrote, or of one that was not rounded."""
    found = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    return {name: t * found.get(f"{name}_scale", 1) for name, t in found.items() if not name.endswith("_scale")}


def train(arguments: argparse.Namespace) -> None:
    """Run the training loop."""
    torch.manual_seed(arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    hf = json.loads((arguments.model / "config.json").read_text())
    config = ModelConfig(vocab_size=hf["vocab_size"])
    model = DemoModel(config)
    model.load_state_dict({n: t.float() for n, t in load_file(arguments.model / "model.safetensors").items()})
    model.requires_grad_(False)
    head = Head(config)
    if arguments.start_from:
        head.load_state_dict(read_head(arguments.start_from))
    matrices = [p for p in head.parameters() if p.ndim == 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=arguments.learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in head.parameters() if p.ndim != 2], lr=arguments.learning_rate, weight_decay=0.0),
    ]

    def loss_of(**batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return head_loss(head, model, batch, arguments.depth)

    sizes = arguments.rows, arguments.length
    source = batches(tokenizer, Mix(), arguments.seed, *sizes)
    if arguments.replies:
        own = replies(arguments.model, tokenizer, arguments.replies, arguments.seed, arguments.length)
        given, written = source, reply_batches(own, arguments.seed, *sizes)
        source = (batch for pair in zip(given, written, strict=False) for batch in pair)
    average, started = torch.zeros(arguments.depth), time.monotonic()
    bar = tqdm(range(arguments.steps), unit="step", mininterval=10)
    for step in bar:
        late = (time.monotonic() - started) / (60 * arguments.minutes)  # of the time or the steps, what is over first
        step_now = max(step, int(late * arguments.steps))
        if step_now >= arguments.steps:
            break
        factor = learning_rate_factor(step_now, arguments.steps, arguments.warmup, arguments.decay)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * factor
        loss, agreed = loss_of(**batch_tensors(next(source)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average = agreed if step == 0 else 0.95 * average + 0.05 * agreed
        shown = " ".join(f"{share:.3f}" for share in average.tolist())
        bar.set_postfix(loss=f"{loss.item():.4f}", lr=f"{factor:.2f}", agreed=shown, refresh=False)
        if (step + 1) % arguments.save_every == 0:
            write_head(head, hf, arguments.out)
    write_head(head, hf, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="directory for the head")
    parser.add_argument("--start-from", type=Path, help="head of an earlier run")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--minutes", type=float, default=1e9, help="end earlier after that time")
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--depth", type=int, default=8, help="guesses in a row")
    parser.add_argument("--replies", type=int, default=0, help="chats answered by the model itself: every other batch")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--decay", type=float, default=0.5, help="share of the steps over which the rate falls to zero")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
