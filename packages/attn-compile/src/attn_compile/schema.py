"""Operator declarations: the schema, and a name that changes whenever the declaration does."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

NAMESPACE = "attn"


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One operator.

    Attributes:
        base: Name without the fingerprint.
        schema: torch schema; ``Tensor(a!)`` marks what is written, everything else is only read.
        revision: Raised when the meaning changes and the schema does not (another fake kernel, say).
    """

    base: str
    schema: str
    revision: int = 0

    @property
    def name(self) -> str:
        """``base__fingerprint``.

        Inductor and AOTAutograd look compiled graphs up on disk by operator name alone. With the
        declaration in the name a graph made for another declaration is never found.
        """
        text = "|".join((self.base, self.schema, str(self.revision)))
        return f"{self.base}__{hashlib.sha256(text.encode()).hexdigest()[:8]}"


RUN = OpSpec(
    "run",
    "(SymInt handle, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor? q_scale,"
    " Tensor? k_scale, Tensor? v_scale, float q_factor, float k_factor, float v_factor) -> ()",
)
"""One run of a planned wrapper. The cache is read: declaring it written is what makes torch copy it,
and, for views, lose it."""
