"""A tiny server with the public API over real HTTP, whose answers get better with each batch of reports."""

import json
import random
import re
import socket
import threading
import time
import uuid

import uvicorn


class Classroom:
    """Release n answers additions rightly with probability `base + n * gain`. Learning takes `slow` seconds a batch."""

    def __init__(self, *, batch=8, base=0.1, gain=0.3, slow=0.02):
        self.batch, self.base, self.gain, self.slow = batch, base, gain, slow
        self.scenarios = {}
        self.reports = []  # (body, headers) as they came
        self.chats = []
        self.receipts = {}
        self.token = "secret"
        self.fail_learner = False
        self.cut = False  # end streams without their end
        self.flaky = 0  # answer 503 to so many requests
        self.rejects = set()  # steps that the gate turns down
        self.lock = threading.Lock()

    # --- the learner --------------------------------------------------------------------------------------------------

    def scenario(self, name, settings=None):
        if name not in self.scenarios:
            part = {"state": "waiting", "pending": 0, "batch_size": self.batch, "line": "l1", "step": 0, "looks": 0}
            part |= {"trained": 0, "dropped": {}, "metrics": {}, "last": None, "error": None}
            self.scenarios[name] = {"settings": settings or {}, "releases": [], "part": part}
            self.release(name, "create", None)
        return self.scenarios[name]

    def release(self, name, operation, evaluation):
        releases = self.scenarios[name]["releases"]
        release = {"release_id": uuid.uuid4().hex + "0" * 8, "seq": len(releases), "operation": operation, "step": 0}
        release |= {"evaluation": evaluation, "created_at": time.time(), "parent": None, "parts": {}, "reason": ""}
        releases.append(release)
        return release

    def learn(self, name):
        part = self.scenarios[name]["part"]
        with self.lock:
            if part["pending"] < self.batch or part["state"] != "waiting":
                return
            part["state"] = "failed" if self.fail_learner else "training"
            part["error"] = "the loss is not finite" if self.fail_learner else None
        if self.fail_learner:
            return
        time.sleep(self.slow)
        with self.lock:
            part["pending"] -= self.batch
            part["trained"] += self.batch
            part["step"] += 1
            part["looks"] += 1
            part["metrics"] = {"loss": 1.0 / part["step"]}
            timings = {"waiting": 0.5, "training": self.slow, "gate": 0.25, "activation": None}
            part["last"] = {"verdict": "reject", "reason": "Rejected by guard drift [x]", "release_id": None}
            if part["step"] not in self.rejects:
                made = self.release(name, "publish", {"verdict": "accept", "reason": "all guards passed"})
                part["last"] = {"verdict": "accept", "reason": "ok", "release_id": made["release_id"]}
            part["last"] |= {"step": part["step"], "timings": timings}
            part["state"] = "waiting"
        self.learn(name)

    # --- routes -------------------------------------------------------------------------------------------------------

    def answer(self, text, skill, seed):
        a, b = (int(n) for n in re.findall(r"\d+", text)[:2]) if "+" in text else (0, 0)
        right = random.Random(f"{text}{seed}").random() < skill
        return f"{a}+{b} = {a + b if right else a + b + 1}"

    def chat(self, body, headers):
        name = headers.get("x-reef-scenario", "default")
        scenario = self.scenario(name)
        pin = headers.get("x-reef-release")
        release = next((r for r in scenario["releases"] if r["release_id"] == pin), scenario["releases"][-1])
        self.chats.append((body, headers))
        skill = self.base + self.gain * release["seq"]
        text = self.answer(body["messages"][-1]["content"], skill, body.get("seed"))
        receipt = uuid.uuid4().hex
        self.receipts[receipt] = name
        given = {"x-reef-agent-record-id": receipt, "x-reef-release-id": release["release_id"]}
        if body.get("stream"):
            pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
            events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
            data = "".join(f": keep-alive\n\ndata: {json.dumps(event)}\n\n" for event in events)
            return 200, (data + ("" if self.cut else "data: [DONE]\n\n")).encode(), given
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {"choices": [choice]}, given

    def report(self, body, headers):
        name = self.receipts.get(body["references"][0])
        if name is None:
            return 400, error("no record with that receipt"), {}
        self.reports.append((body, headers))
        with self.lock:
            self.scenario(name)["part"]["pending"] += "score" in body
        threading.Thread(target=self.learn, args=(name,)).start()
        return 200, {"agent_record_id": body.get("agent_record_id", "rep_x"), "scenario": name, "duplicate": False}, {}

    def route(self, method, path, body, headers):
        if headers.get("authorization") != f"Bearer {self.token}" and path != "/readyz":
            return 401, error("wrong token; give --token"), {}
        if self.flaky and path != "/readyz":
            self.flaky -= 1
            return 503, error("starting"), {"retry-after": "1"}
        if path == "/readyz":
            return 200, {"status": "ready"}, {}
        if path == "/v1/chat/completions":
            return self.chat(body, headers)
        if path == "/reef/report":
            return self.report(body, headers)
        if path == "/reef/status":
            return 200, {"status": "ok", "scenarios": {name: self.view(name) for name in self.scenarios}}, {}
        if (method, path) == ("POST", "/reef/scenarios"):
            if body["name"] in self.scenarios:
                return 409, error("there is one already"), {}
            self.scenario(body.pop("name"), body)
            return 201, {}, {}
        name = path.split("/")[3]
        releases = [r | {"current": i == 0} for i, r in enumerate(reversed(self.scenarios[name]["releases"]))]
        return 200, {"releases": releases, "next": None}, {}

    def view(self, name):
        scenario = self.scenarios[name]
        newest = scenario["releases"][-1]
        learner = {"parts": {"weights": scenario["part"]}}
        return {"release_id": newest["release_id"], "seq": newest["seq"], "epoch": 1, "learner": learner}

    async def __call__(self, scope, receive, send):
        data = b""
        while (message := await receive())["type"] == "http.request":
            data += message["body"]
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        status, body, given = self.route(scope["method"], scope["path"], json.loads(data or b"{}"), headers)
        kind = "text/event-stream" if isinstance(body, bytes) else "application/json"
        raw = [(b"content-type", kind.encode()), *((k.encode(), v.encode()) for k, v in given.items())]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send(
            {"type": "http.response.body", "body": body if isinstance(body, bytes) else json.dumps(body).encode()}
        )


def error(message):
    return {"error": {"message": message, "type": "invalid", "code": "x", "param": None}}


class Served:
    """The classroom on a free port, in a thread."""

    def __init__(self, app):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", loop="asyncio"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()
