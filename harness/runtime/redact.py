"""Keep secrets out of what a run writes: values that go by a secret's name, and known shapes of keys.

Whatever a user may attach to an issue passes through here, except the logs of engines (docs/security.md): tables by
values() (the environment is one), command lines by words(), and what is text already by text(). A redacted value
shows four hex digits of its hash. They show that two ranks have different secrets, and do not help to guess one.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

MARK = re.compile(r"\[redacted [0-9a-f]{4}\]")
"""What mark() returns, so that redacting twice changes nothing."""

# Names. What counts is the last part of a name, and for a key or a token also what kind of key it is: api_key and
# HF_TOKEN are secrets, sort_key and eos_token are not.
_SECRET = re.compile(
    r"(?:passw(?:or)?d|passphrase|passcode|secrets?|credentials?|creds|authorization|cookies?|webhook)$"
)
_KEY = re.compile(r"(?:(?P<kind>.*?)(?:key|token|pwd)|pass|auth|sig|signature|bearer|pat)(?P<plural>s?)")
"""Words for a secret and for much else."""
_OF_SECRETS = re.compile(
    r"access|account|admin|anthropic|api|auth|aws|azure|basic|bearer|bot|client|deploy|encryption|gcp|git|github"
    r"|gitlab|google|hf|hub|huggingface|license|master|modelscope|openai|private|refresh|root|s3|secret|security"
    r"|server|service|session|shared|signing|slack|ssh|storage|user|wandb|webhook|x"
)
"""Kinds of keys and tokens that are secrets whatever their value."""
_OF_DATA = re.compile(
    r"audio|backward|begin|bos|cache|cls|column|data|dict|end|eos|first|fn|foreign|forward|group|image|last|mask"
    r"|max|min|next|old|pad|partition|primary|prompt|public|response|routing|second|sep|sort|special|state|stop"
    r"|tensor|think|unk|video|weight"
)
"""Kinds of keys, tokens and passes that are no secrets."""
_APPENDED = re.compile(r"id|pem|url|value|string|text|b64|base|base64|hash|raw|new|prod|dev|test|\d+")
"""What may follow a secret's name, as in AWS_ACCESS_KEY_ID and DB_PASSWORD_2."""
_LOGIN_OPTIONS = ("-u", "--user", "--proxy-user")
"""Options whose value is USER:PASSWORD, as in curl."""
_WHOLE_LINE = ("authorization", "cookie", "cookies")
"""Headers whose value has several words."""

# Values.
_HARMLESS = re.compile(
    r"|none|null|value|true|false|yes|no|on|off|-?\d{1,6}(\.\d+)?|\{\w*\}|\$\w+|\$?\{[^}]*\}|<[^<>]*>|\.{3}|\*+|\[redacted.*",
    re.IGNORECASE | re.DOTALL,
)
"""Values that are never secrets, whatever the name before them: api_key=None, HF_TOKEN=$HF_TOKEN, --section.key VALUE."""
_LOOKED_UP = re.compile(
    r"(?:self|cls|os|[a-z_]*(?:args|config|settings|options))\.[\w.]+.*|[a-z_]+(?:\.[a-z_]+)+\(.*", re.DOTALL
)
"""Code, in a line of a traceback: api_key=server_args.api_key, token = secrets.token_hex(8)."""
_PATH = r"(?:~|\.{0,2})(?:/[\w.@-]+){2,}/?"
_ORDINARY = re.compile(
    rf"[A-Z]?[a-z]+(?:_[a-z]+)*|[A-Z_]+|(?:[A-Z][a-z]+\d*)+[A-Z]{{0,3}}|[A-Za-z_]\w*(?:\.\w+)+|{_PATH}|\[.*\]|[-+\d.,e]+|\W*",
    re.DOTALL,
)
"""Values of keys and tokens that are no secrets: words, names of classes and tensors, paths, numbers."""
_RANDOM = re.compile(r"(?:(?=.*\d)(?=.*[A-Za-z])|(?=.*[a-z][A-Z]))[\w+/=~:@!#$%^*.-]{8,}")

# Text. It may come from anyone and be one word of many megabytes, so each pattern below takes time in proportion to it:
# none scans a run of letters again from each of its places, and possessive quantifiers (++) keep what they took.
_START = r"(?:(?<![\w\\-])|(?<=\\[nrt]))"
"""Where a word begins. JSON and repr write a line's end as a backslash and a letter."""
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:[\w+/=\s\\:,]|-(?!----))*+(?:-----END [A-Z ]{0,40}-----)?"
    rf"|{_START}(?:hf_[A-Za-z0-9]{{16,}}|sk-[\w-]{{16,}}|[rs]k_(?:live|test)_\w{{10,}}|gh[pousr]_\w{{20,}}|github_pat_\w{{20,}}"
    r"|gl[a-z]{2,5}-[\w-]{16,}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|npm_\w{30,}|pypi-AgE[\w-]{16,}|nvapi-[\w-]{16,}|dckr_pat_[\w-]{16,}|hvs\.[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|eyJ[\w-]{10,}+\.eyJ[\w-]{10,}+\.[\w-]*)"
    r"|(?<=Bearer )[\w.~+/=-]{8,}|(?<=Basic )[A-Za-z0-9+/]{6,}={1,2}|(?<=\bwandb login )[0-9a-f]{40}\b"
    r"|(?<=://hooks\.)[\w.-]+/[\w/-]{8,}|(?<=/webhooks/)\d[\w/-]{8,}"
)
"""Values that are secrets whatever the name: tokens of model hubs, clouds, code hosts and chats; private keys; JSON web
tokens; the addresses of webhooks."""
_LOGIN = re.compile(r"(?<=://)[^/\s'\"<>\\]*(?=@)")
"""The login of a URL: user:password, a token, or only a user. A password may contain an @ itself."""
LONGEST_USER = 15
"""A longer name before the host of a URL, without a password, is taken for a token."""
_NAME = r"[A-Za-z_][\w.-]*+"
_NAMED = re.compile(
    rf"(?:(?<![\w.\\-])|(?<=\\[nrt]))(?:(?P<name>-{{0,2}}{_NAME})(?P<closed>\\*[\"']\]?)?"
    r"(?P<sign>[ \t]*(?::[ \t]*str[ \t]*)?[=:]{1,2}[ \t]*)"
    rf"|(?P<option>-{{1,2}}{_NAME})(?:\\*[\"'],)?[ \t]+)"
)
"""NAME=, "NAME": or --NAME, as a command line, TOML, JSON, a header or a Python repr writes it, also inside another
string. What follows is the value."""
_OPENED = re.compile(r"(?:[rbf]{0,2})(\\*)([\"'])")
_BARE = re.compile(r"(?!\\)(?:[^\s\"'<>&\\]|\\(?![\"'nrt]))+")
_LINE = re.compile(r"[^\r\n\"'\\]+")
_QUOTE_OR_END = re.compile(r"(\\*)([\"'])|\n")
_LONGEST_VALUE = 4096
_PROSE = re.compile(r"(?:is|was|must|may|can|cannot|has|needs?|and|or|with|without|to|for|from|in|of|the|a|an)\b|-")
"""What follows an option in a sentence."""


Place = Literal["", "query", "prose"]
"""Where a name and its value stand: in a URL's query, or as "NAME: VALUE", which may be part of a sentence."""


def mark(value: str) -> str:
    return f"[redacted {hashlib.sha256(value.encode('utf-8', 'surrogateescape')).hexdigest()[:4]}]"


def variable(name: str, value: str) -> str:
    return mark(value) if _is_secret(name, value) else text(value)


def words(command: Sequence[str]) -> list[str]:
    """Return the words of a command line as they may be shown. A shell quotes them afterwards."""
    shown, option = list[str](), ""
    for word in command:
        name, sign, value = word.partition("=")
        if option and not word.startswith("--") and _is_secret(option, word):
            shown.append(mark(word))
        elif sign and re.fullmatch(r"-{0,2}[\w.-]+", name) and _is_secret(name, value):
            shown.append(f"{name}={mark(value)}")
        else:
            shown.append(text(word))
        option = word if word.startswith("-") and not sign else ""
    return shown


def values(given: Any, name: str = "") -> Any:
    """Return a value of that name, and all that is in it, as it may be written. Tables stay tables, lists stay lists."""
    if isinstance(given, Mapping):
        # Whatever a table of credentials calls its members, they are secrets.
        inside = name if _SECRET.search(_parts(name)[-1]) else ""
        return {key: values(each, inside or str(key)) for key, each in given.items()}
    if isinstance(given, list | tuple):
        if all(isinstance(each, str) for each in given) and not _is_secret(name, "x"):
            return words(given)
        return [values(each, name) for each in given]
    if _is_secret(name, str(given)):
        return mark(str(given))
    return text(given) if isinstance(given, str) else given


def text(given: str) -> str:
    """Return free text (a report, a traceback) with secrets replaced: known shapes, logins in URLs and named values."""

    def login(match: re.Match[str]) -> str:
        _, _, password = match[0].partition(":")
        return mark(match[0]) if password or len(match[0]) > LONGEST_USER else match[0]

    hidden = _LOGIN.sub(login, given)
    hidden = _SHAPES.sub(lambda match: mark(match[0]), hidden)
    return "".join(_without_named(hidden))


def _without_named(given: str) -> Iterator[str]:
    """Yield the parts of a text, with a mark for each secret that has a name before it."""
    written = at = 0
    while found := _NAMED.search(given, at):
        at = found.end()
        name = found["name"] or found["option"]
        if not _may_be_secret(name) or (found["option"] and _PROSE.match(given, at)):
            continue
        start, end = _value_at(given, at, is_line=not found["closed"] and _parts(name)[-1] in _WHOLE_LINE)
        value, where = given[start:end], _where(given, found)
        if not _LOOKED_UP.fullmatch(value) and _is_secret(name, value, where):
            yield given[written:start] + mark(value)
            written = at = end
    yield given[written:]


def _where(given: str, found: re.Match[str]) -> Place:
    if given[max(0, found.start() - 1) : found.start()] in ("?", "&"):
        return "query"
    return "prose" if ":" in (found["sign"] or "") and not found["closed"] else ""


def _value_at(given: str, at: int, is_line: bool) -> tuple[int, int]:
    """Return where the value begins and ends: inside its quotes, or else a word. is_line: or else a line."""
    if opened := _OPENED.match(given, at):
        level = len(opened[1])
        for each in _QUOTE_OR_END.finditer(given, opened.end(), opened.end() + _LONGEST_VALUE):
            if each[0] == "\n":
                break
            # Each string around it doubles the backslashes before a quote that is part of the value.
            if each[2] == opened[2] and len(each[1]) % (2 * level + 2) == level:
                return opened.end(), each.end() - 1 - level
        at = opened.end()
    bare = (_LINE if is_line else _BARE).match(given, at)
    return at, at + len(bare[0].rstrip(",;)]}.:`")) if bare else at


def _may_be_secret(name: str) -> bool:
    return name in _LOGIN_OPTIONS or bool(_SECRET.search(_parts(name)[-1]) or _KEY.fullmatch(_parts(name)[-1]))


def _is_secret(name: str, value: str, where: Place = "") -> bool:
    if _HARMLESS.fullmatch(value):
        return False
    if name in _LOGIN_OPTIONS:
        return bool(re.fullmatch(r"(?!\d+:\d+$)[^:]*:(?!//).+", value))
    *before, last = _parts(name)
    if _SECRET.search(last):
        return True
    key = _KEY.fullmatch(last)
    if key is None or name == "PWD":  # the shell's current folder
        return False
    kind = key["kind"] or "".join(before[-1:])
    if _OF_DATA.fullmatch(kind) or (key["plural"] and not _OF_SECRETS.fullmatch(kind)) or re.fullmatch(_PATH, value):
        return False
    if _OF_SECRETS.fullmatch(kind) or where == "query" or (name.isupper() and where != "prose"):
        return True
    if where != "prose" and (last in ("pass", "pwd") or (name.startswith("-") and not last.endswith("key"))):
        return True
    return not _ORDINARY.fullmatch(value) and bool((kind and where != "prose") or _RANDOM.fullmatch(value))


@lru_cache(maxsize=4096)
def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a name in lower case, without what is appended: db, password of --DB_PASSWORD_2."""
    parts = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+[0-9]*|\d+", name)]
    while len(parts) > 1 and (_APPENDED.fullmatch(parts[-1])):
        parts.pop()
    return tuple(parts) or ("",)
