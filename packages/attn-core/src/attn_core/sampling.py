"""The acceptance step of speculative decoding: which draft tokens stay, and which token follows them.

The law of the tokens that come out is the target model's own, provided that each draft id was drawn from the
row of ``draft_probs`` given with it (Leviathan, Kalman, Matias 2023; Chen et al. 2023).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from . import capture, notices, plugins, tracing
from .backend import SamplingIO
from .checking import apart_from, backend_name, dense, no_autocast
from .errors import needs
from .not_here import refusing
from .sampling_math import MAX_VOCAB, PAD
from .sampling_route import Sampler, SamplingProblem, screened, serve
from .target import target_of

_PROB_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ID_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
_SEED_DTYPES = (torch.int64, torch.uint64)


@torch.no_grad()
def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept a prefix of each request's draft chain and sample the one token that follows it.

    With ``q = draft_probs[r, i, id]``, ``p = target_probs[r, i, id]`` and a uniform ``u`` in [0, 1), draft
    ``i`` passes if ``u * q < p`` (so ``p >= q > 0`` always does). The chain is accepted up to its first draft
    that does not pass; the token there is drawn from ``max(0, target row - draft row)``, normalised, or from
    the target row if that is zero everywhere. A chain accepted to its end is followed by a bonus token from
    the next target row. Rows need not be normalised for that draw. Only *chains*: draft ``i + 1`` continues
    draft ``i``.

    A draft id of -1 ends the request's chain: what stands behind it is not a draft, and the target row at
    that position gives the bonus token. Where no token can be drawn, because the target row (or, after a
    rejection, the draft row) holds a NaN, an infinity or a negative number, or the target row is zero, the
    output is -1 from there on. No row has an influence on another.

    Random numbers come from Philox4x32-10 as a function of (seed, offset, row, position), so equal arguments
    give equal tokens, on every device; ids are found in exact integer arithmetic (weights below 2**-40 of
    their row's largest count as 0). See also ``docs/sampling.md``.

    * ``seed`` and ``offset``: each other ``offset`` (or ``seed``) is another set of random numbers; adding 1
      between two calls is enough. They are not changed.
    * Neither: one 63-bit seed is drawn from ``generator`` (or torch's default one) by ``Tensor.random_()``.
      That advances it as this call always does: by 4 for a CUDA or HIP generator, by one 64-bit draw for a
      CPU one.

    Reads nothing back from a device. May be called during graph capture if ``seed`` and ``offset`` are device
    tensors: a replay reads what they hold then, so change one of them before each. Call it once before, so
    that the kernel is loaded: ``auto`` captures another candidate where it is not, and a backend that was
    named refuses.

    Args:
        draft_probs: ``[batch_size, n, vocab_size]`` float16, bfloat16, float32 or float64 (rounded to float32
            where a token is drawn). The rows that the ids were drawn from. ``n`` and ``batch_size`` may be 0.
        draft_token_ids: ``[batch_size, n]``, a signed integer dtype; -1 or in [0, vocab_size).
        target_probs: ``[batch_size, n + 1, vocab_size]``, dtype as ``draft_probs`` or another of these.
        maybe_output_accepted_token_num: ``[batch_size]`` int32, *added to* in place, or None for a new
            tensor. The number of drafts that pass on their own, also behind the first one that does not.
        maybe_output_emitted_draft_token_num: ``[batch_size]`` int32, likewise: length of the accepted prefix.
        deterministic: Accepted for FlashInfer's signature. The result is deterministic either way.
        generator: On the CPU or on the device of ``draft_probs``. Not touched if a seed is given.
        seed: int (64 bits, any sign), or an int64 or uint64 tensor on the device of ``draft_probs``: ``[1]``,
            or ``[batch_size]`` for a seed per request. With the latter a request's tokens do not depend on
            its row; equal seeds then mean equal random numbers.
        offset: As ``seed``, and given exactly if it is; both are ints or both tensors.
        backend: ``auto``, a backend, or a candidate ``backend/path``. Every one gives the same tokens.

    Returns:
        ``(tokens, accepted, emitted)``: ``tokens`` ``[batch_size, n + 1]`` int32, the accepted drafts, the
        token that follows, then -1; the two counters, which are the tensors given, where they were given.

    Raises:
        TypeError: A dtype is not as above.
        NotImplementedError: No backend serves the combination.
        ValueError: Shapes or devices do not fit together; ``backend`` names nothing; ``seed`` or ``offset``
            is missing, out of range, or is not a device tensor during capture; the generator is on a third
            device; ``vocab_size`` is not in [1, 2**22]. On the CPU also: a draft id is outside
            [-1, vocab_size). On a device it ends the chain as -1 does.
    """
    if is_dynamo_compiling():
        return tracing.call(  # type: ignore[no-any-return]
            "chain_speculative_sampling", draft_probs, draft_token_ids, target_probs,
            maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num, deterministic, generator,
            seed, offset, backend,
        )  # fmt: skip
    _check_probs(draft_probs, draft_token_ids, target_probs)
    counters = {
        "maybe_output_accepted_token_num": maybe_output_accepted_token_num,
        "maybe_output_emitted_draft_token_num": maybe_output_emitted_draft_token_num,
    }
    batch_size, n, vocab_size = draft_probs.shape
    device = draft_probs.device
    for name, counter in counters.items():
        if counter is not None:
            _check_counter(name, counter, batch_size, device)
    (name, one), (other_name, other) = counters.items()
    if one is not None and other is not None:  # both are added to
        apart_from(name, one, [(other_name, other)], "core.counter")
    _check_randomness(seed, offset, generator, batch_size, device)
    ids = draft_token_ids.to(torch.int64)
    if device.type == "cpu":
        _check_ids(ids, vocab_size)
    problem = SamplingProblem(draft_probs.dtype, target_probs.dtype, vocab_size)
    target = target_of(device)
    # Before the generator moves on.
    samplers = screened(target, problem, backend_name(backend), plugins.registry())
    seeds, offsets = _seed_and_offset(seed, offset, generator, device)
    tokens = torch.empty(batch_size, n + 1, dtype=torch.int32, device=device)
    accepted, emitted = (
        torch.zeros(batch_size, dtype=torch.int32, device=device) if counter is None else counter
        for counter in counters.values()
    )
    if batch_size:
        io = SamplingIO(
            _dense(draft_probs), _dense(target_probs), ids.contiguous(), seeds, offsets,
            tokens, accepted, emitted,
        )  # fmt: skip

        def take(sampler: Sampler) -> None:
            with no_autocast(device):
                sampler.backend.sample(sampler.path.name, io)

        chosen = serve(samplers, target, take)
        notices.announce(target, chosen.refused, chosen.candidate)
    return tokens, accepted, emitted


def _dense(probs: torch.Tensor) -> torch.Tensor:
    return probs if probs.stride(2) == 1 else probs.contiguous()


def _seed_and_offset(
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
    generator: torch.Generator | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as int64 tensors of 1 or ``batch_size`` entries; may advance the generator."""
    if isinstance(seed, torch.Tensor) and isinstance(offset, torch.Tensor):
        first, second = (t.view(torch.int64).reshape(-1).contiguous() for t in (seed, offset))
        return first, second
    if seed is None or offset is None:
        on_host = generator is not None and generator.device.type == "cpu"
        source = torch.device("cpu") if on_host else device
        drawn = torch.empty(1, dtype=torch.int64, device=source).random_(generator=generator)
        if source == device:
            return drawn, torch.zeros_like(drawn)
        seed, offset = int(drawn), 0
    return _fill(int(seed), device), _fill(int(offset), device)


def _fill(value: int, device: torch.device) -> torch.Tensor:
    """Return a 64-bit int as a tensor: by a fill, since a copy from the host may wait for the device."""
    signed = value - 2**64 if value >= 2**63 else value
    return torch.full((1,), signed, dtype=torch.int64, device=device)


def _check_probs(
    draft_probs: torch.Tensor, draft_token_ids: torch.Tensor, target_probs: torch.Tensor
) -> None:
    given = {"draft_probs": draft_probs, "target_probs": target_probs, "draft_token_ids": draft_token_ids}
    for name, tensor in given.items():
        dense(name, tensor, "core.sampling-dtype")
    for name, probs in (("draft_probs", draft_probs), ("target_probs", target_probs)):
        if probs.dtype not in _PROB_DTYPES:
            wanted = "float16, bfloat16, float32 or float64"
            raise TypeError(needs(name, wanted, probs.dtype, "core.sampling-dtype"))
    if draft_token_ids.dtype not in _ID_DTYPES:
        wanted = "a signed integer dtype"
        raise TypeError(needs("draft_token_ids", wanted, draft_token_ids.dtype, "core.sampling-dtype"))
    if draft_probs.dim() != 3:
        wanted = "3 dimensions [batch_size, n, vocab_size]"
        got = f"shape {tuple(draft_probs.shape)}"
        raise ValueError(needs("draft_probs", wanted, got, "core.sampling-shape"))
    batch_size, n, vocab_size = draft_probs.shape
    if not 1 <= vocab_size <= MAX_VOCAB:
        wanted = f"a vocab_size of 1 to {MAX_VOCAB}"
        raise ValueError(needs("draft_probs", wanted, vocab_size, "core.sampling-vocab"))
    for name, tensor, shape in (
        ("draft_token_ids", draft_token_ids, (batch_size, n)),
        ("target_probs", target_probs, (batch_size, n + 1, vocab_size)),
    ):
        if tuple(tensor.shape) != shape:
            wanted = f"shape {shape}, from draft_probs"
            raise ValueError(needs(name, wanted, tuple(tensor.shape), "core.sampling-shape"))
        _check_device(name, tensor, draft_probs.device)


def _check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    in_front_of_pad = (ids != PAD).cumprod(1).bool()
    outside = in_front_of_pad & ((ids < 0) | (ids >= vocab_size))
    if bool(outside.any()):
        row, column = divmod(int(outside.to(torch.uint8).argmax()), ids.shape[1])
        wanted = f"-1 (end of the draft) or an id in [0, {vocab_size})"
        got = f"{int(ids[row, column])} at [{row}, {column}]"
        raise ValueError(needs("draft_token_ids", wanted, got, "core.draft-token-id"))


def _check_counter(name: str, counter: torch.Tensor, batch_size: int, device: torch.device) -> None:
    wanted = "int32 (a converted copy would lose the counts)"
    if dense(name, counter, "core.counter", wanted).dtype != torch.int32:
        raise TypeError(needs(name, wanted, counter.dtype, "core.counter"))
    if tuple(counter.shape) != (batch_size,):
        raise ValueError(needs(name, f"shape ({batch_size},)", tuple(counter.shape), "core.counter"))
    if batch_size > 1 and counter.stride(0) == 0:
        raise ValueError(needs(name, "one memory location per request", "an expanded tensor", "core.counter"))
    _check_device(name, counter, device)


def _check_randomness(
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
    generator: torch.Generator | None,
    batch_size: int,
    device: torch.device,
) -> None:
    given = {"seed": seed, "offset": offset}
    kinds = {
        name: "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        for name, value in given.items()
    }
    tensors = [isinstance(value, torch.Tensor) for value in given.values()]
    if (seed is None) != (offset is None) or any(tensors) != all(tensors):
        got = f"{kinds['seed']} and {kinds['offset']}"
        wanted = "both or neither; both tensors or both scalars"
        raise ValueError(needs("seed and offset", wanted, got, "core.seed"))
    if not all(tensors) and capture.capturing(device):
        wanted = "device tensors during graph capture (a replay would repeat the numbers for ever)"
        raise ValueError(needs("seed and offset", wanted, kinds["seed"], "core.seed-capture"))
    if seed is None:
        if generator is not None and not isinstance(generator, torch.Generator):
            got = type(generator).__name__
            raise TypeError(needs("generator", "a torch.Generator", got, "core.generator-device"))
        if generator is not None and not _serves(generator, device):
            wanted = f"a generator on the CPU or on {device}"
            raise ValueError(needs("generator", wanted, generator.device, "core.generator-device"))
        return
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            _check_seed_tensor(name, value, batch_size, device)
        else:
            _check_seed_int(name, value)


def _serves(generator: torch.Generator, device: torch.device) -> bool:
    """Whether the generator can make a seed for ``device`` without a read back from another device."""
    own = generator.device
    return own.type == "cpu" or (own.type == device.type and own.index in (None, device.index))


def _check_seed_tensor(name: str, value: torch.Tensor, batch_size: int, device: torch.device) -> None:
    if dense(name, value, "core.seed").dtype not in _SEED_DTYPES:
        raise TypeError(needs(name, "int64 or uint64", value.dtype, "core.seed"))
    if value.dim() > 1 or value.numel() not in (1, batch_size):
        raise ValueError(
            needs(name, f"1 or {batch_size} entries", f"shape {tuple(value.shape)}", "core.seed")
        )
    _check_device(name, value, device)


def _check_seed_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(needs(name, "an int or a tensor", type(value).__name__, "core.seed"))
    if not -(2**63) <= value < 2**64:
        raise ValueError(needs(name, "64 bits", value, "core.seed"))


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            needs(name, f"the device of draft_probs, {device}", tensor.device, "core.sampling-device")
        )


if not TYPE_CHECKING:
    __getattr__ = partial(refusing, "sampling")
