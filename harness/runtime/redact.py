"""Keep secrets out of what is written for others to read, by the name of a variable and by the shape of a value.

A run's config and environment, its reports, exported programs and what the doctor's ranks tell each other pass through
here. Events, logs and stacks do not: their folder is the user's alone (docs/security.md).
A redacted value shows four hex digits of its hash. They show that two ranks have different secrets, and do not help to
guess one.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

SECRET_WORD = re.compile(
    r"(KEY|TOKEN|SECRETS?|PASSW(OR)?D|PASSPHRASE|CREDENTIALS?|AUTH|AUTHORIZATION|COOKIE|BEARER)$", re.IGNORECASE
)
"""The end of a word of a name, as in HF_TOKEN, SGLANG_S3_SECRET_ACCESS_KEY and WANDB_APIKEY. Not
TOKENIZERS_PARALLELISM."""
HARMLESS = re.compile(r"|none|null|true|false|yes|no|on|off|-?\d{1,6}(\.\d+)?", re.IGNORECASE)
"""Values that are not secrets whatever the name, as in SGLANG_MAX_TOKEN=4096 and api_key=None."""
MARK = re.compile(r"\[redacted [0-9a-f]{4}\]")
"""What mark() returns, so that redacting twice changes nothing."""
# The text may come from anyone and be one word of many megabytes, so each pattern below takes time in proportion to it:
# no pattern scans a run of letters again from each of its places, and possessive quantifiers (++) keep what they took.
SHAPES = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abp]-[\w-]{10,}|(AKIA|ASIA)[0-9A-Z]{16}"
    r"|(?<![\w-])eyJ[\w-]{10,}+\.eyJ[\w-]{10,}+\.[\w-]+)|(?<=\bBearer )[\w.~+/=-]{8,}"
)
"""Values that are secrets whatever the name: tokens of model hubs, clouds, code hosts and chats; JSON web tokens."""
LOGIN = re.compile(r"(?<=://)[^/\s@'\"]++(?=@)")
"""What is before the host in a URL: user:password, a token, or a user."""
LONGEST_USER = 15
"""A longer name before the host of a URL, without a password, is taken for a token."""
ASSIGNED = re.compile(
    r"(?P<name>(?:(?:api|access|private|secret|account|encryption)_?key|(?:api|access|auth|hf|hub|refresh|session)_?token"
    r"|secret|passw(?:or)?d|passphrase|credentials?)(?:_id)?\\?[\"']?\s*[=:]\s*(?:\\?[\"'])?)"
    r"(?P<value>(?!\\)(?:[^\s\"',;()\[\]{}<&\\]|\\(?![\"']))+)",
    re.IGNORECASE,
)
"""NAME=value in free text, as a command line, TOML, JSON or a Python repr writes it, also inside another string.

`name` is the end of the name. A backslash that belongs to the quotes stays, or what is left could not be read any more.
"""


def is_secret(name: str) -> bool:
    """Return whether a variable or key of this name holds a secret."""
    return any(SECRET_WORD.search(word) for word in re.split(r"[_.\-\s]+", name))


def mark(value: str) -> str:
    """Return the text that replaces a secret value."""
    return f"[redacted {hashlib.sha256(value.encode('utf-8', 'surrogateescape')).hexdigest()[:4]}]"


def variable(name: str, value: str) -> str:
    """Return the value of a variable as it may be shown."""
    if is_secret(name) and not HARMLESS.fullmatch(value) and not MARK.fullmatch(value):
        return mark(value)
    return text(value)


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return variables as they may be shown."""
    return {name: variable(name, value) for name, value in given.items()}


def values(given: Any, name: str = "") -> Any:
    """Return a value of a config, and all that is in it, as it may be written.

    Tables stay tables, and lists stay lists.
    """
    if isinstance(given, Mapping):
        return {key: values(each, key) for key, each in given.items()}
    if isinstance(given, list | tuple):
        return [values(each, name) for each in given]
    # By the rule for text, not by that for variables: speculative_token_map is the path of a file.
    value = str(given)
    if ASSIGNED.search(f"{name}=x") and not HARMLESS.fullmatch(value) and not MARK.fullmatch(value):
        return mark(value)
    return text(given) if isinstance(given, str) else given


def text(given: str) -> str:
    """Return free text (a report, a config, a traceback) with secrets replaced: known shapes, logins and NAME=value."""

    def assigned(match: re.Match[str]) -> str:
        value = match["value"]
        return match[0] if HARMLESS.fullmatch(value) else match["name"] + mark(value)

    def login(match: re.Match[str]) -> str:
        return mark(match[0]) if ":" in match[0].strip(":") or len(match[0]) > LONGEST_USER else match[0]

    hidden = LOGIN.sub(login, given)
    hidden = SHAPES.sub(lambda match: mark(match[0]), hidden)
    return ASSIGNED.sub(assigned, hidden)
