"""What an edit must not contain, and what a person has to agree to: secrets, take-overs, things that act on a machine.

Knows: shapes of text. Feedback and transcripts are untrusted; so is whatever was distilled from them.
Does not know: meaning. This is a coarse sieve before the gate, not a proof of harmlessness; it prefers to refuse.

- `screen`: what feedback must pass to become a rule by itself. `taint`: what no entry may hold. `acts`: what a new
  entry may hold only if a person agrees (`hold`).
- A refusal never quotes the text it refuses, since reasons end in logs and audit rows.
- Every pattern takes time in proportion to the text, whatever the text: nobody can stop learning with a long line.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable
from itertools import pairwise

from reef.cordis.text import fold, hidden, strings
from reef.core.nouns import Json

_SECRETS = (
    r"\b(?:sk|pk|rk|ghp|gho|ghu|ghs|github_pat|glpat|xox[abprs])[-_][A-Za-z0-9_-]{16,}",
    r"\b(?:hf|npm|pypi)[-_](?=[A-Za-z_-]{0,64}\d)[A-Za-z0-9_-]{30,}",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\bAIza[0-9A-Za-z_-]{30,}",
    r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.",
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY",
)
_NAMED = (
    r"(?:\b|_)(?:bearer|api[-_ ]?key|token|secret|password|passwd|authorization)\b\s{0,4}(?:is|[:=])?\s{0,4}['\"]?"
    r"(?![\])}>/-])(?=\S{0,64}\d)\S{12,}",
    r"\b[0-9a-f]{32,}\b",
)
_OVERRIDES = (
    r"(?<!never )(?<!n.t )(?<!do not )\b(?:ignore|disregard|forget|override|bypass)\b.{0,40}"
    r"\b(?:instruction|rule|prompt|guideline|polic|message|above|previous|prior|earlier|everything|safety)",
    r"\b(?:you are|you.re)\s{1,4}(?:now|no longer)\b",
    r"\b(?:you are|act as|pretend (?:to be|you)|behave as)\b.{0,30}\b(?:no longer|dan|jailbr|unrestricted|"
    r"developer mode)",
    r"\b(?:reveal|print|repeat|show|leak|output)\b.{0,30}\b(?:(?:your|the|this) (?:system )?(?:prompt|instructions)|"
    r"your tokens?|(?:access|auth|api|bearer) tokens?|secrets?|api[- ]?keys?|passwords?|credentials?)\b",
    r"(?:^|\n)[^\S\n]{0,40}(?:system|assistant|developer|user|human)[^\S\n]{0,4}:",
    r"<\|?/?(?:im_start|im_end|system|assistant|user|tool|endoftext|eot_id|inst)\b|\[/?inst\]|<<sys>>",
    r"\bnew (?:instructions?|rules?) (?:are|is|follow)|\bfrom now on\b.{0,20}\byou (?:are|must obey)",
)
_TALK = r"\b(?:system|developer) (?:prompt|message|instruction)"  # people who report on an answer do not know of these
_ACTIONS = (
    r"(?:https?|ftp|ssh|file|data|javascript)\s{0,4}:\s{0,4}//|\bwww\.",
    r"\b(?:\d{1,3}\.){3}\d{1,3}\b",
    r"(?<![a-z0-9-])[a-z0-9-]+\.(?:com|net|org|io|dev|sh|ru|cn|xyz|info|app|ai|co)\b",
    r"\b(?:curl|wget|sudo|chmod|rm\s{1,4}-|bash\s{1,4}-|sh\s{1,4}-c|powershell|eval\s{0,4}\(|exec\s{0,4}\(|os\.system|"
    r"subprocess|base64 -)",
    r"```|\$\(|\|\s{0,4}(?:ba|z)?sh\b|&&\s{0,4}\w|;\s{0,4}rm\b|<script",
)
# What feedback may hold without meaning a machine, and an agent would act on.
_COMMANDS = (
    r"!`|(?<!\w)@(?:[\w~.-]{1,200}/|[\w-]{1,200}\.\w)",  # clients run the one and read the other when they load a text
    r"~~~|<\(|>\s{0,4}[~/]|\$\{?(?!ARGUMENTS\b)[A-Z_]{3,}|\bcmd(?:\.exe)?\s{1,4}/c",
    r"(?<![\w.])~/|/(?:etc|root|home|proc|dev|usr|var)/|(?<!\w)/(?:bin|sbin|opt|tmp|sys|boot|mnt|srv)/",
    r"\b(?:run|execute|start|launch|call|source|invoke)[ \t](?:the[ \t])?\.{0,2}/\w",
    r"\b[a-z]:\\\w|\\\\[\w-]{1,63}\\|%[A-Z]{3,}%|\b(?:docker|podman)[ \t]compose",
    r"\b[a-z][a-z0-9+.-]{1,20}://|(?<![\w:/])//[\w-]{1,63}\.\w|\w@[\w-]{1,63}\.[a-z]|(?<!\w)\[[0-9a-f:]{2,39}\](?!\w)",
    r"(?<![\w./-])(?:[a-z0-9-]{1,63}\.){1,4}(?!(?:js|ts|json|html|css|txt|ya?ml|toml)\b)[a-z]{2,24}(?::\d{1,5})?/\w",
    r"\b(?:invoke-(?:webrequest|restmethod|expression)|iwr|iex)\b|\b(?:z|da|k|fi)?sh[ \t]-",
    r"\b(?:npx|npm|pnpm|pip\d?(?:\.\d{1,2})?|uvx|bunx|aria2c|telnet|killall|nohup|mvn|gradle|dotnet|"
    r"pipx|kubectl|scp|rsync|ncat|netcat|crontab|systemctl|launchctl|mkfs|chown|xargs|"
    r"osascript|apt-get|pytest|tox)[ \t]{1,4}[-\w./~$]",
    r"\b(?:git|docker|podman|make|cargo|brew|apt|yarn|bun|deno|python\d?(?:\.\d{1,2})?|node|perl|ruby|php|go|uv|helm|terraform|ssh|nc)"
    r"[ \t]{1,4}(?:install|run|exec|push|pull|reset|clean|clone|config|commit|checkout|rebase|merge|stash|add|apply|"
    r"delete|build|publish|test|-\w|\w{0,64}@|[-\w/]{0,200}\.(?:py|js|ts|sh|rb|pl|php)\b)",
    r"\blocalhost\b|(?<![a-z0-9-])[a-z0-9-]+\.(?:local|internal|onion|zip|top|site|me|us|uk|de|eu|fr|nl|tv|biz|cloud|"
    r"tech|pw|ly|gg|cc|tk|ml|ga|cf|gq|icu|online|br|jp|kr|ir|ua|pl)\b",
    r"\b(?:import|require|fetch|system|popen|spawn|unlink|rmtree|urlopen)\s{0,4}\(|\bprocess\.env\b|\bos\.environ\b",
    r"(?<!\w)\.(?:ssh|aws|netrc|npmrc|bashrc|zshrc|profile|env)\b",
)
_MARKS = str.maketrans("", "", "*`\\")
_INLINE = re.compile(r"`([^`\n]+)`")


def _compile(patterns: tuple[str, ...], flags: int) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), flags)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHAPED, _TOLD = _compile(_SECRETS, 0), _compile(_NAMED, re.IGNORECASE)
_RUN = re.compile(r"[A-Za-z0-9+/_-]{32,}")
_KEY = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z ]{0,40}KEY-----|\Z)", re.DOTALL)
MASK = "(left out: it looks like a secret)"
_OVERRIDE, _TALKS = _compile(_OVERRIDES, re.I | re.S), _compile((_TALK,), re.I)
_ACTION, _ACTS = _compile(_ACTIONS, re.IGNORECASE), _compile(_ACTIONS + _COMMANDS, re.IGNORECASE)


def secret(text: str) -> bool:
    """Whether it looks as if it held a key, token or password."""
    plain = fold(text)
    if _SHAPED.search(plain) or _TOLD.search(plain):
        return True
    return any(_random(run) for run in _RUN.findall(plain))


def masked(text: str) -> str:
    """The text without what looks like a key, token or password. Where only a reader would see one (`text.fold`), its
    line goes as a whole."""
    for sieve in (_KEY, _SHAPED, _TOLD):
        text = sieve.sub(MASK, text)
    text = _RUN.sub(lambda run: MASK if _random(run[0]) else run[0], text)
    return "\n".join(MASK if secret(line) else line for line in text.split("\n"))


def overrides(text: str) -> bool:
    """Whether it tries to take over a model's instructions."""
    return _OVERRIDE.search(fold(text)) is not None


_SECRET = "looks like it holds a key, token or password; take it out"  # noqa: S105 - a sentence
_TAINTS = (
    (_SECRET, secret),
    ("tries to override instructions; say what the answer should be like instead", overrides),
)
_SIEVES = (
    *_TAINTS,
    ("speaks of the model's instructions; say what the answer should be like instead", _TALKS.search),
    ("holds a command, code or an address; rules are plain sentences", _ACTION.search),
)


def screen(value: Json) -> str | None:
    """Why a text, or any text inside a JSON value (keys too), must not become a rule by itself; None: nothing found.

    Text is compared as a reader would see it (`text.fold`), so that full-width letters, accents, look-alikes and
    zero-width joiners do not hide a word. Control characters other than tab and newline are refused.
    """
    return _first(strings(value), _SIEVES)


def taint(value: Json) -> str | None:
    """Why a text, or any text inside a JSON value, can stand in no tree, not even if a person agrees: it holds a
    secret, tries to override instructions, or has characters that a person who reads it cannot see. None: nothing."""
    if any(_unseen(text) for text in strings(value)):
        return "holds characters that cannot be seen"
    return _first(strings(value, pairs=True), _TAINTS)


def acts(value: Json) -> tuple[str, ...]:
    """The passages of a text, or of the texts in a JSON value, that hold a command, code or an address: each is a
    paragraph or fenced block that does, together with the paragraph before it, which says what it is for."""
    return tuple(dict.fromkeys(passage for text in strings(value) for passage in _passages(text)))


def _first(texts: Iterable[str], sieves: Iterable[tuple[str, Callable[[str], object]]]) -> str | None:
    for text in texts:
        if _CONTROL.search(text):
            return "holds control characters"
        plain = fold(text)
        for reason, sieve in sieves:
            if sieve(plain):
                return reason
    return None


def _random(run: str) -> bool:
    """Whether a run of letters and digits is drawn rather than written: of all three sorts, and changing among them at
    every third place or more. Drawn ones change at six of ten; paths and joined words at one of five."""
    sorts = [letter.isdigit() + 2 * letter.isupper() for letter in run if letter.isalnum()]
    changes = sum(one != other for one, other in pairwise(sorts))
    return len(set(sorts)) == 3 and changes > 0.35 * len(sorts)


_NEEDED = "\u200c\u200d\u200e\u200f\u00ad\u2028\u2029\ufeff"
_ROW = re.compile("[\u200c-\u200f\u00ad\ufeff]{4,}")


def _unseen(text: str) -> bool:
    """Invisible characters that no writing needs: the joiners and direction marks of Persian, Hindi, Hebrew and emoji
    may stand between letters, but not in rows, which could spell something."""
    if text.isascii():
        return False
    return _ROW.search(text) is not None or any(hidden(sign) and sign not in _NEEDED for sign in text if sign > "~")


def _passages(text: str) -> list[str]:
    parts = _paragraphs(text)
    return ["\n\n".join(parts[max(0, at - 1) : at + 1]) for at, part in enumerate(parts) if _does(fold(part))]


def _does(text: str) -> bool:
    """Inline code of several words is a command; of one, a name. A command is one, too, when marks of Markdown, a
    shell or HTML stand in it."""
    if _ACTS.search(text) is not None or any(" " in code.strip() for code in _INLINE.findall(text)):
        return True
    bare = html.unescape(text.replace("\\\n", " ")).translate(_MARKS)
    return bare != text and _ACTS.search(bare) is not None


def _paragraphs(text: str) -> list[str]:
    """Split at blank lines, but never inside a fenced block of code; an open fence reaches to the end."""
    parts: list[list[str]] = [[]]
    fence = ""
    for line in text.split("\n"):
        mark = line.strip()[:3]
        if not fence and not mark:
            parts.append([])
            continue
        parts[-1].append(line.rstrip())
        if mark in ("```", "~~~") and mark == (fence or mark):
            fence = "" if fence else mark
    return ["\n".join(lines) for lines in parts if lines]
