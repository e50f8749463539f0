"""The object that a manifest holds, while its pods are made: its name, and how its problems are told (pure)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from deviceplugin.sim.objects.fields import Field, short
from deviceplugin.sim.objects.model import Note, RefusedError
from deviceplugin.sim.objects.names import LABEL, LABEL_RULE, SUBDOMAIN, SUBDOMAIN_RULE
from mpsd.common.quantity import quoted

_SAFE = "bcdfghjklmnpqrstvwxz2456789"
"""The characters of generated names (k8s.io/apimachinery util/rand)."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The object a manifest holds, while its pods are made."""

    source: str
    kind: str
    top: Field

    def note(self, text: str) -> Note:
        return Note(self.source, f"{self.kind} {self.label}: {text}")

    @property
    def label(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def metadata(self) -> Field:
        return self.top.get("metadata")

    @property
    def name(self) -> str:
        """The object's name; a generated one where only generateName is given."""
        given = self.metadata.get("name").text()
        prefix = self.metadata.get("generateName").text()
        if not given and not prefix:
            rule = "Required value: name or generateName is required"
            raise RefusedError(f'{self.kind} "" is invalid: metadata.name: {rule}')
        name = given or prefix[:58] + suffix(prefix, self.source)
        if not SUBDOMAIN.fullmatch(name) or len(name) > 253:
            rule = SUBDOMAIN_RULE if len(name) <= 253 else "must be no more than 253 characters"
            raise RefusedError(
                f'{self.kind} "{short(name)}" is invalid: metadata.name: Invalid value: {quoted(name)}: {rule}'
            )
        return name

    @property
    def namespace(self) -> str:
        name = self.metadata.get("namespace").text() or "default"
        if not LABEL.fullmatch(name) or len(name) > 63:
            raise self.invalid(f"metadata.namespace: Invalid value: {quoted(name)}: {LABEL_RULE}")
        return name

    def invalid_for(self, problems: Sequence[str]) -> RefusedError:
        """Several problems, as the API server lists them."""
        return self.invalid(problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]")

    def invalid(self, text: str) -> RefusedError:
        return RefusedError(f'{self.kind} "{self.name}" is invalid: {text}')


def suffix(base: object, salt: object, length: int = 5) -> str:
    """Looks like a generated suffix, and is the same each time."""
    number = int(hashlib.sha256(f"{base}\0{salt}".encode()).hexdigest(), 16)
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(_SAFE))
        digits.append(_SAFE[digit])
    return "".join(digits)
