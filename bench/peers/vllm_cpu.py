"""vLLM's CPU build behind its own HTTP server, from a virtual environment of its own.

Knows: its command line, and how its answers are read token by token.
Does not know: what it is measured beside.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

START = 300.0  # seconds until it must answer


class Vllm:
    def __init__(self, root: Path, folder: Path, dtype: str = "bfloat16") -> None:
        self.name = "vllm" if dtype == "bfloat16" else f"vllm_{dtype}"
        self._dtype = dtype
        self._python, self._folder, self._seeds = self.python(root), folder, itertools.count()

    @staticmethod
    def python(root: Path) -> Path:
        return root / ".vllm" / "bin" / "python"

    def __enter__(self) -> Vllm:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        arguments = ["--model", str(self._folder), "--served-model-name", "m", "--enforce-eager"]
        place = [
            "--dtype",
            self._dtype,
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            "--max-num-seqs",
            "16",
            "--max-model-len",
            "8192",
        ]
        self._log = tempfile.TemporaryFile()  # closed with the server
        self._process = subprocess.Popen(
            [str(self._python), "-m", "vllm.entrypoints.openai.api_server", *arguments, *place],
            stdout=self._log,
            stderr=self._log,
            cwd=self._folder,  # a folder named vllm beside it would be taken for the package
            env={
                **os.environ,
                "VLLM_TARGET_DEVICE": "cpu",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": "",
            },
            start_new_session=True,
        )
        began = time.monotonic()
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - began > START:
                self._log.seek(0)
                log = self._log.read().decode(errors="replace")
                self.__exit__()
                raise RuntimeError(f"vLLM did not start:\n{log[-3000:]}")
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its workers too: a session of their own
        self._process.wait()
        self._log.close()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def answers(self, prompts: Sequence[str], ids: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self._answer(prompt, tokens), prompts))

    def _answer(self, prompt: str, tokens: int) -> list[float]:
        fields = {
            "model": "m",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": next(self._seeds),
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        times = [time.perf_counter()]
        connection.request("POST", "/v1/chat/completions", json.dumps(fields), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"vLLM refused: {answer.status} {answer.read()[:500]!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    times += [time.perf_counter()] * len(choice.get("token_ids") or ())
        connection.close()
        return times
