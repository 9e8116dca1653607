"""A verl command as a harness config: the TOML with the origin of each value, and what became of each override."""

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.layers import ConfigError, toml_value
from harness.config.resolve import resolve
from harness.config.schema import Config
from harness.runtime import redact
from harness.tools import environments
from harness.tools.verl.draft import FATES, Draft, Fate, Verdict
from harness.tools.verl.mapping import translate_all
from harness.tools.verl.overrides import (
    RELEASES,
    Override,
    Trainer,
    VerlConfig,
    flatten,
    parse_override,
    possible_releases,
)
from harness.tools.verl.shell_script import VerlCommand
from harness.tools.verl.shrink import shrink

STRATEGIES = ("model_engine", "actor_rollout_ref.actor.strategy", "critic.strategy")
OTHER_TRAINERS = ("megatron", "veomni", "torchtitan", "mindspeed", "automodel")
CONFIG_OPTIONS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A harness config, and how it came about."""

    release: str
    toml: str
    config: Config
    verdicts: tuple[Verdict, ...]
    depends_on_release: tuple[str, ...]
    """What other releases that would take the command make of it, if none was asked for: a line for each key."""
    nodes: int
    """trainer.nnodes."""
    refusal: str
    """Why the harness cannot run the config; "" if it can."""

    def of(self, fate: Fate) -> list[Verdict]:
        """Return the verdicts of one fate."""
        return [each for each in self.verdicts if each.fate == fate]

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the command is missing or depends on a release that is not known, and the harness can run it."""
        return not (self.of("unsupported") or self.of("unknown") or self.depends_on_release or self.refusal)


def translate(
    command: VerlCommand, release: str = "auto", tiny: str = "", environment: Mapping[str, str] = os.environ
) -> Translation:
    """Translate a command of verl.

    release: whose keys and defaults count, or auto. tiny: the name of a tiny model, "auto" for the one of the path's
    architecture, or "" for the model as it is. Raise ConfigError, with one sentence, for a command that cannot be read.
    """
    overrides, options = read_words(command.words)
    trainer, verdicts = which_trainer(overrides, options)
    verdicts += [Verdict(override=hole.text, fate="unsupported", text=hole.why) for hole in command.holes]
    given = flatten(overrides)

    def of_release(release: str) -> Draft:
        return draft_of(given, release, trainer, verdicts, tiny, environment)

    if release != "auto":
        chosen, depends, draft = "as asked", [], of_release(release)
    else:
        possible, misfits = possible_releases(given.values(), trainer)
        drafts = dict(zip(possible, map(of_release, possible), strict=True))
        release, draft = drafts.popitem()
        chosen = f"the newest whose config takes {'most overrides, not: ' if misfits else 'all overrides'}"
        chosen += "; ".join(misfits)
        depends = differences({**drafts, release: draft})
    config = draft.config()
    refusal = ""
    try:
        resolve(config)
    except ConfigError as error:
        refusal = str(error)
    found = tuple(dict.fromkeys(draft.verdicts()))
    return Translation(
        release=release,
        toml=to_text(draft, header(f"verl {release} ({chosen})", found, depends, command.not_run, refusal)),
        config=config,
        verdicts=found,
        depends_on_release=tuple(depends),
        nodes=draft.integer("trainer.nnodes"),
        refusal=refusal,
    )


def draft_of(
    given: Mapping[str, Override],
    release: str,
    trainer: Trainer,
    verdicts: Iterable[Verdict],
    tiny: str,
    environment: Mapping[str, str],
) -> Draft:
    """Return the harness config of overrides for one release of verl. verdicts: on the command as a whole. Raise ConfigError."""
    said = {verdict.override for verdict in verdicts}
    kept = {key: each for key, each in given.items() if each.mark != "~"}
    draft = Draft(verl=VerlConfig(release=release, trainer=trainer, given=kept), of_command=[*verdicts])
    for each in given.values():
        if each.mark == "~":
            deleted = "verl's code falls back to a value when a key is deleted; here it has the config's default"
            draft.of_command.append(Verdict(override=each.text, fate="unsupported", text=deleted))
        elif is_config_group(each):
            (draft.ignore if trainer == "megatron" or each.text in said else draft.lose)(
                "another group of verl's config", each.key
            )
    translate_all(draft, environment)
    if tiny:
        shrink(draft, tiny)
    return draft


def differences(drafts: Mapping[str, Draft]) -> list[str]:
    """Return a line for each key, and for each override, of which these releases make something different."""
    settings = {release: found_in(draft) for release, draft in drafts.items()}
    lines = []
    for name in dict.fromkeys(name for each in settings.values() for name in each):
        by_value: dict[str, list[str]] = {}
        for release, each in settings.items():
            by_value.setdefault(each.get(name, "not set"), []).append(release)
        if len(by_value) > 1:
            said = (f"{value} in {span(releases)}" for value, releases in by_value.items())
            lines.append(f"{name}: {'; '.join(said)}")
    return lines


def span(releases: Sequence[str]) -> str:
    """Return releases, oldest first, as a text: "0.4 to 0.9" if they are three or more in a row."""
    first, last = RELEASES.index(releases[0]), RELEASES.index(releases[-1])
    in_a_row = len(releases) > 2 and RELEASES[first : last + 1] == tuple(releases)
    return f"{releases[0]} to {releases[-1]}" if in_a_row else ", ".join(releases)


def found_in(draft: Draft) -> dict[str, str]:
    """Return what a draft says: the value of each harness key, and for each override whether it is supported."""
    values = {key: toml_value(entry.value) for key, entry in draft.entries.items()}
    fates = {each.override: each.fate for each in draft.verdicts()}
    supported = {override: "supported" if FATES.index(fate) < 2 else fate for override, fate in fates.items()}
    return values | supported


def read_words(words: Sequence[str]) -> tuple[list[Override], dict[str, str]]:
    """Return the overrides among verl's arguments, and its --config options. Raise ConfigError for another option."""
    overrides, options, rest = [], {}, list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        name = CONFIG_OPTIONS.get(name, name)
        if name in CONFIG_OPTIONS.values():
            options[name] = (value if has_value else rest.pop(0) if rest else "").strip("'\"")
        elif word.startswith("-"):
            raise ConfigError(f"{word} is an option of hydra that cannot be translated; leave it out.")
        elif word.strip():
            overrides.append(parse_override(word))
    return overrides, options


def is_config_group(override: Override) -> bool:
    """Return whether an override picks one of verl's config files, as in actor@actor_rollout_ref.actor=megatron_actor."""
    return "@" in override.key or override.key == "model_engine"


def which_trainer(overrides: Sequence[Override], options: Mapping[str, str]) -> tuple[Trainer, list[Verdict]]:
    """Return whose keys and defaults count, and what the harness lacks of that trainer.

    Raise ConfigError for a config file of the user, whose values are unknown.
    """
    name = options.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    if name not in ("ppo_trainer", "ppo_megatron_trainer"):
        raise ConfigError(
            f"--config-name={name} is not one of verl's PPO configs (ppo_trainer, ppo_megatron_trainer), so its values are"
            " unknown; write its differences as overrides, and leave the option out."
        )
    verdicts = []
    folder = options.get("--config-path", options.get("--config-dir", "config"))
    if folder.removeprefix("./") != "config" and not f"/{folder}".endswith("/verl/trainer/config"):
        text = f"a {name}.yaml of that folder; verl's own is used"
        verdicts.append(Verdict(override=f"--config-path={folder}", fate="unsupported", text=text))
    lacking = "{}'s parallel sizes, memory and speed{}; here FSDP2 over all ranks, with the same formulas"
    own = ", and the defaults of its own optimizer and schedule"
    if name == "ppo_megatron_trainer":
        text = lacking.format("Megatron", "")
        return "megatron", [*verdicts, Verdict(override=f"--config-name={name}", fate="unsupported", text=text)]
    for each in overrides:
        other = next((other for other in OTHER_TRAINERS if other in str(each.value)), "")
        if other and (each.key in STRATEGIES or is_config_group(each)):
            verdict = Verdict(
                override=each.text,
                fate="unsupported",
                text=lacking.format(other.capitalize(), own if other != "megatron" else ""),
            )
            return "megatron" if other == "megatron" else "fsdp", [*verdicts, verdict]
    return "fsdp", verdicts


def header(
    whose: str, verdicts: Sequence[Verdict], depends: Sequence[str], not_run: Sequence[str], refusal: str
) -> list[str]:
    """Return the lines that say what became of the command."""
    counted = Counter(each.fate for each in verdicts)
    lines = [f"Translated from a command of {whose}. What it does not set has the defaults of that release."]
    lines.append(", ".join(f"{counted[fate]} {fate}" for fate in FATES) + ".")
    for fate in FATES[1:]:
        lines += [f"{fate}: {each.override}: {each.text}" for each in verdicts if each.fate == fate]
    if depends:
        lines.append("Other releases of verl take the command as well, and mean something else; give --release:")
    lines += [f"depends on the release: {each}" for each in depends]
    lines += [f"not run: {each}" for each in not_run]
    return [*lines, *([f"refused by the harness: {refusal}"] if refusal else [])]


def to_text(draft: Draft, lines: Sequence[str]) -> str:
    """Return the TOML: these lines as comments, then every value with its origin."""
    written, sections = [f"# {one_line(line)}" for line in lines], dict[str, list[str]]()
    for key, entry in draft.entries.items():
        section, name, *inner = key.split(".", 2)
        title, name = (f"{section}.{name}", inner[0]) if inner else (section, name)
        name = name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)
        sections.setdefault(title, []).append(f"{name} = {toml_value(entry.value)}  # {one_line(entry.origin)}")
    order = list(Config.__dataclass_fields__)
    for title in sorted(sections, key=lambda title: (order.index(title.split(".")[0]), title)):
        written += ["", f"[{title}]", *sections[title]]
    return "\n".join(written) + "\n"


def one_line(text: str) -> str:
    """Return a text in one line of ASCII, without secrets, so that it fits into a comment."""
    return redact.text(" ".join(text.split())).encode("ascii", "backslashreplace").decode()


def launch_lines(translation: Translation, file: str, hosts: int) -> list[str]:
    """Return the commands that run a translated file: by torchrun, dry, and on emulated hosts. Raise ConfigError."""
    parallel, nodes = translation.config.parallel, translation.nodes
    ranks = parallel.dp * parallel.tp * parallel.pp
    if hosts and ranks % hosts:
        raise ConfigError(f"--hosts must divide the {ranks} ranks, got {hosts}.")
    torchrun = environments.torchrun(environments.made() or Path(sys.executable))
    words = [*torchrun, f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}"]
    if nodes > 1:
        words += ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST0:29400"]
    dry = ["python3", "launch/ppo.py", file, "--dry-run", "--nnodes", str(nodes)]
    lines = [shlex.join([*words, "launch/ppo.py", file]), shlex.join(dry)]
    if hosts:
        emulated = ["python3", "launch/hosts.py", "--hosts", str(hosts), "--ranks-per-host", str(ranks // hosts)]
        lines.append(shlex.join([*emulated, "--", "launch/ppo.py", file]))
    return lines


def summary(translation: Translation) -> str:
    """Return what became of the command, for a person."""
    return "\n".join(line[2:] for line in translation.toml.splitlines() if line.startswith("# "))
