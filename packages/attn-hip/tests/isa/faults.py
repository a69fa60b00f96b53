"""What can go wrong in a program that is interpreted."""

from __future__ import annotations


class Fault(RuntimeError):
    """A program did what it must not, or what the interpreter does not know."""


class Unknown(Fault):
    """An instruction, operand or modifier that is not modelled. Never guessed."""


class OutOfBounds(Fault):
    """An access outside every registered buffer, or outside shared memory."""


class Race(Fault):
    """Two waves touch one place between two barriers, or two blocks one place in a launch."""


class Undefined(Fault):
    """An address, a branch, an exec mask or a stored value depends on something never written."""


class Unwaited(Fault):
    """Shared memory is touched while a copy into it may be on its way."""


class Divergence(Fault):
    """Waves of a block disagree on a barrier, or a program does not end."""
