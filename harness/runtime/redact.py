"""Keep secrets out of what a run writes and prints: by the name of a variable, and by the shape of a value.

Everything that leaves a process of the run for a file, a console or another host's report passes here. A redacted value keeps
four hex digits of its hash: enough to see that two ranks have different ones, too little to guess it from.
"""

import hashlib
import re
from collections.abc import Mapping

SECRET_WORD = re.compile(
    r"(KEY|TOKEN|SECRETS?|PASSW(OR)?D|PASSPHRASE|CREDENTIALS?|AUTH|AUTHORIZATION|COOKIE|BEARER)$", re.IGNORECASE
)
"""Ends a word of a name: HF_TOKEN, SGLANG_S3_SECRET_ACCESS_KEY, WANDB_APIKEY; not TOKENIZERS_PARALLELISM, not max_tokens."""
HARMLESS = re.compile(r"|none|null|true|false|yes|no|on|off|-?\d{1,6}(\.\d+)?", re.IGNORECASE)
"""Values that no secret has: SGLANG_MAX_TOKEN=4096, api_key=None."""
MARK = re.compile(r"\[redacted [0-9a-f]{4}\]")
"""What `mark` returns: redacting twice changes nothing."""
SHAPES = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abp]-[\w-]{10,}|(AKIA|ASIA)[0-9A-Z]{16}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)|(?<=\bBearer )[\w.~+/=-]{8,}"
)
"""Values that are secrets under any name: of model hubs, clouds, code hosts, chat; JSON web tokens."""
LOGIN = re.compile(r"(?<=://)[^/\s@'\"]+:[^/\s@'\"]+(?=@)|(?<=://)[^/\s:@'\"]{16,}(?=@)")
"""user:password, or a token, of a URL."""
ASSIGNED = re.compile(
    r"(?P<name>[\w.-]*(?:(?:api|access|private|secret|account|encryption)_?key|(?:api|access|auth|hf|hub|refresh|session)_?token"
    r"|secret|passw(?:or)?d|passphrase|credentials?)(?:_id)?[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;()\[\]{}<&]+)",
    re.IGNORECASE,
)
"""NAME=value in free text, as a command line, TOML, JSON or a Python repr writes it."""


def is_secret(name: str) -> bool:
    """Return whether a variable or key of this name holds a secret."""
    return any(SECRET_WORD.search(word) for word in re.split(r"[_.\-\s]+", name))


def mark(value: str) -> str:
    """Return what stands in the place of a secret value."""
    return f"[redacted {hashlib.sha256(value.encode('utf-8', 'surrogateescape')).hexdigest()[:4]}]"


def variable(name: str, value: str) -> str:
    """Return the value of a variable as it may be shown."""
    if is_secret(name) and not HARMLESS.fullmatch(value) and not MARK.fullmatch(value):
        return mark(value)
    return text(value)


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return variables as they may be shown."""
    return {name: variable(name, value) for name, value in given.items()}


def text(given: str) -> str:
    """Return free text (a report, a config, a traceback) without the secrets that can be told by their shape or assignment."""

    def assigned(match: re.Match[str]) -> str:
        value = match["value"]
        return match[0] if HARMLESS.fullmatch(value) else match["name"] + mark(value)

    hidden = LOGIN.sub(lambda match: mark(match[0]), given)
    hidden = SHAPES.sub(lambda match: mark(match[0]), hidden)
    return ASSIGNED.sub(assigned, hidden)
