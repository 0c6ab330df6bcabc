"""A scenario's life for tests: answers, reports, training, looks and releases, written as the learner writes them."""

from dataclasses import replace
from pathlib import Path

from reef.core.nouns import Consumed, Cost, Evaluation, Guard
from reef.core.wire import Step
from reef.harness.tree import FILE, Entry, write
from reef.loop.ledger import Ledger, Look, Order
from reef.releases import Draft, NewPart
from reef.scenario.serving import align, tell

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def rules(text):
    return NewPart("tree", {FILE: write([Entry("rule", "rules", {"text": text})])})


class Life:
    """The learner of one scenario, without a recipe: each call is what one step of it would write down."""

    def __init__(self, state: Path, chain, board, scenario: str = "default"):
        self.path = state / "learn.db"
        self.chain, self.board, self.scenario = chain, board, scenario
        self.turn = 0

    @property
    def head(self):
        return self.chain.head(self.scenario)

    def ledger(self, ask):
        """`ask(ledger)`, opened for it: tests call from several threads."""
        ledger = Ledger(self.path)
        try:
            return ask(ledger)
        finally:
            ledger.close()

    def train(self, line, units, step=1, part="harness", fate="trained"):
        """`units` is {unit id: report id}."""
        message = Step(
            scenario=self.scenario, part=part, line=line, step=step, base_release=self.head.id, base_step=0,
            objective="", options={}, batch_id=f"{line}-{step}", unit_ids=list(units), cursor=self.turn, data=[],
        )  # fmt: skip
        order = Order(part, message, tuple(units.values()))

        def settle(ledger):
            ledger.reserve(order)
            ledger.settle(order, fate, {})

        self.ledger(settle)

    def candidate(self, units=(), text=None, line=None):
        """A candidate on the head that learnt from these units, and the look's evaluation."""
        self.turn += 1
        line = line or f"{self.head.id[:12]}-{self.turn}"
        if units:
            self.train(line, dict(units) if isinstance(units, dict) else dict.fromkeys(units, ""))
        held = {name: Consumed(item.cursor) for name, item in self.head.consumed.items()}
        draft = Draft(
            "candidate", {"harness": rules(text or f"Rule {self.turn}.")}, base=self.head.id, step=self.head.step,
            line=line, recipe="test", consumed={**held, "harness": Consumed(self.turn, tuple(units))},
        )  # fmt: skip
        return self.chain.publish(self.scenario, draft, None), draft

    def look(self, candidate, verdict, reason, release=None):
        evaluation = Evaluation(
            "better", "accept" if verdict == "hold" else verdict, reason, candidate.id, candidate.base,
            (Guard("length", True, 1.0, 2.0, "answers are about as long"),), {"kl": 0.01},
            suite="tasks 0123", cost=Cost(10, 100, 50, 1.5, 0.02),
        )  # fmt: skip
        look = Look(
            self.scenario, "harness", candidate.line, 1, 1, verdict, reason, candidate.id, release, evaluation
        )  # fmt: skip
        self.ledger(lambda ledger: ledger.audit(look))
        return evaluation

    def hold(self, units=(), text=None):
        candidate, _ = self.candidate(units, text)
        self.look(candidate, "hold", "better by 20 points (held for a person)")
        return candidate

    def reject(self, units=(), reason="worse by 10 points"):
        candidate, _ = self.candidate(units)
        self.look(candidate, "reject", reason)
        return candidate

    def publish(self, units=(), text=None):
        candidate, draft = self.candidate(units, text)
        evaluation = Evaluation(
            "better", "accept", "better by 20 points", candidate.id, self.head.id, suite="tasks 0123", cost=Cost(10)
        )  # fmt: skip
        draft = replace(draft, operation="publish", evaluation=evaluation, reason=evaluation.reason)
        release = self.chain.publish(self.scenario, draft, self.head.id)
        self.look(candidate, "accept", "better by 20 points", release.id)
        align(self.scenario, self.chain, self.board)
        tell(release, self.board)
        return release


async def answer(client, scenario="default"):
    """The receipt of one answer."""
    given = await client.post("/v1/chat/completions", json=ASK, headers={"x-reef-scenario": scenario})
    return given.headers["x-reef-agent-record-id"]


async def report(client, *receipts, score=1.0):
    said = await client.post("/reef/report", json={"references": list(receipts), "score": score})
    return said.json()["agent_record_id"]
