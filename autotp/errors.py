"""The errors a user can meet. All derive from `AutotpError`, which is a `ValueError`.

    AutotpError
      InputError      no example inputs found, or the ones given do not run
      SpecError       a model, file or option text that cannot be read
      MeshError       an axis that is unknown, or a size that does not fit
      RuleError       a user rule that matches nothing, or cannot be applied
      PlanError       a plan file or plan that does not fit the model, or cannot be exported
      ProofError      a local program that does not compute what the model computes
      NotPlannedError a sharded model that takes a path, or meets sizes, that its plan was not made for
      StrictError     `strict=True` and a weight matrix that could hold data was left whole
      VerifyError     a verification that could not be run
      WeightsError    a weight file that cannot be read, or does not fit the model
      CheckpointError a checkpoint that cannot be written or read, or does not fit the model
      BuildError      values that only the model's constructor knows, and that cannot be had from it
      RankLostError   a collective that a rank did not come to

A message says what, where, which numbers, and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class AutotpError(ValueError):
    """Something the user can act on; `code` is stable, the text is not."""

    default_code: ClassVar[str] = "TP-ERROR"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.default_code

    @property
    def message(self) -> str:
        """The text without the code."""
        return str(self)


class InputError(AutotpError):
    """No example inputs could be found for the model, or the given ones do not run."""

    default_code = "TP-INPUT"


class SpecError(AutotpError):
    """A model spec, sample text or option that cannot be read."""

    default_code = "TP-SPEC"


class MeshError(AutotpError):
    """A mesh axis that is unknown, or a mesh that does not fit the plan."""

    default_code = "TP-MESH"


class RuleError(AutotpError):
    """A user rule that matches nothing, names no style, or cannot be applied."""

    default_code = "TP-RULE"


class PlanError(AutotpError):
    """A plan or plan file that cannot be read, does not fit the model, or cannot be exported."""

    default_code = "TP-PLAN"


class ProofError(AutotpError):
    """A local program whose intermediates are not what the plan says they are."""

    default_code = "TP-PROOF"


class NotPlannedError(AutotpError):
    """A sharded model took a path, or met sizes, that were not seen when its program was made."""

    default_code = "TP-PATH"


class StrictError(AutotpError):
    """`strict=True`, and a weight matrix that could hold data was left whole."""

    default_code = "TP-WHOLE"


class VerifyError(AutotpError):
    """A verification that could not be run to its end."""

    default_code = "TP-VERIFY"


class WeightsError(AutotpError):
    """A weight file that cannot be read, or that does not hold what the model needs."""

    default_code = "TP-WEIGHTS"


class CheckpointError(AutotpError):
    """A checkpoint that cannot be written or read, or that does not fit the model."""

    default_code = "TP-CHECKPOINT"


class BuildError(AutotpError):
    """A tensor on meta whose value only the constructor knows, and a constructor that cannot be run again."""

    default_code = "TP-BUILD"


class RankLostError(AutotpError):
    """A collective failed because ``ranks`` did not come to it, or came with something else."""

    default_code = "TP-LOST"

    def __init__(self, message: str, *, ranks: Sequence[int] = (), code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.ranks = tuple(ranks)
