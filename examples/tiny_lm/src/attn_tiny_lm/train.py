"""Train the model: `python -m attn_tiny_lm.train --help`.

One process, one device. Every batch is drawn from a seeded generator, so a run is described by its command
line, the corpus digest in its log and the machine.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from attn_tiny_lm.data import Corpus, Document, load_corpus, to_stream
from attn_tiny_lm.evaluate import bits_per_byte
from attn_tiny_lm.model import ModelConfig, TinyLM, save_model

WARM_UP_STEPS = 200
FINAL_LR = 0.02  # of the peak
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to `FINAL_LR * peak` at the last step."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - 1 - warm_up)
    return peak * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: TinyLM, *, fused: bool) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norm weights alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)


class Batches:
    """Random windows of a byte stream that lives on the training device."""

    def __init__(self, stream: Tensor, batch: int, context: int, seed: int) -> None:
        self.stream = stream
        self.batch = batch
        self.offsets = torch.arange(context + 1, device=stream.device)
        self.generator = torch.Generator(stream.device).manual_seed(seed)

    def draw(self) -> Tensor:
        """Tokens `[batch, context + 1]` int64."""
        last = self.stream.numel() - self.offsets.numel()
        starts = torch.randint(last + 1, (self.batch, 1), device=self.stream.device, generator=self.generator)
        return self.stream[starts + self.offsets].long()


class Log:
    """Lines to stderr and to a new file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("", encoding="utf-8")

    def __call__(self, line: str) -> None:
        """Write one line."""
        print(line, file=sys.stderr, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.startswith("cuda") else nullcontext()


def held_out_report(model: TinyLM, held_out: tuple[Document, ...]) -> dict[str, float]:
    """Bits per byte of the held-out files: all, and those inside and outside the library's test suites."""
    tests = tuple(d for d in held_out if TEST_FOLDERS.intersection(d.name.split("/")))
    parts = {"all": held_out, "library": tuple(d for d in held_out if d not in tests), "tests": tests}
    return {name: round(bits_per_byte(model, files), 4) for name, files in parts.items() if files}


def fit(
    model: TinyLM, batches: Batches, steps: int, peak: float, on_step: Callable[[int, Tensor, float], None]
) -> None:
    """Run `steps` optimiser steps; `on_step(step, loss, lr)` sees each, with the loss still on the device."""
    device = str(batches.stream.device)
    optimizer = make_optimizer(model, fused=device.startswith("cuda"))
    forward = torch.compile(model) if device.startswith("cuda") else model
    for step in range(steps):
        lr = learning_rate(step, steps, peak)
        for group in optimizer.param_groups:
            group["lr"] = lr
        tokens = batches.draw()
        with _autocast(device):
            logits = forward(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step, loss.detach(), lr)


def _describe(corpus: Corpus) -> str:
    halves = (("training", corpus.train), ("held-out", corpus.held_out))
    counts = " ".join(
        f"{name} {len(half)} files {sum(len(d.text) for d in half)} bytes" for name, half in halves
    )
    return f"corpus {counts} sha256 {corpus.sha256}"


def train(
    out: Annotated[Path, typer.Option(help="Folder for the weights, config.json and train.log.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 12_000,
    batch: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 32,
    context: Annotated[int, typer.Option(min=2, help="Tokens per window; also the model's context.")] = 2048,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda, ...")] = "cpu",
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the batches.")] = 0,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of *.py files; default: this Python's own library.")
    ] = None,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between log lines.")] = 100,
    check_every: Annotated[
        int, typer.Option(min=1, help="Steps between checks on some held-out files.")
    ] = 1000,
) -> None:
    """Train on the standard library's source text, score the held-out files, write weights and log."""
    out.mkdir(parents=True, exist_ok=True)
    log = Log(out / "train.log")
    data = load_corpus(corpus)
    model = TinyLM(replace(ModelConfig(), context=context))
    model.init_weights(seed)
    model.to(device)
    chip = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    log(f"python {platform.python_version()} torch {torch.__version__} device {device} ({chip})")
    log(_describe(data))
    parameters = sum(p.numel() for p in model.parameters())
    log(f"parameters {parameters} steps {steps} batch {batch} context {context} lr {lr} seed {seed}")
    started = time.perf_counter()
    some_held_out = data.held_out[::4]

    def on_step(step: int, loss: Tensor, rate: float) -> None:
        if (step + 1) % log_every == 0 or step + 1 == steps:
            nats, seconds = float(loss), time.perf_counter() - started
            speed = (step + 1) * batch * context / seconds
            bits = nats / math.log(2)
            log(f"step {step + 1} loss {nats:.4f} bpb {bits:.4f} lr {rate:.2e} tokens/s {speed:.0f}")
        if (step + 1) % check_every == 0 and step + 1 != steps:
            with _autocast(device):
                log(f"step {step + 1} held-out-sample bpb {bits_per_byte(model, some_held_out):.4f}")

    stream = to_stream(data.train).to(device)
    fit(model, Batches(stream, batch, context, seed), steps, lr, on_step)
    seconds = time.perf_counter() - started
    # What is scored is what is shipped: bf16 weights, computed in float32.
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    report = held_out_report(model, data.held_out)
    log("held-out bits per byte " + " ".join(f"{name} {value:.4f}" for name, value in report.items()))
    command = {"steps": steps, "batch": batch, "context": context, "device": device, "lr": lr, "seed": seed}
    facts: dict[str, object] = {
        "held_out_bits_per_byte": report,
        "trained_tokens": steps * batch * context,
        "train_seconds": round(seconds, 1),
        "python": platform.python_version(),
        "corpus_sha256": data.sha256,
        "command": command,
    }
    save_model(model, out, facts)


if __name__ == "__main__":
    typer.run(train)
