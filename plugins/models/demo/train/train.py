"""Train the demo model on chats made on the fly, and write a Hugging Face checkpoint every few minutes.

Hidden matrices are trained by Muon, the embedding and the norms by AdamW. The learning rate warms up, stays, and falls
linearly to zero over the last part of the run. A run can start from the weights of an earlier one with another mix.
"""

import argparse
import dataclasses
import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from train.data import Batch, Mix, batches
from train.model import DemoModel, ModelConfig, weighted_loss

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def learning_rate_factor(step: int, num_steps: int, warmup: int, decay: float) -> float:
    """The share of the full learning rate to use at a step: warm-up, plateau, linear decay over the last share."""
    left = (num_steps - step) / max(1.0, num_steps * decay)
    return min(1.0, (step + 1) / warmup, left)


def make_optimizers(model: DemoModel, learning_rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """The batch's arrays as tensors, by field name."""
    return {field.name: torch.from_numpy(getattr(batch, field.name)) for field in dataclasses.fields(batch)}


def write_checkpoint(model: DemoModel, tokenizer: Tokenizer, tokenizer_dir: Path, out: Path, progress: dict) -> None:
    """Write the bfloat16 checkpoint that loaders read, and the float32 weights that a later run starts from."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, out / "float32.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(halves, out / "model.safetensors", metadata={"format": "pt"})
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    pad = tokenizer.token_to_id("<|endoftext|>")
    generation = {"bos_token_id": start, "eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False}
    for name, content in {
        "config.json": model.config.to_hf(start, end, pad),
        "generation_config.json": generation,
        "progress.json": progress,
    }.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_dir / name, out / name)


def train(arguments: argparse.Namespace) -> None:
    """Run the training loop."""
    torch.manual_seed(arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    model = DemoModel(ModelConfig(vocab_size=tokenizer.get_vocab_size()))
    if arguments.start_from:
        model.load_state_dict(load_file(arguments.start_from / "float32.safetensors"))
    mix = Mix(**json.loads(arguments.mix.read_text())) if arguments.mix else Mix()
    optimizers = make_optimizers(model, arguments.learning_rate, arguments.weight_decay)

    def loss_of(tokens: Tensor, targets: Tensor, positions: Tensor, segments: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return weighted_loss(model(tokens, positions, segments), targets, weights)

    compiled = torch.compile(loss_of) if arguments.compile else loss_of
    source = batches(tokenizer, mix, arguments.seed, arguments.rows, arguments.length)
    num_tokens, average, started = 0, 0.0, time.monotonic()
    bar = tqdm(range(arguments.steps), unit="step", mininterval=10)
    for step in bar:
        factor = learning_rate_factor(step, arguments.steps, arguments.warmup, arguments.decay)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * factor
        batch = next(source)
        loss = compiled(**batch_tensors(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        num_tokens += int((batch.segments > 0).sum())
        average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
        seconds = time.monotonic() - started
        bar.set_postfix(
            loss=f"{average:.4f}", lr=f"{factor:.2f}", tokens_per_s=round(num_tokens / seconds), refresh=False
        )
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            progress = {"step": step + 1, "tokens": num_tokens, "loss": round(average, 5), "seconds": round(seconds)}
            out = arguments.out / f"step-{step + 1:05d}"
            write_checkpoint(model, tokenizer, arguments.tokenizer, out, progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory that tokenizer.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoints")
    parser.add_argument("--start-from", type=Path, help="checkpoint directory of an earlier run")
    parser.add_argument("--mix", type=Path, help="JSON file with the fields of data.Mix to change")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rows", type=int, default=16, help="rows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=100, help="steps until the full learning rate")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the steps over which the rate falls to zero")
    parser.add_argument("--save-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
