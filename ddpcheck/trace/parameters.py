"""Use of parameters in forward and loss, by rank and step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import PathEnd, StepEvidence
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import Names, format_ranks, format_steps, join_names, plural, plural_verb, ranks_or_all

AT_NEXT_FORWARD = "plain DDP raises 'Expected to have finished reduction in the prior iteration' at the next forward"
SPARSE_REFUSED = (
    "with find_unused_parameters=True DDP raises 'Expected sparse gradient to be defined' in backward: for a table "
    "with sparse=True it has no substitute for the missing gradient"
)

SPARSE_ADVICE = (
    "Use the table in every step, remove it, or freeze it with requires_grad_(False) before wrapping; or make it with "
    "sparse=False: for a sparse table that is unused, find_unused_parameters=True makes DDP raise."
)

UNDER_SHARDING = (
    "fully_shard reduces the gradients of a group that exist on a rank: if they differ between ranks, gloo aborts, and "
    "nccl waits or adds up the wrong numbers"
)

ADVICE_UNDER_SHARDING = (
    "all_reduce the condition of the branch, or call set_reduce_scatter_unused_params(True) on the module that "
    "fully_shard returned (if this torch has it)."
)

MAX_ABSENCES = 6  # groups of ranks and steps that a finding lists


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """Use of a module's parameters on all ranks in all steps."""

    evidence: Sequence[StepEvidence]  # evidence of every rank and step
    wrapper: WrapperFacts  # the arguments of the wrapper
    names: Names  # parameter names with aliases and lines
    ends_here: bool  # True if the run ends with the last of these steps
    trainable: Sequence[str]  # parameters that require grad, in registration order
    missing: Mapping[str, Sequence[StepEvidence]]  # where each parameter is missing; without explained parameters

    @classmethod
    def from_evidence(
        cls,
        evidence: Sequence[StepEvidence],
        wrapper: WrapperFacts,
        names: Names,
        *,
        ends_here: bool = True,
        explained: Collection[str] = (),
    ) -> ParameterFacts:
        """Collect the ranks and steps in which parameters do not contribute to the loss.

        `ends_here`: no step follows these steps. `explained`: parameters to omit, as other findings name them.
        """
        missing: dict[str, list[StepEvidence]] = {}
        for item in evidence:
            for name, state in item.states.items():
                if state == "missing" and name not in explained:
                    missing.setdefault(name, []).append(item)
        return cls(evidence, wrapper, names, ends_here, list(evidence[0].states) if evidence else [], missing)

    @property
    def world_size(self) -> int:
        return len({item.rank for item in self.evidence})

    @property
    def steps(self) -> list[int]:
        """Steps that were run, in order."""
        return sorted({item.step for item in self.evidence})

    @property
    def sometimes_missing(self) -> list[str]:
        """Parameters that contributed on some ranks or in some steps only."""
        return [name for name in self.trainable if 0 < len(self.missing.get(name, ())) < len(self.evidence)]

    def list_peers_sometimes_missing(self, names: Sequence[str]) -> bool:
        """Check if each of `names`, list indices ignored (`layers.*.weight`), matches a sometimes missing parameter."""
        families = set(map(_without_indices, self.sometimes_missing))
        return all(_without_indices(name) in families for name in names)

    def family_of(self, name: str, missing: Collection[str]) -> str:
        """Return the outermost module around `name` whose parameters are all in `missing`.

        Without such a module, the result is the parameter name. List indices in the result are replaced by `*`.
        """
        top, parts = name, name.split(".")
        for size in range(len(parts) - 1, 0, -1):
            prefix = ".".join(parts[:size]) + "."
            if all(param in missing for param in self.trainable if param.startswith(prefix)):
                top = prefix
        return _without_indices(top)


def _without_indices(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@dataclass(frozen=True, slots=True)
class MissingGroup:
    """Parameters whose gradients are missing for one reason on all ranks in all steps."""

    names: Sequence[str]
    end: PathEnd  # where their path to the loss ends
    facts: ParameterFacts
    compiled_on: Sequence[int] = ()  # ranks on which compiled code gives zeros instead, in some steps

    @property
    def subjects(self) -> str:
        return join_names(self.facts.names.subjects(self.names))

    @property
    def them(self) -> str:
        return plural_verb("it", "them", self.names)

    @property
    def where(self) -> str:
        """Line and module of the operation where the path to the loss ends."""
        return f"{self.end.at} (in module {self.end.module})" if self.end.module else self.end.at

    def new_finding(self, code: str, message: str, evidence: Sequence[str] = (), fix: str = "") -> list[Finding]:
        """Create a finding on the parameters; evidence says how the wrapper treats missing gradients."""
        facts, severity = self.facts, None
        if self.compiled_on:
            evidence = [*evidence, f"under torch.compile DDP gets zeros for {self.them} and raises no error"]
            fix = ""
        else:
            evidence, severity = self._consequences(evidence)
            if severity is not None:
                fix = "Use the parameter in the loss, remove it, or freeze it with requires_grad_(False)."
            fix = SPARSE_ADVICE if self.names[0] in facts.wrapper.sparse else fix
        return facts.names.new_finding(
            code,
            self.names,
            message,
            ranks=ranks_or_all(self.compiled_on, facts.world_size),
            severity=severity,
            evidence=evidence,
            fix=fix,
            location=self.end.edit_at,
            path=self.end.path_of(self.names[0]),
        )

    def _consequences(self, evidence: Sequence[str]) -> tuple[list[str], Severity | None]:
        """Return `evidence` plus the wrapper's reaction, and a milder severity if training continues."""
        facts, wrapper, num_steps = self.facts, self.facts.wrapper, len(self.facts.steps)
        raises = [AT_NEXT_FORWARD] if wrapper.is_ddp and not wrapper.tolerates_unused else []
        if raises and num_steps == 1 and facts.ends_here:
            raises.append("after the last step there is no next forward, so that nothing is raised at all")
        notes = []
        refused = wrapper.find_unused_parameters and self.names[0] in wrapper.sparse
        if refused:
            notes.append(SPARSE_REFUSED)
        elif wrapper.continues_unused:
            option = "find_unused_parameters" if wrapper.find_unused_parameters else "static_graph"
            note = "fully_shard says nothing of it" if wrapper.sharded else f"{option}=True keeps DDP from stopping"
            notes.append(f"{note}; nothing has trained {self.them} in {plural(num_steps, 'step')}")
        take_turns = self.end.cause == "unused" and facts.list_peers_sometimes_missing(self.names)
        if take_turns:
            notes.append(
                "others of the same list contribute in some steps or on some ranks only: check more steps (--steps)"
            )
        mildest = Severity.WARNING if num_steps > 1 and not take_turns else Severity.NOTE
        harmless = wrapper.continues_unused and self.end.cause != "cut" and not refused
        return [*raises, *evidence, *notes], mildest if harmless else None


@dataclass(frozen=True, slots=True)
class MissingOn:
    """Parameters that do not contribute to the loss on the same ranks and steps."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConditionalUse:
    """Parameters that contribute together, on some ranks or in some steps only."""

    parameters: Sequence[str]  # parameter names
    absences: Sequence[MissingOn]  # ranks and steps without these parameters, in order
    all_at_once: bool  # True if all trainable parameters are missing on the same ranks and steps
    facts: ParameterFacts  # facts on all parameters

    @property
    def steps(self) -> list[int]:
        """Steps in which the parameters were missing on any rank."""
        return sorted({step for absence in self.absences for step in absence.steps})

    def new_finding(self, code: str, message: str, evidence: Sequence[str], ranks: Sequence[int] = ()) -> list[Finding]:
        """Create a finding on the parameters; evidence says how the wrapper treats missing gradients."""
        facts, wrapper, name = self.facts, self.facts.wrapper, self.parameters[0]
        ends = [item.path_ends[name] for item in facts.missing[name] if name in item.path_ends]
        sparse = any(name in wrapper.sparse for name in self.parameters)
        notes = [SPARSE_REFUSED] if sparse and wrapper.find_unused_parameters else []
        notes += [UNDER_SHARDING] if wrapper.sharded else []
        if wrapper.static_graph:
            notes.append("static_graph=True promises that the set of used parameters never changes")
        return facts.names.new_finding(
            code,
            self.parameters,
            message,
            ranks=ranks_or_all(ranks, facts.world_size),
            steps=ranks_or_all(self.steps, len(facts.steps)),
            evidence=[*evidence, *notes],
            fix=SPARSE_ADVICE if sparse else ADVICE_UNDER_SHARDING if wrapper.sharded else "",
            location=next((end.edit_at for end in ends if end.edit_at), None),
            path=ends[0].path_of(name) if ends else None,
        )

    @property
    def step_message(self) -> str:
        """Message on parameters that are missing on every rank in some steps."""
        subjects = join_names(self.facts.names.subjects(self.parameters))
        if len({absence.steps for absence in self.absences}) > 1:
            return f"{subjects} contributed in some steps only, each in different ones."
        return f"{subjects} contributed in some steps only: not in {format_steps(self.steps)}."

    def describe_absences(self) -> list[str]:
        """Describe where and why the parameters did not contribute."""
        facts = self.facts
        lines = [
            f"{format_steps(absence.steps)}: {join_names(facts.names.subjects(absence.names))} did not contribute on "
            f"{format_ranks(absence.ranks) if len(absence.ranks) < facts.world_size else 'any rank'}"
            for absence in self.absences[:MAX_ABSENCES]
        ]
        if len(self.absences) > MAX_ABSENCES:
            lines.append(f"and so on ({len(self.absences) - MAX_ABSENCES} more)")
        reasons = []
        ends = [item.path_ends.get(name) for name in self.parameters for item in facts.missing[name]]
        for end in filter(None, ends):
            if end.cause == "cut":
                reasons.append(f"there the path is cut by {end.reason}{end.at}")
            elif end.cause == "unreachable":
                reasons.append(f"there the last use is {end.reason}{end.at}, which does not reach the loss")
            elif end.cause == "unused":
                them = plural_verb("it", "them", self.parameters)
                reasons.append(f"there no operation of the forward pass reads {them}")
        return [*lines, *list(dict.fromkeys(reasons))[:3]]
