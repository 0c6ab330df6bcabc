"""Every setting, its type and its default. A key that is not here is an error.

Knows: the sections of the YAML file, and the rules between keys that need no other room.
Does not know: where a value came from (`sources`), or whether a named recipe, engine or policy exists.

- An empty file is the working embedded deployment that learns.
- A recipe's own fields sit beside `reef.recipe`; they are kept aside in `recipe_fields` and checked against the
  recipe's dataclass in a second stage (`check.recipe`).
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field

from reef.core.ids import SCENARIO_RULE, is_address, is_scenario
from reef.core.kinds import OWN, REMOTE
from reef.core.nouns import ActKind

Text = Annotated[str, BeforeValidator(lambda value: getattr(value, "text", value))]
"""Text; a number in the file is taken as it was spelled."""

Dialect = Literal["chat", "responses", "messages", "count_tokens", "embeddings"]
Size = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


def _scenario_name(value: str) -> str:
    if not is_scenario(value):
        raise ValueError(SCENARIO_RULE)
    return value


ScenarioName = Annotated[Text, pydantic.AfterValidator(_scenario_name)]


def _public(value: str) -> str:
    if not is_address(value):
        raise ValueError("write it as https://host or https://host:port, with a path if it has one")
    return value


Address = Annotated[Text, pydantic.AfterValidator(_public)]


class Section(pydantic.BaseModel):
    """One section of the file: frozen, and any key it does not have is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ReefSettings(Section):
    host: Text = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8900  # 0: any free port; the address is printed
    token: Text = ""  # empty: one is created in state_dir (mode 0600) and printed once
    auth: Literal["token", "none"] = "token"  # none is allowed on loopback only
    public_url: Address | None = None  # what install scripts and links use; default: the one the request reached
    state_dir: Path = Path(".reef")  # relative to the folder the command runs in
    workers: Annotated[int, Field(ge=1, le=64)] = 2  # gateway processes
    default_scenario: ScenarioName = "default"
    create_scenarios: bool = True  # a request with a new scenario name creates it; false: 404
    engine: Text = "local"  # local, fake (deterministic answers, for tests), or a name under engines
    model: Text | None = None  # whose weights are ours (local, vllm, sglang): a folder, a hub id, or smollm2-135m
    recipe: Text | None = None  # a short name or package.module:Name; default: sao where weights are ours, else record
    recipes: tuple[Text | dict[str, Any], ...] = ()  # instead of recipe: one per part, {use: …, fields…} or a path
    recipe_fields: dict[str, Any] = Field(default_factory=dict)  # not written by hand: the keys beside recipe

    @pydantic.model_validator(mode="after")
    def _rules(self) -> Self:
        _recipes(self)
        if self.auth == "none" and not is_loopback(self.host):
            raise ValueError(
                f"auth: none is allowed on loopback only, and host is {self.host}; use auth: token, or host: 127.0.0.1"
            )
        return self


def _recipes(section: ReefSettings | ScenarioOverrides) -> None:
    """`recipe` with its fields beside it, or `recipes` with theirs inside: not both, and every entry names one."""
    if section.recipes and section.recipe is not None:
        raise ValueError("give recipe (one) or recipes (one for each part), not both")
    if section.recipes and section.recipe_fields:
        name = next(iter(section.recipe_fields))
        raise ValueError(f"with recipes, a recipe's fields go inside its entry: recipes: [{{use: …, {name}: …}}]")
    for item in section.recipes:
        if isinstance(item, dict) and not isinstance(item.get("use"), str):
            raise ValueError("an entry of recipes is a name, a dotted path, or {use: name or path, fields…}")


class EngineSettings(Section):
    """An engine by name. `kind` is local, vllm, sglang, upstream, fake, or package.module:Name (then `options` are its
    arguments)."""

    kind: Text = "upstream"
    url: Text | None = None  # upstream: the address up to and with /v1; vllm, sglang: the server's, without it
    urls: tuple[Text, ...] = ()  # vllm, sglang: several servers with the same model, instead of url
    api: Literal["openai", "anthropic"] = "openai"  # upstream: whose kind of server it is
    key_env: Text | None = None  # the environment variable that holds the key; the key itself is never in the file
    model: Text | None = None  # upstream: rewrite every request's model to this name; vllm, sglang: the base's there
    speaks: tuple[Dialect, ...] = ()  # upstream: its dialects, when they are others than its api's usual ones
    retries: Annotated[int, Field(ge=0, le=10)] = 2  # upstream: further tries of a request that failed at once
    retry_seconds: Annotated[float, Field(ge=0)] = 10.0  # upstream: in which they all begin; a longer retry-after: none
    connect: Seconds = 10.0  # seconds to reach it
    idle: Seconds = 300.0  # seconds without a byte from it
    connections: Annotated[int, Field(ge=0)] = 0  # upstream: at once, from each gateway; 0: no limit
    proxy: Text | None = None  # upstream: an HTTP proxy, http://host:port
    trust_env: bool = False  # upstream: take the proxy from HTTP_PROXY, HTTPS_PROXY and NO_PROXY
    options: dict[str, Any] = Field(default_factory=dict)  # local, vllm, sglang: docs/engines.md; else arguments

    @pydantic.model_validator(mode="after")
    def _address(self) -> Self:
        if self.kind == "upstream" and not (self.url or "").startswith(("http://", "https://")):
            raise ValueError("an upstream engine needs url: http://… or https://…, up to and with /v1")
        if self.kind in REMOTE:
            given = self.servers
            if not given or not all(one.startswith(("http://", "https://")) for one in given):
                raise ValueError(f"an engine of kind {self.kind} needs url: http://… (or urls, for several servers)")
            if (self.url is not None and self.urls) or len(set(given)) < len(given):
                raise ValueError("urls are several servers, each once; give url or urls, not both")
        elif self.urls:
            raise ValueError(f"urls is for engines of kind vllm and sglang, not {self.kind}; give url")
        if self.proxy is not None and not self.proxy.startswith("http://"):
            raise ValueError("proxy is an HTTP proxy's address, http://host:port")
        return self

    @property
    def servers(self) -> tuple[str, ...]:
        """Where a vllm or sglang engine's servers are, without `/v1`."""
        given = self.urls or ((self.url,) if self.url is not None else ())
        return tuple(one.rstrip("/").removesuffix("/v1") for one in given)


class GateSettings(Section):
    policy: Text = "guarded"
    """always | guarded | floor | better | no_worse | protected | all_of, or package.module:Name"""
    suite: Text | tuple[Text, ...] | None = None
    """What is measured on: a JSON-lines file (relative to the configuration file), traffic (the scenario's held-out
    prompts), failures (promoted ones), package.module:name; or several."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.1  # with suite traffic: the share of prompts that never train
    scorer: dict[str, Any] = Field(default_factory=dict)  # judges tasks that bring none: {use: number, …}
    evaluate_every: Size = 1  # look at a line's candidate every so many optimizer steps
    patience: Size = 3  # undecided looks before a candidate counts as rejected
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  # the share of releases that may be no better
    tasks: Size = 192  # asked in one look, at most
    least: Size = 16  # tasks without which nothing is decided
    repeats: Annotated[int, Field(ge=1, le=16)] = 3  # answers of the incumbent to each task, kept while it stands
    calls: Size | None = None  # evaluation's calls of a scenario in a month, at most
    tokens: Size | None = None  # and tokens
    money: Annotated[float, Field(gt=0)] | None = None  # and money, by `prices`
    options: dict[str, Any] = Field(default_factory=dict)  # the policy's own fields, and limits of the guards

    @pydantic.model_validator(mode="after")
    def _suite(self) -> Self:
        if self.policy in ("better", "no_worse", "protected", "floor") and not self.suite:
            raise ValueError(
                f"policy {self.policy} compares scores on a suite; give gate.suite, or use policy: guarded"
            )
        named = (self.suite,) if isinstance(self.suite, str) else self.suite or ()
        if len(set(named)) < len(named):
            raise ValueError("suite names the same source twice")
        if "traffic" in named and not self.holdout:
            raise ValueError("holdout is 0, and the suite is traffic: held-out prompts; give it a share such as 0.1")
        if self.least > self.tasks:
            raise ValueError(f"least is {self.least}, more than the {self.tasks} tasks that a look may ask")
        return self


class WatchSettings(Section):
    """What happens when live reports say that a release is worse than the one before it. (YAML reads a bare `off` as
    false.)"""

    action: Annotated[Literal["rollback", "tell", "off"], BeforeValidator(lambda value: value or "off")] = "rollback"
    reports: Size = 300  # scored reports on the new release that are looked at
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  # the chance of a false alarm for one release


class ReleaseSettings(Section):
    mode: Literal["auto", "review"] = "auto"  # review: an accepted candidate waits for `reef promote`
    watch: WatchSettings = Field(default_factory=WatchSettings)
    remote: Text | None = None  # a git remote that every release is pushed to, with git-lfs
    keep: Size | None = None  # releases whose large files stay on disk, besides pinned ones; None: all
    keep_candidates: Size = 20  # candidates that are kept, the newest


class TrainingSettings(Section):
    backend: Text = "local"  # local | ray | tinker | slime | fake (for tests), or package.module:Name
    trigger: Literal["auto", "manual", "hybrid"] = "auto"
    """auto: a step is made as soon as experience makes a batch. manual: only when a person sends an instruction
    (POST /reef/train). hybrid: both."""
    nice: Annotated[int, Field(ge=0, le=19)] = 19  # how far the trainer's process steps back when others want the CPU
    next_seconds: Seconds = 900.0  # a message that comes later says nothing of the answer before it
    client_share: Annotated[float, Field(gt=0, le=1)] = 0.5  # of a batch that one client may fill while others wait
    options: dict[str, Any] = Field(default_factory=dict)  # the backend's arguments
    broadcast: Text | None = None
    """Where the trainer listens for engines that take each step's weights from its memory (docs/broadcast.md), an
    address of this machine with a port: 127.0.0.1:0 (any free one). null: engines read files."""

    @pydantic.field_validator("broadcast")
    @classmethod
    def _listening(cls, value: str | None) -> str | None:
        if value is not None:
            listening(value)
        return value


def listening(address: str) -> tuple[str, int]:
    """Host and port of `training.broadcast`. ValueError, as the end of a sentence."""
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    right = port.isascii() and port.isdigit() and int(port) <= 65535
    if not bare or not right or (":" in bare) != (host == f"[{bare}]"):
        raise ValueError("write it as host:port, such as 127.0.0.1:0 (any free port)")
    if bare in ("0.0.0.0", "::"):  # noqa: S104 (refused)
        raise ValueError("needs the address by which engines reach this machine, such as 127.0.0.1:0, not all of them")
    return bare, int(port)


class HarnessSettings(Section):
    """What the rules and skills of a release add to each request, for applications that have no client to install
    them in. A request with `x-reef-harness: off` gets nothing (docs/apply.md)."""

    apply: bool | None = None  # true, false, or null: as the harness recipe wishes (feedback_rules: true)
    skills: Annotated[int, Field(ge=0, le=16)] = 3  # the most that one request gets: those that match its text best
    tokens: Annotated[int, Field(gt=0, le=1_000_000)] = 1024  # of all that is added to one request, about
    clients: Path | None = None
    """For all scenarios: the folder with the clients of agents' episodes, as npm installs them (docs/episodes.md);
    null: where `reef-AGENT` has its own, else what PATH has."""
    parallel: Annotated[int, Field(ge=1, le=64)] = 2  # for all scenarios: episodes at once


class PriceSettings(Section):
    """Money for a million tokens of a model."""

    prompt: Annotated[float, Field(ge=0)]
    output: Annotated[float, Field(ge=0)]


class WebhookSettings(Section):
    url: Text  # gets a POST with one act as JSON
    kinds: tuple[ActKind, ...] = ("release", "hold", "promote", "rollback", "alarm", "trouble")
    secret_env: Text | None = None  # the environment variable with the secret that signs what is sent (HMAC-SHA256)

    @pydantic.field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        if (why := refused(url)) is not None:
            raise ValueError(why)
        return url


def refused(url: str) -> str | None:
    """Why a webhook cannot be sent to this address, as the end of a sentence."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        return "must be http://host/… or https://host/…"
    if parts.username is not None:
        return "must not hold a password; sign with secret_env instead"
    return None


class RecordSettings(Section):
    url: Literal["sqlite"] = "sqlite"
    keep_days: Annotated[float, Field(gt=0)] | None = None  # older records are removed; what a release cites stays
    on_trouble: Literal["refuse", "serve"] | None = None  # the store cannot write: 503, or an answer that is recorded
    # later; by default scenarios that learn refuse and others serve
    keep_bytes: Size | None = None  # the oldest are removed while the store uses more


class LimitSettings(Section):
    body_bytes: Size = 64 * 1024 * 1024
    held_bytes: Size = 1024 * 1024 * 1024  # of all request bodies in one gateway's memory
    stream_bytes: Size = 256 * 1024 * 1024  # of one streamed answer
    report_bytes: Size = 1024 * 1024
    header_bytes: Size = 64 * 1024
    connections: Size = 4096  # open at once, for each gateway; at most half of the files the process may open
    concurrent: Size = 1024  # requests in work at once, for each gateway
    store_seconds: Seconds = 10.0  # how long an answer waits for its record to be stored
    quiet_seconds: Seconds = 15.0  # after which a stream without news gets a comment that keeps it alive
    drain_seconds: Seconds = 20.0  # how long a stop waits for requests in work


class ObservabilitySettings(Section):
    log: Literal["debug", "info", "warning", "error"] = "info"
    log_bytes: Size = 2 * 1024 * 1024  # of one file in state_dir/logs, kept twice
    webhook: WebhookSettings | None = None  # told of what happens to releases


class ScenarioOverrides(Section):
    """What one scenario does otherwise. Keys not given are those of the whole server; recipe fields sit beside them."""

    engine: Text | None = None
    model: Text | None = None
    recipe: Text | None = None
    recipes: tuple[Text | dict[str, Any], ...] = ()
    recipe_fields: dict[str, Any] = Field(default_factory=dict)
    gate: dict[str, Any] = Field(default_factory=dict)
    releases: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    harness: dict[str, Any] = Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _rules(self) -> Self:
        _recipes(self)
        return self


class Settings(Section):
    """The whole configuration. `scenario(name)` is what one scenario is to do."""

    reef: ReefSettings = Field(default_factory=ReefSettings)
    engines: dict[str, EngineSettings] = Field(default_factory=dict)
    models: dict[str, Text] = Field(default_factory=dict)  # alias: engine/model
    scenarios: dict[ScenarioName, ScenarioOverrides] = Field(default_factory=dict)
    gate: GateSettings = Field(default_factory=GateSettings)
    releases: ReleaseSettings = Field(default_factory=ReleaseSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    harness: HarnessSettings = Field(default_factory=HarnessSettings)
    records: RecordSettings = Field(default_factory=RecordSettings)
    prices: dict[str, PriceSettings] = Field(default_factory=dict)  # by model name, or engine/model
    limits: LimitSettings = Field(default_factory=LimitSettings)
    observability: ObservabilitySettings = Field(default_factory=ObservabilitySettings)

    @pydantic.model_validator(mode="after")
    def _named(self) -> Self:
        for name, wanted in [
            ("reef", self.reef.engine),
            *((f"scenarios.{n}", s.engine) for n, s in self.scenarios.items()),
        ]:
            if wanted is not None and wanted not in (*self.engines, "local", "fake"):
                near = _near(wanted, (*self.engines, "local"))
                raise ValueError(f"{name}.engine is {wanted!r}, which is neither local nor under engines{near}")
        for alias, target in self.models.items():
            engine, _, model = target.partition("/")
            if engine not in (*self.engines, "local", "fake") or not model:
                near = _near(engine, (*self.engines, "local"))
                raise ValueError(
                    f"models.{alias} is {target!r}; write engine/model, with an engine under engines:{near}"
                )
        return self

    def engine(self, name: str) -> EngineSettings:
        """An engine by name; `local` and `fake` exist without an entry. KeyError when there is none."""
        if name in ("local", "fake") and name not in self.engines:
            return EngineSettings(kind=name)
        return self.engines[name]

    def scenario(self, name: str, created: Mapping[str, Any] | None = None) -> ScenarioSettings:
        """What a scenario does: the server's settings, then its entry in the file, else what it was `created` with."""
        if name in self.scenarios:
            over = self.scenarios[name]
        else:
            over = ScenarioOverrides.model_validate(split(dict(created or {}), ScenarioOverrides))
        engine = over.engine or self.reef.engine
        return ScenarioSettings(
            name=name,
            engine=engine,
            model=over.model or self.reef.model,
            recipes=_uses(self.reef, over, self.engine(engine).kind, name if name in self.scenarios else ""),
            gate=GateSettings.model_validate(self.gate.model_dump(exclude_unset=True) | over.gate),
            releases=ReleaseSettings.model_validate(_over(self.releases, over.releases)),
            training=TrainingSettings.model_validate(self.training.model_dump(exclude_unset=True) | over.training),
            harness=HarnessSettings.model_validate(self.harness.model_dump(exclude_unset=True) | over.harness),
        )


@dataclass(frozen=True, slots=True)
class Use:
    """One recipe in use: a short name or dotted path, and its fields as written."""

    recipe: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: tuple[str | int, ...] = ("reef",)  # where in the file the fields sit
    inherited: frozenset[str] = frozenset()  # fields that sit under reef instead


@dataclass(frozen=True, slots=True)
class ScenarioSettings:
    """What one scenario does, with everything inherited filled in."""

    name: str
    engine: str
    model: str | None
    recipes: tuple[Use, ...]
    gate: GateSettings
    releases: ReleaseSettings
    training: TrainingSettings
    harness: HarnessSettings


def _uses(reef: ReefSettings, over: ScenarioOverrides, kind: str, name: str) -> tuple[Use, ...]:
    """The recipes of a scenario. Naming a recipe drops inherited fields; giving only fields adds to them."""
    where: tuple[str | int, ...] = ("scenarios", name) if name else ("reef",)
    if over.recipe is not None:
        return (Use(over.recipe, over.recipe_fields, where),)
    if over.recipes or (reef.recipes and not over.recipe_fields):
        where = where if over.recipes else ("reef",)
        return tuple(
            Use(item, {}, (*where, "recipes", place))
            if isinstance(item, str)
            else Use(str(item["use"]), {k: v for k, v in item.items() if k != "use"}, (*where, "recipes", place))
            for place, item in enumerate(over.recipes or reef.recipes)
        )
    recipe = reef.recipe or ("sao" if kind in OWN else "record")
    inherited = frozenset(reef.recipe_fields) - frozenset(over.recipe_fields)
    fields = reef.recipe_fields | over.recipe_fields
    return (Use(recipe, fields, where if over.recipe_fields else ("reef",), inherited),)


def _over(releases: ReleaseSettings, over: dict[str, Any]) -> dict[str, Any]:
    """A scenario's releases; of `watch` it may change one key and keep the others."""
    merged = releases.model_dump(exclude_unset=True) | over
    if isinstance(over.get("watch"), dict):
        merged["watch"] = releases.watch.model_dump(exclude_unset=True) | over["watch"]
    return merged


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def split(section: dict[str, Any], model: type[Section]) -> dict[str, Any]:
    """The section with the keys that the model does not have moved into `recipe_fields`."""
    known = {key: value for key, value in section.items() if key in model.model_fields and key != "recipe_fields"}
    fields = {key: value for key, value in section.items() if key not in known}
    return known | ({"recipe_fields": fields} if fields else {})


def dotted_source(source: str) -> bool:
    """Whether an entry of gate.suite names code, package.module:name."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", source) is not None


TASKS = ("tasks", "validation")
"""Fields of a recipe that name tasks in the form of gate.suite: a file, or package.module:name."""


def file_source(source: str) -> bool:
    """Whether an entry of gate.suite names a file."""
    return source not in ("traffic", "failures") and not dotted_source(source)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
