"""The acceptance step for :class:`attn_core.testing.mini.Mini`: one request at a time, in Python integers."""

from __future__ import annotations

import math

import torch

from ..backend import SamplingIO, SamplingPath
from ..philox import philox4x32, uniform53
from ..reasons import Reason
from ..target import DeviceTarget

_BITS, _LEAST = 40, -80
Row = list[float]


class MiniSampler:
    """Samples chains; whatever a method does can be got wrong on its own by a subclass."""

    sampling: tuple[SamplingPath, ...] = (
        SamplingPath(name="torch", archs=frozenset({"cpu"}), dtypes=frozenset({torch.float32})),
    )

    def prepare_sampling(self, target: DeviceTarget, path: str) -> Reason | None:
        """Nothing to build."""
        return None

    def sample(self, path: str, io: SamplingIO) -> None:
        """Take the step, request after request."""
        for r in range(io.tokens.shape[0]):
            passed, prefix = self.accept(io, r)
            token = self.last(io, r, prefix, rejected=prefix < len(passed))
            ids = io.draft_token_ids[r, :prefix].tolist()
            self.tokens(io, r, [*ids, token, *[self.pad()] * (io.tokens.shape[1] - prefix - 1)])
            self.count(io.accepted, r, sum(passed))
            self.count(io.emitted, r, prefix)

    def accept(self, io: SamplingIO, r: int) -> tuple[list[bool], int]:
        """Return which drafts of a request pass, and how many in front of the first that does not."""
        passed: list[bool] = []
        for i, token in enumerate(io.draft_token_ids[r].tolist()):
            if not 0 <= token < io.draft_probs.shape[2]:
                break
            q, p = float(io.draft_probs[r, i, token]), float(io.target_probs[r, i, token])
            passed.append(self.passes(self.random(io, r, i)[0], q, p))
        return passed, passed.index(False) if False in passed else len(passed)

    def passes(self, u: float, q: float, p: float) -> bool:
        """Test one draft."""
        return q >= 0 and 0 < p < math.inf and (u * q < p or q <= p)

    def random(self, io: SamplingIO, r: int, position: int) -> tuple[float, float]:
        """Return the two uniforms of a position."""
        alone = io.seed.numel() > 1
        offset = int(io.offset[r if io.offset.numel() > 1 else 0])
        counter = self.counter(offset, 0 if alone else r, position)
        words = philox4x32(tuple(torch.tensor(word) for word in counter), io.seed[r if alone else 0])
        return float(uniform53(*words[:2])), float(uniform53(*words[2:]))

    def counter(self, offset: int, row: int, position: int) -> tuple[int, int, int, int]:
        """Return the 128 bits that the numbers are a function of."""
        return offset & 0xFFFFFFFF, (offset >> 32) & 0xFFFFFFFF, row, position + 1

    def last(self, io: SamplingIO, r: int, at: int, *, rejected: bool) -> int:
        """Draw the token behind the accepted ones."""
        target: Row = io.target_probs[r, at].tolist()
        rows = [target]
        if rejected:
            draft: Row = io.draft_probs[r, at].tolist()
            rows = [self.residual(target, draft), target]
            if not self.is_law(draft):
                return self.pad()
        if not self.is_law(target):
            return self.pad()
        drawn = (self.draw(self.integers(row), self.random(io, r, at)[1]) for row in rows if any(row))
        return next((token for token in drawn if token >= 0), self.pad())

    def residual(self, target: Row, draft: Row) -> Row:
        """Return what a rejection draws from."""
        rest = torch.tensor(target) - torch.tensor(draft)  # rounded once, in float32
        kept: Row = rest.clamp(min=0).tolist()
        return kept

    def is_law(self, row: Row) -> bool:
        """Whether a row can be drawn from."""
        return all(0 <= x < math.inf for x in row)

    def integers(self, row: Row) -> list[int]:
        """Scale by a power of two, so that the largest has 40 bits, and truncate."""
        exponent = max(math.frexp(max(row))[1] - 1, _LEAST)
        return [int(math.ldexp(x, _BITS - 1 - exponent)) for x in row]

    def draw(self, weights: list[int], u: float) -> int:
        """Return the first index whose running sum exceeds ``u`` times the total, or -1."""
        threshold, running = int(u * float(sum(weights))), 0
        for index, weight in enumerate(weights):
            running += weight
            if running > threshold:
                return index
        return self.pad()

    def pad(self) -> int:
        """Return what stands where no token does."""
        return -1

    def tokens(self, io: SamplingIO, r: int, tokens: list[int]) -> None:
        """Write the tokens of a request."""
        io.tokens[r] = torch.tensor(tokens, dtype=torch.int32)

    def count(self, counter: torch.Tensor, r: int, n: int) -> None:
        """Add to a counter."""
        counter[r] += n
