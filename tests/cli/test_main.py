"""The program: help of every command, exit codes, errors with a next step."""

import argparse
import http.server
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from reef.cli import main as program
from reef.cli import options, state
from reef.cli.main import main, parser
from reef.core.errors import ConfigError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("REEF_URL", "REEF_TOKEN", "REEF_UPSTREAM_URL", "REEF_UPSTREAM_MODEL"):
        monkeypatch.delenv(name, raising=False)


def commands():
    (action,) = (item for item in parser()._actions if isinstance(item, argparse._SubParsersAction))
    return action.choices


def test_every_command_is_there():
    promised = "serve run teach chat report config init scenarios records releases rollback status doctor"
    assert set(promised.split()) <= set(commands())


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: reef {name}")
    assert len(commands()[name].description) > 20


@pytest.mark.parametrize(
    "name", ["status", "scenarios", "releases", "records", "config", "doctor", "report", "rollback"]
)
def test_reading_commands_have_json(name, capsys):
    main([name, "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["srve"], ["serve", "--prot", "1"], ["rollback"], ["serve", "--reef.port"]])
def test_wrong_usage_is_2(arguments, capsys):
    assert main(arguments) == 2
    assert "reef" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["srve"], "there is no 'srve'; did you mean serve?"),
        (["token", "crate", "x"], "there is no 'crate'; did you mean create?"),
        (["export", "--shape", "stf"], "there is no 'stf'; did you mean sft?"),
        (["zzz"], "there is no 'zzz'; there are serve, run, "),
        (["records", "--sesion=x"], "reef records: error: there is no option --sesion here; did you mean --session?"),
        (["token", "create", "x", "--scenaro", "a"], "did you mean --scenario?"),
        (["serve", "--prot", "1"], "did you mean --reef.port?"),
        (["serve", "extra"], "there is no argument extra here; `reef serve --help` lists"),
        (["status", "--model", "x"], "there is no option --model here"),
    ],
)
def test_the_nearest_word_is_named(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_help_names_every_form_of_a_model(capsys):
    main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for form in ("openai/NAME", "anthropic/NAME", "ollama/NAME", "http(s)://", "model folder", "a hub id"):
        assert form in said


def test_a_broken_file_is_said_to_commands_that_do_not_need_all_of_it(capsys):
    Path("reef.yaml").write_text("reef: {bacth_size: 1}\nengines: {up: {url: http://h/v1, key_env: NO_SUCH_KEY}}\n")
    assert main(["token", "list"]) == 0
    assert capsys.readouterr().err.startswith("reef: warning: reef.yaml:1: reef.bacth_size is not a setting; did you")
    assert main(["releases", "--reef.port", "1"]) == 1
    assert capsys.readouterr().err.count("warning") == 1, "once, and nothing of keys that only a server needs"
    Path("reef.yaml").write_text("gaet: {}")
    assert main(["token", "list"]) == 2


def test_run_refuses_a_wrong_configuration_before_it_starts_anything(capsys):
    Path("serve.yaml").write_text("reef: {bacth_size: 1}\n")
    Path("run.py").write_text("")
    assert main(["run", "."]) == 2
    assert "reef.bacth_size is not a setting" in capsys.readouterr().err


def test_run_asks_the_driver_for_its_help_without_a_server(capfd):
    Path("serve.yaml").write_text("reef: {port: 1, model: no-such-model}\n")
    Path("run.py").write_text("import os, sys\nprint('driver', sys.argv[1:], os.environ.get('REEF_URL'))\n")
    assert main(["run", ".", "--", "--help"]) == 0
    assert capfd.readouterr().out == "driver ['--help'] None\n"
    assert main(["run", "nowhere"]) == 2
    assert "there is no folder nowhere" in capfd.readouterr().err
    Path("empty").mkdir()
    assert main(["run", "empty"]) == 2
    assert "holds no serve.yaml with a run.py beside it" in capfd.readouterr().err


@pytest.fixture
def provider():
    """Answers GET /v1/models with the status that `status` has."""

    class Answer(http.server.BaseHTTPRequestHandler):
        status = 200

        def do_GET(self):
            self.send_response(self.status if self.path == "/v1/models" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        Answer.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Answer
        server.shutdown()
        thread.join()


def test_doctor_asks_each_provider_once(capsys, provider, monkeypatch):
    def found():
        main(["doctor", "--json", "--model", provider.url, "--reef.port", "0"])
        rows = {item["what"]: item for item in json.loads(capsys.readouterr().out)["findings"]}
        return rows["engine upstream"]["ok"], rows["engine upstream"]["note"].split(" ", 1)[1]

    monkeypatch.setenv("REEF_UPSTREAM_API_KEY", "canary")
    assert found() == (True, "answers")
    provider.status = 404
    assert found() == (True, "answers (404 to GET /v1/models)")
    provider.status = 401
    assert found() == (False, "refused the key in REEF_UPSTREAM_API_KEY (401)")
    provider.status = 503
    assert found() == (False, "answers 503")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        provider.url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    assert found() == (False, "refused the connection; is it running?")


def test_teach_in_front_of_a_provider_says_at_once_what_it_needs(capsys):
    assert main(["teach", "--model", "http://127.0.0.1:1", "--reef.port", "1"]) == 2
    assert "`reef teach` needs a model of Reef's own" in capsys.readouterr().err


def banner(*words):
    from reef.cli import bind, serve

    args = parser().parse_args(["serve"])
    rest, args.overrides = options.overrides(words)
    args.model = rest[0] if rest else None
    loaded, bound = bind.load_checked(args)
    return "\n".join(serve._banner(loaded, loaded.settings, "http://h", None, bound["default"]))


def test_the_banner_fits_what_is_served():
    own = banner()
    assert " teach " in own
    assert '"model": "smollm2-135m"' in own
    assert "gate guarded" in own
    assert " more, " not in own
    front = banner("http://127.0.0.1:9")
    assert " teach " not in front
    assert "model     as each request names it (engine upstream at 127.0.0.1:9)" in front
    assert "recipe    record (nothing is learnt)" in front
    assert "chat --as MODEL" in front
    assert "aliases" not in front
    Path("reef.yaml").write_text("scenarios: {default: {}, a: {}, b: {}}")
    assert "scenario  default and 2 more, with recipes of their own: " in banner()
    Path("reef.yaml").write_text(
        "reef: {engine: up}\nengines: {up: {url: http://h/v1}}\nmodels: {fast: up/x, slow: up/y}"
    )
    front = banner()
    assert "aliases   fast (up/x), slow (up/y)" in front
    assert '"model": "fast"' in front


def test_a_server_whose_provider_is_away_starts_and_says_so(capsys, provider, monkeypatch):
    from reef.cli import serve

    def do_get(self):
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{"status": "not ready", "reason": "provider up at h:1 refused the connection"}')

    monkeypatch.setattr(provider, "do_GET", do_get)
    monkeypatch.setattr(serve, "PATIENCE", 0.0)
    serve._announce(provider.url, "BANNER", time.monotonic(), Path("logs")).join(20)
    said = capsys.readouterr().out.splitlines()
    assert said[1:4] == [
        "waiting: provider up at h:1 refused the connection",
        "BANNER",
        "warning: provider up at h:1 refused the connection",
    ]


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("reef 0.")


def test_overrides_are_taken_out_anywhere():
    rest, found = options.overrides(
        ["run", "--reef.port", "1", "FOLDER", "--gate.policy=a=b", "--json", "--", "--x.y", "z"]
    )
    assert rest == ["run", "FOLDER", "--json", "--", "--x.y", "z"]
    assert found == [("reef.port", "1"), ("gate.policy", "a=b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reef:\n  port: 1\ngaet: {}\n", "reef.yaml:3: gaet is not a setting; did you mean gate?"),
        ("reef:\n  bacth_size: 1\n", "reef.yaml:2: reef.bacth_size is not a setting; did you mean reef.batch_size"),
        (
            "reef:\n  engine: fake\n  batch_size: 1\n",
            "reef.yaml:3: reef.batch_size is not a setting, and the recipe record",
        ),
        ("reef:\n  recipe: soa\n", "reef.yaml:2: reef.recipe: there is no recipe 'soa'; did you mean sao?"),
        ("reef:\n  recipe: nowhere.x:Y\n", "reef.yaml:2: no module 'nowhere'"),
        ("gate:\n  policy: gaurded\n", "reef.yaml:2: gate.policy: there is no policy 'gaurded'; did you mean guarded?"),
        ("gate:\n  options: {drfit: 1}\n", "reef.yaml:2: unknown gate option 'drfit'"),
        ("gate:\n  policy: better\n  suite: gone.jsonl\n", "reef.yaml:3: cannot read the suite"),
        (
            "training:\n  backend: lcal\n",
            "reef.yaml:2: training.backend: there is no trainer 'lcal'; did you mean local?",
        ),
        ("engines:\n  up: {kind: upstrem}\n", "did you mean upstream?"),
        (
            "engines:\n  up: {url: http://h/v1, key_env: NO_SUCH_KEY}\n",
            "reef.yaml:2: the key of engine up is read from",
        ),
        ("engines:\n  local:\n    kind: local\n    options: {slts: 1}\n", "reef.yaml:4: engines.local.options.slts"),
        ("engines:\n  a: {kind: local}\n", "there can be one engine of kind local"),
        ("reef:\n  max_staleness: 2\n", "reef.yaml:2: reef.max_staleness is 2"),
        ("reef:\n  engine: up\n  recipe: sao\nengines: {up: {url: http://h/v1}}\n", "recipe: record"),
        (
            "reef:\n  recipe: sao\nengines:\n  local: {kind: local, options: {quantised: int4}}\n",
            "reef.yaml:2: the recipe sao trains weights, and engine local answers with quantised ones",
        ),
        ("reef:\n  recipes: [sao, {use: sao}]\n", "both improve the weights"),
        ("scenarios:\n  a:\n    recipe: soa\n", "reef.yaml:3: scenarios.a.recipe: there is no recipe 'soa'"),
        ("scenarios:\n  a:\n    model: other\n", "reef.yaml:3: a server trains one model"),
        ("reef:\n  host: 0.0.0.0\n  auth: none\n", "loopback only"),
    ],
)
@pytest.mark.parametrize("command", ["config", "serve"])
def test_configuration_errors_are_2_and_name_the_line(text, message, command, capsys):
    Path("reef.yaml").write_text(text)
    assert main([command]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["config", "serve", "doctor"])
def test_every_unknown_key_is_named_at_once_with_its_line(command, capsys):
    text = "reef:\n  bacth_size: 1\n  zzz: 2\ngaet: {}\ngate:\n  polcy: x\nscenarios:\n  a:\n    lerning_rate: 1\n"
    Path("reef.yaml").write_text(text)
    said = main([command]), capsys.readouterr()
    out = said[1].out if command == "doctor" else said[1].err
    assert said[0] == (1 if command == "doctor" else 2)
    for line, key in ((2, "reef.bacth_size"), (3, "reef.zzz"), (4, "gaet"), (6, "gate.polcy"), (9, "scenarios.a.lern")):
        assert f"reef.yaml:{line}: {key}" in out
    if command != "doctor":
        assert all(line.startswith("reef: reef.yaml:") for line in out.splitlines())
        assert len(out.splitlines()) == 5


def test_config_lists_every_setting_with_its_source(capsys):
    Path("reef.yaml").write_text("reef:\n  batch_size: 4\n  token: canary\n")
    assert main(["config", "--json", "--reef.port", "8901"]) == 0
    said = capsys.readouterr().out
    rows = {row["key"]: row for row in json.loads(said)}
    assert rows["reef.port"] == {"key": "reef.port", "value": 8901, "source": "command line"}
    assert rows["reef.batch_size"]["source"] == "reef.yaml:2"
    assert rows["reef.learning_rate"]["source"] == "default of SAORecipe"
    assert rows["gate.policy"]["source"] == "default"
    assert "canary" not in said
    assert main(["config"]) == 0
    assert "reef.yaml:2" in capsys.readouterr().out


def test_config_knows_the_fields_of_every_scenarios_recipes(capsys):
    Path("reef.yaml").write_text(
        "reef:\n  engine: fake\n  recipes:\n    - {use: sao, batch_size: 4}\n    - feedback_rules\n"
        "training: {backend: fake}\n"
        "scenarios:\n  a:\n    recipe: sao\n    learning_rate: 0.5\n  b: {}\n"
    )
    assert main(["config", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["reef.recipes[0].batch_size"]["value"], rows["reef.recipes[0].batch_size"]["source"]) == (
        4,
        "reef.yaml:4",
    )
    assert rows["reef.recipes[0].rank"]["source"] == "default of SAORecipe"
    assert rows["reef.recipes[1].batch_size"]["source"] == "default of FeedbackRules"
    assert "reef.batch_size" not in rows
    assert (rows["scenarios.a.learning_rate"]["value"], rows["scenarios.a.learning_rate"]["source"]) == (
        0.5,
        "reef.yaml:10",
    )
    assert rows["scenarios.a.rank"]["source"] == "default of SAORecipe"
    assert not any(key.startswith("scenarios.b.rank") for key in rows)


def test_the_founding_example_is_accepted(capsys):
    Path("f.yaml").write_text("reef: {recipe: recipes.sao.recipe:SAORecipe, batch_size: 1, max_staleness: 18}")
    assert main(["config", "-c", "f.yaml", "--json"]) == 0
    rows = {row["key"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert (rows["reef.batch_size"], rows["reef.max_staleness"]) == (1, 18)


def test_init_writes_a_file_that_loads(capsys):
    assert main(["init"]) == 0
    assert main(["config"]) == 0
    assert main(["init"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["init", "no/such/reef.yaml"]) == 2


def test_no_server_is_1_with_a_next_step(capsys):
    for command in (
        ["status"],
        ["scenarios"],
        ["records"],
        ["releases"],
        ["rollback", "0"],
        ["report", "a", "--score", "1"],
    ):
        assert main([*command, "--reef.port", "1"]) == 1
        assert "start one with `reef serve`" in capsys.readouterr().err
    assert main(["report", "a"]) == 2
    assert "--score" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "why"), [("{check", "is not JSON"), ("5", "must be a JSON object")])
def test_metadata_that_is_no_object_is_one_line(text, why, capsys):
    assert main(["report", "0" * 32, "--score", "1", "--metadata", text]) == 2
    said = capsys.readouterr().err
    assert said.startswith("reef: --metadata " + why)
    assert said.count("\n") == 1


def test_metadata_goes_with_a_report(capsys):
    sent = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            sent.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            answer = b'{"agent_record_id": "rep_1", "scenario": "default", "duplicate": false}'
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        check = '{"check": {"scorer": "number", "answer": 5}}'
        given = ["report", "0" * 32, "--score", "1", "--metadata", check]
        assert main([*given, "--reef.port", str(server.server_port)]) == 0
    check = {"check": {"scorer": "number", "answer": 5}}
    assert sent == [{"score": 1.0, "metadata": check, "references": ["0" * 32]}]


@pytest.mark.parametrize("score", ["nan", "inf", "-inf"])
def test_a_score_that_is_no_number_is_one_line(score, capsys):
    assert main(["report", "0" * 32, f"--score={score}"]) == 2
    said = capsys.readouterr().err
    assert said == f"reef: --score must be a finite number, not {score}; 0 and 1 are usual\n"


def test_serve_says_what_is_in_its_way(capsys):
    fake = ["serve", "--reef.engine", "fake", "--training.backend", "fake"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*fake, "--reef.port", str(port)]) == 1
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
    Path("file").write_text("")
    assert main([*fake, "--reef.state_dir", "file"]) == 1
    assert "cannot be written" in capsys.readouterr().err
    lock = state.claim(Path(".reef"))
    assert main([*fake, "--reef.port", "0"]) == 1
    assert "is in use by the server with process id" in capsys.readouterr().err
    lock.release()


def test_a_port_in_use_leaves_no_state_folder_behind(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["serve", "--reef.engine", "fake", "--training.backend", "fake", "--reef.port", str(port)]
        assert main(words) == 1
    assert not Path(".reef").exists()


def test_serve_says_what_is_wrong_with_the_model(capfd):
    Path("broken").mkdir()
    assert main(["serve", "--reef.port", "0", "--model", "./broken"]) == 2
    assert "broken" in capfd.readouterr().err
    assert main(["serve", "--reef.port", "0", "--model", "./gone"]) == 2
    assert "no model folder" in capfd.readouterr().err


def test_doctor_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["doctor", "--json", "--reef.engine", "fake", "--reef.port", port]) == 1
    found = {item["what"]: item for item in json.loads(capsys.readouterr().out)["findings"]}
    assert found["git"]["ok"] is False
    assert found["git-lfs"]["ok"] is None
    assert found["port"]["ok"] is False
    assert found["python"]["ok"] is True
    assert found["state folder"]["ok"] is True


def labels(text):
    return {line.split()[1]: line.split()[0] for line in text.splitlines() if len(line.split()) > 2}


def test_doctor_tells_what_is_missing_from_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["doctor", "--reef.engine", "fake", "--reef.port", port]) == 1
        found = labels(capsys.readouterr().out)
        assert (found["git"], found["port"], found["python"]) == ("MISSING", "problem", "ok")
        lock = state.claim(Path(".reef"))
        main(["doctor", "--reef.engine", "fake", "--reef.port", port])
        lock.release()
        said = capsys.readouterr().out
        assert labels(said)["port"] == "ok"
        assert "the server of this state folder runs now" in said


def test_doctor_goes_on_after_a_wrong_configuration(capsys, monkeypatch):
    monkeypatch.setattr("reef.cli.doctor._model", lambda name: {"path": "x", "name": name, "digest": "d"})
    Path("reef.yaml").write_text("gaet: {}\n")
    assert main(["doctor", "--json", "--reef.port", "0"]) == 1
    found = {item["what"]: item["ok"] for item in json.loads(capsys.readouterr().out)["findings"]}
    assert found["configuration"] is False
    assert found["defaults"] is None
    assert found["state folder"] is found["model"] is True
    assert isinstance(found["port"], bool)  # the default one, which may be in use here


def test_how_reef_is_started_here(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    program = tmp_path / ".venv" / "bin" / "reef"
    program.parent.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    assert options.program() == f"{program.with_name('python')} -m reef"
    program.write_text("")
    assert options.program() == ".venv/bin/reef"
    monkeypatch.chdir("/")
    assert options.program() == str(program).lstrip("/")
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/reef")
    assert options.program() == "reef"


def test_errors_never_leave_as_tracebacks(monkeypatch, capsys):
    def broken(*_):
        raise ConfigError("say what to do")

    monkeypatch.setattr(program.options, "overrides", broken)
    assert main(["status"]) == 2
    assert capsys.readouterr().err == "reef: say what to do\n"


def test_run_needs_a_driver(capsys):
    assert main(["run", "."]) == 2
    assert "run.py" in capsys.readouterr().err
    assert main(["run"]) == 2
    assert "required: FOLDER\n" in capsys.readouterr().err


def test_workers_is_a_setting_of_its_own(capsys):
    assert main(["serve", "--workers", "0"]) == 2
    assert "reef.workers" in capsys.readouterr().err
