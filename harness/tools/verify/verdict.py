"""What was found out about a server: the lines that are printed, the verdict, and the table that --json writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.runtime.ranks import ranks_in_words, runs
from harness.tools.engine_class.engine_answer import KV_CACHE_SCALES
from harness.tools.verify.comparison import NOTHING, UNTOLD, Compared, Unpredicted
from harness.tools.verify.mistakes import called
from harness.tools.verify.mistakes import grouped as by_kind
from harness.tools.verify.rank_predictions import IN_PART
from harness.tools.verify.server import TARGET, Server
from harness.weights.findings import Finding, grouped, shown

SHOWN = 12
"""How many lines of each kind are printed; the JSON has all."""


@dataclass(frozen=True, kw_only=True)
class Different:
    """One tensor that a server does not hold as it must."""

    compared: Compared
    sources: tuple[str, ...]
    """The checkpoint tensors that fill it."""
    why: str
    """What gives exactly the server's hash; "" if nothing that was tried does."""

    @property
    def ranks(self) -> list[int]:
        return sorted(self.compared.wrong)

    @property
    def label(self) -> str:
        return self.compared.tensor.label

    @property
    def place(self) -> str:
        """Where it differs: the ranks, and of which engines if data parallelism has several."""
        replicas = self.compared.wrong_replicas
        of = f" of DP replica{'s' * (len(replicas) > 1)} {runs(replicas)}" if replicas else ""
        return ranks_in_words(self.ranks) + of

    @property
    def finding(self) -> Finding:
        """On which ranks it differs, why, and what fills it."""
        filled = ", ".join(map(called, by_kind(self.sources).values()))
        counts = {"place": self.place, "why": self.why or "cause unknown"}
        counts["filled"] = f" (filled from {filled})" if filled else ""
        return Finding(kind="differs", tensor=self.label, ranks=tuple(self.ranks), counts=counts)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found out."""

    server: Server
    weights: str
    """As the user gave it."""
    predicted_with: str
    """The release whose class predicted."""
    ranks: int
    """How many ranks were asked about."""
    equal: int
    """Tensors that all asked ranks hold as they must."""
    different: tuple[Different, ...]
    unpredicted: Unpredicted
    ignored: tuple[str, ...]
    """Checkpoint names that the server's class ignores."""
    refused: tuple[Finding, ...]
    """Checkpoint tensors that its loader refuses."""
    part: str
    """What was left out by --ranks and --layers, as a phrase, or ""."""
    unseen: tuple[str, ...]
    """Plain attributes that no checker sees."""
    computed: str
    """What the log-probs say about those, as a sentence; "" if there are none."""
    computed_wrong: bool
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        return self.equal + len(self.different)

    @property
    def lost(self) -> tuple[str, ...]:
        """The engine's parameters that the weights do not fill, or not whole, though a server cannot do without."""
        names = (*self.unpredicted.get(IN_PART, ()), *self.unpredicted.get(NOTHING, ()))
        return tuple(name for name in names if not name.endswith(KV_CACHE_SCALES))

    @property
    def mistake(self) -> str:
        """What is wrong with the weights, and not with the server, as a sentence; "" if nothing is."""
        if self.refused:
            return f"{len(self.refused)} of the names in {self.weights} fit no tensor of the server's class; first: {self.refused[0]}"
        if self.lost and not self.different:
            more = f" (and {len(self.lost) - 1} more like it)" if len(self.lost) > 1 else ""
            ignored = f"; it ignores {len(self.ignored)}, such as {self.ignored[0]}" if self.ignored else ""
            return (
                f"{self.weights} does not fill {self.lost[0]}{more} of the server's class{ignored}. Give all names that a"
                " checkpoint of the model has."
            )
        return ""

    @property
    def code(self) -> int:
        """The exit code, unless there is a mistake."""
        return int(bool(self.different or self.computed_wrong))

    def lines(self) -> Iterator[str]:
        """Yield the lines above the verdict."""
        yield from self.notes
        if self.refused:  # of what these fill nothing is known
            yield from shown([f"{self.weights}: {each}" for each in self.refused], SHOWN)
            return
        yield from shown(grouped(each.finding for each in self.different), SHOWN)
        named: dict[str, Sequence[str]] = {f"not compared, as {why}": names for why, names in self.unpredicted.items()}
        named |= {"ignored by the server's class": self.ignored, "no checker sees": self.unseen}
        for title, names in named.items():
            lines = grouped(Finding(kind="named", tensor=name) for name in names)
            yield from shown([f"{title}: {line}" for line in lines], SHOWN)
        if self.unseen:
            yield f"what the server computes with those: {self.computed or 'not asked, as others differ already'}"

    def verdict(self) -> str:
        """Return the verdict in one sentence, with the adapters that it says nothing of."""
        adapters = called(self.server.adapters)
        lora = f"; its LoRA adapters are not compared, though they answer requests: {adapters}" if adapters else ""
        return f"{self._verdict_on_weights()}{lora}"

    def _verdict_on_weights(self) -> str:
        where = f"{self.server.url}{self.part}"
        if self.mistake:
            return self.mistake
        if self.different:
            first = self.different[0]
            alike = {(each.why, *each.ranks, *each.compared.wrong_replicas) for each in self.different}
            if not self.equal and len(alike) == 1:
                on = "" if first.compared.is_wrong_everywhere else f" on {first.place}"
                return (
                    f"none of the {self.compared} tensors of {where}{on} is what {self.weights} says:"
                    f" {first.why or 'another model, or other weights of it; cause unknown'}"
                )
            return (
                f"{len(self.different)} of {self.compared} tensors of {where} are not what {self.weights} says; first:"
                f" {first.label}: differs on {first.place}: {first.why or 'cause unknown'}"
            )
        all_ranks = sum(each.role == TARGET for each in self.server.ranks) + len(self.server.missing)
        ranks = f"{self.ranks} of {all_ranks} rank{'s' * (all_ranks > 1)}"
        equal = (
            f"all {self.compared} tensors of {where} that could be compared are what {self.weights} says, on {ranks}"
        )
        left = sum(len(names) for reason, names in self.unpredicted.items() if reason != UNTOLD)
        rest = f"; {left} could not be compared" if left else ""
        if self.computed_wrong:
            return f"{equal}{rest}, but its log-probs are not: {self.computed}"
        return f"{equal}{rest}{f'; {len(self.unseen)} that no checker sees: {self.computed}' if self.unseen else ''}"

    def table(self) -> dict[str, Any]:
        """Return what --json writes."""
        return {
            "server": self.server.url,
            "server_release": self.server.release,
            "predicted_with": self.predicted_with,
            "weight_version": self.server.weight_version,
            "weights": self.weights,
            "verdict": self.verdict(),
            "equal": self.equal,
            "different": [
                {
                    "tensor": each.compared.tensor.name,
                    "role": each.compared.tensor.role,
                    "ranks": each.ranks,
                    "dp_replicas": each.compared.wrong_replicas,
                    "sources": each.sources,
                    "why": each.why,
                    "held": {str(rank): told for rank, told in each.compared.wrong.items()},
                    "must_hold": {str(rank): each.compared.digests[rank] for rank in each.ranks},
                }
                for each in self.different
            ],
            "not_compared": self.unpredicted,
            "adapters": self.server.adapters,
            "ignored": self.ignored,
            "refused": list(map(str, self.refused)),
            "no_checker_sees": self.unseen,
            "computed": self.computed,
            "seconds": self.seconds,
        }
