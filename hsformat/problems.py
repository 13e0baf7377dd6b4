"""Problems: what hsformat finds wrong, and the one table of their codes.

A :class:`Problem` is one finding. Every check of this package returns problems, all of them; the
exceptions of this package carry them in ``.problems``. This module imports ``printable`` alone of hsformat, so that
every other module may use it. To add a code: add a row to :data:`CODES`, its failing case to the tests, and run
``make docs``, which rewrites ``docs/problems.md`` from the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from hsformat.printable import printable, shortened

__all__ = [
    "CODES",
    "CodeInfo",
    "ContractMismatch",
    "ExitCode",
    "ForeignFileError",
    "HsError",
    "InvalidRecord",
    "NothingToOpen",
    "Problem",
    "ResolveError",
    "Severity",
    "StoreError",
    "exit_code",
    "problem",
]


class Severity(StrEnum):
    """How bad a problem is. Only ``error`` changes an exit code."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class ExitCode:
    """The exit codes of every hsformat command."""

    CLEAN = 0
    PROBLEMS = 1
    UNABLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeInfo:
    """One row of the code table.

    Attributes
    ----------
    code, name
        Stable identifiers, for example ``HS101`` and ``length-mismatch``.
    severity
        What the code is unless a check says otherwise.
    meaning
        One sentence: what is wrong.
    why
        What goes wrong later if nobody notices.
    fix
        What to do about it in general; a finding gives the particular fix.
    unable
        True when nothing could be checked, so that the exit code is 2 and not 1.
    """

    code: str
    name: str
    severity: Severity
    meaning: str
    why: str
    fix: str
    unable: bool = False


_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE


def _table(*rows: tuple[str, str, Severity, str, str, str]) -> dict[str, CodeInfo]:
    unable = {"HS410", "HS501", "HS502"}
    return {
        code: CodeInfo(code=code, name=name, severity=sev, meaning=meaning, why=why, fix=fix, unable=code in unable)
        for code, name, sev, meaning, why, fix in rows
    }


# fmt: off
CODES: dict[str, CodeInfo] = _table(
    ("HS101", "length-mismatch", _E, "Arrays of one record that are indexed by token have different lengths.",
     "A collate function that joins each array by itself then moves the next record's mask, without an error.",
     "Truncate ids, mask and states together, where the truncation is made."),
    ("HS102", "empty-record", _E, "A record has no token or no state.",
     "There is nothing to train on; offsets of length zero hide a failed extraction.",
     "Drop the record and count it."),
    ("HS103", "mask-empty", _E, "No token of the record is supervised.",
     "Training runs on nothing and looks healthy.",
     "Check the chat template's assistant spans and where truncation cut; drop the record."),
    ("HS104", "mask-values", _E, "The loss mask holds something other than 0 and 1.",
     "A weight or an index read as a mask supervises the wrong tokens.",
     "Store 0 or 1 a token; put weights into a declared field."),
    ("HS105", "token-out-of-range", _E, "A token id is negative or not below the target's vocabulary size.",
     "The embedding lookup fails or reads another row.",
     "Use the target's own tokenizer; check for a padding id such as -100."),
    ("HS106", "position-shape", _E, "position_ids are not int64 of shape [T], or decrease or are negative.",
     "The draft is trained at other positions than it is served at.",
     "Leave position_ids out when they are 0..T-1."),
    ("HS107", "duplicate-id", _E, "Two records have one id.",
     "Records are counted twice and a resume cannot tell which is meant.",
     "Give each record an id of its own."),
    ("HS108", "offsets-broken", _E, "Offsets do not start at 0, rise strictly and end at the array's length.",
     "Rows would be read that belong to a neighbouring record.",
     "Write the segment again; offsets are never edited by hand."),
    ("HS109", "missing-capture", _E, "A capture that is needed is not there.",
     "Position in a list is no substitute: another layer would be read in its place.",
     "Extract with the depth that is missing."),
    ("HS110", "mask-shifted", _E, "The loss mask is shifted against the token ids.",
     "The first useful position is never trained and a stale one is.",
     "Store masks unshifted: loss_mask[t] says that the assistant produced token t."),
    ("HS201", "nonfinite", _E, "A state holds NaN or infinity.",
     "One such value makes the loss NaN, or is hidden by a gradient clip.",
     "Extract the record again; if it returns, the target overflows in this dtype."),
    ("HS202", "zero-state", _E, "A capture is all zero, or more than 1% of its rows are.",
     "Slots of a cache that were never written read as zeros; validation loss looks fine and acceptance is near 0.",
     "Extract again without prefix caching; fewer all-zero rows are reported as a note."),
    ("HS203", "norm-outlier", _W, "The norm of a capture is far from that of the other records.",
     "It may be another layer, another norm or another model.",
     "Look at these records; hsformat validate --target MODEL compares some states with the model's own weights."),
    ("HS204", "wrong-capture", _E, "The numbers are those of another depth than the contract says.",
     "A draft trained on it drafts garbage when served.",
     "Extract again; never relabel without a proof."),
    ("HS205", "wrong-final-norm", _E, "A last capture is normed where the contract says not, or the reverse.",
     "The target distribution is wrong at every position.",
     "Declare the norm that the numbers show."),
    ("HS206", "wrong-tokens", _E, "The states are not those of the record's tokens.",
     "Every training pair is wrong.",
     "Match states to requests by id, not by order of arrival."),
    ("HS207", "dtype-overflow", _E, "States do not fit the capture's dtype.",
     "Targets trained in bfloat16 exceed 65504, which float16 turns into infinity.",
     "Store the capture as bfloat16 or float32."),
    ("HS301", "target-mismatch", _E, "The data was made with another target model.",
     "States of a fine-tune or of a rotated target look right and are not.",
     "Extract with the target that will be served."),
    ("HS302", "tokenizer-mismatch", _E, "The data was made with another tokenizer.",
     "The same text gives other ids when served.",
     "Extract with the tokenizer that will be served."),
    ("HS303", "template-mismatch", _W, "Records were rendered with another chat template.",
     "The draft sees other prompts than when served.",
     "Prepare the data with the template that will be served."),
    ("HS304", "depth-out-of-range", _E, "A depth is not in 0..N of the target.",
     "Engines drop such a layer or repeat another in its place, silently.",
     "Use depths between 0 (embedding output) and N (after the last layer)."),
    ("HS305", "quantization-mismatch", _E, "The target was quantised in another way when the data was made.",
     "States of a quantised target differ from those of the original.",
     "Extract with the quantised target that will be served."),
    ("HS401", "layer-mismatch", _E, "The ordered aux captures of the data are not what the draft is fed.",
     "All shapes fit; the head trains to a good accuracy and drafts almost nothing.",
     "Select the served captures in the served order, or extract them."),
    ("HS402", "layer-count", _E, "The number of aux captures differs from what the draft consumes.",
     "The fc weight has another width, or a slot is dropped by position.",
     "Use as many aux captures as the draft's fc takes."),
    ("HS403", "layers-undeclared", _E, "The draft does not say which layers it is fed.",
     "Each engine then uses a default of its own, which differs by version.",
     "Write the layer ids into the draft's config."),
    ("HS404", "layers-ambiguous", _E, "The draft's config names different layers in different places.",
     "Which is read depends on the engine.",
     "Leave one list."),
    ("HS405", "norm-mismatch", _E, "A norm is applied on one side alone.",
     "The head is trained on differently scaled input than it is served.",
     "Make both sides agree; see the fields named."),
    ("HS406", "shift-mismatch", _E, "Token, feature, position or target are shifted differently when served.",
     "The head learns another task than the engine asks of it.",
     "Use hsformat.align."),
    ("HS407", "rope-mismatch", _E, "Rotary position embedding differs between training and serving.",
     "Attention of the draft is wrong, more so at late positions.",
     "Use the RoPE parameters that the engine will use."),
    ("HS408", "vocab-map", _E, "The draft's vocabulary map is missing, of the wrong size or not an offset map.",
     "Drafted ids are other tokens.",
     "Write d2t as int64 offsets beside a t2d that agrees with it."),
    ("HS409", "hidden-size-mismatch", _E, "Hidden sizes differ.",
     "The weights cannot be loaded, or a projection is inserted.",
     "Use data of this target."),
    ("HS410", "unsupported-engine", _E, "The engine, its version or the architecture is not known here.",
     "The nearest guess is how layers get shifted by one.",
     "Use a version that is listed, or describe the layout yourself."),
    ("HS411", "weights-missing", _E, "A weight that the engine needs is missing or has another name or shape.",
     "Engines leave it at its random start without a warning.",
     "Export the draft again."),
    ("HS412", "embedding-or-head-lost", _E, "The engine will replace an embedding or head that was trained.",
     "What was trained is thrown away when served.",
     "Freeze it, or serve with an engine that keeps it."),
    ("HS501", "not-a-store", _E, "There is no hsformat store at this path.",
     "Nothing can be read.",
     "Check the path."),
    ("HS502", "spec-version", _E, "The store follows a specification that this version of hsformat does not read.",
     "Reading it anyway would guess at the meaning of a field.",
     "Install a version of hsformat that reads it."),
    ("HS503", "missing-data", _E, "A file that the commit record names is not there.",
     "Zarr readers show zeros in its place.",
     "Restore the file, or run hsformat repair and extract the records again."),
    ("HS504", "checksum", _E, "Bytes differ from the checksum that was written with them.",
     "A flipped bit in a state is invisible in training.",
     "Restore the file from a copy, or run hsformat repair and extract the records again."),
    ("HS505", "truncated", _E, "A file is shorter or longer than the commit record says.",
     "A copy or a disk was cut.",
     "Restore the file from a copy, or run hsformat repair and extract the records again."),
    ("HS506", "uncommitted", _N, "A segment was begun and never committed; an error where it cannot be written.",
     "Nothing: readers do not see it. It takes space. A disk that is too small stops a run, maybe after hours.",
     "Extract again what is missing; hsformat gc removes what no writer has touched for a day. Free space first if the "
     "disk is full."),
    ("HS507", "contract-drift", _E, "What would be written follows another contract than the store.",
     "Records of two meanings in one store cannot be told apart.",
     "Write to another store, or use the store's contract."),
    ("HS508", "stale-index", _W, "A copy of metadata disagrees with what is committed.",
     "A reader that trusts the copy sees old lengths.",
     "Remove the copy; hsformat ignores it."),
    ("HS601", "unsafe-file", _E, "A file can execute code when it is loaded.",
     "Loading it hands the machine to whoever wrote it.",
     "Ask its producer for safetensors."),
    ("HS602", "corrupt-file", _E, "An input file cannot be read as what it claims to be.",
     "Part of it would be taken for the whole.",
     "Get the file again."),
    ("HS603", "unknown-format", _E, "The format of an input is not known here.",
     "A guess at its meaning would be stored as a fact.",
     "Convert it to a format that is listed."),
    ("HS604", "provenance-unknown", _E, "Foreign data does not say what it holds, and nobody has declared it.",
     "An invented contract is worse than none.",
     "Declare it, and prove it: hsformat validate --target MODEL."),
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding.

    Attributes
    ----------
    code
        A key of :data:`CODES`.
    severity
        ``error``, ``warning`` or ``note``.
    where
        The place, from the outside inwards: store or file, segment, record, capture, token.
    got, expected
        What is there and what should be, as text.
    fix
        What to do about this finding.
    record
        The record's id, where there is one.
    """

    code: str
    severity: Severity
    where: str
    got: str
    expected: str
    fix: str
    record: str | None = None

    @property
    def id(self) -> str | None:
        """The record's id, where there is one."""
        return self.record

    @property
    def name(self) -> str:
        """The code's name, for example ``length-mismatch``."""
        return CODES[self.code].name

    def to_dict(self) -> dict[str, Any]:
        """Return the problem as JSON-able data, the code's name included."""
        out: dict[str, Any] = asdict(self)
        out["severity"] = self.severity.value
        return {"code": self.code, "name": self.name, **{k: v for k, v in out.items() if k != "code"}}

    def at(self, outer: str) -> Problem:
        """Return the same problem with its place inside ``outer``."""
        outer = printable(outer)
        where = f"{outer}: {self.where}" if self.where else outer
        return Problem(
            code=self.code,
            severity=self.severity,
            where=where,
            got=self.got,
            expected=self.expected,
            fix=self.fix,
            record=self.record,
        )

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.severity.value} {self.code} {self.name}",
                f"  where     {self.where}",
                f"  got       {self.got}",
                f"  expected  {self.expected}",
                f"  fix       {self.fix}",
            )
        )


def problem(
    code: str,
    *,
    where: str,
    got: object,
    expected: object,
    fix: str | None = None,
    record: str | None = None,
    severity: Severity | None = None,
) -> Problem:
    """Make a :class:`Problem`; severity and fix default to what the code table says.

    What stands in files may be in the texts: control characters are escaped, and what is long is cut.

    Raises
    ------
    KeyError
        ``code`` is not in :data:`CODES`: a defect of hsformat, never of the input.
    """
    info = CODES[code]
    return Problem(
        code=code,
        severity=info.severity if severity is None else severity,
        where=printable(shortened(where, words=False)),
        got=printable(shortened(str(got), words=True), quoting=True),
        expected=printable(shortened(str(expected), words=True)),
        fix=printable(shortened(info.fix if fix is None else fix, words=False)),
        record=record,
    )


def exit_code(problems: Iterable[Problem]) -> int:
    """Return 0 without errors, 2 if an error means that the job could not be done, otherwise 1."""
    errors = [p for p in problems if p.severity is Severity.ERROR]
    if any(CODES[p.code].unable for p in errors):
        return ExitCode.UNABLE
    return ExitCode.PROBLEMS if errors else ExitCode.CLEAN


class HsError(ValueError):
    """Base of all errors that hsformat raises for its input.

    Attributes
    ----------
    problems
        Every problem found, in the order in which they were found; at least one.
    """

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: list[Problem] = [problems] if isinstance(problems, Problem) else list(problems)
        if not all(isinstance(p, Problem) for p in self.problems):  # letters of a text, as torch's DataLoader gives it
            raise TypeError("an error is made of problems, not of text")
        super().__init__("\n".join(str(p) for p in self.problems))

    def __reduce__(self) -> tuple[type[HsError], tuple[list[Problem]]]:
        return (type(self), (self.problems,))


class InvalidRecord(HsError):
    """A record breaks the contract or the rules of a record (1xx, 2xx)."""


class ContractMismatch(HsError):
    """Two sides that must agree do not: store, layout, target or draft (3xx, 4xx, HS109, HS507)."""


class StoreError(HsError):
    """A store cannot be read or written as it stands (5xx)."""


class ResolveError(HsError):
    """What an engine does with a draft cannot be told or is refused (4xx)."""


class ForeignFileError(HsError):
    """An input file is unsafe, corrupt or unknown (6xx)."""


class NothingToOpen(ForeignFileError):
    """A path that was given does not exist: nothing could be begun, and the exit code is 2."""
