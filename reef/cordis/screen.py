"""What an edit must not contain: secrets, attempts to take over the instructions, and things that act on a machine.

Knows: shapes of text. Feedback and transcripts are untrusted; so is whatever was distilled from them.
Does not know: meaning. This is a coarse sieve before the gate, not a proof of harmlessness; it prefers to refuse.

A refusal never quotes the text it refuses, since reasons end in logs and audit rows.
"""

from __future__ import annotations

import re
import unicodedata

from reef.core.nouns import Json

_SECRETS = (
    r"\b(?:sk|pk|rk|ghp|gho|ghu|ghs|github_pat|glpat|xox[abprs]|hf|npm|pypi)[-_][A-Za-z0-9_-]{16,}",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\bAIza[0-9A-Za-z_-]{30,}",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.",
    r"-----BEGIN [A-Z ]*PRIVATE KEY",
    r"\b(?:bearer|api[-_ ]?key|token|secret|password|passwd|authorization)\b\s*(?:is|[:=])?\s*['\"]?(?=\S*\d)\S{12,}",
    r"\b[0-9a-f]{32,}\b",
    r"\b(?=[A-Za-z0-9+/_-]*[a-z])(?=[A-Za-z0-9+/_-]*[A-Z])(?=[A-Za-z0-9+/_-]*\d)[A-Za-z0-9+/_-]{32,}",
)
_OVERRIDES = (
    r"\b(?:ignore|disregard|forget|override|bypass)\b.{0,40}\b(?:instruction|rule|prompt|guideline|polic|message|"
    r"above|previous|prior|earlier|everything|safety)",
    r"\b(?:you are|act as|pretend (?:to be|you)|behave as)\b.{0,30}\b(?:now|no longer|dan|jailbr|unrestricted|"
    r"developer mode)",
    r"\b(?:system|developer) (?:prompt|message|instruction)",
    r"\b(?:reveal|print|repeat|show|leak|output)\b.{0,30}\b(?:(?:your|the|this) (?:prompt|instructions)|"
    r"secrets?|api[- ]?keys?|tokens?|passwords?|credentials?)\b",
    r"(?:^|\n)\s*(?:system|assistant|developer|user|human)\s*:",
    r"<\|?/?(?:im_start|im_end|system|assistant|user|tool|endoftext|eot_id|inst)\b|\[/?inst\]|<<sys>>",
    r"\bnew (?:instructions?|rules?) (?:are|is|follow)|\bfrom now on\b.{0,20}\byou (?:are|must obey)",
)
_ACTIONS = (
    r"(?:https?|ftp|ssh|file|data|javascript)\s*:\s*//|\bwww\.",
    r"\b(?:\d{1,3}\.){3}\d{1,3}\b",
    r"\b[a-z0-9-]+\.(?:com|net|org|io|dev|sh|ru|cn|xyz|info|app|ai|co)\b",
    r"\b(?:curl|wget|sudo|chmod|rm\s+-|bash\s+-|sh\s+-c|powershell|eval\s*\(|exec\s*\(|os\.system|subprocess|base64 -)",
    r"```|\$\(|\|\s*(?:ba|z)?sh\b|&&\s*\w|;\s*rm\b|<script",
)


def _compile(patterns: tuple[str, ...], flags: int) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), flags)


_SIEVES = (
    ("looks like it holds a key, token or password; take it out", _compile(_SECRETS[:5], 0)),
    ("looks like it holds a key, token or password; take it out", _compile(_SECRETS[5:7], re.IGNORECASE)),
    ("looks like it holds a key, token or password; take it out", _compile(_SECRETS[7:], 0)),
    ("tries to override instructions; say what the answer should be like instead", _compile(_OVERRIDES, re.I | re.S)),
    ("holds a command, code or an address; rules are plain sentences", _compile(_ACTIONS, re.IGNORECASE)),
)


def screen(value: Json) -> str | None:
    """Why a text, or any text inside a JSON value (keys too), must not enter a tree; None when nothing was found.

    Text is compared after NFKC and without invisible characters, so that full-width letters and zero-width joiners do
    not hide a word. Control characters other than tab and newline are refused.
    """
    if isinstance(value, str):
        return _screen(value)
    parts = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
    for part in parts:
        if (wrong := screen(part)) is not None:
            return wrong
    return None


def _screen(text: str) -> str | None:
    if any(unicodedata.category(letter) == "Cc" and letter not in "\t\n" for letter in text):
        return "holds control characters"
    plain = "".join(letter for letter in unicodedata.normalize("NFKC", text) if unicodedata.category(letter) != "Cf")
    for reason, sieve in _SIEVES:
        if sieve.search(plain):
            return reason
    return None
