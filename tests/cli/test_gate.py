"""The gate's part of the configuration: what is checked, what a request may choose, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reef.cli import assemble, bind, gate
from reef.cli.main import main
from reef.cli.process import Boot
from reef.config import load
from reef.core.errors import ConfigError
from reef.core.nouns import Choice, Cost, Record, Report, Timing
from reef.evaluation import Means, Price
from reef.evaluation.book import Book
from reef.evaluation.policies import Better
from reef.experience.holdout import read
from reef.loop.binding import Tools, Work
from reef.loop.ledger import Ledger
from reef.loop.update import update_once
from reef.records.journal import Journal
from reef.records.sqlite import SqliteStore
from reef.trainers.fake import FakeTrainer

LINE = '{"prompt": "2+3?", "scorer": "number", "answer": 5}\n'


TASK = '{"id": "one", "prompt": "2+3?", "scorer": "number", "answer": 5}'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("qa.jsonl").write_text(LINE)
    Path("bad.jsonl").write_text('{"prompt": "2+3?", "scorer": {"use": "judge", "engine": "fkae"}}\n')
    Path("chores.py").write_text("def give():\n    return []\nsome = 3\ntasks = [" + TASK + "]\n")
    work = {"agent": "pi", "prompt": "Make the tests pass.", "check": "true"}
    Path("work.jsonl").write_text(json.dumps(work) + "\n")
    Path("typo.jsonl").write_text(json.dumps(work | {"agent": "pii"}) + "\n")
    Path("named.jsonl").write_text('{"id": "add", "prompt": "2+3?", "scorer": "number", "answer": 5}\n')
    monkeypatch.syspath_prepend(str(tmp_path))


BASE = "reef: {engine: fake, recipe: feedback_rules}\ntraining: {backend: fake}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gate: {scorer: {use: nmber}}",
            "reef.yaml:3: gate.scorer.use: there is no scorer 'nmber'; did you mean number?",
        ),
        ("gate:\n  scorer:\n    use: number\n    tolernce: 1", "reef.yaml:6: gate.scorer.tolernce"),
        (
            "gate: {scorer: {use: judge, engine: fkae}}",
            "gate.scorer.engine: there is no engine 'fkae'; did you mean fake?",
        ),
        ("gate: {scorer: {tolerance: 1}}", "reef.yaml:3: a scorer has its name under use"),
        ("gate: {scorer: {use: code, call: 'chores:absent'}}", "no 'absent'"),
        ("gate: {policy: better, suite: bad.jsonl}", "reef.yaml:3: bad.jsonl, line 1: there is no engine 'fkae'"),
        ("gate: {policy: better, suite: [qa.jsonl, gone.jsonl]}", "reef.yaml:3: cannot read the suite gone.jsonl"),
        (
            "gate: {policy: better, suite: trafic}",
            "cannot read the suite trafic: No such file or directory; did you mean traffic?",
        ),
        ("gate: {policy: no_worse, suite: qa.jsonl, options: {margn: 0.1}}", "option 'margn'; did you mean margin?"),
        ("releases:\n  watch: off", "reef.yaml:4: releases.watch: expected keys and values below it, not False"),
        ("gate: {policy: better, suite: 'chores:some'}", "reef.yaml:3: chores:some gives no tasks"),
        ("gate: {policy: better, suite: 'chore:give'}", "reef.yaml:3: no module 'chore'"),
        ("gate: {policy: no_worse, suite: qa.jsonl, options: {margin: 2}}", "reef.yaml:3: gate option margin"),
        (
            "gate: {policy: all_of, options: {policies: [bettr]}}",
            "reef.yaml:3: options.policies: there is no policy 'bettr'; did",
        ),
        ("gate: {policy: all_of, options: {policies: [guarded, better]}}", "reef.yaml:3: "),
        (
            "gate: {money: 5, scorer: {use: judge, engine: fake, model: j}}\nprices: {fake: {prompt: 1, output: 1}}",
            "reef.yaml:3: gate.money needs to know what the judge fake/j costs",
        ),
        (
            "gate: {money: 5}",
            "reef.yaml:3: gate.money needs to know what the engine fake costs; add its model to prices",
        ),
        (
            "gate: {policy: protected, suite: named.jsonl, options: {tasks: [ad]}}",
            "reef.yaml:3: the suite has no task 'ad' to protect; did you mean 'add'?",
        ),
        (
            "gate: {policy: all_of, suite: 'chores:tasks', options: {policies: [{policy: protected, tasks: [nope]}]}}",
            "the suite has no task 'nope' to protect; did you mean 'one'?",
        ),
        ("gate: {policy: floor, suite: qa.jsonl}", "reef.yaml:3: gate option at is missing"),
        ("scenarios: {a: {gate: {scorer: {use: nmber}}}}", "reef.yaml:3: scenarios.a.gate.scorer.use"),
        ("scenarios:\n  a:\n    gate: {policy: better, suite: gone.jsonl}", "reef.yaml:5: cannot read the suite"),
        ("scenarios:\n  a:\n    releases: {remote: 'x'}", "reef.yaml:5: a server pushes all scenarios to one remote"),
        ("scenarios:\n  a:\n    harness: {parallel: 3}", "reef.yaml:5: agents of all scenarios work in one place"),
        ("scenarios:\n  a:\n    harness: {clients: x}", "set harness.clients at the top"),
        (
            "gate: {policy: better, suite: typo.jsonl}",
            "reef.yaml:3: typo.jsonl, line 1: there is no agent 'pii'; did you mean pi?",
        ),
        (
            "gate: {policy: better, suite: work.jsonl}\nharness: {clients: nowhere}",
            "reef.yaml:3: work.jsonl, line 1: the client pi of agent pi is not installed here; run: npm install",
        ),
    ],
)
def test_a_wrong_gate_is_told_at_the_start_with_its_line(text, message, capsys):
    Path("reef.yaml").write_text(BASE + text + "\n")
    assert main(["config"]) == 2
    said = capsys.readouterr().err
    assert message in said, said


@pytest.mark.parametrize("options", ["{tasks: [add]}", "{}"])
def test_protected_tasks_that_are_there_or_come_later_are_no_error(options):
    Path("reef.yaml").write_text(BASE + f"gate: {{policy: protected, suite: named.jsonl, options: {options}}}\n")
    assert main(["config"]) == 0
    Path("reef.yaml").write_text(
        BASE + "gate: {policy: protected, suite: [named.jsonl, traffic], options: {tasks: [nope]}}\n"
    )
    assert main(["config"]) == 0


@pytest.mark.parametrize(
    ("policy", "least", "told"), [("better", 2, True), ("better", 1, False), ("protected", 2, False)]
)
def test_a_suite_with_fewer_tasks_than_the_gate_needs_is_told_at_the_start(policy, least, told, capsys):
    Path("reef.yaml").write_text(BASE + f"gate: {{policy: {policy}, suite: qa.jsonl, least: {least}}}\n")
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    words = "the suite has 1 task and gate.least is 2: no candidate can be accepted; add 1 more, or lower gate.least"
    assert [item["note"] for item in found if item["what"].startswith("gate ")] == ([words] if told else [])


@pytest.mark.parametrize(
    "text",
    [
        "gate: {policy: better, suite: [qa.jsonl, traffic, failures, 'chores:give'], scorer: {use: number}}",
        "gate: {scorer: {use: schema}}",
        "gate: {scorer: {use: judge, engine: fake, rubric: kind}}",
        "gate: {policy: all_of, suite: traffic, options: {policies: [better, {policy: no_worse, margin: 0.1}]}}",
        "gate: {money: 5}\nprices: {fake: {prompt: 0, output: 0}}",
    ],
)
def test_a_right_gate_is_accepted(text, capsys):
    Path("reef.yaml").write_text(BASE + text + "\n")
    assert main(["config"]) == 0, capsys.readouterr().err


def test_the_template_is_a_configuration(capsys):
    assert main(["init"]) == 0
    plain = Path("reef.yaml").read_text()
    for text in (plain, "\n".join(line.replace("# ", "", 1) if line.startswith("  # ") else line for line in plain.split("\n"))):  # fmt: skip  # noqa: E501
        Path("reef.yaml").write_text(
            text.replace("engine: local", "engine: fake").replace("recipe: sao", "recipe: record")
        )
        load(Path("reef.yaml"), environment={})


def settings_of(text):
    Path("reef.yaml").write_text(BASE + text)
    return load(environment={}).settings


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"suite": "/etc/passwd"}, "a request cannot name files of the server; name the suite /etc/passwd"),
        ({"suite": ["traffic", "../x.jsonl"]}, "a request cannot name files of the server; name the suite ../x.jsonl"),
        ({"suite": "os:listdir"}, "a request cannot load code"),
        ({"policy": "os:system"}, "a request cannot load code"),
        ({"policy": "all_of", "options": {"policies": [{"policy": "os:system"}]}}, "a request cannot load code"),
        ({"scorer": {"use": "code", "call": "os:system"}}, "scorer code may only be named"),
        ({"scorer": {"use": "judge", "engine": "fake"}}, "scorer judge may only be named"),
        ({"scorer": {"use": "tests"}}, "scorer tests may only be named"),
        ({"calls": 101}, "gate.calls: the server allows 100 a month"),
        ({"calls": None}, "gate.calls: the server allows 100 a month"),
    ],
)
def test_a_request_names_no_files_code_or_others(wanted, message):
    settings = settings_of("gate: {calls: 100, suite: [qa.jsonl], scorer: {use: judge, engine: fake, votes: 3}}\n")
    with pytest.raises(ConfigError) as error:
        bind.harmless(settings, settings.scenario("new", {"gate": wanted}))
    assert message in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"suite": ["traffic", "qa.jsonl", "failures"], "holdout": 0.3},
        {"scorer": {"use": "regex"}},
        {"scorer": {"use": "judge", "engine": "fake", "votes": 3}},
        {"calls": 50, "policy": "better"},
    ],
)
def test_a_request_chooses_among_what_is_there(wanted):
    settings = settings_of("gate: {calls: 100, suite: [qa.jsonl], scorer: {use: judge, engine: fake, votes: 3}}\n")
    bind.harmless(settings, settings.scenario("new", {"gate": wanted}))


def test_no_remote_by_request():
    settings = settings_of("")
    with pytest.raises(ConfigError, match="one remote"):
        bind.bind(settings, settings.scenario("new", {"releases": {"remote": "ssh://x"}}), lambda where: "the request")


def test_prices_are_found_by_model_or_engine_and_model():
    settings = settings_of(
        "engines:\n  up: {url: http://h/v1, model: m}\n  bare: {url: http://h/v1}\n"
        "prices:\n  fake: {prompt: 7, output: 8}\n  m: {prompt: 1, output: 2}\n"
        "  up/m: {prompt: 3, output: 4}\n  smollm2-135m: {prompt: 5, output: 6}\n"
        "scenarios: {a: {engine: up, recipe: record}, b: {engine: bare, recipe: record}}\n"
    )
    found = [gate.price(settings, settings.scenario(name)) for name in ("a", "b", "default")]
    assert found == [Price(3, 4), None, Price(7, 8)]
    local = settings.model_copy(update={"reef": settings.reef.model_copy(update={"engine": "local"})})
    assert gate.price(local, local.scenario("default")) == Price(5, 6)
    assert gate.price(local, local.scenario("default"), "another") is None


# --- put together -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def world():
    """A server's learner, by hand: its tools, and how a scenario is bound."""
    made = []

    async def build(text):
        boot = Boot(settings_of(text).model_dump(mode="json"), Path("run"), "http://x", None)
        settings, state = assemble._settings(boot), Path(".reef")
        state.mkdir(exist_ok=True)
        assemble.prepare(boot)
        store, board = SqliteStore(state / "records.db", owner="test"), assemble.open_board(state)
        await store.start()
        ledger, book = Ledger(state / "learn.db"), Book.open(state / "gate.db")
        chain, trainer = assemble.open_chain(state), FakeTrainer(state / "training")
        tools = Tools(store, chain, board, ledger, trainer, state / "training", Journal(board), book)
        made.append((tools, trainer))
        bound = bind.bind(settings, settings.scenario("default"), lambda where: "here")
        return tools, assemble._bind(boot, settings, bound, assemble._engines(boot, settings), tools)

    yield build
    for tools, trainer in made:
        await tools.store.close()
        await trainer.close()
        tools.ledger.close()
        tools.book.close()
        tools.board.close()


def record(number, words):
    body = json.dumps({"messages": [{"role": "user", "content": words}]}).encode()
    return Record(
        f"{number:032x}", "default", "r", "live", "chat", "complete", body, Timing(float(number)),
        choices=(Choice(0, "an answer", "stop"),),
    )  # fmt: skip


async def test_a_learner_holds_out_what_it_measures_on(world):
    tools, binding = await world(
        "gate: {policy: better, suite: [qa.jsonl, traffic], holdout: 0.4, scorer: {use: exact, answer: 'yes'}}\n"
    )
    assert isinstance(binding.evaluator, Better)
    for number in range(40):
        await tools.store.append(record(number, f"question {number}"))
        await tools.store.append(Report(f"rep_{number:032x}", "default", (f"{number:032x}",), 0.0, feedback="x"))
    work = Work.open(tools, binding, "harness")
    await work.pool.read(tools.store)
    tools.book.use("default", "r", "c")
    draw = await binding.evaluator.means.suite.draw(99)
    assert draw.name.startswith("qa.jsonl@")
    measured = {task.receipt for task in draw.tasks} - {None}
    learnt = {unit.record.id for unit in work.pool.units()}
    assert len(measured) + len(learnt) == 40
    assert not measured & learnt
    assert {drop.reason for drop in work.pool.dropped} == {"held out"}
    prompts = await binding.evaluator.means.prompts()
    assert {one.id for one in prompts[: len(measured)]} == measured, "the guards ask held-out prompts first"


async def test_what_trained_before_is_measured_on_no_more(world):
    tools, binding = await world(
        "gate: {policy: better, suite: traffic, holdout: 0.5, scorer: {use: exact, answer: 'yes'}}\n"
    )
    records = [record(number, f"question {number}") for number in range(20)]
    held = [one for one in records if binding.holdout.holds(one)]
    for one in records:
        await tools.store.append(one)
    tools.ledger.restore("default", "harness", "line", 1, [f"{held[0].id}:0"])
    draw = await binding.evaluator.means.suite.draw(99)
    assert {task.receipt for task in draw.tasks} == {one.id for one in held[1:]}


async def test_nothing_is_held_out_unless_it_is_asked_for(world):
    _, binding = await world("gate: {holdout: 0.9}\n")
    assert binding.holdout is None


async def test_a_promoted_failure_trains_no_more_and_is_a_task(world):
    tools, binding = await world("gate: {policy: better, suite: failures, scorer: {use: exact, answer: 'yes'}}\n")
    one = record(1, "question")
    await tools.store.append(one)
    assert not binding.holdout.holds(one)
    tools.book.promote("default", one.id, read(one).side, actor="me")
    assert binding.holdout.holds(one)
    draw = await binding.evaluator.means.suite.draw(99)
    assert [(task.receipt, task.protected) for task in draw.tasks] == [(one.id, True)]


async def test_a_spent_budget_is_told_once_a_month(world):
    tools, binding = await world("gate: {policy: better, suite: qa.jsonl, calls: 5}\n")
    for month in ("2026-11", "2026-11", "2026-12"):
        binding.evaluator.means.capped(month, f"the budget of {month}")
    acts = [(act.kind, act.ref, act.actor, act.reason) for act in tools.journal.after(0) if act.kind == "budget"]
    assert acts == [(("budget"), month, "gate", f"the budget of {month}") for month in ("2026-11", "2026-12")]


async def test_means_say_which_engine_answers_and_what_it_costs(world):
    _, binding = await world("prices: {fake: {prompt: 1, output: 2}}\n")
    means = binding.evaluator.means
    assert isinstance(means, Means)
    assert (means.scenario, means.price, means.suite) == ("default", Price(1, 2), None)
    assert means.engine is binding.engine


async def learn(tools, binding, steps=30):
    """Update until nothing moves."""
    work = Work.open(tools, binding, "harness")
    for _ in range(steps):
        if not await update_once(tools, binding, {"harness": work}):
            return work
        assert work.error is None
    raise AssertionError("it never rests")


async def tell(tools, numbers, rule):
    for number in numbers:
        await tools.store.append(record(number, f"question {number}"))
        await tools.store.append(Report(f"rep_{number:032x}", "default", (f"{number:032x}",), 0.0, feedback=rule))


async def test_a_better_harness_is_released_and_what_it_cost_is_written_down(world):
    Path("qa.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q{n}", "scorer": "contains", "answer": "short"}) + "\n" for n in range(40))
    )
    tools, binding = await world("gate: {policy: better, suite: qa.jsonl, options: {sameness: 1, suite: 0}}\n")
    ruled = lambda body: "Always be brief" in body["messages"][0]["content"]  # noqa: E731
    binding.engine._reply = lambda _, body: "short it is" if ruled(body) else f"no {body['messages'][-1]['content']}"
    await tell(tools, range(4), "Always be brief when you answer")
    work = await learn(tools, binding)
    head = tools.chain.head("default")
    assert head.seq == 1, work.last
    assert head.evaluation.verdict == "accept"
    assert head.evaluation.suite.startswith("qa.jsonl@")
    assert "40 tasks" in head.evaluation.suite
    assert head.evaluation.cost.calls == tools.book.spent("default").calls > 0
    assert tools.book.generation("default").number == 1
    await tell(tools, range(10, 14), "Answer in blue ink only")
    await learn(tools, binding)
    assert tools.chain.head("default").seq == 1
    assert tools.book.generation("default").number == 2, "the new incumbent is measured anew"
    assert tools.book.turn("default", "the next") >= 2


async def test_a_spent_budget_asks_nothing_and_says_so(world):
    tools, binding = await world("gate: {policy: better, suite: qa.jsonl, calls: 5}\n")
    tools.book.charge("default", Cost(5))
    await tell(tools, range(4), "Always be brief when you answer")
    await learn(tools, binding)
    [look] = [look for look in tools.ledger.looks("default") if look.look == 1]
    assert look.reason.startswith("Undecided: this month's evaluation budget of 5 calls is used up (5 spent)")
    assert tools.book.spent("default").calls == 5
    assert [act.kind for act in tools.journal.after(0)].count("budget") == 1


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"recipe": "harness_evolve", "proposer": "os:system"}, "proposer"),
        ({"recipe": "harness_evolve", "tasks": "/etc/passwd"}, "tasks"),
        ({"recipe": "gepa", "tasks": "mine.jsonl", "reflector": "os:system"}, "reflector"),
        ({"recipes": [{"use": "gepa", "tasks": "other.jsonl"}]}, "tasks"),
        ({"recipe": "opd", "teacher": "/somewhere"}, "teacher"),
    ],
)
def test_a_request_chooses_no_files_or_code_for_a_recipe(wanted, field):
    settings = settings_of("scenarios: {known: {recipe: gepa, tasks: mine.jsonl}}\n")
    with pytest.raises(ConfigError, match="a request cannot choose it") as error:
        bind.harmless(settings, settings.scenario("new", wanted))
    assert error.value.param == field
    bind.harmless(settings, settings.scenario("new", {"recipe": "gepa", "tasks": "mine.jsonl", "seed": 3}))


def test_a_recipe_s_tasks_lie_beside_the_file_and_are_read_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    file = tmp_path / "conf" / "reef.yaml"
    file.write_text(
        "reef: {recipe: gepa, tasks: mine.jsonl}\nscenarios: {other: {recipes: [{use: gepa, tasks: mine.jsonl}]}}\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = load(file, environment={})
    with pytest.raises(ConfigError, match=r"reef.yaml:1: tasks: cannot read the suite .*conf/mine.jsonl"):
        bind.check(loaded.settings, loaded.values, loaded.place)
    (tmp_path / "conf" / "mine.jsonl").write_text('{"prompt": "2+3?", "scorer": "number", "answer": 5}\n')
    bound = bind.check(loaded.settings, loaded.values, loaded.place)
    assert {one.recipes["harness"].tasks for one in bound.values()} == {str(tmp_path / "conf" / "mine.jsonl")}
