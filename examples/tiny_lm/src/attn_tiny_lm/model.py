"""The model: a small causal transformer over bytes, and its dense forward pass in plain torch.

Every block is RMSNorm -> grouped-query attention with rotary positions -> RMSNorm -> SwiGLU, with residual
connections; the output layer shares the embedding. Nothing here knows about paging: `attn_tiny_lm.generate`
runs the same blocks over a paged cache, and the tests compare the two token by token.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

DATA_DIR = Path(__file__).parent / "data"
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model. The default is the model shipped with the package.

    Attributes:
        vocab_size: number of tokens; a token is a byte.
        d_model: width of the residual stream.
        num_layers: number of blocks.
        num_qo_heads: query heads per block.
        num_kv_heads: key/value heads per block; divides `num_qo_heads`.
        head_dim: size of one head. It is a multiple of 64 because some paged decode kernels need that.
        hidden: width of the SwiGLU layer.
        context: most tokens a sequence may have.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
    """

    vocab_size: int = 256
    d_model: int = 256
    num_layers: int = 4
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 480
    context: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


def rope_table(config: ModelConfig) -> Tensor:
    """Rotary angles as one table `[context, 2, head_dim / 2]` float32: cosines, then sines."""
    half = config.head_dim // 2
    inv_freq = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(config.context, dtype=torch.float64)[:, None] * inv_freq
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the two halves of every head of `x` `[..., rows, heads, head_dim]`.

    `cos_sin` is `[rows, 2, head_dim / 2]` float32, rows of `rope_table`. The result has the dtype of `x`.
    """
    cos, sin = cos_sin[:, 0, None], cos_sin[:, 1, None]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """One transformer block, split at the attention call, so that dense and paged callers share it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        q_width = config.num_qo_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.attn_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.q_proj = nn.Linear(config.d_model, q_width, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.d_model, bias=False)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.gate_proj = nn.Linear(config.d_model, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.d_model, bias=False)

    def qkv(self, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, rotated k and v of the residual stream `x` `[..., rows, d_model]`.

        Returns q `[..., rows, num_qo_heads, head_dim]` and k, v `[..., rows, num_kv_heads, head_dim]`.
        """
        h = self.attn_norm(x)
        head = (-1, self.config.head_dim)
        q = self.q_proj(h).unflatten(-1, head)
        k = self.k_proj(h).unflatten(-1, head)
        v = self.v_proj(h).unflatten(-1, head)
        return apply_rope(q, cos_sin), apply_rope(k, cos_sin), v

    def finish(self, x: Tensor, attn_out: Tensor) -> Tensor:
        """Add attention output `[..., rows, num_qo_heads, head_dim]`, then SwiGLU, to the stream `x`."""
        x = x + self.o_proj(attn_out.flatten(-2))
        h = self.mlp_norm(x)
        gated: Tensor = F.silu(self.gate_proj(h)) * self.up_proj(h)
        return x + cast(Tensor, self.down_proj(gated))


class TinyLM(nn.Module):
    """The whole model. Calling it runs the dense forward pass."""

    rope: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.register_buffer("rope", rope_table(config), persistent=False)

    def init_weights(self, seed: int) -> None:
        """Fill the weights for training, always in the same way for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        # The two projections that write to the residual stream start smaller, so that its variance does not
        # grow with the number of blocks.
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                nn.init.ones_(weight)
            else:
                std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                nn.init.normal_(weight, std=std, generator=generator)

    def layers(self) -> list[Block]:
        """The blocks in order, with their type."""
        return [cast(Block, block) for block in self.blocks]

    def logits(self, x: Tensor) -> Tensor:
        """Logits `[..., vocab_size]` of the residual stream `x` `[..., d_model]`."""
        return F.linear(self.norm(x), self.embed.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Dense causal forward pass.

        Args:
            tokens: `[batch, rows]` integer, `rows <= context`, starting at position 0.

        Returns:
            Logits `[batch, rows, vocab_size]` for the token after each row.

        Raises:
            ValueError: the sequence is longer than the context.
        """
        rows = tokens.shape[-1]
        if rows > self.config.context:
            limit = self.config.context
            raise ValueError(f"tokens: needs at most {limit} rows, got {rows} [tiny-lm.context]")
        cos_sin = self.rope[:rows]
        x: Tensor = self.embed(tokens)
        for block in self.layers():
            q, k, v = (t.transpose(1, 2) for t in block.qkv(x, cos_sin))
            attn_out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = block.finish(x, attn_out.transpose(1, 2))
        return self.logits(x)


def save_model(model: TinyLM, folder: Path, report: dict[str, object]) -> None:
    """Write the weights as bf16 safetensors and the shape plus `report` as JSON into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().cpu().bfloat16().contiguous() for name, weight in model.named_parameters()
    }
    save_file(weights, folder / WEIGHTS_NAME)
    (folder / WEIGHTS_NAME).chmod(0o644)  # safetensors leaves it readable by its owner alone
    text = json.dumps({"model": asdict(model.config), **report}, indent=2)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def load_model(folder: Path = DATA_DIR, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> TinyLM:
    """Load a model that `save_model` wrote; the default is the one shipped with the package.

    Args:
        folder: folder with `model.safetensors` and `config.json`.
        device: where the weights go.
        dtype: type to compute in. float32 keeps greedy choices equal between kernels that round differently.

    Raises:
        FileNotFoundError: a file is missing.
        RuntimeError: the weights do not fit the shape in `config.json`.
    """
    shape = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))["model"]
    model = TinyLM(ModelConfig(**shape))
    model.load_state_dict(load_file(folder / WEIGHTS_NAME))
    model.requires_grad_(False)
    rope = model.rope
    model.to(device, dtype)
    # The angles stay in float32: a rounded angle at position 2000 is a different position.
    model.rope = rope.to(device)
    return model.eval()
