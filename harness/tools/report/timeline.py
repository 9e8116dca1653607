"""What each rank did and when, as one lane of bars for each, and where the ranks stood.

The bars are those of trace.json, which has all ranks and all steps.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from harness.runtime.events import phase_of_step
from harness.tools.export.subject import OUTER_PHASES, RunEnd
from harness.tools.report.trace import Event, Span, began, spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LANES = 8
LAST_STEPS = 4
"""Steps that are shown; of a longer run the last ones, in which a failure is."""
LETTERS = 140
"""Letters that fit into the width of the picture."""
WRONG, GREY = "#c62828", "#606060"
COLOURS = {
    "start": "#b8c4d0", "weights and memory": "#9cc3ee", "checks": "#d9c3ea", "generate": "#a5d6a7", "train": "#f3cf9a",
    "other": "#d8d8d8",
}  # fmt: skip
"""The colour of a bar, by what its phase is for."""
PHASES = {
    "start": ("inputs", "quantize_model", "import_sglang", "start_engine", "build_trainer", "load_baseline", "load_checkpoint"),
    "weights and memory": ("resume_weights", "sync", "resume_kv_cache", "release", "first_release", "free_caches"),
    "generate": ("generate", "validate"),
    "train": ("old_log_probs", "reference_log_probs", "values", "advantages", "update_critic", "update_actor"),
}  # fmt: skip
OUTCOMES: dict[str, dict[str, Any]] = {
    "ended": {"edgecolor": "white"},
    "failed": {"edgecolor": WRONG},
    "open": {"edgecolor": WRONG, "hatch": "///"},
}
"""The look of a phase that ended, failed, or did not end."""


def timeline(figure: "Figure", events: Sequence[Event], seen: RunEnd | None) -> None:
    """Draw the start, and below it the steps, which are so short that beside it nobody could read them.

    Of many ranks and steps some are shown: the ranks that failed first, and the last steps. events: of all ranks, by
    time. Nothing is drawn where no phase began.
    """
    ended = seen.time if seen else 0.0
    phases = spans(events, ended)
    if not phases:
        return
    every = [*_start_spans(events), *phases]
    all_ranks = sorted({span.rank for span in every}, key=lambda rank: (not seen or rank not in seen.ranks, rank))
    ranks, last = sorted(all_ranks[:MOST_LANES]), max(span.end for span in every)
    steps = sorted({span.step for span in phases if span.step is not None})
    begins = {step: min(span.start for span in phases if span.step == step) for step in steps[-LAST_STEPS:]}
    start_ends = min((span.start for span in phases if span.step is not None), default=last)
    windows = [("start", 0.0, start_ends), *[("steps", at, last) for at in sorted(begins.values())[:1]]]
    some = f", {len(ranks)} of {len(all_ranks)} ranks" if len(ranks) < len(all_ranks) else ""
    lanes = 0.5 * len(ranks)
    inches = len(windows) * (lanes + 0.8) + 0.4
    figure.set_size_inches(13, inches)
    figure.subplots_adjust(left=0.06, right=0.99, top=1 - 0.5 / inches, bottom=0.7 / inches, hspace=0.8 / lanes)
    for place, (name, first, until) in enumerate(windows, 1):
        axes = figure.add_subplot(len(windows), 1, place, ylim=(len(ranks) + 0.05, -0.1))
        axes.set_xlim(first, until + 0.01 * ((until - first) or 1.0))
        axes.set_yticks([lane + 0.3 for lane in range(len(ranks))], [f"rank {rank}" for rank in ranks])
        axes.set_title(f"The {name}: what each rank did{some}", loc="left", fontweight="bold", pad=18)
        for lane, rank in enumerate(ranks):
            own = [span for span in every if span.rank == rank and span.end > first and span.start < until]
            _draw_lane(axes, lane, own)
    axes.set_xlabel("seconds since the launch")
    for step, at in begins.items():
        axes.text(at, -0.1, f"step {step}", verticalalignment="bottom", color=GREY)
        axes.axvline(at, color=GREY, linewidth=0.7)
    if seen is None or seen.code != 0:
        stood = where_ranks_stood(events, seen)
        for lane, rank in enumerate(ranks):
            axes.text(last, lane + 0.92, stood[rank][:LETTERS], horizontalalignment="right", color=WRONG)
        if ended:
            axes.axvline(ended - began(events), color=WRONG, linestyle="--")
    groups = {group_of(span) for span in every}
    handles = [axes.barh(-9, 0, color=colour, label=group) for group, colour in COLOURS.items() if group in groups]
    figure.legend(handles=handles, loc="lower left", ncols=len(handles), frameon=False)


def _draw_lane(axes: "Axes", lane: int, own: Sequence[Span]) -> None:
    """Draw the bars of one rank; those of phases that begin inside another one are lower."""
    first, last = axes.get_xlim()
    ends: list[float] = []
    for span in sorted(own, key=lambda span: (span.start, -span.end)):
        ends = [end for end in ends if end > span.start]
        height = max(0.2, 0.6 - 0.2 * len(ends))
        ends.append(span.end)
        bar, wrong = (span.start, span.end - span.start), OUTCOMES[span.outcome]
        axes.broken_barh([bar], (lane + 0.6 - height, height), facecolor=COLOURS[group_of(span)], **wrong)
        left, right = max(span.start, first), min(span.end, last)
        letter = (last - first) / LETTERS
        if height == 0.6 and letter * (len(span.phase) + 1) < right - left:
            axes.text(left + letter / 2, lane + 0.3, span.phase, verticalalignment="center_baseline")


def where_ranks_stood(events: Sequence[Event], seen: RunEnd | None) -> dict[int, str]:
    """Return for each rank the phase that it was in, or had ended last, when its events ended."""
    inside: dict[int, list[str]] = defaultdict(list)
    last: dict[int, str] = {}
    for each in events:
        rank = each["rank"]
        last.setdefault(rank, "began no phase")
        if not each["event"].startswith("phase_") or each["phase"] in OUTER_PHASES:
            continue
        at = phase_of_step(each["phase"], each["step"])
        if each["event"] == "phase_start":
            inside[rank].append(at)
            continue
        if at in inside[rank]:
            inside[rank].remove(at)
        if not last[rank].startswith("failed"):  # what holds a phase that fails, fails after it
            last[rank] = f"failed in {at}" if each["event"] == "phase_failed" else f"after {at}"
    stood = {rank: f"in {inside[rank][-1]}" if inside[rank] else at for rank, at in sorted(last.items())}
    if seen is None:
        return stood
    how = f" ({seen.error})" if seen.kind == "died" else ""
    what = "furthest behind" if seen.kind == "deadline" else "first failure"
    return stood | {rank: f"{stood[rank]}{how}: {what}" for rank in seen.ranks if rank in stood}


def _start_spans(events: Sequence[Event]) -> Iterator[Span]:
    """Yield the parts of each rank's start, without those that were made meanwhile."""
    first, until = began(events), defaultdict[int, float](float)
    for each in sorted((each for each in events if each["event"] == "span"), key=lambda each: float(each["began"])):
        if each["began"] >= until[each["rank"]]:
            until[each["rank"]] = each["ended"]
            times = {"start": each["began"] - first, "end": each["ended"] - first}
            yield Span(rank=each["rank"], phase=each["part"], step=None, outcome="ended", **times)


def group_of(span: Span) -> str:
    """Return what a phase is for, as in COLOURS."""
    if span.phase.startswith("verify_"):
        return "checks"
    known = next((group for group, phases in PHASES.items() if span.phase in phases), "")
    return known or ("start" if span.step is None and span.phase != "shutdown" else "other")
