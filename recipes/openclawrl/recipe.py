"""OpenClaw-RL: the message that follows an answer judges it, and may say how the answer should have been.

Knows: its settings, how a turn is judged and its hints are kept, and how a batch is chosen.
Does not know: torch; the equations are in `loss.py`, which only the trainer process loads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from reef.core.errors import ConfigError, EngineError, ReefError, UpstreamError, WireError
from reef.core.nouns import Batch, Json, PartName, Unit
from reef.experience.units import Signal
from reef.recipe import Asking, Entry, Mutation, Objective, batches, fields
from reef.recipe.chats import hinted, spoken

from . import judge
from .judge import Said

RATES = {"lora": 1e-3, "full": 1e-5}
JUDGING = ("judge", "judge_model", "judge_temperature", "judge_tokens", "judge_seconds", "votes", "hints")


@dataclass(frozen=True, slots=True)
class OpenClawRecipe:
    """The YAML keys of `recipe: openclawrl`. Where the paper's values differ: rate 1e-5, K 4, anchor 1 (its weight for
    a turn without a hint is that of a turn with one), a model as the judge.
    """

    batch_size: int = 16  # judged turns per optimizer step
    max_staleness: int | None = None  # None: gate.evaluate_every * gate.patience
    judge: str = "rules"  # rules, base (the scenario's own base model), or the name of an engine
    judge_model: str | None = None  # the model to ask that engine for
    judge_temperature: float = 0.6
    judge_tokens: int = 8192  # of one reply: a judge may think
    judge_seconds: float = 110.0  # after which a vote has failed; the loop gives a turn 120 in all
    votes: int = 3  # calls of the judge for each turn; rules have one vote
    hints: int = 3  # hints that are kept of one turn, at most; 0: verdicts only
    w_rl: float = 1.0  # weight of the verdict
    w_opd: float = 1.0  # weight of what the hinted teacher says
    anchor: float = 0.1  # of w_opd: pull to the frozen base on scored turns without a hint
    distil: str = "select"  # select: the top K tokens (version 2); sampled: the token that was drawn (version 1)
    top_k: int = 20
    choose: str = "sequence_optimal"  # which hint teaches: sequence_optimal | token_optimal | shortest
    subset: str = "student"  # whose top K: student | teacher | overlap
    clip: float = 1.0  # C: the most nats by which teacher and policy are told apart at a token
    epsilon_low: float = 0.2
    epsilon_high: float = 0.28
    kl: float = 0.0  # weight of a pull (rho k3) towards the frozen base
    train: str = "lora"
    learning_rate: float | None = None  # None: RATES above
    rank: int = 8  # of the LoRA
    alpha: float = 16.0
    seed: int = 0

    part: ClassVar[PartName | None] = "weights"
    signals: ClassVar[frozenset[Signal]] = frozenset({"next"})

    def __post_init__(self) -> None:
        fields.policy(self)
        fields.whole(self, "batch_size", 1)
        fields.need(isinstance(self.judge, str) and bool(self.judge), "judge", "rules, base or an engine", self.judge)
        fields.need(
            self.judge_model is None or isinstance(self.judge_model, str), "judge_model", "a name", self.judge_model
        )
        fields.number(self, "judge_temperature", 0, 2)
        fields.whole(self, "judge_tokens", 1)
        fields.number(self, "judge_seconds", 0, 120, above=True)
        fields.whole(self, "votes", 1, 32)
        fields.whole(self, "hints", 0, 8)
        for name in ("w_rl", "w_opd", "anchor", "kl"):
            fields.number(self, name, 0)
        fields.one_of(self, "distil", "select", "sampled")
        fields.whole(self, "top_k", 1, 1024)
        fields.one_of(self, "choose", "sequence_optimal", "token_optimal", "shortest")
        fields.one_of(self, "subset", "student", "teacher", "overlap")
        fields.number(self, "clip", 0, above=True)
        fields.number(self, "epsilon_low", 0, 1, above=True)
        fields.number(self, "epsilon_high", 0, above=True)
        if not self.w_rl and not self.w_opd:
            raise ConfigError("w_rl and w_opd are both 0, so nothing would be learnt; raise one", param="w_rl")
        if self.judge == "rules" and self.judge_model is not None:
            raise ConfigError("judge: rules asks no model; leave judge_model out", param="judge_model")

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines it asks about turns, by name: they must be in the configuration."""
        return () if self.judge in ("rules", "base") else (self.judge,)

    async def assess(self, unit: Unit, ask: Asking) -> Json:
        """`{"verdict": 1 | -1 | 0, "hints": […]}`; None where there is neither. A turn with a verdict counts towards a
        batch whatever the weights are: that is so many judged turns.

        Every call failing is no verdict where it says nothing of the turn. EngineError or WireError: the judge is away,
        and the turn is judged later. TimeoutError: it took too long, which the loop counts against the turn.
        """
        role, following = _following(unit)
        if self.judge == "rules":
            said = [judge.rules(role, following)]
        else:
            said = await self._ask(unit, role, following, ask)
        verdict = judge.tally([one.verdict for one in said])
        hints = judge.kept((one.hint for one in said if one.verdict is not None), self.hints)
        if not verdict and not (hints and self.w_opd):
            return None
        return {"verdict": verdict, "hints": hints, "votes": [one.verdict for one in said]}

    async def _ask(self, unit: Unit, role: str, following: str, ask: Asking) -> list[Said]:
        """One call a vote; a call that failed is a failed vote."""
        choice = next((one for one in unit.record.choices if one.index == unit.choice), None)
        turn = "" if choice is None else judge.plain(choice.text)
        if choice is not None and choice.message is not None:
            turn = json.dumps(choice.message, ensure_ascii=False)  # calls are what a tool's answer judges
        body: dict[str, Json] = {"max_tokens": self.judge_tokens, "temperature": self.judge_temperature}
        if self.judge_model is not None:
            body["model"] = self.judge_model
        engine = None if self.judge == "base" else self.judge
        before = spoken(unit.record)["messages"]

        async def vote() -> Said | ReefError | TimeoutError:
            try:
                asked = judge.question(before, turn, role, following)
                async with asyncio.timeout(self.judge_seconds):
                    return judge.read(await ask(engine, {**body, "messages": asked}))
            except (ReefError, TimeoutError) as error:
                return error

        votes = await asyncio.gather(*(vote() for _ in range(self.votes)))
        errors = [one for one in votes if not isinstance(one, Said)]
        gone = [one for one in errors if isinstance(one, TimeoutError) or away(one)]
        if len(errors) == len(votes) and gone:
            raise min(gone, key=lambda one: isinstance(one, TimeoutError))  # away before slow
        return [one if isinstance(one, Said) else Said(None) for one in votes]

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first `batch_size` judged turns with exact tokens; None until there are as many."""
        fit = [unit for unit in units if batches.exact(unit) and isinstance(unit.assessment, Mapping)]
        if len(fit) < self.batch_size:
            return None
        chosen = [self._judged(unit) for unit in fit[: self.batch_size]]
        taught = sum(bool(unit.sample and unit.sample.contexts) for unit in chosen)
        return batches.make(chosen, {"hinted": taught / len(chosen)})

    def _judged(self, unit: Unit) -> Unit:
        """The unit with its verdict as the reward and a chat for each hint, the shortest hint first."""
        verdict, hints = float(unit.assessment["verdict"]), unit.assessment["hints"] if self.w_opd else ()
        chat = spoken(unit.record)
        contexts = tuple(json.dumps(hinted(chat, hint), ensure_ascii=False) for hint in hints if chat["messages"])
        assert unit.sample is not None  # `exact`
        return replace(unit, score=verdict, sample=replace(unit.sample, reward=verdict, contexts=contexts))

    def objective(self) -> Objective:
        options: dict[str, Any] = batches.options(self, JUDGING)
        options["learning_rate"] = self.learning_rate or RATES[self.train]
        return Objective(__name__.rpartition(".")[0] + ".loss:OpenClaw", options)

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        return ()


def away(error: ReefError) -> bool:
    """Whether a call failed for a reason that has nothing to do with what was asked, so that it should be made again.

    The judge's engine is unreachable, overloaded, out of credit or refuses its key. A request that it refuses as such
    (too long, malformed: 400, 404, 413, 422) will never be answered, and is a failed vote for good.
    """
    if isinstance(error, UpstreamError):
        return error.status not in (400, 404, 405, 413, 415, 422)
    return isinstance(error, EngineError | WireError)


def _following(unit: Unit) -> tuple[str, str]:
    """Role and text of the message that followed."""
    said = unit.report.metadata
    role = said.get("role") if isinstance(said, Mapping) else None
    text = unit.report.feedback
    return ("tool" if role == "tool" else "user"), judge.plain(text) if not isinstance(text, str) else text
