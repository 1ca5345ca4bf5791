"""What will go wrong with a frozen tower or with precision, by the look of a training's configuration.

Receives a `TrainingSetup` and, where a model was named, what its checkpoint says of itself; gives a `Diagnosis`. The
rules are the table in `prescribing.RULES`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from safeload.configuring import TrainingSetup
from safeload.peeking import ModelFacts
from safeload.prescribing import PATTERN, RULES, ConfigRule

__all__ = ["ConfigFinding", "Diagnosis", "diagnose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFinding:
    """A rule that applies: what will go wrong, where the line is, what it should be."""

    rule: str
    severity: Literal["error", "warning"]
    consequence: str
    path: str
    line: int | None
    change: str
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings on one configuration, errors first."""

    title: str
    findings: tuple[ConfigFinding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing will fail or train wrong. Warnings do not count."""
        return all(finding.severity != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON values."""
        return {**asdict(self), "healthy": self.healthy}

    def to_json(self) -> str:
        """Return the diagnosis as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        """Return the diagnosis as text."""
        errors = sum(finding.severity == "error" for finding in self.findings)
        lines = [f"{self.title}: {_count(errors, 'error')}, {_count(len(self.findings) - errors, 'warning')}"]
        for finding in self.findings:
            where = finding.path if finding.line is None else f"{finding.path}:{finding.line}"
            lines += [f"{finding.severity}: {where}: [{finding.rule}]", f"    will go wrong: {finding.consequence}"]
            lines += [f"    change to: {finding.change}"] if finding.change else []
            lines += [f"    {'or' if finding.change else 'do'}: {finding.instead}"] if finding.instead else []
        return "\n".join(lines)


def diagnose(setup: TrainingSetup, model: ModelFacts | None = None, *, protected: bool = False) -> Diagnosis:
    """Hold a configuration against every rule.

    Args:
        setup: As from `read_setup`.
        model: As from `read_model`, where a model was named.
        protected: The towers are loaded by `safe_from_pretrained`; leave out what that prevents.

    Returns:
        The findings, errors first, otherwise in the order of `RULES`.
    """
    applying = [rule for rule in RULES if rule.applies(setup, model) and not (protected and rule.prevented)]
    findings = [_finding(rule, setup, model) for rule in applying]
    return Diagnosis(title=setup.title, findings=tuple(sorted(findings, key=lambda each: each.severity != "error")))


def _finding(rule: ConfigRule, setup: TrainingSetup, model: ModelFacts | None) -> ConfigFinding:
    place = setup.locate(rule.setting.format(setup=setup))
    value = rule.values.get(place.dialect, "") if place.key else ""
    change = f"{place.key}: {_pattern(model) if value == PATTERN else value}" if value else ""
    if change and place.line is None and place.within:
        change += f"   (a new line, within {place.within})"
    return ConfigFinding(
        rule=rule.id,
        severity=rule.severity,
        consequence=rule.consequence.format(
            model=model.name if model else "the model",
            setup=setup,
            by_version=rule.by_version.get(setup.fsdp_version, ""),
        ),
        path=place.path,
        line=place.line,
        change=change,
        instead=rule.instead,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _pattern(model: ModelFacts | None) -> str:
    towers = model.towers if model is not None and model.towers else ("vision_tower",)
    # a fullmatch of qualified names, also behind the prefixes of PEFT and torch.compile
    return f"'(.*\\.)?({'|'.join(towers)})'"
